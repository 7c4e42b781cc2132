"""The methods against other implementations with the same weights, features and inputs, in float64."""

from functools import partial

import pytest
import torch
from nystrom_attention.nystrom_attention import NystromAttention
from performer_pytorch.performer_pytorch import causal_linear_attention_noncuda, linear_attention, softmax_kernel
from torch.nn.functional import normalize
from transformers import LongformerConfig, ReformerConfig
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

import hf_efficient_attn as hea
from each import close, differs
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.features.maps import orthogonal_features
from hf_efficient_attn.ops.index import inverse
from hf_efficient_attn.ops.sampled_keys.hashing import NearField, bucket_codes, rounds_attention
from instances import inputs, numbers

NUM_HEADS, HEAD_DIM = 2, 8
SIZE = NUM_HEADS * HEAD_DIM


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def layer_of(cls, *arguments, **options):
    """A layer without the projection after attention."""
    layer = cls(*arguments, **options).double().eval()
    if hasattr(layer, "to_out"):
        layer.to_out = torch.nn.Identity()
    return layer


def hidden_states(length: int, batch: int = 2, size: int = SIZE):
    return 3.0 * numbers(batch, length, size, seed=1)


def heads(*tensors, head_dim: int = HEAD_DIM):
    """(B, N, H D) -> (B, H, N, D), each."""
    return [x.unflatten(2, (-1, head_dim)).transpose(1, 2) for x in tensors]


def same(ours, theirs, mask=True, tolerance: float = 1e-9) -> None:
    """Compare ours (B, H, N, D) with theirs (B, N, H D) at valid tokens. The tokens have different outputs."""
    ours = ours.transpose(1, 2).flatten(2)
    close(ours[mask], theirs[mask], tolerance)
    assert differs(ours.mean(1, keepdim=True).expand_as(ours), ours, 0.1)


@pytest.mark.parametrize("global_tokens", [0, 1, 3])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("window", [4, 16])
def test_longformer_of_transformers(window, padding, global_tokens):
    """With the same weights in both sets of projections. It computes the softmax in float32."""
    config = LongformerConfig(hidden_size=SIZE, num_attention_heads=NUM_HEADS, attention_window=[2 * window])
    layer, x = layer_of(LongformerSelfAttention, config, 0), hidden_states(96)
    for name in ("query", "key", "value"):
        getattr(layer, f"{name}_global").load_state_dict(getattr(layer, name).state_dict())
    mask = torch.arange(96) < torch.tensor([[96], [96 - padding]])
    # Its own encoding: a negative number is padding, and a positive one is a global token.
    codes = torch.zeros(2, 96, dtype=torch.float64)
    codes[:, :global_tokens] = 10000.0
    codes[~mask] = -10000.0
    masks = {"is_index_masked": codes < 0, "is_index_global_attn": codes > 0, "is_global_attn": global_tokens > 0}
    theirs = layer(x, attention_mask=codes, **masks)[0]
    options = {"attention_mask": mask, "window_size": window, "global_tokens": global_tokens}
    ours = hea.attention("longformer", *heads(layer.query(x), layer.key(x), layer.value(x)), **options)
    same(ours, theirs, mask, 1e-5)


@pytest.mark.parametrize(("count", "batch", "residual", "steps"), [(1, 1, False, 6), (1, 1, True, 6), (3, 2, True, 20)])
def test_nystrom_attention(count, batch, residual, steps):
    """One head of one batch row, since that package starts the iteration from norms of the whole batch.

    After convergence it does not matter where the iteration started.
    """
    options = {"num_landmarks": 8, "pinv_iterations": steps}
    sizes = {"dim_head": HEAD_DIM, "heads": count, "residual": residual, "residual_conv_kernel": 5, **options}
    layer = layer_of(NystromAttention, count * HEAD_DIM, **sizes)
    x = hidden_states(72, batch, count * HEAD_DIM)
    if residual:
        options |= {"conv_kernel_size": 5, "conv_weight": layer.res_conv.weight[:, 0, :, 0]}
    ours = hea.attention("nystromformer", *heads(*layer.to_qkv(x).chunk(3, -1)), **options)
    same(ours, layer(x), tolerance=1e-9 if count == 1 else 1e-6)


def chunk_plan(codes: torch.Tensor, mask, size: int, before: int, after: int) -> NearField:
    """The plan in which each chunk attends to itself, `before` chunks before it and `after` chunks after it."""
    largest = torch.iinfo(codes.dtype).max
    order = (codes if mask is None else codes.masked_fill(~mask[:, None], largest)).argsort(dim=-1, stable=True)
    chunks = codes.shape[2] // size
    span = (1 + before + after) * size
    start = ((torch.arange(chunks) - before) * size).clamp(0, codes.shape[2] - span)
    count = codes.shape[2] if mask is None else mask.sum(1, keepdim=True)
    return NearField(order, order, start.expand(*codes.shape[:2], -1), size, span, count, count)


@pytest.mark.parametrize("padding", [0, 21])
@pytest.mark.parametrize(("before", "after"), [(1, 0), (1, 1), (0, 0)])
def test_lsh_attention_of_transformers(before, after, padding):
    """One round with our buckets (it counts pairs of several rounds more than once). Its keys are already scaled.

    Its chunks attend to themselves and to chunks before and after, in a circle.
    """
    sizes = {"hidden_size": SIZE, "num_attention_heads": NUM_HEADS, "attention_head_size": HEAD_DIM}
    chunks = {"lsh_attn_chunk_length": 8, "lsh_num_chunks_before": before, "lsh_num_chunks_after": after}
    config = ReformerConfig(**sizes, **chunks, num_buckets=[4, 6], is_decoder=False)
    layer, x = layer_of(LSHSelfAttention, config, 0), hidden_states(96)
    key_mask = torch.arange(96) < torch.tensor([[96], [96 - padding]])
    query, value = (y.flatten(0, 1) for y in heads(layer.query_key(x), layer.value(x)))
    mask = key_mask.repeat_interleave(NUM_HEADS, 0) if padding else None
    codes = bucket_codes(query, numbers(3, 1, 2, HEAD_DIM, seed=2), torch.tensor([[2, 3]]))
    plan = chunk_plan(codes, mask, 8, before, after)
    ours = rounds_attention(query, normalize(query, dim=-1), value, plan, others=True, scale=1.0)
    # Its padding has its own bucket, after all others.
    codes = codes if mask is None else codes.masked_fill(~mask[:, None], 24)
    theirs = layer(x, attention_mask=key_mask, buckets=codes.view(2, NUM_HEADS, 96))[0]
    # Queries whose chunks have all neighbours, so that the circle has no effect.
    chunk = inverse(plan.query_order.flatten(0, 1)).view_as(plan.query_order) // plan.block_q
    inner = ((chunk >= before) & (chunk < plan.start.shape[2] - after)).all(1) | (before + after == 0)
    inner = inner & key_mask.repeat_interleave(NUM_HEADS, 0)
    assert inner.float().mean() > 0.6
    close(ours[inner], heads(theirs)[0].flatten(0, 1)[inner], 1e-5)


# Performer of performer-pytorch, whose epsilon is 0 here.


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_through_features_of_performer_pytorch(is_causal):
    """Its causal form on the CPU computes chunks of the sequence one after the other."""
    query, key, value = inputs(batch=2, num_heads=3, q_len=280, head_dim=HEAD_DIM, dtype=torch.float64)
    mask = torch.arange(280) < torch.tensor([[280], [41]])
    projection = orthogonal_features(Draws(4, query.device), 40, HEAD_DIM)
    phi_q = softmax_kernel(query, projection_matrix=projection, is_query=True, eps=0.0)
    phi_k = softmax_kernel(key, projection_matrix=projection, is_query=False, eps=0.0)
    options = {"num_features": 40, "seed": 4}
    theirs = partial(causal_linear_attention_noncuda, chunk_size=28, eps=0.0) if is_causal else linear_attention
    phi_k, value = (x * mask[:, None, :, None] for x in (phi_k, value))
    ours = hea.attention("performer", query, key, value, attention_mask=mask, is_causal=is_causal, **options)
    close(ours, theirs(phi_q, phi_k, value))
