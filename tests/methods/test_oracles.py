"""The methods against other implementations with the same weights, features and inputs."""

import pytest
import torch
from linear_attention_transformer.linear_attention_transformer import causal_linear_attn
from performer_pytorch.performer_pytorch import linear_attention as performer_linear_attention
from performer_pytorch.performer_pytorch import softmax_kernel
from torch.nn.functional import elu
from transformers import LongformerConfig
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

import hf_efficient_attn as hea
from hf_efficient_attn.ops.features import orthogonal_features
from instances import inputs, numbers, relative_error

# Longformer of Transformers.

NUM_HEADS, HEAD_DIM = 2, 8


def longformer_layer(window: int) -> LongformerSelfAttention:
    """One layer of Transformers' Longformer in float64, with the same weights in both sets of projections."""
    torch.manual_seed(0)
    size = NUM_HEADS * HEAD_DIM
    config = LongformerConfig(hidden_size=size, num_attention_heads=NUM_HEADS, attention_window=[2 * window])
    layer = LongformerSelfAttention(config, 0).double().eval()
    for name in ("query", "key", "value"):
        getattr(layer, f"{name}_global").load_state_dict(getattr(layer, name).state_dict())
    return layer


def projected(layer, hidden_states):
    """Query, key and value (B, H, N, D) of the layer's own projections."""
    return (
        getattr(layer, n)(hidden_states).unflatten(2, (NUM_HEADS, HEAD_DIM)).transpose(1, 2)
        for n in ("query", "key", "value")
    )


@pytest.mark.parametrize("global_tokens", [0, 1, 3])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("window", [4, 16])
def test_longformer_of_transformers(window, padding, global_tokens):
    layer, length = longformer_layer(window), 96
    hidden_states = 3.0 * numbers(2, length, NUM_HEADS * HEAD_DIM, seed=1)
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, length - padding :] = False
    # Its own encoding: a negative number is padding, and a positive one is a global token.
    codes = torch.zeros(2, length, dtype=torch.float64)
    codes[:, :global_tokens] = 10000.0
    codes[~mask] = -10000.0
    with torch.no_grad():
        theirs = layer(
            hidden_states,
            attention_mask=codes,
            is_index_masked=codes < 0,
            is_index_global_attn=codes > 0,
            is_global_attn=global_tokens > 0,
        )[0]
        ours = hea.functional.longformer_attention(
            *projected(layer, hidden_states), attention_mask=mask, window_size=window, global_tokens=global_tokens
        )
    ours = ours.transpose(1, 2).flatten(2)
    # It computes the softmax in float32.
    torch.testing.assert_close(ours[mask], theirs[mask], rtol=1e-5, atol=1e-5)
    assert relative_error(ours[mask], ours[mask].mean(0).expand_as(ours[mask])) > 0.1


# Performer of performer-pytorch.


def performer_inputs(length: int):
    return inputs(batch=2, num_heads=3, q_len=length, head_dim=HEAD_DIM, dtype=torch.float64)


@pytest.mark.parametrize("seed", [0, 4])
def test_performer_features_of_performer_pytorch(seed):
    """With an epsilon of 0 both are the same function of the same projection."""
    query, key, value = performer_inputs(70)
    projection = orthogonal_features(40, HEAD_DIM, seed, query.device)
    phi_q = softmax_kernel(query, projection_matrix=projection, is_query=True, eps=0.0)
    phi_k = softmax_kernel(key, projection_matrix=projection, is_query=False, eps=0.0)
    theirs = performer_linear_attention(phi_q, phi_k, value)
    ours = hea.functional.performer_attention(query, key, value, num_features=40, seed=seed)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    # The causal form has the same products, summed up to each query.
    weights = (phi_q @ phi_k.transpose(2, 3)).tril()
    ours = hea.functional.performer_attention(query, key, value, num_features=40, seed=seed, is_causal=True)
    torch.testing.assert_close(ours, weights @ value / weights.sum(-1, keepdim=True), rtol=1e-9, atol=1e-9)


# The linear transformer. linear-attention-transformer uses softmax(q) and softmax(k), or exp(k), as features. Here its
# inputs are the logarithms of elu(x) + 1, so that it computes with the features elu(x) + 1.


def log_features(x):
    return (elu(x) + 1.0).log()


@pytest.mark.parametrize("length", [1, 70, 300])
def test_causal_linear_attention_of_linear_attention_transformer(length):
    """The softmax over the features of a query cancels with the denominator."""
    query, key, value = performer_inputs(length)
    theirs = causal_linear_attn(log_features(query), log_features(key), value, bucket_size=1, eps=0.0)
    ours = hea.functional.linear_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
