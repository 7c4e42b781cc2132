"""Tensor primitives, which know neither the methods nor Transformers.

Shapes in this package: B is the batch size, H the number of heads, BH = B * H, Nq and Nk the numbers of queries and
keys (N if both are equal), D the size of a head's queries and keys, and Dv the size of its values.

Where a docstring does not say otherwise, arguments with these names are:

    query, key, value   (BH, Nq, D), (BH, Nk, D) and (BH, Nk, Dv)
    key_mask            bool (BH, Nk), True for valid keys, or None
    is_causal           whether query i attends to the keys up to i only
    scale               factor of the scores
    dropout_p           probability of dropping a weight
    with_lse            whether to return the lse as well, as one more column (`hf_efficient_attn.ops.attend.output_of`)
    seed, draws         the random numbers
    batch               B. All sequences of a batch use the same random numbers.
"""
