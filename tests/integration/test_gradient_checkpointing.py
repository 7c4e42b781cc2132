"""Gradient checkpointing, reentrant and not: the gradients of all kinds of models are those without it."""

import copy
import pickle
import warnings

import pytest
import torch
import transformers
from transformers.masking_utils import create_sliding_window_causal_mask

import hf_efficient_attn as hea
from each import few_methods
from hf_efficient_attn.integration.masks import read_mask
from instances import INSTANCES, inputs, padding_mask
from test_model_types import REFUSALS, SAMPLE, case
from tiny_models import SMALL


def gradients(model, inputs: dict, reentrant: bool | None) -> dict[str, torch.Tensor]:
    """The gradient of every parameter, with a kind of checkpointing; None for none."""
    model = copy.deepcopy(model).train()
    if reentrant is not None:
        with warnings.catch_warnings():  # Transformers 5.24 has another name for it
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert model.is_gradient_checkpointing
    torch.manual_seed(3)
    extra = {"use_cache": False} if "decoder_input_ids" in inputs or hasattr(model.config, "use_cache") else {}
    out = model(**inputs, **extra)[0]
    (out.float() * torch.linspace(-1, 1, out.shape[-1])).mean().backward()
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def check(name: str, method: str) -> None:
    model_class, config, inputs = case(name)
    config.apply_spec_augment = False  # draws from NumPy
    torch.manual_seed(0)
    model = hea.convert(model_class(config), method, **SMALL[method])
    expected = gradients(model, inputs, None)
    assert expected
    for reentrant in (False, True):
        again = gradients(model, inputs, reentrant)
        assert again.keys() == expected.keys()
        for key, gradient in expected.items():
            name_of = f"{key}, {reentrant}"
            torch.testing.assert_close(
                again[key], gradient, rtol=1e-4, atol=1e-6, msg=lambda m, case=name_of: f"{case}: {m}"
            )


# AIMv2 makes a causal mask for modules that call themselves bidirectional.
CHOSEN = ("Aimv2Text", "Bert", "Llama", "GPT2", "Bart", "ViT")
NAMES = [
    pytest.param(name, marks=() if name in CHOSEN else pytest.mark.exhaustive)
    for name in SAMPLE
    if name not in REFUSALS
]


@pytest.mark.parametrize("method", ["kdeformer", pytest.param("linear", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", NAMES)
def test_the_same_gradients(name, method):
    if not case(name)[0].supports_gradient_checkpointing:
        pytest.skip("the model has no gradient checkpointing")
    check(name, method)


@few_methods
@pytest.mark.parametrize("name", ["Bert", pytest.param("Aimv2Text", marks=pytest.mark.exhaustive)])
def test_every_method(name, method):
    if name == "Aimv2Text" and not hea.method_info(method).causal:
        pytest.skip("AIMv2's text model is causal")
    check(name, method)


@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_draws_do_not_depend_on_the_gradient(instance, padding):
    """Reentrant checkpointing computes without a gradient first, and repeats the call from the same random state."""
    tensors, mask = inputs(q_len=200, value_dim=8), padding_mask(padding, 1, 200)
    for is_causal in (False, True) if instance.info.causal else (False,):
        outs = []
        for needs_grad in (False, True):
            torch.manual_seed(3)
            leaves = [x.detach().requires_grad_(needs_grad) for x in tensors]
            outs.append(instance(*leaves, mask, is_causal=is_causal, dropout_p=0.3, seed=None).detach())
        torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("is_causal", [True, False])
def test_what_a_mask_says_survives(is_causal, window):
    """Whatever happens to a mask on its way to the attention function, what it says is known there."""
    padding = torch.ones(2, 9, dtype=torch.int64)
    padding[1, 6:] = 0
    config = transformers.Qwen2Config(is_causal=is_causal, use_sliding_window=True, sliding_window=window or 9)
    config._attn_implementation = "linear"
    inputs = {
        "config": config,
        "inputs_embeds": torch.zeros(2, 9, 4),
        "attention_mask": padding,
        "past_key_values": None,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        mask = create_sliding_window_causal_mask(**inputs)
    for changed in (
        mask.detach(), mask.clone(), mask[:, :], mask.to("cpu", copy=True), copy.deepcopy(mask), mask.contiguous(),
        torch.cat([mask[:1], mask[1:]]), mask.expand(2, 9), mask.index_select(0, torch.arange(2)), mask.view(2, 9),
        pickle.loads(pickle.dumps(mask)),
    ):  # fmt: skip
        keys, causal, local = read_mask("a method", changed)
        assert (causal, local) == (is_causal, window is not None) and torch.equal(keys, padding.bool())
    # A mask of other code says nothing about causality.
    assert read_mask("a method", padding.bool()).is_causal is None
