"""The table of backends: who computes attention of blocks of queries to their keys.

`attend` asks the backends in the order of the table, and the first that applies computes a call. For another device add
a file with a `Backend`, and a line here before `products`, which takes every call.
"""

from hf_efficient_attn.ops.backends import (
    block_attention,
    cluster_attention,
    cpu,
    efficient,
    flash,
    flash_window,
    linear_attention,
    products,
    random_features,
)
from hf_efficient_attn.ops.backends.backend import Backend, BlockBackend, ClusterBackend, LinearBackend

BACKENDS: tuple[Backend, ...] = (cpu.BACKEND, flash.BACKEND, efficient.BACKEND, products.BACKEND)
# Where none applies, `block_attention` returns None, and the caller computes the attention by `attend`.
BLOCK_BACKENDS: tuple[BlockBackend, ...] = (flash_window.BACKEND, block_attention.BACKEND)
# Where none applies, `hf_efficient_attn.ops.features.sums` computes features and their sums.
FEATURE_BACKENDS: tuple[LinearBackend, ...] = (linear_attention.BACKEND, random_features.BACKEND)
# Where none applies, the causal form of `nearfar` lists and sorts what its queries choose.
CLUSTER_BACKENDS: tuple[ClusterBackend, ...] = (cluster_attention.BACKEND,)
