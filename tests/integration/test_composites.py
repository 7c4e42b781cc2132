"""Models that hold others of any kind, such as `EncoderDecoderModel`: what is converted is saved, and comes back."""

import copy
import json
import warnings

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from each import refuses
from helpers.model_types import sizes
from hf_efficient_attn.conversion.checkpoint import convert_saved_model
from tiny_models import IMAGE, SIZES, SMALL, enlarged, output, reloaded, tiny_config

TEXT = {"max_position_embeddings": 130}
# What the configs have besides the values of `sizes`.
VALUES = {
    **dict.fromkeys(("bert", "roberta", "bert-generation", "electra", "rembert"), TEXT),
    **dict.fromkeys(("vit", "data2vec-vision"), IMAGE),
    "trocr": {**TEXT, "cross_attention_hidden_size": 32},
    "wav2vec2": {"num_feat_extract_layers": 2},
}
CLASSES = {"vit": "VisionEncoderDecoder", "data2vec-vision": "VisionEncoderDecoder", "wav2vec2": "SpeechEncoderDecoder"}
PAIRS = [
    "bert+bert", "roberta+roberta", "electra+electra", "bert-generation+bert-generation", "vit+bert", "vit+trocr",
    "wav2vec2+bert",
]  # fmt: skip


def pair(names: str):
    """A tiny encoder and a tiny decoder as one model."""
    kinds = {name: transformers.CONFIG_MAPPING[name] for name in names.split("+")}
    encoder, decoder = (kinds[name](**sizes(kinds[name], **VALUES[name])) for name in names.split("+"))
    name = CLASSES.get(names.split("+")[0], "EncoderDecoder")
    config = getattr(transformers, f"{name}Config").from_encoder_decoder_configs(encoder, decoder)
    torch.manual_seed(0)
    return enlarged(getattr(transformers, f"{name}Model")(config), 5.0)


def inputs_of(model) -> dict:
    generator = torch.Generator().manual_seed(0)
    inputs = {"decoder_input_ids": torch.randint(5, 60, (2, 9), generator=generator)}
    if isinstance(model, transformers.EncoderDecoderModel):
        mask = torch.ones(2, 100, dtype=torch.long)
        mask[1, 90:] = 0
        return inputs | {"input_ids": torch.randint(5, 60, (2, 100), generator=generator), "attention_mask": mask}
    if isinstance(model, transformers.VisionEncoderDecoderModel):
        return inputs | {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}
    return inputs | {"input_values": torch.randn(2, 900, generator=generator)}


def mixed(model):
    """A method of its own in each part. TrOCR's decoder has none."""
    first = {"layers": ["encoder"], "method": "nystromformer", **SMALL["nystromformer"]}
    second = {"layers": ["decoder"], "method": "linear"}
    is_trocr = model.config.decoder.model_type == "trocr"
    return hea.convert(model, hea.EfficientAttentionConfig(layers=[first] if is_trocr else [first, second]))


CHOICES = {
    "encoder": lambda model: hea.convert(model, "nystromformer", layers=["encoder"], **SMALL["nystromformer"]),
    "learned": lambda model: hea.convert(model, "linformer", layers=["encoder"], **SMALL["linformer"]),
    "mix": mixed,
    "by name": lambda model: model.set_attn_implementation({"encoder": "longformer"}),
    "all": lambda model: hea.convert(model, "scatterbrain", **SMALL["scatterbrain"]),
}


@pytest.mark.filterwarnings("ignore:.*exact")
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("names", PAIRS)
def test_what_is_converted_is_saved_and_loaded(names, choice, tmp_path, calls):
    model = pair(names)
    inputs, weights = inputs_of(model), copy.deepcopy(model.state_dict())
    CHOICES[choice](model)
    calls.clear()
    ours = output(model, inputs)
    assert len(calls) >= 2  # of the encoder's layers
    counted = len(calls)
    for folder in (tmp_path / "once", tmp_path / "twice"):
        model = reloaded(model, folder)
        calls.clear()
        assert torch.equal(output(model, inputs), ours)
        assert len(calls) == counted
    made = type(model)(transformers.AutoConfig.from_pretrained(folder)).eval()
    made.load_state_dict(model.state_dict())
    assert torch.equal(output(made, inputs), ours)
    exact = hea.convert(pair(names), "sdpa")
    exact.load_state_dict(weights)
    assert torch.equal(output(hea.convert(model, "sdpa"), inputs), output(exact, inputs))


def test_the_command_converts_the_encoder(tmp_path):
    for names in ("bert+bert", "vit+trocr"):
        model, source, target = pair(names), tmp_path / names, tmp_path / f"{names}-converted"
        model.save_pretrained(source)
        options = {"layers": ["encoder"], "hyperparameters": SMALL["nystromformer"]}
        convert_saved_model(source, target, "nystromformer", **options)
        loaded, inputs = type(model).from_pretrained(target), inputs_of(model)
        CHOICES["encoder"](model)
        assert torch.equal(output(loaded, inputs), output(model, inputs))
        convert_saved_model(target, tmp_path / f"{names}-exact", "sdpa")
        assert "efficient_attention" not in (tmp_path / f"{names}-exact" / "config.json").read_text()


@pytest.mark.parametrize("names", ["vit+trocr", "vit+rembert"])
@pytest.mark.parametrize("layers", [["encoder"], None], ids=str)
def test_a_decoder_without_the_interface_stays_exact_and_causal(names, layers, tmp_path):
    model = pair(names)
    inputs = inputs_of(model)
    with torch.no_grad():
        states = model.encoder(inputs["pixel_values"]).last_hidden_state
    given = {"encoder_outputs": (states,), "decoder_input_ids": inputs["decoder_input_ids"]}
    later = given | {"decoder_input_ids": given["decoder_input_ids"].clone()}
    later["decoder_input_ids"][:, -1] = 7
    exact, exact_later = output(model, given), output(model, later)
    # RemBERT of Transformers 5.12 is not causal by itself.
    assert "rembert" in names or torch.equal(exact[:, :-1], exact_later[:, :-1])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        hea.convert(model, "nearfar", layers=layers)
        assert hea.UptrainingSchedule([("nearfar", None, {"layers": layers})]).step(model, None, 0) is None
    assert any("ForCausalLM does not compute its attention" in str(x.message) for x in warned) == (layers is None)
    for one in (model, reloaded(model, tmp_path)):
        assert (one.config._attn_implementation, one.config.decoder._attn_implementation) == ("nearfar", "eager")
        assert torch.equal(output(one, given), exact)
        assert torch.equal(output(one, later), exact_later)


@pytest.mark.filterwarnings("ignore:TrOCRForCausalLM .*exact")
def test_parts_that_were_chosen_by_name_are_refused(tmp_path):
    model = pair("vit+trocr")
    model.save_pretrained(tmp_path)
    load = type(model).from_pretrained
    names, why = {"encoder": "nearfar", "decoder": "linear"}, "TrOCRForCausalLM does not compute its attention"
    refuses(why, load, tmp_path, attn_implementation=names)
    refuses(why, model.set_attn_implementation, names)
    refuses(r"no attention in layers \['decoder'\]", hea.convert, model, "nearfar", layers=["encoder", "decoder"])
    assert model.config.encoder._attn_implementation == "sdpa"
    assert model.config.decoder._attn_implementation == "eager"


@pytest.mark.filterwarnings("ignore:Data2VecVisionModel .*exact")
def test_a_part_that_chooses_its_attention_from_a_table(tmp_path, calls):
    model = pair("data2vec-vision+bert")
    inputs = inputs_of(model)
    model.save_pretrained(tmp_path / "exact")
    refuses("Data2VecVisionModel chooses its attention from a table", type(model).from_pretrained, tmp_path / "exact",
            attn_implementation={"encoder": "nearfar"})  # fmt: skip
    for layers in (["decoder"], None):
        model.save_pretrained(tmp_path / "exact")
        hea.convert(model, "linear", layers=layers)
        calls.clear()
        ours, counted = output(model, inputs), len(calls)
        assert counted > 0
        model.save_pretrained(tmp_path / "converted")
        config = transformers.AutoConfig.from_pretrained(tmp_path / "exact")
        config.efficient_attention = model.config.efficient_attention  # names the method for all parts
        load = type(model).from_pretrained
        for one in (load(tmp_path / "converted"), load(tmp_path / "exact", config=config)):
            assert one.config.encoder._attn_implementation == "sdpa"
            calls.clear()
            assert torch.equal(output(one, inputs), ours) and len(calls) == counted
        hea.convert(model, "sdpa")


NO_FORM = "is a decoder and nystromformer has no causal form"


@pytest.mark.parametrize(
    ("implementation", "layers", "message"),
    [
        ("nystromformer", None, NO_FORM + r".*; or choose only its encoder \(layers=\['encoder'\]\)"),
        ({"decoder": "nystromformer"}, None, NO_FORM),
        ("nystromformer", ["decoder"], NO_FORM),
        ("nystromformer", ["encodr"], r"EncoderDecoderModel has no attention in layers \['encodr'\]"),
        ("nystromformer", ["encoder.layer.0"], r"EncoderDecoderModel has no attention in layers"),
    ],
    ids=str,
)
def test_loading_refuses_what_the_whole_model_cannot_run(implementation, layers, message, tmp_path):
    model = pair("bert+bert")
    model.save_pretrained(tmp_path)
    choice = {"efficient_attention": {"method": "nystromformer", "layers": layers}} if layers else {}
    refuses(message, type(model).from_pretrained, tmp_path, attn_implementation=implementation, **choice)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "attn_implementation": implementation, **choice}))
    refuses(message, type(model).from_pretrained, tmp_path)
    refuses(message, type(model), transformers.AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize(("names", "layer"), [("bert+bert", "encoder.layer.1"), ("vit+trocr", "layers.1")])
def test_names_in_a_part_that_was_converted_alone_count_from_it(names, layer, tmp_path, calls):
    model = pair(names)
    hea.convert(model.encoder, "scatterbrain", layers=[layer], **SMALL["scatterbrain"])
    ours = output(model, inputs_of(model))
    calls.clear()
    assert torch.equal(output(reloaded(model, tmp_path), inputs_of(model)), ours) and len(calls) == 1
    refuses("no attention in layers", hea.convert, model, "scatterbrain", layers=["layer.1"])


@pytest.mark.parametrize("part", ["vision_model", "text_model"])
def test_two_towers(part, tmp_path):
    vision, text = transformers.CLIPVisionConfig(**SIZES, **IMAGE), tiny_config("bert")
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(vision, text)
    model = enlarged(transformers.VisionTextDualEncoderModel(config))
    ids = torch.randint(5, 60, (2, 100), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32)}
    for converted, method, layers in ((model, "nystromformer", [part]), (getattr(model, part), "scatterbrain", None)):
        hea.convert(converted, method, layers=layers, **SMALL[method])
        with torch.no_grad():
            ours, loaded = model(**inputs), reloaded(model, tmp_path)(**inputs)
        assert torch.equal(ours.logits_per_text, loaded.logits_per_text)


def test_a_model_of_a_user_that_does_not_call_post_init(calls):
    """Then nothing but its parts can switch them."""

    class Whole(transformers.PreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.text = transformers.BertModel(config)

    def make(layers):
        return Whole(tiny_config("bert", efficient_attention={"method": "linear", "layers": layers}))

    with torch.no_grad():
        make(["encoder.layer.1"]).text(torch.zeros(1, 9, dtype=torch.long))
    assert len(calls) == 1
    refuses("no attention in layers", make, ["decoder"])
