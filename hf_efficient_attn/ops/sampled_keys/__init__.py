"""KDEformer, HyperAttention and Reformer: hashing, draws of keys, and the two forms."""
