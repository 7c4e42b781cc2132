"""The BigGAN recipes on tiny models and artificial digits, and the scores for Gaussians with known values."""

import gzip
import json
import math
import pathlib
import struct

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from transformers import ViTImageProcessorPil

from helpers.commands import read_csv, run
from hf_efficient_attn.models.biggan import BigGANConfig, BigGANModel
from instances import numbers
from recipes import biggan, biggan_train
from recipes.biggan_train import Discriminator, hinge_loss, make_classifier, sameness, train_classifier
from recipes.common import gan
from recipes.common.gan import Draw, FeatureNetwork, apply_swap, frechet_distance, inception_score, pictures, swaps_of
from tiny_recipes import lay_out, packed, refuses, write


def idx(values) -> bytes:
    shape = values.shape
    return bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + values.numpy().tobytes()


def bars(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Horizontal and vertical bars of 12 x 12 pixels, and their classes."""
    labels = torch.arange(number) % 2
    values = torch.randint(0, 40, (number, 12, 12), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    values[labels == 0, 5:7], values[labels == 1, :, 5:7] = 250, 250
    return values, labels


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folders of a generator, of a classifier, and of data in the layout of MNIST.

    The generator makes pictures of 16 x 16, and its attention has 256 queries, 64 keys and a visible effect.
    """
    folder = tmp_path_factory.mktemp("biggan")
    torch.manual_seed(0)
    config = BigGANConfig(
        z_dim=6, class_embed_dim=6, channel_width=4, num_classes=3, attention_layer_position=2, n_stats=3,
        layers=[[True, 16, 16], [True, 16, 8], [False, 8, 4], [False, 4, 2], [False, 2, 1]],
        id2label={0: "cat", 1: "dog", 2: "crane"}, spectral_norm=True,
    )  # fmt: skip
    model = BigGANModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gamma" in name:
                parameter.fill_(3.0)
            elif "embeddings" in name:
                parameter.normal_()
    model.set_statistics(num_samples=64, batch_size=32, progress=False)
    model.eval().save_pretrained(folder / "gan")
    make_classifier(3, (4, 6)).save_pretrained(folder / "network")
    half, size = [0.5] * 3, {"height": 16, "width": 16}
    ViTImageProcessorPil(size=size, image_mean=half, image_std=half).save_pretrained(folder / "network")
    mnist = folder / "images" / "mnist"
    for split, number in (("train", 128), ("t10k", 64)):
        values, labels = bars(number)
        write(mnist / f"{split}-images-idx3-ubyte.gz", gzip.compress(idx(values)))
        write(mnist / f"{split}-labels-idx1-ubyte.gz", gzip.compress(idx(labels.to(torch.uint8))))
    return folder


@pytest.fixture
def generator(made):
    return gan.load_generator(str(made / "gan"))


def test_draws_depend_on_the_seed_and_use_the_classes_in_turn(generator):
    first, again, other = (Draw.of(generator.config, [2, 0], 5, 0.5, seed) for seed in (0, 0, 1))
    assert first.labels.tolist() == [2, 0, 2, 0, 2] and first.noise.abs().max() <= 1
    assert torch.equal(first.noise, again.noise) and not torch.equal(first.noise, other.noise)
    # A longer draw begins with the shorter one.
    assert torch.equal(Draw.of(generator.config, [], 9, 0.5, 0).noise[:5], first.noise)
    refuses("truncation", Draw.of, generator.config, [], 5, 1.5, 0)


def test_classes_by_name_and_number(generator):
    imagenet = BigGANConfig(z_dim=6, channel_width=8)
    assert gan.parse_classes(["Dog", "0", "crane"], generator.config) == [1, 0, 2]
    assert gan.parse_classes(["goldfish", "207"], imagenet) == [1, 207]
    refuses("no class 'cow'", gan.parse_classes, ["cow"], generator.config)
    refuses("no class '3'", gan.parse_classes, ["3"], generator.config)
    refuses("Did you mean", gan.parse_classes, ["goldfisch"], imagenet)


def test_swaps_are_applied_and_undone(generator, made):
    draw = Draw.of(generator.config, [], 6, 1.0, 0)
    exact, method = swaps_of(["performer"], [], [16], 64)
    assert (exact.label, method.label) == ("exact", "performer, 16")
    first = next(pictures(generator, draw, 6))
    assert not torch.allclose(next(pictures(apply_swap(generator, method), draw, 6)), first, atol=1e-4)
    assert torch.equal(next(pictures(apply_swap(generator, exact), draw, 6)), first)
    # It is loaded without spectral norm, which changes nothing.
    assert not generator.config.spectral_norm and not generator.training
    assert torch.allclose(next(pictures(BigGANModel.from_pretrained(made / "gan").eval(), draw, 6)), first, atol=1e-5)


def test_swaps_have_budgets_below_the_number_of_keys_without_repetition():
    assert [(swap.name, swap.budget) for swap in swaps_of(["kdeformer", "linear"], [], [16, 32, 64, 128], 64)] == [
        ("exact", None), ("kdeformer", 16), ("kdeformer", 32), ("linear", None),
    ]  # fmt: skip
    assert {swap.name for swap in swaps_of([], [], [32], 64)} > {"kdeformer", "performer", "reformer", "eva"}


def test_compare_measures_and_draws(made, tmp_path, table):
    path, more = tmp_path / "side.png", "--method kdeformer,linear --budget 8,32 --count 4 --rounds 1 --output"
    (exact, small, large, linear), out = table(biggan, "compare", made / "gan", more, path)
    assert [row["attention"] for row in (exact, small, large, linear)] == ["exact", "kdeformer", "kdeformer", "linear"]
    assert float(exact["relative_error"]) == 0 and float(exact["fewer"]) == 1
    assert float(small["relative_error"]) > float(large["relative_error"]) > 0
    assert float(small["greatest"]) >= float(small["relative_error"])
    assert float(small["fewer"]) > float(large["fewer"]) and float(small["times_faster"]) > 0
    with Image.open(path) as picture:
        assert picture.size[0] > 4 * 18 and picture.size[1] == 4 * 18
    assert "| kdeformer | 32" in out


def test_score_of_a_model_against_its_own_pictures_and_digits(generator, made, tmp_path, table):
    """Exact attention has an FID of about 0 on its own pictures, and another method has more."""
    draw = Draw.of(generator.config, [], 60, 1.0, 0)
    draw = draw._replace(labels=draw.labels[torch.randperm(60, generator=torch.Generator().manual_seed(0))])
    images = gan.to_bytes(next(pictures(generator, draw, 60)))
    files = {f"n0000000{i % 3}_{i}.png": packed(Image.fromarray(one.numpy())) for i, one in enumerate(images)}
    given = "score", made / "gan", "--features", made / "network", "--splits 2 --rounds 0 --reference"
    more = lay_out(tmp_path / "reference", files), "--count 60 --method performer:num_features=2 --budget 2"
    (exact, method), _ = table(biggan, *given, *more)
    # The pictures were rounded to bytes.
    assert 0 <= 10 * float(exact["fid"]) < float(method["fid"])
    assert 1 <= float(exact["inception_score"]) <= 3 and exact["times_faster"] == ""
    _, out = table(biggan, *given, made / "images" / "mnist", "--count 20 --method linear")
    assert "20 pictures for each method" in out


REFUSED = yaml.safe_load(pathlib.Path(__file__).with_name("refusals.yaml").read_text(encoding="utf-8"))["biggan"]


@pytest.mark.parametrize(("words", "message"), REFUSED.items())
def test_refusals_are_one_line(made, tmp_path, words, message, capsys):
    recipe = biggan_train if words.startswith(("gan", "features")) else biggan
    status = run(recipe, words.replace("MADE", str(made)).replace("OUT", str(tmp_path)))
    error = capsys.readouterr().err
    assert status == (1 if message == "MNIST" else 2) and message in error and error.count("\n") == 1


def test_features_are_the_input_of_the_last_layer(made):
    network, images = FeatureNetwork(made / "network"), torch.rand(5, 3, 16, 16) * 2 - 1
    found, probabilities = network(images)
    assert found.shape == (5, 6) and torch.allclose(probabilities.sum(1), torch.ones(5))
    with torch.no_grad():
        logits = network.model.classifier(found[..., None, None])
    assert torch.allclose(logits.softmax(1), probabilities, atol=1e-6)
    # Mean and deviation of one half leave [-1, 1] unchanged.
    images = torch.rand(2, 3, 32, 32) * 2 - 1
    halved = torch.nn.functional.interpolate(images, (16, 16), mode="bilinear", antialias=True)
    assert torch.allclose(network.prepare(images), halved, atol=1e-6)
    network.mean, network.std = (torch.tensor(x).view(3, 1, 1) for x in ([0.0, 0.0, 0.5], [1.0, 1.0, 0.25]))
    found = network.prepare(images[..., :16, :16])
    assert found[:, :2].min() >= 0 and found[:, 2].min() < -1


def test_a_classifier_learns_and_is_saved(made, tmp_path, capsys):
    torch.manual_seed(0)
    model, (values, labels) = make_classifier(2, (8, 16)), bars(64)
    assert train_classifier(model, (values, labels), minutes=0, steps=40, batch=32) == 40
    model.train()
    assert (model(pixel_values=gan.as_input(values)).logits.argmax(1) == labels).float().mean() > 0.9
    output = tmp_path / "features"
    assert run(biggan_train, "features --steps 2 --data", made, "--output", output) == 0
    assert "2 steps, accuracy" in capsys.readouterr().out
    assert json.loads((output / "preprocessor_config.json").read_text())["size"] == {"height": 32, "width": 32}
    assert FeatureNetwork(output)(torch.zeros(2, 3, 32, 32))[0].shape == (2, 128)


def test_parts_of_the_training():
    real, fake = torch.tensor([2.0, 0.5]), torch.tensor([-3.0, 1.0])
    assert hinge_loss(real, fake).item() == pytest.approx(0.25 + 1.0)
    # Sameness is large if the noise is ignored. Pictures 0 and 2 have the same class, and so have 1 and 3.
    noise = torch.tensor([[0.0], [1.0], [2.0], [1.0]])
    images = torch.tensor([0.0, 1.0, 0.5, 1.5]).view(4, 1, 1, 1).expand(4, 3, 2, 2)
    assert sameness(images, noise).item() == pytest.approx(1.0 / (0.5 + 1e-3))
    assert sameness(images * 0, noise) > sameness(images, noise) > sameness(images * 2, noise)
    # The discriminator depends on the class.
    torch.manual_seed(0)
    model, images = Discriminator(3, (4, 8)).eval(), torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        scores = [model(images, torch.tensor([label] * 2)) for label in range(3)]
    assert scores[0].shape == (2,) and not torch.allclose(scores[0], scores[1])
    for module in (model.score, model.blocks[0].enter):
        assert torch.linalg.matrix_norm(module.weight.detach().flatten(1), 2) < 1.5


def test_training_is_saved(made, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(biggan_train, "LAYERS", [(True, 16, 8), (False, 8, 4), (False, 4, 2), (False, 2, 1)])
    monkeypatch.setattr(biggan_train, "ATTENTION", 1)
    # The generator makes pictures of 8 x 8 pixels: crop the real ones.
    small = biggan_train.gan.as_input
    monkeypatch.setattr(biggan_train.gan, "as_input", lambda x: small(x[:, 2:10, 2:10], 8))
    for name in ("one", "two"):
        options = "gan --batch 8 --width 4 --statistics 16 --steps 4 --data"
        assert run(biggan_train, options, made, "--output", tmp_path / name) == 0
    assert "4 steps" in capsys.readouterr().out
    report = json.loads((tmp_path / "one" / "metrics.json").read_text())
    assert report["steps"] == 4 and report["gamma_at_start"] == 1.0 != report["gamma"]
    one, two = (read_csv(tmp_path / name / "losses.csv") for name in ("one", "two"))
    assert len(one) == 4 and one == two, "the same seed gives the same losses"
    with Image.open(tmp_path / "one" / "samples.png") as picture:
        assert picture.size == (10 * 10 - 2, 2 * 10 - 2)
    model = gan.load_generator(str(tmp_path / "one"))
    assert model.config._attn_implementation == "sdpa"
    # The batch norm statistics have been computed.
    norms = [module for module in model.modules() if hasattr(module, "running_vars")]
    assert norms and all(not module.running_vars.eq(1).all() for module in norms)
    images = next(pictures(model, Draw.of(model.config, [], 4, 0.5, 0), 4))
    assert images.shape == (4, 3, 8, 8) and images.isfinite().all()


def test_sheets_of_pictures():
    images = torch.linspace(-1, 1, 3)[:, None, None, None].expand(3, 3, 4, 4)
    assert gan.to_bytes(images)[:, 0, 0, 0].tolist() == [0, 128, 255]
    sheet = np.array(gan.grid(images, 2))
    assert sheet.shape == (4 * 2 + 2, 4 * 2 + 2, 3)
    assert (sheet[:4, :4] == 0).all() and (sheet[6:, :4] == 255).all() and (sheet[:4, 6:] == 128).all()


def test_idx_files(tmp_path):
    values = torch.arange(2 * 3 * 4, dtype=torch.uint8).view(2, 3, 4)
    for split, end, pack in (("t10k", "", bytes), ("train", ".gz", gzip.compress)):
        write(tmp_path / f"{split}-images-idx3-ubyte{end}", pack(idx(values)))
        write(tmp_path / f"{split}-labels-idx1-ubyte{end}", pack(idx(torch.tensor([7, 2], dtype=torch.uint8))))
        found, labels = gan.load_digits(tmp_path, split)
        assert torch.equal(found, values) and labels.tolist() == [7, 2]
    refuses("test-images", gan.load_digits, tmp_path, "test", error=FileNotFoundError)
    whole = idx(torch.zeros(300, dtype=torch.uint8))
    for end, raw, message in (
        ("", b"", "not a complete IDX"),
        ("", bytes((0, 0, 13, 1)), "not that of unsigned bytes"),
        ("", whole[:-1], "not a complete IDX"),
        (".gz", b"no gzip", "not a complete IDX"),
        (".gz", gzip.compress(whole, mtime=0)[:-12], "not a complete IDX"),
    ):
        write(tmp_path / f"broken{end}", raw)
        refuses(message, gan.read_idx, tmp_path / f"broken{end}")


def test_digits_are_centred_on_black():
    digits = torch.full((2, 28, 28), 255, dtype=torch.uint8)
    found = gan.as_input(digits)
    assert found.shape == (2, 3, 32, 32)
    assert found[:, :, 2:30, 2:30].eq(1).all() and found.sum() == 2 * 3 * (28**2 - (32**2 - 28**2))
    refuses("do not fit", gan.as_input, digits, 16)


def test_frechet_distance():
    linalg = pytest.importorskip("scipy.linalg", reason="needs scipy")
    first, second = (numbers(40, 6, seed=i) @ numbers(6, 6, seed=i + 5) for i in (0, 1))
    one, two = (torch.cov(x.t()) for x in (first, second))
    expected = (first.mean(0) - second.mean(0)).square().sum() + one.trace() + two.trace()
    expected = expected.item() - 2 * np.trace(linalg.sqrtm((one @ two).numpy()).real)
    assert frechet_distance(first, second) == pytest.approx(expected, rel=1e-7)
    assert frechet_distance(second, first) == pytest.approx(expected, rel=1e-7)
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-6)
    # A shift adds its square, far from zero too.
    assert frechet_distance(first, first + 1e4) == pytest.approx(6 * 1e8, rel=1e-6)
    # Two covariances of rank one, a a^T and b b^T: the trace of the root is |a b|.
    a, b = numbers(6, seed=7), numbers(6, seed=8)
    first, second = (torch.stack((x, -x)) / 2**0.5 for x in (a, b))
    expected = a.dot(a) + b.dot(b) - 2 * a.dot(b).abs()
    assert frechet_distance(first, second) == pytest.approx(expected.item(), rel=1e-6)


def test_inception_score():
    """The number of classes if all are as frequent, 1 for one answer, and otherwise the formula."""
    for splits in (1, 5):
        assert inception_score(torch.eye(10).repeat(5, 1), splits) == pytest.approx((10.0, 0.0), abs=1e-6)
    for same in (torch.full((40, 10), 0.1), torch.eye(10)[:1].repeat(40, 1)):
        assert inception_score(same, 4) == pytest.approx((1.0, 0.0))
    probabilities = numbers(60, 4).softmax(1)
    marginal = probabilities.mean(0)
    expected = math.exp(sum((row * (row / marginal).log()).sum().item() for row in probabilities) / 60)
    assert inception_score(probabilities, 1)[0] == pytest.approx(expected)
    parts = [inception_score(part, 1)[0] for part in probabilities.split(20)]
    assert inception_score(probabilities, 3) == pytest.approx((np.mean(parts), np.std(parts)))
