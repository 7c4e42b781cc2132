"""The path from a user's call to a method: checks, masks, grouped queries, precision and learned parameters.

A method deals with none of these. `register_method` states what a method gets.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Mapping
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError, shown
from hf_efficient_attn.methods._shared.config import AttentionOptions, MethodConfig, check_names, no_tensor, refuse
from hf_efficient_attn.methods._shared.graph import call_in_graph
from hf_efficient_attn.methods._shared.registry import (
    METHODS,
    get_method,
    make_config,
    methods_with,
    parameters_of_slice,
)
from hf_efficient_attn.ops import tracing
from hf_efficient_attn.ops.backends.devices import multiplies_bfloat16, reads_next_rows
from hf_efficient_attn.ops.shards import HeadSeed, HeadSlice
from hf_efficient_attn.ops.slices import with_zero_gradients

# With a key-value cache, up to this many queries are decoded, and more are computed like a whole sequence.
_MAX_DECODED_QUERIES = 128


class Arguments(NamedTuple):
    """The arguments of a call besides the tensors, as the user gave them; see `attention`."""

    attention_mask: Tensor | None = None  # bool (B, Nk)
    is_causal: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    seed: int | Tensor | None = 0
    parameters: Mapping[str, Tensor] | None = None
    distance_bias: Tensor | None = None  # (H, 2R + 1)
    heads: HeadSlice | None = None
    sinks: Tensor | None = None  # (H,)
    some_parameters: Mapping[str, Tensor] = {}  # learned parameters that were given by name


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
    sinks: Tensor | None = None,
    **hyperparameters: Any,
) -> Tensor:
    """Compute attention by any method of this package.

    Args:
        method_or_config: a name from `available_methods()`, or a method's config.
        query: (B, H, Nq, D).
        key: (B, H_kv, Nk, D). H_kv divides H (grouped queries): query head h uses key head h // (H // H_kv).
        value: (B, H_kv, Nk, Dv).
        attention_mask: bool (B, Nk), True for the keys to attend to. Masked keys and values have no influence on the
            output, even if they are NaN. If Nq = Nk, many methods mask queries too: in cross attention leave keys out.
        is_causal: query i attends to the keys up to its own position. If Nq < Nk, the queries are the last Nq
            positions, as with a key-value cache. If Nq > Nk, the first Nq - Nk queries attend to nothing.
        scale: the factor of the scores q . k; 1/sqrt(D) by default.
        dropout_p: the probability with which an attention weight is dropped. Drawn from the global generator.
        seed: the seed of hashes, samples and random features, which is added to the config's own seed. The same seed
            gives the same output and does not change the global random state. None (for training) draws a seed from the
            global generator.
        parameters: all learned parameters of the method by name, as a converted model holds them.
        distance_bias: (H, 2R + 1), the bias of the scores of each head for the distances -R to R, where a distance is
            the position of the key minus the position of the query. Larger distances have the bias for -R or R. For
            some methods only (`MethodConfig.adds_distance_bias`).
        heads: the number of the first of the H heads and the number of all heads, if the layer has more than these H,
            because other processes hold the rest. A head's output is the same as in one call with all heads, unless
            the method decides by errors of all heads. `parameters` belong to the H heads (`parameters_of_slice`).
        sinks: (H,), attention sinks, as GPT-OSS has them: the score of one more key of each head, whose value is 0. For
            some methods only (`MethodConfig.knows_lse`).
        **hyperparameters: values that replace values of the config. Learned parameters can be given here as well, as
            tensors by name. Missing parameters have the values that a conversion starts from.

    Returns:
        (B, H, Nq, Dv) in the dtype of `value`. The output of a query that attends to nothing is 0.

    Raises:
        UnsupportedAttentionError: the method or a hyperparameter is unknown; the shapes or dtypes do not fit together;
            the mask is not (B, Nk); `is_causal` with a method that has no causal form; Nq != Nk with a method that has
            no rectangular form.
    """
    arguments = Arguments(attention_mask, is_causal, scale, dropout_p, seed, parameters, distance_bias, heads, sinks)
    config, arguments = _with_hyperparameters(method_or_config, arguments, hyperparameters)
    check_types(config, (query, key, value), arguments)
    if tracing.in_transform(query, key, value, arguments):
        return _in_transform(config, query, key, value, arguments)
    return tracing.refuse_second_gradient(_attention("forward", config, query, key, value, arguments), config.method)


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
    sinks: Tensor | None = None,
    **hyperparameters: Any,
) -> Tensor:
    """Compute the readable form of a method, with dense (Nq, Nk) matrices; see `attention` for the arguments."""
    arguments = Arguments(attention_mask, is_causal, scale, 0.0, seed, parameters, distance_bias, None, sinks)
    config, arguments = _with_hyperparameters(method_or_config, arguments, hyperparameters)
    check_types(config, (query, key, value), arguments)
    return _attention("naive", dataclasses.replace(config, compute_dtype="auto"), query, key, value, arguments)


def _with_hyperparameters(
    method_or_config: str | MethodConfig, arguments: Arguments, hyperparameters: Mapping[str, Any]
) -> tuple[MethodConfig, Arguments]:
    """Put hyperparameters into the config, and the learned parameters among them into the arguments."""
    config = make_config(method_or_config)
    if not hyperparameters:
        return config, arguments
    check_names(config, hyperparameters)
    learned = {k: v for k, v in hyperparameters.items() if k in config.learned_parameters}
    config = make_config(config, **{k: v for k, v in hyperparameters.items() if k not in learned})
    return config, arguments._replace(some_parameters=learned)


def _attention(
    form: str, config: MethodConfig, query: Tensor, key: Tensor, value: Tensor, arguments: Arguments
) -> Tensor:
    query, key, value = cast_under_autocast(query, key, value)
    return compute(form, config, *prepare(config, query, key, value, arguments)).to(value.dtype)


def _in_transform(config: MethodConfig, query: Tensor, key: Tensor, value: Tensor, arguments: Arguments) -> Tensor:
    if arguments.seed is None:
        arguments = arguments._replace(seed=tracing.draw_seed(query.device))
    learned = {**(arguments.parameters or {}), **arguments.some_parameters}
    others = (arguments.distance_bias, arguments.sinks, arguments.seed, *learned.values())
    return tracing.call_in_transform(
        functools.partial(_attention, "forward", config),
        (query, key, value, arguments),
        config.method,
        by_rows=not any(isinstance(x, Tensor) for x in others),
        draws=arguments.dropout_p > 0.0,
    )


def prepare(
    config: MethodConfig, query: Tensor, key: Tensor, value: Tensor, arguments: Arguments
) -> tuple[Tensor, Tensor, Tensor, AttentionOptions]:
    """Check a call, and turn its arguments into what a method gets, with key heads that are not repeated."""
    check_call(config, query, key, value, arguments)
    mask, is_causal, scale, dropout_p, seed, _, bias, heads, sinks, _ = arguments
    parameters = _all_parameters(config, query, key, value, arguments)
    scale = (query.shape[3] or 1) ** -0.5 if scale is None else float(scale)
    seed = (tracing.draw_seed(query.device) if seed is None else seed) + getattr(config, "seed", 0)
    if heads is not None and not 0 <= heads.first <= heads.total - query.shape[1]:
        raise UnsupportedAttentionError(
            f"{query.shape[1]} heads from head {heads.first} on are not among the {heads.total} heads of the layer: "
            "give the number of the first head, and of all heads in all processes"
        )
    drawn = seed if heads is None else HeadSeed(seed, heads)
    given = mask, is_causal, scale, dropout_p, drawn, parameters, bias, sinks
    options = AttentionOptions(*given, with_lse=sinks is not None)
    if config.compute_dtype != "auto" and query.dtype == torch.float32 and multiplies_bfloat16(query.device):
        query, key, value = (x.bfloat16() for x in (query, key, value))
    if mask is not None:  # padding may hold NaN
        masked = ~mask[:, None, :, None]  # (B, 1, Nk, 1)
        key = key.masked_fill(masked, 0.0)
        value = value.masked_fill(masked, 0.0)
        if query.shape[2] == key.shape[2] and reads_next_rows(query):
            query = torch.where(masked, query.nan_to_num(0.0, 0.0, 0.0), query)
    return query, key, value, options


def _all_parameters(
    config: MethodConfig, query: Tensor, key: Tensor, value: Tensor, arguments: Arguments
) -> Mapping[str, Tensor]:
    """Return the learned parameters that were given, and the initial values of all others."""
    some = {**(arguments.parameters or {}), **arguments.some_parameters}
    if arguments.parameters is not None or len(some) == len(config.learned_parameters) or query.numel() == 0:
        return some
    _, num_heads, q_len, head_dim = query.shape
    num_kv_heads, kv_len = key.shape[1:3]
    heads = arguments.heads
    total = num_heads if heads is None else heads.total
    initial = get_method(config.method).initial_parameters(
        config,
        num_heads=total,
        num_kv_heads=max(1, total * num_kv_heads // num_heads),
        head_dim=head_dim,
        value_dim=value.shape[3],
        max_length=max(q_len, kv_len),
    )
    initial = initial if heads is None else parameters_of_slice(config, initial, heads, num_heads)
    return {**{name: x.to(query.device) for name, x in initial.items()}, **some}


def compute(
    form: str, config: MethodConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """Call the form "forward" or "naive" of a method with what `prepare` returns: (B, H, Nq, Dv)."""
    batch, num_heads, q_len, _ = query.shape
    kv_len = key.shape[2]
    learned = (*options.parameters.values(), options.distance_bias, options.sinks)
    if query.numel() == 0 or kv_len == 0:
        out = value.new_zeros(batch, num_heads, q_len, value.shape[3])
        return with_zero_gradients(out, query, key, value, *learned)  # (B, H, Nq, Dv)
    method = METHODS[config.method]
    # The number of keys before the first query.
    offset = kv_len - q_len if options.is_causal else 0
    if method.decode is not None and offset > 0 and q_len <= _MAX_DECODED_QUERIES:
        form = "decode"
    elif offset < 0:  # the first queries come before all keys
        query = query[:, :, -offset:]  # (B, H, Nk, D)
    key, value = repeat_kv(query, key, value)  # (B, H, Nk, .)
    if form != "decode" and offset > 0:
        # Earlier tokens have no queries here: use their keys instead, and drop their outputs below.
        query = torch.cat((key[:, :, :offset].detach().to(query.dtype), query), 2)  # (B, H, Nk, D)
        options = options._replace(first_query=offset)
    # Entering PyTorch's context takes as long as the checks of a call.
    kind = query.device.type
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext():
        if tracing.in_graph() and form != "naive":
            out = call_in_graph(form, config, query, key, value, options)
        else:
            out = method.compute(form, config, query, key, value, options)
            if out.shape != (shape := (batch, num_heads, query.shape[2], value.shape[3])):
                raise UnsupportedAttentionError(
                    f"the form {form!r} of {config.method!r} returned a tensor of shape {tuple(out.shape)}: return "
                    f"(batch, heads, queries, value dimension), here {shape}"
                )
            # Of short sequences the output may not depend on what is learned.
            out = with_zero_gradients(out, *learned)
    if offset < 0:
        return torch.cat((out.new_zeros(batch, num_heads, -offset, out.shape[-1]), out), 2)  # (B, H, Nq, Dv)
    return out[:, :, out.shape[2] - q_len :] if offset else out  # (B, H, Nq, Dv)


def check_types(config: MethodConfig, tensors: Iterable[object], arguments: Arguments) -> None:
    """Refuse arguments of a call that do not have the types of its signature; `tensors` are query, key and value."""
    # A user's values may have other types than the annotated ones.
    values: dict[str, Any] = arguments._asdict()
    given = dict(zip(("query", "key", "value"), tensors, strict=True))
    given |= {name: values[name] for name in ("attention_mask", "distance_bias", "sinks") if values[name] is not None}
    for name, x in given.items():
        if not isinstance(x, Tensor):
            refuse(no_tensor(name, x), config)
    scale = values["scale"]
    parameters = values["parameters"]
    names = config.learned_parameters
    named = parameters.items() if isinstance(parameters, Mapping) else [("", None)]
    are_learned = parameters is None or all(name in names and isinstance(x, Tensor) for name, x in named)
    for name, is_fit, what in (
        ("is_causal", isinstance(values["is_causal"], bool), "True or False"),
        ("scale", scale is None or _is_number(scale), "a number (multiply the query by a learned one) or None"),
        ("heads", isinstance(values["heads"], (HeadSlice, NoneType)), "a HeadSlice, or None for all heads"),
        ("dropout_p", _is_number(values["dropout_p"]), "a number"),
        ("seed", isinstance(values["seed"], (int, Tensor, NoneType)), "an integer or None"),
        ("parameters", are_learned, f"None, or a dictionary of tensors by the names {names}"),
    ):
        if not is_fit:
            refuse(f"{name} must be {what}, not {shown(values[name])}", config)


def _is_number(value: object) -> bool:
    """Whether `float` takes it without losing a gradient, and it is no string. torch.compile traces no `hasattr`."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not (value.requires_grad and torch.is_grad_enabled())
    return isinstance(value, (int, float)) or hasattr(value, "__float__")


def check_call(config: MethodConfig, query: Tensor, key: Tensor, value: Tensor, arguments: Arguments) -> None:
    """Refuse everything that can be wrong with a call before any work is done."""
    refuse_tracing(config)
    # Each attribute of a tensor is read once, because that takes most of the time of a call of few tokens.
    mask = arguments.attention_mask
    of_query = query.shape
    of_key = key.shape
    of_value = value.shape
    all_4d = len(of_query) == len(of_key) == len(of_value) == 4
    if not all_4d or of_key[:3] != of_value[:3] or of_query[::3] != of_key[::3]:
        refuse(
            f"these shapes do not fit together: query {tuple(of_query)}, key {tuple(of_key)}, value {tuple(of_value)}; "
            "each must be (batch, num_heads, length, head_dim)",
            config,
        )
    batch, num_heads, q_len, _ = of_query
    num_kv_heads, kv_len = of_key[1:3]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        refuse(f"the number of key heads, {num_kv_heads}, must divide the number of query heads, {num_heads}", config)
    dtype = query.dtype
    if not dtype == key.dtype == value.dtype or not dtype.is_floating_point:
        refuse(
            f"query, key and value must have the same floating-point dtype; got {dtype}, {key.dtype}, {value.dtype}",
            config,
        )
    if mask is not None:
        expected = (batch, kv_len)
        if mask.ndim == 4:
            refuse(
                "a 4-D attention mask is not supported, because no (q_len, kv_len) mask is ever built here. Give a "
                f"bool mask of shape {expected} (True = attend) and is_causal, or use attention 'sdpa'",
                config,
            )
        if tuple(mask.shape) != expected or mask.dtype != torch.bool:
            refuse(
                f"attention_mask must be bool {expected}, True = attend; got {mask.dtype} {tuple(mask.shape)}", config
            )
    if arguments.is_causal and not config.causal:
        refuse(f"it has no causal form. Methods that have one: {', '.join(methods_with('causal'))}", config)
    if q_len != kv_len and config.needs_square and not arguments.is_causal:
        refuse(f"it needs as many queries as keys; got {q_len} and {kv_len}", config)
    bias = arguments.distance_bias
    if bias is not None:
        if not config.adds_distance_bias or (arguments.is_causal and not config.adds_causal_bias):
            where, needed = (" of causal attention", "causal") if arguments.is_causal else ("", "distance")
            can = ", ".join(methods_with(f"adds_{needed}_bias"))
            refuse(f"it cannot add a bias by distance to the scores{where}. Methods that can: {can}", config)
        if bias.ndim != 2 or bias.shape[0] != num_heads or bias.shape[1] % 2 == 0:
            refuse(f"distance_bias must be ({num_heads}, 2R + 1); got {tuple(bias.shape)}", config)
    sinks = arguments.sinks
    if sinks is not None and not config.knows_lse:
        can = ", ".join(methods_with("knows_lse", *["causal"] * arguments.is_causal))
        refuse(f"it does not know the sum of its weights, to which sinks are added. Methods that do: {can}", config)
    if sinks is not None and (sinks.shape != (num_heads,) or bias is not None):
        refuse(f"sinks must be ({num_heads},), without a distance_bias; got {tuple(sinks.shape)}", config)
    if not 0.0 <= arguments.dropout_p < 1.0:
        refuse(f"dropout_p={arguments.dropout_p!r} must be at least 0 and below 1", config)


def refuse_tracing(config: MethodConfig) -> None:
    """Refuse a call that `torch.jit.trace` or `torch.onnx.export` records if the graph would fail or be wrong.

    Raises:
        UnsupportedAttentionError: the method is not `exportable` to ONNX, or the tracer replaces lengths by numbers.
    """
    is_onnx = tracing.exporting_to_onnx()
    if is_onnx and not config.exportable:
        raise UnsupportedAttentionError(
            f"{config.method} cannot be exported to ONNX: its sorting, sampling or lengths have no form there. Convert "
            f"the model to {' or '.join(methods_with('exportable'))}, or back to exact attention with "
            "hea.convert(model, 'sdpa'), before the export"
        )
    if tracing.in_graph() or not torch.jit.is_tracing():
        return
    tracer = "torch.jit.trace"
    advice = "use torch.compile or torch.export, or torch.onnx.export with "
    advice += " or ".join(methods_with("exportable"))
    if is_onnx:
        tracer = "torch.onnx.export with dynamo=False"
        advice = "leave dynamo=False out"
    refuse(f"{tracer} gives a graph for the length and the values of the example only: {advice}", config)


def repeat_kv(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the heads of keys and values (B, H_kv, Nk, .) to the number of query heads: (B, H, Nk, .)."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)  # (B, H, Nk, .) each


def cast_under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, cast all tensors to its dtype, as PyTorch does for its own attention."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device) or tensors[0].dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) for x in tensors)
