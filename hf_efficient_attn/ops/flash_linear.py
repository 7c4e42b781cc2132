"""Causal sums of features by the kernels of flash-linear-attention, if that package is installed.

Its kernels keep the sums of earlier chunks in registers or in the cache, where the form by PyTorch's operators writes
and reads them a few times. The package (https://github.com/fla-org/flash-linear-attention, `import fla`) is no
dependency: the extra "fla" installs it. It needs Triton and a GPU.
"""

import functools
import importlib.util

import torch
from torch import Tensor

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.export import is_compiling

# The most features of a call: kernels for more need more memory on the chip than all GPUs have.
_MAX_FEATURES = 256
# The third dimension of a grid of kernels, which counts heads, has at most so many entries.
_MAX_HEADS = 65_535
# A state that decays by more in one step counts as nothing next to the new token in float32. The kernels add up the
# decays of a chunk, which keeps their digits only if none is huge.
_MOST_DECAY = 80.0


def serves(x: Tensor, num_features: int) -> bool:
    """Whether the package computes sums of products in the dtype of `x` (BH, ...) with so many features.

    Only of bfloat16 tensors: it multiplies float32 in TF32, and sums over all tokens can exceed the range of float16.
    A graph of `torch.compile` cannot contain its functions.
    """
    return (
        x.device.type == "cuda"
        and backend(x) == "triton"
        and x.dtype == torch.bfloat16
        and x.shape[0] <= _MAX_HEADS
        and num_features <= _MAX_FEATURES
        and not is_compiling()
        and _is_installed()
    )


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("fla") is not None


def causal_sums(
    phi_q: Tensor, phi_k: Tensor, value: Tensor, initial: Tensor | None = None, decay: Tensor | None = None
) -> Tensor:
    """For each token i: phi_q_i^T S_i, where S_i = exp(-decay_i) S_{i-1} + phi_k_i value_i^T and S_{-1} is `initial`.

    Args:
        phi_q: (BH, N, F), features of queries.
        phi_k: (BH, N, F), features of keys.
        value: (BH, N, Dv), in the same dtype.
        initial: (BH, F, Dv), or None for 0.
        decay: (BH, N), not negative, or None for 0. No gradient passes through it.

    Returns:
        (BH, N, Dv).
    """
    # Heads are rows here: the kernels treat both alike, and want the heads after the tokens.
    tokens = [x.unsqueeze(2) for x in (phi_q, phi_k, value)]
    state = None if initial is None else initial.float().unsqueeze(1)
    if decay is None:
        from fla.ops.linear_attn import chunk_linear_attn

        out: Tensor = chunk_linear_attn(*tokens, scale=1.0, initial_state=state, normalize=False)[0]
    else:
        from fla.ops.simple_gla import chunk_simple_gla

        log_decay = decay.detach().float().clamp(max=_MOST_DECAY).neg_().unsqueeze(2)
        out = chunk_simple_gla(*tokens, g=log_decay, scale=1.0, initial_state=state)[0]
    return out.squeeze(2)
