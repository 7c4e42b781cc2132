"""`extend_positions`, and inputs longer than the table: models with learned positions, their buffers and configs."""

import copy
import io

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
    model, offset = tiny_model(family, head=head, **({"n_ctx": 128} if family == "gpt2" else {})), OFFSET.get(family, 0)
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
    assert family != "gpt2" or (model.config.n_positions, model.config.n_ctx) == (300, 300)
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


def test_types_and_devices_stay():
    model = tiny_model("bert").to(torch.bfloat16)
    table(model).weight.requires_grad_(False)
    hea.extend_positions(model, 200, method="interpolate")
    weight = table(model).weight
    assert (weight.dtype, weight.requires_grad) == (torch.bfloat16, False)
    assert model.embeddings.position_ids.tolist() == [list(range(200))]
    assert model.embeddings.token_type_ids.shape == (1, 200)
    assert "embeddings.position_ids" not in model.state_dict()


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


# Tables with entries before position 0, which the config does not count


def other_model(family):
    """A tiny OPT or BART with 128 positions."""
    sizes = {"vocab_size": 60, "max_position_embeddings": 128, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
    torch.manual_seed(0)
    if family == "opt":
        sizes |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 48}
        return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, word_embed_proj_dim=32)).eval()
    sizes |= {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(**sizes, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48)
    return transformers.BartForConditionalGeneration(config).eval()


@pytest.mark.parametrize("family", ["opt", "bart"])
def test_tables_with_an_offset(family, tmp_path):
    model, short, long = other_model(family), tiny_batch("bert", length=128), tiny_batch("bert", length=300)
    before = output(model, short)
    old = {name: x.clone() for name, x in model.state_dict().items() if "embed_positions" in name}
    hea.extend_positions(model, 300)
    assert torch.equal(output(model, short), before)
    for name, table in old.items():
        new = model.state_dict()[name]
        assert new.shape[0] == 302 and torch.equal(new[:130], table) and torch.equal(new[130:258], table[2:])
    assert len(old) == {"opt": 1, "bart": 2}[family] and model.config.max_position_embeddings == 300
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(output(again, long), output(model, long))


# Inputs that are longer than the table

MODELS = [*LEARNED, "opt", "bart"]
MESSAGE = r"the input has {} tokens and \w+ has 128 positions.*hf_efficient_attn\.extend_positions\(model, {}\)"


def long_model(family):
    return tiny_model(family, head=True) if family in LEARNED else other_model(family)


@pytest.mark.parametrize("family", MODELS)
def test_a_converted_model_explains_that_the_input_is_too_long(family, tmp_path):
    model, long, short = long_model(family), tiny_batch("bert", length=150), tiny_batch("bert", length=128)
    hea.convert(model, "linear" if family in ("gpt2", "opt") else "longformer")
    output(model, short)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    model.save_pretrained(tmp_path)
    for same in (
        model,
        copy.deepcopy(model),
        torch.load(stream, weights_only=False),
        type(model).from_pretrained(tmp_path),
    ):
        with pytest.raises(Refused, match=MESSAGE.format(150, 150)):
            output(same, long)
    embeds = model.get_input_embeddings()(long["input_ids"])
    with pytest.raises(Refused, match=MESSAGE.format(150, 150)):
        output(model, {"inputs_embeds": embeds, **({"decoder_inputs_embeds": embeds} if family == "bart" else {})})
    # What the message says helps, in each copy of the model.
    copied = copy.deepcopy(model)
    output(hea.extend_positions(model, 150), long)
    with pytest.raises(Refused, match=MESSAGE.format(150, 150)):
        output(copied, long)
    # Exact again, the model is Transformers' own.
    with pytest.raises((IndexError, RuntimeError)):
        output(hea.convert(copied, "sdpa"), long)


def test_generation_is_refused_where_it_exceeds_the_table():
    model, ids = hea.convert(long_model("gpt2"), "linear"), tiny_batch("bert", length=120)["input_ids"]
    options = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
    for use_cache in (True, False):
        with pytest.raises(Refused, match=MESSAGE.format(129, 129)):
            model.generate(ids, use_cache=use_cache, **options)
    assert model.generate(ids[:, :89], **options).shape == (2, 129)
    # Padding on the left takes no positions.
    mask = torch.ones_like(ids)
    mask[:, :40] = 0
    assert model.generate(ids, attention_mask=mask, **options).shape == (2, 160)


def test_positions_are_counted_without_padding_where_the_model_does():
    model, ids = hea.convert(tiny_model("roberta"), "longformer"), tiny_batch("roberta", length=150)["input_ids"]
    ids[:, 128:] = model.config.pad_token_id
    assert torch.isfinite(output(model, {"input_ids": ids})).all()
    ids[1, 128:131] = 7
    with pytest.raises(Refused, match=MESSAGE.format(131, 131)):
        output(model, {"input_ids": ids})
    bert, inputs = hea.convert(tiny_model("bert"), "longformer"), tiny_batch("bert", length=150)
    positions = torch.arange(150)[None].clamp(max=127)
    inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    assert torch.isfinite(output(bert, {**inputs, "position_ids": positions})).all()
    with pytest.raises(Refused, match=MESSAGE.format(129, 129)):
        output(bert, {**inputs, "position_ids": positions + 1})


def test_a_table_can_be_replaced():
    model = hea.convert(tiny_model("gpt2", n_layer=1), "linear")
    model.wpe = torch.nn.Embedding(200, 32)
    assert output(model, tiny_batch("gpt2", length=190)).shape == (2, 190, 32)
    with pytest.raises(Refused, match="201 tokens and GPT2Model has 200 positions"):
        output(model, tiny_batch("gpt2", length=201))
