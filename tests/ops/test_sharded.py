"""Attention of a sequence that processes share: output and gradients are those of one process, for every method."""

from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import processes
from hf_efficient_attn.methods import attention, sharded_attention
from hf_efficient_attn.ops.shards import Shards
from instances import FIRST, INSTANCES, inputs, numbers, parameters_of

HEADS, BATCH = 4, 2
LENGTHS = {2: (41, 34), 4: (20, 19, 7, 29)}
LENGTH = 75
# Shards shorter than a block, for two and for four processes.
SHORT = {2: (3, 72), 4: (3, 66, 2, 4)}
# The largest difference relative to the largest gradient. In half precision other sums are rounded.
LIMITS = {torch.float64: 1e-6, torch.bfloat16: 3e-2, torch.float16: 1e-2}


class Case(NamedTuple):
    instance: int
    is_causal: bool
    mask: str
    num_kv_heads: int = HEADS
    dtype: torch.dtype = torch.float64
    is_local: bool = False  # some heads attend to neighbors
    is_short: bool = False  # shards of `SHORT`


def mask_of(kind: str) -> torch.Tensor | None:
    if kind == "none":
        return None
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    if kind == "right":  # one sequence ends on the last process, the other one before it
        mask[0, -5:] = False
        mask[1, 30:] = False
    elif kind == "left":
        mask[1, :23] = False
    elif kind == "gaps":  # padding between tokens, and shards without a token of one of the sequences
        mask[:, ::6] = False
        mask[0, 39:46] = False
        mask[1, :41] = False
    elif kind == "few":  # not more tokens than landmarks, one of them alone in its shard, and none at all
        mask[0, 3:60] = False
        mask[0, 61:] = False
        mask[1] = False
    return mask


def measure(case: Case) -> dict[str, float]:
    """The largest difference between this process and one process with all tokens, as a share of what is allowed."""
    config, mask = INSTANCES[case.instance].config(), mask_of(case.mask)
    size, rank = dist.get_world_size(), dist.get_rank()
    whole = inputs(BATCH, HEADS, LENGTH, 8, num_kv_heads=case.num_kv_heads, seed=5, dtype=torch.float64)
    if case.is_local:
        walk = inputs(BATCH, 1, LENGTH, 8, seed=6, dtype=torch.float64)[0].cumsum(2)
        for x in whole[:2]:
            x[:, : x.shape[1] // 2] += 0.4 * walk
    whole = [x.to(case.dtype).contiguous().requires_grad_() for x in whole]
    made = parameters_of(config, whole[2], num_kv_heads=case.num_kv_heads)
    parameters = {k: x.double().requires_grad_() for k, x in made.items()}
    grad = numbers(BATCH, HEADS, LENGTH, 8, seed=1, dtype=case.dtype)
    options = {"is_causal": case.is_causal, "seed": 3}
    out = attention(config, *whole, attention_mask=mask, parameters=parameters, **options)
    wanted = torch.autograd.grad((out * grad).sum(), [*whole, *parameters.values()])
    shards = Shards(dist.group.WORLD, (SHORT if case.is_short else LENGTHS)[size], rank, mask)
    own = [x.detach()[:, :, shards.own].requires_grad_() for x in whole]
    if mask is not None:  # what padding contains has no influence
        with torch.no_grad():
            for x in own[1:]:
                x.masked_fill_(~shards.own_mask[:, None, :, None], torch.nan)
    found = sharded_attention(config, *own, shards=shards, parameters=parameters, **options)
    grads = list(torch.autograd.grad((found * grad[:, :, shards.own]).sum(), [*own, *parameters.values()]))
    for x in grads[3:]:
        dist.all_reduce(x)
    valid = torch.ones(BATCH, LENGTH, dtype=torch.bool) if mask is None else mask
    out, found = (x.masked_fill(~valid[:, None, shards.own, None], 0.0) for x in (out[:, :, shards.own], found))
    names = ("out", "query", "key", "value", *parameters)
    others = [out, *(x[:, :, shards.own] for x in wanted[:3]), *wanted[3:]]
    scale = max(1.0, *(float(x.abs().max()) for x in wanted)) * LIMITS[case.dtype]
    differences = ((a - b).abs().max() / scale for a, b in zip((found, *grads), others, strict=True))
    return {name: float(x.nan_to_num(99.0)) for name, x in zip(names, differences, strict=True)}


def measure_all(cases: list[Case]) -> dict[str, dict[str, float]]:
    return {f"{INSTANCES[case.instance]} {case}": measure(case) for case in cases}


def cases(rows: list[int], masks: tuple[str, ...]) -> list[Case]:
    return [Case(i, c, mask, 2) for i in rows for mask in masks for c in (False, True)[: 1 + INSTANCES[i].info.causal]]


# nearfar summarizes neighbors and all other tokens in different ways.
SUMMARIZED = []
for i, mask in product([i for i, x in enumerate(INSTANCES) if x.method == "nearfar"], ("none", "gaps", "few")):
    SUMMARIZED += [Case(i, False, mask, n, is_local=True) for n in (1, 2, 4)]
    SUMMARIZED.append(Case(i, False, mask, 2, is_local=True, is_short=True))
    SUMMARIZED += [Case(i, False, mask, 2, dtype) for dtype in (torch.bfloat16, torch.float16)]


def check(size: int, folder, every: list[Case]) -> None:
    wrong = [
        f"{name} in process {rank}: {what} {error}"
        for rank, result in enumerate(processes.run(size, folder, measure_all, every))
        for name, errors in result.items()
        for what, error in errors.items()
        if not error < 1.0
    ]
    assert not wrong, "\n".join(wrong)


def test_two_processes_compute_what_one_does(tmp_path):
    check(2, tmp_path, cases([INSTANCES.index(instance) for instance in FIRST.values()], ("right",)) + SUMMARIZED[:18])


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 4])
def test_all_rows_and_masks(tmp_path, size):
    check(size, tmp_path, cases(list(range(len(INSTANCES))), ("none", "right", "left", "few")) + SUMMARIZED)
