"""What users pass to attention: arguments of the wrong type, and names that other packages use for them."""

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn, cast

from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError, shown, unknown_name
from hf_efficient_attn.methods._shared.config import MethodConfig
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
