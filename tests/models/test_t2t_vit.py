"""T2T-ViT: published sizes, every method in every stage, checkpoints, gradients, images of any size."""

import copy
import functools
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    ViTImageProcessorPil,
)

import hf_efficient_attn as hea
from hf_efficient_attn.integration.models import attention_modules
from hf_efficient_attn.models.t2t_vit import (
    T2TViTConfig,
    T2TViTForImageClassification,
    T2TViTModel,
    image_processor,
)
from tiny_models import METHODS, RANDOM, SMALL, output

# `sum(p.numel() for p in model.parameters())` of the authors' models/t2t_vit.py, by name.
COUNTS = {
    "t2t_vit_7": 4_310_222,
    "t2t_vit_10": 5_889_230,
    "t2t_vit_12": 6_941_902,
    "t2t_vit_14": 21_545_550,
    "t2t_vit_19": 39_177_422,
    "t2t_vit_24": 64_105_934,
    "t2t_vit_t_14": 21_541_070,
    "t2t_vit_t_19": 39_172_942,
    "t2t_vit_t_24": 64_101_454,
    "t2t_vit_flurka": 4_305_742,  # 4.3 M in Gupta et al. 2023, Table 6
}
# Images of 32 pixels: 256 and 64 tokens in the stages, 16 and the class token in the backbone.
TINY = {
    "image_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "token_dim": 16, "t2t_strides": [2, 2, 2], "num_labels": 3,
}  # fmt: skip
STAGES, BLOCKS = ["t2t.0", "t2t.1"], [0, 1]
each_method = pytest.mark.parametrize("method", METHODS)
each_type = pytest.mark.parametrize("tokens_type", ["transformer", "performer"])


def tiny(cls=T2TViTForImageClassification, seed=0, **changes):
    """Return a tiny model in eval mode, with large projections so that attention is far from uniform."""
    torch.manual_seed(seed)
    model = cls(T2TViTConfig(**{**TINY, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and parameter.requires_grad:
                parameter.mul_(40.0 if "q_proj" in name or "k_proj" in name else 8.0)
    return model


def images(*shape, seed=0):
    return torch.randn(shape or (2, 3, 32, 32), generator=torch.Generator().manual_seed(seed))


def logits(model, values=None, **options):
    return output(model, {"pixel_values": images() if values is None else values}, **options)


@pytest.mark.parametrize("name", COUNTS)
def test_number_of_parameters_equals_the_published_models(name):
    config = T2TViTConfig.from_name(name)
    with torch.device("meta"):
        model = T2TViTForImageClassification(config)
    assert sum(p.numel() for p in model.parameters()) == COUNTS[name]
    frozen = {key.rpartition(".")[2] for key, p in model.named_parameters() if not p.requires_grad}
    assert frozen == ({"position_embeddings"} if config.tokens_type == "transformer" else {"position_embeddings", "w"})


def test_models_by_name():
    assert set(T2TViTConfig.names()) == set(COUNTS)
    with pytest.raises(ValueError, match=r"'t2t_vit_15'. Did you mean 't2t_vit_1.'.*Known: t2t_vit_7, .*vit_flurka"):
        T2TViTConfig.from_name("t2t_vit_15")
    changed = T2TViTConfig.from_name("t2t_vit_14", image_size=384, id2label={0: "cat", 1: "dog"})
    assert (changed.image_size, changed.num_labels, changed.tokens_type) == (384, 2, "performer")
    assert T2TViTConfig.from_name("t2t_vit_7").num_labels == 1000
    for option in ({}, {"qk_scale": 0.3}):
        scales = [module.scaling for module, *_ in attention_modules(tiny(T2TViTModel, **option))]
        assert scales == pytest.approx([147**-0.5, 144**-0.5, *[option.get("qk_scale", 16**-0.5)] * 2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_type": "performr"}, "Did you mean 'performer'"),
        ({"hidden_size": 33}, "no multiple of 2 heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"t2t_strides": [4, 2]}, "three numbers each"),
        ({"t2t_strides": [8, 2, 2]}, "from 1 to the size of its kernel"),
        ({"image_size": [32, 32, 3]}, "one number or"),
        ({"image_size": 0}, "too small"),
        ({"kernel_ratio": 0.01}, "random features.=0 must"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_sizes_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        T2TViTConfig(**{**TINY, **changes})


def test_configs_survive_saving_and_copying(tmp_path):
    config = T2TViTConfig.from_name("t2t_vit_10", image_size=[224, 448], qk_scale=0.0625, t2t_strides=(4, 2, 2))
    assert (config.patch_size, config.t2t_paddings) == (16, [2, 1, 1])
    assert config.grids() == [(56, 112), (28, 56), (14, 28)]
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is T2TViTConfig and again.to_json_string() == config.to_json_string()
    assert T2TViTConfig(**TINY).grids() == [(16, 16), (8, 8), (4, 4)]
    with pytest.raises(ValueError, match="images of 2 x 40 pixels are too small for kernels"):
        config.grids(2, 40)
    assert copy.deepcopy(config).to_dict() == config.to_dict()


def test_tokens_of_an_image_of_224_pixels():
    """3136, 784, and 196 plus the class token; each attention module states its tokens, heads and head_dim."""
    model = tiny(T2TViTModel, image_size=224, t2t_strides=[4, 2, 2], hidden_size=16, token_dim=4)
    seen = {}
    for module, location, *_ in attention_modules(model):
        module.register_forward_hook(
            lambda module, args, out, layer=location.layer: seen.update({layer: args[0].shape[1]})
        )
        assert module.attention_layer == location.layer and module.is_causal is False
        assert (module.num_heads, module.head_dim) == ((1, 4) if location.layer in STAGES else (2, 8))
    logits(model, images(1, 3, 224, 224))
    assert seen == {"t2t.0": 3136, "t2t.1": 784, 0: 197, 1: 197}
    assert seen == {location.layer: module.max_tokens for module, location, *_ in attention_modules(model)}


@each_method
def test_every_method_in_every_stage_and_block(method):
    model = tiny()
    exact = logits(model)
    for layers in (STAGES, None):
        hea.convert(model, method, layers=layers, **SMALL[method])
        found = logits(model)
        assert torch.isfinite(found).all()
        assert not torch.equal(found, exact), "the stages have more tokens than any budget here"
    alone = torch.cat([logits(model, image[None]) for image in images()])
    torch.testing.assert_close(alone, found, atol=2e-4, rtol=2e-4)
    assert torch.equal(logits(hea.convert(model, "sdpa")), exact)
    if method not in RANDOM:
        # Without random draws, naming all layers gives the same as naming none.
        both = hea.convert(model, method, layers=[*STAGES, *BLOCKS], **SMALL[method])
        torch.testing.assert_close(logits(both), found)


@pytest.mark.parametrize(
    "method", [x if x in ("nearfar", "linformer") else pytest.param(x, marks=pytest.mark.exhaustive) for x in METHODS]
)
def test_saving_and_loading_a_mix(method, tmp_path):
    other = "longformer" if method == "linear" else "linear"
    mix = [
        {"layers": ["t2t.0", 1], "method": method, **SMALL[method]},
        {"layers": ["t2t.1"], "method": other, **SMALL[other]},
    ]
    model = hea.convert(tiny(), hea.EfficientAttentionConfig(method, layers=mix))
    expected = logits(model)
    for turn in range(2):
        model.save_pretrained(tmp_path / str(turn))
        saved = json.loads((tmp_path / str(turn) / "config.json").read_text())
        assert [entry["layers"] for entry in saved["efficient_attention"]["layers"]] == [["t2t.0", 1], ["t2t.1"]]
        model = AutoModelForImageClassification.from_pretrained(tmp_path / str(turn))
        assert type(model) is T2TViTForImageClassification and model.config._attn_implementation == method
        assert torch.equal(logits(model), expected)
    assert type(AutoModel.from_pretrained(tmp_path / "1")) is T2TViTModel


def test_performer_stages_take_no_method():
    model = tiny(tokens_type="performer")
    assert [location.layer for _, location, *_ in attention_modules(model)] == [0, 1]
    exact = logits(model)
    for words in (r"in layers \['t2t.0'\]; its layers are \[0, 1\]", r"t2t\.0.*an attention of their own"):
        with pytest.raises(hea.UnsupportedAttentionError, match=words):
            hea.convert(model, "kdeformer", layers=["t2t.0"])
    with pytest.raises(ValueError, match=r"t2t\.0.*tokens_type='transformer'"):
        tiny(tokens_type="performer", efficient_attention={"method": "linear", "layers": ["t2t.0", 1]})
    assert torch.equal(logits(model), exact)
    assert not torch.equal(logits(hea.convert(model, "longformer", window_size=2)), exact)
    for name in ("t2t.2", 2):
        with pytest.raises(hea.UnsupportedAttentionError, match=r"its layers are .*t2t.0.*, 0, 1"):
            hea.convert(tiny(), "kdeformer", layers=[name])


@pytest.mark.parametrize(
    ("tokens_type", "method"),
    [
        ("transformer", "sdpa"),
        pytest.param("performer", "sdpa", marks=pytest.mark.exhaustive),
        # A method on keys and values, and one that projects the backbone's hidden states. Others: the method tests.
        pytest.param("transformer", "kdeformer", marks=pytest.mark.exhaustive),
        pytest.param("transformer", "flurka_performer", marks=pytest.mark.exhaustive),
    ],
)
def test_compiles_to_one_graph(tokens_type, method):
    model = hea.convert(tiny(tokens_type=tokens_type, num_hidden_layers=1), method, **SMALL.get(method, {}))
    options = {"values": images(2, 3, 40, 24), "interpolate_pos_encoding": True} if method == "sdpa" else {}
    expected = logits(model, **options)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    tolerance = 1e-5 if method == "sdpa" else 1e-4
    torch.testing.assert_close(logits(compiled, **options), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("tokens_type", "method"),
    [
        ("performer", "sdpa"),
        *(("transformer", method) for method in ("kdeformer", "flurka_linear", "nystromformer")),
        *(pytest.param("transformer", method, marks=pytest.mark.exhaustive) for method in METHODS),
    ],
)
def test_gradients_reach_every_parameter(tokens_type, method):
    """The same gradients with gradient checkpointing, reentrant or not."""
    dropout = {"hidden_dropout_prob": 0.1, "drop_path_rate": 0.3, "token_dropout_prob": 0.1}
    grads = []
    for checkpointing in (False, True):
        model = hea.convert(tiny(tokens_type=tokens_type, **dropout), method, **SMALL.get(method, {})).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": tokens_type == "transformer"})
        torch.manual_seed(5)
        model(images(8, 3, 32, 32), labels=torch.arange(8) % 3).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    for name, grad in grads[0].items():
        # Learned parameters may be longer than the sequence, or the output may not depend on some of their directions.
        assert torch.isfinite(grad).all() and ("learned_parameters" in name or grad.abs().sum() > 0), name
        # The reentrant form has a first pass without gradients, which nearfar computes in another order.
        tolerance = 1e-3 * grad.abs().max().item() if method == "nearfar" else 0.0
        torch.testing.assert_close(grads[1][name], grad, rtol=0, atol=tolerance, msg=name)
    frozen = {name: p.grad for name, p in model.named_parameters() if not p.requires_grad}
    assert all(name.endswith(("position_embeddings", ".w")) and grad is None for name, grad in frozen.items())
    assert sum(m.gradient_checkpointing for m in model.modules() if hasattr(m, "gradient_checkpointing")) >= 4


def test_dropout_is_that_of_the_authors():
    assert T2TViTConfig.from_name("t2t_vit_14").token_dropout_prob == 0.1
    assert T2TViTConfig.from_name("t2t_vit_t_14").token_dropout_prob == 0
    for option in ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate", "token_dropout_prob"):
        model = tiny(**{option: 0.5})
        expected = logits(tiny())
        assert torch.equal(logits(model), expected), "no dropout in eval mode"
        model.train()
        torch.manual_seed(0)
        assert not torch.allclose(logits(model), expected, atol=1e-3), option
    model = tiny(drop_path_rate=0.2, num_hidden_layers=5)
    assert [layer.drop_path.drop_prob for layer in model.t2t_vit.layers] == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])


def test_outputs():
    model = tiny(attn_implementation="eager")
    found = model(images(), output_hidden_states=True, output_attentions=True)
    assert [tuple(h.shape) for h in found.hidden_states] == [(2, 17, 32)] * 3
    assert [tuple(a.shape) for a in found.attentions] == [(2, 2, 17, 17)] * 2
    for weights in found.attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 17))
    body = model.t2t_vit(images())
    torch.testing.assert_close(body.last_hidden_state, model.t2t_vit.layernorm(found.hidden_states[-1]))
    assert torch.equal(body.pooler_output, body.last_hidden_state[:, 0]) and body.hidden_states is None
    assert torch.equal(model(images(), return_dict=False)[0], found.logits)
    labels = torch.tensor([2, 0])
    torch.testing.assert_close(model(images(), labels=labels).loss, nn.functional.cross_entropy(found.logits, labels))
    torch.testing.assert_close(found.logits, logits(tiny()), atol=1e-4, rtol=1e-4)
    with pytest.raises(hea.UnsupportedAttentionError, match="output_attentions"):
        hea.convert(tiny(), "linear")(images(), output_attentions=True)


@each_type
def test_images_of_other_sizes(tokens_type):
    model = tiny(tokens_type=tokens_type)
    own = logits(model)
    assert torch.equal(logits(model, interpolate_pos_encoding=True), own)
    for shape in ((40, 24), (32, 48), (35, 41)):
        values = images(2, 3, *shape)
        with pytest.raises(ValueError, match=f"have {shape[0]} x {shape[1]} pixels, .* takes 32 x 32: .*interpol"):
            logits(model, values)
        assert torch.isfinite(logits(model, values, interpolate_pos_encoding=True)).all()
    with pytest.raises(ValueError, match="images have 1 channels, and the model takes 3"):
        logits(model, images(1, 1, 32, 32))


def test_position_embeddings_are_interpolated_as_in_vit():
    model = tiny(T2TViTModel)
    table = model.embeddings.position_embeddings
    grid = table[0, 1:].T.reshape(1, 32, 4, 4)
    expected = nn.functional.interpolate(grid, size=(5, 3), mode="bicubic", align_corners=False)
    seen = {}
    model.layers[0].register_forward_pre_hook(lambda module, args: seen.update(tokens=args[0]))
    logits(model, images(2, 3, 40, 24), interpolate_pos_encoding=True)
    with torch.no_grad():
        bare = model.embeddings.tokens_to_token(images(2, 3, 40, 24))
    positions = expected.reshape(32, 15).T
    torch.testing.assert_close(seen["tokens"][:, 1:], bare + positions, atol=1e-5, rtol=1e-5)
    cls = model.embeddings.cls_token[0, 0] + table[0, 0]
    torch.testing.assert_close(seen["tokens"][0, 0], cls)


def test_set_image_size(tmp_path):
    """The output is that of `interpolate_pos_encoding`, and learned parameters get the new size."""
    model, values = tiny(), images(2, 3, 40, 24)
    expected = logits(model, values, interpolate_pos_encoding=True)
    model.set_image_size((40, 24))
    torch.testing.assert_close(logits(model, values), expected)
    hea.convert(model, "linformer", projection_dim=4).save_pretrained(tmp_path)
    again = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert again.config.image_shape == (40, 24) and torch.equal(logits(again, values), logits(model, values))
    first = next(iter(attention_modules(again)))[0]
    assert first.max_tokens == 240 == first.learned_parameters.key_projection.shape[1]
    with pytest.raises(ValueError, match="convert it to 'sdpa', set the size"):
        again.set_image_size(32)
    hea.convert(again, "sdpa").set_image_size(48)
    assert again.config.grids()[0] == (24, 24) and torch.isfinite(logits(again, images(1, 3, 48, 48))).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_type
def test_half_precision(tokens_type, dtype):
    model = tiny(tokens_type=tokens_type)
    expected = logits(model)
    with torch.autocast("cpu", dtype=dtype):
        mixed = logits(model)
    whole = logits(model.to(dtype), images().to(dtype))
    for found in (mixed, whole):
        assert torch.isfinite(found).all()
        assert (found.float() - expected).norm() < 0.35 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_performers_with_large_keys_are_finite(dtype):
    """Keys with norm 60: evaluated literally, the formula gives weights of 0 in float32 and overflows in float16."""
    model = tiny(tokens_type="performer", token_dim=64)
    stage = model.t2t_vit.embeddings.tokens_to_token.stages[0].mixer
    with torch.no_grad():
        stage.k_proj.weight.mul_(30)
        stage.q_proj.weight.mul_(30)
        stage.v_proj.weight.mul_(30)
    hidden_states = images(1, 256, 147).to(dtype).requires_grad_()
    found = stage.to(dtype)(hidden_states)[0]
    found.float().sum().backward()
    assert torch.isfinite(found).all() and torch.isfinite(hidden_states.grad).all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.isfinite(stage.float()(hidden_states.float())[0]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_missing_tables_are_computed_on_loading(dtype, tmp_path):
    """`from_pretrained` creates models on the meta device, so missing tensors must be computed afterwards."""
    model = tiny(tokens_type="performer")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lacking = [name for name in tensors if name.endswith((".w", "position_embeddings"))]
    assert len(lacking) == 3
    save_file({k: v for k, v in tensors.items() if k not in lacking}, tmp_path / "model.safetensors", {"format": "pt"})
    again = T2TViTForImageClassification.from_pretrained(tmp_path, dtype=dtype)
    assert again.dtype == dtype
    table = again.t2t_vit.embeddings.position_embeddings
    assert not table.requires_grad
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    for position in (0, 1, 16):
        angles = [position / 10000 ** (2 * (channel // 2) / 32) for channel in range(32)]
        expected = torch.tensor([math.cos(a) if i % 2 else math.sin(a) for i, a in enumerate(angles)])
        torch.testing.assert_close(table[0, position].float(), expected, atol=tolerance, rtol=0)
    for stage in again.t2t_vit.embeddings.tokens_to_token.stages:
        assert stage.mixer.w.shape == (8, 16) and not stage.mixer.w.requires_grad
        gram = stage.mixer.w.float() @ stage.mixer.w.float().T
        torch.testing.assert_close(gram, 8 * torch.eye(8), atol=0.1 if dtype != torch.float32 else 1e-4, rtol=0)
    assert torch.isfinite(logits(again)).all()


def test_initial_weights_are_those_of_the_authors():
    torch.manual_seed(0)
    model = T2TViTForImageClassification(T2TViTConfig.from_name("t2t_vit_7"))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.1)
            assert module.bias is None or not module.bias.any()
        if isinstance(module, nn.LayerNorm):
            assert module.eps == 1e-5 and (module.weight == 1).all() and not module.bias.any()
    assert 0.015 < model.t2t_vit.embeddings.cls_token.std() < 0.025


def test_image_processor_is_that_of_the_authors(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow reads images")
    np = pytest.importorskip("numpy", reason="images are made from arrays")
    config = T2TViTConfig.from_name("t2t_vit_14")
    image_processor(config).save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    processor = ViTImageProcessorPil.from_pretrained(tmp_path)
    if not hasattr(AutoImageProcessor, "_backends"):  # absent from the oldest Transformers without torchvision
        assert AutoImageProcessor.from_pretrained(tmp_path).to_dict() == processor.to_dict()
    image = image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8))
    found = processor(image, return_tensors="pt")["pixel_values"]
    # Shorter side to 224 / 0.9, rounded down; center crop; mean and standard deviation of ImageNet.
    scaled = image.resize((330, 248), 3).crop((53, 12, 277, 236))
    values = torch.from_numpy(np.array(scaled)).permute(2, 0, 1).float() / 255
    mean, std = (torch.tensor(x)[:, None, None] for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    assert found.shape == (1, 3, 224, 224)
    torch.testing.assert_close(found[0], (values - mean) / std, atol=2e-2, rtol=0)


def test_backbone_projects_its_hidden_states():
    """The backbone gets another forward, with the same output as the attention function. The stages keep theirs."""
    model = tiny(efficient_attention={"method": "flurka_linear", **SMALL["flurka_linear"]}).eval()
    found = logits(model)
    own = [module for module in model.modules() if isinstance(vars(module).get("forward"), functools.partial)]
    assert [module.attention_layer for module in own] == [0, 1]
    for module in own:
        del module.forward
    assert (logits(model) - found).abs().max() < 1e-5
    hea.convert(model, "sdpa")
    assert not any("forward" in vars(module) for module in model.modules())
