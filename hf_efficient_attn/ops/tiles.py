"""Attention of many tiles at once by oneDNN, the second of the two matrix libraries in PyTorch's CPU build.

A product of tiles with matrices of their own is a 1 x 1 convolution in as many groups as there are tiles, which is the
only way to oneDNN's float32 products through PyTorch's public functions. The other library (MKL, behind `matmul` and
the fused kernel) does not seem to use the 512-bit units of processors that its maker did not make. On one such machine
oneDNN was twice as fast, so that two products with the scores kept in the cache between them took two thirds of the
fused kernel's time; on a Zen 4, which halves its 512-bit instructions, they took as long or longer. That the first was
a Zen 5, whose units have full width, is inferred from its speed; from there on oneDNN is used.
"""

import functools
import pathlib

import torch
from torch import Tensor
from torch.nn.functional import conv2d

# Scores at a time: 4 MiB float32, which stay in a cache near the cores from one product to the next.
_SCORES = 1 << 20


# The CPU families of AMD are numbered; 26 is Zen 5.
_AMD, _FULL_WIDTH = "AuthenticAMD", 26


@functools.cache
def _full_width_amd(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Whether the processor is AMD's with 512-bit units of full width, as far as Linux tells; elsewhere False."""
    try:
        lines = pathlib.Path(cpuinfo).read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return False
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    family = facts.get("cpu family", "")
    return facts.get("vendor_id") == _AMD and family.isdigit() and int(family) >= _FULL_WIDTH


def use_grouped(*tensors: Tensor | None) -> bool:
    """Whether `attend_grouped` can take these tensors, and is worth it: float32 on such a CPU, and no gradient.

    With one thread PyTorch does not give a 1 x 1 convolution to oneDNN, but to a plain loop.
    """
    given = [x for x in tensors if x is not None]
    if torch.compiler.is_compiling() or any(x.dtype != torch.float32 or x.device.type != "cpu" for x in given):
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return False
    return (
        torch.get_num_threads() > 1
        and torch.backends.mkldnn.enabled
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and _full_width_amd()
    )


def grouped_product(rows: Tensor, matrices: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows[:, t] @ matrices[t]^T + bias[t] for every t: (R, T, D), (T, N, D), (T, N) -> (R, T, N)."""
    (length, tiles, width), columns = rows.shape, matrices.shape[1]
    image = rows.reshape(1, length, 1, tiles * width).permute(0, 3, 1, 2)
    weight = matrices.reshape(tiles * columns, width, 1, 1)
    out = conv2d(image, weight, None if bias is None else bias.reshape(-1), groups=tiles)
    return out.permute(0, 2, 3, 1).reshape(length, tiles, columns)


def attend_grouped(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, columns: Tensor, bias: Tensor | None, *, scale: float
) -> Tensor:
    """Each tile of queries to its own keys, softmax(scale * q k^T + bias) v, without the lse and without a gradient.

    Args:
        query, key, value: (Q, D), (K, D) and (K, Dv): the tokens of all heads.
        rows: int64 (R, T), the R queries of tile t at [:, t]: the layout in which T products are one convolution.
        columns: int64 (T, N), the keys of each tile.
        bias: (T, N) or None, added to the scores of every row of the tile; -inf shuts a key out.

    Returns:
        (R, T, Dv); rows with no key are 0.
    """
    (length, tiles), count = rows.shape, columns.shape[1]
    step = max(1, _SCORES // (length * count))
    out = value.new_empty(length, tiles, value.shape[1])
    for at in range(0, tiles, step):
        here = slice(at, at + step)
        queries, keys, values = (
            x.index_select(0, index.flatten()).view(*index.shape, -1)
            for x, index in ((query, rows[:, here]), (key, columns[here]), (value, columns[here]))
        )
        scores = grouped_product(queries.mul_(scale), keys, None if bias is None else bias[here])
        torch.softmax(scores, -1, out=scores)
        out[:, here] = grouped_product(scores, values.transpose(1, 2))
    empty = None if bias is None else bias.amax(-1) == -torch.inf
    return out if empty is None or not empty.any() else out.masked_fill_(empty[None, :, None], 0.0)
