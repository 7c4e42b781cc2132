"""What a backend of `attend` is.

`hf_efficient_attn.ops.backends` lists all backends. The guide "Add a kernel" shows how to add one.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Attention over a subset of the keys.

    Attributes:
        out: (..., Nq, Dv), the normalized output; 0 for an empty subset.
        lse: (..., Nq), the log of the sum of the weights, float32 (float64 for float64 input); -inf for an empty
            subset.
    """

    out: Tensor
    lse: Tensor


class AttendCall(NamedTuple):
    """The arguments of `attend`, which documents them.

    Attributes:
        query: (BH, T, Nq, D).
        key: (BH, T or 1, Nk, D).
        value: (BH, T or 1, Nk, Dv).
        bias: broadcastable to (BH, T, Nq, Nk), or None.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.
        is_exported: whether the call is traced for ONNX, which has PyTorch's standard operators only.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    scale: float
    dropout_p: float
    is_exported: bool


class Gradients(NamedTuple):
    """The gradients of the tensors of an `AttendCall`, with their shapes and dtypes; None for a bias without one."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None


class Backend(NamedTuple):
    """One way to compute `attend`.

    Attributes:
        name: a name for messages and tests.
        applies: applies(call) tells whether this backend computes a call, with its gradients if they are needed.
        forward: forward(call) returns the partial, with out (BH, T, Nq, Dv) in the dtype of the values and lse
            (BH, T, Nq) in the accumulation dtype. A query whose pairs are all excluded has out 0 and lse -inf.
        backward: backward(call, partial, grad_out, grad_lse, with_bias) returns `Gradients` from the partial that
            `forward` returned. `grad_lse` is None if nothing depends on the lse. The bias has a gradient only if
            `with_bias`. If `backward` is None, autograd differentiates `forward`, which then holds the weights of all
            pairs.
    """

    name: str
    applies: Callable[[AttendCall], bool]
    forward: Callable[[AttendCall], Partial]
    backward: Callable[[AttendCall, Partial, Tensor, Tensor | None, bool], Gradients] | None


class BlockKeys(NamedTuple):
    """The keys of each of T blocks of queries: a window or a range of keys, and a list of keys.

    A query attends to all of them in one softmax. Without ranges a listed key in the window of a query counts once.

    Attributes:
        block_q: the number of queries of a block.
        query_order: int64 (BH, Nq), the order in which the queries are cut into blocks, or None.
        window: (left, right), so that the query at position i attends to the keys at positions i - left .. i + right of
            its range, or of all keys if there is no range; or None.
        start: int64 (BH, T), the first sorted index of the range of each block, or None. A window without ranges has no
            orders.
        range_len: the number of keys of a range. Keys behind the last one do not exist.
        key_order: int64 (BH, Nk), the positions of the keys by sorted index, or None.
        key_mask: bool (1 or BH, Nk), the valid keys of ranges and windows, by sorted index, or None.
        listed: int64 (BH, T, M), the positions of the listed keys, or None. No key of the range of a block is listed.
        log_weight: (BH, T, M), added to the scores of the listed keys; -inf for an unused entry.
        num_listed: int64 (BH, T), the number of entries of each list from which on all are unused, or None.
        is_causal: whether a query attends to no listed key after its own position.
    """

    block_q: int
    query_order: Tensor | None = None
    window: tuple[int, int] | None = None
    start: Tensor | None = None
    range_len: int = 0
    key_order: Tensor | None = None
    key_mask: Tensor | None = None
    listed: Tensor | None = None
    log_weight: Tensor | None = None
    num_listed: Tensor | None = None
    is_causal: bool = False


class BlockCall(NamedTuple):
    """The arguments of `block_attention`, which documents them.

    Attributes:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        value: (BH, Nk, Dv).
        keys: the keys of each block of queries.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    keys: BlockKeys
    scale: float
    dropout_p: float


class BlockBackend(NamedTuple):
    """One way to compute `block_attention` without copies of the keys.

    Attributes:
        name: a name for messages and tests.
        applies: applies(call) tells whether this backend computes a call, with its gradients if they are needed.
        forward: forward(call) returns the partial (BH, Nq, Dv) and (BH, Nq), by position of the queries, as that of
            `Backend`.
        backward: backward(call, partial, grad_out, grad_lse, with_log_weight) returns `Gradients`, with that of
            `log_weight` as bias, as that of `Backend`.
    """

    name: str
    applies: Callable[[BlockCall], bool]
    forward: Callable[[BlockCall], Partial]
    backward: Callable[[BlockCall, Partial, Tensor, Tensor | None, bool], Gradients]


class FusedFeatures(NamedTuple):
    """Features that kernels compute from some numbers x of each token.

    Attributes:
        name: the formula; `hf_efficient_attn.ops.features.maps` describes them.
        num_features: F, the number of features of a token, and of the numbers x.
        factor: of the numbers x of a query.
        of_query: maps queries (BH, N, D) to x (BH, N, F) without the factor.
        of_key: the same for keys.
        directions: (F, D), if the numbers of a key are <w_f, k> - |scale| |k|^2 / 2 and those of a query are
            sign(scale) <w_f, q>, of which features are exponentials; otherwise None. Kernels compute them themselves.
        scale: of the directions.
    """

    name: str
    num_features: int
    factor: float
    of_query: Callable[[Tensor], Tensor]
    of_key: Callable[[Tensor], Tensor]
    directions: Tensor | None = None
    scale: float = 1.0


class LinearCall(NamedTuple):
    """The arguments of attention through features.

    Attributes:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        value: (BH, Nk, Dv).
        key_mask: bool (1 or BH, Nk), True for valid keys, or None.
        features: the features of the tokens.
        is_causal: whether query i attends to the keys up to i - `distance` only; then Nq = Nk.
        distance: at least 0.
        is_reversed: whether a causal query attends to the keys from i + `distance` on instead.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None
    features: FusedFeatures
    is_causal: bool
    distance: int = 0
    is_reversed: bool = False


class LinearBackend(NamedTuple):
    """One way to compute attention through features without storing the features.

    Attributes:
        name: a name for messages and tests.
        applies: applies(call) tells whether this backend computes a call, with its gradients if they are needed.
        attend: attend(call) returns the partial (BH, Nq, Dv) and (BH, Nq); with directions the lse has no numbers. It
            is differentiable. Its out is 0, without a gradient, where the weights of a query sum to less than 5e-31.
    """

    name: str
    applies: Callable[[LinearCall], bool]
    attend: Callable[[LinearCall], Partial]


def safe_row_max(row_max: Tensor) -> Tensor:
    """Maxima that can be subtracted from scores: -inf, the maximum of an empty set, becomes 0."""
    return row_max.masked_fill(row_max == -torch.inf, 0.0)
