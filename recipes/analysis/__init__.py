"""What attention matrices are like, and what approximating them costs: figures of the papers, on real data.

`python -m recipes.analysis.sparsity`, `python -m recipes.analysis.spectrum`, `python -m recipes.analysis.budget`.
"""
