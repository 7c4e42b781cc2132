"""Calls with the state of a recurrence: the state after new tokens, and their attention to it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.arguments import Arguments, check_call
from hf_efficient_attn.methods._shared.call import (
    Parameters,
    all_parameters,
    cast_to_compute,
    cast_under_autocast,
    compute,
    repeat_kv,
    resolve,
    zero_masked,
)
from hf_efficient_attn.methods._shared.config import AttentionOptions, MethodConfig, State
from hf_efficient_attn.methods._shared.registry import get_method
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
    if parameters is None:
        parameters = all_parameters(config, {}, key, key, value)
    key, value = cast_to_compute(config, *cast_under_autocast(key, value))
    key, value = zero_masked(key, value, attention_mask)
    scale, seed = resolve(config, key, scale, seed)
    options = AttentionOptions(attention_mask, True, scale, 0.0, seed, parameters)
    recurrence = get_method(config.method).recurrence
    assert recurrence is not None
    with torch.autocast(key.device.type, enabled=False):
        return recurrence.update(config, state, key, value, options)


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
    arguments, dtype = Arguments(attention_mask, True, scale, dropout_p, seed), value.dtype
    check_call(config, query, key, value, arguments)
    if parameters is None:
        parameters = all_parameters(config, {}, query, key, value)
    query, key, value = cast_to_compute(config, query, key, value)
    new_state = update_state(
        config, state, key, value, attention_mask=attention_mask, scale=scale, seed=seed, parameters=parameters
    )
    if state is None:
        form, given = get_method(config.method).forward, Parameters(parameters, {})
        out = compute(form, config, query, key, value, arguments, given)
        return refuse_second_gradient(out.to(dtype), config.method), new_state
    recurrence = get_method(config.method).recurrence
    assert recurrence is not None
    (batch, num_heads, q_len, _), num_kv_heads = query.shape, key.shape[1]
    scale, seed = resolve(config, query, scale, seed)
    options = AttentionOptions(attention_mask, True, scale, dropout_p, seed, parameters)
    with torch.autocast(query.device.type, enabled=False):
        if q_len == 1:
            # One token attends to all tokens including itself. The query heads of a group, (B, H_kv, H / H_kv, D), are
            # passed as if they were several queries of one head.
            grouped_query = query.reshape(batch, num_kv_heads, num_heads // num_kv_heads, -1)
            out = recurrence.query(config, new_state, grouped_query, options).reshape(batch, num_heads, 1, -1)
        else:
            key, value = zero_masked(key, value, attention_mask)
            if num_heads != num_kv_heads:
                state = type(state)(*(x.repeat_interleave(num_heads // num_kv_heads, 1) for x in state))
            key, value = repeat_kv(query, key, value)
            out = recurrence.forward(config, query, key, value, options, state)
    return refuse_second_gradient(out.to(dtype), config.method), new_state
