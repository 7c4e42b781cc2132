"""The causal form of nearfar on accelerators: the naive form, causality, gradients, precision, and its error."""

import pytest
import torch
from torch import Tensor

from hf_efficient_attn.ops.accelerator import use_backend
from hf_efficient_attn.ops.causal_coreset import causal_coreset_attention
from hf_efficient_attn.ops.causal_coreset_plan import CausalCoresetOptions
from hf_efficient_attn.ops.causal_coreset_plan import split_columns as split_on_cpu
from hf_efficient_attn.ops.causal_landmarks import causal_landmark_attention
from hf_efficient_attn.ops.causal_landmarks_naive import causal_landmark_naive
from hf_efficient_attn.ops.causal_landmarks_plan import LandmarkOptions, split_columns
from test_causal_coreset import SCALE, error, exact, tensors


@pytest.fixture(autouse=True)
def library_form():
    with use_backend("library"):
        yield


def options(columns: int = 16, **changes: float) -> LandmarkOptions:
    """The options for a budget: 16 columns have blocks of 4 tokens, units of 64 and 72 exact positions."""
    return LandmarkOptions(**split_columns(columns))._replace(**changes)  # type: ignore[arg-type]


def attend(query: Tensor, key: Tensor, value: Tensor, chosen: LandmarkOptions, scale: float = SCALE) -> Tensor:
    return causal_landmark_attention(query, key, value, chosen, scale=scale)


@pytest.mark.parametrize(("columns", "length"), [(1, 70), (5, 131), (8, 163), (16, 205), (18, 74)])
@pytest.mark.parametrize("changes", [{}, {"temperature": 1.2}, {"ridge": 3.0}, {"seed": 3}], ids=str)
def test_the_fast_form_equals_the_naive_form(columns: int, length: int, changes: dict[str, float]) -> None:
    """In float64, with up to six epochs and lengths that are no multiple of a block."""
    inputs, chosen = tensors(length, 2), options(columns, **changes)
    expected = causal_landmark_naive(*inputs, chosen, scale=SCALE)
    torch.testing.assert_close(attend(*inputs, chosen), expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("scale", [0.0, -SCALE])
def test_any_scale(scale: float) -> None:
    inputs, chosen = tensors(150, 2), options(8)
    expected = causal_landmark_naive(*inputs, chosen, scale=scale)
    torch.testing.assert_close(attend(*inputs, chosen, scale), expected, rtol=1e-7, atol=1e-8)


def test_the_first_positions_and_short_sequences_are_exact() -> None:
    inputs, chosen = tensors(150), options()
    out, expected = attend(*inputs, chosen), exact(*inputs)
    assert chosen.num_exact == 72
    torch.testing.assert_close(out[:, :72], expected[:, :72])
    assert error(out[:, 72:], expected[:, 72:]) > 0.01
    for length in (60, 72):
        torch.testing.assert_close(attend(*(x[:, :length] for x in inputs), chosen), expected[:, :length])


@pytest.mark.parametrize("cut", [20, 25, 30, 60, 72, 73, 80, 130, 137, 200])
def test_no_choice_sees_the_future(cut: int) -> None:
    """Large later tokens do not change one bit, and neither the output nor the epochs depend on the length."""
    inputs, chosen = tensors(210), options()
    out = attend(*inputs, chosen)
    later = [20 * x for x in tensors(210, seed=1)]
    changed = [torch.cat((x[:, :cut], y[:, cut:]), 1) for x, y in zip(inputs, later, strict=True)]
    assert torch.equal(attend(*changed, chosen)[:, :cut], out[:, :cut])
    torch.testing.assert_close(attend(*(x[:, :cut] for x in inputs), chosen), out[:, :cut], rtol=1e-9, atol=1e-9)


def test_gradients_agree_with_finite_differences() -> None:
    """Along random directions, with clusters fixed; small steps do not change them here."""
    inputs, chosen = [x.requires_grad_() for x in tensors(155)], options()
    out = attend(*inputs, chosen)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad((out * weights).sum(), inputs)
    for i, (x, gradient) in enumerate(zip(inputs, gradients, strict=True)):
        direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(2 + i), dtype=torch.float64)
        moved = []
        for step in (-1e-6, 1e-6):
            given = [y.detach() + step * direction if j == i else y.detach() for j, y in enumerate(inputs)]
            moved.append((attend(*given, chosen) * weights).sum())
        difference = (moved[1] - moved[0]) / 2e-6
        torch.testing.assert_close((gradient * direction).sum(), difference, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 10.0, 60.0])
def test_outputs_and_gradients_are_finite(dtype: torch.dtype, factor: float) -> None:
    """With logits of up to 1e4. In half precision the output is close to that of float64."""
    query, key, value = tensors(165, dtype=torch.float32)
    leaves = [x.to(dtype).requires_grad_() for x in (factor * query, factor * key, value)]
    out = attend(*leaves, options())
    assert out.dtype == dtype
    assert torch.isfinite(out).all()
    if dtype != torch.float16:
        assert all(torch.isfinite(x).all() for x in torch.autograd.grad(out.float().sum(), leaves))
    if factor == 1.0:
        reference = attend(*(x.detach().double() for x in leaves), options())
        assert error(out.detach(), reference) < {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]


def test_a_constant_in_all_keys_changes_nothing() -> None:
    query, key, value = tensors(150)
    moved = attend(query, key + 5.0, value, options())
    torch.testing.assert_close(moved, attend(query, key, value, options()), rtol=1e-7, atol=1e-7)


def test_equal_keys_are_represented_exactly() -> None:
    """Where all keys equal one of three, which is what the landmarks are, up to the ridge."""
    query, key, value = tensors(200)
    key = key[:, :3].repeat(1, 67, 1)[:, :200]
    out = attend(query, key, value, options(ridge=1e-9))
    assert error(out, exact(query, key, value)) < 1e-4


def test_the_error_is_that_of_the_form_for_the_cpu() -> None:
    """On keys in clusters, after the positions that are exact in one of them only."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(4, 40, 8, generator=generator) * 1.5
    index = torch.randint(40, (4, 1000), generator=generator)
    key = centers.gather(1, index[..., None].expand(-1, -1, 8)) + 0.5 * torch.randn(4, 1000, 8, generator=generator)
    query, _, value = tensors(1000, dtype=torch.float32)
    expected = exact(query, key, value)
    ours = error(attend(query, key, value, options(32))[:, 150:], expected[:, 150:])
    with use_backend("cpu"):
        theirs = causal_coreset_attention(query, key, value, CausalCoresetOptions(**split_on_cpu(32)), scale=SCALE)
    assert ours < 1.1 * error(theirs[:, 150:], expected[:, 150:])


def test_dropout_keeps_the_mean() -> None:
    inputs, chosen = tensors(90, batch_heads=1, dtype=torch.float32), options()
    torch.manual_seed(0)
    draws = causal_landmark_attention(*(x.expand(600, -1, -1) for x in inputs), chosen, scale=SCALE, dropout_p=0.2)
    expected = attend(*inputs, chosen)[0]
    assert not torch.equal(draws[0], draws[1])
    assert error(draws.mean(0), expected.double()) < 0.05
