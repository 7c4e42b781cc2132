"""Decoding from a state: a layer of Transformers' cache that holds the state of a recurrent method instead of all keys.

`DynamicCache(config=...)`, which `generate` and the models create themselves, gets a `StateLayer` for every layer whose
method has a recurrence (`extensions.extend_caches`). No attention class is patched: a model's attention module passes
what `cache.update` returns straight to its attention function, so that the keys themselves can say which layer of which
cache they come from.

- The first keys of a sequence are returned as they are, with a reference to the layer. The attention function computes
  the prompt as it does without a cache, and then tells the layer how to make its state. If the layer is never asked,
  because the keys were changed on the way or the graph is being compiled, it continues as an ordinary layer that keeps
  all keys and values. The output is then correct but decoding is no faster.
- After that, the layer returns only the new keys, as `NewKeys`, which only the attention functions of this package can
  use.

Any other cache (`DynamicCache()` without a config, a quantised one) keeps keys and values.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods import MethodConfig, attention, attention_with_state, get_method, update_state
from hf_efficient_attn.ops.export import is_compiling
from hf_efficient_attn.ops.random import draw_seed

# In Transformers 5.12 `crop` takes the length that remains, in later versions minus the number of tokens to remove.
_CROPS_TO_LENGTH = not hasattr(CacheLayerMixin, "get_max_length")
# The attribute of keys that refers to the layer that returned them. No output depends on it: keys that lose it are
# computed with as any others, and `NewKeys` without it are refused.
_STATE_LAYER = "_state_layer"


class NewKeys(Tensor):
    """Keys of only the new tokens, on their way from a cache layer to the attention function. Nothing else uses them.

    Code that reads them as if they were the keys of all tokens would silently lose the past: another attention function
    after the model was switched, or a model that changes its cached keys. torch.compile fails on them; a cache that a
    compiled forward began keeps keys and values instead.
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
                "this cache holds a state of the method that the model had when the cache was made, and no keys that "
                f"{name!r} could read: start with a new cache after switching the model or compiling its forward; if "
                "the model itself changes its cached keys, generate with use_cache=False"
            )
        return result


def as_new_keys(key: Tensor, layer: object) -> Tensor:
    """Keys of new tokens that only the attention functions of this package can use, by asking the layer."""
    new = key.as_subclass(NewKeys)
    setattr(new, _STATE_LAYER, layer)
    return new


def plain_keys(key: Tensor) -> Tensor:
    """The tensor of what `as_new_keys` returned."""
    with torch._C.DisableTorchFunctionSubclass():
        return key.as_subclass(Tensor)


def number_to_crop(tokens_to_remove: int, seen: int) -> int:
    """The number of tokens that a call of `crop` removes from a layer that has seen so many."""
    if tokens_to_remove > 0 or (tokens_to_remove == 0 and _CROPS_TO_LENGTH):
        return max(0, seen - tokens_to_remove)
    return -tokens_to_remove


class _Options(NamedTuple):
    """What all calls on one state must have in common."""

    scale: float | None
    seed: int | Tensor


class _Tokens(NamedTuple):
    """Keys (B, H_kv, N, D) and values (B, H_kv, N, Dv) of tokens, and their mask, bool (B, N) or None."""

    key: Tensor
    value: Tensor
    mask: Tensor | None


class _Record(NamedTuple):
    """What `crop` needs: a state, the number of valid tokens in it, and the tokens that came afterwards."""

    state: Any
    valid: Tensor | int | None
    tokens: list[_Tokens]


class StateLayer(DynamicLayer):
    """A cache layer of constant size for a method with a recurrence.

    Args:
        method: the config of the method, which must also be that of the attention function.

    Attributes:
        state: named tuple of tensors (B, H_kv, ...); None before the first tokens, and if keys are kept instead.
        keys: None, except between the first `update` and the call of the attention function, and for ever if there is
            no such call.
        values: like the keys.
        seen: number of tokens, padding included.
        valid: number of tokens without padding: integers (B,), or None if there is no padding.
    """

    def __init__(self, method: MethodConfig) -> None:
        super().__init__()
        self.method = method
        self.record_past = False
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        self.keys = self.values = None
        self.state: Any = None
        self.is_initialized = False
        self.seen = 0
        self.valid: Any = None
        self.options: _Options | None = None
        # The learned parameters of the method, by name, as the last call gave them.
        self.parameters: Mapping[str, Tensor] = {}
        # Tokens that are not part of the state yet.
        self.pending: _Tokens | None = None
        # Whether the attention function has used the keys of the last `update`.
        self.was_used = True
        self.record: _Record | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take the keys and values (B, H_kv, N, .) of N new tokens.

        Returns:
            Keys and values for the attention function; see the module's docstring.

        Raises:
            UnsupportedAttentionError: the attention function did not use the keys of the last call.
        """
        if self.options is None:
            if self.is_initialized or is_compiling():
                return super().update(key_states, value_states, *args, **kwargs)
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.keys, self.values = key_states, value_states
            returned = key_states.view_as(key_states)
            setattr(returned, _STATE_LAYER, self)
        else:
            if not self.was_used:
                raise UnsupportedAttentionError(
                    f"{self.method.method}: the last tokens were put into the cache, but no attention followed (the "
                    "call may have failed midway): start with a new cache"
                )
            self.seen, self.was_used = self.seen + key_states.shape[-2], False
            returned = as_new_keys(key_states, self)
        return returned, value_states

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scale: float | None,
        dropout_p: float,
        seed: int | Tensor | None,
        parameters: Mapping[str, Tensor],
    ) -> Tensor:
        """Causal attention of the tokens of the last `update` to all tokens.

        Args:
            query: (B, H, N, D).
            key: (B, H_kv, N, D), as `update` returned it.
            value: (B, H_kv, N, Dv), as `update` returned it.
            attention_mask: bool (B, all tokens) or None.
            scale: the factor of the scores; 1/sqrt(D) if None.
            dropout_p: the probability with which an attention weight is dropped.
            seed: that of the first call holds for all later ones; None (training) draws one from the global generator.
            parameters: the learned parameters of the method, by name.

        Returns:
            (B, H, N, Dv).

        Raises:
            UnsupportedAttentionError: the mask of earlier tokens has changed, or the same keys are used twice.
        """
        self.parameters = parameters
        if not isinstance(key, NewKeys):
            seed = draw_seed(query.device) if seed is None else seed
            out = attention(
                self.method, query, key, value, attention_mask=attention_mask, is_causal=True, scale=scale,
                dropout_p=dropout_p, seed=seed, parameters=parameters,
            )  # fmt: skip
            if self.options is None and self.keys is not None and self.keys.shape == key.shape:
                # The layer's own keys may be on another device by now: an offloading cache moves them after `update`.
                self._begin(_Tokens(key.view_as(key), value, attention_mask), _Options(scale, seed))
            return out
        if self.was_used:
            raise UnsupportedAttentionError(
                f"{self.method.method}: two layers of this model use the same keys, which a state does not support: "
                "generate with use_cache=False"
            )
        key = plain_keys(key)
        self._update_pending()
        new = _Tokens(key, value, self._new_mask(attention_mask, key.shape[2]))
        self._record(new)
        out, self.state = attention_with_state(
            self.method, self.state, query, key, value, attention_mask=new.mask, dropout_p=dropout_p,
            parameters=parameters, **self._options(),
        )  # fmt: skip
        self._count(new, self.seen - key.shape[2])
        self.was_used = True
        return out

    def _begin(self, tokens: _Tokens, options: _Options) -> None:
        """Keep a state from now on. With gradients it is made when the next token comes, otherwise at once."""
        self.options, self.seen, self.pending = options, tokens.key.shape[-2], tokens
        self.keys = self.values = None
        self._record(self.pending)
        self._count(self.pending, 0)
        if not torch.is_grad_enabled():
            self._update_pending()

    def _options(self) -> dict[str, Any]:
        assert self.options is not None
        return self.options._asdict()

    def _update_pending(self) -> None:
        if self.pending is not None:
            self.state, self.pending = self._updated(self.pending), None

    def _updated(self, tokens: _Tokens) -> Any:
        """The state after these tokens."""
        return update_state(
            self.method, self.state, tokens.key, tokens.value, attention_mask=tokens.mask,
            parameters=self.parameters, **self._options(),
        )  # fmt: skip

    def _new_mask(self, mask: Tensor | None, new: int) -> Tensor | None:
        """The mask of the last `new` tokens, after a check that the number of valid earlier tokens is unchanged."""
        earlier = self.seen - new
        valid = earlier if mask is None else mask[:, :earlier].sum(1)
        if mask is not None or self.valid is not None:
            counted = earlier if self.valid is None else self.valid
            if not torch.as_tensor(valid == counted).all():
                raise UnsupportedAttentionError(
                    f"{self.method.method}: the attention_mask of earlier tokens has changed, and a state cannot "
                    "forget tokens: give the mask of all tokens, with its earlier part unchanged, or start with a new "
                    "cache"
                )
        # Usually only the prompt has padding, and attention without a mask is faster.
        return None if mask is None or mask[:, earlier:].all() else mask[:, earlier:]

    def _count(self, new: _Tokens, earlier: int) -> None:
        """Count the valid tokens of each batch row, from the first padding on; `earlier` tokens came before."""
        if new.mask is None and self.valid is None:
            return
        added = new.key.shape[2] if new.mask is None else new.mask.sum(1)
        self.valid = (earlier if self.valid is None else self.valid) + added

    def _record(self, new: _Tokens) -> None:
        if self.record_past:
            if self.record is None:
                self.record = _Record(self.state, self.valid, [])
            self.record.tokens.append(new)

    def get_seq_length(self) -> int:
        """Number of tokens so far, padding included."""
        return super().get_seq_length() if self.options is None else self.seen

    def activate_past_recording(self) -> None:
        """Keep new tokens until the next `crop`, for assisted generation."""
        self.record_past = True

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]  # a plain attribute of the base class
        """Whether `crop` can remove tokens: kept keys can always be removed, those of a state if they are recorded."""
        return self.record_past or (self.options is None and self.is_initialized)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, which a state can do only if they were recorded.

        Args:
            tokens_to_remove: minus the number of tokens to remove. In Transformers 5.12 also the length that remains.

        Raises:
            UnsupportedAttentionError: the tokens were not recorded.
        """
        if self.options is None:
            return super().crop(tokens_to_remove) if self.is_initialized else None
        number = number_to_crop(tokens_to_remove, self.seen)
        record, self.record = self.record, None
        if number == 0:
            return None
        remaining = self.seen - number
        if remaining <= 0:
            return self.reset()
        recorded = 0 if record is None else sum(tokens.key.shape[2] for tokens in record.tokens)
        if record is None or number > recorded:
            raise UnsupportedAttentionError(
                f"{self.method.method}: {number} tokens cannot be taken back, because a state sums over all "
                "tokens: start with a new cache, or call its activate_past_recording() before the tokens come, as "
                "assisted generation does in newer versions of Transformers"
            )
        self._update_pending()
        self.state, self.valid, self.seen = record.state, record.valid, self.seen - recorded
        for tokens in record.tokens:
            length = min(tokens.key.shape[2], remaining - self.seen)
            if length > 0:
                mask = None if tokens.mask is None else tokens.mask[:, :length]
                tokens = _Tokens(tokens.key[:, :, :length], tokens.value[:, :, :length], mask)
                self._count(tokens, self.seen)
                self.state, self.seen = self._updated(tokens), self.seen + length
        return None

    def _select(self, select: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor of the state by a selection of its batch rows."""
        self._update_pending()
        self.state = type(self.state)(*(select(x) for x in self.state))
        self.valid = None if self.valid is None else select(self.valid)
        self.record = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Give batch row i the state of row beam_idx[i]."""
        if self.options is None:
            super().reorder_cache(beam_idx)
        else:
            self._select(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row."""
        if self.options is None:
            super().batch_repeat_interleave(repeats)
        else:
            self._select(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these batch rows."""
        if self.options is None:
            super().batch_select_indices(indices)
        else:
            self._select(lambda x: x[indices.to(x.device)])

    def offload(self) -> None:
        """Move kept keys to the CPU. A state stays, because it does not grow."""
        if self.options is None:
            super().offload()

    def prefetch(self) -> None:
        """Move kept keys back."""
        if self.options is None:
            super().prefetch()


def state_layer_of(key: Tensor) -> StateLayer | None:
    """The `StateLayer` that returned these keys; None if they come from elsewhere."""
    return getattr(key, _STATE_LAYER, None)


def is_recurrent(method: MethodConfig) -> bool:
    """Whether a layer with this method can decode from a state."""
    return get_method(method.method).recurrence is not None
