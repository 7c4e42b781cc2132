"""Names that other packages use for arguments of attention, and the refusal of a call."""

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_name
from hf_efficient_attn.methods._shared.config import MethodConfig

ARGUMENTS = ("attention_mask", "is_causal", "scale", "dropout_p", "parameters", "distance_bias", "heads")
_MASK = "use attention_mask, bool (B, Nk), True = attend, and is_causal"
_BIAS = "use distance_bias, which depends on the distance alone; a bias for every pair is not supported"
_NO_WEIGHTS = "leave it out, because no matrix of weights is computed"
# Maps arguments of attention in PyTorch and Transformers, and of `hea.convert`, to what to do instead.
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


def check_names(config: MethodConfig, hyperparameters: Mapping[str, Any]) -> None:
    """Refuse keyword arguments of a call that are neither hyperparameters nor learned parameters, which are tensors."""
    known = (*config.hyperparameters(), *config.learned_parameters)
    for name, value in hyperparameters.items():
        if name in _ELSEWHERE and name not in known:
            refuse(f"{name!r} is no argument here: {_ELSEWHERE[name]}", config)
        if name not in known:
            refuse(unknown_name("hyperparameter", name, (*known, *ARGUMENTS)), config)
        if name in config.learned_parameters and not isinstance(value, Tensor):
            refuse(no_tensor(name, value), config)


def refuse_positional(method: str) -> NoReturn:
    """Refuse a fourth argument by position, which PyTorch's attention takes for its mask."""
    raise UnsupportedAttentionError(f"{method}: only query, key and value are given by position: for a mask {_MASK}")


def no_tensor(name: str, value: object) -> str:
    """Return the message for an argument that must be a tensor."""
    return f"{name} must be a tensor, not a {type(value).__name__}: give torch.as_tensor({name})"


def refuse(problem: str, config: MethodConfig) -> NoReturn:
    """Refuse a call of a method."""
    raise UnsupportedAttentionError(f"{config.method}: {problem}")
