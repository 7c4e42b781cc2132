"""The Linformer: its formula, its tables, input shorter than the tables, and another implementation."""

import pytest
import torch
from linformer.linformer import LinformerSelfAttention
from torch.nn.functional import scaled_dot_product_attention

import hf_efficient_attn as hea
import promises
from hf_efficient_attn.methods import get_method
from instances import Instance, inputs, numbers, padding_mask, relative_error

NUM_HEADS, HEAD_DIM = 3, 8
linformer = hea.functional.linformer_attention
GAUSSIAN = Instance(
    "linformer",
    {"projection_dim": 16, "init": "gaussian", "share": "none"},
    small={"projection_dim": 4},
    averages=False,
)


def close(ours, other, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(ours, other, rtol=tolerance, atol=tolerance)


def tables(length: int, **options) -> dict:
    """The tables that conversion starts from."""
    sizes = {"num_heads": NUM_HEADS, "head_dim": HEAD_DIM, "value_dim": HEAD_DIM, "max_length": length}
    return get_method("linformer").initial_parameters(hea.LinformerConfig(**options), **sizes)


# --- tables ---


@pytest.mark.parametrize(("count", "length"), [(1, 5), (4, 12), (5, 13), (8, 3), (6, 6)])
def test_tables_of_means(count, length):
    start = tables(length, projection_dim=count)
    assert list(start) == ["key_projection"]
    assert start["key_projection"].dtype == torch.float32
    x = numbers(length, 2)
    parts = [p.mean(0) if len(p) else p.sum(0) for p in x.tensor_split(count)]
    close(start["key_projection"].double() @ x, torch.stack(parts), 1e-6)


def test_tables_of_a_gaussian():
    options = {"projection_dim": 50, "init": "gaussian", "share": "none"}
    start = tables(4000, **options)
    assert list(start) == list(hea.method_info("linformer").learned_parameters)
    for table in start.values():
        assert table.shape == (50, 4000)
        assert table.mean().abs() < 4 / (50 * 50 * 4000) ** 0.5
        assert table.std().item() == pytest.approx(50**-0.5, rel=0.01)
    key_table, value_table = (x.flatten() for x in start.values())
    assert torch.corrcoef(torch.stack((key_table, value_table)))[0, 1].abs() < 0.01
    # Longer tables begin with the shorter ones. Another seed gives other tables. `max_length` sets their length.
    assert torch.equal(tables(30, **options)["key_projection"], start["key_projection"][:, :30])
    assert not torch.equal(tables(30, **options, seed=1)["key_projection"], start["key_projection"][:, :30])
    assert tables(30, **options, max_length=70)["value_projection"].shape == (50, 70)


def test_functional_form_makes_tables_for_the_length_of_its_input():
    tensors = inputs(num_heads=NUM_HEADS, q_len=70, dtype=torch.float64)
    for options in ({}, {"init": "gaussian"}, {"share": "none", "init": "gaussian", "seed": 2}):
        given = tables(70, projection_dim=9, **options)
        config = hea.LinformerConfig(projection_dim=9, **options)
        assert torch.equal(hea.attention(config, *tensors), hea.attention(config, *tensors, **given))


def test_shared_tables():
    """Keys and values share any table. A value table is used where one is given."""
    tensors, (first, second) = inputs(q_len=40, dtype=torch.float64), (numbers(6, 40, seed=s) for s in (1, 2))
    shared = linformer(*tensors, projection_dim=6, key_projection=first)
    both = {"projection_dim": 6, "key_projection": first}
    close(shared, linformer(*tensors, share="none", **both, value_projection=first))
    other = linformer(*tensors, share="none", **both, value_projection=second)
    close(linformer(*tensors, **both, value_projection=second), other)
    assert relative_error(other, shared) > 0.1


def test_refusals():
    tensors = inputs(q_len=40)
    with pytest.raises(hea.UnsupportedAttentionError, match=r"40 keys are more than the 30 .*max_length=40 or more"):
        linformer(*tensors, max_length=30)
    with pytest.raises(hea.UnsupportedAttentionError, match="40 keys are more than the 39 that value_projection"):
        linformer(*tensors, projection_dim=6, key_projection=numbers(6, 40), value_projection=numbers(6, 39))
    for shape in ((5, 40), (40,), (1, 6, 40)):
        with pytest.raises(hea.UnsupportedAttentionError, match="does not suit projection_dim=6"):
            linformer(*tensors, projection_dim=6, key_projection=numbers(*shape))
    with pytest.raises(hea.UnsupportedAttentionError, match="no causal form"):
        linformer(*tensors, is_causal=True)


# --- formula ---


@pytest.mark.parametrize("share", ["kv", "none"])
def test_formula_of_the_paper(share):
    """Eq. 7, for any tables made for the length of the sequence."""
    query, key, value = inputs(batch=2, num_heads=NUM_HEADS, q_len=50, kv_len=70, value_dim=5, dtype=torch.float64)
    first, second = numbers(9, 70, seed=1), numbers(9, 70, seed=2)
    learned = {"key_projection": first} | ({} if share == "kv" else {"value_projection": second})
    exact = scaled_dot_product_attention(query, first @ key, (first if share == "kv" else second) @ value)
    close(linformer(query, key, value, projection_dim=9, share=share, **learned), exact)


@pytest.mark.parametrize("kind", ["left", "right", "holes"])
def test_means_of_segments_that_are_not_full(kind):
    """Segments of ten valid tokens, counted from the first valid one. The last segment may have fewer."""
    tensors, mask = inputs(batch=3, q_len=70, dtype=torch.float64), padding_mask(kind, 3, 70, 4)
    out = linformer(*tensors, attention_mask=mask, projection_dim=20, max_length=200)
    for b in range(3):
        query, key, value = (x[b] for x in tensors)
        means = [torch.stack([p.mean(1) for p in x[:, mask[b]].split(10, 1)], 1) for x in (key, value)]
        close(out[b], scaled_dot_product_attention(query, *means), 1e-6)


def test_as_many_means_as_tokens_give_exact_attention():
    tensors, mask = inputs(batch=2, q_len=40, dtype=torch.float64), padding_mask("left", 2, 40)
    exact = scaled_dot_product_attention(*tensors, attn_mask=mask[:, None, None])
    close(linformer(*tensors, attention_mask=mask, projection_dim=40), exact)
    close(linformer(*tensors, attention_mask=mask, projection_dim=256), exact)
    # The Linformer defines its own attention: with a Gaussian table it is never exact.
    drawn = linformer(*tensors, attention_mask=mask, projection_dim=256, init="gaussian")
    assert relative_error(drawn, exact) > 0.1


@pytest.mark.parametrize("length", [1, 9, 30, 50])
def test_input_shorter_than_the_tables(length):
    """Projections of one sign stay weighted averages of the valid tokens. Others keep their Euclidean norm."""
    query, key, value = inputs(q_len=length, dtype=torch.float64)
    positive, mask = numbers(1, 50).abs(), torch.arange(50)[None] < length
    table = torch.cat((positive, -2.0 * positive))
    weights = positive[:, :length] * (positive.sum() / positive[:, :length].sum())
    projected = [torch.cat((weights @ x, -2.0 * weights @ x), 2) for x in (key, value)]
    exact = scaled_dot_product_attention(query, *projected)
    options = {"projection_dim": 2, "key_projection": table}
    close(linformer(query, key, value, **options), exact)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 50 - length)) for x in (query, key, value)]
    close(linformer(*padded, **options, attention_mask=mask)[:, :, :length], exact)
    # A projection whose weights sum to 0.
    signs = torch.ones(1, 50, dtype=torch.float64)
    signs[:, 1::2] = -1.0
    table = signs * torch.arange(50, 0, -1).repeat_interleave(2)[:50]
    part = table[:, :length]
    expected = part * (table.norm() / part.norm()) @ value
    out = linformer(query, key, value, projection_dim=1, key_projection=table)
    close(out, expected.expand_as(out))


def test_gradients_of_tables():
    """Gradients of both tables agree with finite differences, also for input shorter than the tables."""
    query, key, value = inputs(batch=2, num_heads=2, q_len=9, head_dim=3, dtype=torch.float64)
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    leaves = [numbers(4, 12, seed=s).requires_grad_() for s in (1, 2)]

    def output(first, second):
        return linformer(
            query, key, value, attention_mask=mask, projection_dim=4, key_projection=first, value_projection=second
        )

    assert torch.autograd.gradcheck(output, leaves)
    shared = numbers(4, 9).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: linformer(query, key, value, projection_dim=4, key_projection=x), [shared]
    )
    assert torch.autograd.grad(output(*leaves).sum(), leaves)[0][:, 9:].abs().max() > 0
    means = tables(12, projection_dim=4)["key_projection"].requires_grad_()
    linformer(query.float(), key.float(), value.float(), attention_mask=mask, projection_dim=4,
              key_projection=means).square().sum().backward()  # fmt: skip
    assert means.grad.isfinite().all()
    assert means.grad.abs().sum() > 0


# --- promises, with Gaussian tables ---


@pytest.mark.parametrize("kind", ["left", "right", "holes", "empty"])
@pytest.mark.parametrize("length", [1, 7, 60])
def test_gaussian_tables_keep_the_promises_of_masks(kind, length):
    promises.check_shapes(GAUSSIAN, False, kind, batch=2, q_len=length, value_dim=5)
    promises.check_masked_keys(GAUSSIAN, False, kind, batch=2, q_len=length)
    promises.check_batch(GAUSSIAN, False, kind, q_len=length)


def test_gaussian_tables_keep_the_other_promises():
    promises.check_masked_gradients(GAUSSIAN, False)
    promises.check_queries_without_keys(GAUSSIAN, False)
    promises.check_gradients(GAUSSIAN, False, 13, 3)
    promises.check_compiles(GAUSSIAN, False, "eager")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        promises.check_finite(GAUSSIAN, False, dtype, 1e4, False)
    fixed = Instance("linformer", {**GAUSSIAN.hyperparameters, "max_length": 300}, averages=False)
    for length, before, after in ((1, 0, 4), (10, 9, 20), (50, 30, 0), (130, 90, 80)):
        promises.check_padding(fixed, False, length, before, after)
    for length in (1, 50, 200):
        promises.check_holes(fixed, False, length)


@pytest.mark.parametrize("kind", ["none", "left", "right", "holes"])
def test_gaussian_tables_in_the_readable_form(kind):
    tensors, mask = inputs(batch=2, q_len=60, value_dim=5, dtype=torch.float64), padding_mask(kind, 2, 60)
    for options in ({}, {"max_length": 90}, {"share": "kv"}):
        config = GAUSSIAN.config(**options)
        expected = hea.naive_attention(config, *tensors, attention_mask=mask)
        close(hea.attention(config, *tensors, attention_mask=mask), expected)


# --- another implementation ---


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("length", [64, 40])
def test_linformer_package(length, share):
    """The `linformer` package with the same weights.

    With shared tables that package also uses the keys as values. For shorter input it does not rescale the projections.
    """
    torch.manual_seed(0)
    size = NUM_HEADS * HEAD_DIM
    layer = LinformerSelfAttention(size, 64, k=12, heads=NUM_HEADS, share_kv=share).double().eval()
    layer.to_out = torch.nn.Identity()
    hidden_states = 3.0 * numbers(2, length, size, seed=1)
    with torch.no_grad():
        theirs = layer(hidden_states)
        query, key, value = (
            f(hidden_states).unflatten(2, (NUM_HEADS, HEAD_DIM)).transpose(1, 2)
            for f in (layer.to_q, layer.to_k, layer.to_k if share else layer.to_v)
        )
        # Tables as long as the input are not rescaled.
        learned = {"key_projection": layer.proj_k[:length].t()}
        if not share:
            learned["value_projection"] = layer.proj_v[:length].t()
        options = {"projection_dim": 12, "share": "kv" if share else "none"}
        ours = linformer(query, key, value, **options, **learned).transpose(1, 2).flatten(2)
    close(ours, theirs)
    assert relative_error(ours, ours.mean(1, keepdim=True).expand_as(ours)) > 0.1
