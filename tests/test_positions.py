"""`extend_positions`: the tables, the buffers and the configs of the families that have learned positions."""

import copy

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from tiny_models import FAMILY_VALUES, output, tiny_batch, tiny_class, tiny_model

Refused = hea.UnsupportedAttentionError
LEARNED = ["bert", "roberta", "distilbert", "gpt2"]
OFFSET = {"roberta": 2}


def table(model) -> torch.nn.Embedding:
    return next(m for name, m in model.named_modules() if name.endswith(("position_embeddings", "wpe")))


@pytest.mark.parametrize("head", [False, True], ids=["body", "with-head"])
@pytest.mark.parametrize("family", LEARNED)
def test_tiling(family, head, tmp_path):
    model, offset = tiny_model(family, head=head), OFFSET.get(family, 0)
    old, short = table(model).weight.detach().clone(), tiny_batch(family, length=128)
    with pytest.raises((IndexError, RuntimeError)):
        output(model, tiny_batch(family, length=300))
    before = output(model, short)
    assert hea.extend_positions(model, 300) is model
    new = table(model).weight
    assert new.shape == (300 + offset, 32) and new.requires_grad
    assert torch.equal(new[:offset], old[:offset])
    for i in range(300):
        assert torch.equal(new[offset + i], old[offset + i % 128])
    assert torch.equal(output(model, short), before)
    assert model.config.max_position_embeddings == 300 + offset
    long = tiny_batch(family, length=300, padding="right")
    longer = output(model, long)
    model.save_pretrained(tmp_path)
    again = tiny_class(family, head).from_pretrained(tmp_path)
    assert torch.equal(output(again, long), longer)
    buffers = dict(again.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    # The gradient reaches the new positions.
    model(**long)[0].sum().backward()
    assert table(model).weight.grad[offset + 290].abs().sum() > 0


@pytest.mark.parametrize("family", LEARNED)
def test_interpolating(family):
    model, offset = tiny_model(family), OFFSET.get(family, 0)
    old = table(model).weight.detach().clone()[offset:]
    model = hea.extend_positions(model.to(torch.float64), 1 + 2 * 127, method="interpolate")
    new = table(model).weight[offset:]
    assert new.dtype == torch.float64 and new.shape[0] == 255
    torch.testing.assert_close(new[::2].float(), old)
    torch.testing.assert_close(new[1::2].float(), (old[1:] + old[:-1]) / 2)
    assert torch.isfinite(output(model, tiny_batch(family, length=255))).all()


def test_gpt2_names_of_its_config():
    model = tiny_model("gpt2", n_ctx=128)
    hea.extend_positions(model, 200)
    assert (model.config.n_positions, model.config.n_ctx) == (200, 200)
    ids = model.new_ids = tiny_batch("gpt2", length=150)
    assert output(model, ids).shape[1] == 150


def test_types_and_devices_stay():
    model = tiny_model("bert").to(torch.bfloat16)
    table(model).weight.requires_grad_(False)
    hea.extend_positions(model, 200, method="interpolate")
    weight = table(model).weight
    assert (weight.dtype, weight.requires_grad) == (torch.bfloat16, False)
    assert model.embeddings.position_ids.tolist() == [list(range(200))]
    assert model.embeddings.token_type_ids.shape == (1, 200)
    assert "embeddings.position_ids" not in model.state_dict()


def test_generation_beyond_the_old_table():
    model = hea.extend_positions(hea.convert(tiny_model("gpt2", head=True), "longformer", window_size=8), 200)
    ids = tiny_batch("gpt2", length=120)["input_ids"]
    out = model.generate(ids, max_new_tokens=40, min_new_tokens=40, do_sample=False)
    same = model.generate(ids, max_new_tokens=40, min_new_tokens=40, do_sample=False, use_cache=False)
    assert out.shape[1] == 160 and torch.equal(out, same)


def test_wrappers_and_composites():
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        tiny_model("bert").config, transformers.BertConfig(**FAMILY_VALUES["bert"][1])
    )
    both = transformers.EncoderDecoderModel(config)
    hea.extend_positions(torch.nn.ModuleDict({"model": both}), 200)
    for part in (both.encoder, both.decoder):
        assert part.config.max_position_embeddings == 200
    assert both.encoder.embeddings.position_embeddings.num_embeddings == 200
    assert both.decoder.bert.embeddings.position_embeddings.num_embeddings == 200


@pytest.mark.parametrize(
    ("family", "words"),
    [("llama", "rotary"), ("vit", "interpolate_pos_encoding"), ("deit", "interpolate_pos_encoding")],
)
def test_models_without_such_a_table_are_refused(family, words):
    with pytest.raises(Refused, match=words):
        hea.extend_positions(tiny_model(family), 300)
    t5 = transformers.T5Config(vocab_size=60, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2)
    with pytest.raises(Refused, match="no learned table"):
        hea.extend_positions(transformers.T5Model(t5), 300)


def test_invalid_arguments_are_refused():
    model = tiny_model("roberta")
    before, config = copy.deepcopy(model.state_dict()), copy.deepcopy(model.config)
    for length, method, words in (
        (127, "tile", "takes 128 tokens"),
        (0, "tile", "positive integer"),
        (200.0, "tile", "positive integer"),
        (True, "tile", "positive integer"),
        (200, "tiles", "Did you mean 'tile'"),
    ):
        with pytest.raises(Refused, match=words):
            hea.extend_positions(model, length, method=method)
    hea.extend_positions(model, 128)  # as many as it has: nothing to do
    assert config == model.config
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_the_real_bert(minilm):
    model = transformers.AutoModel.from_pretrained(minilm)
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    inputs = tokenizer("A sentence of a few words. " * 200, return_tensors="pt")
    assert inputs["input_ids"].shape[1] > 1000
    hea.convert(hea.extend_positions(model, 2048), "longformer", window_size=64)
    assert torch.isfinite(output(model, inputs)).all()
