"""Benchmarks that print the tables of the documentation; run one with `python -m recipes.benchmarks.NAME`.

attention: speed and memory. peers: other implementations next to ours. flurka: whole layers next to both parents.
error: error on real activations. tasks: search and image classification. operations: counts of KDEformer's two models.
step: a training step. kernel: evaluations of the approximate kernel product.
"""
