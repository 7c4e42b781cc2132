"""Results in bfloat16 on the CPU, and with slices of other sizes than those of the CPU."""

import dataclasses

import pytest
import torch
from torch import Tensor

import hf_efficient_attn as hea
from each import each_form
from hf_efficient_attn.ops import attend, tokens
from hf_efficient_attn.ops.attend import product_dtype, sum_dtype
from instances import Instance, inputs, padding_mask, relative_error
from promises import outputs_that_count

# An odd length, keys that several heads share, and values of another dimension: no dimension is a multiple of 8.
ODD = {"batch": 2, "num_heads": 4, "num_kv_heads": 2, "q_len": 83, "head_dim": 12, "value_dim": 7}
# FlashAttention and its form for the CPU need values of the dimension of the keys.
EVEN = ODD | {"q_len": 96, "head_dim": 16, "value_dim": 16}


def results(instance: Instance, is_causal: bool, mask: Tensor, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Outputs at valid queries, and the gradients of a weighted sum of them."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = instance(*leaves, mask, is_causal=is_causal)
    weight = inputs(1, *out.shape[1:], dtype=torch.float64, seed=7)[0]
    out = out.masked_fill(~outputs_that_count(mask, out).unsqueeze(-1), 0.0)
    return [out, *torch.autograd.grad((out * weight).sum(), leaves, materialize_grads=True)]


def check_close(ours: list[Tensor], other: list[Tensor], tolerance: float) -> None:
    for name, x, y in zip(("out", "query", "key", "value"), ours, other, strict=True):
        assert relative_error(x, y) <= tolerance, f"{name} differs by {relative_error(x, y)}"


def error_of(out: Tensor, mask: Tensor, tensors: tuple[Tensor, ...], is_causal: bool) -> float:
    """The error of an output at valid queries relative to exact attention in float64."""
    exact = hea.analysis.exact_output(*tensors, attention_mask=mask, is_causal=is_causal)
    return relative_error(out, exact.masked_fill(~outputs_that_count(mask, exact).unsqueeze(-1), 0.0))


# Methods that hash tokens or choose keys by scores: after rounding a few hashes and keys are others.
BY_SCORES = ("auto", "hyperattention", "kdeformer", "nearfar", "reformer")


@each_form
def test_the_size_of_a_slice_changes_rounding_only(instance, is_causal, monkeypatch):
    """One head or block at a time, and all at once as on an accelerator, with gradients; methods do not see it."""
    tensors, mask, found = inputs(**ODD, dtype=torch.float64), padding_mask("holes", 2, ODD["q_len"]), []
    for numel in (1, tokens.ACCELERATOR_NUMEL):
        monkeypatch.setattr(tokens, "CPU_NUMEL", numel)
        found.append(results(instance, is_causal, mask, tensors))
    check_close(*found, 1e-9)


@pytest.fixture(autouse=True)
def half_products(monkeypatch):
    """Products in bfloat16 on the CPU whatever the processor."""
    monkeypatch.setattr(attend, "_CPU_HAS_BFLOAT16", True)


@each_form
def test_the_bfloat16_form_is_close_to_float64(instance, is_causal):
    for shape in (ODD, EVEN):
        tensors = inputs(**shape, dtype=torch.bfloat16)
        mask = padding_mask("holes", shape["batch"], shape["q_len"])
        ours, exact = (results(instance, is_causal, mask, x) for x in (tensors, tuple(x.double() for x in tensors)))
        if instance.method not in BY_SCORES:
            check_close(ours, exact, 0.025)
        ours_error, exact_error = (error_of(x[0], mask, tensors, is_causal) for x in (ours, exact))
        assert ours_error <= 1.05 * exact_error + 0.01


def cast(instance: Instance) -> Instance:
    return dataclasses.replace(instance, hyperparameters={**instance.hyperparameters, "compute_dtype": "bfloat16"})


@each_form
def test_compute_dtype_is_a_call_with_bfloat16(instance, is_causal):
    """Bit for bit, with a mask and shared keys; the output and the gradients are float32."""
    tensors, mask = inputs(**ODD), padding_mask("left", ODD["batch"], ODD["q_len"])
    ours = results(cast(instance), is_causal, mask, tensors)
    other = results(instance, is_causal, mask, tuple(x.bfloat16() for x in tensors))
    assert {x.dtype for x in ours} == {torch.float32}
    assert torch.equal(ours[0], other[0].float())
    check_close(ours, other, 0.01)


def test_dtype_of_products(monkeypatch):
    half, single, double = torch.bfloat16, torch.float32, torch.float64
    x = torch.ones(2)
    assert [product_dtype(x.to(t)) for t in (half, torch.float16, single, double)] == [half, single, single, double]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert product_dtype(x) == half
    finally:
        torch.set_float32_matmul_precision(before)
    on_device = x.to("meta", torch.float16)
    assert product_dtype(on_device) == torch.float16
    assert sum_dtype(on_device) == single
    monkeypatch.setattr(attend, "_CPU_HAS_BFLOAT16", False)
    assert product_dtype(x.to(half)) == single
