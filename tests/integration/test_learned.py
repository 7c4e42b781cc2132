"""Learned parameters in models, learned feature maps, and `linear` with a window that is computed exactly."""

import dataclasses

import pytest
import torch
import transformers
from torch import Tensor

import hf_efficient_attn as hea
from each import close, refuses
from helpers.learned import LEARNING, learned_in, shake
from helpers.model_types import sizes
from helpers.trainings import values
from hf_efficient_attn.integration.layers import ModuleLocation
from hf_efficient_attn.integration.learned import attach, learned_of
from hf_efficient_attn.integration.models import AttentionModule
from hf_efficient_attn.methods import get_method
from hf_efficient_attn.ops.features.maps import LEARNED, count_features, start_map
from instances import inputs, numbers
from tiny_models import FAMILIES, output, reloaded, tiny_batch, tiny_class, tiny_config, tiny_model

each = pytest.mark.parametrize("method", LEARNING)
each_form = pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
each_map = pytest.mark.parametrize("feature_map", ["elu", *LEARNED])
each_learned = pytest.mark.parametrize("feature_map", LEARNED)


def convert(model, method: str, **options):
    return hea.convert(model, method, **{**LEARNING[method], **options})


def test_every_method_that_learns_is_tested():
    assert set(LEARNING) == {name for name in hea.available_methods() if hea.method_info(name).learned_parameters}


@each
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_has_its_own_parameters_which_are_trained_saved_and_loaded(family, method, tmp_path):
    model, inputs = convert(tiny_model(family, head=True), method), tiny_batch(family, padding="right")
    first, second = learned_in(model).values()
    assert set(first.tensors()) <= set(get_method(method).info.learned_parameters)
    assert first.tensors().keys() == second.tensors().keys()
    assert not {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}
    start = output(model, inputs)
    found = output(shake(model), inputs)
    assert not torch.equal(found, start)
    for turn in range(2):
        model, info = reloaded(model, tmp_path / str(turn), output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert torch.equal(output(model, inputs), found)
    model.train()(**inputs)[0].square().mean().backward()
    for module in learned_in(model).values():
        for name, parameter in module.named_parameters():
            assert parameter.grad.isfinite().all() and parameter.grad.abs().sum() > 0, name


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_without_learned_parameters_starts_as_conversion_does(method, dtype, tmp_path):
    exact, choice = tiny_model("bert").to(dtype), {"method": method, **LEARNING[method]}
    loaded = reloaded(exact, tmp_path, efficient_attention=choice, dtype=dtype)
    converted = learned_in(convert(exact, method))
    for name, module in learned_in(loaded).items():
        for key, parameter in module.tensors().items():
            assert parameter.dtype == dtype and torch.equal(parameter, converted[name].tensors()[key])
    assert torch.equal(output(loaded, tiny_batch("bert")), output(exact, tiny_batch("bert")))


@each
def test_switching_again(method, tmp_path):
    """The same method keeps what was learned, in one layer or in all; another one removes it."""
    model, inputs = tiny_model("bert"), tiny_batch("bert", padding="left")
    exact, keys = output(model, inputs), model.state_dict().keys()
    for back in ("sdpa", "kdeformer", "set_attn_implementation"):
        shake(convert(model, method, layers=[1]))
        assert [name.split(".")[2] for name in learned_in(model)] == ["1"]
        first = output(model, inputs)
        assert not torch.equal(first, exact)
        assert torch.equal(output(reloaded(model, tmp_path), inputs), first)
        for dtype in ("auto", "bfloat16", "auto"):
            convert(model, method, layers=[1], compute_dtype=dtype)
        assert torch.equal(output(model, inputs), first)
        hea.convert(model, {"method": method, "layers": [0, 1], **LEARNING[method]})
        assert len(learned_in(model)) == 2
        model.set_attn_implementation("sdpa") if back == "set_attn_implementation" else hea.convert(model, back)
        assert not learned_in(model) and model.state_dict().keys() == keys
        assert back == "kdeformer" or torch.equal(output(model, inputs), exact)


def test_the_length_of_tables():
    """They are made for the positions of the model, which are extended before, for a picture, or for `max_length`."""
    model = convert(tiny_model("bert"), "linformer", max_length=20)
    refuses("max_length", output, model, tiny_batch("bert"))
    convert(model, "linformer")
    refuses("convert it to 'sdpa'", hea.extend_positions, model, 300)
    hea.extend_positions(hea.convert(model, "sdpa"), 300)
    assert all(m.key_projection.shape[1] == 300 for m in learned_in(convert(model, "linformer")).values())
    hea.extend_positions(convert(model, "nystromformer"), 310)
    model, batch = _spectrogram()
    refuses("give max_length=N", hea.convert, model, "linformer", projection_dim=4)
    assert output(hea.convert(model, "linformer", projection_dim=4, max_length=40), batch()).isfinite().all()
    kind = type("ConditionalDetrDecoderCrossAttention", (torch.nn.Module,), {"num_heads": 4, "head_dim": 8})
    place, method = ModuleLocation(0, "0", True, 0), hea.LinformerConfig()
    for name, length in (("ViT", 198), ("Dinov2WithRegisters", 201), ("Yolos", 32 * 54 + 101)):
        attach(AttentionModule(module := kind(), place, getattr(transformers, f"{name}Config")(), None), method)
        assert {"head_dim": 16, "value_dim": 8, "max_length": length}.items() <= learned_of(module).sizes.items()
    refuses("max_length=N", attach, AttentionModule(kind(), place, transformers.VideoMAEConfig(), None), method)


@each
def test_a_config_that_was_changed_without_the_model(method):
    """Through another model with the same config object, or by hand."""
    config, inputs, ask = tiny_config("bert"), tiny_batch("bert"), r"hf_efficient_attn\.convert"
    first, second = (tiny_class("bert")(config).eval() for _ in range(2))
    output(convert(first, method), inputs)
    refuses(f"not switched to {method}.*{ask}", output, second, inputs)
    output(hea.convert(second, "kdeformer"), inputs)
    refuses(f"not switched to kdeformer.*{ask}", output, first, inputs)
    model = convert(tiny_model("bert"), method)
    model.config.efficient_attention = {"method": method, **LEARNING[method], "seed": 5}
    refuses(f"has learned parameters of .*{ask}", output, model, inputs)
    output(hea.convert(model, {"method": method, **LEARNING[method], "seed": 5}), inputs)


def test_adapters_have_the_parameters_that_are_trained(tmp_path):
    """Parameters that are attached after PEFT's adapter would be trained and not saved."""
    peft = pytest.importorskip("peft")
    inputs, choice = tiny_batch("bert"), {"method_or_config": "linear", "feature_map": "hedgehog"}
    lora = peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["learned_parameters"])
    for adapter in (lora, peft.PromptTuningConfig(num_virtual_tokens=3, task_type="FEATURE_EXTRACTION")):
        model = peft.get_peft_model(tiny_model("bert"), adapter)
        refuses("^linear learns parameters, and the model has PEFT adapters", hea.convert, model, **choice)
        assert model.config._attn_implementation == "sdpa" and not learned_in(model)
        hea.convert(model, "linear")  # learns nothing
    model = peft.get_peft_model(hea.convert(tiny_model("bert"), **choice), lora)
    refuses("^linear learns parameters", hea.convert, model, "linear", feature_map="t2r")
    refuses("^linformer learns parameters", model.set_attn_implementation, "linformer")
    shake(model)
    hea.convert(model, **choice)  # has them already
    ours = output(model.eval(), inputs)
    model.save_pretrained(tmp_path)
    load = peft.PeftModel.from_pretrained
    assert torch.equal(output(load(hea.convert(tiny_model("bert"), **choice), tmp_path).eval(), inputs), ours)
    words = "^the adapter has learned parameters of attention, and BertModel has none"
    refuses(words, load, tiny_model("bert"), tmp_path)
    mixed = {**inputs, "adapter_names": ["default", "__base__"]}
    refuses(r"adapter_names=.*call model\.set_adapter", output, model, mixed)
    hea.convert(model.unload(), "linformer")
    lora = peft.LoraConfig(r=2, target_modules=["key"], init_lora_weights=False)
    model = peft.get_peft_model(convert(tiny_model("bert"), "flurka_linear"), lora).eval()
    found = output(model, mixed)  # the learned parameters are the same for both
    close([output(model, inputs)[0], output(model.unload(), inputs)[1]], list(found), 1e-5)


def test_models_that_cannot_be_given_parameters():
    """While the parameters are elsewhere, or in the middle of a graph."""
    accelerate, inputs = pytest.importorskip("accelerate"), tiny_batch("bert")
    model = accelerate.cpu_offload(tiny_model("bert"), torch.device("cpu"))
    refuses(r"is offloaded.*convert the model first", convert, model, "linformer")
    output(hea.convert(model, "kdeformer"), inputs)
    model = tiny_model("bert", num_hidden_layers=1)
    model.config._attn_implementation = "linformer"
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    refuses(r"hf_efficient_attn\.convert", output, compiled, inputs, error=Exception)


def _deepseek():
    ranks = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    more = {**ranks, **experts, "moe_intermediate_size": 16, "num_key_value_heads": 4}
    config = transformers.DeepseekV3Config(**sizes(transformers.DeepseekV3Config, **more))
    return transformers.DeepseekV3Model(config), lambda: {"input_ids": torch.randint(4, 60, (2, 60))}


def _spectrogram():
    config = transformers.ASTConfig(**sizes(transformers.ASTConfig, max_length=80, num_mel_bins=32, patch_size=16))
    return transformers.ASTModel(config), lambda: {"input_values": torch.randn(2, 80, 32)}


def test_a_layer_with_sizes_of_its_own():
    kind = getattr(transformers, "EmbeddingGemma2TextConfig", None)
    if kind is None:
        pytest.skip("this Transformers does not have the model")
    more = {"layer_types": ["full_attention"] * 2, "sliding_window": 80, "hidden_size_per_layer_input": 8}
    config = kind(**sizes(kind, **more, global_head_dim=16, num_global_key_value_heads=1))
    model = transformers.EmbeddingGemma2TextModel(config)
    found = learned_of(hea.convert(model, "flurka_linear").layers[0].self_attn).sizes
    assert found == {"num_heads": 4, "num_kv_heads": 1, "head_dim": 16, "value_dim": 16, "max_length": 80}


@pytest.mark.parametrize("make", [_deepseek, _spectrogram])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("linear", {"feature_map": "hedgehog"}),
        ("linear", {"feature_map": "exp", "num_features": 8, "window_size": 4}),
        ("performer", {"feature_map": "t2r", "num_features": 8}),
    ],
)
def test_feature_maps_of_unusual_sizes(make, method, options, tmp_path):
    """Keys and values of different dimensions, and a model whose longest sequence is unknown."""
    torch.manual_seed(0)
    (model, batch), losses = make(), []
    report = hea.DistillationOptions(on_step=lambda _, found: losses.append(sum(x.loss for x in found)))
    hea.distill(model.eval(), method, [batch() for _ in range(3)], steps=12, options=report, **options)
    assert losses[-1] < losses[0]
    inputs = batch()
    torch.testing.assert_close(output(reloaded(model, tmp_path), inputs), output(model, inputs))


# Learned feature maps


def random_maps(feature_map: str, num_heads: int = 4, num_features: int = 12) -> dict[str, Tensor]:
    shape = (num_heads, 8 + (feature_map == "t2r"), num_features)
    return {name: numbers(*shape, seed=i, dtype=torch.float32) for i, name in enumerate(("query_map", "key_map"))}


@each_learned
def test_key_heads_of_grouped_queries_have_one_map_each(feature_map):
    (query, key, value), maps = inputs(2, 4, 45, 8, num_kv_heads=2), random_maps(feature_map, num_heads=2)
    options = {"feature_map": feature_map, "num_features": 12, "is_causal": True}
    found = hea.attention("linear", query, key, value, **options, **maps)
    repeated = {name: x.repeat_interleave(2, 0) for name, x in maps.items()}
    wanted = hea.attention("linear", query, *(x.repeat_interleave(2, 1) for x in (key, value)), **options, **repeated)
    torch.testing.assert_close(found, wanted)
    model = hea.convert(tiny_model("llama"), "linear", feature_map=feature_map, num_features=12)
    shapes = {p.shape[0] for m in learned_in(model).values() for p in m.parameters()}
    assert shapes == {model.config.num_key_value_heads}


@each_learned
def test_start(feature_map):
    factors = {"hedgehog": (1.5, 1.5), "exp": (2, 1), "t2r": (1, 1)}[feature_map]
    both = [start_map(feature_map, 3, 8, 20, seed=0, is_query=is_query) for is_query in (True, False)]
    start = both[1].clone()
    assert start.shape == (3, 8 + (feature_map == "t2r"), 20)
    for one, factor in zip(both, factors, strict=True):
        torch.testing.assert_close(one[:, :8] / factor, start[:, :8] / factors[1])
    start[:, :8] /= factors[1]
    assert torch.equal(start[0, :8, :8], torch.eye(8))
    columns = start[0, :8, 8:16]
    torch.testing.assert_close(columns.T @ columns, torch.eye(8), rtol=1e-5, atol=1e-5)
    assert not torch.equal(start, start_map(feature_map, 3, 8, 20, seed=1, is_query=False))
    assert count_features(feature_map, 20) == (20 if feature_map == "t2r" else 40)
    assert count_features(feature_map, hea.LinearConfig(feature_map=feature_map).with_budget(64).num_features) == 64
    narrow = start_map(feature_map, 1, 8, 4, seed=0, is_query=False)[0, :8] / factors[1]
    torch.testing.assert_close(narrow.T @ narrow, 2 * torch.eye(4), rtol=1e-5, atol=1e-5)
    with torch.device("meta"):
        assert start_map(feature_map, 1, 8, 12, seed=0, is_query=True).device.type == "cpu"


# `linear` with a window

SHAPE = {"batch": 2, "num_heads": 4, "num_kv_heads": 2, "q_len": 90, "value_dim": 5, "dtype": torch.float64}


def config(feature_map: str = "hedgehog", window_size: int = 6, **options) -> hea.LinearConfig:
    return hea.LinearConfig(feature_map=feature_map, num_features=9, window_size=window_size, **options)


def parameters(method: hea.LinearConfig) -> dict[str, Tensor]:
    """Parameters other than those that a conversion starts from."""
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "value_dim": 5, "max_length": 90}
    start = get_method("linear").initial_parameters(method, **sizes)
    return {name: x.double() + 0.3 * numbers(*x.shape, seed=i) for i, (name, x) in enumerate(start.items())}


@each_form
@each_map
def test_tokens_of_zeros_count_the_same_in_both_fields(feature_map, is_causal):
    query, key, value = inputs(**SHAPE)
    ours = hea.attention(config(feature_map), 0.0 * query, 0.0 * key, value, is_causal=is_causal)
    count = torch.arange(1, 91).view(-1, 1) if is_causal else 90
    mean = value.cumsum(2) / count if is_causal else value.mean(2, keepdim=True).expand_as(value)
    torch.testing.assert_close(ours, mean.repeat_interleave(2, 1), rtol=1e-6, atol=1e-6)


@each_form
@each_learned
def test_the_log_weight_decides_between_the_fields(feature_map, is_causal):
    """With none on the features the output is that of the window, and with all that of the features."""
    tensors, method = inputs(**SHAPE), config(feature_map)
    learned, alone = parameters(method), dataclasses.replace(method, window_size=0)

    def attend(config, query, key, value, parameters=learned, **options):
        return hea.attention(config, query, key, value, is_causal=is_causal, parameters=parameters, **options)

    window, both = attend(hea.LongformerConfig(window_size=6), *tensors, None), attend(method, *tensors)
    weights = (torch.full((2,), x, dtype=torch.float64) for x in (-1e4, 1e4))
    nothing, everything = (attend(method, *tensors, {**learned, "far_log_weight": x}) for x in weights)
    torch.testing.assert_close(nothing, window)
    if is_causal:
        # The first queries have no key outside of the window. The last: the features of the keys before its window.
        torch.testing.assert_close(everything[:, :, :7], window[:, :, :7])
        mask = (torch.arange(84) < 83).expand(2, -1)
        query, key, value = tensors
        far = attend(alone, query[:, :, -1:], key[:, :, :84], value[:, :, :84], attention_mask=mask)
        torch.testing.assert_close(everything[:, :, -1:], far)
    # What was learned with a window is used without it, where `far_log_weight` has no effect.
    maps = {name: learned[name] for name in ("query_map", "key_map")}
    assert torch.equal(attend(alone, *tensors), attend(alone, *tensors, maps))
    assert not torch.allclose(attend(alone, *tensors), both, rtol=0.1)


@each_form
@each_map
def test_features_that_underflow(feature_map, is_causal):
    """Queries and keys whose features are all tiny, or overflow without their bounds."""
    query, key, value = inputs(1, 2, 90, 8)
    for size in (-1e3, 1e3, 1e4):
        leaves = [x.requires_grad_() for x in (torch.full_like(query, size), torch.full_like(key, -size), value)]
        out = hea.attention(config(feature_map), *leaves, is_causal=is_causal, scale=1e-4)
        assert out.isfinite().all() and out.abs().max() <= value.abs().max() * 1.001
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), leaves))


def test_parameters_that_are_refused():
    tensors, maps = inputs(2, 4, 45, 8, value_dim=5), random_maps("hedgehog")
    learned = {name: x.float() for name, x in parameters(config()).items()}
    weight = r"far_log_weight .*window_size=.* 4 heads .*: give a tensor \(4,\)"
    for method, given, words in (
        (hea.LinearConfig(), maps, r"query_map .*feature_map='elu'.*: give no query_map"),
        (hea.PerformerConfig(), maps, r"query_map .*feature_map='favor'.*: give no query_map"),
        (hea.LinearConfig(feature_map="hedgehog", num_features=13), maps, r"not match .*num_features=13.* and 4 heads"),
        (config(), {**learned, "far_log_weight": None}, weight),
        (config(), {**learned, "far_log_weight": torch.zeros(3)}, weight),
        (config(), {**learned, "far_log_weight": torch.zeros(2, 1)}, weight),
        (config("elu"), {"far_log_weight": torch.zeros(2)}, r"far_log_weight .*'elu'.*: give no far_log_weight"),
        (hea.LinformerConfig(), {}, "key_projection is missing"),
    ):
        own = {name: x for name, x in given.items() if x is not None}
        refuses(words, hea.attention, method, *tensors, parameters=own)


def test_parameters_and_the_budget_of_a_window():
    assert set(parameters(config())) == {"query_map", "key_map", "far_log_weight"}
    assert set(parameters(config(window_size=0))) == {"query_map", "key_map"}
    assert parameters(config("elu")) == {} and parameters(config())["far_log_weight"].shape == (2,)
    assert config().with_budget(64) == config(window_size=15).with_budget(64)
    for one, expected in ((config(), (15, 16)), (config("elu"), (31, 9)), (config(window_size=0), (0, 32))):
        assert (one.with_budget(64).window_size, one.with_budget(64).num_features) == expected
    assert all(config(name).with_budget(1).window_size == 1 for name in ("elu", *LEARNED))


def test_a_saved_model_gives_the_far_part_alone(tmp_path):
    """Without a window it has the same maps, with other features new ones."""
    model, inputs = shake(hea.convert(tiny_model("gpt2", head=True), config())), tiny_batch("gpt2", padding="left")
    assert torch.equal(output(reloaded(model, tmp_path), inputs), output(model, inputs))
    alone = type(model).from_pretrained(tmp_path, efficient_attention=config(window_size=0).to_dict())
    for own, other in zip(*(learned_in(x).values() for x in (alone, model)), strict=True):
        assert set(own.tensors()) == {"query_map", "key_map"}
        assert all(torch.equal(x, other.tensors()[name]) for name, x in own.tensors().items())
    assert not torch.allclose(output(alone, inputs), output(model, inputs))
    close(values(hea.convert(model, config(window_size=0))), values(alone), 0)
    fresh = hea.convert(tiny_model("gpt2", head=True), config("exp"))
    close(values(hea.convert(model, config("exp"))), values(fresh), 0)
