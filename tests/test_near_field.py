"""The near field that exact rows choose: `near_field="auto"` of KDEformer and HyperAttention."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.ops import near_far
from hf_efficient_attn.ops.hashing import NearField, plan_lsh
from hf_efficient_attn.ops.near_far import dense_log_weights
from hf_efficient_attn.ops.sampling import SamplingOptions
from tests.instances import numbers


def plans(
    query: Tensor, key: Tensor, mask: Tensor | None = None, block: int = 8
) -> tuple[NearField, NearField, NearField]:
    """The window, the blocks of a hash, and the choice between them."""
    window = near_far.plan_window(query, key, block, mask)
    lsh = plan_lsh(query, key, block, mask, 6, 0, window.block_q)
    options = SamplingOptions(0, "uniform", 1, False, 1.0, seed=0, batch=1)
    return (
        window,
        lsh,
        near_far.plan_near_field(query, key, mask, near_far.NearFieldOptions("auto", block, 6), options)[0],
    )


def dense_pairs(near: NearField, q_len: int, kv_len: int) -> Tensor:
    """bool (BH, Nq, Nk), the pairs of a near field, found block by block."""
    found = torch.zeros(near.start.shape[0], q_len, kv_len, dtype=torch.bool)
    for a, starts in enumerate(near.start.tolist()):
        queries = torch.arange(q_len) if near.query_order is None else near.query_order[a]
        keys = torch.arange(kv_len) if near.key_order is None else near.key_order[a]
        for t, start in enumerate(starts):
            block = queries[t * near.block_q : (t + 1) * near.block_q]
            found[a, block[:, None], keys[start : start + near.block_k]] = True
    return found


def test_each_head_gets_the_near_field_that_holds_more_of_its_rows():
    # Tokens of the first head resemble their neighbors, those of the second are four copies of 32 points.
    angle = torch.arange(128) * (2 * math.pi / 128)
    local = 20.0 * torch.stack((angle.cos(), angle.sin(), torch.zeros(128), torch.zeros(128)), 1)
    tokens = torch.stack((local, 3.0 * numbers(32, 4, seed=5).float().repeat(4, 1)))
    window, lsh, chosen = plans(tokens, tokens)
    expected = torch.stack((dense_pairs(window, 128, 128)[0], dense_pairs(lsh, 128, 128)[1]))
    assert torch.equal(dense_pairs(chosen, 128, 128), expected)
    value, mean_error = numbers(2, 128, 3).float()[None], {}
    exact = (tokens @ tokens.mT).softmax(2) @ value
    for kind in ("lsh", "window", "auto"):
        config = hea.HyperAttentionConfig(near_field=kind, block_size=8, num_samples=8, num_hashes=6)
        out = hea.attention(config, tokens[None], tokens[None], value, scale=1.0)
        mean_error[kind] = ((out - exact).norm(dim=(2, 3)) / exact.norm(dim=(2, 3))).mean().item()
    assert mean_error["auto"] < 0.8 * min(mean_error["lsh"], mean_error["window"])


@pytest.mark.parametrize("q_len", [30, 21])
@pytest.mark.parametrize("masked", [False, True])
def test_the_choice_is_that_of_dense_matrices(q_len, masked):
    # With no more queries than rows, every query is one of the exact rows.
    assert q_len <= near_far.NUM_ROWS
    query, key = numbers(16, q_len, 4).float(), numbers(16, 30, 4, seed=1).float()
    # In half of the heads, tokens resemble their neighbors.
    angle = torch.arange(30) * (2 * math.pi / 30)
    local = 3.0 * torch.stack((angle.cos(), angle.sin()), 1)
    query[8:, :, :2], key[8:, :, :2] = local[:q_len], local
    mask = None
    if masked:
        mask = torch.arange(30) < torch.arange(15, 31)[:, None]
    window, lsh, chosen = plans(query, key, mask)
    weights = query.double() @ key.double().mT
    weights = (weights if mask is None else weights.masked_fill(~mask[:, None], -torch.inf)).softmax(2)
    valid = mask if mask is not None and q_len == 30 else torch.ones(16, q_len, dtype=torch.bool)
    pairs = [dense_pairs(plan, q_len, 30) for plan in (window, lsh)]
    left = [((weights * ~p).sum(2).square() * valid).sum(1) for p in pairs]
    take_lsh = left[1] < 0.99 * left[0]
    assert 0 < take_lsh.sum() < 16
    expected = torch.where(take_lsh[:, None, None], pairs[1], pairs[0])
    assert torch.equal(dense_pairs(chosen, q_len, 30), expected)


def test_equal_near_fields_are_no_matter_of_rounding():
    # All weights are equal, so that both near fields hold the same share of every row.
    key = numbers(6, 40, 4).float()
    window, _, chosen = plans(torch.zeros_like(key), key)
    assert torch.equal(dense_pairs(chosen, 40, 40), dense_pairs(window, 40, 40))


@pytest.mark.parametrize("method", ["kdeformer", "hyperattention"])
def test_the_causal_form_has_a_window_whatever_the_tokens_are(method):
    tokens = 4.0 * numbers(8, 4, seed=5).float()[torch.arange(64) % 8][None, None]
    config = hea.method_info(method).config_class(block_size=8, num_samples=8)
    out, expected = (
        hea.attention(dataclasses.replace(config, near_field=kind), tokens, tokens, tokens, is_causal=True)
        for kind in ("auto", "window")
    )
    assert torch.equal(out, expected)


def local_and_repeated(length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Tokens (6, length, 4): in every second head they resemble their neighbors, in the others they are copies."""
    angle = torch.arange(length) * (2 * math.pi / length)
    local = 20.0 * torch.stack((angle.cos(), angle.sin(), 0 * angle, 0 * angle), 1)
    copies = 3.0 * numbers(32, 4, seed=5).float()[torch.arange(length) % 32]
    noise = 0.1 * numbers(6, length, 4, seed=6).float()
    return (torch.stack((local, copies) * 3) + noise).to(dtype)


@pytest.mark.parametrize("groups", [1, 2, 3, 7])
@pytest.mark.parametrize("length", [41, 70, 200, 767, 768, 1000])
def test_the_plan_is_that_of_a_padded_sequence(length, groups):
    """It has the same near fields, groups and samples, with the same weights."""
    # One head has a window and one the blocks of the hash. Lengths of 384 and more leave out values of the norm.
    tokens, value = local_and_repeated(length, torch.float64)[:2], numbers(2, length, 3, seed=7)
    mask = torch.arange(2 * length) % 5 != 2
    position = mask.nonzero()[:length, 0]
    mask[position[-1] + 1 :] = False
    padded_tokens, padded_value = (numbers(2, len(mask), x.shape[2], seed=9) for x in (tokens, value))
    padded_tokens[:, position], padded_value[:, position] = tokens, value
    plan = near_far.NearFieldOptions("auto", 16, 6, 12), SamplingOptions(20, "probe", 8, False, 1.0, 0, 1, groups)
    near, far = near_far.make_plan(tokens, tokens, value, None, *plan)
    masked = near_far.make_plan(padded_tokens, padded_tokens, padded_value, mask.expand(2, -1), *plan)
    ours = dense_log_weights(*masked, len(mask), len(mask))[:, position][..., position]
    expected = dense_log_weights(near, far, length, length)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
