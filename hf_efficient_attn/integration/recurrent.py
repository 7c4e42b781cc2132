"""Decoding from a state: a layer of Transformers' cache that holds the state of a recurrent method instead of all keys.

`DynamicCache(config=...)`, which `generate` and the models create themselves, gets a `StateLayer` for every layer whose
method has a recurrence (`extensions`). It follows the protocol of `cache_layers`.

- The first keys of a sequence are returned as they are, with a reference to the layer. The attention function computes
  the prompt as it does without a cache, and then tells the layer how to make its state. If the layer is never asked,
  because the keys were changed on the way or the graph is being compiled, it continues as an ordinary layer that keeps
  all keys and values. The output is then correct but decoding is no faster.
- After that, the layer returns only the new keys, as `NewKeys`, which only the attention functions of this package can
  use.

Any other cache (`DynamicCache()` without a config, a quantised one) keeps keys and values.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.cache_layers import LAYER, MethodLayer, Tokens
from hf_efficient_attn.methods import MethodConfig, attention, attention_with_state, get_method, update_state
from hf_efficient_attn.ops.tracing import draw_seed, replaced_in_graphs


class StateLayer(MethodLayer):
    """A cache layer of constant size for a method with a recurrence.

    Attributes:
        state: named tuple of tensors (B, H_kv, ...); None before the first tokens, and if keys are kept instead.
        keys: None, except between the first `update` and the call of the attention function, and for ever if there is
            no such call.
        values: like the keys.
    """

    _content = ("state", "valid", "pending", "keys", "values")
    _holds = "a state"
    _unshared = "a state does not support: generate with use_cache=False"

    def reset(self) -> None:
        """Forget all tokens."""
        self.state: Any = None
        # Tokens that are not part of the state yet.
        self.pending: Tokens | None = None
        # The options of the last call. All calls on one state share the scale and the seed.
        self.options: dict[str, Any] | None = None
        super().reset()

    @property
    def keeps_keys(self) -> bool:
        """Whether no attention function has asked for a state."""
        return self.options is None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take the keys and values (B, H_kv, N, .) of N new tokens.

        Returns:
            Keys and values for the attention function; see the module's docstring.

        Raises:
            UnsupportedAttentionError: the attention function did not use the keys of the last call.
        """
        if self.options is not None:
            return self._take(key_states), value_states
        if self.is_initialized:
            return super().update(key_states, value_states, *args, **kwargs)
        return self._begin(key_states, value_states)

    # A graph keeps the keys.
    @replaced_in_graphs(DynamicLayer.update)
    def _begin(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        self.keys, self.values = key_states, value_states
        returned = key_states.view_as(key_states)
        setattr(returned, LAYER, self)
        return returned, value_states

    def _first_attention(self, query: Tensor, tokens: Tokens, options: dict[str, Any]) -> Tensor:
        options = {**options, "seed": draw_seed(query.device) if options["seed"] is None else options["seed"]}
        key, value, mask = tokens
        out = attention(self.method, query, key, value, attention_mask=mask, is_causal=True, **options)
        # The layer's own keys may be on another device by now: an offloading cache moves them after `update`.
        if self.options is None and self.keys is not None and self.keys.shape == key.shape:
            tokens = tokens._replace(key=key.view_as(key))
            self.options, self.seen, self.keys, self.values = options, key.shape[-2], None, None
            self._record(tokens)
            self._count(tokens)
            # With gradients the state is made when the next token comes, otherwise at once.
            self.pending = tokens
            if not torch.is_grad_enabled():
                self._update_pending()
        return out

    def _attention(self, query: Tensor, tokens: Tokens, options: dict[str, Any]) -> Tensor:
        assert self.options is not None
        self.options = {**options, "scale": self.options["scale"], "seed": self.options["seed"]}
        self._update_pending()
        self._record(tokens)
        out, self.state = attention_with_state(
            self.method, self.state, query, tokens.key, tokens.value, attention_mask=tokens.mask, **self.options
        )
        self._count(tokens)
        return out

    def _update_pending(self) -> None:
        if self.pending is not None:
            key, value, mask = self.pending
            options = {**(self.options or {}), "dropout_p": 0.0}
            self.state = update_state(self.method, self.state, key, value, attention_mask=mask, **options)
            self.pending = None

    def _add(self, new: Tokens) -> None:
        self._update_pending()
        self.pending = new
        self._update_pending()
        self._count(new)

    def _count(self, new: Tokens) -> None:
        """Count the valid tokens of each batch row, from the first padding on."""
        if new.mask is None and self.valid is None:
            return
        added = new.number if new.mask is None else new.mask.sum(1)
        self.valid = (self.seen - new.number if self.valid is None else self.valid) + added

    def _forget(self, number: int) -> None:
        raise UnsupportedAttentionError(
            f"{self.method.method}: {number} tokens cannot be taken back, because a state sums over all tokens: start "
            "with a new cache, or call its activate_past_recording() before the tokens come, as assisted generation "
            "does in newer versions of Transformers"
        )


def is_recurrent(method: MethodConfig) -> bool:
    """Whether a layer with this method can decode from a state."""
    return get_method(method.method).recurrence is not None
