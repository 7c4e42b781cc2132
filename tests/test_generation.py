"""Generation with GPT-2 and Llama: the key-value cache, left padding, beams, and refusals."""

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from tiny_models import DECODERS, METHODS, SAME_BY_STEP, SMALL, tiny_batch, tiny_model

each_method = pytest.mark.parametrize("method", METHODS)
each_family = pytest.mark.parametrize("family", DECODERS)


def generate(model, inputs, new: int = 12, **options) -> torch.Tensor:
    length = inputs["input_ids"].shape[1]
    ids = model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, **{"do_sample": False, **options})
    return ids[:, length:]


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("method", SAME_BY_STEP)
@each_family
def test_the_cache_gives_the_same_tokens(family, method, padding):
    model, inputs = tiny_model(family, method, head=True), tiny_batch(family, padding=padding)
    tokens = generate(model, inputs)
    assert torch.equal(tokens, generate(model, inputs, use_cache=False))
    exact = generate(hea.convert(model, "sdpa"), inputs)
    assert not torch.equal(tokens, exact), "the test cannot tell the method from exact attention"


@each_method
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


@each_method
@each_family
def test_batches_with_left_padding_generate_as_each_alone(family, method):
    model, inputs = tiny_model(family, method, head=True), tiny_batch(family, padding="left")
    together = generate(model, inputs)
    first = {"input_ids": inputs["input_ids"][:1]}
    second = {"input_ids": inputs["input_ids"][1:, -50:]}
    assert torch.equal(together[:1], generate(model, first))
    assert torch.equal(together[1:], generate(model, second))


@each_method
@each_family
def test_beam_search(family, method):
    """Beam search reorders the cache."""
    model, inputs = tiny_model(family, method, head=True), tiny_batch(family, padding="left")
    beams = generate(model, inputs, num_beams=3, num_return_sequences=2)
    assert beams.shape == (4, 12)
    if method in SAME_BY_STEP:
        assert torch.equal(beams, generate(model, inputs, num_beams=3, num_return_sequences=2, use_cache=False))


@each_family
def test_sampling_repeats_with_its_seed(family):
    model, inputs = tiny_model(family, "kdeformer", head=True), tiny_batch(family)
    tokens = []
    for _ in range(2):
        torch.manual_seed(3)
        tokens.append(generate(model, inputs, do_sample=True))
    assert torch.equal(*tokens)


@each_family
def test_prompts_in_chunks(family):
    """The chunks of a prompt give the output of the whole prompt, with padding and keys before the queries."""
    model, inputs = tiny_model(family, "longformer", head=True), tiny_batch(family, padding="left")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, position_ids=positions).logits
        cache, logits = None, []
        for start, end in ((0, 33), (33, 60), (60, 70)):
            out = model(
                ids[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, start:end],
                past_key_values=cache,
                use_cache=True,
            )
            cache = out.past_key_values
            logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, 1)[mask.bool()], whole[mask.bool()], atol=1e-4, rtol=1e-4)


@each_family
def test_exact_layers_generate_as_sdpa(family):
    inputs = tiny_batch(family, padding="left")
    expected = generate(tiny_model(family, head=True), inputs)
    model = hea.convert(tiny_model(family, head=True), "longformer", layers=[0], window_size=200)
    assert torch.equal(generate(model, inputs), expected)


@each_family
def test_unsupported_options_are_refused(family):
    model, inputs = tiny_model(family, "linear", head=True), tiny_batch(family)
    with pytest.raises(hea.UnsupportedAttentionError, match="dynamic cache"):
        generate(model, inputs, cache_implementation="static")
    with pytest.raises(hea.UnsupportedAttentionError, match="output_attentions"):
        model.generate(**inputs, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)


def test_trained_gpt2(data):
    folder = data / "models" / "gpt2-char-shakespeare"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="longformer", efficient_attention={"window_size": 32}
    )
    torch.manual_seed(0)
    inputs = {"input_ids": torch.randint(0, 65, (2, 200))}
    tokens = generate(model, inputs, new=40)
    assert torch.equal(tokens, generate(model, inputs, new=40, use_cache=False))
