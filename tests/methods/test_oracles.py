"""The methods against other implementations with the same weights, features and inputs."""

from functools import partial

import pytest
import torch
from performer_pytorch.performer_pytorch import (
    FastAttention,
    causal_linear_attention_noncuda,
    linear_attention,
    softmax_kernel,
)
from torch.nn.functional import elu, scaled_dot_product_attention
from transformers import LongformerConfig
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

import hf_efficient_attn as hea
from hf_efficient_attn.ops.features import orthogonal_features
from instances import inputs, numbers, relative_error

# Longformer of Transformers.

NUM_HEADS, HEAD_DIM = 2, 8


@pytest.mark.parametrize("global_tokens", [0, 1, 3])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("window", [4, 16])
def test_longformer_of_transformers(window, padding, global_tokens):
    """One layer in float64, with the same weights in both sets of projections."""
    torch.manual_seed(0)
    size, length = NUM_HEADS * HEAD_DIM, 96
    config = LongformerConfig(hidden_size=size, num_attention_heads=NUM_HEADS, attention_window=[2 * window])
    layer = LongformerSelfAttention(config, 0).double().eval()
    for name in ("query", "key", "value"):
        getattr(layer, f"{name}_global").load_state_dict(getattr(layer, name).state_dict())
    hidden_states = 3.0 * numbers(2, length, size, seed=1)
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, length - padding :] = False
    # Its own encoding: a negative number is padding, and a positive one is a global token.
    codes = torch.zeros(2, length, dtype=torch.float64)
    codes[:, :global_tokens] = 10000.0
    codes[~mask] = -10000.0
    masks = {"is_index_masked": codes < 0, "is_index_global_attn": codes > 0, "is_global_attn": global_tokens > 0}
    with torch.no_grad():
        theirs = layer(hidden_states, attention_mask=codes, **masks)[0]
        projected = (
            getattr(layer, n)(hidden_states).unflatten(2, (NUM_HEADS, HEAD_DIM)).transpose(1, 2)
            for n in ("query", "key", "value")
        )
        ours = hea.functional.longformer_attention(
            *projected, attention_mask=mask, window_size=window, global_tokens=global_tokens
        )
    ours = ours.transpose(1, 2).flatten(2)
    # It computes the softmax in float32.
    torch.testing.assert_close(ours[mask], theirs[mask], rtol=1e-5, atol=1e-5)
    assert relative_error(ours[mask], ours[mask].mean(0).expand_as(ours[mask])) > 0.1


# Performer of performer-pytorch, whose epsilon is 0 here.


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("features", ["performer", "linear"])
def test_attention_through_features_of_performer_pytorch(features, is_causal):
    """Its causal form on the CPU computes chunks of the sequence one after the other."""
    query, key, value = inputs(batch=2, num_heads=3, q_len=280, head_dim=HEAD_DIM, dtype=torch.float64)
    mask = torch.arange(280) < torch.tensor([[280], [41]])
    options = {"num_features": 40, "seed": 4} if features == "performer" else {}
    if features == "performer":
        projection = orthogonal_features(40, HEAD_DIM, 4, query.device)
        phi_q = softmax_kernel(query, projection_matrix=projection, is_query=True, eps=0.0)
        phi_k = softmax_kernel(key, projection_matrix=projection, is_query=False, eps=0.0)
    else:
        phi_q, phi_k = elu(query) + 1.0, elu(key) + 1.0
    theirs = partial(causal_linear_attention_noncuda, chunk_size=28, eps=0.0) if is_causal else linear_attention
    phi_k, value = (x * mask[:, None, :, None] for x in (phi_k, value))
    ours = hea.attention(features, query, key, value, attention_mask=mask, is_causal=is_causal, **options)
    torch.testing.assert_close(ours, theirs(phi_q, phi_k, value), rtol=1e-9, atol=1e-9)


def test_performer_pytorch_draws_features_from_the_same_distribution():
    """Both estimate exact attention with the same mean error, each with its own draws."""
    tensors = inputs(batch=2, num_heads=3, q_len=60, head_dim=HEAD_DIM, dtype=torch.float64)
    exact, errors = scaled_dot_product_attention(*tensors), {"ours": [], "theirs": []}
    for seed in range(12):
        torch.manual_seed(seed)
        errors["theirs"].append(relative_error(FastAttention(HEAD_DIM, nb_features=64).double()(*tensors), exact))
        errors["ours"].append(relative_error(hea.attention("performer", *tensors, num_features=64, seed=seed), exact))
    ours, theirs = (sum(x) / 12 for x in errors.values())
    assert 0.8 < ours / theirs < 1.25
