"""Layers of Transformers' cache whose method computes attention from what the layer holds, instead of from all keys.

No attention class is patched: a model's attention module passes what `cache.update` returns straight to its attention
function, so that the keys themselves can say which layer of which cache they come from. The attention function asks
this layer for its output.

`DynamicCache(config=...)`, which `generate` and the models create themselves, gets a `StateLayer` for every layer whose
method has a recurrence (`switching`). Any other cache (`DynamicCache()` without a config, a quantised one) keeps keys
and values.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods import MethodConfig, attention, attention_with_state, refuse, update_state
from hf_efficient_attn.ops.tracing import draw_seed, replaced_in_graphs

# In Transformers 5.12 `crop` takes the length that remains, in later versions minus the number of tokens to remove.
_CROPS_TO_LENGTH = not hasattr(CacheLayerMixin, "get_max_length")
# The attribute of keys that refers to the layer that returned them. No output depends on it: keys that lose it are
# computed with as any others, and `NewKeys` without it are refused.
LAYER = "_state_layer"


@functools.cache
def cache_argument() -> str:
    """What models and `generate` call a cache: "cache", and before Transformers 5.24 "past_key_values"."""
    from transformers.generation import GenerationMixin  # which a model without `generate` does not need

    known = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return "cache" if "cache" in known else "past_key_values"


class NewKeys(Tensor):
    """Keys of only the new tokens, on their way from a cache layer to the attention function. Nothing else uses them.

    Code that reads them as the keys of all tokens would silently lose the past: another attention function after the
    model was switched, or a model that changes its cached keys. torch.compile fails on them.
    """

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Allow to look at size, type and device, and refuse everything else."""
        name = getattr(function, "__name__", "")
        looks = name in ("__get__", "size", "dim", "__repr__") or name.lstrip("_").startswith("is_")
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {})) if looks else None
        if not looks or isinstance(result, Tensor):
            raise UnsupportedAttentionError(
                "this cache holds a state of the method that the model had, and no keys that "
                f"{name!r} could read: start with a new cache after switching the model or compiling its forward; if "
                f"the model itself changes cached keys, give a cache that keeps all, {cache_argument()}=DynamicCache()"
            )
        return result


# Keys (B, H_kv, N, D) and values (B, H_kv, N, Dv) of tokens, and their mask, bool (B, N) or None.
Tokens: TypeAlias = tuple[Tensor, Tensor, Tensor | None]


class MethodLayer(DynamicLayer):
    """A cache layer that computes attention itself, by `method`, from what it holds instead of the keys of all tokens.

    A subclass adds new tokens and computes their attention to all tokens by `_attention`, or, if `update` returned the
    keys as they are, by `_first_attention`.
    """

    # The attributes that change with the tokens: None, tensors whose first dimension is the batch, or named tuples of
    # such tensors. A selection of rows replaces them.
    _content: ClassVar[tuple[str, ...]]
    _holds: ClassVar[str]  # for messages
    options: dict[str, Any] | None
    _first_attention: Callable[..., Tensor]
    _attention: Callable[..., Tensor]

    def __init__(self, method: MethodConfig) -> None:
        super().__init__()
        self.method = method
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        # Number of tokens without padding: integers (B,), or None if there is no padding; and with padding.
        self.valid: Any = None
        for name in self._content:
            setattr(self, name, None)
        self.seen, self.is_initialized = 0, False
        # Whether the attention function has used the keys of the last `update`, and the options of its last call for
        # a state. All calls on one state share the scale and the seed.
        self.was_used, self.options = True, None

    @property
    def keeps_keys(self) -> bool:
        """Whether this is an ordinary layer of keys and values for now."""
        return False

    def _take(self, key: Tensor) -> Tensor:
        """Count new keys, and return them in a form that only the attention functions of this package can use."""
        if not self.was_used:
            refuse("no attention followed the last tokens in this cache: start with a new cache", self.method)
        self.seen, self.was_used = self.seen + key.shape[-2], False
        new = key.as_subclass(NewKeys)
        setattr(new, LAYER, self)
        return new

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Tensor:
        """Causal attention of the tokens of the last `update` to all tokens, (B, H, N, Dv).

        Key and value are as `update` returned them, and the mask is bool (B, all tokens). The options are scale,
        dropout_p, seed and parameters of `methods.attention`. The seed of a state is that of its first call.
        """
        if not isinstance(key, NewKeys):
            return self._first_attention(query, (key, value, attention_mask), options)
        if self.was_used:
            advice = f"give a cache that keeps all keys, {cache_argument()}=DynamicCache()"
            refuse(
                f"two layers of this model use the same keys, and {self._holds} cannot be shared: {advice}", self.method
            )
        with torch._C.DisableTorchFunctionSubclass():
            key = key.as_subclass(Tensor)
        out = self._attention(query, (key, value, self._new_mask(attention_mask, self.seen - value.shape[2])), options)
        self.was_used = True
        return out

    def _new_mask(self, mask: Tensor | None, earlier: int) -> Tensor | None:
        """The mask of the new tokens, after a check that the number of valid earlier tokens is unchanged."""
        if mask is not None or self.valid is not None:
            counted = torch.as_tensor(earlier if self.valid is None else self.valid)
            given = earlier if mask is None else mask[:, :earlier].sum(1).to(counted.device)
            if not (counted == given).all():
                problem = f"the attention_mask of earlier tokens has changed, and {self._holds} cannot forget tokens"
                refuse(f"{problem}: give the mask of all tokens as it was, or start with a new cache", self.method)
        # Usually only the prompt has padding, and attention without a mask is faster.
        return None if mask is None or mask[:, earlier:].all() else mask[:, earlier:]

    def get_seq_length(self) -> int:
        """Number of tokens so far, padding included."""
        return super().get_seq_length() if self.keeps_keys else self.seen

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]  # a plain attribute of the base class
        """Whether `crop` can remove tokens, that is, whether keys are kept."""
        return self.keeps_keys and self.is_initialized

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; `tokens_to_remove` is minus their number, in 5.12 also the length that remains."""
        if self.is_croppable:
            super().crop(tokens_to_remove)
        elif tokens_to_remove < 0 or (_CROPS_TO_LENGTH and tokens_to_remove < self.seen):
            self.activate_past_recording()

    def activate_past_recording(self) -> None:
        """Refuse to take tokens back, which assisted generation announces by this call."""
        raise UnsupportedAttentionError(
            f"{self.method.method}: tokens cannot be taken back (assistant_model, prompt_lookup_num_tokens, crop), "
            f"because {self._holds} cannot forget tokens: leave these arguments out, or give a cache that keeps all "
            f"keys, {cache_argument()}=DynamicCache(). An assistant needs a method without a state"
        )

    def _select(self, select: Callable[[Tensor], Tensor]) -> None:
        """Apply a selection of batch rows to all that the layer holds."""
        for name in self._content:
            setattr(self, name, tree_map_only(Tensor, select, getattr(self, name)))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Give batch row i what row beam_idx[i] has."""
        self._select(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row."""
        self._select(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these batch rows."""
        self._select(lambda x: x[indices.to(x.device)])


class StateLayer(MethodLayer):
    """A cache layer of constant size for a method with a recurrence.

    The first keys of a sequence are returned as they are, with a reference to the layer. The attention function
    computes the prompt as it does without a cache, and then the layer makes its state. After that, it returns only the
    new keys, as `NewKeys`. If it is never asked, because the keys were changed on the way or the graph is being
    compiled, it continues as an ordinary layer that keeps all keys and values. Decoding is then no faster.
    """

    _content = ("state", "valid", "pending", "keys", "values")
    _holds = "a state"
    state: Any  # named tuple of tensors (B, H_kv, ...); None before the first tokens, and if keys are kept instead
    pending: Tokens | None  # tokens that are not part of the state yet

    @property
    def keeps_keys(self) -> bool:
        """Whether no attention function has asked for a state."""
        return self.options is None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take the keys and values (B, H_kv, N, .) of N new tokens, and return some for the attention function."""
        if self.options is not None:
            return self._take(key_states), value_states
        is_first = not self.is_initialized
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return (self._marked(keys) if is_first else keys), values

    @replaced_in_graphs(lambda self, keys: keys)  # a graph keeps the keys
    def _marked(self, keys: Tensor) -> Tensor:
        marked = keys.view_as(keys)
        setattr(marked, LAYER, self)
        return marked

    def _first_attention(self, query: Tensor, tokens: Tokens, options: dict[str, Any]) -> Tensor:
        options = {**options, "seed": draw_seed(query.device) if options["seed"] is None else options["seed"]}
        key, value, mask = tokens
        out = attention(self.method, query, key, value, attention_mask=mask, is_causal=True, **options)
        # The layer's own keys may be on another device by now: an offloading cache moves them after `update`.
        if self.options is None and self.keys is not None and self.keys.shape == key.shape:
            self.options, self.seen, self.keys, self.values = options, key.shape[2], None, None
            self.is_initialized = False  # an offloading cache has nothing to move
            self.pending = key.view_as(key), value, mask
            self._count(tokens)
            # With gradients the state is made when the next token comes, otherwise at once.
            if not torch.is_grad_enabled():
                self._update_pending()
        return out

    def _attention(self, query: Tensor, tokens: Tokens, options: dict[str, Any]) -> Tensor:
        assert self.options is not None
        self.options = {**options, "scale": self.options["scale"], "seed": self.options["seed"]}
        self._update_pending()
        key, value, mask = tokens
        out, self.state = attention_with_state(
            self.method, self.state, query, key, value, attention_mask=mask, **self.options
        )
        self._count(tokens)
        return out

    def _update_pending(self) -> None:
        if self.pending is not None:
            key, value, mask = self.pending
            options = {**(self.options or {}), "dropout_p": 0.0}
            self.state = update_state(self.method, self.state, key, value, attention_mask=mask, **options)
            self.pending = None

    def _count(self, new: Tokens) -> None:
        """Count the valid tokens of each batch row, from the first padding on."""
        number, mask = new[0].shape[2], new[2]
        if mask is not None or self.valid is not None:
            added = number if mask is None else mask.sum(1)
            self.valid = (self.seen - number if self.valid is None else self.valid) + added
