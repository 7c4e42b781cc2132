"""Decoding from a state: a layer of Transformers' cache that keeps what a recurrent method needs instead of all keys.

`DynamicCache(config=...)`, which `generate` and the models make for themselves, gets a `StateLayer` for every layer in
which the config's method has a recurrence (`extensions.extend_caches`). No attention class is patched: a model's
attention module hands what `cache.update` returns straight to its attention function, so that the keys themselves can
say which layer of which cache they came from.

- The first keys of a sequence are returned as they are, with a reference to the layer. The attention function computes
  the prompt as it does without a cache, and then tells the layer what its state is to be made with. Where it is never
  asked, since the keys were changed on the way or the graph is being compiled, the layer goes on as the ordinary one
  that keeps all keys and values: right, but without the gain.
- After that the layer returns the new keys alone, as `NewKeys`, which this package's attention function alone can use.

Any other cache (`DynamicCache()` without a config, a quantised one) keeps keys and values.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods import MethodConfig, attention, attention_with_state, get_method, update_state
from hf_efficient_attn.ops.random import draw_seed

# `crop` took the length that should remain in Transformers 5.12, and takes minus the number of tokens to remove since.
_CROPS_TO_LENGTH = not hasattr(CacheLayerMixin, "get_max_length")


class NewKeys(Tensor):
    """Keys of new tokens alone, on their way from a `StateLayer` to the attention function: nobody else may use them.

    What reads them as if they were the keys of all tokens (another attention function, after the model was switched, or
    a model that changes its cached keys) would silently lose the past. torch.compile fails on them; a cache that a
    compiled forward began keeps keys and values.
    """

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        looks = name in ("__get__", "size", "dim", "__repr__") or name.lstrip("_").startswith("is_")
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {})) if looks else None
        if not looks or isinstance(result, Tensor):
            raise UnsupportedAttentionError(
                "this cache holds the state of a recurrent method, made by the attention implementation that the model "
                f"had then, and no keys that {name!r} could read: start with a new cache after switching the model or "
                "compiling its forward"
            )
        return result


class _Making(NamedTuple):
    """What every call on one state must have in common."""

    scale: float | None
    seed: "int | Tensor"


class _Tokens(NamedTuple):
    """Keys (B, Hkv, N, D), values and their mask, bool (B, N) or None."""

    key: Tensor
    value: Tensor
    mask: Tensor | None


class _Record(NamedTuple):
    """A state, the tokens counted in it, and the tokens that came after: what taking some of them back needs."""

    state: tuple | None
    valid: Tensor | None
    tokens: list


class StateLayer(DynamicLayer):
    """A cache layer of constant size for a method with a recurrence.

    Attributes:
        method: the method's config, with which the attention function must ask.
        state: named tuple of tensors (B, Hkv, ...); None before the first tokens, and while keys are kept instead.
        keys, values: None, but from the first `update` until the attention function has asked, or from then on where it
            never does.
    """

    is_croppable = False

    def __init__(self, method: MethodConfig) -> None:
        super().__init__()
        self.method = method
        self.record_past = False
        self._forget()

    def _forget(self) -> None:
        self.keys = self.values = self.state = None
        self.is_initialized = False
        # Number of tokens, and how many of them are no padding: (B,), or None where all are.
        self.seen, self.valid = 0, None
        self.making: _Making | None = None
        # Tokens that are still to be absorbed, and whether new keys were handed out that nobody has asked for yet.
        self.waiting: _Tokens | None = None
        self.is_asked_for = True
        self.record: _Record | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Take (B, Hkv, N, .) of N new tokens; see the module's text for what is returned.

        Raises:
            UnsupportedAttentionError: the attention function did not ask for the keys of the last call.
        """
        if self.making is None:
            if self.is_initialized or torch.compiler.is_compiling():
                return super().update(key_states, value_states, *args, **kwargs)
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.keys, self.values = key_states, value_states
            handed = key_states.view_as(key_states)
        else:
            if not self.is_asked_for:
                raise UnsupportedAttentionError(
                    f"{self.method.method}: the last tokens were put into the cache and no attention followed (the "
                    "call may have failed midway): start with a new cache"
                )
            self.seen, self.is_asked_for = self.seen + key_states.shape[-2], False
            handed = key_states.as_subclass(NewKeys)
        handed._state_layer = self
        return handed, value_states

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        scale: float | None,
        dropout_p: float,
        seed: int | None,
    ) -> Tensor:
        """Causal attention of the tokens that `update` was given last to all tokens: (B, H, N, Dv).

        Args:
            key, value: as `update` returned them.
            mask: bool (B, all tokens) or None.
            seed: of the first tokens, and from then on of all; None draws one from the global generator (training).

        Raises:
            UnsupportedAttentionError: the mask of earlier tokens is another than it was, or the same keys serve twice.
        """
        if not isinstance(key, NewKeys):
            seed = draw_seed(query.device) if seed is None else seed
            options = {"attention_mask": mask, "is_causal": True, "scale": scale, "dropout_p": dropout_p, "seed": seed}
            out = attention(self.method, query, key, value, **options)
            if self.making is None and self.keys is not None and self.keys.shape == key.shape:
                self._begin(mask, _Making(scale, seed))
            return out
        if self.is_asked_for:
            raise UnsupportedAttentionError(
                f"{self.method.method}: two layers of this model share their keys, which a state cannot serve: "
                "generate with use_cache=False"
            )
        with torch._C.DisableTorchFunctionSubclass():
            key = key.as_subclass(Tensor)
        self._absorb_waiting()
        new = _Tokens(key, value, self._check_past(mask, key.shape[2]))
        self._note(new)
        out, self.state = attention_with_state(
            self.method,
            self.state,
            query,
            *new[:2],
            attention_mask=new.mask,
            scale=self.making.scale,
            dropout_p=dropout_p,
            seed=self.making.seed,
        )
        self._count(new)
        self.is_asked_for = True
        return out

    def _begin(self, mask: Tensor | None, making: _Making) -> None:
        """From now on a state. It is made at once where no gradient is kept, else not before a next token comes."""
        self.making, self.seen = making, self.keys.shape[-2]
        self.waiting = _Tokens(self.keys, self.values, mask)
        self.keys = self.values = None
        self._note(self.waiting)
        self._count(self.waiting, before=0)
        if not torch.is_grad_enabled():
            self._absorb_waiting()

    def _absorb_waiting(self) -> None:
        if self.waiting is not None:
            self.state, self.waiting = self._absorbed(self.state, self.waiting), None

    def _absorbed(self, state: tuple | None, tokens: _Tokens) -> tuple:
        options = {"attention_mask": tokens.mask, **self.making._asdict()}
        return update_state(self.method, state, tokens.key, tokens.value, **options)

    def _check_past(self, mask: Tensor | None, new: int) -> Tensor | None:
        """The mask of the new tokens; that of the others must have as many tokens in every row as were counted."""
        before = self.seen - new
        there = before if mask is None else mask[:, :before].sum(1)
        if mask is not None or self.valid is not None:
            counted = before if self.valid is None else self.valid
            if not torch.as_tensor(there == counted).all():
                raise UnsupportedAttentionError(
                    f"{self.method.method}: the attention_mask of earlier tokens is not what it was when they came, "
                    "and a state cannot forget them: give the mask of all tokens, with its earlier part unchanged, or "
                    "start with a new cache"
                )
        # Most often only the prompt was padded, and what is not masked is faster.
        return None if mask is None or mask[:, before:].all() else mask[:, before:]

    def _count(self, new: _Tokens, before: int | None = None) -> None:
        """Count the tokens of each row, as soon as there is padding."""
        if new.mask is None and self.valid is None:
            return
        length = new.key.shape[2]
        known = (self.seen - length if before is None else before) if self.valid is None else self.valid
        self.valid = known + (length if new.mask is None else new.mask.sum(1))

    def _note(self, new: _Tokens) -> None:
        if self.record_past:
            if self.record is None:
                self.record = _Record(self.state, self.valid, [])
            self.record.tokens.append(new)

    def get_seq_length(self) -> int:
        """Tokens that have come, padding included."""
        return super().get_seq_length() if self.making is None else self.seen

    def activate_past_recording(self) -> None:
        """Keep the tokens that come until the next `crop`, as assisted generation asks for."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take tokens back, which a state can do only while they are recorded.

        Args:
            tokens_to_remove: minus their number. In Transformers 5.12, the length that shall remain, or minus that
                number.

        Raises:
            UnsupportedAttentionError: they were not recorded.
        """
        if self.making is None:
            return super().crop(tokens_to_remove) if self.is_initialized else None
        number = -tokens_to_remove
        if tokens_to_remove > 0 or (tokens_to_remove == 0 and _CROPS_TO_LENGTH):
            number = max(0, self.seen - tokens_to_remove)
        record, self.record = self.record, None
        if number == 0:
            return None
        kept = self.seen - number
        if kept <= 0:
            return self.reset()
        if record is None or number > self._length(record):
            raise UnsupportedAttentionError(
                f"{self.method.method}: {number} tokens cannot be taken back out of a state that has summed them up: "
                "start with a new cache, or call its activate_past_recording() before they come, as assisted "
                "generation does in newer versions of Transformers"
            )
        self._absorb_waiting()
        self.state, self.valid, self.seen = record.state, record.valid, self.seen - self._length(record)
        for tokens in record.tokens:
            left = min(tokens.key.shape[2], kept - self.seen)
            if left > 0:
                mask = None if tokens.mask is None else tokens.mask[:, :left]
                tokens = _Tokens(tokens.key[:, :, :left], tokens.value[:, :, :left], mask)
                self.state, self.seen = self._absorbed(self.state, tokens), self.seen + left
                self._count(tokens)
        return None

    @staticmethod
    def _length(record: _Record) -> int:
        return sum(tokens.key.shape[2] for tokens in record.tokens)

    def _select(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Put other rows of the batch in the place of these."""
        self._absorb_waiting()
        self.state = type(self.state)(*(rows(x) for x in self.state))
        self.valid = None if self.valid is None else rows(self.valid)
        self.record = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        if self.making is None:
            super().reorder_cache(beam_idx)
        else:
            self._select(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        if self.making is None:
            super().batch_repeat_interleave(repeats)
        else:
            self._select(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """The rows `indices` alone."""
        if self.making is None:
            super().batch_select_indices(indices)
        else:
            self._select(lambda x: x[indices.to(x.device)])

    def offload(self) -> None:
        """Move kept keys to the CPU; a state stays, since it does not grow."""
        if self.making is None:
            super().offload()

    def prefetch(self) -> None:
        """Bring kept keys back."""
        if self.making is None:
            super().prefetch()

    def reset(self) -> None:
        """Forget all tokens."""
        self._forget()


def state_layer_of(key: Tensor) -> StateLayer | None:
    """The cache layer that handed out these keys, if it was one of these."""
    return getattr(key, "_state_layer", None)


def is_recurrent(method: MethodConfig | None) -> bool:
    """Whether a layer with this method can decode from a state."""
    return method is not None and get_method(method.method).recurrence is not None
