"""The causal form of a weighted coreset: what each of its parts is for. The promises compare it with the naive form."""

import pytest
import torch
from torch import Tensor

from hf_efficient_attn.ops.coreset_causal import (
    CausalCoresetOptions,
    causal_coreset_attention,
    causal_coreset_naive,
    split_columns,
)
from instances import relative_error

SCALE = 8**-0.5


def tensors(length: int, batch_heads: int = 4, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key with a mean, and value: (BH, N, 8), (BH, N, 8), (BH, N, 5)."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(batch_heads, length, size, generator=generator, dtype=dtype) for size in (8, 8, 5))
    return [1.5 * query, 1.5 * key + 0.5, value]


def options(columns: int, **changes: float) -> CausalCoresetOptions:
    return split_columns(columns)._replace(**changes)  # type: ignore[arg-type]


def exact(query: Tensor, key: Tensor, value: Tensor, scale: float = SCALE) -> Tensor:
    """Causal softmax attention, in float64."""
    scores = scale * query.double() @ key.double().mT
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ value.double()


def test_the_first_positions_and_short_sequences_are_exact() -> None:
    """Up to `num_exact` positions the output is softmax attention; after that it is not."""
    inputs, chosen = tensors(60), options(16)
    out, expected = causal_coreset_attention(*inputs, chosen, scale=SCALE), exact(*inputs)
    assert chosen.num_exact == 24
    torch.testing.assert_close(out[:, :24], expected[:, :24])
    assert relative_error(out[:, 24:], expected[:, 24:]) > 0.01
    short = causal_coreset_attention(*(x[:, :20] for x in inputs), chosen, scale=SCALE)
    torch.testing.assert_close(short, expected[:, :20])


def test_a_constant_in_all_keys_and_equal_keys() -> None:
    """Softmax does not see a constant, and the coreset removes it. Where all keys equal a landmark it is exact."""
    query, key, value = tensors(200)
    out, moved = (causal_coreset_attention(query, key + x, value, options(32), scale=SCALE) for x in (0.0, 5.0))
    torch.testing.assert_close(moved, out, rtol=1e-7, atol=1e-7)
    key = key[:, :3].repeat(1, 67, 1)[:, :200]
    out = causal_coreset_attention(query, key, value, options(64), scale=SCALE)
    assert relative_error(out, exact(query, key, value)) < 1e-4


def test_near_keys_by_content_serve_heads_that_look_far_back() -> None:
    """Each query attends to the token 500 positions before it, which landmarks do not tell from others."""
    generator = torch.Generator().manual_seed(0)
    topic = torch.randn(2, 16, 32, generator=generator)[:, torch.randint(16, (1200,), generator=generator)]
    key = 4.0 * torch.nn.functional.normalize(topic + 0.3 * torch.randn(2, 1200, 32, generator=generator), dim=2)
    query, value = key.roll(500, 1) * 1.5, torch.randn(2, 1200, 8, generator=generator)
    chosen, expected = options(96), exact(query, key, value, 1.0)
    found = [causal_coreset_attention(query, key, value, chosen._replace(num_near=w), scale=1.0) for w in (0, 36)]
    errors = [relative_error(out[:, 600:], expected[:, 600:]) for out in found]
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize("seed", range(3))
def test_tiny_far_weights_do_not_round_the_near_field_away(seed: int) -> None:
    """Lengths that differ by orders of magnitude give landmarks whose weights are tiny beside their scores."""
    inputs, chosen = tensors(60, seed=seed), options(4)
    sizes = [3.0 ** torch.randn(4, 60, 1, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    given = [x * size for x, size in zip(inputs, sizes, strict=True)]
    expected = causal_coreset_naive(*given, chosen, scale=1.7)
    out = causal_coreset_attention(*given, chosen, scale=1.7)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))
