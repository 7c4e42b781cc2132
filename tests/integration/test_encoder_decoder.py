"""Models of several parts: encoders with decoders, layers by name, and composite models with a method in each part."""

import copy
import json

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from each import refuses
from helpers.commands import read
from helpers.encoder_decoders import FAMILIES, inputs_of, tiny
from hf_efficient_attn.integration import layers as naming
from hf_efficient_attn.integration.settings import layer_seed
from tiny_models import IMAGE, SIZES, SMALL, enlarged, output, reloaded, tiny_batch, tiny_model

# Methods without a causal form, which only an encoder can use, and one with a state that decodes.
METHODS = ["kdeformer", "linear", "longformer", "linformer", "nystromformer", "flurka_linear"]


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
        model = reloaded(model, folder)
        stored = read(folder)
        assert stored["efficient_attention"]["layers"] == ["encoder"] and stored["attn_implementation"] == method
        assert in_use(model) == used
        assert torch.equal(logits(model, inputs), found)
    hea.convert(model, "sdpa")
    torch.testing.assert_close(logits(model, inputs), exact, rtol=1e-5, atol=1e-5)
    hea.convert(model.get_encoder(), method, **SMALL[method])  # the decoder has the same config
    refuses(rf"was not switched to {method}.*layers=\[", logits, model, inputs)


@pytest.mark.parametrize(
    "layers",
    [["encoder"], ["decoder"], ["decoder.layers.0"], ["decoder.layers.1.self_attn", "encoder.layers.0"], None],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_generation_with_the_cache_equals_that_without(family, layers):
    model, inputs = tiny(family), inputs_of(family)
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
    for method, more in (("scatterbrain", {"layers": layers}), ({"method": "scatterbrain", "layers": layers}, {})):
        used = in_use(hea.convert(tiny("bart") if head else tiny("bart").model, method, **more))
        assert sorted(name for name, method in used.items() if method) == sorted(expected)


def test_names_work_in_models_of_one_stack_and_of_two_towers():
    for model, name, part in ((tiny_model("bert"), "encoder.layer.1", "1"), (clip(), "vision_model", "vision_model")):
        used = in_use(hea.convert(model, "nystromformer", layers=[name]))
        assert {key for key, method in used.items() if method} == {key for key in used if part in key}


@pytest.mark.parametrize("layers", [["encodr"], ["enc"], ["encoder.layers.7"], ["encoder", "middle"]], ids=str)
def test_an_unknown_name_is_refused_with_the_known_ones(layers, tmp_path):
    model, choice = tiny("bart"), {"efficient_attention": {"method": "linear", "layers": layers}}
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**read(tmp_path), "attn_implementation": "linear", **choice}))
    for call in (
        lambda: hea.convert(model, "linear", layers=layers),
        lambda: type(model).from_pretrained(tmp_path),
        lambda: transformers.BartModel.from_pretrained(tmp_path),
    ):
        refuses(r"'decoder', 'decoder\.layers', 'encoder', 'encoder\.layers'", call)
    assert model.config.efficient_attention is None


def test_a_layer_that_is_selected_twice_is_refused():
    mix = [{"layers": ["encoder"], "method": "linear"}, {"layers": [0], "method": "kdeformer"}]
    choice = hea.EfficientAttentionConfig(layers=mix)
    refuses(r"encoder\.layers\.0\.self_attn .*linear, kdeformer", hea.convert, tiny("bart"), choice)


def test_ranges_of_names():
    names = [f"encoder.layers.{number}" for number in range(12)]
    assert naming.ranges(names) == "encoder.layers.0-11" and naming.parse_layers("encoder.layers.0-11") == names
    assert naming.ranges([*names[:2], 3, 4, "decoder"]) == "decoder,encoder.layers.0,encoder.layers.1,3-4"
    assert naming.stem_of("encoder.layers.0.self_attn") == "encoder.layers.0"
    assert naming.stem_of("attention") == "attention"
    assert naming.names_of(["h.0.attn"]) == ["h"]
    # None first, then names, then numbers.
    assert naming.in_order([3, "t2t.1", None, 0, "t2t.0", 3]) == [None, "t2t.0", "t2t.1", 0, 3]
    for text in ("0", "0-3,5", "t2t.0,t2t.1", "t2t.1,0,2-4"):
        assert naming.ranges(naming.parse_layers(text)) == text
    refuses("--layers", naming.parse_layers, "encoder.layers.5-2")


def test_every_layer_has_its_own_seed_which_is_equal_in_every_process():
    names = [f"{stack}.{i}.{part}" for stack in ("encoder", "stage") for i in range(500) for part in ("", "a", "b1")]
    layers = [*range(200), "t2t.0", "t2t.1", *names]
    seeds = [layer_seed(layer) for layer in layers]
    assert len(set(seeds)) == len(layers) and max(seeds) < 2**31 and seeds[:3] == [1000003, 2000006, 3000009]
    assert layer_seed("t2t.0") == 1190956767


def test_invalid_layers_are_refused():
    for layer in ("3", "-1", "", " t2t.0", "t2t..0", "t2t.0`", "a" * 65, "[x](y)", "t2t.0\n", True, 1.5, -1, None):
        refuses("non-negative integer", naming.check_layer, layer)


# Composite models: a method in one part, or a different method in each.

VISION = {**SIZES, **IMAGE}
TEXT = {**SIZES, "vocab_size": 60, "max_position_embeddings": 256}
PICTURE_TOKEN = 7
PARTS = ("vision_config", "text_config")
NEARFAR = {"method": "nearfar", **SMALL["nearfar"]}


def clip():
    text = {**TEXT, "bos_token_id": 2, "eos_token_id": 59}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=16))


def llava():
    """A vision-language model: the features of 64 patches are 64 tokens of a Llama."""
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT), vision_config=transformers.CLIPVisionConfig(**VISION),
        image_token_index=PICTURE_TOKEN, image_seq_length=64,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config)


def qwen2_vl():
    """A vision-language model whose vision tower gets the patches of all pictures in one row, four for each token."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT, "num_key_value_heads": 1, "rope_parameters": rope},
        vision_config={"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 32, "patch_size": 4, "mlp_ratio": 2},
        image_token_id=PICTURE_TOKEN, video_token_id=8, vision_start_token_id=9, vision_end_token_id=10,
    )  # fmt: skip
    return transformers.Qwen2VLForConditionalGeneration(config)


MODELS = {"clip": clip, "llava": llava, "qwen2_vl": qwen2_vl}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return enlarged(MODELS[request.param]())


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path / "exact")
    return tmp_path / "exact"


def inputs_for(model):
    ids, kind = tiny_batch("bert", length=100)["input_ids"], model.config.model_type
    ids = ids.where(ids != PICTURE_TOKEN, PICTURE_TOKEN + 1)
    inputs = {"input_ids": ids, **tiny_batch("vit")}
    if kind != "clip":
        ids[:, 10:74] = PICTURE_TOKEN
        inputs["use_cache"] = False
    if kind == "qwen2_vl":
        patches = torch.randn(2 * 256, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0))
        ids[(ids > PICTURE_TOKEN) & (ids < 11)] = 11
        ids[:, 9] = 9
        inputs |= {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 16, 16]] * 2)}
        inputs["mm_token_type_ids"] = (ids == PICTURE_TOKEN).int()
    return inputs


def parts(model):
    """The modules of the two parts, in the order of `PARTS`."""
    modules = dict((model if model.config.model_type == "clip" else model.model).named_children())
    return [next(modules[name] for name in names if name in modules) for names in (
        ("vision_model", "vision_tower", "visual"), ("text_model", "language_model"))]  # fmt: skip


def chosen(model):
    """The implementations of the whole and of the two parts."""
    return [config._attn_implementation for config in (model.config, *(getattr(model.config, key) for key in PARTS))]


def methods_called(model, calls):
    calls.clear()
    return output(model, inputs_for(model)), {call["config"] for call in calls}


@pytest.mark.parametrize(("vision", "text"), [("nearfar", "sdpa"), ("sdpa", "linear"), ("nearfar", "longformer")])
def test_from_pretrained_with_a_method_for_each_part(model, folder, tmp_path, vision, text, calls):
    names, load = {"vision_config": vision, "text_config": text}, type(model).from_pretrained
    chosen_names = {key: name for key, name in names.items() if name != "sdpa"}
    loaded = load(folder, attn_implementation=names)
    loaded.save_pretrained(tmp_path / "saved")
    stored = read(tmp_path / "saved")
    assert stored["attn_implementation"] == chosen_names and "efficient_attention" not in stored
    out, called = methods_called(loaded, calls)
    assert {config.method for config in called} == set(chosen_names.values())
    # The parts that are not named stay what they are.
    for one in (loaded, load(folder, attn_implementation=chosen_names), load(tmp_path / "saved")):
        assert chosen(one) == ["sdpa", vision, text]
        assert torch.equal(methods_called(one, calls)[0], out)


def test_hyperparameters_of_one_part(model, folder, tmp_path, calls):
    """By arguments, by the config of the part, by `set_attn_implementation` and by converting the part's module."""
    config, switched, converted = transformers.AutoConfig.from_pretrained(folder), *map(copy.deepcopy, [model] * 2)
    config.vision_config.efficient_attention = switched.config.vision_config.efficient_attention = NEARFAR
    switched.set_attn_implementation({"vision_config": "nearfar"})
    hea.convert(parts(converted)[0], NEARFAR)
    named = {"attn_implementation": {"vision_config": "nearfar"}, "efficient_attention": NEARFAR}
    load, outs = type(model).from_pretrained, []
    for one in (load(folder, **named), load(folder, config=config), switched, converted):
        for same in (one, reloaded(one, tmp_path / "saved")):
            assert chosen(same) == ["sdpa", "nearfar", "sdpa"]
            out, called = methods_called(same, calls)
            assert called == {hea.NearFarConfig(**SMALL["nearfar"])}
            outs.append(out)
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert not torch.equal(outs[0], output(model, inputs_for(model)))
    if model.config.model_type == "clip":  # a part can be loaded by itself, with its method
        tower = transformers.CLIPVisionModel.from_pretrained(tmp_path / "saved")
        assert tower.config._attn_implementation == "nearfar"
        assert tower.config.efficient_attention == converted.config.vision_config.efficient_attention


def test_a_choice_on_the_outer_config_goes_down_to_the_parts(model, folder, tmp_path, calls):
    exact, choice = output(model, inputs_for(model)), {"window_size": 8, "layers": [0]}
    loaded = type(model).from_pretrained(folder, attn_implementation="longformer", efficient_attention=choice)
    out, called = methods_called(loaded, calls)
    assert called == {hea.LongformerConfig(window_size=8)}
    assert {call["is_causal"] for call in calls} == {False, True}
    assert torch.equal(methods_called(hea.convert(model, "longformer", **choice), calls)[0], out)
    assert torch.equal(methods_called(reloaded(model, tmp_path / "whole"), calls)[0], out)
    assert torch.equal(output(hea.convert(model, "sdpa"), inputs_for(model)), exact)
    hea.convert(model, "sdpa").save_pretrained(tmp_path / "exact again")
    assert "efficient_attention" not in read(tmp_path / "exact again")


def test_parts_are_switched_one_after_the_other(model, calls):
    exact = output(model, inputs_for(model))
    vision, text = parts(model)
    hea.convert(vision, NEARFAR)
    hea.convert(text, "linear", layers=[1])
    _, called = methods_called(model, calls)
    assert called == {hea.NearFarConfig(**SMALL["nearfar"]), hea.LinearConfig()}
    # Qwen2-VL attends to one picture at a time.
    assert len(calls) == (5 if model.config.model_type == "qwen2_vl" else 3)
    model.set_attn_implementation({"vision_config": "sdpa"})
    assert {config.method for config in methods_called(model, calls)[1]} == {"linear"}
    hea.convert(text, "sdpa")
    out, called = methods_called(model, calls)
    assert not called
    assert torch.equal(out, exact)


def test_what_is_refused_leaves_the_other_parts(model, folder):
    """CLIP's modules call themselves bidirectional, but its text model calls them as causal ones."""
    unknown = r"unknown part of \w+Config '(vison_config|language)'.*Known: text_config, vision_config"
    rows = [({"vison_config": "nearfar"}, unknown), ({"vision_config": "sdpa", "language": "linear"}, unknown)]
    rows += [({"vision_config": "nearfar", "text_config": "linformer"}, "no causal form")]
    for choice, words in rows:
        refuses(words, type(model).from_pretrained, folder, attn_implementation=choice)
        refuses(words, model.set_attn_implementation, choice)
        assert chosen(model) == ["sdpa"] * 3
    config, choice = transformers.BertConfig(**TEXT), {"text_config": "linear"}
    refuses("unknown part of BertConfig", transformers.AutoModel.from_config, config, attn_implementation=choice)
    assert config._attn_implementation is None


def test_generation_of_a_vision_language_model(model, calls):
    if model.config.model_type == "clip":
        pytest.skip("it does not generate")
    inputs = {**inputs_for(model), "use_cache": True}
    expected = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    model.set_attn_implementation(dict.fromkeys(PARTS, "kdeformer"))
    # Both parts are shorter than the budget, so that they are exact.
    assert torch.equal(model.generate(**inputs, max_new_tokens=3, do_sample=False), expected)
    first = [call["is_causal"] for call in calls if call["query"].shape[2] > 1]
    assert first == [*[False] * (4 if model.config.model_type == "qwen2_vl" else 2), True, True]


@pytest.mark.parametrize(
    "config", [transformers.DbrxConfig(ffn_config={"ffn_hidden_size": 32}), transformers.LightGlueConfig()]
)
def test_groups_of_values_in_a_config_are_no_parts(config, tmp_path):
    """DBRX's config of its feed-forward layers refuses keys that it does not know; LightGlue's names an
    implementation of its detector itself."""
    config.efficient_attention = {"method": "kdeformer", **SMALL["kdeformer"]}
    config.save_pretrained(tmp_path)
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    assert again.efficient_attention == config.efficient_attention
    assert config.model_type != "dbrx" or again.ffn_config.ffn_hidden_size == 32


@pytest.mark.skipif(not hasattr(transformers, "Siglip2VisionModel"), reason="no SigLIP 2 in this version")
def test_pooling_with_a_mask_of_its_own_keeps_rows_apart():
    """SigLIP 2 pools by PyTorch's attention, with a mask in the form of the implementation of its config."""
    config = transformers.Siglip2VisionConfig(**SIZES, patch_size=4, num_patches=36)
    torch.manual_seed(0)
    model = transformers.Siglip2VisionModel(config).eval()
    mask = torch.ones(2, 36, dtype=torch.long)
    mask[1, 20:] = 0
    inputs = {"pixel_values": torch.randn(2, 36, 48), "pixel_attention_mask": mask}
    inputs["spatial_shapes"] = torch.tensor([[6, 6], [4, 5]])
    with torch.no_grad():
        exact = model(**inputs).pooler_output
        ours = hea.convert(model, "kdeformer")(**inputs).pooler_output
        back = hea.convert(model, "sdpa")(**inputs).pooler_output
    torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-4)
    assert torch.equal(back, exact)
