"""Calls of other implementations with the parameters of a method of ours, for `recipes.benchmarks.peers`.

Each function takes the config of our method and the inputs, and returns the call to time, whose result is (B, H, N, D).
"""

import contextlib
import io
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

import hf_efficient_attn as hea
from hf_efficient_attn.evaluation.timing import Work
from hf_efficient_attn.methods import MethodConfig


class Inputs(NamedTuple):
    """Query, key and value (B, H, N, D), causality, and learned parameters of both sides (tables of projections)."""

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    learned: Mapping[str, Tensor]


class _Precomputed(nn.Module):
    """Replaces a projection and returns its precomputed result, as a copy if the result is modified in place."""

    def __init__(self, result: Tensor, copied: bool = False) -> None:
        super().__init__()
        self.result, self.buffer = result, torch.empty_like(result) if copied else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.result if self.buffer is None else self.buffer.copy_(self.result)


def _merged(x: Tensor) -> Tensor:
    """Merge the heads: (B, H, N, D) -> (B, N, H * D), the layout of a projection."""
    return x.transpose(1, 2).flatten(2)


def _split(x: Tensor, num_heads: int) -> Tensor:
    """Split the heads: a view (B, H, N, D) of (B, N, H * D)."""
    return x.unflatten(2, (num_heads, -1)).transpose(1, 2)


def linear(ours: MethodConfig, inputs: Inputs, bucket_size: int | None = None) -> Work:
    """Linear attention of linear-attention-transformer, whose causal form has buckets of `bucket_size` tokens."""
    from linear_attention_transformer.linear_attention_transformer import causal_linear_attn, linear_attn

    tensors = inputs[:3]
    if inputs.causal:
        return lambda: causal_linear_attn(*tensors, bucket_size=bucket_size)
    return lambda: linear_attn(*tensors)


def performer(ours: hea.PerformerConfig, inputs: Inputs) -> Work:
    """performer-pytorch."""
    from performer_pytorch.performer_pytorch import FastAttention

    with contextlib.redirect_stdout(io.StringIO()):  # it prints that there is no CUDA
        layer = FastAttention(inputs.query.shape[3], nb_features=ours.num_features, causal=inputs.causal)
    return lambda: layer(*inputs[:3])


def nystrom_attention(ours: hea.NystromformerConfig, inputs: Inputs) -> Work:
    """nystrom-attention."""
    from nystrom_attention.nystrom_attention import NystromAttention

    num_heads, head_dim = inputs.query.shape[1], inputs.query.shape[3]
    layer = NystromAttention(
        num_heads * head_dim, dim_head=head_dim, heads=num_heads, num_landmarks=ours.num_landmarks,
        pinv_iterations=ours.pinv_iterations, residual=False,
    ).eval()  # fmt: skip
    layer.to_qkv, layer.to_out = nn.Identity(), nn.Identity()
    projected = torch.cat([_merged(x) for x in inputs[:3]], 2)
    return lambda: _split(layer(projected), num_heads)


def nystromformer(ours: hea.NystromformerConfig, inputs: Inputs) -> Work:
    """NystromformerSelfAttention of Transformers."""
    from transformers import NystromformerConfig
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    _, num_heads, q_len, head_dim = inputs.query.shape
    config = NystromformerConfig(
        hidden_size=num_heads * head_dim, num_attention_heads=num_heads, num_landmarks=ours.num_landmarks,
        segment_means_seq_len=q_len,
    )  # fmt: skip
    layer = NystromformerSelfAttention(config).eval()
    layer.conv_kernel_size = None
    projected = [_merged(x) for x in inputs[:3]]
    layer.query, layer.key, layer.value = map(_Precomputed, projected)
    return lambda: _split(layer(projected[0])[0], num_heads)


def linformer(ours: hea.LinformerConfig, inputs: Inputs) -> Work:
    """linformer, with our tables."""
    from linformer.linformer import LinformerSelfAttention

    _, num_heads, q_len, head_dim = inputs.query.shape
    layer = LinformerSelfAttention(num_heads * head_dim, q_len, k=ours.projection_dim, heads=num_heads).eval()
    for name in ("key", "value"):
        table = inputs.learned[f"{name}_projection"].t().contiguous()
        setattr(layer, f"proj_{name[0]}", nn.Parameter(table, requires_grad=False))
    projected = [_merged(x) for x in inputs[:3]]
    layer.to_q, layer.to_k, layer.to_v = map(_Precomputed, projected)
    layer.to_out = nn.Identity()
    return lambda: _split(layer(projected[0]), num_heads)


def longformer(ours: hea.LongformerConfig, inputs: Inputs) -> Work:
    """LongformerSelfAttention of Transformers."""
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    batch, num_heads, q_len, head_dim = inputs.query.shape
    config = LongformerConfig(
        hidden_size=num_heads * head_dim, num_attention_heads=num_heads, attention_window=[2 * ours.window_size]
    )
    layer = LongformerSelfAttention(config, 0).eval()
    # Its projections have the tokens in the first dimension.
    projected = [_merged(x) for x in inputs[:3]]
    tokens_first = [x.transpose(0, 1) for x in projected]
    layer.query = _Precomputed(tokens_first[0], copied=True)
    layer.key, layer.value = map(_Precomputed, tokens_first[1:])
    none = torch.zeros(batch, q_len, dtype=torch.bool)
    options = {"attention_mask": none.float(), "is_index_masked": none, "is_index_global_attn": none}
    return lambda: _split(layer(projected[0], **options, is_global_attn=False)[0], num_heads)


def local_attention(ours: hea.LongformerConfig, inputs: Inputs) -> Work:
    """local-attention."""
    from local_attention import LocalAttention

    layer = LocalAttention(
        ours.window_size, causal=inputs.causal, look_backward=1, exact_windowsize=True, use_rotary_pos_emb=False
    ).eval()
    return lambda: layer(*inputs[:3])


def flex_attention(ours: hea.LongformerConfig, inputs: Inputs) -> Work:
    """flex_attention of PyTorch, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    size, q_len = ours.window_size, inputs.query.shape[2]

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = (query - key).abs() <= size
        return near & (key <= query) if inputs.causal else near

    mask = create_block_mask(attends, None, None, q_len, q_len, device="cpu")
    compiled = torch.compile(flex_attention)
    return lambda: compiled(*inputs[:3], block_mask=mask)


def lsh_attention(ours: hea.ReformerConfig, inputs: Inputs) -> Work:
    """reformer-pytorch."""
    from reformer_pytorch.reformer_pytorch import LSHAttention

    layer = LSHAttention(bucket_size=ours.block_size, n_hashes=ours.num_hashes).eval()
    query, value = inputs.query.flatten(0, 1), inputs.value.flatten(0, 1)
    return lambda: layer(query, value)[0].unflatten(0, inputs.query.shape[:2])


def lsh_self_attention(ours: hea.ReformerConfig, inputs: Inputs) -> Work:
    """LSHSelfAttention of Transformers."""
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    _, num_heads, q_len, head_dim = inputs.query.shape
    power = (2 * q_len // ours.block_size).bit_length() - 1
    # Two factors need fewer products. The module chooses them itself for long sequences.
    buckets = [2 ** (power // 2), 2 ** (power - power // 2)]
    config = ReformerConfig(
        hidden_size=num_heads * head_dim, num_attention_heads=num_heads, attention_head_size=head_dim,
        lsh_attn_chunk_length=ours.block_size, num_hashes=ours.num_hashes, num_buckets=buckets,
        lsh_attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    layer = LSHSelfAttention(config).eval()
    # The module normalises the keys, but does not scale the products: scale the queries instead.
    projected = [_merged(x) for x in (inputs.query * head_dim**-0.5, inputs.value)]
    layer.query_key, layer.value = map(_Precomputed, projected)
    return lambda: _split(layer(projected[0]).hidden_states, num_heads)
