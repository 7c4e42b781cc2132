"""The BigGAN recipes on tiny models and artificial digits."""

import gzip
import json

import numpy as np
import pytest
import torch
from transformers import ViTImageProcessorPil

import hf_efficient_attn as hea
from hf_efficient_attn import cli
from hf_efficient_attn.models.biggan import BigGANConfig, BigGANModel
from recipe_commands import read_csv
from recipes import biggan, biggan_train
from recipes.biggan_train import Discriminator, hinge_loss, make_classifier, sameness, train_classifier
from recipes.common import gan
from recipes.common.gan import Draw, FeatureNetwork, apply_swap, layer_costs, load_generator, pictures, swaps_of
from test_generative_metrics import idx

Image = pytest.importorskip("PIL.Image", reason="needs Pillow")
REFUSED = hea.UnsupportedAttentionError


def run(application, *arguments):
    return cli.run(application, [str(argument) for argument in arguments], "recipe")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A generator of 16 x 16 pictures whose attention has 256 queries, 64 keys and a visible effect."""
    folder = tmp_path_factory.mktemp("generator")
    torch.manual_seed(0)
    layers = [[True, 16, 16], [True, 16, 8], [False, 8, 4], [False, 4, 2], [False, 2, 1]]
    config = BigGANConfig(
        z_dim=6, class_embed_dim=6, channel_width=4, num_classes=3, layers=layers, attention_layer_position=2,
        n_stats=3, id2label={0: "cat", 1: "dog", 2: "crane"}, spectral_norm=True,
    )  # fmt: skip
    model = BigGANModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gamma" in name:
                parameter.fill_(3.0)
            elif "embeddings" in name:
                parameter.normal_()
    model.set_statistics(num_samples=64, batch_size=32, progress=False)
    model.eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    make_classifier(3, (4, 6)).save_pretrained(folder)
    half, size = [0.5] * 3, {"height": 16, "width": 16}
    ViTImageProcessorPil(size=size, image_mean=half, image_std=half).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Horizontal and vertical bars of 12 x 12 pixels in the layout of MNIST."""
    folder = tmp_path_factory.mktemp("data")
    mnist = folder / "images" / "mnist"
    mnist.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for split, number in (("train", 128), ("t10k", 64)):
        labels = torch.arange(number) % 2
        values = torch.randint(0, 40, (number, 12, 12), generator=generator, dtype=torch.uint8)
        for picture, label in zip(values, labels, strict=True):
            (picture.t() if label else picture)[5:7] = 250
        (mnist / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(values)))
        (mnist / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels.to(torch.uint8))))
    return folder


# --- sampling ---


def test_a_generator_is_loaded_without_spectral_norm(checkpoint):
    model = load_generator(str(checkpoint))
    assert not model.config.spectral_norm and not model.training
    kept = BigGANModel.from_pretrained(checkpoint).eval()
    draw = Draw.of(model.config, [], 4, 1.0, 0)
    made, same = (next(pictures(one, draw, 4)) for one in (model, kept))
    assert torch.allclose(made, same, atol=1e-5)


def test_draws_depend_on_the_seed_and_use_the_classes_in_turn(checkpoint):
    config = load_generator(str(checkpoint)).config
    first, again, other = (Draw.of(config, [2, 0], 5, 0.5, seed) for seed in (0, 0, 1))
    assert first.labels.tolist() == [2, 0, 2, 0, 2] and first.noise.abs().max() <= 1
    assert torch.equal(first.noise, again.noise) and not torch.equal(first.noise, other.noise)
    # A longer draw begins with the shorter one.
    assert torch.equal(Draw.of(config, [], 9, 0.5, 0).noise[:5], first.noise)
    with pytest.raises(REFUSED, match="truncation"):
        Draw.of(config, [], 5, 1.5, 0)


def test_classes_by_name_and_number(checkpoint):
    config = load_generator(str(checkpoint)).config
    assert gan.parse_classes(["Dog", "0", "crane"], config) == [1, 0, 2]
    imagenet = BigGANConfig(z_dim=6, channel_width=8)
    assert gan.parse_classes(["goldfish", "207"], imagenet) == [1, 207]
    for name, model, message in (
        ("cow", config, "no class 'cow'"),
        ("3", config, "no class '3'"),
        ("goldfisch", imagenet, "Did you mean"),
    ):
        with pytest.raises(REFUSED, match=message):
            gan.parse_classes([name], model)


def test_swaps_are_applied_and_undone(checkpoint):
    model = load_generator(str(checkpoint))
    draw = Draw.of(model.config, [], 6, 1.0, 0)
    exact, method = swaps_of(["performer"], [], [16], 64)
    assert (exact.label, method.label) == ("exact", "performer, 16")
    first = next(pictures(model, draw, 6))
    assert not torch.allclose(next(pictures(apply_swap(model, method), draw, 6)), first, atol=1e-4)
    assert torch.equal(next(pictures(apply_swap(model, exact), draw, 6)), first)


def test_swaps_have_budgets_below_the_number_of_keys_without_repetition():
    swaps = swaps_of(["kdeformer", "linear"], [], [16, 32, 64, 128], 64)
    assert [(swap.name, swap.budget) for swap in swaps] == [
        ("exact", None), ("kdeformer", 16), ("kdeformer", 32), ("linear", None),
    ]  # fmt: skip
    assert {swap.name for swap in swaps_of([], [], [32], 64)} > {"kdeformer", "performer", "reformer", "eva"}
    with pytest.raises(REFUSED, match="64 keys"):
        swaps_of(["kdeformer"], [], [64], 64)
    with pytest.raises(REFUSED, match="as many keys as queries"):
        swaps_of(["longformer"], [], [16], 64)


def test_costs_of_the_attention_layer(checkpoint):
    model = load_generator(str(checkpoint))
    draw = Draw.of(model.config, [], 5, 1.0, 0)
    exact, linear = layer_costs(model, draw, swaps_of(["linear"], [], [16], 64), 1)
    # 256 queries and 64 keys of 4 channels (an eighth of 32), values of 16.
    assert exact["gflop"] * 1e9 == pytest.approx(256 * 64 * (4 + 16)) and exact["fewer"] == 1
    # A query multiplies eight more columns, for the sum of its weights.
    assert linear["gflop"] * 1e9 == pytest.approx(4 * ((16 + 8) * 256 + 16 * 64))
    assert linear["times_faster"] > 0 and exact["times_faster"] is None


# --- commands ---


def test_generate_writes_a_sheet(checkpoint, tmp_path, capsys):
    path, sheets = tmp_path / "sheet.png", []
    arguments = [checkpoint, "--output", path, "--count", 7, "--columns", 4, "--classes", "dog,0"]
    for options in ([], ["--attention", "performer", "--set", "num_features=4", "--truncation", 0.4]):
        assert run(biggan.app, "generate", *arguments, *options) == 0
        with Image.open(path) as picture:
            sheets.append(np.array(picture))
    assert sheets[0].shape == (2 * 18 - 2, 4 * 18 - 2, 3) and not np.array_equal(*sheets)
    assert "7 pictures of 16 pixels, exact" in capsys.readouterr().out


def test_compare_measures_and_draws(checkpoint, tmp_path, capsys):
    path, rows = tmp_path / "side.png", tmp_path / "rows.csv"
    arguments = [checkpoint, "--output", path, "--csv", rows, "--method", "kdeformer,linear", "--budget", "8,32"]
    assert run(biggan.app, "compare", *arguments, "--count", 4, "--rounds", 1) == 0
    exact, small, large, linear = read_csv(rows)
    assert [row["attention"] for row in (exact, small, large, linear)] == ["exact", "kdeformer", "kdeformer", "linear"]
    assert float(exact["relative_error"]) == 0 and float(exact["fewer"]) == 1
    assert float(small["relative_error"]) > float(large["relative_error"]) > 0
    assert float(small["greatest"]) >= float(small["relative_error"])
    assert float(small["fewer"]) > float(large["fewer"]) and float(small["times_faster"]) > 0
    with Image.open(path) as picture:
        assert picture.size[0] > 4 * 18 and picture.size[1] == 4 * 18
    assert "| kdeformer | 32" in capsys.readouterr().out


def test_score_of_a_model_against_its_own_pictures(checkpoint, classifier, tmp_path):
    """Exact attention has an FID of about 0 on its own pictures, and another method has more."""
    reference = tmp_path / "reference"
    reference.mkdir()
    model = load_generator(str(checkpoint))
    draw = Draw.of(model.config, [], 60, 1.0, 0)
    draw = draw._replace(labels=draw.labels[torch.randperm(60, generator=torch.Generator().manual_seed(0))])
    made = next(pictures(model, draw, 60))
    rows = tmp_path / "rows.csv"
    for i, values in enumerate(gan.to_bytes(made)):
        Image.fromarray(values.numpy()).save(reference / f"n0000000{i % 3}_{i}.png")
    arguments = [checkpoint, "--features", classifier, "--count", 60, "--splits", 2, "--rounds", 0, "--csv", rows]
    arguments += ["--method", "performer:num_features=2", "--budget", "2"]
    assert run(biggan.app, "score", *arguments, "--reference", reference) == 0
    exact, method = read_csv(rows)
    # The pictures were rounded to bytes.
    assert 0 <= 10 * float(exact["fid"]) < float(method["fid"])
    assert 1 <= float(exact["inception_score"]) <= 3 and exact["times_faster"] == ""


def test_score_against_digits(checkpoint, classifier, data, capsys):
    arguments = [checkpoint, "--features", classifier, "--reference", data / "images" / "mnist", "--count", 20]
    assert run(biggan.app, "score", *arguments, "--method", "linear", "--splits", 2, "--rounds", 0) == 0
    assert "20 pictures for each method" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("generate", ["OUT", "--output", "OUT/a.png"], "not a checkpoint of a BigGAN"),
        ("generate", ["GAN", "--output", "OUT/a.jpg"], "must end in .png"),
        ("generate", ["GAN", "--output", "OUT/none/a.png"], "its folder must exist"),
        ("generate", ["GAN", "--output", "OUT/a.png", "--classes", "cow"], "no class 'cow'"),
        ("generate", ["GAN", "--output", "OUT/a.png", "--truncation", "0"], "--truncation"),
        ("generate", ["GAN", "--output", "OUT/a.png", "--set", "num_features=3"], "--attention"),
        ("generate", ["GAN", "--output", "OUT/a.png", "--attention", "longformer"], "as many keys"),
        ("compare", ["GAN", "--output", "OUT/a.png", "--method", "kdeformr"], "kdeformer"),
        ("compare", ["GAN", "--output", "OUT/a.png", "--budget", "64"], "64 keys"),
        ("score", ["GAN", "--features", "OUT", "--reference", "MNIST"], "recipes.biggan_train features"),
        ("score", ["GAN", "--features", "NET", "--reference", "OUT/none"], "no such folder"),
        ("score", ["GAN", "--features", "NET", "--reference", "MNIST", "--count", "5"], "--splits 10"),
        ("score", ["GAN", "--features", "NET", "--reference", "GAN/config.json"], "--reference"),
    ],
)
def test_refusals_are_one_line(checkpoint, classifier, data, tmp_path, command, options, message, capsys):
    names = {"GAN": checkpoint, "NET": classifier, "MNIST": data / "images" / "mnist", "OUT": tmp_path}
    for name, path in names.items():
        options = [option.replace(name, str(path)) if option.startswith(name) else option for option in options]
    assert run(biggan.app, command, *options) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


# --- feature network ---


def test_features_are_the_input_of_the_last_layer(classifier):
    network = FeatureNetwork(classifier)
    images = torch.rand(5, 3, 16, 16) * 2 - 1
    found, probabilities = network(images)
    assert found.shape == (5, 6) and torch.allclose(probabilities.sum(1), torch.ones(5))
    with torch.no_grad():
        logits = network.model.classifier(found[..., None, None])
    assert torch.allclose(logits.softmax(1), probabilities, atol=1e-6)


def test_pictures_are_resized_and_normalised_like_the_preprocessor(classifier):
    network = FeatureNetwork(classifier)
    images = torch.rand(2, 3, 32, 32) * 2 - 1
    # Mean and deviation of one half leave [-1, 1] unchanged.
    halved = torch.nn.functional.interpolate(images, (16, 16), mode="bilinear", antialias=True)
    assert torch.allclose(network.prepare(images), halved, atol=1e-6)
    network.mean, network.std = (torch.tensor(x).view(3, 1, 1) for x in ([0.0, 0.0, 0.5], [1.0, 1.0, 0.25]))
    found = network.prepare(images[..., :16, :16])
    assert found[:, :2].min() >= 0 and found[:, 2].min() < -1


def test_a_classifier_is_trained_and_saved(data, tmp_path, capsys):
    output = tmp_path / "features"
    torch.manual_seed(0)
    assert run(biggan_train.app, "features", "--data", data, "--output", output, "--steps", 6) == 0
    assert "6 steps, accuracy" in capsys.readouterr().out
    settings = json.loads((output / "preprocessor_config.json").read_text())
    assert settings["size"] == {"height": 32, "width": 32}
    assert FeatureNetwork(output)(torch.zeros(2, 3, 32, 32))[0].shape == (2, 128)


def test_a_classifier_learns():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(64) % 2
    values = torch.randint(0, 40, (64, 12, 12), generator=generator, dtype=torch.uint8)
    values[labels == 1, 3:9] = 250
    torch.manual_seed(0)
    model = make_classifier(2, (8, 16))
    assert train_classifier(model, (values, labels), minutes=0, steps=40, batch=32) == 40
    model.train()
    assert (model(pixel_values=gan.as_input(values)).logits.argmax(1) == labels).float().mean() > 0.9


# --- training ---


def test_hinge_losses_by_hand():
    real, made = torch.tensor([2.0, 0.5]), torch.tensor([-3.0, 1.0])
    assert hinge_loss(real, made).item() == pytest.approx(0.25 + 1.0)


def test_sameness_is_large_if_the_noise_is_ignored():
    noise = torch.tensor([[0.0], [1.0], [2.0], [1.0]])
    # Pictures 0 and 2 have the same class, and so have 1 and 3.
    pictures = torch.tensor([0.0, 1.0, 0.5, 1.5]).view(4, 1, 1, 1).expand(4, 3, 2, 2)
    assert sameness(pictures, noise).item() == pytest.approx(1.0 / (0.5 + 1e-3))
    assert sameness(pictures * 0, noise) > sameness(pictures, noise) > sameness(pictures * 2, noise)


def test_discriminator_depends_on_the_class():
    torch.manual_seed(0)
    model = Discriminator(3, (4, 8)).eval()
    images = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        scores = [model(images, torch.tensor([label] * 2)) for label in range(3)]
    assert scores[0].shape == (2,) and not torch.allclose(scores[0], scores[1])
    for module in (model.score, model.blocks[0].enter):
        weight = module.weight.detach().flatten(1)
        assert torch.linalg.matrix_norm(weight, 2) < 1.5


def test_training_is_saved(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(biggan_train, "LAYERS", [(True, 16, 8), (False, 8, 4), (False, 4, 2), (False, 2, 1)])
    monkeypatch.setattr(biggan_train, "ATTENTION", 1)
    # The generator makes pictures of 8 x 8 pixels: crop the real ones.
    small = biggan_train.gan.as_input
    monkeypatch.setattr(biggan_train.gan, "as_input", lambda x: small(x[:, 2:10, 2:10], 8))
    options = ["--data", data, "--batch", 8, "--width", 4, "--statistics", 16, "--steps", 4]
    for name in ("one", "two"):
        assert run(biggan_train.app, "gan", *options, "--output", tmp_path / name) == 0
    assert "4 steps" in capsys.readouterr().out
    report = json.loads((tmp_path / "one" / "metrics.json").read_text())
    assert report["steps"] == 4 and report["gamma_at_start"] == 1.0 != report["gamma"]
    one, two = (read_csv(tmp_path / name / "losses.csv") for name in ("one", "two"))
    assert len(one) == 4 and one == two, "the same seed gives the same losses"
    with Image.open(tmp_path / "one" / "samples.png") as picture:
        assert picture.size == (10 * 10 - 2, 2 * 10 - 2)
    model = load_generator(str(tmp_path / "one"))
    assert model.config._attn_implementation == "sdpa"
    # The batch norm statistics have been computed.
    norms = [module for module in model.modules() if hasattr(module, "running_vars")]
    assert norms and all(not module.running_vars.eq(1).all() for module in norms)
    made = next(pictures(model, Draw.of(model.config, [], 4, 0.5, 0), 4))
    assert made.shape == (4, 3, 8, 8) and made.isfinite().all()


def test_average_follows_the_weights():
    average = torch.zeros(3)
    for step in range(1, 40):
        average = biggan_train._average(average, torch.ones(3), step)
    assert 0.9 < average.min() < 1
    assert biggan_train._average(torch.zeros(1), torch.ones(1), 10**6).item() == pytest.approx(0.001, rel=1e-3)


def test_refusals_of_the_training(data, tmp_path, capsys):
    for options, status, message in (
        (["--data", data, "--output", tmp_path], 2, "exists already"),
        (["--data", data, "--output", tmp_path / "none", "--batch", 7], 2, "even"),
        (["--data", tmp_path, "--output", tmp_path / "none"], 1, "MNIST"),
    ):
        assert run(biggan_train.app, "gan", *options) == status
        assert message in capsys.readouterr().err


# --- pictures ---


def test_sheets_of_pictures():
    images = torch.linspace(-1, 1, 3)[:, None, None, None].expand(3, 3, 4, 4)
    assert gan.to_bytes(images)[:, 0, 0, 0].tolist() == [0, 128, 255]
    sheet = np.array(gan.grid(images, 2))
    assert sheet.shape == (4 * 2 + 2, 4 * 2 + 2, 3)
    assert (sheet[:4, :4] == 0).all() and (sheet[6:, :4] == 255).all() and (sheet[:4, 6:] == 128).all()
    page = np.array(gan.named_rows({"exact": images, "a longer name": images}))
    assert page.shape[1] - 3 * 6 + 2 > 40 and (page < 255).any()
