"""Tensor primitives, which know neither the methods nor Transformers.

Shapes in this package: B is the batch size, H the number of heads, BH = B * H, Nq and Nk the numbers of queries and
keys (N if both are equal), D the size of a head's queries and keys, and Dv the size of its values.
"""
