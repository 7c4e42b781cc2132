"""Benchmarks that print the tables of the documentation; run one with `python -m recipes.benchmarks.NAME`.

attention: speed and memory. error: error on real activations and in half precision. error_bound: how often bounds of
the error fail. tradeoff, length: the pictures of error and time. peers: other implementations next to ours. flurka:
whole layers next to both parents. tasks: search and image classification. distilled: distillation without labels.
cache: decoding with a bounded cache. operations: counts of KDEformer's two models. step: a training step. kernel:
evaluations of the approximate kernel product. sequence_parallel: bytes between processes.
"""
