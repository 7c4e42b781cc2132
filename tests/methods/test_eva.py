"""EVA against its paper's sums, written out with plain exponentials, and the properties that follow from them."""

import math
from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import hf_efficient_attn as hea
from each import close, differs, refuses
from hf_efficient_attn.methods import eva
from hf_efficient_attn.ops.tokens import normal
from instances import inputs, numbers


def estimate(query, key, value, scale: float, noise=None, maps=None):
    """Mean key of a chunk and the estimated value beta^_c(omega), computed token by token.

    With queries and keys (n, D) times sqrt(scale), omega = q~ + k~ + noise, or W_q q~ + W_k k~ + noise where `maps` is
    (W_q, W_k). The random feature is xi(x, omega) = exp(omega . x - |x|^2 / 2).
    """
    root = scale**0.5
    means = sum(query) / len(query), sum(key) / len(key)
    means = means if maps is None else [w @ x for w, x in zip(maps, means, strict=True)]
    omega = root * means[0] + root * means[1]
    omega = omega if noise is None else omega + noise
    xi = [math.exp(omega @ (root * k) - (root * k) @ (root * k) / 2) for k in key]
    return sum(key) / len(key), sum(x * v for x, v in zip(xi, value, strict=True)) / sum(xi)


def paper(query, key, value, scale: float, near, chunks, noises=None, maps=None):
    """The output of one head's queries by the paper's sums.

    near(i) is the set E of query i, and chunks(i) the list of its chunks as (start, stop).
    """
    outs = []
    for i, q in enumerate(query):
        numerator, denominator = torch.zeros(value.shape[1], dtype=torch.float64), 0.0
        for m in near(i):
            weight = math.exp(scale * q @ key[m])
            numerator, denominator = numerator + weight * value[m], denominator + weight
        for start, stop in chunks(i):
            chunk, noise = slice(start, stop), None if noises is None else noises[start, stop]
            mean, beta = estimate(query[chunk], key[chunk], value[chunk], scale, noise, maps)
            weight = (stop - start) * math.exp(scale * q @ mean)
            numerator, denominator = numerator + weight * beta, denominator + weight
        outs.append(numerator / denominator)
    return torch.stack(outs)


# (number of keys, window_size, num_landmarks, chunks of query i)
CASES = {
    "whole": (64, 16, 16, lambda i: [(s, s + 4) for s in range(0, 64, 4) if s // 16 != i // 16]),
    # Six windows of two chunks each; the last window and the last chunk are not full.
    "ragged": (42, 8, 12, lambda i: [(s, min(s + 4, 42)) for s in range(0, 42, 4) if s // 8 != i // 8]),
    # Twelve windows and three chunks. A query also sees the other half of its own chunk and of its own half.
    "chunks of four windows": (46, 4, 3, lambda i: [
        (s, min(s + size, 46))
        for size in (16, 8, 4)
        for s in range(0, 46, size)
        if s // size != i // size and (size == 16 or s // (2 * size) == i // (2 * size))
    ]),
}  # fmt: skip


def maps(num_heads: int, head_dim: int = 6) -> dict:
    """W_q and W_k of a learned proposal, by parameter name: (num_heads, head_dim, head_dim) each."""
    shape = (num_heads, head_dim, head_dim)
    return {"proposal_query": numbers(*shape, seed=8), "proposal_key": numbers(*shape, seed=9)}


@pytest.mark.parametrize("case", CASES)
def test_output_is_that_of_the_papers_sums(case):
    """omega of a chunk is mu, drawn around it, or learned. Every head has its own draw; batch rows share it."""
    count, window, landmarks, chunks = CASES[case]
    tensors = inputs(batch=2, q_len=count, head_dim=6, value_dim=5, dtype=torch.float64)
    config = hea.EvaConfig(window_size=window, num_landmarks=landmarks, proposal="learned", seed=5)
    learned = maps(num_heads=2)

    def near(i):
        """The keys of the window that holds position i."""
        return range(i // window * window, min(count, (i // window + 1) * window))

    def check(ours, **proposal):
        for b, head in ((0, 0), (0, 1), (1, 1)):
            given = {name: of_head(head) for name, of_head in proposal.items()}
            close(ours[b, head], paper(*(x[b, head] for x in tensors), 0.7, near, chunks, **given), 1e-10)

    ours = hea.attention(config, *tensors, scale=0.7, proposal="mean")
    check(ours)
    assert differs(ours, scaled_dot_product_attention(*tensors, scale=0.7), 0.05)
    # With the identity, where the maps start, the output is that of proposal="normal".
    plain = hea.attention(config, *tensors, scale=0.7, proposal="normal")
    assert torch.equal(hea.attention(config, *tensors, scale=0.7), plain)
    assert differs(hea.attention(config, *tensors, scale=0.7, **learned), plain, 1e-3)
    if case == "whole":
        drawn = normal((16, 2, 6), 5, 40, ours.device)
        assert abs(drawn.std() - 1.0) < 0.15
        check(plain, noises=lambda head: {(s, s + 4): drawn[s // 4, head] for s in range(0, 64, 4)})
    with patch.object(eva, "chunk_noise", lambda *arguments: None):  # the draws are those of proposal="normal"
        ours = hea.attention(config, *tensors, scale=0.7, **learned)
    check(ours, maps=lambda head: [w[head] for w in learned.values()])


def test_maps_of_a_wrong_shape_are_refused():
    tensors = inputs(q_len=20, head_dim=6)
    for shape, name in product(((3, 6, 6), (2, 6, 5), (6, 6), (2, 2, 6, 6)), maps(num_heads=2)):
        with pytest.raises(hea.UnsupportedAttentionError, match=rf"eva: {name} .*2 heads with head_dim=6: give"):
            hea.attention("eva", *tensors, proposal="learned", **{name: numbers(*shape)})
    refuses(r"does not match .*proposal='normal'", hea.attention, "eva", *tensors, **maps(num_heads=2))


def test_causal_form_by_hand():
    """Blocks of 4 tokens: a query of block 6 sees blocks 6 and 5, and two summaries each of block 4 and blocks 0-3.

    Each half of a segment has one draw, which depends on the segment's level, and may be centred on learned maps.
    """
    tensors = inputs(num_heads=1, q_len=30, head_dim=6, dtype=torch.float64)
    segments = {2: [(0, 1)], 3: [(0, 2)], 4: [(0, 2), (2, 3)], 5: [(0, 4)], 6: [(0, 4), (4, 5)], 7: [(0, 4), (4, 6)]}

    def halves(first, last):
        middle = (first + last) * 2
        return [(4 * first, middle), (middle, 4 * last)]

    def chunks(i):
        return [half for segment in segments.get(i // 4, []) for half in halves(*segment)]

    noises = {}
    for first, last in {pair for pairs in segments.values() for pair in pairs}:
        drawn = normal((2, 1, 6), 2, 41 + (last - first).bit_length() - 1, tensors[0].device)[:, 0]
        noises |= dict(zip(halves(first, last), drawn, strict=True))
    options = {"window_size": 8, "num_landmarks": 4, "seed": 2, "is_causal": True, "scale": 0.7}
    learned = maps(num_heads=1)
    both = [w[0] for w in learned.values()]
    outs = []
    for proposal, parameters, given in (
        ("mean", {}, (None, None)), ("normal", {}, (noises, None)), ("learned", learned, (noises, both))
    ):  # fmt: skip
        outs.append(hea.attention("eva", *tensors, **options, proposal=proposal, **parameters)[0, 0])
        one = [x[0, 0] for x in tensors]
        close(outs[-1], paper(*one, 0.7, lambda i: range(max(0, i // 4 - 1) * 4, i + 1), chunks, *given), 1e-10)
    assert differs(outs[1], outs[0], 1e-3) and differs(outs[2], outs[1], 1e-3)
