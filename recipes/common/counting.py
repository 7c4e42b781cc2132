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


def _pairs(first: int) -> Formula:
    """One for every query-key pair. Arguments `first` and `first` + 1 are query (..., Nq, D) and key (..., Nk, D)."""
    return lambda *shapes, **_: math.prod(shapes[first][:-1]) * shapes[first + 1][-2]


def _attention(first: int, of_query: int, of_value: int) -> Formula:
    """Products with D and Dv numbers for every pair; query, key and value are the arguments from `first` on."""
    return lambda *shapes, **_: (
        2 * _pairs(first)(*shapes) * (of_query * shapes[first][-1] + of_value * shapes[first + 2][-1])
    )


def _elements(position: int) -> Formula:
    """One for every element of the argument at this position."""
    return lambda *shapes, **_: math.prod(shapes[position])


def _results(*_: Any, out_shape: Shape, **__: Any) -> int:
    return math.prod(out_shape)


def _sort(position: int) -> Formula:
    """Sorting along a dimension, which is the argument at this position or named `dim`, and by default the last."""

    def formula(x: Shape, *given: Any, dim: int = -1, **_: Any) -> int:
        size = x[given[position - 1] if len(given) >= position else dim] if x else 1
        return math.ceil(math.prod(x) * math.log2(max(size, 1)))

    return formula


def _search(position: int) -> Formula:
    """Looking the results up in boundaries, which are the argument at this position."""
    return lambda *shapes, out_shape, **_: math.prod(out_shape) * math.ceil(math.log2(shapes[position][-1] + 1))


def _index_fill(x: Shape, dim: int, index: Shape, *_: Any, **__: Any) -> int:
    """index_fill(x, dim, index, value): the elements of x.index_select(dim, index)."""
    return math.prod(x) // max(x[dim], 1) * math.prod(index)


def _index_put(x: Shape, indices: Sequence[Shape | None], *_: Any, **__: Any) -> int:
    """index_put(x, indices, values) with integer indices: the elements of x[indices]."""
    given = [index for index in indices if index is not None]
    rest = [n for n, index in zip(x, [*indices, *[None] * len(x)], strict=False) if index is None]
    return math.prod(torch.broadcast_shapes(*given)) * math.prod(rest)


_CPU = "_scaled_dot_product_flash_attention_for_cpu"
_KERNELS = [f"_scaled_dot_product_{name}_attention" for name in ("flash", "efficient", "cudnn")]
# Formulas by the names of operators. Softmax is decomposed into others, except when it writes to a given tensor. The
# backward operator of attention takes the gradient of the output before the query: it computes the scores again, and
# four gradients. Products are those that torch's counter has no formula for.
_NAMED: dict[str, list[tuple[str, Formula]]] = {
    "products": [
        ("baddbmm_", lambda _, left, right, **__: 2 * math.prod(left) * right[-1]),
        (_CPU, _attention(0, 1, 1)),
        (f"{_CPU}_backward", _attention(1, 3, 2)),
    ],
    "exponentials": [
        ("exp exp_ exp2 exp2_ expm1 expm1_ _softmax _safe_softmax softmax log_softmax _log_softmax", _elements(0)),
        ("logsumexp logcumsumexp sigmoid sigmoid_ elu elu_", _elements(0)),
        ("logaddexp logaddexp2", _results),
        (" ".join([_CPU, *_KERNELS]), _pairs(0)),
        (" ".join(f"{name}_backward" for name in (_CPU, *_KERNELS)), _pairs(1)),
    ],
    "sorting": [
        ("sort argsort", _sort(1)),
        ("topk kthvalue", _sort(2)),
        ("searchsorted", _search(0)),
        ("bucketize", _search(1)),
    ],
    "gathers": [
        ("gather index_select index embedding take take_along_dim", _results),
        ("scatter scatter_ scatter_add scatter_add_ scatter_reduce", _elements(2)),
        ("index_add index_add_ index_copy index_copy_", _elements(3)),
        ("index_fill index_fill_", _index_fill),
        ("index_put index_put_ _index_put_impl_", _index_put),
    ],
}
FORMULAS_BY_PART: dict[str, dict[Any, Formula]] = {
    part: {getattr(torch.ops.aten, name): formula for names, formula in entries for name in names.split()}
    for part, entries in _NAMED.items()
}


def count(call: Callable[[], Any], *, multiply_adds_as_one: bool = False) -> Operations:
    """Count the operations of a call, which runs once; `multiply_adds_as_one` halves the products."""
    # One counter for each kind, since an operator may have a formula in several of them.
    counters = {part: FlopCounterMode(display=False, custom_mapping=found) for part, found in FORMULAS_BY_PART.items()}
    with contextlib.ExitStack() as stack:
        for counter in counters.values():
            stack.enter_context(counter)
        call()

    def total(part: str) -> int:
        known = set(FORMULAS_BY_PART[part]) | (set(flop_counter.flop_registry) if part == "products" else set())
        by_operator = counters[part].get_flop_counts().get("Global", {})
        return sum(number for operator, number in by_operator.items() if operator in known)

    found = Operations(*(total(part) for part in Operations._fields))
    return found._replace(products=found.products // 2) if multiply_adds_as_one else found


def compute(config: MethodConfig | None, inputs: Sequence[Tensor], scale: float | None = None) -> Tensor:
    """Attention with a method, or exact if `config` is None: query, key, value (B, H, N, D) -> (B, H, Nq, Dv)."""
    if config is None:
        return torch.nn.functional.scaled_dot_product_attention(*inputs, scale=scale)
    return hea.attention(config, *inputs, scale=scale)
