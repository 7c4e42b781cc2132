"""What reaches the attention of every layer of a model while it computes exact attention.

One call is handed over at a time, from inside the forward pass, so that no more than one layer's queries, keys and
values are held.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.metrics import attention_error
from hf_efficient_attn.integration.layers import Layer, in_order, layer_seed
from hf_efficient_attn.integration.models import transformers_models
from hf_efficient_attn.methods import MethodConfig, causal_methods, get_method, learns, rectangular_methods

_NAME = "efficient_attention_capture"


class Call(NamedTuple):
    """One attention call.

    layer: the first integer in the module's name, None where there is none. name: of the module in its model.
    query (B,H,Nq,D), key (B,Hkv,Nk,D), value (B,Hkv,Nk,Dv). mask: bool (B,Nk), True = attend, or None.
    exact: (B,H,Nq,Dv) in float32 or wider. why_exact: of a method's name, why a converted model leaves this call exact,
    None where it does not.
    """

    layer: Layer | None
    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float | None
    exact: Tensor
    why_exact: Callable[[str], str | None]

    def errors(self, config: MethodConfig, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """Relative operator norm of a method's error, by the draws of the converted model: float64 (B, H).

        Rows of the batch without a token have error 0, and so has a call that a converted model leaves exact.
        """
        if self.why_exact(config.method) is not None:
            return torch.zeros(self.query.shape[:2], dtype=torch.float64)
        given = {} if parameters is None else {"parameters": dict(parameters)}
        found = attention_error(
            config, self.query, self.key, self.value, attention_mask=self.mask, is_causal=self.is_causal,
            scale=self.scale, seed=layer_seed(self.layer), exact=self.exact, **given,
        )  # fmt: skip
        return found.operator.cpu()


def _never(method: str) -> None:
    return None


@contextlib.contextmanager
def watching(model: nn.Module, visit: Callable[[Call], None]) -> Iterator[None]:
    """Within this, `model` is in eval mode and exact, and every call of its attention is handed to `visit`.

    Afterwards the model, its configs and the global random state are as they were. Not for two threads at once.

    Raises:
        UnsupportedAttentionError: no Transformers model inside, or one whose attention does not pass through the
            interface; in the forward pass, masks other than padding and arguments that a method would lose.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from hf_efficient_attn.integration.attention import refuse_arguments, why_cross_attention_is_exact
    from hf_efficient_attn.integration.exact import exact_layer
    from hf_efficient_attn.integration.masks import padding_mask
    from hf_efficient_attn.integration.models import attention_modules, configs_of

    roots = transformers_models(model)
    places = {}
    for root in roots:
        for module, place, config, owner in attention_modules(root):
            places[id(module)] = place, config
            if not owner._supports_sdpa:
                raise UnsupportedAttentionError(
                    f"{type(owner).__name__} does not support attn_implementation='sdpa': it is not known which of its "
                    "attention is causal, and it takes none of the methods"
                )

    def attend(module, query, key, value, attention_mask, *, dropout=0.0, scaling=None, is_causal=None, **kwargs):
        if id(module) not in places:
            raise UnsupportedAttentionError(
                f"a {type(module).__name__} computes attention and is not known for an attention module"
            )
        place, config = places[id(module)]
        refuse_arguments("measuring attention", key.shape[2], attention_mask, kwargs)
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        is_causal = bool(is_causal) and not place.is_cross
        crossing = not is_causal and (place.is_cross or query.shape[2] != key.shape[2])
        wide = torch.promote_types(value.dtype, torch.float32)
        exact = exact_layer(
            query.to(wide), key.to(wide), value.to(wide), attention_mask, is_causal=is_causal, scale=scaling,
            dropout_p=0.0,
        )  # fmt: skip
        if not exact.isfinite().all():
            raise UnsupportedAttentionError(
                f"exact attention in {place.name} gives numbers that are not finite ({value.dtype}), so that no error "
                "can be measured: look at the weights, or load the model in float32"
            )
        # A module that has fewer keys by construction takes no method that cannot: measuring one is refused.
        crossing = crossing and not getattr(module, "is_rectangular", False)
        why = functools.partial(why_cross_attention_is_exact, config=config) if crossing else _never
        names = place.layer, place.name
        visit(Call(*names, query, key, value, attention_mask, is_causal, scaling, exact, why))
        return exact.to(value.dtype).transpose(1, 2).contiguous(), None

    configs = [(config, config._attn_implementation_internal) for root in roots for config in configs_of(root)]
    training = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    # A mask function that were not registered for good would not be asked, and padding lost.
    AttentionMaskInterface.register(_NAME, padding_mask)
    ALL_ATTENTION_FUNCTIONS[_NAME] = attend
    try:
        # Not by set_attn_implementation, which would drop the parameters that a method has learned.
        for config, _ in configs:
            config._attn_implementation_internal = _NAME
        model.eval()
        with torch.random.fork_rng(devices), torch.no_grad():
            yield
    finally:
        for config, implementation in configs:
            config._attn_implementation_internal = implementation
        for module, mode in training:
            module.training = mode
        del ALL_ATTENTION_FUNCTIONS[_NAME]


def forward(model: nn.Module, batch: "Mapping[str, Any] | Tensor") -> Any:
    """The model on one batch: a mapping of its arguments, or its main input alone."""
    if isinstance(batch, Tensor):
        batch = {transformers_models(model)[0].main_input_name: batch}
    if not isinstance(batch, Mapping) or not batch:
        raise UnsupportedAttentionError(
            "a batch is a mapping of the model's arguments, such as what a tokenizer gives, or a tensor of its main "
            f"input; got {type(batch).__name__}"
        )
    device = next(model.parameters()).device
    inputs = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in batch.items()}
    if "use_cache" in inspect.signature(transformers_models(model)[0].forward).parameters:
        inputs.setdefault("use_cache", False)
    return model(**inputs)


class Shape(NamedTuple):
    """What a forward pass shows of a model: layers with attention, whether some of it is causal, its most keys."""

    layers: tuple[Layer, ...]
    is_causal: bool
    longest: int
    is_rectangular: bool


def look(model: nn.Module, batch: "Mapping[str, Any] | Tensor") -> Shape:
    """One forward pass of exact attention.

    Raises:
        UnsupportedAttentionError: no numbered layer computes its attention through Transformers' interface.
    """
    calls: list[tuple[Layer | None, bool, int]] = []
    with watching(model, lambda call: calls.append((call.layer, call.is_causal, call.key.shape[2]))):
        forward(model, batch)
    layers = in_order(layer for layer, _, _ in calls if layer is not None)
    if not layers:
        raise UnsupportedAttentionError(
            f"{type(model).__name__} has no numbered layers that compute their attention through Transformers' "
            "attention interface, so that no method can be put into them"
        )
    is_rectangular = any(getattr(module, "is_rectangular", False) for module in model.modules())
    is_causal, longest = any(causal for _, causal, _ in calls), max(keys for _, _, keys in calls)
    return Shape(tuple(layers), is_causal, longest, is_rectangular)


def check_methods(configs: Sequence[MethodConfig], is_causal: bool, is_rectangular: bool = False) -> None:
    """That the methods have what a model needs, and learn nothing.

    Raises:
        UnsupportedAttentionError: names the methods that would do.
    """
    for config in configs:
        if is_causal and not get_method(config.method).info.causal:
            raise UnsupportedAttentionError(
                f"the model is a decoder and {config.method} has no causal form. Methods that have one: "
                f"{', '.join(causal_methods())}"
            )
        if is_rectangular and not get_method(config.method).info.rectangular:
            raise UnsupportedAttentionError(
                f"the model has fewer keys than queries and {config.method} needs as many of each. Methods that do "
                f"not: {', '.join(rectangular_methods())}"
            )
        if learns(config):
            raise UnsupportedAttentionError(
                f"{config.method} has learned parameters, whose error before training says nothing of that after it: "
                "leave it out here, convert the model to it and fine-tune"
            )
