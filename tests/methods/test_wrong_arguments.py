"""Arguments that are easy to get wrong: each is refused in one line that says what to give instead."""

import re
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from transformers import BertModel, GPT2Config

import hf_efficient_attn as hea
from each import refuses
from hf_efficient_attn.errors import shown
from tiny_models import METHODS, tiny_config, tiny_model

QUERY, KEY, VALUE = torch.zeros(3, 2, 4, 20, 4).unbind(0)
TENSORS = (QUERY, KEY, VALUE)
MASK = torch.ones(2, 20, dtype=torch.bool)
BATCH = {"input_ids": torch.ones(1, 40, dtype=torch.int64)}


def refused(work, *parts):
    """Check that something is refused in one short line with these parts."""
    message = refuses(None, work)
    assert "\n" not in message and len(message) < 450
    assert all(part in message for part in parts), message
    return message


BOOL = "attention_mask must be bool (2, 20), True = attend; got "
DTYPE = "the same floating-point dtype; got "
# (changed arguments of a call, parts of the message)
CALLS = [
    *(({name: convert(QUERY)}, f"{name} must be a tensor", f"torch.as_tensor({name})")
      for name in ("query", "key", "value") for convert in (lambda x: x.numpy(), lambda x: x.tolist(), lambda x: None)),
    ({"attention_mask": MASK.numpy()}, "give torch.as_tensor(attention_mask)"),
    *(({"is_causal": x}, "is_causal must be True or False, not ") for x in ("no", MASK)),
    ({"scale": "x"}, "scale must be a number ("),
    *(({"scale": torch.ones(n, requires_grad=n == 1)}, "multiply the query by a learned one") for n in (1, 4)),
    ({"dropout_p": None}, "dropout_p must be a number, not None"),
    *(({"parameters": x}, "parameters must be None, or a dictionary") for x in ({"foo": MASK}, [MASK])),
    ({"attn_mask": MASK}, "'attn_mask'", "use attention_mask, bool (B, Nk)"),
    ({"mask": MASK}, "'mask'", "use attention_mask"),
    ({"key_padding_mask": ~MASK}, "'key_padding_mask'", "give its opposite"),
    ({"enable_gqa": True}, "'enable_gqa'", "may always have fewer heads"),
    *(({other: 0.1}, f"'{other}'", f"use {name}")
      for other, name in (("dropout", "dropout_p"), ("scaling", "scale"), ("causal", "is_causal"))),
    ({"output_attentions": True}, "'output_attentions'", "no matrix of weights"),
    ({"position_bias": QUERY}, "'position_bias'", "use distance_bias"),
    ({"layers": [1]}, "'layers'", "belongs to hea.convert"),
    ({"is_casual": True}, "'is_casual'", "Did you mean 'is_causal'?"),
    ({"attention_masks": MASK}, "'attention_masks'", "Did you mean 'attention_mask'?"),
    ({"qqq": 1}, "unknown hyperparameter 'qqq'. Known: "),
    ({"attention_mask": MASK[:, None, None]}, "4-D attention mask", "bool mask of shape (2, 20)", "'sdpa'"),
    ({"attention_mask": MASK.long()}, BOOL + "torch.int64"),
    *(({"attention_mask": mask}, BOOL) for mask in (MASK[:, 1:], MASK[:1], MASK[0], MASK[:, :, None])),
    ({"query": QUERY[0], "key": KEY[0], "value": VALUE[0]}, "(batch, num_heads, length, head_dim)"),
    ({"key": KEY[:, :, 1:]}, "do not fit together"),
    ({"key": torch.cat((KEY, KEY), 3)}, "do not fit together"),
    ({"query": QUERY[:1]}, "do not fit together"),
    ({"key": KEY[:, :3], "value": VALUE[:, :3]}, "key heads, 3, must divide the number of query heads, 4"),
    ({"key": KEY[:, :0], "value": VALUE[:, :0]}, "number of key heads, 0"),
    ({"key": KEY.double()}, DTYPE + "torch.float32, torch.float64, torch.float32"),
    ({"value": VALUE.half()}, DTYPE),
    ({"query": QUERY.int(), "key": KEY.int(), "value": VALUE.int()}, DTYPE),
    *(({"dropout_p": p}, f"dropout_p={p} must be at least 0 and below 1") for p in (-0.1, 1.0, torch.nan)),
    *(({"seed": x}, f"seed must be an integer or None, not {x!r}") for x in ("0", 1.5, [1])),
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_arguments_of_a_call(method):
    arguments = dict(zip(("query", "key", "value"), TENSORS, strict=True))
    config = hea.method_info(method).config_class()
    *_, last = config.hyperparameters()[:-1]
    calls = [*CALLS, ({last + "x": 1}, f"unknown hyperparameter '{last}x'. Did you mean '{last}'?", "Known: ")]
    if not config.causal:
        calls.append(({"is_causal": True}, "it has no causal form. Methods that have one: ", "longformer"))
    if config.needs_square:
        calls.append(({"query": QUERY[:, :, 1:]}, "it needs as many queries as keys; got 19 and 20"))
    forms = [partial(hea.attention, method), getattr(hea.functional, f"{method}_attention")]
    for (changes, *parts), form in product(calls, [*forms, partial(hea.naive_attention, method)]):
        if form in forms or "dropout_p" not in changes:
            refused(lambda: form(**arguments | changes), f"{method}: ", *parts)  # noqa: B023
    refused(lambda: hea.attention(method + "x", *TENSORS), f"unknown attention method '{method}x'", f"mean '{method}'?")
    for budget in (0, -3, 2.5, True, "64", None):
        refused(lambda: config.with_budget(budget), f"a budget of {budget!r} columns is not possible")  # noqa: B023


def distillation(**options):
    return lambda: hea.DistillationOptions(**options)


def bert(work):
    """A call that is given a tiny model, which must stay as it is."""

    def call():
        model = tiny_model("bert")
        try:
            work(model)
        finally:
            assert model.config._attn_implementation == "sdpa"

    return call


# What takes a model, and what is no model with parts of the message.
TAKE_MODELS = [
    lambda model: hea.convert(model, "nearfar"),
    lambda model: hea.calibrate(model, [BATCH], max_error=0.1),
    lambda model: hea.attention_error(model, BATCH),
    lambda model: hea.distill(model, "linear", TWO, steps=1),
    lambda model: hea.extend_positions(model, 200),
]
NO_MODELS = [
    ("bert-base", "'bert-base' is a name and no model", "AutoModel.from_pretrained('bert-base')"),
    (BertModel, "BertModel is a class and no model", "BertModel.from_pretrained"),
    (tiny_config("bert"), "a BertConfig is a config and no model", "AutoModel.from_config(config)"),
    (type("Trainer", (), {"model": None})(), "a Trainer holds no Transformers model", "give its attribute model"),
    (3, "holds no Transformers model"),
]
ORDER = "before the tensors: hea.attention(method, query, key, value)"
TWO = [BATCH, BATCH]
# (what must be refused, parts of the message)
REFUSED = [
    (lambda: hea.functional.nearfar_attention(*TENSORS, MASK), "by position", "attention_mask"),
    (lambda: hea.naive_attention("nearfar", *TENSORS, dropout_p=0.1), "the naive form has no dropout"),
    *((work, "LinearConfig is a class: give the config LinearConfig()", "'linear'") for work in (
        lambda: hea.attention(hea.LinearConfig, *TENSORS, seed=3),
        lambda: hea.EfficientAttentionConfig.from_dict({"method": hea.LinearConfig}),
        bert(lambda m: hea.convert(m, {"method": hea.LinearConfig})),
        bert(lambda m: hea.distill(m, hea.LinearConfig, TWO, steps=1)),
        bert(lambda m: hea.calibrate(m, TWO, max_error=0.1, methods=[hea.LinearConfig])),
        lambda: hea.method_info(hea.LinearConfig),
        lambda: hea.UptrainingSchedule([(hea.LinearConfig, 0.5), ("sdpa", 1.0)]),
    )),
    *((lambda x=x: hea.method_info(x), f"unknown attention method {x!r}", "Did you mean 'nearfar'?")
      for x in ("NEARFAR", "NearFar", "near_far", "nearfr")),
    (lambda: hea.attention("linear", QUERY[:, :, 1:], KEY, VALUE, window_size=4), "as many queries as keys; got 19"),
    *((lambda x=x: hea.attention("longformer", *TENSORS, **x), "longformer: ", message) for x, message in (
        ({"parameters": [MASK]}, "parameters must be None, or a dictionary"),
        ({"distance_bias": np.zeros((2, 3))}, "distance_bias must be a tensor"),
    )),
    (lambda: hea.attention("linformer", *TENSORS, key_projection=[1.0]), "must be a tensor, not a list"),
    *((lambda x=x: hea.attention(*TENSORS, x), "a Tensor is no attention method", ORDER)
      for x in ("nearfar", hea.NearFarConfig(), MASK)),
    (lambda: hea.attention(QUERY, "nearfar", KEY, VALUE), ORDER),
    (lambda: hea.naive_attention(*TENSORS, "nearfar"), ORDER),
    (bert(lambda m: hea.convert("nearfar", m)), "a BertModel is no attention method", "hea.convert(model, method)"),
    (bert(lambda m: hea.attention(m, *TENSORS)), "a BertModel is no attention method"),
    (bert(lambda m: hea.extend_positions(200, m)), "holds no Transformers model"),
    (bert(lambda m: hea.calibrate([BATCH], m, max_error=0.1)), "batches must be a list", "not <BertModel>"),
    (lambda: hea.method_info(hea.LinearConfig()), "is a config, but a name is needed here: give 'linear'"),
    (bert(lambda m: hea.convert(m, hea.EfficientAttentionConfig)), "EfficientAttentionConfig is a class"),
    *((bert(lambda m, x=x: hea.convert(m, x)), f"unknown attention method {x!r}", "Known: ")
      for x in (None, 3, ["nearfar"])),
    (lambda: hea.attention("sdpa", *TENSORS), "'sdpa' is exact attention", "scaled_dot_product_attention"),
    (lambda: hea.EfficientAttentionConfig("nearfar", num_samples=3), "unknown field 'num_samples'", "hyperparameters"),
    (lambda: hea.EfficientAttentionConfig("nearfar", [1]), "hyperparameters must be a dictionary, not [1]"),
    (lambda: hea.EfficientAttentionConfig.from_dict("nearfar"), "efficient_attention must be a dictionary"),
    (distillation(lr=1), "DistillationOptions: unknown field 'lr'", "learning_rate"),
    (distillation(learning_rate="a"), "learning_rate='a' must be a number above 0"),
    (distillation(finetuning={"steps": 1}), "hea.FinetuningOptions(steps=...)"),
    (distillation(seed="a"), "seed must be an integer, not 'a'"),
    (distillation(on_step=3), "on_step must be a function or None"),
    (lambda: hea.FinetuningOptions(steps=1, step=3), "Did you mean 'steps'?"),
    (lambda: hea.FinetuningOptions(steps=1, lora_rank="4"), "lora_rank='4' must be 1 or more"),
    (bert(lambda m: hea.distill(m, "linear", TWO, steps=1, learning_rate=0.1)), "DistillationOptions(learning_rate="),
    (bert(lambda m: hea.distill(m, "linear", TWO, steps=1, options={"seed": 1})), "options must be"),
    (lambda: hea.UptrainingSchedule([("linear", 0.5, [1]), ("sdpa", 1.0)]), "hyperparameters of a stage must be"),
    (bert(lambda m: hea.convert(m, "linear", layers=m.encoder.layer)), "<BertLayer>"),
    *((bert(lambda m, x=x, f=f: f(m, x)), f"not {x!r}: write layers=[...]")
      for x in (1, True, "0-1", {"layers": [0]}, 0.5)
      for f in (
          lambda m, x: hea.convert(m, "linear", layers=x),
          lambda m, x: hea.convert(m, hea.LinearConfig(), layers=x),
          lambda m, x: hea.convert(m, {"method": "linear"}, layers=x),
          lambda m, x: hea.distill(m, "linear", TWO, steps=1, layers=x),
      )),
    *((lambda f=f, x=x: f(x), *parts) for f in TAKE_MODELS for x, *parts in NO_MODELS),
    (bert(lambda m: hea.NearFarCache(m)), "takes the config of a model, not <BertModel>", "model.config"),
    *((lambda x=x: hea.NearFarCache(x), "takes the config of a model, not ", "model.config")
      for x in ("gpt2", 256, hea.NearFarConfig(), GPT2Config, None, {"method": "nearfar"})),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=range(len(REFUSED)))
def test_refused(case):
    work, *parts = case
    refused(work, *parts)


def test_what_is_similar_is_accepted(monkeypatch):
    assert hea.attention("longformer", *TENSORS, scale=np.float32(0.5), attention_mask=MASK).shape == QUERY.shape
    for layers in (np.array([1]), torch.tensor([1]), range(1, 2), (1,)):
        assert hea.convert(tiny_model("bert"), "linear", layers=layers).config.efficient_attention["layers"] == [1]
    assert hea.NearFarCache(hea.convert(tiny_model("gpt2"), "nearfar").config, 64).layers
    # A hyperparameter may have the name of an argument elsewhere: it reaches the config.
    names = (*hea.NearFarConfig.hyperparameters(), "causal")
    monkeypatch.setattr(hea.NearFarConfig, "hyperparameters", classmethod(lambda cls: names))
    refuses("causal", hea.attention, "nearfar", *TENSORS, causal=3, error=TypeError)


def test_values_are_shown_in_one_line():
    for value in (torch.zeros(30, 4), tiny_model("bert"), tiny_config("bert"), "a\nb" * 100, list(range(1000))):
        assert "\n" not in shown(value) and len(shown(value)) < 110
    assert shown(tiny_model("bert")) == "<BertModel>" and shown("ab") == "'ab'"
    assert re.fullmatch(r"\[0, 1, .*\.\.\.", shown(list(range(1000))))
