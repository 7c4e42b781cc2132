"""The inputs of a model's attention layers, captured while the model computes exact attention.

Each call of an attention layer is passed to a function from inside the forward pass, so that the queries, keys and
values of only one layer are in memory at a time.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration import models, settings, switching
from hf_efficient_attn.integration.attention import head_slice_of, read_call
from hf_efficient_attn.integration.distance_bias import attach_hook
from hf_efficient_attn.integration.exact import exact_layer
from hf_efficient_attn.integration.inputs import padding_mask
from hf_efficient_attn.integration.layers import Layer, ModuleLocation, in_order
from hf_efficient_attn.integration.packing import refuse_begins
from hf_efficient_attn.integration.refusals import why_cross_attention_is_exact
from hf_efficient_attn.methods import MethodConfig, attention, parameters_of_slice
from hf_efficient_attn.ops.row_error import row_error

# The batches of a model: mappings of its arguments, or tensors of its main input.
Batch = Mapping[str, Any] | Tensor

_NAME = "efficient_attention_capture"


class Call(NamedTuple):
    """One call of an attention layer."""

    location: ModuleLocation  # of the module in its model
    query: Tensor  # (B, H, Nq, D)
    key: Tensor  # (B, H_kv, Nk, D)
    value: Tensor  # (B, H_kv, Nk, Dv)
    key_mask: Tensor | None  # bool (B, Nk), True = attend; None if nothing is masked
    is_causal: bool
    scale: float | None  # factor of the scores; None for 1/sqrt(D)
    # (B, H, Nq, Dv), the output of exact attention in float32 or float64, or of what is captured in its place.
    exact: Tensor
    # A method's config -> why a converted model computes this call exactly; None if it does not.
    why_exact: Callable[[MethodConfig], str | None]
    module: nn.Module
    distance_bias: Tensor | None = None  # (H, 2R + 1), the bias of the scores by distance; None for none
    sinks: Tensor | None = None  # (H,), attention sinks; None for none
    window: int | None = None  # the number of keys on one side, its own included, that a query attends to; None for all

    @property
    def layer(self) -> Layer | None:
        """What reports call the layer of the module: a number or a name; None if it has neither."""
        return self.location.label

    @property
    def name(self) -> str:
        """The module's name in its model."""
        return self.location.name

    @property
    def tokens(self) -> int:
        """The number of keys of the longest sequence, without its padding."""
        return self.key.shape[2] if self.key_mask is None else int(self.key_mask.sum(1).max())

    @property
    def query_mask(self) -> Tensor | None:
        """Bool (B, Nq), the queries that are not padding; None if all are valid, or if that is unknown."""
        return None if self.location.is_cross or self.query.shape[2] != self.key.shape[2] else self.key_mask

    def rows(self, some: slice) -> "Call":
        """The call for some sequences of the batch."""
        key_mask = None if self.key_mask is None else self.key_mask[some]
        tensors = {name: getattr(self, name)[some] for name in ("query", "key", "value", "exact")}
        return self._replace(**tensors, key_mask=key_mask)

    def chosen(self, config: MethodConfig | None) -> MethodConfig | None:
        """The method that computes the call in a model whose layer has `config`; None for exact attention."""
        return None if config is None or self.why_exact(config) is not None else config

    def longest(self) -> "Call":
        """The call for the sequence with the most tokens."""
        index = 0 if self.key_mask is None else int(self.key_mask.sum(1).argmax())
        return self.rows(slice(index, index + 1))

    def errors(
        self, config: MethodConfig, parameters: Mapping[str, Tensor] | None = None, output: Tensor | None = None
    ) -> Tensor:
        """Relative operator norm of a method's error, with the draws of a converted model: float64 (B, H).

        It is 0 for sequences without a valid token, and for calls that a converted model computes exactly. `parameters`
        are those that the method has learned; None for the values that a conversion starts from. `output` is what
        `compute` returns, if it is known.
        """
        shape, valid = self.query.shape[:2], self.query_mask
        if self.chosen(config) is None:
            return torch.zeros(shape, dtype=torch.float64)
        valid = None if valid is None else valid.repeat_interleave(shape[1], 0)
        out = self.compute(config, parameters) if output is None else output
        with torch.autocast(out.device.type, enabled=False):
            error = row_error(out.flatten(0, 1), self.exact.flatten(0, 1), valid).estimate
        return error.view(shape).cpu().double()

    @property
    def sequences(self) -> list[int]:
        """The indices of the sequences of the batch that have a valid token."""
        mask = self.key_mask
        return [index for index in range(len(self.query)) if mask is None or bool(mask[index].any())]

    def compute(self, config: MethodConfig, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """The output of a method, (B, H, Nq, Dv), in the dtype of a converted model; arguments as in `errors`."""
        heads = head_slice_of(config.method, self.module, self.query.shape[1])
        if heads is not None and parameters is not None:
            parameters = parameters_of_slice(config, parameters, heads, self.query.shape[1])
        return attention(
            config, self.query, self.key, self.value, attention_mask=self.key_mask, is_causal=self.is_causal,
            scale=self.scale, seed=settings.layer_seed(self.location.layer), parameters=parameters, heads=heads,
            distance_bias=self.distance_bias, sinks=self.sinks,
        )  # fmt: skip

    def compute_exact(self) -> Tensor:
        """The output of exact attention, as the layers compute it that stay exact in a converted model."""
        return exact_layer(
            self.query, self.key, self.value, self.key_mask, is_causal=self.is_causal, scale=self.scale, dropout_p=0.0,
            distance_bias=self.distance_bias, window=self.window, sinks=self.sinks,
        )  # fmt: skip


def exact_attention_of(call: Call) -> Tensor:
    """The output of exact attention for the inputs of a call, in float32 or float64."""
    acc_dtype = torch.promote_types(call.value.dtype, torch.float32)
    tensors = {name: getattr(call, name).to(acc_dtype) for name in ("query", "key", "value")}
    return call._replace(**tensors).compute_exact()


@dataclass(eq=False)
class _Capture:
    """The attention function of a model whose calls are captured, with arguments of `capture_attention`."""

    visit: Callable[[Call], object]
    compute: Callable[[Call], Tensor]
    windows: bool
    known: dict[nn.Module, tuple[ModuleLocation, PreTrainedConfig]] = field(default_factory=dict)
    takes_distance_bias: ClassVar = True  # as `distance_bias.TAKES_DISTANCE_BIAS` says

    def add(self, root: PreTrainedModel) -> None:
        """Make a model call this function, which knows its attention modules then."""
        switching.adopt(root)
        for module, location, config, owner in models.attention_modules(root):
            self.known[module] = location, config
            attach_hook(module)
            if models.uses_interface(type(module)) and not models.knows_causality(module, owner):
                raise UnsupportedAttentionError(
                    f"{type(owner).__name__} does not support attn_implementation='sdpa', so that it is unknown "
                    "which of its layers are causal. No method supports such a model"
                )
        # `set_attn_implementation` would delete learned parameters.
        for config in models.configs_of(root):
            config._attn_implementation_internal = _NAME

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Compute and visit a call; the arguments are those of an attention function of Transformers."""
        if module not in self.known:
            raise UnsupportedAttentionError(
                f"a module of class {type(module).__name__} calls the attention interface, but is not recognised as an "
                "attention module. Measure another model, or give the class a name with 'Attention' in it"
            )
        location, config = self.known[module]
        read = read_call("measuring attention", module, location, key, attention_mask, kwargs)
        refuse_begins("measuring attention", read.begins)
        if read.filled is not None:
            raise UnsupportedAttentionError("measuring attention: a static cache has empty places: leave the cache out")
        is_cross = not read.is_causal and (location.is_cross or query.shape[2] != key.shape[2])
        # A method that needs as many keys as queries is refused for a module with fewer keys by construction.
        is_cross = is_cross and not getattr(module, "is_rectangular", False)
        why = functools.partial(why_cross_attention_is_exact, config, location) if is_cross else lambda method: None
        tensors, of_scores = (query, key, value, read.key_mask), (read.distance_bias, read.sinks, read.window)
        empty = value.new_empty(0)
        call = Call(location, *tensors, read.is_causal, read.scale, empty, why, module, *of_scores)
        out = self.compute(call) if location.window is None else call.compute_exact()
        if location.window is None and not out.isfinite().all():
            raise UnsupportedAttentionError(
                f"{'exact ' if self.compute is exact_attention_of else ''}attention in {call.name} gives values that "
                f"are not finite ({call.value.dtype}), so that errors cannot be measured. Check the weights, or load "
                "the model in float32"
            )
        if location.window is None or self.windows:
            self.visit(call._replace(exact=out))
        return out.to(value.dtype).transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def capture_attention(
    model: nn.Module,
    visit: Callable[[Call], object],
    compute: Callable[[Call], Tensor] = exact_attention_of,
    *,
    windows: bool = False,
) -> Iterator[None]:
    """Pass every attention call of the Transformers models in `model` to `visit` within the context.

    They are in eval mode and compute exact attention there, or `compute`, which gets a call whose `exact` is empty, and
    whose result becomes `exact`. With `windows`, `visit` also gets the calls with a sliding window, which no method
    computes. Afterwards the model, its configs and the global random state are as they were before. Not thread-safe.

    A model whose attention does not use Transformers' attention interface is refused; in the forward pass, masks other
    than padding, and arguments that a method ignores.
    """
    roots = models.transformers_models(model)
    before = models.Snapshot([model])
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    capture = _Capture(visit, compute, windows)
    # Without a registered mask function Transformers drops the padding mask.
    AttentionMaskInterface.register(_NAME, padding_mask)
    ALL_ATTENTION_FUNCTIONS[_NAME] = capture
    try:
        for root in roots:
            capture.add(root)
        model.eval()
        with torch.random.fork_rng(devices), torch.no_grad():
            yield
    finally:
        before.restore()
        ALL_ATTENTION_FUNCTIONS.pop(_NAME)


def forward(model: nn.Module, batch: Batch, **options: Any) -> Any:
    """Run the model on one batch, a mapping of its arguments or a tensor of its main input, with other arguments."""
    root = models.transformers_models(model)[0]
    batch = {root.main_input_name: batch} if isinstance(batch, Tensor) else batch
    if not isinstance(batch, Mapping) or not batch:
        raise UnsupportedAttentionError(
            "a batch is a mapping of the model's arguments, such as the output of a tokenizer, or a tensor of the "
            f"model's main input; got {type(batch).__name__}"
        )
    device, inputs = next(model.parameters()).device, {**batch, **options}
    if device.type != "meta":  # the hooks of an offloaded model move its inputs
        inputs = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    if "use_cache" in inspect.signature(root.forward).parameters:
        inputs.setdefault("use_cache", False)
    return model(**inputs)


def without_head(model: PreTrainedModel) -> nn.Module:
    """The model without its head: its base model, unless that is an encoder of what the model embeds (DINOv3)."""
    base: nn.Module = model.base_model  # the annotations of Transformers are wrong
    return base if model.main_input_name in inspect.signature(base.forward).parameters else model


def valid_tokens(batch: Batch, output: Tensor, *, of_decoder: bool) -> Any:
    """The index of what the batch does not mask in an output (B, N, D), perhaps that of a decoder beside an encoder."""
    name = "decoder_attention_mask" if of_decoder else "attention_mask"
    mask = batch.get(name) if isinstance(batch, Mapping) else None
    return mask.to(output.device).bool() if mask is not None and mask.shape == output.shape[:-1] else ...


class AttentionSummary(NamedTuple):
    """Facts about a model's attention, observed in one forward pass."""

    layers: tuple[Layer, ...] = ()  # that compute attention, in order
    is_causal: bool = False  # whether some of them are causal
    is_rectangular: bool = False  # whether some modules have fewer keys than queries by construction
    max_kv_len: int = 0  # the largest number of keys
    calls: tuple[Call, ...] = ()  # of attention modules in their order, with tensors that hold no numbers
    takes_pictures: bool = False  # whether the model's inputs are pictures
    causal_layers: frozenset[Layer] = frozenset()
    has_distance_bias: bool = False  # whether some scores have a bias by distance
    has_sinks: bool = False  # whether some modules have attention sinks


def summarize_attention(model: nn.Module, batch: Batch) -> AttentionSummary:
    """Run one forward pass of exact attention and describe the attention; refuse a model without numbered layers."""
    calls: list[Call] = []

    def visit(call: Call) -> None:
        # Without numbers, so that the tensors of one layer at a time are in memory.
        calls.append(Call._make(x.to("meta") if isinstance(x, Tensor) else x for x in call))

    with capture_attention(model, visit):
        forward(model, batch)
    layers = tuple(layer for layer in in_order(call.layer for call in calls) if layer is not None)
    if not layers:
        raise UnsupportedAttentionError(
            f"{type(model).__name__} has no numbered layers that compute their attention through Transformers' "
            "attention interface, so that no method can replace their attention"
        )
    return AttentionSummary(
        layers,
        is_causal=any(call.is_causal for call in calls),
        is_rectangular=any(getattr(module, "is_rectangular", False) for module in model.modules()),
        max_kv_len=max(call.key.shape[2] for call in calls),
        calls=tuple(calls),
        takes_pictures=takes_pictures(models.transformers_models(model)[0]),
        causal_layers=frozenset(call.layer for call in calls if call.is_causal and call.layer is not None),
        has_distance_bias=any(call.distance_bias is not None for call in calls),
        has_sinks=any(call.sinks is not None for call in calls),
    )


def takes_pictures(model: PreTrainedModel) -> bool:
    """Whether the main input of a model is a batch of pictures."""
    return bool(model.main_input_name == "pixel_values")
