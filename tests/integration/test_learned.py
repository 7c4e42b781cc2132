"""Learned parameters in models: initialization, training, saving, loading, offloading, and switching the method."""

import copy

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from hf_efficient_attn.integration.learned import LearnedParameters
from hf_efficient_attn.methods import get_method
from tiny_models import output, tiny_batch, tiny_class, tiny_config, tiny_model

FAMILIES = ["bert", "roberta", "distilbert", "vit", "deit"]
LEARNING = {
    "eva": {"window_size": 8, "num_landmarks": 8, "proposal": "learned"},
    "linformer": {"projection_dim": 16, "share": "none"},
    "nystromformer": {"num_landmarks": 16, "conv_kernel_size": 3},
}
each = pytest.mark.parametrize("method", LEARNING)


def learned_in(model) -> dict[str, LearnedParameters]:
    return {name: m for name, m in model.named_modules() if isinstance(m, LearnedParameters)}


def convert(model, method: str, **options):
    return hea.convert(model, method, **{**LEARNING[method], **options})


def shake(model):
    """Change every learned parameter, so that none has its start value."""
    with torch.no_grad():
        for module in learned_in(model).values():
            for parameter in module.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def missing_keys(info) -> set:
    return set(info["missing_keys"]) | set(info["unexpected_keys"])


@each
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_has_its_own_parameters_with_gradients(family, method):
    model = convert(tiny_model(family), method)
    found = list(learned_in(model).values())
    assert len(found) == 2
    assert set(dict(found[0].named_parameters())) == set(get_method(method).info.learned_parameters)
    assert not {id(p) for p in found[0].parameters()} & {id(p) for p in found[1].parameters()}
    shake(model)
    model.train()(**tiny_batch(family, padding="right"))[0].square().mean().backward()
    for module in found:
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


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
def test_a_checkpoint_without_learned_parameters_starts_as_conversion_does(method, dtype, tmp_path):
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


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_learned_parameters_of_decoders(family):
    model, inputs = convert(tiny_model(family, head=True), "eva"), tiny_batch(family, padding="left")
    start = output(model, inputs)
    assert torch.equal(start, output(convert(tiny_model(family, head=True), "eva", proposal="normal"), inputs))
    shake(model)
    model.train()(**inputs).logits.square().mean().backward()
    for module in learned_in(model).values():
        assert all(p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in module.parameters())


@each
def test_another_method_removes_learned_parameters(method):
    model, inputs = tiny_model("bert"), tiny_batch("bert", padding="left")
    exact, keys = output(model, inputs), model.state_dict().keys()
    for back in (
        lambda: hea.convert(model, "sdpa"),
        lambda: hea.convert(model, "kdeformer"),
        lambda: model.set_attn_implementation("sdpa"),
    ):
        shake(convert(model, method))
        assert not torch.equal(output(model, inputs), exact)
        back()
        assert not learned_in(model)
        assert model.state_dict().keys() == keys
        assert model.config._attn_implementation != "sdpa" or torch.equal(output(model, inputs), exact)


@each
def test_learned_parameters_of_one_layer_and_the_same_choice_again(method, tmp_path):
    model, inputs = convert(tiny_model("bert"), method, layers=[1]), tiny_batch("bert")
    assert [name.split(".")[2] for name in learned_in(model)] == ["1"]
    shake(model)
    first = output(model, inputs)
    model.save_pretrained(tmp_path)
    assert torch.equal(output(tiny_class("bert").from_pretrained(tmp_path), inputs), first)
    assert torch.equal(output(convert(model, method, layers=[1]), inputs), first)
    hea.convert(model, {"method": method, "layers": [0, 1], **LEARNING[method]})
    assert len(learned_in(model)) == 2


def test_sequences_longer_than_the_tables_are_refused_and_positions_are_extended_before_them():
    model = convert(tiny_model("bert"), "linformer", max_length=20)
    with pytest.raises(hea.UnsupportedAttentionError, match="max_length"):
        output(model, tiny_batch("bert"))
    convert(model, "linformer")
    with pytest.raises(hea.UnsupportedAttentionError, match="convert it to 'sdpa'"):
        hea.extend_positions(model, 300)
    hea.extend_positions(hea.convert(model, "sdpa"), 300)
    tables = learned_in(convert(model, "linformer"))
    assert all(m.key_projection.shape[1] == 300 for m in tables.values())
    hea.extend_positions(convert(model, "nystromformer"), 310)


# Models whose modules are moved to memory only for their own forward


OFFLOADED = {
    "eva": LEARNING["eva"],
    "linformer": LEARNING["linformer"],
    "nystromformer": LEARNING["nystromformer"],
    "flurka_linear": {"projection_dim": 16},
    "flurka_performer": {"projection_dim": 16},
    "flurka_eva": {"projection_dim": 16},
    "linear": {"feature_map": "hedgehog", "num_features": 8, "window_size": 4},
    "performer": {"feature_map": "hedgehog", "num_features": 8},
}


def test_every_method_that_learns_is_tested_offloaded():
    methods = {name.partition(" ")[0] for name in OFFLOADED}
    assert methods == {name for name in hea.available_methods() if hea.method_info(name).learned_parameters}


@pytest.mark.parametrize("name", OFFLOADED)
@pytest.mark.parametrize("family", ["bert", "vit", "llama"])
def test_an_offloaded_model_is_equal(family, name, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    method = name.partition(" ")[0]
    if family == "llama" and not hea.method_info(method).causal:
        pytest.skip("no causal form, and a decoder")
    model, inputs = (
        hea.convert(tiny_model(family, head=True), {"method": method, **OFFLOADED[name]}),
        tiny_batch(family),
    )
    shake(model)
    expected = output(model, inputs)
    model.save_pretrained(tmp_path / "model")
    loaded = tiny_class(family, head=True).from_pretrained(
        tmp_path / "model", device_map={"": "disk"}, offload_folder=tmp_path / "loaded"
    )
    assert all(p.device.type == "meta" for m in learned_in(loaded).values() for p in m.parameters())
    assert torch.equal(output(loaded, inputs), expected)
    twin = copy.deepcopy(model)
    assert torch.equal(output(accelerate.cpu_offload(twin, torch.device("cpu")), inputs), expected)
    accelerate.disk_offload(model, tmp_path / "disk", torch.device("cpu"))
    assert torch.equal(output(model, inputs), expected)
    assert all(p.device.type == "meta" for m in learned_in(model).values() for p in m.parameters())


def test_an_offloaded_model_cannot_be_given_parameters():
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(tiny_model("bert"), torch.device("cpu"))
    with pytest.raises(hea.UnsupportedAttentionError, match=r"is offloaded.*convert the model first"):
        convert(model, "linformer")
    hea.convert(model, "kdeformer")
    output(model, tiny_batch("bert"))


# A config that was changed without the model


@each
def test_a_config_that_was_changed_without_the_model(method):
    """Through another model with the same config object, or by hand."""
    config, inputs, ask = tiny_config("bert"), tiny_batch("bert"), r"hf_efficient_attn\.convert"
    first, second = (tiny_class("bert")(config).eval() for _ in range(2))
    output(convert(first, method), inputs)
    with pytest.raises(hea.UnsupportedAttentionError, match=f"has no learned parameters.*{ask}"):
        output(second, inputs)
    output(hea.convert(second, "kdeformer"), inputs)
    model = tiny_model("bert")
    model.config._attn_implementation = method
    model.config.efficient_attention = {"method": method, **LEARNING[method]}
    with pytest.raises(hea.UnsupportedAttentionError, match=ask):
        output(model, inputs)
    output(convert(model, method), inputs)


def test_parameters_of_other_hyperparameters_and_of_a_compiled_model():
    model, inputs = convert(tiny_model("bert"), "linformer"), tiny_batch("bert")
    model.config.efficient_attention = {"method": "linformer", "projection_dim": 8}
    with pytest.raises(hea.UnsupportedAttentionError, match=r"has learned parameters of Linformer.*convert"):
        output(model, inputs)
    model = tiny_model("bert")
    model.config._attn_implementation = "linformer"
    with pytest.raises(Exception, match=r"hf_efficient_attn\.convert"):
        output(torch.compile(model, fullgraph=True, backend="eager"), inputs)


@pytest.mark.filterwarnings("error:Dynamo detected a call to a:UserWarning")
@pytest.mark.parametrize(
    "method", ["eva", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("nystromformer", "kdeformer"))]
)
def test_methods_that_learn_nothing_compile_without_a_warning(method):
    torch._dynamo.reset()
    model, inputs = hea.convert(tiny_model("bert"), method), tiny_batch("bert")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(output(compiled, inputs), output(model, inputs))


def _deepseek():
    sizes = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    names = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.DeepseekV3Config(**sizes, **experts, **names, **heads, max_position_embeddings=128)
    return transformers.DeepseekV3Model(config), lambda: {"input_ids": torch.randint(4, 60, (2, 60))}


def _spectrogram():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.ASTConfig(**sizes, max_length=80, num_mel_bins=32)
    return transformers.ASTModel(config), lambda: {"input_values": torch.randn(2, 80, 32)}


@pytest.mark.parametrize("make", [_deepseek, _spectrogram])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("linear", {"feature_map": "hedgehog"}),
        ("linear", {"feature_map": "exp", "num_features": 8, "window_size": 4}),
        ("performer", {"feature_map": "t2r", "num_features": 8}),
    ],
)
def test_feature_maps_where_keys_and_values_differ_and_where_the_longest_sequence_is_unknown(
    make, method, options, tmp_path
):
    torch.manual_seed(0)
    model, batch = make()
    losses = []
    report = hea.DistillationOptions(on_step=lambda _, found: losses.append(sum(x.loss for x in found)))
    hea.distill(model.eval(), method, [batch() for _ in range(3)], steps=12, options=report, **options)
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path)
    inputs = batch()
    with torch.no_grad():
        again = type(model).from_pretrained(tmp_path).eval()(**inputs)[0]
        torch.testing.assert_close(again, model(**inputs)[0])


def test_tables_need_the_longest_sequence():
    with pytest.raises(hea.UnsupportedAttentionError, match="give max_length=N"):
        hea.convert(_spectrogram()[0], "linformer", projection_dim=4)
    model, batch = _spectrogram()
    hea.convert(model, "linformer", projection_dim=4, max_length=40)
    assert model(**batch())[0].isfinite().all()
