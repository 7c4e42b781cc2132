"""The mask function of every method: it returns the padding as a (B, Nk) mask and refuses all patterns but windows.

Transformers describes a mask by a function of four indices and builds a (B, 1, Nq, Nk) tensor from it. Here padding is
a mask of the keys, and other patterns are refused. Some models make a causal mask for modules that call themselves
bidirectional (the text model of AIMv2), and exact attention follows the mask. The mask therefore says whether it is
causal, by its dtype: that survives whatever may happen to a tensor on its way (detach, slices, other devices), and
the code of a model that takes such a mask for a bool one fails instead of computing something else. Without a mask,
causality is what the attention module says, as with exact attention.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.head_numbers import refuse_lost_padding
from hf_efficient_attn.integration.settings import EXACT
from hf_efficient_attn.ops.tracing import unwrapped

# The dtypes of masks by what they say: whether the mask is causal, and whether it is of a sliding window. A mask of
# a user does not get here with its own dtype, because `padding_mask` reads it first. PyTorch cannot pickle uint16.
_DTYPES = {
    (True, False): torch.int16,
    (False, False): torch.int8,
    (True, True): torch.int32,
    (False, True): torch.uint8,
}
_KINDS: dict[torch.dtype, tuple[bool | None, bool]] = {torch.bool: (None, False)}
_KINDS |= {dtype: kind for kind, dtype in _DTYPES.items()}
# Arguments that tell where the texts of a packed row begin.
_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")
_PATTERN = (
    "the mask is not plain causal or full attention (packed sequences, chunks, blocks or a prefix), which "
    "sub-quadratic attention cannot keep: pad the sequences instead of packing them, or use "
    f"attn_implementation={EXACT!r}"
)


class KeyMask(NamedTuple):
    """What a mask of `padding_mask` says.

    Attributes:
        keys: bool (B, Nk), True for the keys to attend to; None if there is no padding.
        is_causal: whether it was made for causal attention; None if that is not known.
        is_local: whether it was made for a sliding window that is shorter than the keys.
    """

    keys: Tensor | None
    is_causal: bool | None
    is_local: bool = False


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

    Returns:
        (B, kv_length), 1 for the keys to attend to, in a form that `read_mask` reads; None if there is no padding.

    Raises:
        UnsupportedAttentionError: packed sequences, chunks, any other pattern, a static cache, or a mask of the keys
            that is not 2-D.
    """
    # Only Transformers' functions for bidirectional masks pass this argument.
    is_causal = "allow_is_bidirectional_skip" not in kwargs
    if is_causal and (isinstance(q_offset, Tensor) or kv_offset + kv_length != q_offset + q_length):
        raise UnsupportedAttentionError(
            "the last key does not belong to the last query, as in a static key-value cache: use the ordinary dynamic "
            f"cache (leave cache_implementation out), or attn_implementation={EXACT!r}"
        )
    window = local_size if local_size is not None and local_size < kv_length else None
    if use_vmap:
        raise UnsupportedAttentionError(_PATTERN)
    mask = None if attention_mask is None else _key_mask(attention_mask, batch_size, kv_length, kv_offset)
    if mask_function is not causal_mask_function and mask_function is not bidirectional_mask_function:
        pairs = _Pairs(mask_function, batch_size, q_length, kv_length, q_offset, kv_offset, torch.device(device))
        if window is None:
            _check_pattern(pairs, is_causal, mask)
        else:
            _check_window(pairs, is_causal, mask, window)
    dtype = _DTYPES[is_causal, window is not None]
    if window is None and (mask is None or (not is_tracing(mask) and bool(unwrapped(mask).all()))):
        return None
    if mask is None:
        return torch.ones(batch_size, kv_length, dtype=dtype, device=device)
    refuse_lost_padding(mask, is_causal)
    return mask.to(dtype)


def read_mask(name: str, mask: object) -> KeyMask:
    """Read a mask of `padding_mask`, as an attention module passes it on.

    Args:
        name: what reads it, a method, for the message.
        mask: the mask. A bool one (B, Nk) was made by other code, and says nothing about causality.

    Raises:
        UnsupportedAttentionError: it is another mask.
    """
    if mask is None:
        return KeyMask(None, None)
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.dtype in _KINDS:
        return KeyMask(mask.to(torch.bool), *_KINDS[mask.dtype])
    kind = f"{mask.ndim}-D {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
    raise UnsupportedAttentionError(
        f"{name}: a {kind} attention mask cannot be kept, because no (queries, keys) mask is ever built here: give the "
        "model an attention_mask of shape (batch, sequence length) that is 1 for every token and 0 for padding, or use "
        f"attn_implementation={EXACT!r}"
    )


def refuse_packed_rows(given: Mapping[str, Any]) -> None:
    """Refuse a call with several texts in one row, which would attend to each other.

    Transformers looks at the positions only where it makes a causal mask without a cache.

    Args:
        given: the arguments of the call by their names.

    Raises:
        UnsupportedAttentionError: an argument says where texts begin, or the positions of a row begin again, not
            counting positions of padding. While a graph is traced, the check of the positions is part of the graph.
    """
    found = next((name for name in _PACKING if given.get(name) is not None), None)
    ids, mask = given.get("position_ids"), given.get("attention_mask")
    is_known = mask is None or (
        isinstance(mask, Tensor) and mask.ndim == 2
    )  # else a model makes masks for a part of it
    if found is None and is_known and isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_meta:
        restarts = ids[:, 1:] < ids[:, :-1]
        if mask is not None and mask.shape[1] >= ids.shape[1]:
            valid = mask[:, mask.shape[1] - ids.shape[1] :].to(ids.device, torch.bool)
            restarts = restarts & valid[:, 1:] & valid[:, :-1]
        if is_tracing(restarts):
            torch._assert_async(~restarts.any(), _packed("position_ids"))
        elif ids.shape[1] > 1 and bool(unwrapped(restarts).any()):
            found = "position_ids"
    if found is not None:
        raise UnsupportedAttentionError(_packed(found))


def _packed(argument: str) -> str:
    return (
        f"{argument}: the rows are packed sequences, several texts in one, which would attend to each other, because "
        "attention here knows padding only: pad the texts (DataCollatorWithPadding) instead of packing them "
        "(DataCollatorWithFlattening), or use attn_implementation='flash_attention_2'"
    )


def _key_mask(attention_mask: Tensor, batch: int, kv_length: int, kv_offset: int) -> Tensor:
    """The part of a (B, N) mask that belongs to the keys: bool (B, kv_length)."""
    if attention_mask.ndim != 2:
        raise UnsupportedAttentionError(
            f"attention_mask must be (batch, keys), not {tuple(attention_mask.shape)}; or use "
            f"attn_implementation={EXACT!r}"
        )
    mask = attention_mask.to(torch.bool)[:, kv_offset : kv_offset + kv_length]
    if mask.shape[1] < kv_length:
        mask = pad(mask, (0, kv_length - mask.shape[1]), value=False)
    return mask.expand(batch, -1)


class _Pairs(NamedTuple):
    """The pairs of queries and keys of a mask, as Transformers describes them.

    Attributes:
        function: of batch index, head, query position and key position.
        batch_size: B.
        q_length: number of queries.
        kv_length: number of keys.
        q_offset: position of the first query.
        kv_offset: position of the first key.
        device: of the mask.
    """

    function: Callable[..., Tensor]
    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int
    kv_offset: int
    device: torch.device

    def queries(self) -> Tensor:
        """The positions of the queries."""
        return torch.arange(self.q_length, device=self.device) + self.q_offset

    def contain(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether the mask contains pairs of positions, bool (B, ...)."""
        batch = torch.arange(self.batch_size, device=self.device)[:, None]
        return self.function(batch, torch.zeros((), dtype=torch.int64, device=self.device), queries, keys)


def _refuse_unless(plain: Tensor) -> None:
    """Refuse a pattern by a bool scalar. While a graph is traced, the check is part of the graph."""
    if is_tracing(plain):
        torch._assert_async(plain, _PATTERN)
    elif not bool(unwrapped(plain).all()):
        raise UnsupportedAttentionError(_PATTERN)


def _check_pattern(pairs: _Pairs, is_causal: bool, mask: Tensor | None) -> None:
    """Refuse a composed mask unless it equals plain causal or full attention.

    Composed masks can be plain: while a graph is traced, Transformers assumes that every sequence is packed, because it
    cannot look at the positions; and a window that contains all keys is no window. In the patterns that Transformers
    composes, every query attends to an interval of keys around it. So it is enough to check the ends of the intervals,
    which takes O(N) pairs: every query attends to the first valid key, and, if causal, to itself but not to the next
    key, otherwise to the last valid key.

    Args:
        pairs: the composed mask.
        is_causal: which of the two patterns is expected.
        mask: bool (B, Nk), False for padding, whose pairs do not matter; None for none.
    """
    queries, kv_length = pairs.queries(), pairs.kv_length
    valid = torch.ones(pairs.batch_size, kv_length, dtype=torch.bool, device=pairs.device) if mask is None else mask
    reaches_first = pairs.contain(queries, pairs.kv_offset + valid.to(torch.int64).argmax(1, keepdim=True))
    if is_causal:
        valid_query = valid[:, kv_length - pairs.q_length :]
        plain = ((reaches_first & pairs.contain(queries, queries)) | ~valid_query).all()
        reaches_next = pairs.contain(queries[:-1], queries[1:])
        plain = plain & ~(reaches_next & valid_query[:, :-1] & valid_query[:, 1:]).any()
    else:
        last = pairs.kv_offset + kv_length - 1 - valid.flip(1).to(torch.int64).argmax(1, keepdim=True)
        plain = (reaches_first & pairs.contain(queries, last)).all()
    _refuse_unless(plain)


def _check_window(pairs: _Pairs, is_causal: bool, mask: Tensor | None, window: int) -> None:
    """Refuse a composed mask unless it equals a sliding window, by the ends of every query's interval of keys.

    Args:
        pairs: the composed mask.
        is_causal: whether the window is of earlier keys only.
        mask: bool (B, Nk), False for padding, whose pairs do not matter; None for none.
        window: the number of keys, the query's own included; on each side, not included, if not causal.
    """
    queries, last = pairs.queries(), pairs.kv_length - 1
    low, high = (queries - window + 1, queries) if is_causal else (queries - window, queries + window)
    plain = torch.ones((), dtype=torch.bool, device=pairs.device)
    for keys, is_reached in ((low, True), (high, True), (low - 1, False), (high + 1, False)):
        position = keys - pairs.kv_offset
        counts = (position >= 0) & (position <= last)
        if mask is not None:
            counts = counts & mask[:, position.clamp(0, last)]
        # A packed row is valid everywhere, and only its positions say where its texts begin.
        found = pairs.contain(queries, keys.clamp(pairs.kv_offset, pairs.kv_offset + last))
        plain = plain & ((found if is_reached else ~found) | ~counts).all()
    _refuse_unless(plain)
