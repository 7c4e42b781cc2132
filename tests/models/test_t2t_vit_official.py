"""Checkpoints of T2T-ViT's authors: conversion by name, inference of the config, and equality with the formulas.

The state dicts are random tensors in the authors' layout. The expected output is computed below in float64, with dense
attention matrices, from the paper (Yuan et al. 2021) and the semantics of the authors' code.
"""

import argparse
import pickle

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, pad
from transformers import AutoModelForImageClassification, ViTImageProcessorPil

from hf_efficient_attn.models.t2t_vit import (
    T2TViTConfig,
    T2TViTForImageClassification,
    convert_checkpoint,
    convert_state_dict,
)
from hf_efficient_attn.models.t2t_vit.conversion_t2t_vit import config_of, read_checkpoint
from hf_efficient_attn.models.t2t_vit.parts import T2TViTTokenPerformer

performers = pytest.mark.parametrize("performer", [False, True], ids=["transformer", "performer"])


def shapes(
    layers=2, hidden_size=128, ratio=2, performer=False, labels=5, positions=17, dim=64
) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the authors' state dict."""
    found = {"cls_token": (1, 1, hidden_size), "pos_embed": (1, positions, hidden_size), "norm.weight": (hidden_size,)}
    found |= {"norm.bias": (hidden_size,), "head.weight": (labels, hidden_size), "head.bias": (labels,)}
    found |= {"tokens_to_token.project.weight": (hidden_size, 9 * dim), "tokens_to_token.project.bias": (hidden_size,)}

    def linear(name, outputs, inputs, bias=True):
        found.update({f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {}))

    def norm(name, size):
        found.update({f"{name}.weight": (size,), f"{name}.bias": (size,)})

    for stage, size in ((1, 147), (2, 9 * dim)):
        name = f"tokens_to_token.attention{stage}"
        norm(f"{name}.norm1", size)
        norm(f"{name}.norm2", dim)
        if performer:
            linear(f"{name}.kqv", 3 * dim, size)
            linear(f"{name}.proj", dim, dim)
            found[f"{name}.w"] = (dim // 2, dim)
        else:
            linear(f"{name}.attn.qkv", 3 * dim, size, bias=False)
            linear(f"{name}.attn.proj", dim, dim)
        for layer in ("mlp.0", "mlp.2") if performer else ("mlp.fc1", "mlp.fc2"):
            linear(f"{name}.{layer}", dim, dim)
    for block in range(layers):
        name = f"blocks.{block}"
        norm(f"{name}.norm1", hidden_size)
        norm(f"{name}.norm2", hidden_size)
        linear(f"{name}.attn.qkv", 3 * hidden_size, hidden_size, bias=False)
        linear(f"{name}.attn.proj", hidden_size, hidden_size)
        linear(f"{name}.mlp.fc1", ratio * hidden_size, hidden_size)
        linear(f"{name}.mlp.fc2", hidden_size, ratio * hidden_size)
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
            orthogonal = torch.linalg.qr(values.T)[0].T
            state[name] = orthogonal * shape[0] ** 0.5
    return state


def soft_split(image, kernel, stride, padding):
    """(B, C, height, width) -> windows (B, N, C * kernel^2), and the grid, without nn.Unfold."""
    image = pad(image, (padding,) * 4)
    windows = image.unfold(2, kernel, stride).unfold(3, kernel, stride)
    return windows.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2), windows.shape[2:4]


def reference(state, pixels, num_heads, performer):
    """Return the logits by the formulas, with dense attention matrices."""

    def linear(x, name):
        bias = state.get(f"{name}.bias")
        return x @ state[f"{name}.weight"].T + (0 if bias is None else bias)

    def norm(x, name):
        return layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], 1e-5)

    def softmax_attention(q, k, v, scale):
        return torch.softmax(scale * q @ k.transpose(-2, -1), dim=-1) @ v

    def random_feature_attention(q, k, v, w):
        # exp(w . x - |x|^2 / 2) / sqrt(M) for queries and keys; the authors add 1e-8 to the sums.
        features = [torch.exp(x @ w.T - (x * x).sum(-1, keepdim=True) / 2) / len(w) ** 0.5 for x in (q, k)]
        weights = features[0] @ features[1].transpose(1, 2)
        return weights @ v / (weights.sum(-1, keepdim=True) + 1e-8)

    image = pixels
    for stage, split in ((1, (7, 4, 2)), (2, (3, 2, 1))):
        name = f"tokens_to_token.attention{stage}"
        tokens, grid = soft_split(image, *split)
        x = norm(tokens, f"{name}.norm1")
        if performer:
            k, q, v = linear(x, f"{name}.kqv").chunk(3, dim=-1)
            x = v + linear(random_feature_attention(q, k, v, state[f"{name}.w"]), f"{name}.proj")
            first, second = f"{name}.mlp.0", f"{name}.mlp.2"
        else:
            q, k, v = linear(x, f"{name}.attn.qkv").chunk(3, dim=-1)
            x = v + linear(softmax_attention(q, k, v, tokens.shape[-1] ** -0.5), f"{name}.attn.proj")
            first, second = f"{name}.mlp.fc1", f"{name}.mlp.fc2"
        x = x + linear(gelu(linear(norm(x, f"{name}.norm2"), first)), second)
        image = x.transpose(1, 2).unflatten(2, grid)
    tokens = linear(soft_split(image, 3, 2, 1)[0], "tokens_to_token.project")
    x = torch.cat((state["cls_token"].expand(len(tokens), -1, -1), tokens), dim=1) + state["pos_embed"]
    for block in range(1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))):
        name = f"blocks.{block}"
        parts = linear(norm(x, f"{name}.norm1"), f"{name}.attn.qkv").chunk(3, dim=-1)
        q, k, v = (part.unflatten(2, (num_heads, -1)).transpose(1, 2) for part in parts)
        mixed = softmax_attention(q, k, v, q.shape[-1] ** -0.5).transpose(1, 2).flatten(2)
        x = x + linear(mixed, f"{name}.attn.proj")
        x = x + linear(gelu(linear(norm(x, f"{name}.norm2"), f"{name}.mlp.fc1")), f"{name}.mlp.fc2")
    return linear(norm(x, "norm")[:, 0], "head")


@pytest.mark.parametrize(("implementation", "width"), [("sdpa", 64), ("eager", 64), ("sdpa", 96)])
@performers
def test_converted_model_computes_the_formulas(performer, implementation, width):
    state = official(performer=performer, positions=1 + width // 4)
    pixels = torch.randn(2, 3, 64, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    config = None
    if width != 64:  # the number of positions does not tell the shape of images that are not square
        config = config_of(official(performer=performer))
        config = T2TViTConfig.from_dict({**config.to_dict(), "image_size": [64, width]})
    converted, config = convert_state_dict(state, config)
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
        other = reference({**state, name: torch.cat((q, k, v))}, pixels, 2, performer)
        assert (other - expected).abs().max() > 1e-3


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0, 10.0])
def test_performers_equal_the_formula_of_the_authors_for_keys_of_any_norm(scale):
    """In float32, also where the weights are so small that epsilon dominates and the output is 0."""
    config = T2TViTConfig(tokens_type="performer", token_dim=16)
    torch.manual_seed(0)
    stage = T2TViTTokenPerformer(config, 8)
    stage.reset_features()
    query, key, value = (torch.randn(2, 40, 16) * factor for factor in (scale, scale, 1.0))
    features = [(x @ stage.w.T - x.square().sum(-1, keepdim=True) / 2).exp() / 8**0.5 for x in (query, key)]
    sums = (features[0] @ features[1].sum(1)[..., None]) + 1e-8
    expected = features[0] @ (features[1].transpose(1, 2) @ value) / sums
    torch.testing.assert_close(stage.linear_attention(query, key, value), expected, atol=1e-5, rtol=1e-5)
    if scale == 10.0:
        assert expected.abs().max() < 1e-6


@pytest.mark.parametrize("name", [name for name in T2TViTConfig.names() if name != "t2t_vit_flurka"])
def test_config_of_published_models_is_inferred_from_shapes(name):
    """test_t2t_vit.py checks the sizes of these models by their numbers of parameters."""
    wanted = T2TViTConfig.from_name(name, image_size=384)
    hidden_size, performer = wanted.hidden_size, wanted.tokens_type == "performer"
    sizes = {"layers": wanted.num_hidden_layers, "hidden_size": hidden_size, "performer": performer, "labels": 1000}
    named_shapes = shapes(**sizes, ratio=wanted.intermediate_size // hidden_size, positions=1 + 24**2)
    state = {key: torch.empty(shape, device="meta") for key, shape in named_shapes.items()}
    converted, config = convert_state_dict(state)
    assert config.to_dict() == wanted.to_dict()
    assert sum(x.numel() for x in converted.values()) == sum(x.numel() for x in state.values())


def equal(model, converted) -> bool:
    return all(torch.equal(tensor, converted[name].float()) for name, tensor in model.state_dict().items())


@performers
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
        assert equal(model, convert_state_dict(wanted)[0])
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
    state = official(labels=1000)
    torch.save(state, tmp_path / "thousand.pth")
    convert_checkpoint(tmp_path / "thousand.pth", tmp_path / "out")
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert equal(model, convert_state_dict(state)[0])
    assert (model.config.id2label[0], model.config.id2label[985]) == ("tench, Tinca tinca", "daisy")
    assert model.config.label2id["daisy"] == 985
    # An explicit num_labels keeps the plain names of other classes.
    config = convert_checkpoint(tmp_path / "thousand.pth", tmp_path / "own", num_labels=1000)
    assert config.id2label[985] == "LABEL_985"


def test_model_name_is_checked_against_the_tensors(tmp_path):
    torch.save(official(), tmp_path / "small.pth")
    with pytest.raises(ValueError, match=r"Missing key.* \"t2t_vit.layers.2"):
        convert_checkpoint(tmp_path / "small.pth", tmp_path / "out", "t2t_vit_t_14")
    with pytest.raises(ValueError, match="unknown T2T-ViT 't2t_vit_t_15'"):
        convert_checkpoint(tmp_path / "small.pth", tmp_path / "out", "t2t_vit_t_15")
    assert not (tmp_path / "out").exists()


def test_wrong_state_dicts_are_refused():
    state = official()
    config = config_of(state)
    with pytest.raises(ValueError, match=r'Unexpected key\(s\) in state_dict: "aux_head.weight", ".*attn.rel"'):
        convert_state_dict({**state, "aux_head.weight": torch.ones(3), "blocks.0.attn.rel": torch.ones(3)})
    for name in ("blocks.1.mlp.fc1.bias", "head.bias", "tokens_to_token.attention2.attn.qkv.weight"):
        with pytest.raises(ValueError, match=r'Missing key\(s\) in state_dict: "(t2t_vit|classifier.bias)'):
            convert_state_dict({key: value for key, value in state.items() if key != name})
    with pytest.raises(ValueError, match=r"size mismatch for classifier.weight"):
        convert_state_dict({**state, "head.weight": torch.ones(6, 128)}, config)
    with pytest.raises(ValueError, match="not those of three projections"):
        convert_state_dict({**state, "blocks.0.attn.qkv.weight": torch.ones(383, 128)}, config)
    with pytest.raises(ValueError, match=r"and transformer stages: .*Missing key.*q_proj.*Unexpected key"):
        convert_state_dict(official(performer=True), config)
    for lacking in ("pos_embed", "head.weight", "tokens_to_token.attention1.attn.proj.weight"):
        with pytest.raises(ValueError, match=f"cannot be inferred: {lacking} is missing"):
            config_of({key: value for key, value in state.items() if key != lacking})
    with pytest.raises(ValueError, match=r"18 positions.*give its config"):
        config_of({**state, "pos_embed": torch.ones(1, 18, 128)})


class _Runs:
    def __reduce__(self):
        return print, ("code of a checkpoint was run",)


def test_files_without_weights_are_refused(tmp_path, capsys):
    (tmp_path / "text.pth").write_text("no checkpoint")
    torch.save({"state_dict": {"a": 1}}, tmp_path / "numbers.pth")
    torch.save([torch.ones(3)], tmp_path / "list.pth")
    (tmp_path / "code.pth").write_bytes(pickle.dumps({"state_dict": _Runs()}))
    torch.save({"state_dict": _Runs()}, tmp_path / "more_code.pth")
    for name, message in (
        ("text", "cannot be read"),
        ("numbers", "holds no state dict"),
        ("list", "holds no state dict"),
        ("code", "cannot be read"),
        ("more_code", "cannot be read"),
    ):
        with pytest.raises(ValueError, match=message):
            read_checkpoint(tmp_path / f"{name}.pth")
    with pytest.raises(FileNotFoundError):
        read_checkpoint(tmp_path / "absent.pth")
    assert "was run" not in capsys.readouterr().out
