"""Packed rows: each text of a row is attended to by itself, or the call is refused."""

import inspect
from functools import partial

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import hf_efficient_attn as hea
from each import close, few_methods, refuses
from helpers.model_types import sizes
from helpers.windowed_models import converted, exact_model
from hf_efficient_attn.integration.packing import texts_of
from tiny_models import DECODERS, SMALL, tiny_batch, tiny_model

LENGTHS = (33, 1, 70, 5, 19)
TEXTS = [{"input_ids": [3 + i % 50 for i in range(at, at + n)]} for at, n in enumerate(LENGTHS)]


def collated(**options) -> dict:
    batch = transformers.DataCollatorWithFlattening(**options)(TEXTS, return_tensors="pt")
    batch.pop("labels")
    return batch


def alone(model) -> torch.Tensor:
    return torch.cat([model(torch.tensor([x["input_ids"]]), use_cache=False).logits for x in TEXTS], 1)


@few_methods
@pytest.mark.parametrize("layers", [None, [1]], ids=str)
@pytest.mark.parametrize("family", DECODERS)
def test_each_text_is_attended_to_by_itself(family, layers, method):
    if not hea.method_info(method).causal:
        pytest.skip("no causal form")
    model = hea.convert(tiny_model(family, head=True), method, layers=layers, **SMALL[method])
    results = []
    for logits in (model(**collated()).logits, alone(model)):
        model.zero_grad()
        logits.square().mean().backward()
        results.append((logits.detach(), [x.grad.clone() for x in model.parameters() if x.grad is not None]))
    (together, grads), (by_text, expected) = results
    close(together, by_text, 1e-4)
    close(grads, expected, 1e-4)


@pytest.mark.parametrize("family", DECODERS)
def test_what_says_where_texts_begin(family):
    model = hea.convert(tiny_model(family, head=True), "linear", layers=[0])
    batch = collated()
    expected = alone(model)
    close((out := model(**batch)).logits, expected, 1e-4)
    assert out.past_key_values is None  # a cache would hold the texts as one
    for options in ({"return_flash_attn_kwargs": True}, {"return_seq_idx": True}):
        close(model(**collated(**options)).logits, expected, 1e-4)
        refuses("give it position_ids", model, **collated(return_position_ids=False, **options))
    other = {**collated(return_flash_attn_kwargs=True), "position_ids": torch.arange(sum(LENGTHS))[None]}
    refuses("in other places", model, **other)
    refuses("measuring attention: the rows are packed", hea.attention_error, model, batch)
    refuses("use_cache=False", model, **batch, use_cache=True)
    refuses("leave the attention_mask out", model, **other, attention_mask=torch.ones_like(batch["input_ids"]))
    # Another row has texts of other lengths.
    positions = torch.cat((batch["position_ids"], torch.arange(sum(LENGTHS))[None] % 40))
    ids = batch["input_ids"].expand(2, -1)
    second = torch.cat([model(x, use_cache=False).logits for x in ids[:1].split(40, 1)], 1)
    close(model(ids, position_ids=positions).logits, torch.cat((expected, second)), 1e-4)


@pytest.mark.parametrize("family", DECODERS)
def test_a_mask_says_that_a_row_is_one_text(family):
    batch = collated()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    exact = tiny_model(family, head=True, attn_implementation="sdpa")
    expected = exact(**batch).logits
    close(hea.convert(exact, "longformer", window_size=512)(**batch).logits, expected, 1e-4)


def test_a_window_within_texts():
    model = converted(exact_model("Qwen2", "ForCausalLM"), hea.NearFarConfig(block_size=24, num_samples=8))
    close(model(**collated()).logits, alone(model), 1e-4)


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_models_whose_masks_do_not_know_the_positions(family):
    model = hea.convert(tiny_model(family, head=True), "linear")
    batch = collated()
    calls = [partial(model, **collated(return_position_ids=False, return_flash_attn_kwargs=True))]
    calls += [partial(model, **batch), partial(model.base_model, **batch)]
    names = list(inspect.signature(model.forward).parameters)
    if "position_ids" in names:
        calls.append(partial(model, *(batch.get(name) for name in names[: names.index("position_ids") + 1])))
    for call in calls:
        refuses("packed sequences", call)
    hea.convert(model, "sdpa")(**batch)


@pytest.mark.parametrize("kind", ["mistral", "phi3", "starcoder2", "qwen2", "olmo2"])
def test_code_that_hands_positions_to_the_mask(kind):
    config_class = transformers.CONFIG_MAPPING[kind]
    model = transformers.AutoModelForCausalLM.from_config(config_class(**sizes(config_class))).eval()
    hea.convert(model, "longformer", window_size=6)
    close(model(**collated()).logits, alone(model), 1e-4)


def test_positions_of_models_of_pictures():
    config = transformers.Qwen3VLTextConfig(**sizes(transformers.Qwen3VLTextConfig))
    model, batch = hea.convert(transformers.Qwen3VLTextModel(config).eval(), "linear"), collated()
    expected, positions = model(**batch).last_hidden_state, batch.pop("position_ids")
    close(model(**batch, position_ids=positions.expand(4, -1, -1)).last_hidden_state, expected, 1e-5)
    refuses("packed sequences", model, **batch, position_ids=positions.expand(3, -1, -1))


def test_layers_that_carry_a_state_from_one_text_into_the_next():
    config = transformers.Lfm2Config(**sizes(transformers.Lfm2Config, layer_types=["conv", "full_attention"]))
    refuses(r"\(conv\) carry a state", hea.convert(transformers.Lfm2Model(config), "nearfar"), **collated())


def test_training_with_the_collator(tmp_path):
    model = hea.convert(tiny_model("llama", head=True), "linear")
    more = {"per_device_train_batch_size": 3, "gradient_checkpointing": True, "report_to": "none"}
    options = transformers.TrainingArguments(tmp_path, max_steps=2, **more)
    more = {"train_dataset": TEXTS, "data_collator": transformers.DataCollatorWithFlattening()}
    trainer = transformers.Trainer(model, options, **more)
    assert torch.isfinite(torch.tensor(trainer.train().training_loss))


@given(st.lists(st.integers(1, 70), min_size=1, max_size=9))
def test_texts_of_similar_length_are_computed_together(lengths):
    begins = torch.zeros(1, sum(lengths), dtype=torch.bool)
    begins[0, torch.tensor([0, *lengths]).cumsum(0)[:-1]] = True
    found = list(texts_of(begins))
    assert sorted(int(n) for _, valid in found for n in valid.sum(1)) == sorted(lengths)
    assert torch.cat([token[valid] for token, valid in found]).sort()[0].equal(torch.arange(sum(lengths)))
    assert sum(token.numel() for token, _ in found) < 2 * sum(lengths)


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_positions_of_one_text(family, padding):
    model, batch = tiny_model(family, "linear", head=True), tiny_batch(family, padding=padding)
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    counted = mask.cumsum(1) - 1
    for positions in (*(counted.masked_fill(mask == 0, x) for x in (0, 1)), torch.arange(70)[None] * 3 // 2):
        for cache in ({"use_cache": True}, {"use_cache": False}, {}):
            out = model(**batch, position_ids=positions, **cache)
            assert (out.past_key_values is None) == (cache == {"use_cache": False})
    if padding != "right":
        model.generate(**batch, max_new_tokens=4, do_sample=False)


def test_packed_rows_in_a_compiled_model():
    """The values are not known while the graph is traced, so the check is part of the graph."""
    torch.compiler.reset()
    model, ids = tiny_model("llama", "linear"), tiny_batch("llama")["input_ids"]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    plain, packed = torch.arange(70)[None], torch.cat((torch.arange(30), torch.arange(40)))[None]
    with torch.no_grad():
        compiled(ids, position_ids=plain)
        refuses("packed sequences", compiled, ids, position_ids=packed, error=RuntimeError)
