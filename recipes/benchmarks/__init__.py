"""`python -m recipes.benchmarks.attention` (speed, memory) and `python -m recipes.benchmarks.error` (accuracy)."""
