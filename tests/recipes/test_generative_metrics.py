"""Frechet distance and inception score for Gaussians and distributions with known values."""

import gzip
import math
import struct

import numpy as np
import pytest
import torch

from recipes.common import gan
from recipes.common.gan import frechet_distance, inception_score

D = 6


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_scipy(first, second):
    linalg = pytest.importorskip("scipy.linalg", reason="needs scipy")
    one, two = (torch.cov(x.t()) for x in (first, second))
    shift = (first.mean(0) - second.mean(0)).square().sum() + one.trace() + two.trace()
    return shift.item() - 2 * np.trace(linalg.sqrtm((one @ two).numpy()).real)


# --- Frechet distance ---


@pytest.mark.parametrize("seed", range(2))
def test_distance_against_scipy(seed):
    first, second = (normal(40, D, seed=10 * seed + i) @ normal(D, D, seed=10 * seed + i + 5) for i in (0, 1))
    assert frechet_distance(first, second) == pytest.approx(by_scipy(first, second), rel=1e-7)
    assert frechet_distance(second, first) == pytest.approx(frechet_distance(first, second), rel=1e-9)
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-6)
    # A shift adds its square, far from zero too.
    assert frechet_distance(first, first + 1e4) == pytest.approx(D * 1e8, rel=1e-6)


def test_singular_covariances():
    """Two covariances of rank one, a a^T and b b^T: the trace of the root is |a b|."""
    a, b = normal(D, seed=7), normal(D, seed=8)
    first, second = (torch.stack((x, -x)) / 2**0.5 for x in (a, b))
    expected = a.dot(a) + b.dot(b) - 2 * a.dot(b).abs()
    assert frechet_distance(first, second) == pytest.approx(expected.item(), rel=1e-6)
    # Fewer pictures than features.
    first, second = normal(5, 64, seed=1), normal(5, 64, seed=2)
    assert 0 < frechet_distance(first, second) < math.inf
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-5)


# --- inception score ---


def test_inception_score_of_certain_answers():
    """The number of classes if all are as frequent, and 1 for one answer."""
    for splits in (1, 5):
        assert inception_score(torch.eye(10).repeat(5, 1), splits) == pytest.approx((10.0, 0.0), abs=1e-6)
    for same in (torch.full((40, 10), 0.1), torch.eye(10)[:1].repeat(40, 1)):
        assert inception_score(same, 4) == pytest.approx((1.0, 0.0))


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
    found, labels = gan.load_digits(tmp_path, "t10k")
    assert torch.equal(found, pictures) and labels.tolist() == [7, 2]
    with pytest.raises(FileNotFoundError, match="train-images"):
        gan.load_digits(tmp_path, "train")


IDX = idx(torch.zeros(300, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("end", "raw", "message"),
    [
        ("", b"", "not a complete IDX"),
        ("", bytes((0, 0, 13, 1)), "not that of unsigned bytes"),
        ("", IDX[:-1], "not a complete IDX"),
        (".gz", b"no gzip", "not a complete IDX"),
        (".gz", gzip.compress(IDX, mtime=0)[:-12], "not a complete IDX"),
    ],
)
def test_broken_idx_files_are_refused(tmp_path, end, raw, message):
    path = tmp_path / f"file-idx3-ubyte{end}"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        gan.read_idx(path)


def test_digits_are_centred_on_black():
    pictures = torch.full((2, 28, 28), 255, dtype=torch.uint8)
    found = gan.as_input(pictures)
    assert found.shape == (2, 3, 32, 32)
    assert found[:, :, 2:30, 2:30].eq(1).all() and found.sum() == 2 * 3 * (28**2 - (32**2 - 28**2))
    with pytest.raises(ValueError, match="do not fit"):
        gan.as_input(pictures, 16)
