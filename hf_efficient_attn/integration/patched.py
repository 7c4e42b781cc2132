"""Attention modules of Transformers that compute their attention themselves, changed to ask the attention interface.

Each class derives from the class of the same name. Those with the layout of BERT are made from their rows in
`model_kinds`, when they are asked for by their names (`__getattr__`). `switching.adopt` gives a module its class here
when a method is chosen. The module keeps its parameters, and its forward for attention that is not in the interface
("eager"). Shapes: W = H * D is the width of the hidden states.
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bloom import modeling_bloom
from transformers.models.lilt import modeling_lilt
from transformers.models.mpnet import modeling_mpnet
from transformers.models.roformer import modeling_roformer

from hf_efficient_attn.integration import inputs, model_kinds
from hf_efficient_attn.integration.distance_bias import ARGUMENT, DistanceBias, LinearBias, takes_bias


class _Attention(nn.Module):
    config: PreTrainedConfig  # of the model; set by `adopt`
    is_causal = False
    _compute: Callable[..., tuple[Any, ...]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the base class, or, with attention of the interface, `_compute` with the same arguments."""
        uses_interface = self.config._attn_implementation in ALL_ATTENTION_FUNCTIONS
        return (self._compute if uses_interface else super().forward)(*args, **kwargs)

    def _attend(self, heads: Sequence[Tensor], mask: Tensor | None, **kwargs: Any) -> Tensor:
        """Attention of queries, keys and values (B, H, N, D) by the function that the config names: (B, N, H, Dv)."""
        function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        holder: Any = getattr(self, "attention_dropout", getattr(self, "dropout", None))
        kwargs |= {"dropout": holder.p if self.training else 0.0, "is_causal": self.is_causal}
        return function(self, *heads, mask, **kwargs)[0]


def _heads(hidden_states: Tensor, projections: Iterable[nn.Module], head_dim: int) -> list[Tensor]:
    """Project (B, N, W) to queries, keys and values (B, H, N, D)."""
    return [project(hidden_states).unflatten(2, (-1, head_dim)).transpose(1, 2) for project in projections]


class _BertAttention(_Attention):
    """Attention with projections `query`, `key` and `value`, as BERT has them."""

    def _compute(self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kw: Any) -> Any:
        heads = _heads(hidden_states, (self.query, self.key, self.value), self.attention_head_size)
        return self._attend(self._rotate(heads, *args, **kw), attention_mask).flatten(2), None  # (B, N, W)

    def _rotate(self, heads: list[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
        return heads


def __getattr__(name: str) -> type[nn.Module]:
    """Make the class of a kind that has the layout of BERT. `pickle` finds it by its name, too."""
    folder = model_kinds.row_named(name).like_bert_in
    if not folder:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
    # Of two threads that make it at a time, both get the class of the first.
    return globals().setdefault(name, type(name, (_BertAttention, base), {"__module__": __name__}))


class RoFormerSelfAttention(_BertAttention, modeling_roformer.RoFormerSelfAttention):
    """The layout of BERT, with rotary positions for queries and keys and, if the config says so, for values."""

    def _rotate(self, heads: list[Tensor], sinusoidal_pos: Tensor | None = None, *args: Any, **kw: Any) -> list[Tensor]:
        count = 0 if sinusoidal_pos is None else 3 if self.rotary_value else 2
        rotated = self.apply_rotary_position_embeddings(sinusoidal_pos, *heads[:count]) if count else ()
        return [*rotated, *heads[count:]]


class LiltSelfAttention(_Attention, modeling_lilt.LiltSelfAttention):
    """Text and layout both attend by the sum of their scores, which is one attention with joined heads."""

    @property
    def head_dim(self) -> int:
        """The size of a joined head, D + D_layout."""
        return int(self.attention_head_size + self.attention_head_size // self.channel_shrink_ratio)

    def _compute(
        self, hidden_states: Tensor, layout_inputs: Tensor, attention_mask: Tensor | None = None, *args: Any, **kw: Any
    ) -> tuple[Tensor, ...]:
        sizes = [self.attention_head_size, self.head_dim - self.attention_head_size]
        text = _heads(hidden_states, (self.query, self.key, self.value), sizes[0])
        layout = _heads(layout_inputs, (self.layout_query, self.layout_key, self.layout_value), sizes[1])
        query, key, value = (torch.cat(parts, 3) for parts in zip(text, layout, strict=True))  # (B, H, N, D + D_layout)
        # Each part of the scores has a scale of its own.
        scales = query.new_tensor([size**-0.5 for size in sizes for _ in range(size)])
        out = self._attend((query * scales, key, value), attention_mask, scaling=1.0)
        return tuple(part.flatten(2) for part in out.split(sizes, 3))  # (B, N, W) and (B, N, W_layout)


class MPNetSelfAttention(_Attention, modeling_mpnet.MPNetSelfAttention):
    """A bias by distance as in T5, which the encoder makes for all layers."""

    adds_distance_bias = True

    def _compute(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, position_bias: Any = None, *_: Any, **kw: Any
    ) -> tuple[Tensor]:
        heads = _heads(hidden_states, (self.q, self.k, self.v), self.attention_head_size)
        return (self.o(self._attend(heads, attention_mask, **{ARGUMENT: position_bias}).flatten(2)),)  # (B, N, W)


class MPNetEncoder(modeling_mpnet.MPNetEncoder):
    """It gives its layers a `DistanceBias`."""

    adds_distance_bias = True
    relative_attention_max_distance = 128  # the default of `relative_position_bucket`
    _relative_position_bucket = staticmethod(modeling_mpnet.MPNetEncoder.relative_position_bucket)

    def compute_position_bias(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The bias of all layers."""
        return DistanceBias(self) if takes_bias(self) else super().compute_position_bias(x, *args, **kwargs)


class BloomAttention(_Attention, modeling_bloom.BloomAttention):
    """A bias that is linear in the distance (ALiBi)."""

    is_causal = True
    adds_distance_bias = True

    def _compute(
        self, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if kwargs.get("layer_past") is not None:
            key, value = kwargs["layer_past"].update(key, value, self.layer_idx)
        mask = inputs.read_mask(str(self.config._attn_implementation), attention_mask).keys
        if mask is not None:
            has_gaps = ((mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0] > 1).any()
            message = "Bloom counts distances without masked tokens, so that no masked token may be between others"
            inputs.refuse_where(has_gaps, f"{message}: pad all sequences on the same side")
        # The bias of head h at distance 1, from a tensor (H, 1, 2) for two tokens.
        slopes = modeling_bloom.build_alibi_tensor(query.new_ones(1, 2), self.num_heads, torch.float32)[:, 0, 1]
        bias = LinearBias(slopes, key.shape[2])
        out = self._attend((query, key, value), attention_mask, scaling=self.inv_norm_factor, **{ARGUMENT: bias})
        return residual + dropout(self.dense(out.flatten(2)), self.hidden_dropout, self.training), None  # (B, N, W)
