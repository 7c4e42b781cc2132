"""Counts the operations of a call. It extends torch's counter with operators that torch counts as free.

`count` returns four numbers:

products      floating-point operations of matrix products, convolutions and attention kernels. A multiply-add counts as
              TWO operations, as in torch; `multiply_adds_as_one` halves them, as fvcore and the paper do.
exponentials  one for every element of exp, softmax and logsumexp, and for every query-key pair of an attention kernel.
sorting       comparisons: n log2 n for sorting n elements or searching them for the largest (sort, argsort, topk), and
              log2 n for every element that is looked up in n boundaries (searchsorted).
gathers       one for every element that is read or written through an index: gather, take_along_dim, index,
              index_select, index_fill, index_put, scatter.

Sums, other elementwise work, copies and the random draw of orthogonal projections are not counted. The counts include
all work that is done: the padding of a block and the pairs that a mask discards count as well.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

import hf_efficient_attn as hea
from hf_efficient_attn.methods import MethodConfig

# A formula takes the arguments of an operator, with shapes in place of tensors, and `out_shape`, that of the result.
Formula = Callable[..., int]
Shape = Sequence[int]


class Operations(NamedTuple):
    """The operations of a call, by kind. The module's docstring defines the kinds."""

    products: int
    exponentials: int
    sorting: int
    gathers: int

    @property
    def total(self) -> int:
        """The sum of all four kinds."""
        return sum(self)


def _pairs(first: int = 0) -> Formula:
    """One for every query-key pair. Arguments `first` and `first` + 1 are query (..., Nq, D) and key (..., Nk, D)."""
    return lambda *shapes, **_: math.prod(shapes[first][:-1]) * shapes[first + 1][-2]


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """The products of the scores and of the weights with the values (..., Nk, Dv)."""
    return 2 * _pairs()(query, key) * (query[-1] + value[-1])


def _attention_backward(first: int) -> Formula:
    """The scores again, and the four gradients; query, key and value are the arguments from `first` on."""

    def formula(*shapes: Any, **_: Any) -> int:
        query, key, value = shapes[first : first + 3]
        return 2 * _pairs()(query, key) * (3 * query[-1] + 2 * value[-1])

    return formula


def _added_product(_: Shape, left: Shape, right: Shape, **__: Any) -> int:
    """baddbmm: (B, N, M) += (B, N, K) (B, K, M)."""
    return 2 * math.prod(left) * right[-1]


def _elements(x: Shape, *_: Any, **__: Any) -> int:
    return math.prod(x)


def _broadcast(x: Shape, y: Shape, *_: Any, **__: Any) -> int:
    return math.prod(torch.broadcast_shapes(x, y))


def _log2(n: int) -> float:
    return math.log2(n) if n > 1 else 0.0


def _sort(x: Shape, dim: int = -1, *_: Any, **__: Any) -> int:
    """sort(x, dim, descending)."""
    return math.ceil(math.prod(x) * _log2(x[dim] if x else 1))


def _any_sort(x: Shape, *arguments: Any, dim: int = -1, **options: Any) -> int:
    """sort(x, dim, descending), or the stable form sort(x, stable=, dim=, descending=)."""
    return _sort(x, dim) if "stable" in options or not arguments else _sort(x, arguments[0])


def _topk(x: Shape, _: int, dim: int = -1, *__: Any, **___: Any) -> int:
    """topk(x, k, dim)."""
    return _sort(x, dim)


def _search(boundaries: Shape, *_: Any, out_shape: Shape = (), **__: Any) -> int:
    """searchsorted(boundaries, values), where the values may be a number."""
    return math.ceil(math.prod(out_shape or ()) * math.ceil(_log2(boundaries[-1] + 1)))


def _bucketize(_: Any, boundaries: Shape, *__: Any, out_shape: Shape = (), **___: Any) -> int:
    return _search(boundaries, out_shape=out_shape)


def _results(*_: Any, out_shape: Shape, **__: Any) -> int:
    return math.prod(out_shape)


def _argument(position: int) -> Formula:
    """One for every element of the argument at this position."""
    return lambda *shapes, **_: math.prod(shapes[position])


def _index_fill(x: Shape, dim: int, index: Shape, *_: Any, **__: Any) -> int:
    """index_fill(x, dim, index, value): the elements of x.index_select(dim, index)."""
    return math.prod(x) // max(x[dim], 1) * math.prod(index)


def _index_put(x: Shape, indices: Sequence[Shape | None], *_: Any, **__: Any) -> int:
    """index_put(x, indices, values) with integer indices: the elements of x[indices]."""
    given = [index for index in indices if index is not None]
    rest = [n for n, index in zip(x, [*indices, *[None] * len(x)], strict=False) if index is None]
    return math.prod(torch.broadcast_shapes(*given)) * math.prod(rest)


def _operators(formula: Formula, *names: str) -> dict[Any, Formula]:
    """Maps the named torch operators to a formula. A version of torch may lack some of them."""
    return {getattr(torch.ops.aten, name): formula for name in names if hasattr(torch.ops.aten, name)}


_CPU = "_scaled_dot_product_flash_attention_for_cpu"
_KERNELS = [
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
]

# Products that torch's counter has no formula for. The backward operator takes the gradient of the output before the
# query.
FORMULAS = {
    **_operators(_added_product, "baddbmm_"),
    **_operators(_attention, _CPU),
    **_operators(_attention_backward(1), f"{_CPU}_backward"),
}
FORMULAS_BY_PART: dict[str, dict[Any, Formula]] = {
    "products": FORMULAS,
    "exponentials": {
        **_operators(_elements, "exp", "exp_", "exp2", "exp2_", "expm1", "expm1_", "_softmax", "_safe_softmax"),
        # These two are decomposed into others, except when they write to a given tensor.
        **_operators(_elements, "softmax", "log_softmax"),
        **_operators(_elements, "_log_softmax", "logsumexp", "logcumsumexp", "sigmoid", "sigmoid_", "elu", "elu_"),
        **_operators(_broadcast, "logaddexp", "logaddexp2"),
        **_operators(_pairs(), _CPU, *_KERNELS),
        **_operators(_pairs(1), f"{_CPU}_backward", *(f"{name}_backward" for name in _KERNELS)),
    },
    "sorting": {
        **_operators(_any_sort, "sort", "argsort"),
        **_operators(_sort, "msort"),
        **_operators(_topk, "topk", "kthvalue"),
        **_operators(_search, "searchsorted"),
        **_operators(_bucketize, "bucketize"),
    },
    "gathers": {
        **_operators(_results, "gather", "index_select", "index", "embedding", "take", "take_along_dim"),
        **_operators(_argument(2), "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce"),
        **_operators(_argument(3), "index_add", "index_add_", "index_copy", "index_copy_"),
        **_operators(_index_fill, "index_fill", "index_fill_"),
        **_operators(_index_put, "index_put", "index_put_", "_index_put_impl_"),
    },
}


def count(call: Callable[[], Any], *, multiply_adds_as_one: bool = False) -> Operations:
    """Count the operations of a call, which runs once.

    Args:
        call: a function without arguments.
        multiply_adds_as_one: count a multiplication and the addition of its result as one operation instead of two.
    """
    # One counter for each kind, since an operator may have a formula in several of them.
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


def compute(config: MethodConfig | None, inputs: tuple[Tensor, ...]) -> Tensor:
    """Attention with a method, or exact if `config` is None: query, key, value (B, H, N, D) -> (B, H, Nq, Dv)."""
    if config is None:
        return torch.nn.functional.scaled_dot_product_attention(*inputs)
    return hea.attention(config, *inputs)


def operations(config: MethodConfig | None, inputs: tuple[Tensor, ...]) -> int:
    """Floating-point operations of the matrix products of a call, two for every multiply-add."""
    return count(lambda: compute(config, inputs)).products
