"""Attention of a part of a sequence: tokens that follow a recurrent state, or the tokens of one process."""

from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.call import Arguments, cast_under_autocast, compute, prepare, repeat_kv
from hf_efficient_attn.methods._shared.config import MethodConfig, State
from hf_efficient_attn.methods._shared.registry import get_method, parameters_of_slice
from hf_efficient_attn.ops.shards import HeadSlice, Shards, over_heads
from hf_efficient_attn.ops.slices import with_zero_gradients
from hf_efficient_attn.ops.tracing import refuse_second_gradient


def update_state(config: MethodConfig, state: State | None, key: Tensor, value: Tensor, **arguments: Any) -> State:
    """Add tokens, key (B, H_kv, N, D) and value (B, H_kv, N, Dv), to a state; see `attention_with_state`."""
    key, value = cast_under_autocast(key, value)
    recurrence: Any = get_method(config.method).recurrence
    _, key, value, options = prepare(config, key, key, value, Arguments(is_causal=True, **arguments))
    with torch.autocast(key.device.type, enabled=False):
        new_state: State = recurrence.update(config, state, key, value, options)
    return new_state


def attention_with_state(
    config: MethodConfig, state: State | None, query: Tensor, key: Tensor, value: Tensor, **arguments: Any
) -> tuple[Tensor, State]:
    """Compute causal attention of new tokens to the tokens of a state and to each other.

    Up to rounding, the output is the end of the causal `attention` of all tokens together.

    Args:
        config: the config of a method with a recurrence.
        state: the state that `update_state` or an earlier call returned; None if there are no earlier tokens.
        query: (B, H, N, D), the queries of the new tokens.
        key: (B, H_kv, N, D), the keys of the new tokens.
        value: (B, H_kv, N, Dv), the values of the new tokens.
        **arguments: attention_mask (B, N), of the new tokens only, and scale, dropout_p, seed and parameters as for
            `attention`. The seed must be the same in all calls for one state.

    Returns:
        The output (B, H, N, Dv) in the dtype of `value`, and the state of all tokens so far.
    """
    query, key, value = cast_under_autocast(query, key, value)
    dtype = value.dtype
    query, key, value, options = prepare(config, query, key, value, Arguments(is_causal=True, **arguments))
    recurrence: Any = get_method(config.method).recurrence
    batch, num_heads, q_len, _ = query.shape
    num_kv_heads = key.shape[1]
    with torch.autocast(query.device.type, enabled=False):
        new_state = recurrence.update(config, state, key, value, options)
        if state is None:
            out = compute("forward", config, query, key, value, options)
        elif q_len == 1:
            # One token attends to all tokens including itself. The query heads of a group, (B, H_kv, H / H_kv, D), take
            # the place of several queries of one head.
            grouped_query = query.reshape(batch, num_kv_heads, num_heads // num_kv_heads, -1)  # (B, H_kv, H / H_kv, D)
            # (B, H_kv, H / H_kv, Dv) -> (B, H, 1, Dv)
            out = recurrence.query(config, new_state, grouped_query, options).reshape(batch, num_heads, 1, -1)
        else:
            if num_heads != num_kv_heads:
                state = type(state)(*(x.repeat_interleave(num_heads // num_kv_heads, 1) for x in state))
            out = recurrence.forward(config, query, *repeat_kv(query, key, value), options, state)  # (B, H, N, Dv)
    out = with_zero_gradients(out.to(dtype), *options.parameters.values())
    return refuse_second_gradient(out, config.method), new_state


def sharded_attention(
    config: MethodConfig, query: Tensor, key: Tensor, value: Tensor, *, shards: Shards, **arguments: Any
) -> Tensor:
    """Compute attention of sequences whose tokens are divided over processes, which all make this call.

    Up to rounding, the outputs of all processes in order equal the output of `attention` of all tokens.

    Args:
        config: the config of a method.
        query: (B, H, n, D), the queries of this process.
        key: (B, H_kv, n, D).
        value: (B, H_kv, n, Dv).
        shards: the positions of the tokens of each process, and the mask of all tokens.
        **arguments: is_causal, scale, parameters (of all heads) and seed, the same in all processes, as for
            `attention`.

    Returns:
        (B, H, n, Dv) in the dtype of `value`.
    """
    query, key, value = cast_under_autocast(query, key, value)
    dtype = value.dtype
    given = Arguments(shards.own_mask, **arguments)
    query, key, value, options = prepare(config, query, key, value, given)
    form = get_method(config.method).sharded

    def some_heads(query: Tensor, key: Tensor, value: Tensor, heads: HeadSlice) -> Tensor:
        own = parameters_of_slice(config, options.parameters, heads, query.shape[1])
        of_all = given._replace(attention_mask=shards.key_mask, parameters=own, heads=heads)
        return compute("forward", config, *prepare(config, query, key, value, of_all))  # (B, h, N, Dv)

    if form is not None and form.applies(config, shards.total, options.is_causal):
        with torch.autocast(query.device.type, enabled=False):
            out = form.forward(config, query, key, value, options, shards)  # (B, H, n, Dv)
    else:
        out = over_heads(some_heads, query, key, value, shards)  # (B, H, n, Dv)
    # A process that has no head has a gradient as well, because the processes add theirs.
    out = with_zero_gradients(out.to(dtype), *options.parameters.values())
    return refuse_second_gradient(out, config.method)
