"""Models with an encoder and a decoder: layers by name, padding, generation with a cache, saving."""

import json
import re
import warnings

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from hf_efficient_attn.integration import layers as naming
from test_model_types import case
from tiny_models import IMAGE, SMALL, output, tiny_model
from tiny_models import SIZES as TOWER

Refused = hea.UnsupportedAttentionError
FAMILIES = {"bart": "Bart", "marian": "Marian", "m2m100": "M2M100", "whisper": "Whisper"}
# Methods without a causal form, which only an encoder can use, and one with a state that decodes.
METHODS = ["kdeformer", "linear", "longformer", "linformer", "nystromformer", "flurka_linear"]


def tiny(family: str, **changes):
    """A tiny random model with large weights, so that attention is not uniform."""
    model_class, config, _ = case(FAMILIES.get(family, family), **{"max_position_embeddings": 128, **changes})
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim > 1 and re.search(r"\d\.", path):
                parameter.mul_(5.0)
    model.generation_config.max_length = model.generation_config.forced_eos_token_id = None
    return model


def inputs_of(family: str, length: int = 70) -> dict:
    """Inputs of the encoder, with padding if they are texts."""
    return {key: x for key, x in case(FAMILIES[family], length)[2].items() if not key.startswith("decoder")}


def logits(model, inputs: dict) -> torch.Tensor:
    decoder = torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(2))
    return output(model, {"decoder_input_ids": decoder, **inputs})


def encoded(model, inputs: dict) -> torch.Tensor:
    with torch.no_grad():
        return model.get_encoder()(**inputs).last_hidden_state


def in_use(model) -> dict[str, str | None]:
    """The method of every attention module."""
    found = {}
    for module in model.modules():
        location = getattr(module, "_efficient_attention", None)
        if location is not None and hasattr(module, "config"):
            settings = hea.EfficientAttentionConfig.from_dict(module.config.efficient_attention)
            method = settings.for_layer(location.layer, location.name)
            found[location.name] = None if method is None else method.method
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_encoder_alone_is_switched_and_comes_back_from_disk(family, method, tmp_path):
    model, inputs = tiny(family), inputs_of(family)
    exact, exact_states = logits(model, inputs), encoded(model, inputs)
    hea.convert(model, method, layers=["encoder"], **SMALL[method])
    used = in_use(model)
    assert {name.split(".")[0] for name, value in used.items() if value == method} == {"encoder"}
    assert {name.split(".")[0] for name, value in used.items() if value is None} == {"decoder"}
    found = logits(model, inputs)
    assert not torch.allclose(encoded(model, inputs), exact_states, atol=1e-4)
    # Everything but the encoder is exact: the exact model gives the same for the states of this encoder.
    states = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=encoded(model, inputs))
    rest = {key: value for key, value in inputs.items() if key == "attention_mask"}
    torch.testing.assert_close(logits(tiny(family), {"encoder_outputs": states, **rest}), found, rtol=1e-4, atol=1e-4)
    for folder in (tmp_path / "once", tmp_path / "twice"):
        model.save_pretrained(folder)
        stored = json.loads((folder / "config.json").read_text())
        assert stored["efficient_attention"]["layers"] == ["encoder"] and stored["attn_implementation"] == method
        model = type(model).from_pretrained(folder)
        assert in_use(model) == used
        assert torch.equal(logits(model, inputs), found)
    hea.convert(model, "sdpa")
    torch.testing.assert_close(logits(model, inputs), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "layers",
    [["encoder"], ["decoder"], ["decoder.layers.0"], ["decoder.layers.1.self_attn", "encoder.layers.0"], None],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_the_cache_equals_that_without(family, layers):
    model, inputs = tiny(family), inputs_of(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hea.convert(model, "linear", layers=layers)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    for beams in (1, 3):
        found = [model.generate(**inputs, **options, num_beams=beams, use_cache=cached) for cached in (True, False)]
        assert len(found[0]) == 2 and torch.equal(*found)


FIRST, SECOND = ([f"encoder.layers.{i}.self_attn", f"decoder.layers.{i}.encoder_attn", f"decoder.layers.{i}.self_attn"]
                 for i in (0, 1))  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (["encoder"], [FIRST[0], SECOND[0]]),
        (["encoder.layers"], [FIRST[0], SECOND[0]]),
        (["encoder.layers.1"], SECOND[:1]),
        (["decoder.layers.0.self_attn"], FIRST[2:]),
        # A number is that of all stacks, as ever.
        ([1], SECOND),
        (["encoder.layers.0", 1], [FIRST[0], *SECOND]),
    ],
    ids=str,
)
@pytest.mark.parametrize("head", [True, False])
def test_what_names_and_numbers_select(layers, expected, head):
    for convert in (
        lambda model: hea.convert(model, "scatterbrain", layers=layers),
        lambda model: hea.convert(model, {"method": "scatterbrain", "layers": layers}),
    ):
        used = in_use(convert(tiny("bart") if head else tiny("bart").model))
        assert sorted(name for name, method in used.items() if method) == sorted(expected)


def test_names_work_in_models_of_one_stack_and_of_two_towers():
    text, vision = {**TOWER, "vocab_size": 60}, {**TOWER, **IMAGE}
    clip = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision))
    for model, name, part in ((tiny_model("bert"), "encoder.layer.1", "1"), (clip, "vision_model", "vision_model")):
        used = in_use(hea.convert(model, "nystromformer", layers=[name]))
        assert {key for key, method in used.items() if method} == {key for key in used if part in key}


@pytest.mark.parametrize("layers", [["encodr"], ["enc"], ["encoder.layers.7"], ["encoder", "middle"]], ids=str)
def test_an_unknown_name_is_refused_with_the_known_ones(layers, tmp_path):
    model, choice = tiny("bart"), {"efficient_attention": {"method": "linear", "layers": layers}}
    model.save_pretrained(tmp_path)
    values = {**json.loads((tmp_path / "config.json").read_text()), "attn_implementation": "linear", **choice}
    (tmp_path / "config.json").write_text(json.dumps(values))
    for call in (
        lambda: hea.convert(model, "linear", layers=layers),
        lambda: type(model).from_pretrained(tmp_path),
        lambda: transformers.BartModel.from_pretrained(tmp_path),
    ):
        with pytest.raises(Refused, match=r"'decoder', 'decoder\.layers', 'encoder', 'encoder\.layers'"):
            call()
    assert model.config.efficient_attention is None


def test_a_layer_that_is_selected_twice_is_refused():
    mix = [{"layers": ["encoder"], "method": "linear"}, {"layers": [0], "method": "kdeformer"}]
    with pytest.raises(Refused, match=r"encoder\.layers\.0\.self_attn .*linear, kdeformer"):
        hea.convert(tiny("bart"), hea.EfficientAttentionConfig(layers=mix))
    with pytest.raises(Refused, match=r"more than once: \['t2t.0'\]"):
        hea.EfficientAttentionConfig("linear", None, ["t2t.0", "t2t.0"])


def test_ranges_of_names():
    names = [f"encoder.layers.{number}" for number in range(12)]
    assert naming.ranges(names) == "encoder.layers.0-11" and naming.parse_layers("encoder.layers.0-11") == names
    assert naming.ranges([*names[:2], 3, 4, "decoder"]) == "decoder,encoder.layers.0,encoder.layers.1,3-4"
    assert (
        naming.stem_of("encoder.layers.0.self_attn") == "encoder.layers.0"
        and naming.stem_of("attention") == "attention"
    )
    assert naming.names_of(["h.0.attn"]) == ["h"]
    # None first, then names, then numbers.
    assert naming.in_order([3, "t2t.1", None, 0, "t2t.0", 3]) == [None, "t2t.0", "t2t.1", 0, 3]
    for text in ("0", "0-3,5", "t2t.0,t2t.1", "t2t.1,0,2-4"):
        assert naming.ranges(naming.parse_layers(text)) == text
    with pytest.raises(Refused, match="--layers"):
        naming.parse_layers("encoder.layers.5-2")


def test_every_layer_has_its_own_seed_which_is_equal_in_every_process():
    names = [f"{stack}.{i}.{part}" for stack in ("encoder", "stage") for i in range(500) for part in ("", "a", "b1")]
    layers = [*range(200), "t2t.0", "t2t.1", *names]
    seeds = [naming.layer_seed(layer) for layer in layers]
    assert len(set(seeds)) == len(layers) and max(seeds) < 2**31 and seeds[:3] == [1000003, 2000006, 3000009]
    assert naming.layer_seed("t2t.0") == 1190956767


def test_invalid_layers_are_refused():
    for layer in ("3", "-1", "", " t2t.0", "t2t..0", "t2t.0`", "a" * 65, "[x](y)", "t2t.0\n", True, 1.5, -1, None):
        with pytest.raises(Refused, match="non-negative integer"):
            naming.check_layer(layer)


def test_a_config_keeps_names():
    settings = hea.EfficientAttentionConfig("kdeformer", {"num_samples": 8}, ["t2t.0", 2])
    assert settings.to_dict()["layers"] == ["t2t.0", 2]
    again = hea.EfficientAttentionConfig.from_dict(settings.to_dict())
    assert again == settings and again.named_layers() == ["t2t.0", 2]
    assert again.for_layer("t2t.0").num_samples == 8 and again.for_layer("t2t.1") is None
    entries = [{"layers": ["t2t.0"], "method": "linear"}, {"layers": [0, "t2t.1"], "method": "performer"}]
    assert hea.EfficientAttentionConfig(layers=entries).named_layers() == ["t2t.0", "t2t.1", 0]
