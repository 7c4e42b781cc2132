"""Learned tables over token positions: which modules hold them, and the check that an input does not exceed them."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.ops.tracing import replaced_in_graphs, unwrapped

_NAMES = ("position_embeddings", "wpe", "embed_positions", "position_embedding")
# The attribute of a model with the `PositionTable`s that it holds.
TABLES = "_efficient_attention_positions"


class PositionTable(NamedTuple):
    """A learned table over token positions: the attribute `name` of `module`, in which it can be replaced."""

    module: nn.Module
    name: str

    @property
    def embedding(self) -> nn.Embedding:
        """The table."""
        return getattr(self.module, self.name)

    @property
    def num_positions(self) -> int:
        """The number of tokens that the table is for."""
        return self.embedding.num_embeddings - position_offset(self.embedding)


def position_offset(embedding: nn.Embedding) -> int:
    """Number of entries before position 0: those of BART begin at `offset`, those of RoBERTa at padding_idx + 1."""
    padding: int = -1 if embedding.padding_idx is None else embedding.padding_idx
    offset: Any = getattr(embedding, "offset", None)
    return offset if isinstance(offset, int) else padding + 1


def find_tables(model: nn.Module, config: PreTrainedConfig) -> Iterator[PositionTable]:
    """Find the learned tables over token positions in a model to which a config applies.

    Such a table is an embedding with a usual name and as many entries as the config says. The entries before `offset`
    are not counted there.
    """
    count = getattr(config, "max_position_embeddings", None)
    for module, name in ((module, name) for module in model.modules() for name in _NAMES):
        table = getattr(module, name, None)
        if isinstance(table, nn.Embedding) and "Sinusoidal" not in type(table).__name__:
            extra = getattr(table, "offset", 0)
            if isinstance(extra, int) and table.num_embeddings - extra == count:
                yield PositionTable(module, name)


def tables_of(parts: Sequence[PreTrainedModel]) -> dict[PreTrainedModel, tuple[PositionTable, ...]]:
    """The tables that each of the models in a model holds itself, not through another one of them."""
    found = {id(table.embedding): (part, table) for part in parts for table in find_tables(part, part.config)}
    return {part: tuple(table for owner, table in found.values() if owner is part) for part in parts}


def by_name(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a call of a model by their names."""
    if not args:
        return kwargs
    return {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}


def refuse_long_input(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> None:
    """Refuse a call of a model whose input is longer than its position table.

    Without this the call ends in an index error, on a GPU in an assertion that ends the process. Only shapes are looked
    at, unless they exceed the table: then positions that are given, or counted without padding, can still fit.
    """
    tables: tuple[PositionTable, ...] = getattr(model, TABLES, ())
    ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    if not tables or not isinstance(tokens := embeds if ids is None else ids, Tensor):
        return
    length = tokens.shape[-1 if ids is not None else -2]
    # Transformers 5.24 calls the argument `cache`.
    past: Any = kwargs.get("past_key_values", kwargs.get("cache"))
    num_past = past.get_seq_length() if hasattr(past, "get_seq_length") else 0
    length = length if isinstance(num_past, Tensor) else length + num_past
    for table in (table for table in tables if length > table.num_positions):
        position_ids, embedding, used = kwargs.get("position_ids"), table.embedding, length
        if isinstance(position_ids, Tensor):
            has_offset = isinstance(getattr(embedding, "offset", None), int)
            used = _largest(position_ids + 1 - (0 if has_offset else position_offset(embedding)))
        elif embedding.padding_idx is not None and ids is not None:
            # Padding has no position. Which cached tokens are padding is unknown here, so all of them count.
            used = _largest((ids != embedding.padding_idx).sum(-1) + length - ids.shape[-1])
        if used > table.num_positions:
            raise UnsupportedAttentionError(
                f"the input has {used} tokens and {type(model).__name__} has {table.num_positions} positions, for a "
                "prompt and what is generated together: shorten the input, or extend the positions before the call "
                f"with hf_efficient_attn.extend_positions(model, {used})"
            )


@replaced_in_graphs(lambda counts: 0)
def _largest(counts: Tensor) -> int:
    """The largest number, or 0 where it cannot be read."""
    return 0 if is_tracing(counts) or counts.is_meta else int(unwrapped(counts).max())
