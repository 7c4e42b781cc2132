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
    """The arguments of `attend`, which documents them."""

    query: Tensor  # (BH, T, Nq, D)
    key: Tensor  # (BH, T or 1, Nk, D)
    value: Tensor  # (BH, T or 1, Nk, Dv)
    bias: Tensor | None  # broadcastable to (BH, T, Nq, Nk), or None
    scale: float  # factor of the scores
    dropout_p: float  # probability of dropping a weight
    is_exported: bool  # whether the call is traced for ONNX, which has PyTorch's standard operators only


class Gradients(NamedTuple):
    """The gradients of the tensors of an `AttendCall`, with their shapes and dtypes; None for a bias without one."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None


class Backend(NamedTuple):
    """One way to compute `attend`."""

    name: str  # a name for messages and tests
    # applies(call) tells whether this backend computes a call, with its gradients if they are needed.
    applies: Callable[[AttendCall], bool]
    # forward(call) returns the partial, with out (BH, T, Nq, Dv) in the dtype of the values and lse (BH, T, Nq) in the
    # accumulation dtype. A query whose pairs are all excluded has out 0 and lse -inf.
    forward: Callable[[AttendCall], Partial]
    # backward(call, partial, grad_out, grad_lse, with_bias) returns `Gradients` from the partial that `forward`
    # returned. `grad_lse` is None if nothing depends on the lse. The bias has a gradient only if `with_bias`. If
    # `backward` is None, autograd differentiates `forward`, which then holds the weights of all pairs.
    backward: Callable[[AttendCall, Partial, Tensor, Tensor | None, bool], Gradients] | None


class BlockKeys(NamedTuple):
    """The keys of each of T blocks of queries: a window or a range of keys, and a list of keys.

    A query attends to all of them in one softmax. Without ranges a listed key in the window of a query counts once.
    """

    block_q: int  # the number of queries of a block
    query_order: Tensor | None = None  # int64 (BH, Nq), the order in which the queries are cut into blocks, or None
    # (left, right), so that the query at position i attends to the keys at positions i - left .. i + right of its
    # range, or of all keys if there is no range; or None.
    window: tuple[int, int] | None = None
    # int64 (BH, T), the first sorted index of the range of each block, or None. A window without ranges has no orders.
    start: Tensor | None = None
    range_len: int = 0  # the number of keys of a range. Keys behind the last one do not exist.
    key_order: Tensor | None = None  # int64 (BH, Nk), the positions of the keys by sorted index, or None
    key_mask: Tensor | None = None  # bool (1 or BH, Nk), the valid keys of ranges and windows, by sorted index, or None
    # int64 (BH, T, M), the positions of the listed keys, or None. No key of the range of a block is listed.
    listed: Tensor | None = None
    log_weight: Tensor | None = None  # (BH, T, M), added to the scores of the listed keys; -inf for an unused entry
    # int64 (BH, T), the number of entries of each list from which on all are unused, or None.
    num_listed: Tensor | None = None
    is_causal: bool = False  # whether a query attends to no listed key after its own position


class BlockCall(NamedTuple):
    """The arguments of `block_attention`, which documents them."""

    query: Tensor  # (BH, Nq, D)
    key: Tensor  # (BH, Nk, D)
    value: Tensor  # (BH, Nk, Dv)
    keys: BlockKeys  # the keys of each block of queries
    scale: float  # factor of the scores
    dropout_p: float  # probability of dropping a weight


class BlockBackend(NamedTuple):
    """One way to compute `block_attention` without copies of the keys."""

    name: str  # a name for messages and tests
    # applies(call) tells whether this backend computes a call, with its gradients if they are needed.
    applies: Callable[[BlockCall], bool]
    # forward(call) returns the partial (BH, Nq, Dv) and (BH, Nq), by position of the queries, as that of `Backend`.
    forward: Callable[[BlockCall], Partial]
    # backward(call, partial, grad_out, grad_lse, with_log_weight) returns `Gradients`, with that of `log_weight` as
    # bias, as that of `Backend`.
    backward: Callable[[BlockCall, Partial, Tensor, Tensor | None, bool], Gradients]


class FusedFeatures(NamedTuple):
    """Features that kernels compute from some numbers x of each token."""

    name: str  # the formula; `hf_efficient_attn.ops.features.maps` describes them
    num_features: int  # F, the number of features of a token, and of the numbers x
    factor: float  # of the numbers x of a query
    of_query: Callable[[Tensor], Tensor]  # maps queries (BH, N, D) to x (BH, N, F) without the factor
    of_key: Callable[[Tensor], Tensor]  # the same for keys
    # (F, D), if the numbers of a key are <w_f, k> - |scale| |k|^2 / 2 and those of a query are sign(scale) <w_f, q>, of
    # which features are exponentials; otherwise None. Kernels compute them themselves.
    directions: Tensor | None = None
    scale: float = 1.0  # of the directions


class LinearCall(NamedTuple):
    """The arguments of attention through features."""

    query: Tensor  # (BH, Nq, D)
    key: Tensor  # (BH, Nk, D)
    value: Tensor  # (BH, Nk, Dv)
    key_mask: Tensor | None  # bool (1 or BH, Nk), True for valid keys, or None
    features: FusedFeatures  # the features of the tokens
    is_causal: bool  # whether query i attends to the keys up to i - `distance` only; then Nq = Nk
    distance: int = 0  # at least 0
    is_reversed: bool = False  # whether a causal query attends to the keys from i + `distance` on instead


class LinearBackend(NamedTuple):
    """One way to compute attention through features without storing the features."""

    name: str  # a name for messages and tests
    # applies(call) tells whether this backend computes a call, with its gradients if they are needed.
    applies: Callable[[LinearCall], bool]
    # attend(call) returns the partial (BH, Nq, Dv) and (BH, Nq); with directions the lse has no numbers. It is
    # differentiable. Its out is 0, without a gradient, where the weights of a query sum to less than 5e-31.
    attend: Callable[[LinearCall], Partial]


class ClusterRule(NamedTuple):
    """The numbers of `hf_efficient_attn.ops.nearfar.chunks` and `causal`."""

    base: int  # chunks of a level in a chunk of the next one
    weighted: float  # the share of the weighted mean in the key of a landmark
    growth: float  # of the margin of a landmark per standard deviation of the scores in its cluster
    least_spread: float  # the least such deviation
    largest_spread: float  # the largest one
    most: int  # a query chooses clusters above the 1 / `most`th part of what all landmarks may miss
    least: float  # and above this share of all that it attends to


class ClusterCall(NamedTuple):
    """Causal attention to near keys, landmarks of clusters, and clusters that each query chooses."""

    query: Tensor  # (BH, N, D)
    key: Tensor  # (BH, N, D)
    value: Tensor  # (BH, N, Dv)
    members: Tensor  # int32 or int64 (BH, S), the keys of one cluster after another, of one level after another
    block_mean: Tensor  # (BH, T, D), the mean query of each block that has ended, times the scale, like the next one
    block_root: Tensor  # (BH, T, D), the root of the mean of the squares of its queries; in the accumulation dtype
    sizes: Tensor  # int32 (E, 2), `levels`
    block_size: int  # tokens of a block
    levels: tuple[tuple[int, int], ...]  # tokens of a chunk and of a cluster of each level
    rule: ClusterRule
    scale: float
    first_query: int = 0  # outputs of queries before this one may be anything finite


class ClusterBackend(NamedTuple):
    """One way to compute a `ClusterCall` without a list of the choices."""

    name: str  # a name for messages and tests
    # applies(call, plain) tells whether this backend computes a call, where no gradients are needed. `plain` computes
    # the same by PyTorch's operations.
    applies: Callable[[ClusterCall, Callable[[ClusterCall], Partial]], bool]
    # attend(call) returns the partial (BH, N, Dv) and (BH, N).
    attend: Callable[[ClusterCall], Partial]


def safe_row_max(row_max: Tensor) -> Tensor:
    """Maxima that can be subtracted from scores: -inf, the maximum of an empty set, becomes 0."""
    return row_max.masked_fill(row_max == -torch.inf, 0.0)
