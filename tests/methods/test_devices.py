"""Every tensor that a method creates is on the device of its inputs."""

import pytest
import torch

import hf_efficient_attn as hea
from hf_efficient_attn.methods import attention_with_state, naive_attention
from instances import INSTANCES, inputs, padding_mask
from test_heads import HEADS, KV_HEADS, parameters_of

SETTINGS = [(instance, is_causal) for instance in INSTANCES for is_causal in instance.forms]


@pytest.mark.parametrize("form", [hea.attention, naive_attention], ids=["forward", "naive"])
@pytest.mark.parametrize("kind", ["none", "left", "holes"])
@pytest.mark.parametrize(("instance", "is_causal"), SETTINGS, ids=str)
def test_created_tensors_are_on_the_device_of_the_inputs(instance, is_causal, kind, form):
    """With "meta" as the default device, a factory function without `device=` returns a meta tensor.

    An operation that mixes it with the inputs, which are on the CPU, raises an error.
    """
    for q_len in (7, 61):
        query, key, value = inputs(2, HEADS, q_len, num_kv_heads=KV_HEADS)
        options = {"attention_mask": padding_mask(kind, 2, q_len), "is_causal": is_causal}
        options["parameters"] = parameters_of(instance.config(), value)
        with torch.device("meta"):
            out = form(instance.config(), query, key, value, **options)
        assert out.device.type == "cpu"


@pytest.mark.parametrize("instance", [i for i in INSTANCES if i.info.causal], ids=str)
def test_tensors_created_in_decoding_are_on_the_device_of_the_inputs(instance):
    query, key, value = inputs(2, HEADS, 61, num_kv_heads=KV_HEADS)
    mask, parameters = padding_mask("left", 2, 61), parameters_of(instance.config(), value)
    with torch.device("meta"):
        out = hea.attention(
            instance.config(), query[:, :, -3:], key, value, attention_mask=mask, is_causal=True, parameters=parameters
        )
        assert out.device.type == "cpu"
        if instance.info.recurrent:
            state = None
            for start, end in ((0, 40), (40, 60), (60, 61)):
                chunk = [x[:, :, start:end] for x in (query, key, value)]
                out, state = attention_with_state(instance.config(), state, *chunk, attention_mask=mask[:, start:end])
                assert {x.device.type for x in (out, *state)} == {"cpu"}
