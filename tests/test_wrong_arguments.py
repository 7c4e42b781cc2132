"""Arguments that are easy to get wrong: each is refused in one line that says what to give instead."""

import copy
import pickle
import re

import numpy as np
import pytest
import torch
from transformers import GPT2Config

import hf_efficient_attn as hea
from hf_efficient_attn.errors import did_you_mean, shown
from tiny_models import METHODS, tiny_batch, tiny_config, tiny_model

QUERY, KEY, VALUE = torch.zeros(3, 1, 2, 20, 4).unbind(0)
TENSORS = (QUERY, KEY, VALUE)
MASK = torch.ones(1, 20, dtype=torch.bool)
BATCH = {"input_ids": torch.ones(1, 40, dtype=torch.int64)}


def refused(work, *parts):
    """Check that something is refused in one short line with these parts."""
    with pytest.raises(hea.UnsupportedAttentionError) as error:
        work()
    message = str(error.value)
    assert "\n" not in message and len(message) < 450
    assert all(part in message for part in parts), message
    return message


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("attn_mask", MASK, "use attention_mask, bool (B, Nk)"),
        ("attn_mask", None, "use attention_mask, bool (B, Nk)"),
        ("mask", MASK, "use attention_mask"),
        ("key_padding_mask", ~MASK, "give its opposite"),
        ("enable_gqa", True, "may always have fewer heads"),
        ("dropout", 0.1, "use dropout_p"),
        ("scaling", 0.1, "use scale"),
        ("causal", True, "use is_causal"),
        ("output_attentions", True, "no matrix of weights"),
        ("position_bias", QUERY, "use distance_bias"),
        ("layers", [1], "belongs to hea.convert"),
        ("is_casual", True, "Did you mean 'is_causal'?"),
        ("attention_masks", MASK, "Did you mean 'attention_mask'?"),
    ],
)
def test_names_of_other_packages(method, name, value, advice):
    for call in (hea.attention, hea.naive_attention):
        refused(lambda: call(method, *TENSORS, **{name: value}), f"{method}: ", f"{name!r}", advice)  # noqa: B023
    functional = getattr(hea.functional, f"{method}_attention")
    refused(lambda: functional(*TENSORS, **{name: value}), f"{method}: ", f"{name!r}", advice)


def test_a_mask_by_position_as_in_pytorch():
    refused(lambda: hea.functional.nearfar_attention(*TENSORS, MASK), "by position", "attention_mask")
    with pytest.raises(hea.UnsupportedAttentionError, match="the naive form has no dropout"):
        hea.naive_attention("nearfar", *TENSORS, dropout_p=0.1)


def test_a_hyperparameter_may_have_the_name_of_an_argument_elsewhere(monkeypatch):
    names = (*hea.NearFarConfig.hyperparameters(), "causal")
    monkeypatch.setattr(hea.NearFarConfig, "hyperparameters", classmethod(lambda cls: names))
    with pytest.raises(TypeError, match="causal"):  # it reaches the config
        hea.attention("nearfar", *TENSORS, causal=3)


@pytest.mark.parametrize("call", [hea.attention, hea.naive_attention])
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("convert", [lambda x: x.numpy(), lambda x: x.tolist(), lambda x: None])
def test_arrays_and_lists_instead_of_tensors(call, number, convert):
    given = [convert(x) if i == number else x for i, x in enumerate(TENSORS)]
    name = ("query", "key", "value")[number]
    refused(lambda: call("nearfar", *given), f"nearfar: {name} must be a tensor", f"torch.as_tensor({name})")
    refused(lambda: call(hea.NearFarConfig(compute_dtype="bfloat16"), *given), f"{name} must be a tensor")


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"attention_mask": MASK.numpy()}, "give torch.as_tensor(attention_mask)"),
        ({"attention_mask": MASK.tolist()}, "give torch.as_tensor(attention_mask)"),
        ({"is_causal": "no"}, "is_causal must be True or False, not 'no'"),
        ({"is_causal": MASK}, "is_causal must be True or False, not "),
        ({"scale": "x"}, "scale must be a number, or None"),
        ({"dropout_p": None}, "dropout_p must be a number, not None"),
        ({"dropout_p": "x"}, "dropout_p must be a number, not 'x'"),
        ({"parameters": [MASK]}, "parameters must be a dictionary"),
        ({"distance_bias": np.zeros((2, 3))}, "distance_bias must be a tensor"),
    ],
)
def test_other_arguments_of_attention(options, advice):
    refused(lambda: hea.attention("longformer", *TENSORS, **options), "longformer: ", advice)
    assert hea.attention("longformer", *TENSORS, scale=np.float32(0.5), attention_mask=MASK).shape == QUERY.shape


def test_a_learned_parameter_must_be_a_tensor():
    name = hea.method_info("linformer").learned_parameters[0]
    refused(lambda: hea.attention("linformer", *TENSORS, **{name: [1.0]}), f"{name} must be a tensor, not a list")


def test_swapped_arguments():
    order = "before the tensors: hea.attention(method, query, key, value)"
    for config in ("nearfar", hea.NearFarConfig(), MASK):
        refused(lambda: hea.attention(*TENSORS, config), "a Tensor is no attention method", order)  # noqa: B023
    refused(lambda: hea.attention(QUERY, "nearfar", KEY, VALUE), order)
    refused(lambda: hea.naive_attention(*TENSORS, "nearfar"), order)
    model = tiny_model("bert")
    refused(lambda: hea.convert("nearfar", model), "a BertModel is no attention method", "hea.convert(model, method)")
    refused(lambda: hea.attention(model, *TENSORS), "a BertModel is no attention method")
    refused(lambda: hea.extend_positions(200, model), "holds no Transformers model")
    refused(lambda: hea.calibrate([BATCH], model, max_error=0.1), "batches must be a list", "not <BertModel>")


def classes(config_class):
    """Calls that are given a class instead of a config."""
    model = tiny_model("bert")
    return [
        lambda: hea.attention(config_class, *TENSORS),
        lambda: hea.attention(config_class, *TENSORS, seed=3),
        lambda: hea.naive_attention(config_class, *TENSORS),
        lambda: hea.EfficientAttentionConfig(config_class),
        lambda: hea.EfficientAttentionConfig.from_dict({"method": config_class}),
        lambda: hea.convert(model, config_class),
        lambda: hea.convert(model, config_class, layers=[0]),
        lambda: hea.convert(model, {"method": config_class}),
        lambda: hea.distill(model, config_class, [BATCH, BATCH], steps=1),
        lambda: hea.calibrate(model, [BATCH], max_error=0.1, methods=config_class),
        lambda: hea.calibrate(model, [BATCH], max_error=0.1, methods=[config_class]),
        lambda: hea.method_info(config_class),
        lambda: hea.UptrainingSchedule([(config_class, 0.5), ("sdpa", 1.0)]),
        lambda: hea.analysis.attention_error(config_class, *TENSORS),
    ]


@pytest.mark.parametrize("number", range(14))
def test_a_class_instead_of_a_config(number):
    refused(classes(hea.LinearConfig)[number], "LinearConfig is a class: give the config LinearConfig()", "'linear'")


def test_other_things_that_are_no_method():
    model = tiny_model("bert")
    refused(lambda: hea.method_info(hea.LinearConfig()), "is a config, but a name is needed here: give 'linear'")
    refused(lambda: hea.convert(model, hea.EfficientAttentionConfig), "EfficientAttentionConfig is a class")
    for value in (None, 3, ["nearfar"]):
        refused(lambda: hea.convert(model, value), f"unknown attention method {value!r}", "Known: ")  # noqa: B023
    refused(lambda: hea.attention("sdpa", *TENSORS), "'sdpa' is exact attention", "scaled_dot_product_attention")
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["NEARFAR", "NearFar", "Nearfar", "near_far", "nearfr"])
def test_names_in_another_case_are_suggested(name):
    for work in (hea.method_info, lambda name: hea.convert(tiny_model("bert"), name)):
        refused(lambda: work(name), f"unknown attention method {name!r}", "Did you mean 'nearfar'?")  # noqa: B023
    with pytest.raises(AttributeError, match="Did you mean 'nearfar_attention'"):
        getattr(hea.functional, f"{name}_attention")
    with pytest.raises(AttributeError, match="Did you mean 'KDEformerConfig'"):
        hea.KDEFormerConfig  # noqa: B018
    assert did_you_mean("xyz", ["abc"]) == did_you_mean(3, ["3"]) == ""


@pytest.mark.parametrize("method", METHODS)
def test_unknown_fields_of_a_config(method):
    config_class = hea.method_info(method).config_class
    known = config_class.hyperparameters()[0]
    refused(lambda: config_class(foo=1), f"{method}: unknown hyperparameter 'foo'", known)
    refused(lambda: config_class(**{f"{known}x": 1}), f"Did you mean {known!r}?")
    refused(lambda: config_class(64), f"{config_class.__name__} takes hyperparameters by name", f"{known}=...")
    for values in ([1], "nearfar", None):
        refused(lambda: config_class.from_dict(values), "must be a dictionary", config_class.__name__)  # noqa: B023
    config = config_class(seed=3)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config_class.from_dict(config.to_dict())


def test_unknown_fields_of_other_options():
    message = refused(lambda: hea.EfficientAttentionConfig("nearfar", num_samples=3), "unknown field 'num_samples'")
    assert "hyperparameters" in message and "entries" not in message
    refused(lambda: hea.EfficientAttentionConfig("nearfar", [1]), "hyperparameters must be a dictionary, not [1]")
    refused(lambda: hea.EfficientAttentionConfig.from_dict("nearfar"), "efficient_attention must be a dictionary")
    refused(lambda: hea.DistillationOptions(lr=1), "DistillationOptions: unknown field 'lr'", "learning_rate")
    refused(lambda: hea.FinetuningOptions(steps=1, step=3), "Did you mean 'steps'?")
    refused(lambda: hea.DistillationOptions(learning_rate="a"), "learning_rate='a' must be a number above 0")
    refused(lambda: hea.DistillationOptions(finetuning={"steps": 1}), "hea.FinetuningOptions(steps=...)")
    refused(lambda: hea.DistillationOptions(seed="a"), "seed='a' must be an integer")
    refused(lambda: hea.DistillationOptions(on_step=3), "on_step must be a function or None")
    refused(lambda: hea.FinetuningOptions(steps=1, lora_rank="4"), "lora_rank='4' must be 1 or more")
    model, data = tiny_model("bert"), [BATCH, BATCH]
    refused(
        lambda: hea.distill(model, "linear", data, steps=1, learning_rate=0.1),
        "options=hea.DistillationOptions(learning_rate=...)",
    )
    refused(lambda: hea.distill(model, "linear", data, steps=1, options={"seed": 1}), "options must be")
    refused(lambda: hea.UptrainingSchedule([("linear", 0.5, [1]), ("sdpa", 1.0)]), "hyperparameters of a stage must be")


@pytest.mark.parametrize("layers", [1, True, "0-1", {"layers": [0]}, 0.5])
def test_layers_that_are_no_list(layers):
    model, sentence = tiny_model("bert"), f"not {layers!r}: write layers=[...]"
    refused(lambda: hea.convert(model, "linear", layers=layers), sentence)
    refused(lambda: hea.convert(model, hea.LinearConfig(), layers=layers), sentence)
    refused(lambda: hea.convert(model, {"method": "linear"}, layers=layers), sentence)
    refused(lambda: hea.distill(model, "linear", [BATCH, BATCH], steps=1, layers=layers), sentence)
    assert model.config._attn_implementation == "sdpa"


def test_layers_by_other_sequences_work():
    for layers in (np.array([1]), torch.tensor([1]), range(1, 2), (1,)):
        assert hea.convert(tiny_model("bert"), "linear", layers=layers).config.efficient_attention["layers"] == [1]
    refused(lambda: hea.convert(tiny_model("bert"), "linear", layers=tiny_model("bert").encoder.layer), "<BertLayer>")


@pytest.mark.parametrize(
    "work",
    [
        lambda model: hea.convert(model, "nearfar"),
        lambda model: hea.calibrate(model, [BATCH], max_error=0.1),
        lambda model: hea.attention_error(model, BATCH),
        lambda model: hea.distill(model, "linear", [BATCH, BATCH], steps=1),
        lambda model: hea.extend_positions(model, 200),
    ],
)
def test_something_else_instead_of_a_model(work):
    class Trainer:
        model = tiny_model("bert")

    refused(lambda: work("bert-base"), "'bert-base' is a name and no model", "AutoModel.from_pretrained('bert-base')")
    refused(lambda: work(type(Trainer.model)), "BertModel is a class and no model", "BertModel.from_pretrained")
    refused(
        lambda: work(Trainer.model.config), "a BertConfig is a config and no model", "AutoModel.from_config(config)"
    )
    refused(lambda: work(Trainer()), "a Trainer holds no Transformers model", "give its attribute model")
    refused(lambda: work(3), "holds no Transformers model")


def test_wrong_constructions_of_a_cache():
    model = hea.convert(tiny_model("gpt2", head=True), "nearfar")
    refused(lambda: hea.NearFarCache(model), "takes the config of a model, not the model", "model.config")
    for value in ("gpt2", 256, hea.NearFarConfig(), GPT2Config, None, {"method": "nearfar"}):
        refused(lambda: hea.NearFarCache(value), "takes the config of a model, not ", "model.config")  # noqa: B023
    assert hea.NearFarCache(model.config, 64).layers


def test_calibration_on_sequences_within_the_budgets():
    """Padding does not count: these sequences have 20 tokens, and every method computes them exactly."""
    batch = tiny_batch("bert", length=70)
    batch["attention_mask"] = torch.zeros_like(batch["input_ids"])
    batch["attention_mask"][:, :20] = 1
    options = {"max_error": 0.2, "budgets": [32, 64]}
    for methods in (None, ["nearfar"], "auto"):
        refused(
            lambda: hea.calibrate(tiny_model("bert"), [batch], methods=methods, **options),  # noqa: B023
            "the longest sequence has 20 tokens without its padding. Budgets of 32, 64 columns save nothing",
            "computes a sequence within its budget exactly",
        )
    refused(lambda: hea.calibrate(tiny_model("bert"), [batch], max_error=0.2, budgets=8), "write budgets=[...]")
    refused(lambda: hea.calibrate(tiny_model("bert"), [batch], max_error=0.2, methods=3), "unknown attention method 3")
    longer = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    found = hea.calibrate(tiny_model("bert"), [batch, longer], max_error=5.0, methods="longformer", budgets=[32, 64])
    assert found.calibrated_length == 70


def test_calibration_on_sequences_that_the_default_budget_covers():
    """The default budgets compute 70 tokens exactly, which is refused; budgets that are given are measured."""
    batch, model = tiny_batch("bert", length=70), tiny_model("bert")
    refused(
        lambda: hea.calibrate(model, [batch], max_error=5.0, methods=["nearfar"]),
        "the longest sequence has 70 tokens without its padding, which nearfar (up to 256 tokens) computes exactly",
        "budgets=[...]",
    )
    assert hea.calibrate(model, [batch], max_error=5.0, methods=["nearfar"], budgets=[32]).method == "nearfar"
    assert hea.calibrate(model, [batch], max_error=9.0, methods=["nystromformer"]).method == "nystromformer"


def test_values_are_shown_in_one_line():
    for value in (torch.zeros(30, 4), tiny_model("bert"), tiny_config("bert"), "a\nb" * 100, list(range(1000))):
        assert "\n" not in shown(value) and len(shown(value)) < 110
    assert shown(tiny_model("bert")) == "<BertModel>" and shown("ab") == "'ab'"
    assert re.fullmatch(r"\[0, 1, .*\.\.\.", shown(list(range(1000))))
