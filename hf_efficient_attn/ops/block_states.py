"""For each block of a sequence the merge of earlier or of all other blocks, in a constant number of operations.

The blocks are put into groups, about as many as each has blocks. A block merges the blocks of its own group and the
totals of other groups, in one softmax over their lse. A scan block by block would take a few launches for each block on
an accelerator, and one by doubling passes over all states once for each binary digit of their number.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.constants import constant
from hf_efficient_attn.ops.partial import Partial

# The lse of an empty set: a finite number, so that no softmax is NaN. That of an excluded block is twice as low, and
# a set whose lse is below the limit is empty.
_EMPTY, _LIMIT = -1e30, -0.9e30


def merge_other_blocks(state: Partial, *, earlier_only: bool) -> Partial:
    """For each block t the merge of all other blocks, or of the blocks 0 .. t-1, which alone determine it.

    Args:
        state: out (BH, T, F, Dv) and lse (BH, T, F).
        earlier_only: merge the blocks before t only.

    Returns:
        The same shapes; 0 and -inf where all merged blocks are empty.
    """
    num_blocks, device = state.lse.shape[1], state.lse.device
    size = math.isqrt(max(0, num_blocks - 1)) + 1
    num_groups = -(-num_blocks // size)
    missing = num_groups * size - num_blocks
    out, lse = state.out, state.lse.clamp(min=_EMPTY)
    if missing:
        out, lse = pad(out, (0, 0, 0, 0, 0, missing)), pad(lse, (0, 0, 0, missing), value=_EMPTY)
    # (BH, G, F, S) and (BH, G, F, S, Dv): S blocks in each of G groups.
    lse = lse.unflatten(1, (num_groups, size)).transpose(2, 3)
    out = out.unflatten(1, (num_groups, size)).transpose(2, 3)
    group_lse = lse.logsumexp(3).transpose(1, 2)  # (BH, F, G)
    group_out = (out * lse.softmax(3).to(out.dtype).unsqueeze(4)).sum(3)  # (BH, G, F, Dv)
    masks = [constant(_excluded, n, earlier_only, lse.dtype, device=device) for n in (size, num_groups)]
    own = lse.unsqueeze(3) + masks[0]  # (BH, G, F, S, S)
    # (BH, G, F, 1, G), for each group the other groups.
    groups = (group_lse.unsqueeze(2) + masks[1]).permute(0, 2, 1, 3).unsqueeze(3)
    logits = torch.cat((own, groups.expand(*own.shape[:4], -1)), 4)
    total = logits.logsumexp(4)
    # (BH, G, F, G, Dv), the totals of all groups for each group.
    others = group_out.transpose(1, 2).unsqueeze(1).expand(-1, num_groups, -1, -1, -1)
    merged = logits.softmax(4).to(out.dtype) @ torch.cat((out, others), 3)
    is_empty = total < _LIMIT
    merged, total = merged.masked_fill(is_empty.unsqueeze(4), 0.0), total.masked_fill(is_empty, -torch.inf)
    merged, total = (x.transpose(2, 3).flatten(1, 2)[:, :num_blocks] for x in (merged, total))
    return Partial(merged, total)


def _excluded(size: int, earlier_only: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What is added to the lse of block s for block t, (t, s): 0, or for an excluded block a very negative number."""
    ones = torch.ones(size, size, dtype=torch.bool, device=device)
    excluded = ones.triu() if earlier_only else torch.eye(size, dtype=torch.bool, device=device)
    return torch.zeros(size, size, dtype=dtype, device=device).masked_fill_(excluded, 2 * _EMPTY)
