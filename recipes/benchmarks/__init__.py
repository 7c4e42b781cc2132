"""Benchmarks that print the tables of the documentation; run one with `python -m recipes.benchmarks.NAME`."""
