"""Attention of a sequence that processes share, for methods whose summary of the keys is the state of a recurrence.

Each process makes the state of its own tokens, and only the states travel. Bidirectional: their union is queried.
Causal: the union of those of earlier processes is the initial state of the process's own tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.config import ConfigT, MethodConfig
from hf_efficient_attn.methods._shared.registry import AttentionOptions, Recurrence, ShardedForm
from hf_efficient_attn.ops.features import EMPTY
from hf_efficient_attn.ops.linear import FeatureState, union
from hf_efficient_attn.ops.shards import Shards, gather

# Tokens whose features are in memory at a time.
_BLOCK = 1 << 14


def sharded_states(
    recurrence: Recurrence[ConfigT], applies: Callable[[ConfigT, int, bool], bool]
) -> ShardedForm[ConfigT]:
    """The form for a recurrence whose states are `FeatureState`s."""

    def forward(
        config: MethodConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, shards: Shards
    ) -> Tensor:
        state, groups = None, query.shape[1] // key.shape[1]
        for start in range(0, key.shape[2], _BLOCK):
            some = slice(start, start + _BLOCK)
            own = options._replace(key_mask=None if options.key_mask is None else options.key_mask[:, some])
            state = recurrence.update(config, state, key[:, :, some], value[:, :, some], own)
        assert isinstance(state, FeatureState)
        state = FeatureState(*(x.repeat_interleave(groups, 1) for x in _union(state, shards, options.is_causal)))
        if options.is_causal:
            key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
            return recurrence.forward(config, query, key, value, options, state)
        outs = [recurrence.query(config, state, some, options) for some in query.split(_BLOCK, 2)]
        return torch.cat(outs, 2).to(value.dtype)

    return ShardedForm(forward, applies)


def _union(state: FeatureState, shards: Shards, is_causal: bool) -> FeatureState:
    """The state of the tokens of all processes, or of those before this one."""
    packed = gather(torch.cat((state.sums.flatten(2), state.log.unsqueeze(2)), 2), shards.group)
    sums, log = packed[..., :-1].unflatten(3, state.sums.shape[2:]), packed[..., -1].detach()
    if is_causal:
        # Replaced rather than left out, so that every process has a gradient to send.
        before = (torch.arange(shards.size, device=log.device) < shards.rank).view(-1, 1, 1)
        sums, log = torch.where(before[..., None, None], sums, 0.0), torch.where(before, log, EMPTY)
    return union(*(FeatureState(*x) for x in zip(sums, log, strict=True)))
