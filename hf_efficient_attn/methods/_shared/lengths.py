"""Padded batches as calls without padding, one for all sequences of the same length."""

from collections.abc import Callable

from torch import Tensor

from hf_efficient_attn.methods._shared.heads import FlatHeads
from hf_efficient_attn.ops.tokens import take, valid_first


def without_padding(form: Callable[[Tensor, Tensor, Tensor], Tensor], heads: FlatHeads) -> Tensor:
    """Call a form with the valid tokens of each sequence: (BH, Nq, Dv) in the dtype of the values, 0 for padding.

    So masked tokens take part in nothing, and a sequence has the same output in every batch.

    Args:
        form: form(query, key, value) returns (BH', Nq, Dv) for some of the heads.
        heads: the mask of the keys is that of the queries too if there are as many.
    """
    query, key, value, mask = heads
    if mask is None:
        return form(query, key, value).to(value.dtype)
    same, out = query.shape[1] == key.shape[1], value.new_zeros(*query.shape[:2], value.shape[2])
    counts = mask.sum(1)
    order = None
    for count in counts.unique().tolist():
        if count == 0:
            continue
        some = (counts == count).nonzero()[:, 0]
        order = valid_first(mask[some])[:, :count]
        own = [take(x[some], order) for x in (key, value)]
        if same:
            part = form(take(query[some], order), *own).to(value.dtype)
            out = out.index_put((some[:, None], order), part)
        else:
            out = out.index_put((some,), form(query[some], *own).to(value.dtype))
    return out
