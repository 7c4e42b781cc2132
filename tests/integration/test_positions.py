"""`extend_positions`, and inputs longer than the table: models with learned positions, their buffers and configs."""

import contextlib
import copy

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from each import refuses
from helpers.encoder_decoders import composite, tiny
from helpers.model_types import sizes
from hf_efficient_attn.evaluation.data import allow_length
from tiny_models import generate, output, reloaded, tiny_batch, tiny_model

LEARNED = ["bert", "roberta", "distilbert", "gpt2"]
MODELS = [*LEARNED, "opt", "bart"]
# Entries of a table before position 0.
OFFSET = {"roberta": 2, "opt": 2, "bart": 2}
MESSAGE = r"the input has {0} tokens and \w+ has 128 positions.*hf_efficient_attn\.extend_positions\(model, {0}\)"


def model_of(family: str, head: bool = True):
    """A tiny model with 128 positions."""
    if family in LEARNED:
        return tiny_model(family, head=head, **({"n_ctx": 128} if family == "gpt2" else {}))
    if family == "gpt_neo":
        own = {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 128, "window_size": 150}
        return transformers.GPTNeoModel(transformers.GPTNeoConfig(**sizes(transformers.GPTNeoConfig, **own))).eval()
    return tiny({"opt": "OPT"}.get(family, family))


def esm():
    values = sizes(transformers.EsmConfig, position_embedding_type="rotary", max_position_embeddings=34)
    return transformers.EsmModel(transformers.EsmConfig(**values)).eval()


def test_computed_positions_take_any_length():
    model = esm()
    assert "rotary" in allow_length(model, 64)
    hea.convert(model, "longformer", window_size=8)
    assert output(model, {"input_ids": torch.randint(4, 24, (1, 64))}).isfinite().all()


def tables(model) -> list[torch.nn.Embedding]:
    names = ("position_embeddings", "wpe", "embed_positions")
    return [module for name, module in model.named_modules() if name.endswith(names)]


@pytest.mark.parametrize("head", [False, True], ids=["body", "with-head"])
@pytest.mark.parametrize("family", [*MODELS, "gpt_neo"])
def test_tiling(family, head, tmp_path):
    model, offset, short = model_of(family, head), OFFSET.get(family, 0), tiny_batch("bert", length=128)
    long = tiny_batch("bert", length=300, padding="right")
    old, before = [table.weight.detach().clone() for table in tables(model)], output(model, short)
    refuses(None, output, model, long, error=(IndexError, RuntimeError))
    assert hea.extend_positions(model, 300) is model
    assert len(old) == (2 if family == "bart" else 1)
    for table, was in zip(tables(model), old, strict=True):
        new = table.weight
        assert new.shape == (300 + offset, 32) and new.requires_grad
        assert torch.equal(new[:offset], was[:offset])
        assert torch.equal(new[offset:], was[offset:][torch.arange(300) % 128])
    assert torch.equal(output(model, short), before)
    assert model.config.max_position_embeddings == 300 + (2 if family == "roberta" else 0)
    assert family != "gpt2" or (model.config.n_positions, model.config.n_ctx) == (300, 300)
    longer = output(model, long)
    again = reloaded(model, tmp_path)
    assert torch.equal(output(again, long), longer)
    buffers = dict(again.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    # The gradient reaches the new positions.
    model(**long)[0].square().sum().backward()
    assert all(table.weight.grad[offset + 290].abs().sum() > 0 for table in tables(model))


@pytest.mark.parametrize("family", LEARNED)
def test_interpolating(family):
    model, offset = tiny_model(family), OFFSET.get(family, 0)
    old = tables(model)[0].weight.detach().clone()[offset:]
    model = hea.extend_positions(model.to(torch.float64), 1 + 2 * 127, method="interpolate")
    new = tables(model)[0].weight[offset:]
    assert new.dtype == torch.float64 and new.shape[0] == 255
    torch.testing.assert_close(new[::2].float(), old)
    torch.testing.assert_close(new[1::2].float(), (old[1:] + old[:-1]) / 2)
    assert torch.isfinite(output(model, tiny_batch(family, length=255))).all()


def test_types_and_devices_stay():
    model = tiny_model("bert").to(torch.bfloat16)
    tables(model)[0].weight.requires_grad_(False)
    hea.extend_positions(model, 200, method="interpolate")
    weight = tables(model)[0].weight
    assert (weight.dtype, weight.requires_grad) == (torch.bfloat16, False)
    assert model.embeddings.position_ids.tolist() == [list(range(200))]
    assert model.embeddings.token_type_ids.shape == (1, 200)
    assert "embeddings.position_ids" not in model.state_dict()


def test_wrappers_and_composites():
    both = composite()
    hea.extend_positions(torch.nn.ModuleDict({"model": both}), 200)
    for part in (both.encoder, both.decoder):
        assert part.config.max_position_embeddings == 200
    assert both.encoder.embeddings.position_embeddings.num_embeddings == 200
    assert both.decoder.bert.embeddings.position_embeddings.num_embeddings == 200


@pytest.mark.parametrize(
    ("make", "length", "method", "words"),
    [
        (lambda: tiny_model("llama"), 300, "tile", "rotary"),
        (lambda: esm(), 300, "tile", "rotary"),
        (lambda: tiny_model("vit"), 300, "tile", "interpolate_pos_encoding"),
        (lambda: tiny("T5"), 300, "tile", "no learned table"),
        (lambda: tiny_model("roberta"), 127, "tile", "takes 128 tokens"),
        (lambda: tiny_model("roberta"), 0, "tile", "must be 1 or more"),
        (lambda: tiny_model("roberta"), 200.0, "tile", "must be 1 or more"),
        (lambda: tiny_model("roberta"), True, "tile", "must be 1 or more"),
        (lambda: tiny_model("roberta"), 200, "tiles", "Did you mean 'tile'"),
        (lambda: tiny_model("roberta"), 128, "tile", None),  # as many as it has: nothing to do
    ],
)
def test_what_is_refused_changes_nothing(make, length, method, words):
    model = make()
    before, config = copy.deepcopy(model.state_dict()), copy.deepcopy(model.config)
    with contextlib.nullcontext() if words is None else pytest.raises(hea.UnsupportedAttentionError, match=words):
        hea.extend_positions(model, length, method=method)
    assert config == model.config
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


# Inputs that are longer than the table


@pytest.mark.parametrize("family", MODELS)
def test_a_converted_model_explains_that_the_input_is_too_long(family, tmp_path):
    model, long, short = model_of(family), tiny_batch("bert", length=150), tiny_batch("bert", length=128)
    hea.convert(model, "linear" if family in ("gpt2", "opt") else "longformer")
    output(model, short)
    torch.save(model, tmp_path / "model.pt")
    copied, pickled = copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)
    for same in (model, copied, pickled, reloaded(model, tmp_path)):
        refuses(MESSAGE.format(150), output, same, long)
    embeds = model.get_input_embeddings()(long["input_ids"])
    embedded = {"inputs_embeds": embeds, **({"decoder_inputs_embeds": embeds} if family == "bart" else {})}
    refuses(MESSAGE.format(150), output, model, embedded)
    # What the message says helps, in each copy of the model.
    output(hea.extend_positions(model, 150), long)
    refuses(MESSAGE.format(150), output, copied, long)
    # Exact again, the model is Transformers' own.
    refuses(None, output, hea.convert(copied, "sdpa"), long, error=(IndexError, RuntimeError))


def test_generation_is_refused_where_it_exceeds_the_table():
    model, ids = hea.convert(model_of("gpt2"), "linear"), tiny_batch("bert", length=120)["input_ids"]
    for options in ({"use_cache": True}, {"use_cache": False}, {"cache_implementation": "static"}):
        refuses(MESSAGE.format(129), generate, model, {"input_ids": ids}, 12, **options)
        assert generate(model, {"input_ids": ids[:, :117]}, 12, **options).shape == (2, 12)
    # Padding on the left takes no positions.
    mask = torch.ones_like(ids)
    mask[:, :12] = 0
    assert generate(model, {"input_ids": ids, "attention_mask": mask}, 12).shape == (2, 12)


def test_positions_are_counted_without_padding_where_the_model_does():
    model, ids = hea.convert(tiny_model("roberta"), "longformer"), tiny_batch("roberta", length=150)["input_ids"]
    ids[:, 128:] = model.config.pad_token_id
    assert torch.isfinite(output(model, {"input_ids": ids})).all()
    ids[1, 128:131] = 7
    refuses(MESSAGE.format(131), output, model, {"input_ids": ids})
    bert, inputs = hea.convert(tiny_model("bert"), "longformer"), tiny_batch("bert", length=150)
    positions = torch.arange(150)[None].clamp(max=127)
    inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    assert torch.isfinite(output(bert, {**inputs, "position_ids": positions})).all()
    refuses(MESSAGE.format(129), output, bert, {**inputs, "position_ids": positions + 1})


def test_a_table_can_be_replaced():
    model = hea.convert(tiny_model("gpt2", n_layer=1), "linear")
    model.wpe = torch.nn.Embedding(200, 32)
    assert output(model, tiny_batch("gpt2", length=190)).shape == (2, 190, 32)
    refuses("201 tokens and GPT2Model has 200 positions", output, model, tiny_batch("gpt2", length=201))
