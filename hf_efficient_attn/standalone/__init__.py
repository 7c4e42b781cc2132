"""Repositories that work without this package: a method for the `kernels` library, and the code of a checkpoint."""
