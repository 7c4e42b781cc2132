"""Exact and approximate products with Gaussian kernel matrices, and the conversion of attention to them.

K_ij = exp(-|q_i - k_j|^2 / (2 bandwidth^2)). The algorithms are from two papers: "Improved algorithms for kernel
matrix-vector multiplication under sparsity assumptions" (ApproxKMV: Algorithms 1-3, Lemma 4.1), and Zandieh et al. 2023
(WExpKDE: Algorithm 2).

ApproxKMV assumes that the sum of all entries of K is at most a constant times n. If the assumption does not hold, the
result is still right, but the exact product is cheaper and is computed instead.
"""

from hf_efficient_attn.kernel.densities import DensityReport, softmax_column_norms, weighted_exponential_kde
from hf_efficient_attn.kernel.products import KernelReport, approx_kernel_matvec, attention_to_gaussian, kernel_matvec

__all__ = [
    "DensityReport",
    "KernelReport",
    "approx_kernel_matvec",
    "attention_to_gaussian",
    "kernel_matvec",
    "softmax_column_norms",
    "weighted_exponential_kde",
]
