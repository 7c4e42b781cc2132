"""Tensor primitives. They know nothing of methods, nor of Transformers."""
