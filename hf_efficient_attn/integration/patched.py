"""Attention modules of Transformers that compute their attention themselves, changed to ask the attention interface.

Each class derives from the class of the same name. `switching.adopt` gives a module its class here when a method is
chosen. The module keeps its parameters, and its forward for attention that is not in the interface ("eager").
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bloom import modeling_bloom
from transformers.models.lilt import modeling_lilt
from transformers.models.megatron_bert import modeling_megatron_bert
from transformers.models.mpnet import modeling_mpnet
from transformers.models.rembert import modeling_rembert
from transformers.models.roformer import modeling_roformer
from transformers.models.tapas import modeling_tapas
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.distance_bias import ARGUMENT, DistanceBias, LinearBias, takes_bias
from hf_efficient_attn.ops.tracing import unwrapped


class _Attention(nn.Module):
    """What the classes share. They return a tuple, as their base classes do."""

    config: PreTrainedConfig  # of the model; set by `adopt`
    is_causal = False

    def asks_interface(self) -> bool:
        """Whether the config names a function of the interface."""
        return self.config._attn_implementation in ALL_ATTENTION_FUNCTIONS

    def attend(self, heads: Sequence[Tensor], mask: Tensor | None, **kwargs: Any) -> Tensor:
        """Attention of queries, keys and values (B, H, N, D) by the function that the config names: (B, N, H, Dv)."""
        function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        holder: Any = getattr(self, "attention_dropout", getattr(self, "dropout", None))
        kwargs |= {"dropout": holder.p if self.training else 0.0, "is_causal": self.is_causal}
        out: Tensor = function(self, *heads, mask, **kwargs)[0]
        return out


def _split_heads(x: Tensor, head_dim: int) -> Tensor:
    """(B, N, H * D) -> (B, H, N, D)."""
    return x.unflatten(2, (-1, head_dim)).transpose(1, 2)


class _BertAttention(_Attention):
    """Attention with projections `query`, `key` and `value`, as BERT has them."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """(B, N, H * D) -> (B, N, H * D)."""
        module: Any = self
        if not self.asks_interface():
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        states = (module.query(hidden_states), module.key(hidden_states), module.value(hidden_states))
        heads = self.rotate([_split_heads(x, module.attention_head_size) for x in states], *args, **kwargs)
        return self.attend(heads, attention_mask).flatten(2), None

    def rotate(self, heads: list[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
        """Rotate queries, keys and values (B, H, N, D) by their positions; only RoFormer does."""
        return heads


class MegatronBertSelfAttention(_BertAttention, modeling_megatron_bert.MegatronBertSelfAttention):
    """The layout of BERT."""


class RemBertSelfAttention(_BertAttention, modeling_rembert.RemBertSelfAttention):
    """The layout of BERT."""


class TapasSelfAttention(_BertAttention, modeling_tapas.TapasSelfAttention):
    """The layout of BERT."""


class RoFormerSelfAttention(_BertAttention, modeling_roformer.RoFormerSelfAttention):
    """The layout of BERT, with rotary positions."""

    def rotate(self, heads: list[Tensor], sinusoidal_pos: Tensor | None = None, *args: Any, **kw: Any) -> list[Tensor]:
        """Rotate queries and keys (B, H, N, D) by their positions, and values if the config says so."""
        if sinusoidal_pos is None:
            return heads
        count = 3 if self.rotary_value else 2
        return [*self.apply_rotary_position_embeddings(sinusoidal_pos, *heads[:count]), *heads[count:]]


class LiltSelfAttention(_Attention, modeling_lilt.LiltSelfAttention):
    """Text and layout both attend by the sum of their scores, which is one attention with joined heads."""

    @property
    def head_dim(self) -> int:
        """The size of a joined head, D + D_layout."""
        return int(self.attention_head_size + self.attention_head_size // self.channel_shrink_ratio)

    def forward(
        self,
        hidden_states: Tensor,
        layout_inputs: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """(B, N, H * D) and (B, N, H * D_layout) -> the same shapes."""
        if not self.asks_interface():
            return super().forward(hidden_states, layout_inputs, attention_mask, *args, **kwargs)
        sizes = [self.attention_head_size, self.head_dim - self.attention_head_size]
        heads = [
            torch.cat([_split_heads(text(hidden_states), sizes[0]), _split_heads(layout(layout_inputs), sizes[1])], 3)
            for text, layout in (
                (self.query, self.layout_query),
                (self.key, self.layout_key),
                (self.value, self.layout_value),
            )
        ]
        # Each part of the scores has a scale of its own.
        scales = heads[0].new_tensor([size**-0.5 for size in sizes for _ in range(size)])
        out = self.attend([heads[0] * scales, *heads[1:]], attention_mask, scaling=1.0)
        return tuple(part.flatten(2) for part in out.split(sizes, 3))


class MPNetSelfAttention(_Attention, modeling_mpnet.MPNetSelfAttention):
    """A bias by distance as in T5, which the encoder makes for all layers."""

    adds_distance_bias = True

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | DistanceBias | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """(B, N, H * D) -> (B, N, H * D)."""
        if not self.asks_interface():
            return super().forward(hidden_states, attention_mask, position_bias, *args, **kwargs)
        states = (self.q(hidden_states), self.k(hidden_states), self.v(hidden_states))
        heads = [_split_heads(x, self.attention_head_size) for x in states]
        return (self.o(self.attend(heads, attention_mask, **{ARGUMENT: position_bias}).flatten(2)),)


class MPNetEncoder(modeling_mpnet.MPNetEncoder):
    """It gives its layers a `DistanceBias`."""

    adds_distance_bias = True
    relative_attention_max_distance = 128  # the default of `relative_position_bucket`

    def compute_position_bias(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The bias of all layers."""
        return DistanceBias(self) if takes_bias(self) else super().compute_position_bias(x, *args, **kwargs)

    def _relative_position_bucket(self, distance: Tensor) -> Tensor:
        return self.relative_position_bucket(distance)


class BloomAttention(_Attention, modeling_bloom.BloomAttention):
    """A bias that is linear in the distance (ALiBi)."""

    is_causal = True
    adds_distance_bias = True

    def forward(
        self, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """(B, N, H * D) -> (B, N, H * D), with the residual added."""
        if not self.asks_interface():
            return super().forward(hidden_states, residual, alibi, attention_mask, *args, **kwargs)
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if kwargs.get("layer_past") is not None:
            key, value = kwargs["layer_past"].update(key, value, self.layer_idx)
        if attention_mask is not None:
            _refuse_gaps(attention_mask.bool())
        # The bias of head h at distance 1, from a tensor (H, 1, 2) for two tokens.
        slopes = modeling_bloom.build_alibi_tensor(query.new_ones(1, 2), self.num_heads, torch.float32)[:, 0, 1]
        bias = LinearBias(slopes, key.shape[2])
        out = self.attend((query, key, value), attention_mask, scaling=self.inv_norm_factor, **{ARGUMENT: bias})
        return residual + dropout(self.dense(out.flatten(2)), self.hidden_dropout, self.training), None


def _refuse_gaps(mask: Tensor) -> None:
    """Refuse masks (B, Nk) with masked tokens between others, which Bloom does not count in distances."""
    has_gaps = ((mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0] > 1).any()
    message = (
        "Bloom counts distances without masked tokens, so that no masked token may be between others: pad all "
        "sequences on the same side"
    )
    if is_tracing(has_gaps):
        torch._assert_async(~has_gaps, message)
    elif bool(unwrapped(has_gaps)):
        raise UnsupportedAttentionError(message)
