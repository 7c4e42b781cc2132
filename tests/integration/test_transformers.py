"""All ways of switching a Transformers model, the arguments that the method then gets, and what is refused."""

import ast
import copy
import inspect
import itertools
import pathlib
import pickle
import re
import warnings

import pytest
import torch
import transformers
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_efficient_attn as hea
from each import close, few_methods, refuses
from helpers.encoder_decoders import musicgen
from hf_efficient_attn.integration import register
from hf_efficient_attn.integration.exact import exact_layer
from hf_efficient_attn.integration.inputs import read_mask
from instances import inputs, numbers, padding_mask
from tiny_models import DECODERS, EXACT, FAMILIES, SMALL, output, tiny_batch, tiny_class, tiny_config, tiny_model

METHODS = hea.available_methods()
each_family = pytest.mark.parametrize("family", FAMILIES)


@each_family
@few_methods
def test_all_ways_of_switching_give_the_same_model(family, method, tmp_path):
    exact, inputs, cls, auto = tiny_model(family), tiny_batch(family), tiny_class(family), transformers.AutoModel
    exact.save_pretrained(tmp_path)
    small, choice = SMALL[method], {"method": method, **SMALL[method]}
    expected = output(hea.convert(copy.deepcopy(exact), method, **small), inputs)
    assert torch.isfinite(expected).all()
    assert (expected - output(exact, inputs)).abs().max() > 1e-4, "the method did not run"

    def config(efficient_attention=None, implementation=None):
        config = tiny_config(family)
        config._attn_implementation, config.efficient_attention = implementation, efficient_attention
        return config

    switched = cls(config())
    switched.config.efficient_attention = choice
    switched.set_attn_implementation(method)
    named = {"attn_implementation": method, "efficient_attention": choice}
    ways = {
        "set_attn_implementation": switched,
        "from_pretrained": cls.from_pretrained(tmp_path, **named),
        "no name in the dictionary": cls.from_pretrained(tmp_path, **{**named, "efficient_attention": small}),
        "by the dictionary alone": cls.from_pretrained(tmp_path, efficient_attention=choice),
        "AutoModel": auto.from_pretrained(tmp_path, **named),
        "from_config": auto.from_config(config(choice), attn_implementation=method),
        "constructor": cls(config(hea.EfficientAttentionConfig(method, small))),
        "constructor, by the implementation": cls(config(small, method)),
        "convert by a config": hea.convert(cls(config()), hea.method_info(method).config_class(**small)),
        "convert by a dictionary": hea.convert(cls(config()), choice),
    }
    for way, model in ways.items():
        missing, unexpected = model.load_state_dict(exact.state_dict(), strict=False)
        assert not unexpected and all(".learned_parameters." in key for key in missing), way
        assert model.config._attn_implementation == method, way
        assert torch.equal(output(model.eval(), inputs), expected), way


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "vit", "gpt2", "llama"])
def test_a_budget_of_the_whole_sequence_is_the_exact_model(family, method, padding):
    """Masks, scale, causality and grouped queries all reach the method: otherwise the outputs would differ."""
    model, inputs = tiny_model(family), tiny_batch(family, padding=padding)
    valid = inputs.get("attention_mask", torch.ones(2, 1)).bool().expand(2, -1)
    exact = output(model, inputs)
    assert model.config._attn_implementation == "sdpa"
    ours = output(hea.convert(model, hea.method_info(method).config_class().with_budget(200)), inputs)
    valid = valid.expand(exact.shape[:2]) if valid.shape[1] == 1 else valid
    torch.testing.assert_close(ours[valid], exact[valid], atol=2e-5, rtol=1e-4)


@each_family
def test_the_arguments_that_a_method_gets(family, calls):
    model = tiny_model(family, "kdeformer")
    padding = "none" if family in ("vit", "deit") else "right"
    output(model, tiny_batch(family, padding=padding))
    assert len(calls) == 2
    for call in calls:
        assert call["config"] == hea.KDEformerConfig(**SMALL["kdeformer"])
        assert call["is_causal"] is (family in DECODERS)
        mask = call["attention_mask"]
        assert mask is None if padding == "none" else (mask.dtype, tuple(mask.shape)) == (torch.bool, (2, 70))
        assert call["scale"] == pytest.approx(call["query"].shape[-1] ** -0.5)
        assert call["key"].shape[1] == 2  # grouped keys are not repeated on the way
    assert calls[0]["seed"] != calls[1]["seed"] and None not in (calls[0]["seed"], calls[1]["seed"])
    model.train()(**tiny_batch(family))
    assert calls[-1]["seed"] is None
    unpadded = tiny_batch(family)
    if "input_ids" in unpadded:
        unpadded["attention_mask"] = torch.ones_like(unpadded["input_ids"])
        # With Llama, the call says that it is not causal.
        output(model.eval(), unpadded, **({} if family != "llama" else {"is_causal": False}))
        assert calls[-1]["attention_mask"] is None and calls[-1]["is_causal"] is (family == "gpt2")


@each_family
def test_layers_not_named_stay_exact(family, calls):
    exact, inputs, found = tiny_model(family), tiny_batch(family), []
    model = hea.convert(copy.deepcopy(exact), "longformer", layers=[1], window_size=8)
    for one in (exact, model):
        with torch.no_grad():
            found.append(one(**inputs, output_hidden_states=True).hidden_states)
    assert len(calls) == 1 and model.config.efficient_attention["layers"] == [1]
    assert torch.equal(found[0][1], found[1][1]) and not torch.equal(found[0][2], found[1][2])
    both = hea.convert(model, "longformer", layers=range(2)), hea.convert(exact, "longformer")
    assert torch.equal(*(output(one, inputs) for one in both))


def test_a_mix_of_methods(calls):
    model = tiny_model("bert")
    module = model.encoder.layer[1].attention.self
    module.__class__, module.is_causal = type("Mixer", (type(module),), {}), None  # still known by its code
    performer, linear, longformer = hea.PerformerConfig(num_features=8), hea.LinearConfig(), hea.LongformerConfig()

    def methods_called():
        calls.clear()
        output(model, tiny_batch("bert"))
        return [call["config"] for call in calls]

    mix = {"layers": [{"layers": [0], "method": "performer", "num_features": 8}, {"layers": [1], "method": "linear"}]}
    hea.convert(model, mix)
    assert methods_called() == [performer, linear] and model.config._attn_implementation == "performer"
    settings = hea.EfficientAttentionConfig.from_dict(model.config.efficient_attention)
    assert settings.for_layer(1) == linear and settings.for_layer(2) is None
    # A method that the mix is not registered under runs alone, with its defaults.
    model.set_attn_implementation("longformer")
    assert methods_called() == [longformer] * 2
    hea.convert(model, hea.EfficientAttentionConfig("linear", layers=mix["layers"]))
    assert methods_called() == [performer, linear] and model.config._attn_implementation == "linear"
    # By hand: a method that the decoder cannot run, and models that were not switched.
    decoder = hea.convert(tiny_model("gpt2"), "linear")
    mix["layers"][0] = {"layers": [0], "method": "reformer"}
    decoder.config.efficient_attention = {"method": "linear", **mix}
    refuses(r"hf_efficient_attn\.convert\(model", output, decoder, tiny_batch("gpt2"))
    for family, other in (("bert", tiny_model("bert")), ("vit", tiny_model("vit")), ("bert", model)):
        other.config._attn_implementation = "performer"
        refuses("not switched to performer.*set_attn_implementation", output, other, tiny_batch(family))


@pytest.mark.parametrize("sinks", [None, numbers(4)], ids=["", "sinks"])
@pytest.mark.parametrize(("window", "is_causal"), [*itertools.product((None, 1, 20, 40, 300), (False, True))])
@pytest.mark.parametrize("padding", ["none", "left", "right", "empty"])
def test_exact_layers_against_the_definition(padding, window, is_causal, sinks):
    query, key, value = inputs(2, 4, 300, 8, kv_len=310, num_kv_heads=2, dtype=torch.float64)
    mask, distance = padding_mask(padding, 2, 310), torch.arange(-10, 300) - torch.arange(300)[:, None]
    pairs = ((distance <= 0) | (not is_causal)) & (distance.abs() < (window or 999))
    pairs = (pairs if mask is None else pairs & mask[:, None, None]).expand(2, 4, -1, -1)
    scale = 0.5 if sinks is None else None
    scores = (query @ key.repeat_interleave(2, 1).mT * (scale or 8**-0.5)).masked_fill(~pairs, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(2, -1, 300, 1)), 3)
    expected = scores.softmax(3).nan_to_num(0.0)[..., :310] @ value.repeat_interleave(2, 1)
    if mask is not None:
        key, value = (x.masked_fill(~mask[:, None, :, None], y) for x, y in ((key, torch.nan), (value, torch.inf)))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-7)):
        given = [x.to(dtype).requires_grad_() for x in (query, key, value)]
        options = {"window": window, "sinks": None if sinks is None else sinks.to(dtype)}
        options |= {"is_causal": is_causal, "scale": scale, "dropout_p": 0.0}
        out = exact_layer(*given, mask, **options)
        close(out, expected.to(dtype), tolerance)
        assert torch.autograd.grad(out.sum(), given[0])[0].isfinite().all()
        if is_causal:
            last = exact_layer(given[0][:, :, -9:], *given[1:], mask, **options)
            close(last, expected[:, :, -9:].to(dtype), tolerance)


@pytest.mark.parametrize(("method", "layers"), [*((method, None) for method in METHODS), (METHODS[0], [1])])
@pytest.mark.parametrize("padding", ["left", "right", "without any token"])
@pytest.mark.parametrize("family", [x for x in FAMILIES if x not in ("vit", "deit")])
def test_padding_never_leaks(family, method, padding, layers):
    model = hea.convert(tiny_model(family), method, layers=layers, **SMALL[method])
    inputs = tiny_batch(family, padding="left" if padding == "left" else "right")
    inputs["attention_mask"][1] *= padding != "without any token"
    mask = inputs["attention_mask"].bool()
    # RoBERTa counts its positions by the ids that are not padding: given explicitly, they stay where they are.
    inputs["position_ids"] = (torch.arange(70) + 2 * (family == "roberta")).expand(2, -1)
    other = {**inputs, "input_ids": torch.where(mask, inputs["input_ids"], torch.randint(5, 60, (2, 70)))}
    assert not torch.equal(inputs["input_ids"], other["input_ids"])
    first, second = output(model, inputs), output(model, other)
    assert torch.isfinite(first).all()
    assert torch.equal(first[mask], second[mask])
    alone = output(model, {key: x[:1] for key, x in inputs.items()})
    torch.testing.assert_close(first[:1], alone, atol=1e-5, rtol=1e-5)


# In Transformers 5.12 GPT-2 drops the mask of the encoder, for every attention implementation.
GPT2_DROPS_THE_MASK = "encoder_attention_mask = None\n" in inspect.getsource(transformers.GPT2Model.forward)
CONFIGS = {x: info.config_class(**SMALL[x]) for x in METHODS if (info := hea.method_info(x)).causal}
CONFIGS["linear with a window"] = hea.LinearConfig(window_size=6)


@pytest.mark.parametrize("encoder_length", [90, 70])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("name", CONFIGS)
def test_cross_attention(name, family, encoder_length, calls):
    """Methods that mix queries, or need as many as keys, leave it exact and warn once. Nothing leaks in it."""
    torch.manual_seed(0)
    changes = {"add_cross_attention": True, **({"is_decoder": True} if family == "bert" else {})}
    model = tiny_class(family)(tiny_config(family, **changes)).eval()
    states, mask = torch.randn(2, encoder_length, 32), torch.ones(2, encoder_length, dtype=torch.int64)
    mask[1, 45:] = 0
    inputs = {**tiny_batch(family), "encoder_hidden_states": states, "encoder_attention_mask": mask}
    exact, config = output(model, inputs, use_cache=False), CONFIGS[name]
    stays_exact = config.mixes_queries or config.needs_square
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hea.convert(model, config)
        before = output(model, inputs, use_cache=False)
    warned = [str(w.message) for w in caught if "stays exact" in str(w.message)]
    assert len(warned) == stays_exact and all(re.search("cross attention stays exact in .*cross", x) for x in warned)
    cross = [] if stays_exact else [(False, encoder_length)]
    assert [(call["is_causal"], call["key"].shape[2]) for call in calls] == [(True, 70), *cross] * 2
    # No later token reaches an earlier one.
    later = {**inputs, "input_ids": inputs["input_ids"].clone()}
    later["input_ids"][:, 50:] = 7
    after = output(model, later, use_cache=False)
    assert torch.equal(before[:, :50], after[:, :50]) and not torch.equal(before[:, 50:], after[:, 50:])
    if family == "bert" or not GPT2_DROPS_THE_MASK:
        assert stays_exact or calls[1]["attention_mask"].sum().item() == encoder_length + 45
        states = states.clone()
        states[1, 45:] = 7.0
        assert torch.equal(before, output(model, {**inputs, "encoder_hidden_states": states}, use_cache=False))
    if stays_exact and name in EXACT:  # with a budget of the whole sequence, the whole model is exact
        found = output(hea.convert(model, config.with_budget(200)), inputs, use_cache=False)
        torch.testing.assert_close(found, exact, atol=2e-5, rtol=1e-4)


def test_keys_of_another_length_stay_exact_too():
    """A module that computes cross attention although neither its name nor its class says so."""
    model = tiny_model("bert", next(m for m in METHODS if not hea.method_info(m).rectangular))
    forward = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
    query, key = torch.randn(1, 2, 40, 16), torch.randn(1, 2, 50, 16)
    with pytest.warns(UserWarning, match=r"stays exact in encoder\.layer\.1\.attention\.self"):
        out, _ = forward(model.encoder.layer[1].attention.self, query, key, key, None)
    torch.testing.assert_close(out.transpose(1, 2), torch.nn.functional.scaled_dot_product_attention(query, key, key))
    decoder = musicgen().decoder  # whose config does not say that it is one
    with pytest.warns(UserWarning, match=r"stays exact in .*encoder_attn"):
        hea.convert(decoder, CONFIGS["nearfar"])
    ids, early, states = torch.randint(9, (8, 70)), torch.arange(70) < 50, torch.randn(2, 90, 32)
    before, after = (decoder(input_ids=x, encoder_hidden_states=states).logits[:, :50] for x in (ids, ids * early))
    assert torch.equal(before, after)


# What is refused


def test_unknown_names_and_values_are_refused_at_once():
    config, model = tiny_config("bert"), tiny_model("bert")
    for value, words in (
        ({"method": "kdeformr"}, "Did you mean 'kdeformer'"),
        ({"method": "kdeformer", "num_sample": 3}, "Did you mean 'num_samples'.*layers"),
        ({"method": "kdeformer", "layer": [1]}, "Did you mean 'layers'"),
        ({"method": "kdeformer", "version": 3}, "newer.*upgrade"),
        ({"method": "kdeformer", "version": "1"}, "an integer from 1 to 2"),
        ({"method": "kdeformer", "layers": []}, "empty"),
        ({"method": "kdeformer", "layers": [-1]}, "non-negative"),
        ({"method": "kdeformer", "layers": [0, 0]}, "more than once"),
        ({"method": "kdeformer", "layers": "all"}, "list of layer indices"),
        ({"method": "kdeformer", "num_samples": 8, "layers": [{"layers": [0]}]}, "inside the entries"),
        ({"layers": [{"layers": [0], "method": "linear"}, {"layers": [0], "method": "performer"}]}, "more than once"),
        ({"layers": [{"method": "linear"}]}, "every entry is"),
        ({"layers": [{"layers": [{"layers": [0]}], "method": "linear"}]}, "indices, not entries"),
        ({"num_samples": 8}, "names no method"),
        *(
            ({"method": "longformer", "calibrated_length": length}, "calibrated_length=.* must be 1 or more")
            for length in (0, -1, 2.5, "70", True)
        ),
        ({"layers": [{"layers": [0], "method": "longformer", "calibrated_length": 70}]}, "in a mix every entry is"),
        ("kdeformer", "must be a dictionary"),
    ):
        refuses(words, setattr, config, "efficient_attention", value)
        assert config.efficient_attention is None and config._attn_implementation is None
    for call, words in (
        (lambda: hea.convert(model, "kdeformr"), "Did you mean 'kdeformer'"),
        (lambda: hea.convert(model, "kdeformer", num_sample=3), "Did you mean 'num_samples'"),
        (lambda: hea.convert(model, "linear", layers=[0, 7]), r"no attention in layers \[7\]; its layers are \[0, 1\]"),
        (lambda: tiny_model("bert", efficient_attention={"method": "linear", "layers": [1, 9]}), r"layers \[9\]"),
        (lambda: hea.convert(model, "sdpa", layers=[0]), "takes no layers"),
        (lambda: hea.convert(model, {"method": "linear", "layers": [0]}, layers=[1]), "already say"),
    ):
        refuses(words, call)
        assert model.config._attn_implementation == "sdpa" and model.config.efficient_attention is None
    config.efficient_attention = {"method": "kdeformer"}
    refuses("read-only", config.efficient_attention.__setitem__, "num_samples", 8)


@pytest.mark.parametrize("mask", [numbers(2, 1, 70, 70).float(), numbers(2, 1, 70, 70) > 0], ids=["float", "bool"])
@pytest.mark.parametrize("family", ["bert", *DECODERS])
def test_masks_of_pairs_are_refused_but_in_layers_that_stay_exact(family, mask):
    model, batch = tiny_model(family), {**tiny_batch(family), "attention_mask": mask}
    refuses("4-D.*choose the layers", output, hea.convert(model, "longformer", layers=[1]), batch)
    del next(x for x in model.modules() if isinstance(x, torch.nn.ModuleList))[1]
    assert torch.equal(output(model, batch), output(hea.convert(model, "sdpa"), batch))


def test_a_mask_of_keys_that_a_model_adds_to_the_scores():
    model = transformers.LayoutLMModel(transformers.LayoutLMConfig(**tiny_config("bert").to_diff_dict())).eval()
    batch, valid = tiny_batch("bert", padding="left"), tiny_batch("bert", padding="left")["attention_mask"].bool()
    expected = output(model, batch)[valid]
    if not model._supports_sdpa:  # in Transformers 5.12
        return refuses("possibly only a mask makes it causal", hea.convert, model, "nearfar")
    close(output(hea.convert(model, "nearfar"), batch)[valid], expected, 1e-5)
    refuses("no mask of keys", read_mask, "a method", torch.full((1, 1, 1, 9), -1.0))


def said(mask):
    """What a mask says, whatever happens to it on its way to the attention function."""
    found = read_mask("a method", mask)
    for changed in (
        mask.detach(), mask.clone(), mask[:, :], mask.to("cpu", copy=True), copy.deepcopy(mask), mask.contiguous(),
        torch.cat([mask[:1], mask[1:]]), mask.expand_as(mask), mask.index_select(0, torch.arange(2)),
        mask.view(mask.shape), pickle.loads(pickle.dumps(mask)),
    ):  # fmt: skip
        other = read_mask("a method", changed)
        assert torch.equal(other.keys, found.keys) and other[1:] == found[1:]
    return found


def test_every_kind_of_mask_that_transformers_makes():
    """Plain masks and windows become (B, N) or None; everything else is refused."""
    config = tiny_config("llama", "linear")
    states, padding = torch.zeros(2, 70, 32), tiny_batch("llama", padding="left")["attention_mask"]
    make = {
        "causal": masking_utils.create_causal_mask,
        "window": masking_utils.create_sliding_window_causal_mask,
        "chunk": masking_utils.create_chunked_causal_mask,
        "full": masking_utils.create_bidirectional_mask,
        "full window": masking_utils.create_bidirectional_sliding_window_mask,
    }
    for kind, create in make.items():
        options = {} if kind.startswith("full") else {"past_key_values": None}

        def call(mask=padding, create=create, options=options, **more):
            return create(config=config, inputs_embeds=states, attention_mask=mask, **options, **more)

        config.sliding_window = config.attention_chunk_size = 70
        keys, is_causal, is_local, *_ = said(call())
        assert torch.equal(keys, padding.bool()) and is_causal is not kind.startswith("full") and not is_local, kind
        assert call(mask=torch.ones_like(padding)) is None and call(mask=None) is None, kind
        for more in ("or_mask_function", "and_mask_function"):
            refuses("not plain", call, **{more: lambda batch, head, query, key: key < 5})
        refuses(r"must be \(batch, keys\)", call, mask=torch.ones(2, 70, 70))
        config.sliding_window = config.attention_chunk_size = 69
        if kind == "chunk":
            refuses("not plain", call)
            assert read_mask("a method", call(mask=None)).begins.sum() == 4  # chunks are texts
        elif "window" in kind:
            for mask in (padding, None):
                keys, is_causal, is_local, *_ = said(call(mask=mask))
                assert is_local and is_causal is not kind.startswith("full")
                assert torch.equal(keys, torch.ones_like(keys) if mask is None else padding.bool())
    # A mask of other code says nothing about causality.
    assert read_mask("a method", padding.bool()).is_causal is None


@each_family
def test_output_attentions_is_refused(family):
    model, head, inputs = tiny_model(family, "linear"), tiny_model(family, "linear", head=True), tiny_batch(family)
    eager = tiny_model(family, attn_implementation="eager", output_attentions=True)
    assert len(eager(**inputs).attentions) == 2
    hea.convert(eager, "linear")
    for one, options in ((model, {"output_attentions": True}), (head, {"output_attentions": True}), (eager, {})):
        refuses("output_attentions", one, **inputs, **options)
    refuses("output_attentions", setattr, model.config, "output_attentions", True, error=ValueError)
    assert len(hea.convert(eager, "eager")(**inputs, output_attentions=True).attentions) == 2


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("gpt2", "bert"))]
)
def test_arguments_of_a_loss_pass(family):
    """Transformers passes them on to the attention function too."""
    layers = {"n_layer": 1} if family == "gpt2" else {"num_hidden_layers": 1}
    model, inputs = tiny_model(family, "linear", head=True, **layers), tiny_batch(family)
    labels = inputs["input_ids"].roll(-1, 1)
    expected = output(model, inputs)
    loss = {"num_items_in_batch": torch.tensor(140)}
    if family == "llama":
        loss |= {"labels": inputs["input_ids"], "shift_labels": labels}
    for compiled in (model, torch.compile(model, backend="eager", fullgraph=True)):
        with torch.no_grad():
            out = compiled(**inputs, **loss, loss_weights=torch.ones(2), class_weights=torch.ones(60), return_dict=True)
        torch.testing.assert_close(out.logits, expected)
    # The body has no loss: whatever it does not know reaches its attention.
    body = tiny_model(family, "linear")
    output(body, inputs, labels=labels, shift_labels=labels, class_weights=torch.ones(60), rewards=[torch.ones(2)])
    refuses("'my_attention_bias' of the attention would be lost", output, body, inputs, my_attention_bias=torch.ones(2))


@pytest.mark.exhaustive
def test_the_names_of_all_arguments_that_transformers_gives_to_attention():
    """Every tensor that some model gives to its attention function by name is refused, or known to be no loss."""
    from hf_efficient_attn.integration import attention

    folder = pathlib.Path(transformers.__file__).parent / "models"
    names = set()
    for path in folder.glob("*/modeling_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "attention_interface":
                names |= {keyword.arg for keyword in node.keywords if keyword.arg}
    assert {"scaling", "dropout", "s_aux", "cu_seq_lens_q"} <= names
    standard = {
        "scaling", "dropout", "is_causal", "attention_mask", "sliding_window", "output_attentions", "query", "key",
        "value", "deterministic", "max_length_q", "max_length_k",
    }  # fmt: skip
    for name in names - standard:
        words = any(word in name for word in attention._ATTENTION_WORDS)
        known = words or name in (*attention._ATTENTION_ARGUMENTS, *attention._INPUTS, "s_aux")
        assert known, f"{name}: decide whether attention would lose it"


def test_arguments_that_change_the_meaning_are_refused():
    model = tiny_model("bert", "linear")
    forward = ALL_ATTENTION_FUNCTIONS["linear"]
    layer = model.encoder.layer[0].attention.self
    q = torch.randn(1, 2, 9, 16)
    for name, value in (
        ("position_bias", torch.zeros(1)), ("softcap", 30.0), ("cache", object()),
        ("cu_seq_lens_q", torch.zeros(2)), ("new_attention_bias", torch.zeros(1)), ("block_table", (torch.zeros(1),)),
        ("sliding_window", 4), ("output_attentions", True),
    ):  # fmt: skip
        refuses(name if name != "sliding_window" else "window of 4", forward, layer, q, q, q, None, **{name: value})
    harmless = {"position_ids": torch.arange(9), "use_cache": True, "sliding_window": 9, "softcap": None,
                "position_embeddings": (q, q)}  # fmt: skip
    out, weights = forward(layer, q, q, q, None, **harmless)
    assert weights is None and out.shape == (1, 9, 2, 16) and out.is_contiguous()


def test_a_choice_without_effect_is_logged(caplog, monkeypatch):
    model, logger = tiny_model("bert"), transformers.utils.logging.get_logger("transformers")
    type(logger).warning_once.cache_clear()  # another test may have been told already
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level("WARNING", logger="transformers"):
        model.config.efficient_attention = {"method": "longformer", "window_size": 3}
        model.set_attn_implementation("longformer")
        assert model.config.efficient_attention["window_size"] == 3
        model.config.efficient_attention = {"method": "longformer", "window_size": 4}  # takes effect at once
        model.config.efficient_attention = {"method": "performer", "feature_map": "exp"}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "call model.set_attn_implementation('longformer') to use it" in lines[0]
    assert "(of 'longformer') has no effect while attn_implementation is 'sdpa'" in lines[0]
    assert "(of 'performer') has no effect while attn_implementation is 'longformer'" in lines[1]
    assert lines[1].endswith("load it without attn_implementation") and "learned" not in lines[0]


@pytest.mark.filterwarnings("error")
def test_every_method_is_registered_once_and_other_models_pass_unchanged():
    for name in METHODS:
        assert name in ALL_ATTENTION_FUNCTIONS.valid_keys() and name in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()
    post_init = transformers.PreTrainedModel.post_init
    register()
    assert transformers.PreTrainedModel.post_init is post_init
    model = tiny_model("bert")
    assert not any(name.startswith("_efficient_attention") for module in model.modules() for name in vars(module))
    assert not {"efficient_attention", "attn_implementation"} & set(model.config.to_dict())
