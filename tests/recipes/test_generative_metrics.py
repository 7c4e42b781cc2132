"""Frechet distance and inception score for Gaussians and distributions with known values."""

import gzip
import math
import struct

import numpy as np
import pytest
import torch

from recipes.common.gan import digits
from recipes.common.gan.scores import Gaussian, frechet_distance, inception_score

D = 6


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covariance(seed, rank=D):
    """A covariance (D, D) of this rank."""
    root = normal(D, rank, seed=seed)
    return root @ root.t()


def by_scipy(first, second):
    linalg = pytest.importorskip("scipy.linalg", reason="needs scipy")
    root = linalg.sqrtm((first.covariance @ second.covariance).numpy()).real
    shift = (first.mean - second.mean).square().sum().item()
    return shift + first.covariance.trace().item() + second.covariance.trace().item() - 2 * np.trace(root)


# --- Frechet distance ---


def test_distance_of_equal_gaussians_is_zero():
    one = Gaussian(normal(D), covariance(1))
    assert frechet_distance(one, one) == pytest.approx(0, abs=1e-9)


def test_distance_of_shifted_gaussians_is_the_squared_shift():
    one, shift = Gaussian(normal(D), covariance(1)), normal(D, seed=2)
    found = frechet_distance(one, Gaussian(one.mean + shift, one.covariance))
    assert found == pytest.approx(shift.square().sum().item(), rel=1e-9)


@pytest.mark.parametrize("seed", range(2))
def test_other_covariances_against_scipy(seed):
    first, second = (Gaussian(normal(D, seed=10 * seed + i), covariance(10 * seed + i + 2)) for i in (0, 1))
    product = first.covariance @ second.covariance
    assert not torch.allclose(product, product.t())
    assert frechet_distance(first, second) == pytest.approx(by_scipy(first, second), rel=1e-7)
    assert frechet_distance(second, first) == pytest.approx(frechet_distance(first, second), rel=1e-9)


def test_singular_covariances():
    # Two covariances of rank one: the trace of the root is |a| |b| |cos(angle)|.
    a, b = normal(D, seed=7), normal(D, seed=8)
    first, second = (Gaussian(torch.zeros(D).double(), torch.outer(x, x)) for x in (a, b))
    expected = a.dot(a) + b.dot(b) - 2 * a.dot(b).abs()
    assert frechet_distance(first, second) == pytest.approx(expected.item(), rel=1e-6)


def test_distance_is_finite_with_fewer_pictures_than_features():
    first, second = (Gaussian.of(normal(5, 64, seed=s)) for s in (1, 2))
    assert 0 < frechet_distance(first, second) < math.inf
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-6)


def test_eigenvalues_that_are_negative_by_rounding():
    one = Gaussian(torch.zeros(D).double(), covariance(1, rank=2) - 1e-12 * torch.eye(D))
    assert frechet_distance(one, Gaussian(one.mean, covariance(2))) >= 0


def test_other_features_are_refused():
    with pytest.raises(ValueError, match="same network"):
        frechet_distance(Gaussian(torch.zeros(3), torch.eye(3)), Gaussian(torch.zeros(D), torch.eye(D)))


def test_mean_and_covariance_far_from_zero_are_precise():
    features = normal(400, D)
    found = Gaussian.of(features + 1e6)
    assert torch.allclose(found.mean, features.mean(0) + 1e6)
    assert torch.allclose(found.covariance, torch.cov(features.t()), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "features",
    [torch.zeros(1, 3), torch.zeros(4), torch.full((2, 1), math.nan)],
)
def test_invalid_features_are_refused(features):
    with pytest.raises(ValueError, match=r"finite numbers .* of at least 2 pictures"):
        Gaussian.of(features)


def test_statistics_are_saved_and_loaded(tmp_path):
    one = Gaussian(normal(D), covariance(1))
    np.savez(tmp_path / "kept.npz", mu=one.mean.numpy(), sigma=one.covariance.numpy())
    again = Gaussian.load(tmp_path / "kept.npz")
    assert torch.equal(one.mean, again.mean) and torch.equal(one.covariance, again.covariance)
    np.savez(tmp_path / "other.npz", mean=np.zeros(3))
    (tmp_path / "text.npz").write_text("no archive")
    for name in ("other.npz", "text.npz"):
        with pytest.raises(ValueError, match=r"mu .* and sigma"):
            Gaussian.load(tmp_path / name)


# --- inception score ---


@pytest.mark.parametrize("splits", [1, 5])
def test_inception_score_of_certain_uniform_classes_is_their_number(splits):
    mean, deviation = inception_score(torch.eye(10).repeat(5, 1), splits)
    assert mean == pytest.approx(10) and deviation == pytest.approx(0, abs=1e-9)


def test_inception_score_of_one_answer_is_one():
    assert inception_score(torch.full((40, 10), 0.1), 4) == pytest.approx((1.0, 0.0))
    assert inception_score(torch.eye(10)[:1].repeat(40, 1), 4) == pytest.approx((1.0, 0.0))


def test_inception_score_by_the_formula():
    probabilities = normal(60, 4).softmax(1)
    marginal = probabilities.mean(0)
    expected = math.exp(sum((row * (row / marginal).log()).sum().item() for row in probabilities) / 60)
    assert inception_score(probabilities, 1)[0] == pytest.approx(expected)
    parts = [inception_score(part, 1)[0] for part in probabilities.split(20)]
    assert inception_score(probabilities, 3) == pytest.approx((np.mean(parts), np.std(parts)))


# --- digits ---


def idx(values):
    shape = values.shape
    return bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + values.numpy().tobytes()


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzip"])
def test_idx_files_are_read(tmp_path, zipped):
    pictures = torch.arange(2 * 3 * 4, dtype=torch.uint8).view(2, 3, 4)
    end, pack = (".gz", gzip.compress) if zipped else ("", bytes)
    (tmp_path / f"t10k-images-idx3-ubyte{end}").write_bytes(pack(idx(pictures)))
    (tmp_path / f"t10k-labels-idx1-ubyte{end}").write_bytes(pack(idx(torch.tensor([7, 2], dtype=torch.uint8))))
    found, labels = digits.load(tmp_path, "t10k")
    assert torch.equal(found, pictures) and labels.tolist() == [7, 2]
    with pytest.raises(FileNotFoundError, match="train-images"):
        digits.load(tmp_path, "train")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not a complete IDX"),
        (bytes((0, 0, 13, 1)), "not that of unsigned bytes"),
        (idx(torch.zeros(3, dtype=torch.uint8))[:-1], "not a complete IDX"),
    ],
)
def test_broken_idx_files_are_refused(tmp_path, raw, message):
    path = tmp_path / "file-idx3-ubyte"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        digits.read_idx(path)


def test_broken_gzip_is_refused(tmp_path):
    path = tmp_path / "file-idx3-ubyte.gz"
    for raw in (b"no gzip", gzip.compress(idx(torch.zeros(300, dtype=torch.uint8)))[:-12]):
        path.write_bytes(raw)
        with pytest.raises(ValueError, match="gzip"):
            digits.read_idx(path)


def test_digits_are_centred_on_black():
    pictures = torch.full((2, 28, 28), 255, dtype=torch.uint8)
    found = digits.as_input(pictures)
    assert found.shape == (2, 3, 32, 32)
    assert found[:, :, 2:30, 2:30].eq(1).all() and found.sum() == 2 * 3 * (28**2 - (32**2 - 28**2))
    with pytest.raises(ValueError, match="do not fit"):
        digits.as_input(pictures, 16)
