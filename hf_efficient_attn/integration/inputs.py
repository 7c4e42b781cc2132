"""The inputs of a call of a model: what is refused before its forward, and the masks that its layers get.

Transformers describes a mask by a function of four indices and builds a (B, 1, Nq, Nk) tensor from it. Here padding is
a mask of the keys, and patterns other than windows are refused. Some models make a causal mask for modules that call
themselves bidirectional (the text model of AIMv2), and exact attention follows the mask. The mask therefore says
whether it is causal, by its dtype: that survives whatever may happen to a tensor on its way, and the code of a model
that takes such a mask for a bool one fails instead of computing something else. Without a mask, the attention module
decides.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration import packing
from hf_efficient_attn.integration.packing import refuse_where
from hf_efficient_attn.integration.settings import EXACT, method_of
from hf_efficient_attn.ops.tracing import replaced_in_graphs, unwrapped

# What the dtype of a mask says: whether it is causal, and whether it is of a sliding window. A user's mask does not get
# here with its own dtype, because `padding_mask` reads it first; other code made a bool one. PyTorch cannot pickle
# uint16.
_KINDS: dict[torch.dtype, tuple[bool | None, bool]] = {
    torch.int16: (True, False),
    torch.int8: (False, False),
    torch.int32: (True, True),
    torch.uint8: (False, True),
    torch.bool: (None, False),
}
# What a mask adds to the scores of masked keys is below this.
_MASKED = -9000.0
_PATTERN = (
    "the mask is not plain causal or full attention, nor that of packed rows (chunks, blocks or a prefix), which "
    f"sub-quadratic attention cannot keep: use attn_implementation={EXACT!r}"
)
# The attribute of a model with the `PositionTable`s that it holds.
TABLES = "_efficient_attention_positions"


def check_inputs(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward pre-hook: refuse `output_attentions`, inputs longer than the position table, and some packed rows.

    Some models do not pass these arguments on to their attention. Packed rows are computed without a cache, because
    Transformers tells their texts apart only then. Gemma 4 gets no `logits_to_keep`, for which it would slice 4-D masks
    for the layers that share keys; its head keeps these logits itself.
    """
    name = method_of(model.config)
    if name is None:
        return args, kwargs
    given = by_name(model, args, kwargs)
    is_packed = packing.are_packed(model, given)
    refuse_long_input(model, given)
    requested = given.get("output_attentions")
    refuse_attentions(name, model.config.output_attentions if requested is None else requested)
    changed: dict[str, Any] = {"logits_to_keep": None} if hasattr(model, "_maybe_slice_kv_shared_inputs") else {}
    if is_packed and "use_cache" in inspect.signature(model.forward).parameters:
        changed["use_cache"] = False
    return args, {**kwargs, **changed}


def by_name(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a call of a model by their names."""
    if not args:
        return kwargs
    return {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}


def refuse_attentions(name: str, requested: object) -> None:
    """Refuse `output_attentions=True`."""
    if requested:
        raise UnsupportedAttentionError(
            f"output_attentions=True: {name} never computes the attention probabilities; load the model with "
            "attn_implementation='eager' to see them"
        )


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
    length += _largest(num_past) if isinstance(num_past, Tensor) else num_past
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
                f"with hf_efficient_attn.extend_positions(model, {used}), or for more tokens if more are generated"
            )


@replaced_in_graphs(lambda counts: 0)
def _largest(counts: Tensor) -> int:
    """The largest number, or 0 where it cannot be read."""
    return 0 if is_tracing(counts) or counts.is_meta else int(unwrapped(counts).max())


class KeyMask(NamedTuple):
    """What a mask of `padding_mask` says."""

    keys: Tensor | None  # bool (B, Nk), True for the keys to attend to; None if there is no padding
    is_causal: bool | None  # whether it was made for causal attention; None if that is not known
    is_local: bool = False  # whether it was made for a sliding window that is shorter than the keys
    begins: Tensor | None = None  # bool (B, N), True for the first token of each text of packed rows; None for others
    filled: Tensor | None = None  # bool (B, Nk), True for the keys that a static cache holds; None for other keys


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Make the mask of the keys. Transformers determines the arguments.

    Returns (B, kv_length), 1 for the keys to attend to, in a form that `read_mask` reads; None if there is no padding.
    For packed rows it returns (B, 1, 1, kv_length), 1 for the first token of each text, and for a static cache
    (B, 1, 2, kv_length), 1 for the keys to attend to and for the keys that the cache holds. Any pattern but padding,
    packed rows and a window, and a mask that is not 2-D are refused.
    """
    # Only Transformers' functions for bidirectional masks pass this argument.
    is_causal = "allow_is_bidirectional_skip" not in kwargs
    # Whether the last key may not belong to the last query.
    is_static = is_causal and (isinstance(q_offset, Tensor) or kv_offset + kv_length != q_offset + q_length)
    if use_vmap:
        raise UnsupportedAttentionError(_PATTERN)
    window = local_size if local_size is not None and local_size < kv_length else None
    mask = begins = None
    if attention_mask is not None:
        if attention_mask.ndim != 2:
            raise UnsupportedAttentionError(
                f"attention_mask must be (batch, keys), not {tuple(attention_mask.shape)}; or use "
                f"attn_implementation={EXACT!r}"
            )
        mask = attention_mask.to(torch.bool)[:, kv_offset : kv_offset + kv_length]
        mask = pad(mask, (0, kv_length - mask.shape[1]), value=False).expand(batch_size, -1)
    if mask_function is not causal_mask_function and mask_function is not bidirectional_mask_function:
        batch = torch.arange(batch_size, device=device)[:, None]
        contains = functools.partial(mask_function, batch, torch.zeros((), dtype=torch.int64, device=device))
        queries = torch.arange(q_length, device=device) + q_offset
        valid = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device) if mask is None else mask
        if is_causal and mask is None and q_length == kv_length and not is_static and not is_tracing(valid):
            # A text begins where a query does not see the key before it.
            begins = ~contains(queries, queries - 1).expand(batch_size, -1)
            begins[:, 0] = True
        refuse_where(~_is_plain(contains, queries, kv_offset, valid, is_causal, window, begins), _PATTERN)
    dtype = next(x for x, kind in _KINDS.items() if kind == (is_causal, window is not None))
    if begins is not None and bool(unwrapped(begins[:, 1:]).any()):
        return begins[:, None, None].to(dtype)
    if is_static:
        filled = (torch.arange(kv_length, device=device) + kv_offset < q_offset + q_length).expand(batch_size, -1)
        return torch.stack((filled if mask is None else filled & mask, filled), 1).unsqueeze(1).to(dtype)
    if window is None and (mask is None or (not is_tracing(mask) and bool(unwrapped(mask).all()))):
        return None
    return torch.ones(batch_size, kv_length, dtype=dtype, device=device) if mask is None else mask.to(dtype)


def _is_plain(
    contains: Callable[..., Tensor],
    queries: Tensor,
    first: int,
    valid: Tensor,
    is_causal: bool,
    window: int | None,
    begins: Tensor | None,
) -> Tensor:
    """Whether a composed mask equals plain causal or full attention, or a sliding window, within texts: a bool scalar.

    While a graph is traced, Transformers composes plain masks too, as if every sequence were packed. In the patterns
    that Transformers composes, every query attends to an interval of keys around it. So it is enough to check the two
    ends of each interval, which takes O(N) pairs.

    `contains` says of positions of queries (Nq,) and of keys, the first of which is at `first`, which pairs are in the
    mask: bool (B, Nq). Pairs with padding, where `valid`, bool (B, Nk), is False, do not matter. `begins`, bool
    (B, Nq), is True for the first token of each text.
    """
    last = first + valid.shape[1] - 1
    if window is None:
        low = first + valid.to(torch.int64).argmax(1, keepdim=True)
        high = queries if is_causal else last - valid.flip(1).to(torch.int64).argmax(1, keepdim=True)
    else:
        low, high = (queries - window + 1, queries) if is_causal else (queries - window, queries + window)
    if begins is not None:
        low = torch.maximum(low, torch.where(begins, queries, first).cummax(1)[0])
    plain = torch.ones((), dtype=torch.bool, device=valid.device)
    for keys, is_reached in ((low, True), (high, True), (low - 1, False), (high + 1, False)):
        index = (keys - first).clamp(0, last - first).expand(len(valid), -1)
        counts = (keys >= first) & (keys <= last) & valid.gather(1, index)
        if is_causal:
            counts = counts & valid.gather(1, (queries - first).clamp(max=last - first).expand(len(valid), -1))
        inside = contains(queries, keys.clamp(first, last))
        plain = plain & ((inside if is_reached else ~inside) | ~counts).all()
    return plain


def has_pairs(mask: object) -> bool:
    """Whether a mask says which pairs of queries and keys count. It is of a model or a user, and says all."""
    return isinstance(mask, Tensor) and (mask.is_floating_point() or (mask.dtype == torch.bool and mask.ndim > 2))


def read_mask(name: str, mask: object) -> KeyMask:
    """Read a mask of `padding_mask`, as an attention module passes it on; refuse others in the name of a method."""
    if mask is None:
        return KeyMask(None, None)
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.dtype in _KINDS:
        return KeyMask(mask.to(torch.bool), *_KINDS[mask.dtype])
    # Models make masks of pairs with other dtypes.
    if isinstance(mask, Tensor) and mask.ndim == 4 and _KINDS.get(mask.dtype, (None,))[0]:
        rows = mask[:, 0].to(torch.bool).unbind(1)
        if len(rows) == 1:
            return KeyMask(None, *_KINDS[mask.dtype], begins=rows[0])
        return KeyMask(rows[0], *_KINDS[mask.dtype], filled=rows[1])
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1:3] == (1, 1) and mask.is_floating_point():
        # LayoutLM adds one of keys to the scores.
        refuse_where(((mask != 0.0) & (mask > _MASKED)).any(), f"{name}: the mask has numbers that are no mask of keys")
        return KeyMask(mask[:, 0, 0] == 0.0, is_causal=False)
    kind = f"{mask.ndim}-D {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
    raise UnsupportedAttentionError(
        f"{name}: a {kind} attention mask cannot be kept: give the model an attention_mask (batch, sequence length) "
        "that is 1 for every token and 0 for padding, or, if the model makes the mask itself, choose the layers "
        f"without it (layers=[...]), or use attn_implementation={EXACT!r}"
    )
