"""A counter of the operations of a call, over torch's own: with what that counts as nothing.

What `count` counts, in four parts:
products      floating-point operations of matrix products, convolutions and attention kernels: TWO for every
              multiply-add, as torch counts; `multiply_adds_as_one` halves them, as fvcore counts and so the paper.
exponentials  one for every element of exp, softmax, logsumexp, and for every pair of a query and a key in a kernel.
sorting       comparisons: n log2 n for every row of n elements that is sorted or searched for its greatest (sort,
              argsort, topk), log2 n for every element that is looked up in n boundaries (searchsorted).
gathers       one for every element moved by an index: gather, take_along_dim, index, index_select, scatter.
Sums, other elementwise work, copies and the draw of orthogonal projections are in none of them. All is counted as it
is computed: rows that fill up a tile, and pairs that a mask then shuts out, count as well.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

import hf_efficient_attn as hea
from hf_efficient_attn.methods import MethodConfig


class Operations(NamedTuple):
    """What a call costs, in parts; see the head of this file."""

    products: int
    exponentials: int
    sorting: int
    gathers: int

    @property
    def total(self) -> int:
        return sum(self)


# --- formulas: shapes of the arguments, and `out_shape`, that of the result ---


def _pairs(query, key, *_, **__) -> int:
    """(..., Nq, D), (..., Nk, D): one for every query and key."""
    return math.prod(query[:-1]) * key[-2]


def _attention(query, key, value, *_, **__) -> int:
    """The two products, of the scores and with the values (..., Nk, Dv)."""
    return 2 * _pairs(query, key) * (query[-1] + value[-1])


def _attention_backward(_, query, key, value, *__, **___) -> int:
    """Of the kernel whose first argument is the gradient: the scores again, and the gradients of all but them."""
    return 2 * _pairs(query, key) * (3 * query[-1] + 2 * value[-1])


def _pairs_backward(_, query, key, *__, **___) -> int:
    return _pairs(query, key)


def _own_attention_backward(_, __, query, key, value, *___, **____) -> int:
    """The same of our kernel, which has the gradients of the output and of the log of the weights before the query."""
    return _attention_backward(None, query, key, value)


def _own_pairs_backward(_, __, query, key, *___, **____) -> int:
    return _pairs(query, key)


def _added_product(_, left, right, **__) -> int:
    """(B, N, M) += (B, N, K) (B, K, M)."""
    return 2 * math.prod(left) * right[-1]


def _elements(x, *_, **__) -> int:
    return math.prod(x)


def _broadcast(x, y, *_, **__) -> int:
    return math.prod(torch.broadcast_shapes(x, y))


def _log2(n: int) -> float:
    return math.log2(n) if n > 1 else 0.0


def _comparisons(x, dim: int = -1) -> int:
    n = x[dim] if x else 1
    return math.ceil(math.prod(x) * _log2(n))


def _sort(x, dim: int = -1, *_, **__) -> int:
    return _comparisons(x, dim)


def _stable_sort(x, *_, dim: int = -1, **__) -> int:
    return _comparisons(x, dim)


def _sort_any(x, *arguments, **options) -> int:
    """sort(x, dim, descending) or, stable by keyword, sort(x, stable=, dim=, descending=)."""
    return (_stable_sort if "stable" in options else _sort)(x, *arguments, **options)


def _top(x, _, dim: int = -1, *__, **___) -> int:
    """topk(x, k, dim)."""
    return _comparisons(x, dim)


def _search(boundaries, values, *_, out_shape=None, **__) -> int:
    """searchsorted(boundaries, values), either of them numbers."""
    return math.ceil(math.prod(out_shape or ()) * math.ceil(_log2(boundaries[-1] + 1)))


def _bucketize(_, boundaries, *__, out_shape=None, **___) -> int:
    return _search(boundaries, None, out_shape=out_shape)


def _moved_out(*_, out_shape=None, **__) -> int:
    return math.prod(out_shape)


def _scattered(_, __, index, *___, **____) -> int:
    """scatter(x, dim, index, values)."""
    return math.prod(index)


def _added_at(_, __, ___, source, *____, **_____) -> int:
    """index_add(x, dim, index, source)."""
    return math.prod(source)


def _put(x, indices, *_, **__) -> int:
    """index_put(x, indices, values), with indices that are integers: the elements of x[indices]."""
    given = [index for index in indices if index is not None]
    rest = [n for n, index in zip(x, [*indices, *[None] * len(x)], strict=False) if index is None]
    return math.prod(torch.broadcast_shapes(*given)) * math.prod(rest)


def _packets(formula: Callable[..., int], *names: str) -> dict[Any, Callable[..., int]]:
    """Operators of torch by name, with their formula; some are not in every version of torch."""
    return {getattr(torch.ops.aten, name): formula for name in names if hasattr(torch.ops.aten, name)}


_OWN = torch.ops.hf_efficient_attn
_CPU = "_scaled_dot_product_flash_attention_for_cpu"
_KERNELS = [
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
]

# The products that torch's counter has no formula for.
FORMULAS = {
    **_packets(_added_product, "baddbmm_"),
    **_packets(_attention, _CPU),
    **_packets(_attention_backward, f"{_CPU}_backward"),
    _OWN.partial_attention: _attention,
    _OWN.partial_attention_backward: _own_attention_backward,
}
FORMULAS_BY_PART: dict[str, dict[Any, Callable[..., int]]] = {
    "products": FORMULAS,
    "exponentials": {
        **_packets(_elements, "exp", "exp_", "exp2", "exp2_", "expm1", "expm1_", "_softmax", "_safe_softmax"),
        # These two are made of others, but not where they write into a tensor that was given.
        **_packets(_elements, "softmax", "log_softmax"),
        **_packets(_elements, "_log_softmax", "logsumexp", "logcumsumexp", "sigmoid", "sigmoid_", "elu", "elu_"),
        **_packets(_broadcast, "logaddexp", "logaddexp2"),
        **_packets(_pairs, _CPU, *_KERNELS),
        **_packets(_pairs_backward, f"{_CPU}_backward", *(f"{name}_backward" for name in _KERNELS)),
        _OWN.partial_attention: _pairs,
        _OWN.partial_attention_backward: _own_pairs_backward,
    },
    "sorting": {
        **_packets(_sort_any, "sort", "argsort"),
        **_packets(_sort, "msort"),
        **_packets(_top, "topk", "kthvalue"),
        **_packets(_search, "searchsorted"),
        **_packets(_bucketize, "bucketize"),
    },
    "gathers": {
        **_packets(_moved_out, "gather", "index_select", "index", "embedding", "take", "take_along_dim"),
        **_packets(_scattered, "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce"),
        **_packets(_added_at, "index_add", "index_add_", "index_copy", "index_copy_"),
        **_packets(_put, "index_put", "index_put_", "_index_put_impl_"),
    },
}


def count(call: Callable[[], Any], *, multiply_adds_as_one: bool = False) -> Operations:
    """What a call costs; it runs once.

    Args:
        call: a function of no arguments.
        multiply_adds_as_one: whether a multiplication and the addition of its result are one operation, not two.
    """
    # One counter for each part, each with formulas for operators that others know as well.
    counters = {part: FlopCounterMode(display=False, custom_mapping=found) for part, found in FORMULAS_BY_PART.items()}
    with contextlib.ExitStack() as stack:
        for counter in counters.values():
            stack.enter_context(counter)
        call()

    def total(part: str) -> int:
        known = FORMULAS_BY_PART[part]
        by_operator = counters[part].get_flop_counts().get("Global", {})
        wanted = flop_counter.flop_registry.keys() | known.keys() if part == "products" else known.keys()
        return sum(number for operator, number in by_operator.items() if operator in wanted)

    found = Operations(*(total(part) for part in Operations._fields))
    return found._replace(products=found.products // 2) if multiply_adds_as_one else found


def attend(config: MethodConfig | None, inputs: tuple[Tensor, ...]) -> Tensor:
    """Attention by a method, or exactly: query, key, value (B,H,N,D) -> (B,H,Nq,Dv)."""
    if config is None:
        return torch.nn.functional.scaled_dot_product_attention(*inputs)
    return hea.attention(config, *inputs)


def operations(config: MethodConfig | None, inputs: tuple[Tensor, ...]) -> int:
    """Floating-point operations of the matrix products of a call, two for every multiplication."""
    return count(lambda: attend(config, inputs)).products
