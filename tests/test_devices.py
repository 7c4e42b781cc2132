"""Every tensor that a method creates is on the device of its inputs."""

import pytest
import torch

import hf_efficient_attn as hea
from hf_efficient_attn.methods import get_method, naive_attention
from instances import INSTANCES, inputs, padding_mask

SETTINGS = [(instance, is_causal) for instance in INSTANCES for is_causal in instance.forms]


def start_parameters(instance, query, value):
    method = get_method(instance.method)
    if method.initial_parameters is None:
        return None
    sizes = {"heads": query.shape[1], "width": query.shape[3], "value_width": value.shape[3], "length": query.shape[2]}
    return method.initial_parameters(instance.config(), **sizes)


@pytest.mark.parametrize("form", [hea.attention, naive_attention], ids=["forward", "naive"])
@pytest.mark.parametrize("kind", ["none", "left", "holes"])
@pytest.mark.parametrize(("instance", "is_causal"), SETTINGS, ids=str)
def test_created_tensors_are_on_the_device_of_the_inputs(instance, is_causal, kind, form):
    """With "meta" as the default device, a factory function without `device=` returns a meta tensor.

    An operation that mixes it with the inputs, which are on the CPU, raises an error.
    """
    for q_len in (7, 61):
        query, key, value = inputs(batch=2, q_len=q_len, value_dim=5)
        options = {
            "attention_mask": padding_mask(kind, 2, q_len),
            "is_causal": is_causal,
            "parameters": start_parameters(instance, query, value),
        }
        with torch.device("meta"):
            out = form(instance.config(), query, key, value, **options)
        assert out.device.type == "cpu"
