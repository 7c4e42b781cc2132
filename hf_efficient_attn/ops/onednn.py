"""Attention of many blocks by oneDNN, the second of the two matrix libraries in PyTorch's CPU build.

A 1 x 1 convolution with as many groups as blocks multiplies each block with its own matrix. This is the only way to the
float32 products of oneDNN through PyTorch's public functions. The other library, MKL, serves `matmul` and the fused
kernel. It does not seem to use the 512-bit units of processors of another maker than its own.

Measured on two cores of a Zen 5 in a virtual machine without other work (float32, batch 1, 8 heads with head_dim 64,
two threads, median of 5): calls of `kdeformer` and `hyperattention` are 12 and 14 % faster than with the fused kernel
at 8,192 tokens, and 14 and 18 % faster at 16,384. `eva` gains nothing (-8 and 3 %), and at 2,048 tokens all three are
slower (-1, -11 and -13 %). On a Zen 4, which executes 512-bit instructions in two halves, there was no gain.
"""

import functools
import pathlib

import torch
from torch import Tensor
from torch.nn.functional import conv2d

# Scores that are computed at a time: 4 MiB of float32, which stay in a cache between the two products.
_SCORES_NUMEL = 1 << 20

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


def use_grouped(*tensors: Tensor | None) -> bool:
    """Whether `grouped_attention` accepts these tensors (float32, CPU, no gradient) and is fast on this processor.

    With one thread PyTorch computes a 1 x 1 convolution with a plain loop and not with oneDNN.
    """
    given = [x for x in tensors if x is not None]
    if torch.compiler.is_compiling() or any(x.dtype != torch.float32 or x.device.type != "cpu" for x in given):
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return False
    return (
        torch.get_num_threads() > 1
        and bool(torch.backends.mkldnn.enabled)
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and _full_width_amd()
    )


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
