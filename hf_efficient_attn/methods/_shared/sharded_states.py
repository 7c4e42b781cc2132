"""Attention of a sequence that processes share, for methods whose summary of the keys is the state of a recurrence.

Each process makes the state of its own tokens, and only the states travel. Bidirectional: their union is queried.
Causal: the union of those of earlier processes is the initial state of the process's own tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.config import ConfigT, MethodConfig
from hf_efficient_attn.methods._shared.registry import AttentionOptions, Recurrence, ShardedForm, State
from hf_efficient_attn.ops.linear_attention import LinearState
from hf_efficient_attn.ops.partial import Partial, merge
from hf_efficient_attn.ops.shards import Shards, gather, total

# Tokens whose features are in memory at a time.
_BLOCK = 1 << 14


def sharded_states(
    recurrence: Recurrence[ConfigT], applies: Callable[[ConfigT, int, bool], bool]
) -> ShardedForm[ConfigT]:
    """The form for a recurrence whose states are `LinearState`s or `Partial`s, of disjoint sets of tokens."""

    def forward(
        config: MethodConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, shards: Shards
    ) -> Tensor:
        state, groups = None, query.shape[1] // key.shape[1]
        for some in _blocks(key.shape[2]):
            own = options._replace(key_mask=None if options.key_mask is None else options.key_mask[:, some])
            state = recurrence.update(config, state, key[:, :, some], value[:, :, some], own)
        assert state is not None
        state = _union(state, shards, options.is_causal)
        state = type(state)(*(x.repeat_interleave(groups, 1) for x in state))
        if options.is_causal:
            key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
            return recurrence.forward(config, query, key, value, options, state)
        outs = [recurrence.query(config, state, query[:, :, some], options) for some in _blocks(query.shape[2])]
        return torch.cat(outs, 2).to(value.dtype)

    return ShardedForm(forward, applies)


def _blocks(length: int) -> list[slice]:
    return [slice(i, min(i + _BLOCK, length)) for i in range(0, length, _BLOCK)]


def _union(state: State, shards: Shards, is_causal: bool) -> Any:
    """The state of the tokens of all processes, or of those before this one."""
    if isinstance(state, LinearState):
        if not is_causal:
            return LinearState(*total(state, shards.group))
        both = gather(torch.cat((state.products, state.norm.unsqueeze(-1)), -1), shards.group)
        # Replaced by 0 rather than left out, so that every process has a gradient to send.
        both = torch.where(_is_before(shards, both), both, 0.0).sum(0)
        return LinearState(both[..., :-1], both[..., -1])
    assert isinstance(state, Partial)
    both = gather(torch.cat((state.out, state.lse.unsqueeze(-1)), -1), shards.group)
    out, lse = both[..., :-1], both[..., -1]
    if is_causal:
        out = torch.where(_is_before(shards, out), out, 0.0)
        lse = torch.where(_is_before(shards, lse), lse, -torch.inf)
    return merge(*(Partial(*x) for x in zip(out.unbind(0), lse.unbind(0), strict=True)))


def _is_before(shards: Shards, x: Tensor) -> Tensor:
    """Which of the tensors of all processes, (processes, ...), are those of earlier tokens."""
    before = torch.arange(shards.size, device=x.device) < shards.rank
    return before.view(-1, *[1] * (x.ndim - 1))
