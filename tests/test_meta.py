"""Calls on meta tensors, which have shapes but no numbers: the shapes and dtypes of output and gradients."""

import pytest
import torch

import hf_efficient_attn as hea
from instances import INSTANCES, inputs

FORMS = [pytest.param(i, c, id=f"{i}{'-causal' if c else ''}") for i in INSTANCES for c in i.forms]


@pytest.mark.parametrize(("instance", "is_causal"), FORMS)
def test_shapes(instance, is_causal):
    shape = inputs(2, 4, 300, 16, num_kv_heads=2, value_dim=12, dtype=torch.bfloat16)
    leaves = [x.to("meta").requires_grad_() for x in shape]
    mask = torch.ones(2, 300, dtype=torch.bool, device="meta")
    out = hea.attention(instance.config(), *leaves, attention_mask=mask, is_causal=is_causal)
    assert (out.shape, out.dtype, out.device.type) == ((2, 4, 300, 12), torch.bfloat16, "meta")
    for grad, leaf in zip(torch.autograd.grad(out.sum(), leaves), leaves, strict=True):
        assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)
