"""For each block of a sequence the merge of earlier or of all other blocks, in a constant number of operations.

The blocks are put into groups. A block merges the blocks of its own group, in one softmax over their lse, and the merge
of the other groups, which is the same for all blocks of its group. A scan block by block would take a few launches for
each block on an accelerator, and one by doubling passes over all states once for each binary digit of their number.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.constants import constant
from hf_efficient_attn.ops.partial import Partial

# The lse of an empty set: a finite number, so that no softmax is NaN. That of an excluded block is twice as low, and
# a set whose lse is below the limit is empty.
_EMPTY, _LIMIT = -1e30, -0.9e30


def merge_other_blocks(state: Partial, *, earlier_only: bool, mark_empty: bool = True) -> Partial:
    """For each block t the merge of all other blocks, or of the blocks 0 .. t-1, which alone determine it.

    Args:
        state: out (BH, T, F, Dv) and lse (BH, T, F).
        earlier_only: merge the blocks before t only.
        mark_empty: give 0 and -inf where all merged blocks are empty, else a finite output and a very negative lse.

    Returns:
        The same shapes.
    """
    (out, lse), num_blocks, device = state, state.lse.shape[1], state.lse.device
    del state
    # A block has a logit for each block of its group, and a group one for each group: together fewest for groups of
    # about the third root. Powers of two often need no padding.
    size = 1 << round((num_blocks.bit_length() - 1) / 3)
    num_groups = -(-num_blocks // size)
    missing = num_groups * size - num_blocks
    lse = lse.clamp(min=_EMPTY)
    if missing:
        out, lse = pad(out, (0, 0, 0, 0, 0, missing)), pad(lse, (0, 0, 0, missing), value=_EMPTY)
    # (BH, G, F, 1, S) and (BH, G, F, S, Dv): S blocks in each of G groups. The last of S + 1 rows is the whole group.
    logits = lse.unflatten(1, (num_groups, size)).transpose(2, 3).unsqueeze(3)
    logits = logits + constant(_excluded, size, earlier_only, True, lse.dtype, device=device)
    out = out.unflatten(1, (num_groups, size)).transpose(2, 3).contiguous()
    own, own_lse = _merged(logits, out)
    del out, logits
    # (BH, F, G, G), for each group the other groups, and (BH, F, G, Dv).
    logits = own_lse[..., -1].transpose(1, 2).unsqueeze(2)
    logits = logits + constant(_excluded, num_groups, earlier_only, False, lse.dtype, device=device)
    other, other_lse = _merged(logits, own[:, :, :, -1].transpose(1, 2))
    other, other_lse = other.transpose(1, 2).unsqueeze(3), other_lse.transpose(1, 2).unsqueeze(3)
    own, own_lse = own[:, :, :, :-1], own_lse[..., :-1]
    share = torch.sigmoid(other_lse - own_lse).to(own.dtype).unsqueeze(4)
    merged, total = torch.lerp(own, other, share), torch.logaddexp(own_lse, other_lse)
    del own, other
    if mark_empty:
        is_empty = total < _LIMIT
        merged, total = merged.masked_fill(is_empty.unsqueeze(4), 0.0), total.masked_fill(is_empty, -torch.inf)
    merged, total = (x.transpose(2, 3).flatten(1, 2)[:, :num_blocks] for x in (merged, total))
    return Partial(merged, total)


def _merged(logits: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """The output (..., T, Dv) and lse (..., T) for logits (..., T, S) and the outputs (..., S, Dv) of S blocks."""
    return logits.softmax(-1).to(out.dtype) @ out, logits.logsumexp(-1)


def _excluded(size: int, earlier_only: bool, with_whole: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What is added to the lse of block s for block t, (t, s): 0, or for an excluded block a very negative number.

    `with_whole` adds a row that excludes nothing.
    """
    ones = torch.ones(size + with_whole, size, dtype=torch.bool, device=device)
    excluded = ones.triu() if earlier_only else torch.eye(size + with_whole, size, dtype=torch.bool, device=device)
    return torch.zeros(excluded.shape, dtype=dtype, device=device).masked_fill_(excluded, 2 * _EMPTY)
