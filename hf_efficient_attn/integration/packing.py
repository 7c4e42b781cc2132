"""Packed rows: several texts in one row, each of which is attended to by itself.

The positions of a packed row begin again with each text. Transformers composes a mask from them where a causal mask is
made without a cache and without an attention mask. `inputs.padding_mask` finds the texts in this mask, so a model whose
code does not hand its positions to the mask is refused. An attention mask says that each row is one text, as it does
for exact attention. The texts are computed in batches of similar length (`attend_by_text`).
"""

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.ops.tracing import unwrapped

# Arguments that tell where the texts of a packed row begin.
ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")
# What configs call layers that give later tokens a state of earlier ones, or a convolution over them.
_STATES = {"linear_attention", "mamba", "recurrent", "conv", "hybrid", "hybrid_sliding"}
QueryKeyValue = tuple[Tensor, Tensor, Tensor]
_PAD = "pad the texts (DataCollatorWithPadding) instead of packing them (DataCollatorWithFlattening)"


def are_packed(model: PreTrainedModel, given: Mapping[str, Any]) -> bool:
    """Whether a call of a model, by its arguments, has packed rows. Rows that would not be kept apart are refused.

    While a graph is traced, packed rows are refused by a check in the graph.
    """
    ids, mask = given.get("position_ids"), given.get("attention_mask")
    argument = next((name for name in ARGUMENTS if given.get(name) is not None), None)
    # Models of pictures take the axes of their positions. Four of them begin with the positions of the tokens, which go
    # to the mask; three begin with the time, which does not.
    are_times = isinstance(ids, Tensor) and ids.ndim == 3 and len(ids) < 4
    ids = ids[0] if isinstance(ids, Tensor) and ids.ndim == 3 else ids
    if argument is None and (mask is not None or not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_meta):
        return False
    what = f"{argument or 'position_ids'}: the rows are packed sequences, several texts in one, "
    if mask is not None:
        raise UnsupportedAttentionError(
            f"{what}and an attention_mask says that each row is one text: leave the attention_mask out, or {argument}"
        )
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        raise UnsupportedAttentionError(
            f"{what}and nothing but the positions tells the texts apart in this model: give it position_ids (batch, "
            "tokens) that begin again with each text, as DataCollatorWithFlattening makes them"
        )
    steps = ids.diff(dim=1)  # (B, N - 1)
    message = (
        f"{what}which would attend to each other: {_PAD}, or use attn_implementation='flash_attention_2'. If they are "
        "not packed, and the positions begin again because the model has too few: give an attention_mask of ones"
    )
    if is_tracing(steps):
        refuse_where((steps < 0).any(), message)
        return False
    if argument is not None and not _agree(argument, given[argument], unwrapped(steps) != 1):
        raise UnsupportedAttentionError(f"{what}but in other places than those where position_ids begin again")
    if not bool((unwrapped(steps) <= 0).any()):  # positions that skip tokens do not begin again
        return False
    parts = (x for x in model.modules() if isinstance(x, PreTrainedModel))
    if are_times or not any(_reads_positions(type(x).__module__) for x in parts):
        refuse_where((steps < 0).any(), message)  # in encoders and pictures positions may be equal
        return False
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    if found := sorted(_STATES.intersection(kinds)):
        mixed = f"and layers of this model ({', '.join(found)}) carry a state from one text into the next"
        raise UnsupportedAttentionError(f"{what}{mixed}: {_PAD}")
    if given.get("use_cache") or given.get("past_key_values", given.get("cache")) is not None:
        raise UnsupportedAttentionError(f"{what}and a key-value cache would hold them as one text: use_cache=False")
    return True


def refuse_begins(name: str, begins: Tensor | None) -> None:
    """Refuse packed rows in the name of what computes one text per row only."""
    if begins is not None:
        raise UnsupportedAttentionError(f"{name}: the rows are packed sequences, several texts in one: {_PAD}")


def refuse_where(problem: Tensor, message: str) -> None:
    """Refuse a call for which a bool scalar is True. While a graph is traced, the check is part of the graph."""
    if is_tracing(problem):
        torch._assert_async(~problem, message)
    elif bool(unwrapped(problem).any()):
        raise UnsupportedAttentionError(message)


def _agree(argument: str, texts: Tensor, begins: Tensor) -> bool:
    """Whether an argument says that texts begin after the tokens where `begins`, bool (B, N - 1), is True."""
    if argument == "seq_idx":
        return torch.equal(texts.diff(dim=-1).view_as(begins) != 0, begins)
    return len(begins) == 1 and torch.equal(texts[1:-1].to(begins.device), begins[0].nonzero()[:, 0] + 1)


@functools.cache
def _reads_positions(module: str) -> bool:
    """Whether the code in a module of models hands positions to all causal masks that it makes, and makes one."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):  # no source
        return False
    found = []
    for function in (x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)):
        makers = {x.id for x in ast.walk(function) if isinstance(x, ast.Name) and _makes_mask(x.id)}
        for assigned in (x for x in ast.walk(function) if isinstance(x, ast.Assign)):  # one of them by another name
            if any(isinstance(x, ast.Name) and _makes_mask(x.id) for x in ast.walk(assigned.value)):
                makers |= {x.id for x in assigned.targets if isinstance(x, ast.Name)}
        constants = {x.value for x in ast.walk(function) if isinstance(x, ast.Constant)}
        for call in (x for x in ast.walk(function) if isinstance(x, ast.Call)):
            if isinstance(call.func, ast.Name) and call.func.id in makers:
                words = [x.arg for x in call.keywords]  # None for **
                found.append("position_ids" in words or (None in words and "position_ids" in constants))
    return bool(found) and all(found)


def _makes_mask(name: str) -> bool:
    return name.startswith("create_") and "causal_mask" in name


def texts_of(begins: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Find the texts of packed rows, bool (B, N), True for the first token of each text, T texts at a time.

    Yields their tokens among those of all rows, int64 (T, L), and bool (T, L), False behind the end of a text. The
    longest text has less than twice the tokens of the shortest one.
    """
    start = begins.flatten().nonzero()[:, 0]
    length = pad(start, (0, 1), value=begins.numel()).diff()
    bits = torch.tensor([x.bit_length() for x in length.tolist()], device=start.device)
    for one in bits.unique():
        same = bits == one
        offset = torch.arange(int(length[same].max()), device=begins.device)
        token = start[same].unsqueeze(1) + offset
        yield token.clamp(max=begins.numel() - 1), offset < length[same].unsqueeze(1)


def attend_by_text(
    compute: Callable[[QueryKeyValue, Tensor], Tensor], tensors: QueryKeyValue, begins: Tensor
) -> Tensor:
    """Compute the attention (B, H, N, Dv) of each text of packed rows, tensors (B, H, N, .), by itself.

    `compute` maps queries, keys and values (T, H, L, .) of texts and the bool mask (T, L) of their tokens to
    (T, H, L, Dv). `begins`, bool (B, N), is True for the first token of each text.
    """
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in tensors)  # (B N, H, .) each
    outs = []
    order = []
    for token, valid in texts_of(begins):
        q, k, v = (x[token].transpose(1, 2) for x in (query, key, value))  # (T, H, L, .) each
        out = compute((q, k, v), valid)  # (T, H, L, Dv)
        outs.append(out.transpose(1, 2)[valid])
        order.append(token[valid])
    joined = torch.cat(outs).index_select(0, torch.cat(order).argsort())  # (B N, H, Dv)
    return joined.unflatten(0, begins.shape).transpose(1, 2)
