"""Measurements of attention matrices, and errors of methods: the public module `hea.analysis`.

The functions answer questions that two papers ask, for any queries and keys:

- "Improved Algorithms for Kernel Matrix-Vector Multiplication under Sparsity Assumptions" (2024; called the sparsity
  paper below), section 4. Assumption A: the sum of all but the n largest entries of the Gaussian kernel matrix is at
  most a constant times the sum of the n largest (`head_to_tail`). Experiment (ii): is there a gap in size between the
  two groups of entries (`order_statistics_ratio`)?
- KDEformer (Zandieh, Han, Daliri, Karbasi, ICML 2023), section 3.4 and Fig. 2: how much does the stable rank of D^-1 A
  decrease when the near field is removed (`softmax_matrix`, `near_field_pairs`, `stable_rank`)?

`attention_error` compares a method with exact attention by the relative operator norm of KDEformer's section 4.1.

All functions except those for errors build dense float64 matrices. They are for analysis, not for computing attention:
sizes that do not fit in memory or take hours are refused. No gradient flows through any function of this module. For
tensors of a device without float64 the CPU computes the result, which is moved to the device as float32.
"""

from hf_efficient_attn.analysis import matrices, sparsity
from hf_efficient_attn.analysis.matrices import *  # noqa: F403
from hf_efficient_attn.analysis.sparsity import *  # noqa: F403

__all__ = [*matrices.__all__, *sparsity.__all__]
