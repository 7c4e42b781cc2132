"""The experiments of recipes/README.md: `python -m recipes.experiments` runs them and prints their tables."""
