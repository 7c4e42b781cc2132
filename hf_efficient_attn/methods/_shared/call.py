"""The path from a user's call to a method: checks, masks, grouped queries, precision and learned parameters.

A method deals with none of these; `register_method` states what it is given.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_name
from hf_efficient_attn.methods._shared.arguments import Arguments, check_call, check_names, check_types
from hf_efficient_attn.methods._shared.config import AttentionForward, AttentionOptions, MethodConfig
from hf_efficient_attn.methods._shared.graph import call_in_graph
from hf_efficient_attn.methods._shared.learned_shapes import parameters_of_slice
from hf_efficient_attn.methods._shared.registry import get_method, make_config
from hf_efficient_attn.ops.attend import multiplies_bfloat16
from hf_efficient_attn.ops.export import in_graph, replaced_in_graphs
from hf_efficient_attn.ops.random import HeadSeed, HeadSlice, Seed, draw_seed
from hf_efficient_attn.ops.shards import Shards, over_heads
from hf_efficient_attn.ops.transforms import call_in_transform, in_transform, refuse_second_gradient

# With a key-value cache, up to this many queries are decoded, and more are computed like a whole sequence.
_MAX_DECODED_QUERIES = 128
# Bytes of a number -> integers of the same size.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Parameters(NamedTuple):
    """The learned parameters that the user gave: all of them, or None, and some of them by name."""

    complete: Mapping[str, Tensor] | None
    some: Mapping[str, Tensor]


_NO_PARAMETERS = Parameters(None, {})


def attention(
    method_or_config: str | MethodConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = 0,
    parameters: Mapping[str, Tensor] | None = None,
    distance_bias: Tensor | None = None,
    heads: HeadSlice | None = None,
    **hyperparameters: Any,
) -> Tensor:
    """Compute attention by any method of this package.

    Args:
        method_or_config: a name from `available_methods()`, or a method's config.
        query: (B, H, Nq, D).
        key: (B, H_kv, Nk, D). H_kv divides H (grouped queries): query head h uses key head h // (H // H_kv).
        value: (B, H_kv, Nk, Dv).
        attention_mask: bool (B, Nk), True for the keys to attend to. Masked keys and values have no influence on the
            output, even if they are NaN.
        is_causal: query i attends to the keys up to its own position. If Nq < Nk, the queries are the last Nq
            positions, as with a key-value cache. If Nq > Nk, the first Nq - Nk queries attend to nothing.
        scale: the factor of the scores q . k; 1/sqrt(D) by default.
        dropout_p: the probability with which an attention weight is dropped. Drawn from the global generator.
        seed: the seed of hashes, samples and random features, which is added to the config's own seed. The same seed
            gives the same output and does not change the global random state. None (for training) draws a seed from the
            global generator.
        parameters: all learned parameters of the method by name, as a converted model holds them.
        distance_bias: (H, 2R + 1), added to the scores of each head by the position of the key minus that of the query,
            from -R to R; beyond these distances it is that of -R or R. Some methods only
            (`MethodConfig.adds_distance_bias`).
        heads: the number of the first of the H heads and the number of all heads, if the layer has more than these H,
            because other processes hold the rest. A head's output is the same as in one call with all heads.
            `parameters` are those of the H heads (`parameters_of_slice`).
        **hyperparameters: values that replace those of the config. Learned parameters can be given here as well, as
            tensors by name. Those that are missing have the values that a conversion starts from.

    Returns:
        (B, H, Nq, Dv) in the dtype of `value`. The output of a query that attends to nothing is 0.

    Raises:
        UnsupportedAttentionError: the method or a hyperparameter is unknown; the shapes or dtypes do not fit together;
            the mask is not (B, Nk); `is_causal` with a method that has no causal form; Nq != Nk with a method that has
            no rectangular form.
    """
    arguments = Arguments(attention_mask, is_causal, scale, dropout_p, seed, distance_bias, heads)
    config, some = _split_hyperparameters(method_or_config, hyperparameters)
    check_types(config, (query, key, value), arguments, parameters)
    given = Parameters(parameters, some)
    if in_transform(query, key, value, arguments, given):
        return _in_transform(config, query, key, value, arguments, given)
    return refuse_second_gradient(_attention(config, query, key, value, arguments, given), config.method)


def _attention(
    config: MethodConfig, query: Tensor, key: Tensor, value: Tensor, arguments: Arguments, given: Parameters
) -> Tensor:
    form = get_method(config.method).forward
    if config.compute_dtype == "auto":
        return compute(form, config, query, key, value, arguments, given)
    query, key, value = cast_under_autocast(query, key, value)
    dtype = value.dtype
    query, key, value = cast_to_compute(config, query, key, value)
    return compute(form, config, query, key, value, arguments, given).to(dtype)


def _in_transform(
    config: MethodConfig, query: Tensor, key: Tensor, value: Tensor, arguments: Arguments, given: Parameters
) -> Tensor:
    """`_attention` inside a transform of `torch.func`."""
    if arguments.seed is None:
        arguments = arguments._replace(seed=draw_seed(query.device))
    others = (arguments.distance_bias, arguments.seed, *(given.complete or {}).values(), *given.some.values())
    return call_in_transform(
        functools.partial(_attention, config),
        (query, key, value, arguments, given),
        config.method,
        by_rows=not any(isinstance(x, Tensor) for x in others),
        draws=arguments.dropout_p > 0.0,
    )


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
    form = get_method(config.method).sharded
    query, key, value = cast_under_autocast(query, key, value)
    dtype = value.dtype
    arguments = Arguments(shards.own_mask, is_causal, scale, 0.0, seed)
    check_call(config, query, key, value, arguments)
    if parameters is None:
        parameters = all_parameters(config, {}, query, key, value)
    query, key, value = cast_to_compute(config, query, key, value)
    if form is not None and form.applies(config, shards.total, is_causal):
        scale, seed = resolve(config, query, scale, seed)
        key, value = zero_masked(key, value, shards.own_mask)
        options = AttentionOptions(shards.own_mask, is_causal, scale, 0.0, seed, parameters)
        with torch.autocast(query.device.type, enabled=False):
            out = form.forward(config, query, key, value, options, shards).to(dtype)
            return refuse_second_gradient(out, config.method)

    def some_heads(query: Tensor, key: Tensor, value: Tensor, heads: HeadSlice) -> Tensor:
        own = parameters_of_slice(config, parameters, heads, query.shape[1])
        given = arguments._replace(attention_mask=shards.key_mask, heads=heads)
        return compute(get_method(config.method).forward, config, query, key, value, given, Parameters(own, {}))

    out = over_heads(some_heads, query, key, value, shards).to(dtype)
    return refuse_second_gradient(out, config.method)


def naive_attention(
    method_or_config: str | MethodConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    seed: int | None = 0,
    parameters: Mapping[str, Tensor] | None = None,
    distance_bias: Tensor | None = None,
    **hyperparameters: Any,
) -> Tensor:
    """Compute the readable form of a method, with dense (Nq, Nk) matrices; see `attention` for the arguments."""
    arguments = Arguments(attention_mask, is_causal, scale, 0.0, seed, distance_bias)
    config, some = _split_hyperparameters(method_or_config, hyperparameters)
    check_types(config, (query, key, value), arguments, parameters)
    form = get_method(config.method).naive
    return compute(form, config, query, key, value, arguments, Parameters(parameters, some))


def resolve(config: MethodConfig, x: Tensor, scale: float | None, seed: int | Tensor) -> tuple[float, int | Tensor]:
    """The scale, by default 1/sqrt(D) for x (..., D), and the sum of the call's and the config's seed."""
    return x.shape[-1] ** -0.5 if scale is None else float(scale), seed + getattr(config, "seed", 0)


def _split_hyperparameters(
    method_or_config: str | MethodConfig, hyperparameters: Mapping[str, Any]
) -> tuple[MethodConfig, dict[str, Tensor]]:
    """The config with the hyperparameters, and the tensors among them, which are learned parameters."""
    if not hyperparameters:
        return make_config(method_or_config), {}
    check_names(make_config(method_or_config), hyperparameters)
    some = {k: v for k, v in hyperparameters.items() if isinstance(v, Tensor)}
    return make_config(method_or_config, **{k: v for k, v in hyperparameters.items() if k not in some}), some


def compute(
    form: AttentionForward[Any],
    config: MethodConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    arguments: Arguments,
    given: Parameters = _NO_PARAMETERS,
) -> Tensor:
    """Check a call, prepare its tensors, and compute one form of a method: (B, H, Nq, Dv)."""
    device_type = query.device.type
    is_autocast = torch.is_autocast_enabled(device_type)
    if is_autocast:
        query, key, value = cast_under_autocast(query, key, value)
    check_call(config, query, key, value, arguments)
    (batch, num_heads, q_len, head_dim), kv_len = query.shape, key.shape[2]
    if query.numel() == 0:
        learned = (given.complete or given.some).values()
        # The sums give every input a gradient, of zeros: DistributedDataParallel refuses parameters without one.
        nothing = torch.stack([0.0 * x.sum(dtype=value.dtype) for x in (query, key, value, *learned)]).sum()
        return value.new_zeros(batch, num_heads, q_len, value.shape[-1]) + nothing
    key_mask, is_causal, scale, dropout_p, seed, distance_bias, slice_of_heads = arguments
    scale, seed = resolve(config, query, scale, draw_seed(query.device) if seed is None else seed)
    key, value = zero_masked(key, value, key_mask)
    parameters = given.complete
    if parameters is None:
        parameters = all_parameters(config, given.some, query, key, value, slice_of_heads)
    seed_of_heads: Seed = seed
    if slice_of_heads is not None:
        slice_of_heads.check(num_heads)
        seed_of_heads = HeadSeed(seed, slice_of_heads)
    options = AttentionOptions(key_mask, is_causal, scale, dropout_p, seed_of_heads, parameters, distance_bias)
    # The number of keys before the first query.
    offset = kv_len - q_len if is_causal else 0
    method = get_method(config.method)
    decode = method.decode
    if decode is not None and offset > 0 and q_len <= _MAX_DECODED_QUERIES:
        form = decode
    elif offset < 0:  # the first queries come before all keys
        query = query[:, :, -offset:]
    elif offset > 0:  # give queries to the keys before the first query, and drop their outputs below
        query = torch.cat((query.new_zeros(batch, num_heads, offset, head_dim), query), 2)
    key, value = repeat_kv(query, key, value)
    if in_graph() and form in (method.forward, decode):
        form = functools.partial(call_in_graph, "forward" if form is method.forward else "decode")
    if is_autocast:
        with torch.autocast(device_type, enabled=False):
            out = form(config, query, key, value, options)
    else:  # without the context, which takes as long as the other checks of a call together
        out = form(config, query, key, value, options)
    if offset < 0:
        return torch.cat((out.new_zeros(batch, num_heads, -offset, out.shape[-1]), out), 2)
    return out[:, :, out.shape[2] - q_len :] if offset else out


def all_parameters(
    config: MethodConfig,
    some: Mapping[str, Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: HeadSlice | None = None,
) -> Mapping[str, Tensor]:
    """All learned parameters of a method: those that were given, and the initial values of the others."""
    method = get_method(config.method)
    known = method.info.learned_parameters
    for name in some:
        if name not in known:
            raise UnsupportedAttentionError(
                f"{config.method}: {unknown_name('learned parameter', name, known)}"
                if known
                else f"{config.method}: {name!r} is a tensor, but the method has no learned parameters"
            )
    if method.initial_parameters is None or len(some) == len(known):
        return some
    (num_heads, num_kv_heads), total = (x.shape[1] for x in (query, key)), heads.total if heads else query.shape[1]
    initial = method.initial_parameters(
        config,
        num_heads=total,
        num_kv_heads=max(1, total * num_kv_heads // num_heads),
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        max_length=max(query.shape[2], key.shape[2]),
    )
    initial = initial if heads is None else parameters_of_slice(config, initial, heads, num_heads)
    return {**{name: x.to(query.device) for name, x in initial.items()}, **some}


def _fill_masked(key: Tensor, value: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """`zero_masked` with a gradient."""
    if key_mask is None:
        return key, value
    masked = ~key_mask[:, None, :, None]
    return key.masked_fill(masked, 0.0), value.masked_fill(masked, 0.0)


@replaced_in_graphs(_fill_masked)
def zero_masked(key: Tensor, value: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Set keys and values (B, H_kv, Nk, .) to 0 where the mask (B, Nk) is False, so that padding may hold NaN."""
    if key_mask is None or (torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)):
        return _fill_masked(key, value, key_mask)
    # `masked_fill` is not vectorized on CPUs: for two tensors it takes up to a fifth of the time of exact attention.
    integer = _INTEGERS[key.element_size()]
    bits = key_mask.to(integer).neg_()[:, None, :, None]  # all bits where the mask is True
    return (key.view(integer) & bits).view(key.dtype), (value.view(integer) & bits).view(value.dtype)


def repeat_kv(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the heads of keys and values (B, H_kv, Nk, .) so that there are as many as of the queries."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def cast_under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, cast all tensors to its dtype, as PyTorch does for its own attention."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device) or tensors[0].dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) for x in tensors)


def cast_to_compute(config: MethodConfig, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast float32 tensors to the config's `compute_dtype`, if the device multiplies it fast."""
    if config.compute_dtype == "auto" or not multiplies_bfloat16(tensors[0].device):
        return tensors
    if any(x.dtype != torch.float32 for x in tensors):
        return tensors
    return tuple(x.bfloat16() for x in tensors)
