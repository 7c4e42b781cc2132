"""Every method on meta tensors, that is on an accelerator: no call waits for the device, whatever its arguments.

`test_launches.py` counts the kernels of the plain call.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import hf_efficient_attn as hea
from instances import DEFAULTS
from recipes.common.launches import count, meta_parameters

NUM_HEADS, HEAD_DIM = 4, 64


class Arguments(NamedTuple):
    """How a call differs from that of self-attention of whole sequences."""

    q_len: int = 8191
    kv_len: int = 8191
    num_kv_heads: int = NUM_HEADS
    masked: bool = False
    value_dim: int = HEAD_DIM
    dtype: torch.dtype = torch.bfloat16


CASES = {
    "odd": Arguments(),
    "masked": Arguments(masked=True),
    "grouped": Arguments(num_kv_heads=1),
    "masked, grouped": Arguments(masked=True, num_kv_heads=2, value_dim=40),
    "short": Arguments(q_len=300, kv_len=300, masked=True),
    "few queries": Arguments(q_len=1000, masked=True),
    "many queries": Arguments(kv_len=1000, masked=True, num_kv_heads=2),
    "float32": Arguments(masked=True, dtype=torch.float32),
    "float16": Arguments(masked=True, dtype=torch.float16),
}


# The amount of work of approx_kmv depends on the data.
METHODS = [(i.method, is_causal) for i in DEFAULTS if i.method != "approx_kmv" for is_causal in i.forms]


def meta(*shape: int, dtype: torch.dtype, requires_grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("method", "is_causal"), METHODS, ids=[f"{m}{'-causal' if c else ''}" for m, c in METHODS])
def test_no_call_waits_for_the_device(method, is_causal, arguments):
    # In causal attention the queries are the last tokens.
    if not hea.method_info(method).rectangular or (is_causal and arguments.q_len > arguments.kv_len):
        arguments = arguments._replace(q_len=arguments.kv_len)
    config = hea.method_info(method).config_class().to_measure()
    options = {"dtype": arguments.dtype, "requires_grad": True}
    query = meta(1, NUM_HEADS, arguments.q_len, HEAD_DIM, **options)
    key = meta(1, arguments.num_kv_heads, arguments.kv_len, HEAD_DIM, **options)
    value = meta(1, arguments.num_kv_heads, arguments.kv_len, arguments.value_dim, **options)
    mask = meta(1, arguments.kv_len, dtype=torch.bool) if arguments.masked else None
    parameters = meta_parameters(config, arguments.kv_len, (NUM_HEADS, HEAD_DIM, arguments.value_dim))

    def step() -> None:
        tensors = query, key, value
        out = hea.attention(config, *tensors, attention_mask=mask, is_causal=is_causal, parameters=parameters)
        assert (out.shape, out.dtype) == ((1, NUM_HEADS, arguments.q_len, arguments.value_dim), arguments.dtype)
        grads = torch.autograd.grad(out, tensors, torch.empty_like(out))
        assert [x.shape for x in grads] == [x.shape for x in tensors]

    count(step)  # constants and random numbers are kept from the first call
    found = count(step)
    assert not found.synchronisations, found.synchronisations
    assert found.host_to_device == 0
