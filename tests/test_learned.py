"""Learned parameters in models: made, started, trained, saved, loaded, and gone after the switch to another method."""

import copy

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from hf_efficient_attn.integration.learned import LearnedParameters
from hf_efficient_attn.methods.base import get_method
from tiny_models import output, tiny_batch, tiny_class, tiny_config, tiny_model

FAMILIES = ["bert", "roberta", "distilbert", "vit", "deit"]
LEARNING = {
    "linformer": {"projection_dim": 16, "share": "none"},
    "nystromformer": {"num_landmarks": 16, "conv_kernel_size": 3},
}
each = pytest.mark.parametrize("method", LEARNING)


def learned_in(model) -> dict[str, LearnedParameters]:
    return {name: m for name, m in model.named_modules() if isinstance(m, LearnedParameters)}


def convert(model, method: str, **options):
    return hea.convert(model, method, **LEARNING[method], **options)


def shake(model) -> None:
    """Give every learned parameter a value that no start has."""
    with torch.no_grad():
        for module in learned_in(model).values():
            for parameter in module.parameters():
                parameter += 0.3 * torch.randn_like(parameter)


def missing_keys(info) -> set:
    return set(info["missing_keys"]) | set(info["unexpected_keys"])


@each
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_has_its_own(family, method):
    model = convert(tiny_model(family), method)
    found = list(learned_in(model).values())
    assert len(found) == 2
    assert set(dict(found[0].named_parameters())) == set(get_method(method).info.learned_parameters)
    assert not {id(p) for p in found[0].parameters()} & {id(p) for p in found[1].parameters()}
    output(model, tiny_batch(family, padding="right"))


@each
@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_learned_is_saved_and_loaded(family, method, tmp_path):
    model, inputs = convert(tiny_model(family, head=True), method), tiny_batch(family, padding="right")
    start = output(model, inputs)
    shake(model)
    first = output(model, inputs)
    assert not torch.equal(first, start)
    for turn in range(2):
        model.save_pretrained(tmp_path / str(turn))
        model, info = tiny_class(family, head=True).from_pretrained(tmp_path / str(turn), output_loading_info=True)
        assert not missing_keys(info)
        assert torch.equal(output(model, inputs), first)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_without_them_starts_as_conversion_does(method, dtype, tmp_path):
    exact = tiny_model("bert", head=True).to(dtype)
    exact.save_pretrained(tmp_path)
    choice = {"method": method, **LEARNING[method]}
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(
        tmp_path, attn_implementation=method, efficient_attention=choice, dtype=dtype
    )
    converted = convert(copy.deepcopy(exact), method)
    for name, module in learned_in(loaded).items():
        other = learned_in(converted)[name]
        for parameter, expected in zip(module.parameters(), other.parameters(), strict=True):
            assert parameter.dtype == expected.dtype == dtype
            assert torch.equal(parameter, expected)
    inputs = tiny_batch("bert", padding="right")
    assert torch.equal(output(loaded, inputs), output(converted, inputs))


@each
def test_made_by_constructor_and_from_config(method):
    config = tiny_config("bert")
    config.efficient_attention = {"method": method, **LEARNING[method]}
    for model in (tiny_class("bert")(config), transformers.AutoModel.from_config(config)):
        start = next(iter(learned_in(model).values()))
        for name, value in start.start_values().items():
            assert torch.equal(getattr(start, name), value)


@each
def test_they_train(method):
    model = convert(tiny_model("bert", head=True), method).train()
    shake(model)
    model(**tiny_batch("bert", padding="right")).logits.square().mean().backward()
    for module in learned_in(model).values():
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@each
def test_they_go_with_the_method(method):
    model = tiny_model("bert")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    inputs = tiny_batch("bert")
    exact = output(model, inputs)
    for back in (lambda: hea.convert(model, "sdpa"), lambda: model.set_attn_implementation("sdpa")):
        convert(model, method)
        shake(model)
        back()
        assert not learned_in(model)
        assert model.state_dict().keys() == before.keys()
        assert torch.equal(output(model, inputs), exact)
    convert(model, method)
    hea.convert(model, "kdeformer")
    assert not learned_in(model)


@each
def test_some_layers(method, tmp_path):
    model = convert(tiny_model("bert"), method, layers=[1])
    assert [name.split(".")[2] for name in learned_in(model)] == ["1"]
    shake(model)
    inputs = tiny_batch("bert")
    first = output(model, inputs)
    model.save_pretrained(tmp_path)
    assert torch.equal(output(tiny_class("bert").from_pretrained(tmp_path), inputs), first)
    hea.convert(model, {"method": method, "layers": [0, 1], **LEARNING[method]})
    kept = learned_in(model)
    assert len(kept) == 2 and torch.equal(output(model, inputs), output(model, inputs))


@each
def test_the_same_choice_again_keeps_what_was_learned(method):
    model = convert(tiny_model("bert"), method)
    shake(model)
    inputs = tiny_batch("bert")
    first = output(model, inputs)
    assert torch.equal(output(convert(model, method), inputs), first)


def test_sequences_longer_than_the_tables_are_refused():
    model = convert(tiny_model("bert"), "linformer", max_length=20)
    with pytest.raises(hea.UnsupportedAttentionError, match="max_length"):
        output(model, tiny_batch("bert"))


def test_positions_grow_before_the_tables():
    model = convert(tiny_model("bert"), "linformer")
    with pytest.raises(hea.UnsupportedAttentionError, match="convert it to 'sdpa'"):
        hea.extend_positions(model, 300)
    hea.extend_positions(hea.convert(model, "sdpa"), 300)
    tables = learned_in(convert(model, "linformer"))
    assert all(m.key_projection.shape[1] == 300 for m in tables.values())
    hea.extend_positions(convert(model, "nystromformer"), 310)
