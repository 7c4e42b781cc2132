"""Calls with a part of a sequence: the tokens after those of a state, and the tokens of one of several processes."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_efficient_attn.methods._shared.call import (
    Arguments,
    cast_under_autocast,
    compute,
    outside_autocast,
    prepare,
    repeat_kv,
)
from hf_efficient_attn.methods._shared.config import MethodConfig, Recurrence, State
from hf_efficient_attn.methods._shared.learned import parameters_of_slice
from hf_efficient_attn.methods._shared.registry import get_method
from hf_efficient_attn.ops.random import HeadSlice
from hf_efficient_attn.ops.shards import Shards, over_heads
from hf_efficient_attn.ops.transforms import refuse_second_gradient


def update_state(
    config: MethodConfig,
    state: State | None,
    key: Tensor,
    value: Tensor,
    *,
    attention_mask: Tensor | None = None,
    scale: float | None = None,
    seed: int | Tensor = 0,
    parameters: Mapping[str, Tensor] | None = None,
) -> State:
    """Add tokens to the state of a method with a recurrence.

    Args:
        config: the config of a method with a recurrence.
        state: the state of the earlier tokens; None if there are none.
        key: (B, H_kv, N, D), the keys of the new tokens.
        value: (B, H_kv, N, Dv), the values of the new tokens.
        attention_mask: bool (B, N), of the new tokens only.
        scale: the factor of the scores; 1/sqrt(D) by default.
        seed: the same in all calls for one state. The config's own seed is added to it.
        parameters: all learned parameters of the method by name; None for the values that a conversion starts from.

    Returns:
        The state of all tokens so far.
    """
    key, value = cast_under_autocast(key, value)
    arguments = Arguments(attention_mask, True, scale, 0.0, seed, parameters)
    _, key, value, options = prepare(config, key, key, value, arguments)
    with outside_autocast(key.device):
        return _recurrence(config).update(config, state, key, value, options)


def attention_with_state(
    config: MethodConfig,
    state: State | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attention_mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor = 0,
    parameters: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, State]:
    """Causal attention of new tokens to the tokens of a state and to each other.

    Up to rounding, the output is the end of the causal `attention` of all tokens together.

    Args:
        config: the config of a method with a recurrence.
        state: the state that `update_state` or an earlier call returned; None if there are no earlier tokens.
        query: (B, H, N, D), the queries of the new tokens.
        key: (B, H_kv, N, D), their keys.
        value: (B, H_kv, N, Dv), their values.
        attention_mask: bool (B, N), of the new tokens only.
        scale: the factor of the scores; 1/sqrt(D) by default.
        dropout_p: the probability with which an attention weight is dropped.
        seed: the same in all calls for one state. The config's own seed is added to it.
        parameters: all learned parameters of the method by name; None for the values that a conversion starts from.

    Returns:
        The output (B, H, N, Dv) in the dtype of `value`, and the state of all tokens so far.
    """
    query, key, value = cast_under_autocast(query, key, value)
    dtype, arguments = value.dtype, Arguments(attention_mask, True, scale, dropout_p, seed, parameters)
    query, key, value, options = prepare(config, query, key, value, arguments)
    recurrence, (batch, num_heads, q_len, _), num_kv_heads = _recurrence(config), query.shape, key.shape[1]
    with outside_autocast(query.device):
        new_state = recurrence.update(config, state, key, value, options)
        if state is None:
            out = compute("forward", config, query, key, value, options)
        elif q_len == 1:
            # One token attends to all tokens including itself. The query heads of a group, (B, H_kv, H / H_kv, D), are
            # passed as if they were several queries of one head.
            grouped_query = query.reshape(batch, num_kv_heads, num_heads // num_kv_heads, -1)
            out = recurrence.query(config, new_state, grouped_query, options).reshape(batch, num_heads, 1, -1)
        else:
            if num_heads != num_kv_heads:
                state = type(state)(*(x.repeat_interleave(num_heads // num_kv_heads, 1) for x in state))
            out = recurrence.forward(config, query, *repeat_kv(query, key, value), options, state)
    return refuse_second_gradient(out.to(dtype), config.method), new_state


def _recurrence(config: MethodConfig) -> Recurrence[Any]:
    recurrence = get_method(config.method).recurrence
    assert recurrence is not None
    return recurrence


def sharded_attention(
    config: MethodConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    shards: Shards,
    is_causal: bool = False,
    scale: float | None = None,
    seed: int | Tensor = 0,
    parameters: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Attention of sequences whose tokens are divided over processes, which all make this call.

    Up to rounding, the outputs of all processes in order are those of `attention` of all tokens.

    Args:
        config: the config of a method.
        query: (B, H, n, D), of the tokens of this process.
        key: (B, H_kv, n, D).
        value: (B, H_kv, n, Dv).
        shards: which tokens these are, and the mask of all tokens.
        is_causal: query i attends to the keys up to its own position.
        scale: the factor of the scores; 1/sqrt(D) by default.
        seed: the same in all processes.
        parameters: all learned parameters of all heads by name; None for the values that a conversion starts from.

    Returns:
        (B, H, n, Dv) in the dtype of `value`.
    """
    query, key, value = cast_under_autocast(query, key, value)
    dtype, arguments = value.dtype, Arguments(shards.own_mask, is_causal, scale, 0.0, seed, parameters)
    query, key, value, options = prepare(config, query, key, value, arguments)
    form = get_method(config.method).sharded

    def some_heads(query: Tensor, key: Tensor, value: Tensor, heads: HeadSlice) -> Tensor:
        own = parameters_of_slice(config, options.parameters, heads, query.shape[1])
        given = Arguments(shards.key_mask, is_causal, scale, 0.0, seed, own, heads=heads)
        return compute("forward", config, *prepare(config, query, key, value, given))

    if form is not None and form.applies(config, shards.total, is_causal):
        with outside_autocast(query.device):
            out = form.forward(config, query, key, value, options, shards)
    else:
        out = over_heads(some_heads, query, key, value, shards)
    return refuse_second_gradient(out.to(dtype), config.method)
