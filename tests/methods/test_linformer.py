"""The Linformer: shared tables, input shorter than the tables, another implementation. More is in `test_flurka.py`."""

import pytest
import torch
from linformer.linformer import LinformerSelfAttention
from torch.nn.functional import scaled_dot_product_attention

import hf_efficient_attn as hea
from each import close, differs
from instances import inputs, numbers, padding_mask

NUM_HEADS, HEAD_DIM = 3, 8
linformer = hea.functional.linformer_attention


def test_shared_tables():
    """Keys and values share any table. A value table is used where one is given."""
    tensors, (first, second) = inputs(q_len=40, dtype=torch.float64), (numbers(6, 40, seed=s) for s in (1, 2))
    shared = linformer(*tensors, projection_dim=6, key_projection=first)
    both = {"projection_dim": 6, "key_projection": first}
    close(shared, linformer(*tensors, share="none", **both, value_projection=first))
    other = linformer(*tensors, share="none", **both, value_projection=second)
    close(linformer(*tensors, **both, value_projection=second), other)
    assert differs(other, shared, 0.1)
    with pytest.raises(hea.UnsupportedAttentionError, match="40 keys are more than the 39 that value_projection"):
        linformer(*tensors, **both, value_projection=numbers(6, 39))


def test_as_many_means_as_tokens_give_exact_attention():
    tensors, mask = inputs(batch=2, q_len=40, dtype=torch.float64), padding_mask("left", 2, 40)
    exact = scaled_dot_product_attention(*tensors, attn_mask=mask[:, None, None])
    close(linformer(*tensors, attention_mask=mask, projection_dim=40), exact)
    close(linformer(*tensors, attention_mask=mask, projection_dim=256), exact)
    # The Linformer defines its own attention: with a Gaussian table it is never exact.
    drawn = linformer(*tensors, attention_mask=mask, projection_dim=256, init="gaussian")
    assert differs(drawn, exact, 0.1)


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
    assert differs(ours.mean(1, keepdim=True).expand_as(ours), ours, 0.1)
