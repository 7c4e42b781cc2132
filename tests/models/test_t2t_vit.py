"""T2T-ViT: published sizes, methods, checkpoints, gradients, images of any size, and the authors' checkpoints.

The authors' state dicts are random tensors in their layout. The expected output is computed below in float64, with
dense attention matrices, from the paper (Yuan et al. 2021) and the semantics of the authors' code.
"""

import argparse
import functools
import pickle

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy, gelu, interpolate, layer_norm, pad, scaled_dot_product_attention
from transformers import AutoModelForImageClassification, ViTImageProcessorPil

import hf_efficient_attn as hea
from each import close, refuses
from helpers import tiny_biggan as biggan
from hf_efficient_attn.integration.models import attention_modules
from hf_efficient_attn.models import t2t_vit
from hf_efficient_attn.models.t2t_vit import T2TViTConfig, T2TViTForImageClassification, T2TViTModel, convert_checkpoint
from hf_efficient_attn.models.t2t_vit.conversion_t2t_vit import config_of, read_checkpoint
from hf_efficient_attn.models.t2t_vit.parts import T2TViTTokenPerformer
from tiny_models import METHODS, RANDOM, SMALL, T2T_VIT, output

# `sum(p.numel() for p in model.parameters())` of the authors' models/t2t_vit.py, by name.
COUNTS = {
    "t2t_vit_7": 4_310_222, "t2t_vit_10": 5_889_230, "t2t_vit_12": 6_941_902, "t2t_vit_14": 21_545_550,
    "t2t_vit_19": 39_177_422, "t2t_vit_24": 64_105_934, "t2t_vit_t_14": 21_541_070, "t2t_vit_t_19": 39_172_942,
    "t2t_vit_t_24": 64_101_454, "t2t_vit_flurka": 4_305_742,  # 4.3 M in Gupta et al. 2023, Table 6
}  # fmt: skip
STAGES, BLOCKS = ["t2t.0", "t2t.1"], [0, 1]
each_type = pytest.mark.parametrize("tokens_type", ["transformer", "performer"])
each_performer = pytest.mark.parametrize("performer", [False, True], ids=["transformer", "performer"])


def tiny(cls=T2TViTForImageClassification, seed=0, **changes):
    """Return a tiny model in eval mode, with large projections so that attention is far from uniform."""
    torch.manual_seed(seed)
    model = cls(T2TViTConfig(**{**T2T_VIT, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and parameter.requires_grad:
                parameter.mul_(40.0 if "q_proj" in name or "k_proj" in name else 8.0)
    return model


def images(*shape, seed=0):
    return torch.randn(shape or (2, 3, 32, 32), generator=torch.Generator().manual_seed(seed))


def logits(model, values=None, **options):
    return output(model, {"pixel_values": images().to(model.dtype) if values is None else values}, **options)


@pytest.mark.parametrize("name", COUNTS)
def test_published_models(name):
    """Their numbers of parameters, and that their configs are inferred from shapes."""
    config = T2TViTConfig.from_name(name, image_size=384)
    with torch.device("meta"):
        model = T2TViTForImageClassification(T2TViTConfig.from_name(name))
    assert sum(p.numel() for p in model.parameters()) == COUNTS[name]
    is_performer, hidden_size = config.tokens_type == "performer", config.hidden_size
    frozen = {key.rpartition(".")[2] for key, p in model.named_parameters() if not p.requires_grad}
    assert frozen == ({"position_embeddings", "w"} if is_performer else {"position_embeddings"})
    if name != "t2t_vit_flurka":
        sizes = {"layers": config.num_hidden_layers, "ratio": config.intermediate_size // hidden_size, "labels": 1000}
        found = shapes(**sizes, hidden_size=hidden_size, performer=is_performer, positions=1 + 24**2)
        state = {key: torch.empty(shape, device="meta") for key, shape in found.items()}
        converted, inferred = t2t_vit.convert_state_dict(state)
        assert inferred.to_dict() == config.to_dict()
        assert sum(x.numel() for x in converted.values()) == sum(x.numel() for x in state.values())


def test_models_by_name():
    assert set(T2TViTConfig.names()) == set(COUNTS)
    words = r"unknown T2T-ViT 't2t_vit_15'. Did you mean 't2t_vit_1.'.*Known: t2t_vit_7, .*vit_flurka"
    refuses(words, T2TViTConfig.from_name, "t2t_vit_15", error=ValueError)
    changed = T2TViTConfig.from_name("t2t_vit_14", image_size=384, id2label={0: "cat", 1: "dog"})
    assert (changed.image_size, changed.num_labels, changed.tokens_type) == (384, 2, "performer")
    assert T2TViTConfig.from_name("t2t_vit_7").num_labels == 1000
    for option in ({}, {"qk_scale": 0.3}):
        scales = [module.scaling for module, *_ in attention_modules(tiny(T2TViTModel, **option))]
        assert scales == pytest.approx([147**-0.5, 144**-0.5, *[option.get("qk_scale", 16**-0.5)] * 2])


WRONG_SIZES = {
    "Did you mean 'performer'": {"tokens_type": "performr"},
    "no multiple of 2 heads": {"hidden_size": 33},
    "num_hidden_layers=0": {"num_hidden_layers": 0},
    "three numbers each": {"t2t_strides": [4, 2]},
    "from 1 to the size of its kernel": {"t2t_strides": [8, 2, 2]},
    "one number or": {"image_size": [32, 32, 3]},
    "too small": {"image_size": 0},
    "random features.=0 must": {"kernel_ratio": 0.01},
}


@pytest.mark.parametrize("message", WRONG_SIZES)
def test_sizes_that_do_not_fit_together_are_refused(message):
    refuses(message, T2TViTConfig, **{**T2T_VIT, **WRONG_SIZES[message]}, error=ValueError)


def test_grids_of_tokens():
    config = T2TViTConfig.from_name("t2t_vit_10", image_size=[224, 448], qk_scale=0.0625, t2t_strides=(4, 2, 2))
    assert (config.patch_size, config.t2t_paddings) == (16, [2, 1, 1])
    assert config.grids() == [(56, 112), (28, 56), (14, 28)]
    assert T2TViTConfig(**T2T_VIT).grids() == [(16, 16), (8, 8), (4, 4)]
    refuses("images of 2 x 40 pixels are too small for kernels", config.grids, 2, 40, error=ValueError)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_in_every_stage_and_block(method):
    model = tiny()
    exact = logits(model)
    for layers in (STAGES, None):
        found = logits(hea.convert(model, method, layers=layers, **SMALL[method]))
        assert torch.isfinite(found).all()
        assert not torch.equal(found, exact), "the stages have more tokens than any budget here"
    close(torch.cat([logits(model, image[None]) for image in images()]), found, 2e-4)
    assert torch.equal(logits(hea.convert(model, "sdpa")), exact)
    if method not in RANDOM:
        # Without random draws, naming all layers gives the same as naming none.
        close(logits(hea.convert(model, method, layers=[*STAGES, *BLOCKS], **SMALL[method])), found, 1e-5)


def test_performer_stages_take_no_method():
    model = tiny(tokens_type="performer")
    assert [location.layer for _, location, *_ in attention_modules(model)] == [0, 1]
    exact = logits(model)
    for words in (r"in layers \['t2t.0'\]; its layers are \[0, 1\]", r"t2t\.0.*an attention of their own"):
        refuses(words, hea.convert, model, "kdeformer", layers=["t2t.0"])
    choice = {"method": "linear", "layers": ["t2t.0", 1]}
    refuses(r"t2t\.0.*'transformer'", tiny, tokens_type="performer", efficient_attention=choice, error=ValueError)
    assert torch.equal(logits(model), exact)
    assert not torch.equal(logits(hea.convert(model, "longformer", window_size=2)), exact)
    for name in ("t2t.2", 2):
        refuses(r"its layers are .*t2t.0.*, 0, 1", hea.convert, tiny(), "kdeformer", layers=[name])


@each_type
def test_compiles_to_one_graph(tokens_type):
    model = tiny(tokens_type=tokens_type, num_hidden_layers=1)
    options = {"values": images(2, 3, 40, 24), "interpolate_pos_encoding": True}
    expected = logits(model, **options)
    torch._dynamo.reset()
    close(logits(torch.compile(model, fullgraph=True, backend="eager"), **options), expected, 1e-5)


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
    torch.testing.assert_close(model(images(), labels=labels).loss, cross_entropy(found.logits, labels))
    torch.testing.assert_close(found.logits, logits(tiny()), atol=1e-4, rtol=1e-4)
    refuses("output_attentions", hea.convert(tiny(), "linear"), images(), output_attentions=True)


@each_type
def test_images_of_other_sizes(tokens_type):
    model = tiny(tokens_type=tokens_type)
    assert torch.equal(logits(model, interpolate_pos_encoding=True), logits(model))
    for shape in ((32, 48), (35, 41), (40, 24)):
        values = images(2, 3, *shape)
        with pytest.raises(ValueError, match=f"have {shape[0]} x {shape[1]} pixels, .* takes 32 x 32: .*interpol"):
            logits(model, values)
        expected = logits(model, values, interpolate_pos_encoding=True)
        assert torch.isfinite(expected).all()
    refuses("images have 1 channels, and the model takes 3", logits, model, images(1, 1, 32, 32), error=ValueError)
    model.set_image_size((40, 24))
    close(logits(model, values), expected, 1e-5)


def test_position_embeddings_are_interpolated_as_in_vit():
    model, values, seen = tiny(T2TViTModel), images(2, 3, 40, 24), []
    table = model.embeddings.position_embeddings
    grid = table[0, 1:].T.reshape(1, 32, 4, 4)
    positions = interpolate(grid, size=(5, 3), mode="bicubic", align_corners=False).reshape(32, 15).T
    model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    logits(model, values, interpolate_pos_encoding=True)
    with torch.no_grad():
        close(seen[0][:, 1:], model.embeddings.tokens_to_token(values) + positions, 1e-5)
    close(seen[0][0, 0], model.embeddings.cls_token[0, 0] + table[0, 0], 1e-6)


def test_learned_parameters_get_the_new_size_of_images(tmp_path):
    model, values = tiny(), images(2, 3, 40, 24)
    model.set_image_size((40, 24))
    hea.convert(model, "linformer", projection_dim=4).save_pretrained(tmp_path)
    again = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert type(again) is T2TViTForImageClassification and again.config._attn_implementation == "linformer"
    assert again.config.image_shape == (40, 24) and torch.equal(logits(again, values), logits(model, values))
    first = next(iter(attention_modules(again)))[0]
    assert first.max_tokens == 240 == first.learned_parameters.key_projection.shape[1]
    refuses("convert it to 'sdpa', set the size", again.set_image_size, 32, error=ValueError)
    hea.convert(again, "sdpa").set_image_size(48)
    assert again.config.grids()[0] == (24, 24) and torch.isfinite(logits(again, images(1, 3, 48, 48))).all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_missing_tables_are_computed_on_loading(dtype, tolerance, tmp_path):
    """`from_pretrained` creates models on the meta device, so missing tensors must be computed afterwards."""
    tiny(tokens_type="performer").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: x for name, x in tensors.items() if not name.endswith((".w", "position_embeddings"))}
    assert len(kept) == len(tensors) - 3
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    again = T2TViTForImageClassification.from_pretrained(tmp_path, dtype=dtype)
    table, channel = again.t2t_vit.embeddings.position_embeddings, torch.arange(32)
    assert again.dtype == dtype and not table.requires_grad
    angles = torch.arange(17)[:, None] / 10000 ** (2 * (channel // 2) / 32)
    expected = torch.where(channel % 2 == 1, angles.cos(), angles.sin())
    torch.testing.assert_close(table[0].float(), expected, atol=tolerance / 10, rtol=0)
    for stage in again.t2t_vit.embeddings.tokens_to_token.stages:
        w = stage.mixer.w.float()
        assert w.shape == (8, 16) and not stage.mixer.w.requires_grad
        torch.testing.assert_close(w @ w.T, 8 * torch.eye(8), atol=tolerance, rtol=0)
    assert torch.isfinite(logits(again)).all()


def test_initial_weights_are_those_of_the_authors():
    torch.manual_seed(0)
    model = T2TViTForImageClassification(T2TViTConfig.from_name("t2t_vit_7"))
    for module in (x for x in model.modules() if isinstance(x, (nn.Linear, nn.LayerNorm))):
        assert module.bias is None or not module.bias.any()
        if isinstance(module, nn.Linear):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.1)
        else:
            assert module.eps == 1e-5 and (module.weight == 1).all()
    assert 0.015 < model.t2t_vit.embeddings.cls_token.std() < 0.025


def test_image_processor_is_that_of_the_authors(tmp_path):
    library = pytest.importorskip("PIL.Image", reason="Pillow reads images")
    np = pytest.importorskip("numpy", reason="images are made from arrays")
    config = T2TViTConfig.from_name("t2t_vit_14")
    for saved in (config, t2t_vit.image_processor(config)):
        saved.save_pretrained(tmp_path)
    processor = ViTImageProcessorPil.from_pretrained(tmp_path)
    # The oldest Transformers needs torchvision for this class.
    if not hasattr(transformers.AutoImageProcessor, "_backends"):
        assert transformers.AutoImageProcessor.from_pretrained(tmp_path).to_dict() == processor.to_dict()
    image = library.fromarray(np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8))
    found = processor(image, return_tensors="pt")["pixel_values"]
    # Shorter side to 224 / 0.9, rounded down; center crop; mean and standard deviation of ImageNet.
    scaled = image.resize((330, 248), 3).crop((53, 12, 277, 236))
    values = torch.from_numpy(np.array(scaled)).permute(2, 0, 1)[None].float() / 255
    mean, std = (torch.tensor(x)[:, None, None] for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    torch.testing.assert_close(found, (values - mean) / std, atol=2e-2, rtol=0)


def test_backbone_projects_its_hidden_states():
    """The backbone gets another forward, with the same output as the attention function. The stages keep theirs."""
    model = hea.convert(tiny(), "flurka_linear", **SMALL["flurka_linear"])
    found = logits(model)
    own = [module.attention_layer for module in model.modules() if vars(module).pop("forward", None)]
    assert own == [0, 1] and (logits(model) - found).abs().max() < 1e-5


# BigGAN and T2T-ViT: half precision, gradients, and gradient checkpointing

# How to make a model in eval mode, and a loss of its output for six images.
biggan_of = functools.partial(biggan.tiny, sharpness=20.0)  # its logits reach some hundreds: they are not scaled
performer = functools.partial(tiny, tokens_type="performer")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("make", "method"),
    [(biggan_of, "sdpa"), (biggan_of, "kdeformer"), (tiny, "sdpa"), (performer, "sdpa")],
    ids=["biggan", "biggan-kdeformer", "t2t_vit", "performer"],
)
def test_half_precision(make, method, dtype):
    model = make()
    model.set_attn_implementation(method)

    def run(model):  # the error of a few pictures depends on the weights, and these on the version
        return biggan.images(model) if make is biggan_of else logits(model, images(64, 3, 32, 32).to(model.dtype))

    expected = run(model)
    with torch.autocast("cpu", dtype=dtype):
        mixed = run(model)
    for found in (mixed, run(model.to(dtype))):
        assert torch.isfinite(found).all() and (found.float() - expected).norm() < 0.3 * expected.norm()
    assert found.dtype == dtype


def loss_of(model) -> torch.Tensor:
    torch.manual_seed(1)
    if isinstance(model, biggan.BigGANModel):
        return (model(torch.randn(6, 12), torch.arange(6)).images * torch.randn(6, 3, 32, 32)).sum()
    return model(images(8, 3, 32, 32), labels=torch.arange(8) % 3).loss


DROPOUT = {"hidden_dropout_prob": 0.1, "drop_path_rate": 0.3, "token_dropout_prob": 0.1}
NORM = functools.partial(biggan.tiny, spectral_norm=True)
VIT = functools.partial(tiny, **DROPOUT)


@pytest.mark.parametrize(
    ("make", "method"),
    [
        (biggan.tiny, "linformer"),
        (NORM, "kdeformer"),
        (functools.partial(performer, **DROPOUT), "sdpa"),
        *((VIT, method) for method in ("kdeformer", "flurka_linear", "nystromformer")),
    ],
)
def test_gradients_reach_every_parameter(make, method):
    """The same gradients with gradient checkpointing, reentrant or not."""
    found = []
    for checkpointing in (False,) if make is NORM else (False, True):
        model = hea.convert(make(), method, **SMALL.get(method, {})).train()
        if checkpointing:
            biggan.enable_checkpointing(model, use_reentrant=make is VIT)
            assert sum(getattr(module, "gradient_checkpointing", False) for module in model.modules()) >= 4
        loss_of(model).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    close(found[-1], found[0], 1e-5 if make is biggan.tiny else 0)
    for name, grad in found[0].items():
        # Learned parameters may be longer than the sequence, or the output may not depend on some of their directions,
        # and batch normalization by batch statistics cancels a preceding bias.
        is_unused = "learned_parameters" in name or name.endswith(("conv_0.bias", "conv_1.bias", "conv_2.bias"))
        assert torch.isfinite(grad).all() and (is_unused or grad.abs().sum() > 0), name
    frozen = {name: p.grad for name, p in model.named_parameters() if not p.requires_grad}
    assert all(name.endswith(("position_embeddings", ".w")) and grad is None for name, grad in frozen.items())


# Checkpoints of the authors


def shapes(layers=2, hidden_size=128, ratio=2, performer=False, labels=5, positions=17, dim=64) -> dict[str, tuple]:
    """Return name -> shape of the authors' state dict."""
    found = {"cls_token": (1, 1, hidden_size), "pos_embed": (1, positions, hidden_size)}
    # The weights of linear layers (outputs, inputs) and of norms (outputs,).
    modules = {"norm": (hidden_size,), "head": (labels, hidden_size), "tokens_to_token.project": (hidden_size, 9 * dim)}
    for stage, size in ((1, 147), (2, 9 * dim)):
        names = ("kqv", "proj", "mlp.0", "mlp.2") if performer else ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
        parts = dict(zip(names, ((3 * dim, size), *3 * [(dim, dim)]), strict=True))
        for name, shape in {**parts, "norm1": (size,), "norm2": (dim,)}.items():
            modules[f"tokens_to_token.attention{stage}.{name}"] = shape
        if performer:
            found[f"tokens_to_token.attention{stage}.w"] = (dim // 2, dim)
    for block in range(layers):
        for name, *shape in (
            ("norm1", hidden_size), ("attn.qkv", 3 * hidden_size, hidden_size), ("attn.proj", hidden_size, hidden_size),
            ("norm2", hidden_size), ("mlp.fc1", ratio * hidden_size, hidden_size),
            ("mlp.fc2", hidden_size, ratio * hidden_size),
        ):  # fmt: skip
            modules[f"blocks.{block}.{name}"] = tuple(shape)
    for name, shape in modules.items():
        found[f"{name}.weight"] = shape
        if not name.endswith("attn.qkv"):
            found[f"{name}.bias"] = shape[:1]
    return found


def official(seed=0, **sizes) -> dict[str, torch.Tensor]:
    """Return random float64 tensors of these shapes, large enough that attention is not uniform."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes(**sizes).items():
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        # Keys of a performer are small, since the weight of a key contains exp(-|k|^2 / 2).
        scale = (0.4 if "kqv" in name else 1.5) * shape[-1] ** -0.5 if len(shape) == 2 else 0.2
        state[name] = 1 + scale * values if "norm" in name and "weight" in name else scale * values
        if name.endswith(".w"):
            state[name] = torch.linalg.qr(values.T)[0].T * shape[0] ** 0.5
    return state


def soft_split(image, kernel, stride, padding):
    """(B, C, height, width) -> windows (B, N, C * kernel^2), and the grid, without nn.Unfold."""
    image = pad(image, (padding,) * 4)
    windows = image.unfold(2, kernel, stride).unfold(3, kernel, stride)
    return windows.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2), windows.shape[2:4]


def random_feature_attention(q, k, v, w):
    # exp(w . x - |x|^2 / 2) / sqrt(M) for queries and keys; the authors add 1e-8 to the sums.
    features = [torch.exp(x @ w.T - (x * x).sum(-1, keepdim=True) / 2) / len(w) ** 0.5 for x in (q, k)]
    weights = features[0] @ features[1].transpose(1, 2)
    return weights @ v / (weights.sum(-1, keepdim=True) + 1e-8)


def reference(state, pixels, num_heads, performer):
    """Return the logits by the formulas, with dense attention matrices."""

    def linear(x, name):
        bias = state.get(f"{name}.bias")
        return x @ state[f"{name}.weight"].T + (0 if bias is None else bias)

    def norm(x, name):
        return layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], 1e-5)

    def mlp(x, name, first="mlp.fc1", second="mlp.fc2"):
        return x + linear(gelu(linear(norm(x, f"{name}.norm2"), f"{name}.{first}")), f"{name}.{second}")

    image = pixels
    for stage, split in ((1, (7, 4, 2)), (2, (3, 2, 1))):
        name = f"tokens_to_token.attention{stage}"
        tokens, grid = soft_split(image, *split)
        x = norm(tokens, f"{name}.norm1")
        if performer:
            k, q, v = linear(x, f"{name}.kqv").chunk(3, dim=-1)
            x = v + linear(random_feature_attention(q, k, v, state[f"{name}.w"]), f"{name}.proj")
            x = mlp(x, name, "mlp.0", "mlp.2")
        else:
            q, k, v = linear(x, f"{name}.attn.qkv").chunk(3, dim=-1)
            mixed = scaled_dot_product_attention(q, k, v, scale=tokens.shape[-1] ** -0.5)
            x = mlp(v + linear(mixed, f"{name}.attn.proj"), name)
        image = x.transpose(1, 2).unflatten(2, grid)
    tokens = linear(soft_split(image, 3, 2, 1)[0], "tokens_to_token.project")
    x = torch.cat((state["cls_token"].expand(len(tokens), -1, -1), tokens), dim=1) + state["pos_embed"]
    for block in range(1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))):
        name = f"blocks.{block}"
        parts = linear(norm(x, f"{name}.norm1"), f"{name}.attn.qkv").chunk(3, dim=-1)
        q, k, v = (part.unflatten(2, (num_heads, -1)).transpose(1, 2) for part in parts)
        mixed = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = mlp(x + linear(mixed, f"{name}.attn.proj"), name)
    return linear(norm(x, "norm")[:, 0], "head")


@pytest.mark.parametrize(("implementation", "width"), [("sdpa", 64), ("eager", 64), ("sdpa", 96)])
@each_performer
def test_converted_model_computes_the_formulas(performer, implementation, width):
    state = official(performer=performer, positions=1 + width // 4)
    pixels = torch.randn(2, 3, 64, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    config = None
    if width != 64:  # the number of positions does not tell the shape of images that are not square
        config = config_of(official(performer=performer))
        config = T2TViTConfig.from_dict({**config.to_dict(), "image_size": [64, width]})
    converted, config = t2t_vit.convert_state_dict(state, config)
    model = T2TViTForImageClassification(config).eval().double()
    model.set_attn_implementation(implementation)
    model.load_state_dict(converted)
    expected = reference(state, pixels, 2, performer)
    with torch.no_grad():
        # Eager attention casts its softmax to float32, as all models of Transformers do.
        tolerance = 1e-9 if implementation == "sdpa" else 1e-5
        torch.testing.assert_close(model(pixels).logits, expected, atol=tolerance, rtol=0)
        single = model.float()(pixels.float()).logits
    torch.testing.assert_close(single.double(), expected, atol=1e-4, rtol=1e-4)
    # The order of the performer's fused projection matters: the transformer's order gives other logits.
    if performer:
        name = "tokens_to_token.attention1.kqv.weight"
        k, q, v = state[name].chunk(3)
        assert (reference({**state, name: torch.cat((q, k, v))}, pixels, 2, performer) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0, 10.0])
def test_performers_equal_the_formula_of_the_authors_for_keys_of_any_norm(scale):
    """In float32, also where the weights are so small that epsilon dominates and the output is 0."""
    torch.manual_seed(0)
    stage = T2TViTTokenPerformer(T2TViTConfig(tokens_type="performer", token_dim=16), 8)
    stage.reset_features()
    query, key, value = (torch.randn(2, 40, 16) * factor for factor in (scale, scale, 1.0))
    expected = random_feature_attention(query, key, value, stage.w)
    close(stage.linear_attention(query, key, value), expected, 1e-5)
    assert scale != 10.0 or expected.abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_performers_with_large_keys_are_finite(dtype):
    """Keys with norm 60: evaluated literally, the formula gives weights of 0 in float32 and overflows in float16."""
    stage = T2TViTTokenPerformer(T2TViTConfig(tokens_type="performer", token_dim=64), 32)
    stage.reset_features()
    given = [(8 * torch.randn(2, 40, 64)).to(dtype).requires_grad_() for _ in range(3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = stage.to(dtype).linear_attention(*given)
    found.float().sum().backward()
    assert torch.isfinite(found).all() and all(torch.isfinite(x.grad).all() for x in given)


@each_performer
def test_files_of_the_authors(performer, tmp_path):
    """With the command line, a moving average of the weights, and names that start with "module."."""
    state, average = official(performer=performer), official(performer=performer, seed=7)
    content = {
        "epoch": 3, "arch": "t2t_vit", "args": argparse.Namespace(lr=5e-4, model="t2t_vit"), "metric": 81.5,
        "state_dict": {f"module.{name}": tensor for name, tensor in state.items()}, "state_dict_ema": average,
    }  # fmt: skip
    torch.save(content, tmp_path / "81.5.pth.tar")
    for folder, ema, wanted in (("ema", True, average), ("own", False, state)):
        config = convert_checkpoint(tmp_path / "81.5.pth.tar", tmp_path / folder, ema=ema)
        model = AutoModelForImageClassification.from_pretrained(tmp_path / folder)
        expected = t2t_vit.convert_state_dict(wanted)[0]
        assert all(torch.equal(tensor, expected[name].float()) for name, tensor in model.state_dict().items())
        assert model.config.to_json_string() == config.to_json_string()
        assert not model.t2t_vit.embeddings.position_embeddings.requires_grad
        assert (tmp_path / folder / "model.safetensors").is_file()
        assert ViTImageProcessorPil.from_pretrained(tmp_path / folder).crop_size == {"height": 64, "width": 64}
    torch.save(state, tmp_path / "bare.pth")
    assert read_checkpoint(tmp_path / "bare.pth").keys() == state.keys()
    # Further arguments change the config, which is otherwise inferred from the shapes.
    names = dict(enumerate(["cat", "dog", "cow", "emu", "gnu"]))
    config = convert_checkpoint(tmp_path / "bare.pth", tmp_path / "named", id2label=names, qk_scale=0.1)
    assert (config.id2label, config.qk_scale, config.hidden_size) == (names, 0.1, 128)


def test_a_thousand_classes_get_the_names_of_imagenet(tmp_path):
    torch.save(official(labels=1000), tmp_path / "thousand.pth")
    config = convert_checkpoint(tmp_path / "thousand.pth", tmp_path / "out")
    assert (config.id2label[0], config.id2label[985]) == ("tench, Tinca tinca", "daisy")
    assert config.label2id["daisy"] == 985
    # An explicit num_labels keeps the plain names of other classes.
    config = convert_checkpoint(tmp_path / "thousand.pth", tmp_path / "own", num_labels=1000)
    assert config.id2label[985] == "LABEL_985"
    given = tmp_path / "thousand.pth", tmp_path / "other", "t2t_vit_t_14"
    refuses(r"Missing key.* \"t2t_vit.layers.2", convert_checkpoint, *given, error=ValueError)
    assert not (tmp_path / "other").exists()


STATE = official()
# What is changed in a state dict, without a name if its value is None, and the message.
WRONG_STATES = [
    ({"aux_head.weight": torch.ones(3), "blocks.0.attn.rel": torch.ones(3)}, 'Unexpected.* "aux_head.*", ".*rel"'),
    ({"head.bias": None}, r'Missing key\(s\) in state_dict: "classifier.bias'),
    ({"head.weight": torch.ones(6, 128)}, "size mismatch for classifier.weight"),
    ({"blocks.0.attn.qkv.weight": torch.ones(383, 128)}, "not those of three projections"),
    (official(performer=True), r"and transformer stages: .*Missing key.*q_proj.*Unexpected key"),
    *(
        ({name: None}, f"cannot be inferred: {name} is missing")
        for name in ("pos_embed", "head.weight", "tokens_to_token.attention1.attn.proj.weight")
    ),
    ({"pos_embed": torch.ones(1, 18, 128)}, r"18 positions.*give its config"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_STATES, ids=[next(iter(changes)) for changes, _ in WRONG_STATES])
def test_wrong_state_dicts_are_refused(changes, message):
    state = changes if len(changes) > 2 else {k: v for k, v in {**STATE, **changes}.items() if v is not None}
    is_inferred = "inferred" in message or "its config" in message
    refuses(message, t2t_vit.convert_state_dict, state, None if is_inferred else config_of(STATE), error=ValueError)


class _Runs:
    def __reduce__(self):
        return print, ("code of a checkpoint was run",)


CODE = {"state_dict": _Runs()}


@pytest.mark.parametrize("content", [b"no checkpoint", {"state_dict": {"a": 1}}, [1], pickle.dumps(CODE), CODE])
def test_files_without_weights_are_refused(content, tmp_path, capsys):
    refuses("absent.pth", read_checkpoint, tmp_path / "absent.pth", error=FileNotFoundError)
    path = tmp_path / "file.pth"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    message = "cannot be read" if content is CODE or isinstance(content, bytes) else "holds no state dict"
    refuses(message, read_checkpoint, path, error=ValueError)
    assert "was run" not in capsys.readouterr().out
