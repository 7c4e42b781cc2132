"""Products with Gaussian kernel matrices, exact and approximate, and the way from attention to them.

K_ij = exp(-|q_i - k_j|^2 / (2 bandwidth^2)). Two papers: "Improved algorithms for kernel matrix-vector multiplication
under sparsity assumptions" (ApproxKMV: Algorithms 1-3, Lemma 4.1), and Zandieh et al. 2023 (WExpKDE: Algorithm 2).

ApproxKMV rests on an assumption about K: the sum of all its entries is at most a constant times n. Where it does not
hold the result is right all the same, only not cheaper than the exact product, which is then what is computed.
"""

from hf_efficient_attn.kernel.densities import DensityReport, softmax_column_norms, weighted_exponential_kde
from hf_efficient_attn.kernel.products import (
    KernelReport,
    Plan,
    approx_kernel_matvec,
    attention_to_gaussian,
    draw_columns,
    kernel_matvec,
    light_draws,
    plan_product,
)
