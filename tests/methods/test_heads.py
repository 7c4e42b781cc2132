"""A process that holds some of the heads of a layer computes for them what one process with all heads computes."""

import pytest
import torch

import hf_efficient_attn as hea
from each import each_form
from hf_efficient_attn.methods import get_method, parameters_of_slice
from hf_efficient_attn.ops.shards import HeadSlice
from instances import inputs, padding_mask

HEADS, KV_HEADS = 4, 2


def parameters_of(config, value, noise=0.3, num_kv_heads=KV_HEADS):
    """Learned parameters that differ between the heads."""
    initial = get_method(config.method).initial_parameters
    if initial is None:
        return {}
    sizes = {"head_dim": 8, "value_dim": 8, "max_length": value.shape[2]}
    start = initial(config, num_heads=HEADS, num_kv_heads=num_kv_heads, **sizes)
    generator = torch.Generator().manual_seed(3)
    return {
        k: x + noise * torch.randn(x.shape, generator=generator) * x.abs().mean().clamp(min=0.1)
        for k, x in start.items()
    }


@pytest.mark.parametrize("count", [1, 2])
@each_form
def test_heads_of_a_slice_are_those_of_the_whole(instance, is_causal, count):
    config = instance.config()
    query, key, value = inputs(2, HEADS, 75, 8, num_kv_heads=KV_HEADS)
    options = {"is_causal": is_causal, "attention_mask": padding_mask("right", 2, 75), "seed": 7}
    parameters = parameters_of(config, value)
    whole = hea.attention(config, query, key, value, parameters=parameters, **options)
    for first in range(0, HEADS, count):
        heads, queries = HeadSlice(first, HEADS), slice(first, first + count)
        keys = slice(first * KV_HEADS // HEADS, -(-queries.stop * KV_HEADS // HEADS))
        own = parameters_of_slice(config, parameters, heads, count)
        part = hea.attention(
            config, query[:, queries], key[:, keys], value[:, keys], parameters=own, heads=heads, **options
        )
        torch.testing.assert_close(part, whole[:, queries], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["kdeformer", "linear"])
def test_numbers_of_heads_reach_operators_of_a_graph(method):
    config = hea.method_info(method).config_class().with_budget(24)
    query, key, value = inputs(2, HEADS, 75, 8, seed=5)
    compiled = torch.compile(hea.attention, fullgraph=True, backend="aot_eager")
    whole = hea.attention(config, query, key, value)[:, 2:]
    part = compiled(config, query[:, 2:], key[:, 2:], value[:, 2:], heads=HeadSlice(2, HEADS))
    torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-5)


def test_a_slice_has_an_end():
    query, key, value = inputs(1, 2, 75, 8)
    with pytest.raises(hea.UnsupportedAttentionError, match="2 heads from head 3 on are not among the 4 heads"):
        hea.attention("kdeformer", query, key, value, heads=HeadSlice(3, 4))
