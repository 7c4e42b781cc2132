"""Attention by oneDNN, the second of the two matrix libraries in PyTorch's CPU build.

The other library, MKL, serves `matmul` and the fused kernel. It does not seem to use the 512-bit units of processors of
another maker than its own: on one core of a Zen 5, `product` computes 200 and `matmul` 95 billion operations per
second for 1,024 queries and 256 keys with head_dim 64.

`product_attention` is for many queries that share their keys. `product` calls the operator that PyTorch's compiler uses
for linear layers.

`grouped_attention` is for many blocks with keys of their own. A 1 x 1 convolution with as many groups as blocks
multiplies each block with its own matrix.

Measured for `grouped_attention` on two cores of a Zen 5 in a virtual machine without other work (float32, batch 1, 8
heads with head_dim 64, two threads, median of 5): calls of `kdeformer` and `hyperattention` are 12 and 14 % faster than
with the fused kernel at 8,192 tokens, and 14 and 18 % faster at 16,384. `eva` gains nothing (-8 and 3 %), and at 2,048
tokens all three are slower (-1, -11 and -13 %). On a Zen 4, which executes 512-bit instructions in two halves, there
was no gain.
"""

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from hf_efficient_attn.ops.export import is_compiling
from hf_efficient_attn.ops.precision import LOG2_E

# Scores that are computed at a time: 4 MiB of float32, which stay in a cache between the two products.
_SCORES_NUMEL = 1 << 20
# The same for `product`, whose chunks are of at most so many keys, and the least number for which it pays.
_PRODUCT_NUMEL, _PRODUCT_KEYS, _LEAST_NUMEL = 1 << 19, 1024, 1 << 16
# Numbers of the queries, keys or values of heads that are prepared at a time.
_PREPARED_NUMEL = 1 << 18
# Scores below the first, as exponents of two, need no maximum: terms that are lost because they are no normal numbers
# are at most 2^(-126 + 60) of the sum. With values below the second a sum of 2^20 terms is finite.
_MAX_EXPONENT, _MAX_VALUE = 60.0, 2.0**46

# AMD numbers the families of its processors; 26 is Zen 5.
_AMD, _FULL_WIDTH = "AuthenticAMD", 26


@functools.cache
def _full_width_amd(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Whether Linux reports an AMD processor with 512-bit units of full width."""
    try:
        lines = pathlib.Path(cpuinfo).read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return False
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    family = facts.get("cpu family", "")
    return facts.get("vendor_id") == _AMD and family.isdigit() and int(family) >= _FULL_WIDTH


def use_product(*tensors: Tensor | None) -> bool:
    """Whether `product` accepts these tensors (float32, CPU, no gradient) and is fast on this processor."""
    given = [x for x in tensors if x is not None]
    if is_compiling() or any(x.dtype != torch.float32 or x.device.type != "cpu" for x in given):
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return False
    return multiplies_float32()


def multiplies_float32() -> bool:
    """Whether `product` is fast on this processor."""
    return (
        bool(torch.backends.mkldnn.enabled)
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and _full_width_amd()
    )


# A graph contains the result. This is `torch.compiler.assume_constant_result`, which would import the compiler here.
vars(multiplies_float32)["_dynamo_marked_constant"] = True


def use_grouped(*tensors: Tensor | None) -> bool:
    """Whether `grouped_attention` accepts these tensors (float32, CPU, no gradient) and is fast on this processor.

    With one thread PyTorch computes a 1 x 1 convolution with a plain loop and not with oneDNN.
    """
    return use_product(*tensors) and torch.get_num_threads() > 1


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product x @ weight^T + bias: (M, D), (K, D), (K) or None -> (M, K), float32 without a gradient."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def products(x: Tensor, matrices: Tensor, bias: Tensor | None = None) -> Tensor:
    """X @ matrices^T + bias for each head, by `product` where it may be used.

    Args:
        x: (BH, M, D).
        matrices: (BH, K, D).
        bias: (BH, K), or None.

    Returns:
        (BH, M, K).
    """
    if not use_product(x, matrices, bias):
        return torch.bmm(x, matrices.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, matrices.mT)
    biases = [None] * x.shape[0] if bias is None else bias
    parts = [product(*head) for head in zip(x.contiguous(), matrices.contiguous(), biases, strict=True)]
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)


def pays(num_queries: int, num_keys: int) -> bool:
    """Whether so many scores of a head are worth the calls of `product_attention`."""
    return num_queries * num_keys >= _LEAST_NUMEL


def product_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, with_lse: bool
) -> tuple[Tensor, Tensor]:
    """Attention of the queries of each head, softmax(scale * q k^T + bias) v, and its lse, without a gradient.

    Without `with_lse` the output is not divided by the sum of the weights, which are relative to a number of each
    query, and the lse is empty.

    Args:
        query: (BH, Nq, D), float32.
        key: (BH, Nk, D).
        value: (BH, Nk, Dv).
        bias: (BH, Nk), added to the scores of every query, or None; -inf excludes a key.
        scale: factor of the scores.
        with_lse: see above.

    Returns:
        output (BH, Nq, Dv), 0 for queries without a key, and lse (BH, Nq), -inf for them.
    """
    heads, q_len = query.shape[:2]
    out, lse = value.new_empty(heads, q_len, value.shape[2]), value.new_empty(heads, q_len if with_lse else 0)
    # Operations on few numbers take as long for several heads as for one. Their copies stay in a cache.
    step = max(1, _PREPARED_NUMEL // max(1, *(x[0].numel() for x in (query, key, value))))
    for start in range(0, heads, step):
        some = slice(start, start + step)
        own = None if bias is None else bias[some]
        _attend_heads((query[some], key[some], value[some], own), scale, out[some], lse[some] if with_lse else None)
    return out, lse


def _attend_heads(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None], scale: float, out: Tensor, lse: Tensor | None
) -> None:
    """`product_attention` of a few heads, written into `out` and `lse`."""
    # Rows with gaps between them, as in the heads of a model, take a path that is a hundred times slower.
    query, key, value = (x.contiguous() for x in tensors[:3])
    (heads, q_len, _), kv_len, bias = query.shape, key.shape[1], tensors[3]
    # Powers of two take less time than those of e. The scale goes into the smaller factor.
    if q_len < kv_len:
        query = query * (scale * LOG2_E)
    else:
        key = key * (scale * LOG2_E)
    shift = None
    if bias is not None:
        bias = bias * LOG2_E
        largest = bias.amax(1, keepdim=True)
        shift = largest.masked_fill_(largest == -torch.inf, 0.0)
        bias = bias - shift
    bounded = _are_bounded(query, key, value)
    all_bounded = bounded.flatten(1).all(1).tolist()
    block_k = -(-kv_len // -(-kv_len // _PRODUCT_KEYS))
    block_q = max(1, _PRODUCT_NUMEL // block_k)
    for a in range(heads):
        queries, keys, values = query[a], key[a].split(block_k), [x.t() for x in value[a].split(block_k)]
        biases = [None] * len(keys) if bias is None else bias[a].split(block_k)
        for start in range(0, q_len, block_q):
            rows = slice(start, start + block_q) if block_q < q_len else slice(None)
            operands = queries[rows], keys, values, biases, lse is not None
            if all_bounded[a]:
                sums, total, row_max = _bounded_rows(*operands)
            else:
                sums, total, row_max = _sums_of_rows(bounded[a, rows], *operands)
            if lse is None:
                out[a, rows] = sums
                continue
            torch.log2(total[:, 0], out=lse[a, rows])
            if row_max is not None:
                lse[a, rows] += row_max[:, 0]
            torch.div(sums, total if bias is None else total.masked_fill_(total == 0.0, 1.0), out=out[a, rows])
    if lse is not None:
        (lse if shift is None else lse.add_(shift)).div_(LOG2_E)


def _are_bounded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Of which queries the powers of two of the scores are normal numbers, and their sums with the values finite.

    bool (BH, Nq, 1). It is decided for each query, since padding and later queries must not change the output of
    others.
    """
    query, key, value = (torch.linalg.vector_norm(x, dim=2, keepdim=True) for x in (query, key, value))
    bounded: Tensor = query * key.amax(1, keepdim=True) < _MAX_EXPONENT
    return bounded & (value.amax(1, keepdim=True) < _MAX_VALUE)


_Chunks = Sequence[Tensor]
_Sums = tuple[Tensor, Tensor, Tensor | None]


def _sums_of_rows(bounded: Tensor, query: Tensor, *operands: Any) -> _Sums:
    """`_rows_of_products`, without the maximum for the queries that need none."""
    sums, total, row_max = _rows_of_products(query, *operands)
    if row_max is None or not bool(bounded.any()):
        return sums, total, row_max
    own_sums, own_total, _ = _bounded_rows(query, *operands)
    total = torch.where(bounded, own_total, total) if total.numel() else total
    return torch.where(bounded, own_sums, sums), total, row_max.masked_fill_(bounded, 0.0)


def _bounded_rows(
    query: Tensor, keys: _Chunks, values: _Chunks, biases: Sequence[Tensor | None], with_total: bool
) -> _Sums:
    """`_rows_of_products` for scores that need no maximum."""
    sums = total = torch.empty(0)
    for i, (key, value, bias) in enumerate(zip(keys, values, biases, strict=True)):
        weights = product(query, key, bias).exp2_()
        own_sums = product(weights, value)
        sums = sums.add_(own_sums) if i else own_sums
        if with_total:
            own_total = weights.sum(1, keepdim=True)
            total = total.add_(own_total) if i else own_total
    return sums, total, None


def _rows_of_products(
    query: Tensor, keys: _Chunks, values: _Chunks, biases: Sequence[Tensor | None], with_total: bool
) -> _Sums:
    """The sums of some queries, the sums of the weights if asked for, and the scores that both are relative to.

    The scores are exponents of two, and the values are transposed, (Dv, Nk).
    """
    sums = total = row_max = torch.empty(0)
    for i, (key, value, bias) in enumerate(zip(keys, values, biases, strict=True)):
        scores = product(query, key, bias)
        new_max = scores.amax(1, keepdim=True)
        new_max = torch.maximum(new_max, row_max) if i else new_max
        finite = new_max if bias is None else new_max.masked_fill(new_max == -torch.inf, 0.0)
        weights = scores.sub_(finite).exp2_()
        own_sums = product(weights, value)
        own_total = weights.sum(1, keepdim=True) if with_total else total
        if i:
            kept = (row_max - finite).exp2_()
            own_sums.addcmul_(sums, kept)
            own_total = own_total.addcmul_(total, kept) if with_total else total
        sums, total, row_max = own_sums, own_total, new_max
    return sums, total, row_max


def product_attention_backward(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    results: tuple[Tensor, Tensor, Tensor],
    scale: float,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and bias of `product_attention`; the last is None unless `with_bias`.

    All matrices of scores are transposed, (Nk, Nq), so that the lse is the bias of a product and no factor is copied.

    Args:
        tensors: query, key, value and bias.
        results: grad_out (BH, Nq, Dv); delta (BH, Nq), its product with the output minus the gradient of the lse; and
            the lse (BH, Nq), inf for queries without a key.
        scale: factor of the scores.
        with_bias: whether the gradient of the bias is wanted.
    """
    query, key, value, grad_out = (x.contiguous() for x in (*tensors[:3], results[0]))
    bias, delta, lse = tensors[3], -results[1], -LOG2_E * results[2]
    (heads, q_len, _), kv_len = query.shape, key.shape[1]
    grad_query, grad_key, grad_value = (torch.zeros_like(x) for x in (query, key, value))
    grad_bias = None if bias is None or not with_bias else torch.zeros_like(bias)
    block_k = -(-kv_len // -(-kv_len // _PRODUCT_KEYS))
    block_q = max(1, _PRODUCT_NUMEL // block_k)
    for a in range(heads):
        for first in range(0, kv_len, block_k):
            some = slice(first, first + block_k)
            keys, values = key[a, some], value[a, some]
            scaled, columns = keys * (scale * LOG2_E), (keys * scale).t().contiguous()
            for start in range(0, q_len, block_q):
                rows = slice(start, start + block_q)
                queries, grads = query[a, rows], grad_out[a, rows]
                weights = product(scaled, queries, lse[a, rows])
                if bias is not None:
                    weights.add_(bias[a, some, None], alpha=LOG2_E)
                grad_scores = product(values, grads, delta[a, rows]).mul_(weights.exp2_())
                grad_value[a, some] += product(weights, grads.t())
                grad_key[a, some].add_(product(grad_scores, queries.t()), alpha=scale)
                grad_query[a, rows] += product(columns, grad_scores.t()).t()
                if grad_bias is not None:
                    grad_bias[a, some] += grad_scores.sum(1)
    return grad_query, grad_key, grad_value, grad_bias


def grouped_product(x: Tensor, matrices: Tensor, bias: Tensor | None = None) -> Tensor:
    """x[:, t] @ matrices[t]^T + bias[t] for each of T blocks: (M, T, D), (T, K, D), (T, K) or None -> (M, T, K)."""
    (size, num_blocks, dim), block_k = x.shape, matrices.shape[1]
    image = x.reshape(1, size, 1, num_blocks * dim).permute(0, 3, 1, 2)
    weight = matrices.reshape(num_blocks * block_k, dim, 1, 1)
    out = conv2d(image, weight, None if bias is None else bias.reshape(-1), groups=num_blocks)
    return out.permute(0, 2, 3, 1).reshape(size, num_blocks, block_k)


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
) -> Tensor:
    """Attention of each block of queries to its own keys, softmax(scale * q k^T + bias) v, without lse and gradient.

    Args:
        query: (BH * Nq, D), the queries of all heads.
        key: (BH * Nk, D).
        value: (BH * Nk, Dv).
        query_index: int64 (M, T), the M queries of each of T blocks, in the layout in which T products are one
            convolution.
        key_index: int64 (T, K), the keys of each block.
        bias: (T, K), added to the scores of every query of the block, or None; -inf excludes a key.
        scale: factor of the scores.

    Returns:
        (M, T, Dv); 0 for queries without a key.
    """
    (block_q, num_blocks), block_k = query_index.shape, key_index.shape[1]
    step = max(1, _SCORES_NUMEL // (block_q * block_k))
    out = value.new_empty(block_q, num_blocks, value.shape[1])
    for start in range(0, num_blocks, step):
        some = slice(start, start + step)
        queries, keys, values = (
            x.index_select(0, index.flatten()).view(*index.shape, -1)
            for x, index in ((query, query_index[:, some]), (key, key_index[some]), (value, key_index[some]))
        )
        scores = grouped_product(queries.mul_(scale), keys, None if bias is None else bias[some])
        torch.softmax(scores, -1, out=scores)
        out[:, some] = grouped_product(scores, values.transpose(1, 2))
    empty = None if bias is None else bias.amax(-1) == -torch.inf
    return out if empty is None or not empty.any() else out.masked_fill_(empty[None, :, None], 0.0)
