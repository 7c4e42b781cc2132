"""What users pass to attention: arguments of the wrong type, and names that other packages use for them."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError, shown, unknown_name
from hf_efficient_attn.methods._shared.config import MethodConfig
from hf_efficient_attn.methods._shared.registry import get_method, methods_with
from hf_efficient_attn.ops.export import exporting_to_onnx, in_graph
from hf_efficient_attn.ops.random import HeadSlice

_ARGUMENTS = ("attention_mask", "is_causal", "scale", "dropout_p", "parameters", "distance_bias", "heads")
_MASK = "use attention_mask, bool (B, Nk), True = attend, and is_causal"
_BIAS = "use distance_bias, which depends on the distance alone; a bias for every pair is not supported"
_NO_WEIGHTS = "leave it out, because no matrix of weights is computed"
# Arguments of attention in PyTorch and Transformers, and of `hea.convert` -> what to do instead.
_ELSEWHERE = {
    "attn_mask": _MASK,
    "mask": _MASK,
    "key_mask": _MASK,
    "padding_mask": _MASK,
    "key_padding_mask": f"{_MASK}; key_padding_mask is True for padding, so give its opposite",
    "causal": "use is_causal",
    "scaling": "use scale",
    "softmax_scale": "use scale",
    "dropout": "use dropout_p",
    "attention_dropout": "use dropout_p",
    "enable_gqa": "leave it out, because key and value may always have fewer heads than the query",
    "output_attentions": _NO_WEIGHTS,
    "need_weights": _NO_WEIGHTS,
    "attn_bias": _BIAS,
    "position_bias": _BIAS,
    "dropout_p": "the naive form has no dropout",
    "layers": "it belongs to hea.convert, because this call is one layer",
}


class Arguments(NamedTuple):
    """The arguments of a call besides the tensors, as the user gave them; see `call.attention`."""

    attention_mask: Tensor | None
    is_causal: bool
    scale: float | None
    dropout_p: float
    seed: int | Tensor | None
    distance_bias: Tensor | None = None
    heads: HeadSlice | None = None


def check_names(config: MethodConfig, hyperparameters: Mapping[str, Any]) -> None:
    """Refuse keyword arguments of a call that are neither hyperparameters nor learned parameters, which are tensors."""
    known = (*config.hyperparameters(), *config.learned_parameters)
    for name, value in hyperparameters.items():
        if name in _ELSEWHERE and name not in known:
            refuse(f"{name!r} is no argument here: {_ELSEWHERE[name]}", config)
        if name not in known:
            refuse(unknown_name("hyperparameter", name, (*known, *_ARGUMENTS)), config)
        if name in config.learned_parameters and not isinstance(value, Tensor):
            refuse(_no_tensor(name, value), config)


def check_types(config: MethodConfig, tensors: tuple[object, ...], arguments: Arguments, parameters: object) -> None:
    """Refuse arguments of a call that do not have the types of its signature.

    Args:
        config: the method.
        tensors: query, key and value.
        arguments: the other arguments.
        parameters: must be a mapping or None.
    """
    for name, x in zip(("query", "key", "value"), tensors, strict=True):
        if not isinstance(x, Tensor):
            refuse(_no_tensor(name, x), config)
    # A user's values may have other types than the annotated ones.
    mask, is_causal, scale, dropout_p, _, bias, _ = cast(tuple[object, ...], arguments)
    for name, x in (("attention_mask", mask), ("distance_bias", bias)):
        if x is not None and not isinstance(x, Tensor):
            refuse(_no_tensor(name, x), config)
    if not isinstance(is_causal, bool):
        refuse(f"is_causal must be True or False, not {shown(is_causal)}", config)
    if scale is not None and not _is_number(scale):
        refuse(f"scale must be a number, or None for 1/sqrt(head_dim), not {shown(scale)}", config)
    if not _is_number(dropout_p):
        refuse(f"dropout_p must be a number, not {shown(dropout_p)}", config)
    if parameters is not None and not isinstance(parameters, Mapping):
        refuse(f"parameters must be a dictionary of tensors by name, not {shown(parameters)}", config)


def _is_number(value: object) -> bool:
    """Whether `float` takes it and it is no string. torch.compile traces the first test only."""
    return isinstance(value, (int, float, Tensor)) or hasattr(value, "__float__")


def refuse_positional(method: str) -> NoReturn:
    """Refuse a fourth argument by position, which PyTorch's attention takes for its mask."""
    raise UnsupportedAttentionError(f"{method}: only query, key and value are given by position: for a mask {_MASK}")


def _no_tensor(name: str, value: object) -> str:
    return f"{name} must be a tensor, not a {type(value).__name__}: give torch.as_tensor({name})"


def refuse(problem: str, config: MethodConfig) -> NoReturn:
    """Refuse a call of a method."""
    raise UnsupportedAttentionError(f"{config.method}: {problem}")


def check_call(config: MethodConfig, query: Tensor, key: Tensor, value: Tensor, arguments: Arguments) -> None:
    """Refuse everything that can be wrong with a call before any work is done."""
    refuse_tracing(config)
    # Each attribute of a tensor is read once, because that takes most of the time of a call of few tokens.
    info, mask, shapes = get_method(config.method).info, arguments.attention_mask, (query.shape, key.shape, value.shape)
    if not len(shapes[0]) == len(shapes[1]) == len(shapes[2]) == 4:
        refuse(
            f"query, key and value must have the shape (batch, num_heads, length, head_dim); got {_names(shapes)}",
            config,
        )
    (batch, num_heads, q_len, head_dim), (*of_key, key_dim), (*of_value, _) = shapes
    kv_batch, num_kv_heads, kv_len = of_key
    if of_key != of_value or batch != kv_batch or head_dim != key_dim:
        refuse(f"these shapes do not fit together: {_names(shapes)}", config)
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
    if arguments.is_causal and not info.causal:
        refuse(f"it has no causal form. Methods that have one: {', '.join(methods_with('causal'))}", config)
    if q_len != kv_len and config.needs_square and not arguments.is_causal:
        refuse(f"it needs as many queries as keys; got {q_len} and {kv_len}", config)
    bias = arguments.distance_bias
    if bias is not None:
        if not config.adds_distance_bias:
            refuse(
                "it cannot add a bias by distance to its scores, because it does not compute the scores of all pairs. "
                f"Methods that can: {', '.join(methods_with('adds_distance_bias'))}",
                config,
            )
        if bias.ndim != 2 or bias.shape[0] != num_heads or bias.shape[1] % 2 == 0:
            refuse(f"distance_bias must be ({num_heads}, 2R + 1); got {tuple(bias.shape)}", config)
    if not 0.0 <= arguments.dropout_p < 1.0:
        refuse(f"dropout_p={arguments.dropout_p!r} must be at least 0 and below 1", config)
    if arguments.seed is not None and not isinstance(arguments.seed, (int, Tensor)):
        refuse(f"seed must be an integer or None, not {type(arguments.seed).__name__}", config)


def _names(shapes: Iterable[torch.Size]) -> str:
    """The shapes of query, key and value for messages."""
    return ", ".join(f"{name} {tuple(shape)}" for name, shape in zip(("query", "key", "value"), shapes, strict=True))


def refuse_tracing(config: MethodConfig) -> None:
    """Refuse a call that `torch.jit.trace` or `torch.onnx.export` records if the graph would fail or be wrong.

    Raises:
        UnsupportedAttentionError: the method is not `exportable` to ONNX, or the tracer replaces lengths by numbers.
    """
    is_onnx = exporting_to_onnx()
    if is_onnx and not config.exportable:
        raise UnsupportedAttentionError(
            f"{config.method} cannot be exported to ONNX: its sorting, sampling or lengths have no form there. Convert "
            f"the model to {' or '.join(methods_with('exportable'))}, or back to exact attention with "
            "hea.convert(model, 'sdpa'), before the export"
        )
    if in_graph() or not torch.jit.is_tracing():
        return
    if is_onnx:
        raise UnsupportedAttentionError(
            f"{config.method}: torch.onnx.export with dynamo=False gives a graph for the length of the example only: "
            "leave dynamo=False out"
        )
    raise UnsupportedAttentionError(
        f"{config.method}: torch.jit.trace gives a graph for the length and the values of the example only: use "
        f"torch.compile or torch.export, or torch.onnx.export with {' or '.join(methods_with('exportable'))}"
    )
