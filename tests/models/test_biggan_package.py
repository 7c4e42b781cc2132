"""BigGAN against the PyPI package pytorch-pretrained-biggan: weights and noise."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel

from hf_efficient_attn.models.biggan import (
    BigGANConfig,
    BigGANModel,
    class_names,
    truncated_noise,
)
from hf_efficient_attn.models.imagenet import imagenet_classes

package = pytest.importorskip("pytorch_pretrained_biggan", reason="pip install pytorch-pretrained-biggan")
utils = pytest.importorskip("pytorch_pretrained_biggan.utils")

SIZES = {"channel_width": 8, "num_classes": 10, "z_dim": 12, "class_embed_dim": 12}
# Images of 32 pixels; 256 queries and 64 keys with head_dim 4.
SMALL = {"layers": [[True, 16, 8], [True, 8, 4], [False, 4, 2], [True, 2, 1]], "attention_layer_position": 2}
TRUNCATIONS = (0.02, 0.03, 0.1, 0.14, 0.28, 0.4, 0.43, 0.435, 0.5, 0.56, 0.58, 0.94, 0.999, 1.0)


def theirs(kind: str = "kept", **changes):
    """Return a generator of the package with random weights and statistics, in eval mode."""
    config = package.BigGANConfig(**{**SIZES, **changes})
    torch.manual_seed(7)
    model = package.BigGAN(config)
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("running_means"):
                buffer.normal_(std=0.5)
            elif name.endswith("running_vars"):
                buffer.uniform_(0.5, 2.0)
        model.generator.layers[config.attention_layer_position].gamma.fill_(0.6)
        # Steps of the power iteration, since the vectors still belong to the weights before.
        model.train()
        for _ in range(5):
            model(torch.randn(1, 12), torch.rand(1, 10), 0.5)
    if kind == "folded":
        for module in model.modules():
            if hasattr(module, "weight_orig"):
                torch.nn.utils.remove_spectral_norm(module)
    return model.eval()


def store(model, folder, safe: bool = False) -> None:
    """Write a folder in the package's layout."""
    if safe:
        save_file({name: x.contiguous() for name, x in model.state_dict().items()}, folder / "model.safetensors")
    else:
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))


def load(folder, **options) -> BigGANModel:
    model, report = BigGANModel.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    return model.eval()


def inputs(batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 12, generator=generator), torch.rand(batch, 10, generator=generator)


@torch.no_grad()
def difference(ours: BigGANModel, other, truncation: float = 0.43) -> float:
    expected = other(*inputs(), truncation)
    assert torch.isfinite(expected).all() and expected.std() > 0.03
    return (ours(*inputs(), truncation).images - expected).abs().max().item()


@pytest.mark.parametrize(("kind", "spectral_norm"), [("kept", False), ("kept", True), ("folded", False)])
@pytest.mark.parametrize("size", [128, *(pytest.param(size, marks=pytest.mark.exhaustive) for size in (256, 512))])
def test_images_are_equal_at_every_resolution(size, kind, spectral_norm, tmp_path):
    model = theirs(kind, layers=BigGANConfig(output_dim=size).layers)
    store(model, tmp_path)
    ours = load(tmp_path, spectral_norm=spectral_norm)
    assert ours.config.output_dim == size and ours.config.num_classes == ours.config.num_labels == 10
    assert difference(ours, model) < 1e-5
    again = BigGANModel.from_pretrained(None, config=ours.config, state_dict=model.state_dict()).eval()
    assert difference(again, model) < 1e-5


@pytest.mark.parametrize(
    ("kind", "spectral_norm", "n_stats"),
    [
        ("kept", True, 51),
        ("kept", False, 51),
        ("folded", False, 2),
        *(pytest.param("kept", False, n_stats, marks=pytest.mark.exhaustive) for n_stats in (11, 50)),
    ],
)
def test_images_are_equal_at_every_truncation(kind, spectral_norm, n_stats, tmp_path):
    """After cycles of saving and loading."""
    model = theirs(kind, **SMALL, n_stats=n_stats)
    store(model, tmp_path, safe=kind == "folded")
    ours = load(tmp_path, spectral_norm=spectral_norm)
    for turn in range(2):
        ours.save_pretrained(tmp_path / str(turn))
        ours, report = AutoModel.from_pretrained(tmp_path / str(turn), output_loading_info=True)
        assert type(ours) is BigGANModel and not any(report.values())
        assert not any("snconv" in name or "weight_orig" in name for name in ours.state_dict())
    ours.eval()
    for truncation in TRUNCATIONS if n_stats == 51 else (0.02, 0.43, 0.7, 0.99):
        assert difference(ours, model, truncation) < 1e-5, truncation
    if n_stats == 51:  # images at different truncations do differ
        assert difference(ours, lambda z, label, _: model(z, label, 0.56), 0.58) > 0.05


def test_config_file_without_model_type(tmp_path):
    store(theirs(**SMALL), tmp_path)
    assert "model_type" not in json.loads((tmp_path / "config.json").read_text())
    config = BigGANConfig.from_pretrained(tmp_path)
    assert (config.channel_width, config.z_dim, config.num_classes, config.output_dim) == (8, 12, 10, 32)
    half = load(tmp_path, dtype=torch.float16, attn_implementation="kdeformer")
    assert half.dtype == torch.float16 and half.config._attn_implementation == "kdeformer"
    assert half.generator.gen_z.weight.dtype == torch.float16
    given = BigGANModel.from_pretrained(tmp_path, config=config).eval()
    assert difference(given, theirs(**SMALL)) < 1e-5


@pytest.mark.parametrize("part", ["weight_orig", pytest.param("weight_v", marks=pytest.mark.exhaustive)])
def test_incomplete_spectral_norm_is_reported(part, tmp_path):
    model = theirs(**SMALL)
    store(model, tmp_path)
    state = model.state_dict()
    del state[f"generator.layers.0.conv_1.{part}"]
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(RuntimeError):
        BigGANModel.from_pretrained(tmp_path)
    _, report = BigGANModel.from_pretrained(tmp_path, spectral_norm=True, output_loading_info=True)
    assert len(report["missing_keys"]) == 1


def test_missing_and_unknown_names_are_reported(tmp_path):
    model = theirs(**SMALL)
    store(model, tmp_path)
    state = model.state_dict()
    state["generator.more.weight"] = state.pop("generator.bn.bias")
    torch.save(state, tmp_path / "pytorch_model.bin")
    _, report = BigGANModel.from_pretrained(tmp_path, output_loading_info=True)
    assert report["missing_keys"] == {"generator.bn.bias"} and report["unexpected_keys"] == {"generator.more.weight"}


def test_noise_is_equal():
    for seed, truncation in ((0, 1.0), (3, 0.43)):
        expected = torch.from_numpy(utils.truncated_noise_sample(20, 128, truncation, seed))
        assert (truncated_noise(20, 128, truncation, seed) - expected).abs().max() < 1e-6


def test_classes_are_equal():
    assert len(class_names()) == len(utils.IMAGENET) == 1000
    assert {int(number[1:]): index for index, (number, _) in enumerate(imagenet_classes())} == utils.IMAGENET
