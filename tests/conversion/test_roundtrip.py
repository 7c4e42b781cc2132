"""Checkpoints keep the method and its hyperparameters through any number of saves, and nothing if they are exact."""

import copy
import json
import pickle

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from each import close
from tiny_models import (
    DECODERS,
    FAMILIES,
    FAMILY_VALUES,
    METHODS,
    SMALL,
    output,
    tiny_batch,
    tiny_class,
    tiny_config,
    tiny_model,
)

OURS = {"attn_implementation", "efficient_attention"}
AUTO = {
    "ForMaskedLM": transformers.AutoModelForMaskedLM,
    "ForImageClassification": transformers.AutoModelForImageClassification,
    "LMHeadModel": transformers.AutoModelForCausalLM,
    "ForCausalLM": transformers.AutoModelForCausalLM,
}


def saved_config(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_three_saves_and_loads(family, method, tmp_path):
    model = tiny_model(family, method, head=True)
    inputs = tiny_batch(family, padding="right")
    first, choice = output(model, inputs), model.config.efficient_attention
    assert choice.items() >= {"method": method, **SMALL[method], "version": 1}.items()
    auto = AUTO[FAMILY_VALUES[family][2]]
    for turn, cls in enumerate((tiny_class(family, head=True), auto, auto)):
        folder = tmp_path / str(turn)
        model.save_pretrained(folder)
        assert saved_config(folder).items() >= {"attn_implementation": method, "efficient_attention": choice}.items()
        model = cls.from_pretrained(folder)
        assert (model.config._attn_implementation, model.config.efficient_attention) == (method, choice)
        assert torch.equal(output(model, inputs), first)
    if family in DECODERS:
        assert not OURS & set(json.loads((folder / "generation_config.json").read_text()))


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_back_to_exact_leaves_nothing_behind(family, tmp_path):
    model = tiny_model(family)
    inputs, before = tiny_batch(family), copy.deepcopy(model.state_dict())
    exact = output(model, inputs)
    model.save_pretrained(tmp_path / "exact")
    hea.convert(model, "kdeformer", layers=[1], **SMALL["kdeformer"]).save_pretrained(tmp_path / "ours")
    loaded = tiny_class(family).from_pretrained(tmp_path / "ours")
    assert not torch.equal(output(loaded, inputs), exact)
    hea.convert(loaded, "sdpa").save_pretrained(tmp_path / "back")
    assert saved_config(tmp_path / "back") == saved_config(tmp_path / "exact")
    again = tiny_class(family).from_pretrained(tmp_path / "back")
    assert again.config._attn_implementation == "sdpa"
    assert torch.equal(output(again, inputs), exact)
    close(dict(again.state_dict()), dict(before), 0)
    # Loaded as exact, and switched without `convert`, it saves clean too.
    for other in (
        tiny_class(family).from_pretrained(tmp_path / "ours", attn_implementation="sdpa"),
        tiny_class(family).from_pretrained(tmp_path / "ours"),
    ):
        other.set_attn_implementation("sdpa")
        assert torch.equal(output(other, inputs), exact)
        other.save_pretrained(tmp_path / "other")
        assert saved_config(tmp_path / "other") == saved_config(tmp_path / "exact")


def test_every_hyperparameter_is_written_with_its_value(tmp_path):
    """If a later release changes a default, saved models keep the old value."""
    model = tiny_model("bert", seed=1)
    hea.convert(model, "kdeformer", num_samples=8).save_pretrained(tmp_path)
    written = saved_config(tmp_path)["efficient_attention"]
    assert written == {**hea.KDEformerConfig(num_samples=8).to_dict(), "version": 1}
    assert "layers" not in written
    model.set_attn_implementation("performer")  # by name alone: its defaults
    model.save_pretrained(tmp_path)
    assert saved_config(tmp_path)["efficient_attention"] == {**hea.PerformerConfig().to_dict(), "version": 1}


def test_layers_and_mixes_are_kept(tmp_path):
    inputs = tiny_batch("gpt2")
    mix = [{"layers": [1], "method": "performer", "num_features": 8}, {"layers": [0], "method": "linear"}]
    for layers, method in (([1], "longformer"), (mix, "performer")):
        model = hea.convert(tiny_model("gpt2"), hea.EfficientAttentionConfig(method, layers=layers))
        expected = output(model, inputs)
        for turn in range(2):
            model.save_pretrained(tmp_path / f"{method}{turn}")
            model = transformers.AutoModel.from_pretrained(tmp_path / f"{method}{turn}")
        assert torch.equal(output(model, inputs), expected)
        assert hea.EfficientAttentionConfig.from_dict(model.config.efficient_attention).layers is not None
    one, other = hea.PerformerConfig(num_features=8).to_dict(), hea.LinearConfig().to_dict()
    written = saved_config(tmp_path / "performer1")["efficient_attention"]
    layers = [{"layers": [1], **one}, {"layers": [0], **other}]
    assert written == {"method": "performer", "layers": layers, "version": 1}


def test_a_checkpoint_loaded_with_another_method(tmp_path):
    hea.convert(tiny_model("bert"), "longformer", window_size=3).save_pretrained(tmp_path)
    load = transformers.AutoModel.from_pretrained
    other = load(tmp_path, attn_implementation="kdeformer", efficient_attention={"num_samples": 8})
    assert other.config.efficient_attention.items() >= {"method": "kdeformer", "num_samples": 8}.items()
    other = load(tmp_path, attn_implementation="performer")
    other.save_pretrained(tmp_path / "performer")
    assert saved_config(tmp_path / "performer")["efficient_attention"]["method"] == "performer"
    again = load(tmp_path, efficient_attention={"window_size": 5})
    assert again.config.efficient_attention["window_size"] == 5


def test_a_checkpoint_that_cannot_be_read_is_refused_with_the_reason(tmp_path):
    hea.convert(tiny_model("bert"), "longformer").save_pretrained(tmp_path)
    config = saved_config(tmp_path)
    for change, words in (
        ({"version": 3, "new_option": 1}, "newer hf_efficient_attn.*upgrade"),
        ({"window": 3}, "Did you mean 'window_size'"),
        ({"method": "longfomer"}, "Did you mean 'longformer'"),
        ({"window_size": -1}, "at least 0"),
    ):
        changed = {**config, "efficient_attention": {**config["efficient_attention"], **change}}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        for load in (transformers.AutoModel, transformers.AutoConfig, transformers.BertModel, transformers.BertConfig):
            with pytest.raises(hea.UnsupportedAttentionError, match=words):
                load.from_pretrained(tmp_path)


def test_configs_copy_compare_and_pickle(tmp_path):
    config = tiny_config("llama", "longformer")
    choice = config.efficient_attention
    assert json.loads(json.dumps(choice)) == choice
    for again in (
        copy.deepcopy(config),
        copy.copy(config),
        pickle.loads(pickle.dumps(config)),
        transformers.LlamaConfig.from_dict(config.to_dict()),
        transformers.LlamaConfig(**config.to_diff_dict()),
    ):
        assert (again._attn_implementation, again.efficient_attention) == ("longformer", choice)
        with pytest.raises(hea.UnsupportedAttentionError, match="read-only"):
            again.efficient_attention.update(window_size=3)
    config.save_pretrained(tmp_path)
    assert transformers.AutoConfig.from_pretrained(tmp_path).efficient_attention == choice
    assert repr(config).count("longformer") == 2
    settings = hea.EfficientAttentionConfig("longformer", SMALL["longformer"])
    assert settings.to_dict() == choice and hea.EfficientAttentionConfig.from_dict(choice) == settings
    assert len({settings, hea.EfficientAttentionConfig.from_dict(choice)}) == 1


def test_models_copy_and_pickle(tmp_path):
    model, inputs = tiny_model("vit", "kdeformer"), tiny_batch("vit")
    expected = output(model, inputs)
    assert torch.equal(output(copy.deepcopy(model), inputs), expected)
    torch.save(model, tmp_path / "model.pt")
    assert torch.equal(output(torch.load(tmp_path / "model.pt", weights_only=False), inputs), expected)
