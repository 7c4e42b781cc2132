"""`extend_positions`: longer tables of learned positions."""

import torch
from torch import Tensor, nn

from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_name
from hf_efficient_attn.integration.models import transformers_models


def extend_positions(model: nn.Module, max_length: int, method: str = "tile") -> nn.Module:
    """Grow the learned position table of BERT, RoBERTa, DistilBERT or GPT-2 (and models built like them), in place.

    The config follows, so that the model saves and loads; the tokenizer has a `model_max_length` of its own.

    Args:
        model: a Transformers model, or a module that holds some.
        max_length: tokens that the model shall take. RoBERTa's table keeps its padding_idx + 1 rows beside them.
        method: "tile" repeats the table (Longformer's way, Beltagy et al. 2020, section 5), so that neighbours stay
            neighbours; "interpolate" stretches it linearly, so that position i of n keeps its relative place.

    Returns:
        the same model.

    Raises:
        UnsupportedAttentionError: before anything is changed, for a `max_length` below the present one or not an
            integer, an unknown `method`, models without a learned table over token positions, and models whose
            attention method has learned tables of the present length.
    """
    if method not in ("tile", "interpolate"):
        raise UnsupportedAttentionError(unknown_name("method of extend_positions", method, ["tile", "interpolate"]))
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1:
        raise UnsupportedAttentionError(f"max_length must be a positive integer, not {max_length!r}")
    _refuse_learned_tables(model)
    tables = [table for root in transformers_models(model) for table in position_tables(root)]
    for _, embedding, _ in tables:
        present = embedding.num_embeddings - position_offset(embedding)
        if max_length < present:
            raise UnsupportedAttentionError(
                f"the model takes {present} tokens and max_length={max_length} would cut its position table; shorter "
                "sequences need no change"
            )
    for module, embedding, config in tables:
        offset, old = position_offset(embedding), embedding.num_embeddings
        rows = offset + max_length
        if rows == old:
            continue
        with torch.no_grad():
            grown = torch.cat((embedding.weight[:offset], _grow(embedding.weight[offset:], max_length, method)))
        embedding.weight = nn.Parameter(grown, requires_grad=embedding.weight.requires_grad)
        embedding.num_embeddings = rows
        _grow_buffers(module, old, rows)
        config.max_position_embeddings = rows
        for other in ("n_positions", "n_ctx"):
            if getattr(config, other, None) == old:
                setattr(config, other, rows)
    return model


def _refuse_learned_tables(model: nn.Module) -> None:
    """Tables of an attention method that are as long as the positions cannot grow with them."""
    from hf_efficient_attn.integration.learned import LearnedParameters

    for module in model.modules():
        if isinstance(module, LearnedParameters) and getattr(module.method, "max_length", None) == 0:
            name = module.method.method
            raise UnsupportedAttentionError(
                f"the model holds learned tables of {name} for {module.sizes['length']} tokens: convert it to 'sdpa', "
                f"extend its positions, and convert it to {name!r} again"
            )


def position_offset(embedding: nn.Embedding) -> int:
    """Rows before position 0: RoBERTa counts positions from padding_idx + 1."""
    return 0 if embedding.padding_idx is None else embedding.padding_idx + 1


def _grow(table: Tensor, length: int, method: str) -> Tensor:
    """(P, D) -> (length, D)."""
    if method == "tile":
        return table.repeat(-(-length // table.shape[0]), 1)[:length]
    wide = table.to(torch.promote_types(table.dtype, torch.float32)).t()[None]
    stretched = nn.functional.interpolate(wide, size=length, mode="linear", align_corners=True)
    return stretched[0].t().to(table.dtype).contiguous()


def _grow_buffers(module: nn.Module, old: int, rows: int) -> None:
    """`position_ids` counts on, `token_type_ids` stays 0; both are (1, positions)."""
    for name, buffer in list(module.named_buffers(recurse=False)):
        if name == "position_ids" and buffer.shape[-1] == old:
            setattr(module, name, torch.arange(rows, device=buffer.device, dtype=buffer.dtype).expand(1, -1))
        elif name == "token_type_ids" and buffer.shape[-1] == old:
            setattr(module, name, buffer.new_zeros(1, rows))


def position_tables(root) -> list[tuple[nn.Module, nn.Embedding, object]]:
    """(module that holds the table, table, config) for every learned table over token positions.

    Such a table is an embedding called `position_embeddings` or `wpe` with as many rows as the config says.
    """
    from hf_efficient_attn.integration.models import models_in

    found = []
    for part in models_in(root):
        for module in part.modules():
            for name in ("position_embeddings", "wpe"):
                table = getattr(module, name, None)
                if not isinstance(table, nn.Embedding) or any(table is other for _, other, _ in found):
                    continue
                if table.num_embeddings == getattr(part.config, "max_position_embeddings", None):
                    found.append((module, table, part.config))
    if found:
        return found
    config, kind = root.config, type(root).__name__
    if getattr(config, "rope_parameters", None) is not None:
        reason = (
            "has rotary positions, which are computed and have no end: raise config.max_position_embeddings, and "
            "config.rope_parameters where the model shall be told to stretch them"
        )
    elif getattr(config, "image_size", None) is not None:
        reason = "counts image patches, not tokens: call it with interpolate_pos_encoding=True on larger images"
    else:
        reason = (
            "has no learned table over token positions that is known here (BERT, RoBERTa, DistilBERT, GPT-2 and models "
            "built like them have)"
        )
    raise UnsupportedAttentionError(f"extend_positions: {kind} {reason}")
