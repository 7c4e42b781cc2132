"""Generation with GPT-2 and Llama: the key-value cache, left padding, beams, and refusals."""

import pytest
import torch

import hf_efficient_attn as hea
from tiny_models import DECODERS, METHODS, SAME_BY_STEP, SMALL, tiny_batch, tiny_model

# A sample for the core suite, of sampled keys, states, landmarks, learned tables and chunks. Tests on tensors have all.
FEW = ("kdeformer", "linear", "nearfar", "longformer", "linformer", "flurka_eva")
few_methods = pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in FEW else pytest.mark.exhaustive) for name in METHODS]
)
each_family = pytest.mark.parametrize("family", DECODERS)


def generate(model, inputs, new: int = 12, **options) -> torch.Tensor:
    length = inputs["input_ids"].shape[1]
    ids = model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, **{"do_sample": False, **options})
    return ids[:, length:]


@few_methods
@each_family
def test_decoding_steps_with_the_cache(family, method):
    """Logits of one token, and of three, after a prompt are those of the whole sequence, where that is promised."""
    model, ids = tiny_model(family, method, head=True), tiny_batch(family)["input_ids"]
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        for step in (1, 3):
            cache = model(ids[:, :-step], use_cache=True).past_key_values
            last = model(ids[:, -step:], past_key_values=cache).logits
            if method in SAME_BY_STEP:
                torch.testing.assert_close(last, whole[:, -step:], atol=1e-4, rtol=1e-4)
            else:
                # These methods are documented to attend to all cached keys exactly. With exact attention in the first
                # layer, the logits are those of an exact model.
                part = hea.convert(tiny_model(family, head=True), method, layers=[1], **SMALL[method])
                cache = part(ids[:, :-step], use_cache=True).past_key_values
                exact = hea.convert(part, "sdpa")(ids, use_cache=False).logits
                hea.convert(part, method, layers=[1], **SMALL[method])
                last = part(ids[:, -step:], past_key_values=cache).logits
                torch.testing.assert_close(last, exact[:, -step:], atol=1e-4, rtol=1e-4)


@few_methods
@each_family
def test_batches_with_left_padding_generate_as_each_alone(family, method):
    model, inputs = tiny_model(family, method, head=True), tiny_batch(family, padding="left")
    together = generate(model, inputs)
    first = {"input_ids": inputs["input_ids"][:1]}
    second = {"input_ids": inputs["input_ids"][1:, -50:]}
    assert torch.equal(together[:1], generate(model, first))
    assert torch.equal(together[1:], generate(model, second))
