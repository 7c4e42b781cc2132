"""Parts of the BigGAN recipes: digits, pictures with several methods on the same noise, their costs and their scores.

FID (Heusel et al. 2017, eq. 6) is the squared Wasserstein distance between two Gaussians. They have the mean and
covariance of a network's features on generated and on real pictures:

    |mu_1 - mu_2|^2 + tr(C_1 + C_2 - 2 (C_1 C_2)^(1/2))

The inception score (Salimans et al. 2016) is exp E KL(p(y|x) || p(y)) of the network's probabilities. The published
values use Inception v3. Scores of different networks cannot be compared.
"""

import contextlib
import gzip
import math
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForImageClassification

import hf_efficient_attn as hea
from hf_efficient_attn.checkpoint.loading import no_progress_bar
from hf_efficient_attn.cli import parse_methods
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.capture import capture_attention
from hf_efficient_attn.io.writing import replacing
from hf_efficient_attn.methods import MethodConfig, method_info
from hf_efficient_attn.models.biggan import BigGANConfig, BigGANModel, class_index, truncated_noise
from recipes.common.arguments import for_length
from recipes.common.counting import compute, count
from recipes.common.data import images
from recipes.common.data.image_tensors import Evaluation, Norm, preprocessor_settings
from recipes.common.memory import paired

_LINE_HEIGHT = 12  # pixels of a line of text
_GAP = 2


def read_idx(path: pathlib.Path) -> Tensor:
    """Read an IDX file of unsigned bytes, of any shape, gzipped or not, as uint8. Refuses other and truncated ones."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            raw = file.read()
        # Two zeros, the type (8 for unsigned bytes), the number of dimensions, and the size of each.
        if raw[:3] != b"\0\0\x08":
            raise ValueError("its type is not that of unsigned bytes")
        shape = np.frombuffer(raw, ">u4", raw[3], 4)
        return torch.from_numpy(np.frombuffer(raw, np.uint8, -1, 4 + 4 * raw[3]).reshape(shape).copy())
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a complete IDX file of unsigned bytes: {error}") from error


def load_digits(folder: pathlib.Path, split: str) -> tuple[Tensor, Tensor]:
    """Load the pictures (N, H, W) uint8 and classes (N,) int64 of a split, "train" or "t10k".

    The files are in the folder or its images/mnist. Missing and broken ones are refused.
    """
    for parent in (folder, folder / "images" / "mnist"):
        for end in (".gz", ""):
            paths = [parent / f"{split}-{name}-ubyte{end}" for name in ("images-idx3", "labels-idx1")]
            if all(path.is_file() for path in paths):
                pictures, labels = map(read_idx, paths)
                if pictures.ndim != 3 or labels.shape != pictures.shape[:1]:
                    raise ValueError(f"{parent}: pictures {tuple(pictures.shape)} and labels {tuple(labels.shape)}")
                return pictures, labels.long()
    raise FileNotFoundError(f"no {split}-images-idx3-ubyte.gz and its labels of MNIST in {folder} or its images/mnist")


def as_input(pictures: Tensor, pixels: int = 32) -> Tensor:
    """Centre grey pictures on black squares of three equal channels: (N, H, W) uint8 -> (N, 3, P, P) in [-1, 1]."""
    height, width = pictures.shape[1:]
    if max(height, width) > pixels:
        raise ValueError(f"pictures of {height} x {width} do not fit into {pixels} x {pixels}")
    left, top = (pixels - width) // 2, (pixels - height) // 2
    margins = (left, pixels - width - left, top, pixels - height - top)
    square = torch.nn.functional.pad(pictures, margins)
    return (square.float() / 127.5 - 1)[:, None].expand(-1, 3, -1, -1)


def to_bytes(pictures: Tensor) -> Tensor:
    """Convert pictures (N, 3, P, P) in [-1, 1] to (N, P, P, 3) uint8."""
    return ((pictures.detach().float().cpu() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def grid(pictures: Tensor, columns: int) -> Image.Image:
    """Lay out pictures (N, 3, P, P) in [-1, 1] line by line on white."""
    side, lines = pictures.shape[-1] + _GAP, math.ceil(len(pictures) / columns)
    sheet = Image.new("RGB", (columns * side - _GAP, lines * side - _GAP), "white")
    for i, values in enumerate(to_bytes(pictures)):
        sheet.paste(Image.fromarray(values.numpy()), (i % columns * side, i // columns * side))
    return sheet


def named_rows(rows: Mapping[str, Tensor]) -> Image.Image:
    """Lay out one line of pictures (N, 3, P, P) for each name, with the name on its left."""
    sheets = {name: grid(pictures, len(pictures)) for name, pictures in rows.items()}
    probe = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    margin = 8 + math.ceil(max(probe.textlength(name) for name in sheets))
    height = max(next(iter(sheets.values())).height, _LINE_HEIGHT) + _GAP
    page = Image.new("RGB", (margin + max(sheet.width for sheet in sheets.values()), height * len(sheets)), "white")
    draw = ImageDraw.Draw(page)
    for i, (name, sheet) in enumerate(sheets.items()):
        draw.text((2, i * height + (height - _LINE_HEIGHT) // 2), name, fill="black")
        page.paste(sheet, (margin, i * height))
    return page


def save_png(image: Image.Image, path: pathlib.Path, colours: int | None = None) -> None:
    """Write a PIL image. A palette of `colours` makes the file about a third as large."""
    with replacing(path) as draft:
        (image.quantize(colours) if colours else image).save(draft, format="PNG", optimize=True)


def load_generator(folder: str) -> BigGANModel:
    """Load a `BigGANModel` for inference with exact attention and without spectral norm; refuse other folders."""
    try:
        with no_progress_bar():
            model = BigGANModel.from_pretrained(folder, spectral_norm=False)
    except (OSError, ValueError) as error:
        raise UnsupportedAttentionError(f"{folder} is not a checkpoint of a BigGAN: {error}") from error
    return hea.convert(model.eval(), "sdpa")


def parse_classes(names: Sequence[str], config: BigGANConfig) -> list[int]:
    """Class indices for numbers, the model's class names, or ImageNet's class names; refuse others."""
    known = {str(number): number for number in range(config.num_classes)}
    known |= {str(name).lower(): int(number) for number, name in (config.id2label or {}).items()}
    chosen = []
    for name in names:
        index = known.get(name.lower())
        if index is None and (config.num_classes != 1000 or name.isdecimal()):
            raise UnsupportedAttentionError(
                f"--classes: the model has no class {name!r}; its {config.num_classes} classes are numbered from 0"
            )
        try:
            chosen.append(class_index(name) if index is None else index)
        except ValueError as error:
            raise UnsupportedAttentionError(f"--classes: {error}") from error
    return chosen


class Draw(NamedTuple):
    """Inputs of a generator: noise (N, z_dim), classes (N,), and the truncation of noise and batch norm statistics."""

    noise: Tensor
    labels: Tensor
    truncation: float

    @classmethod
    def of(cls, config: BigGANConfig, classes: Sequence[int], number: int, truncation: float, seed: int) -> "Draw":
        """Draw the inputs of `number` pictures of the given classes, which are used in turn; empty for all classes."""
        if not 0 < truncation <= 1:
            raise UnsupportedAttentionError(f"--truncation {truncation} must be above 0 and at most 1")
        chosen = torch.tensor(list(classes) or list(range(config.num_classes)))
        labels = chosen.repeat(-(-number // len(chosen)))[:number]
        return cls(truncated_noise(number, config.z_dim, truncation, seed), labels, truncation)


class Swap(NamedTuple):
    """An attention method for the generator: its name, its budget in columns if any, its config; None for exact."""

    name: str
    budget: int | None
    config: MethodConfig | None

    @property
    def label(self) -> str:
        """Name and budget."""
        return self.name if self.budget is None else f"{self.name}, {self.budget}"


EXACT_SWAP = Swap("exact", None, None)


def swaps_of(methods: Sequence[str], settings: Sequence[str], budgets: Sequence[int], kv_len: int) -> list[Swap]:
    """Exact attention, and every method at every budget below the number of keys, without repetition.

    Refuses methods without a rectangular form, and budgets none of which is below the number of keys.
    """
    rectangular = [name for name in hea.available_methods() if method_info(name).rectangular]
    below = [budget for budget in budgets if budget < kv_len]
    if budgets and not below:
        raise UnsupportedAttentionError(f"--budget: nothing is approximated with {kv_len} keys; give less")
    swaps = [EXACT_SWAP]
    for name, config in parse_methods(methods or rectangular, settings).items():
        if config.method not in rectangular:
            raise UnsupportedAttentionError(
                f"{config.method} needs as many keys as queries, not a quarter; use one of {', '.join(rectangular)}"
            )
        sized = {} if below else {None: for_length(config, kv_len)}
        for budget in below:
            # Some methods have no config for a budget this small.
            with contextlib.suppress(UnsupportedAttentionError):
                sized[budget] = for_length(config.with_budget(budget), kv_len)
        # A method without a budget has the same config for all of them: list it once.
        if len(sized) > 1 and len(set(sized.values())) == 1:
            sized = {None: next(iter(sized.values()))}
        swaps += [Swap(name, budget, one) for budget, one in sized.items()]
    return swaps


def apply_swap(model: BigGANModel, swap: Swap) -> BigGANModel:
    """Switch the attention of the model, in place."""
    return hea.convert(model, "sdpa" if swap.config is None else swap.config)


@torch.inference_mode()
def pictures(model: BigGANModel, draw: Draw, batch: int) -> Iterator[Tensor]:
    """Generate pictures in batches (b, 3, P, P) in [-1, 1]."""
    parts = list(zip(draw.noise.split(batch), draw.labels.split(batch), strict=True))
    for noise, labels in tqdm(parts, desc="pictures", unit="batch", disable=None, leave=False):
        made = model(noise, labels, truncation=draw.truncation).images
        if not made.isfinite().all():
            raise UnsupportedAttentionError("the pictures hold NaN or infinity: check the checkpoint")
        yield made


@torch.inference_mode()
def layer_costs(model: BigGANModel, draw: Draw, swaps: Sequence[Swap], rounds: int) -> list[dict[str, Any]]:
    """The cost of the attention layer with each method, on the layer's inputs for up to 8 pictures of the draw.

    It is the GFLOP of the products for one picture with a multiply-add as one operation, how many times fewer they are
    than those of exact attention, and how many times faster it is (None without rounds of paired timings).
    """
    recorded = []
    few = Draw(draw.noise[:8], draw.labels[:8], draw.truncation)
    with capture_attention(model, lambda call: recorded.append((call.query, call.key, call.value, call.scale))):
        next(pictures(model, few, 8))
    *inputs, scale = recorded[0]

    def work(config: MethodConfig | None) -> Callable[[], Tensor]:
        return lambda: compute(config, inputs, scale)

    calls = {swap.label: work(swap.config) for swap in swaps if swap.config is not None}
    timed = paired(work(None), calls, rounds)[1] if rounds and calls else {}
    products = [count(work(swap.config), multiply_adds_as_one=True).products // len(inputs[0]) for swap in swaps]
    costs = []
    for swap, number in zip(swaps, products, strict=True):
        timing = timed.get(swap.label)
        cost = {"gflop": number / 1e9, "fewer": products[0] / number, "times_faster": timing and timing.ratio}
        costs.append(cost | {"unsteady": timing is not None and timing.unsteady})
    return costs


class FeatureNetwork:
    """An image classifier as feature network: returns the input of its last layer, and its probabilities.

    The folder is any that `AutoModelForImageClassification` loads. Pictures are resized and normalised as its
    `preprocessor_config.json` says. A folder without classifier, linear last layer or preprocessor is refused.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        try:
            with no_progress_bar():
                self.model = AutoModelForImageClassification.from_pretrained(folder, local_files_only=True).eval()
            settings = preprocessor_settings(str(folder))
        except (OSError, ValueError) as error:
            raise UnsupportedAttentionError(
                f"--features {folder} must be the folder of an image classifier with its preprocessor, such as "
                f"`python -m recipes.biggan_train features` writes: {error}"
            ) from error
        labels, layers = self.model.config.num_labels, self.model.modules()
        heads = [layer for layer in layers if isinstance(layer, nn.Linear) and layer.out_features == labels]
        if not heads:
            raise UnsupportedAttentionError(f"--features {folder}: no linear layer computes the model's labels")
        norm, size = Norm.of(settings), settings["size"] if settings.get("do_resize", True) else {}
        self.side = size.get("height", size.get("shortest_edge"))
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (norm.mean, norm.std))
        self._recorded: list[Tensor] = []
        heads[-1].register_forward_pre_hook(lambda _, inputs: self._recorded.append(inputs[0]))

    def prepare(self, pictures: Tensor) -> Tensor:
        """Resize and normalise pictures (N, 3, P, P) in [-1, 1] for the network."""
        if self.side not in (None, pictures.shape[-1]):
            pictures = nn.functional.interpolate(pictures, (self.side,) * 2, mode="bilinear", antialias=True)
        return ((pictures + 1) / 2 - self.mean) / self.std

    @torch.inference_mode()
    def __call__(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Features (N, D) and probabilities (N, classes) of pictures (N, 3, P, P) in [-1, 1]."""
        self._recorded.clear()
        logits = self.model(pixel_values=self.prepare(pictures)).logits
        return self._recorded.pop().flatten(1), logits.softmax(1)


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Squared Wasserstein distance between the Gaussians of features (N, D) and (M, D) (Heusel et al. 2017, eq. 6).

    The trace of (C1 C2)^(1/2) is the sum of the roots of the eigenvalues, which are real and not negative up to
    rounding, for singular covariances (fewer pictures than features) too.
    """
    first, second = first.double(), second.double()
    covariances = [torch.cov(features.t()) for features in (first, second)]
    shared = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.clamp(min=0).sqrt().sum()
    distance = (first.mean(0) - second.mean(0)).square().sum() + sum(x.trace() for x in covariances) - 2 * shared
    # For equal Gaussians the terms differ by rounding, with either sign.
    return max(distance.item(), 0.0)


def inception_score(probabilities: Tensor, splits: int = 10) -> tuple[float, float]:
    """Mean and deviation of exp E KL(p(y|x) || p(y)) over parts of the pictures (Salimans et al. 2016, sec. 4).

    The probabilities (N, classes) are in the order of generation. Each of the `splits` parts has its own p(y).
    """
    scores = []
    for part in probabilities.double().tensor_split(splits):
        marginal = part.mean(0, keepdim=True)
        # 0 log 0 is 0, and where the marginal is 0 every probability is 0.
        scores.append((torch.xlogy(part, part) - torch.xlogy(part, marginal)).sum(1).mean().exp())
    values = torch.stack(scores)
    return values.mean().item(), values.std(correction=0).item()


def _batches(source: pathlib.Path, pixels: int, batch: int) -> Iterator[Tensor]:
    """Batches (b, 3, pixels, pixels) in [-1, 1]."""
    if source.is_dir() and any(source.glob("*idx3*")):
        for part in load_digits(source, "t10k")[0].split(batch):
            yield as_input(part, pixels)
        return
    splits = images.load(str(source))
    split = images.pick(splits, None, images.EVAL_SPLITS, str(source)) or next(iter(splits.values()))
    # Keep the whole shorter side, as for BigGAN's training data.
    transform = Evaluation(pixels, Norm((0.5,) * 3, (0.5,) * 3, 2), 1.0)
    for part in torch.arange(len(split)).split(batch):
        yield torch.stack([transform(split.open(i)) for i in part.tolist()])


def reference_features(source: pathlib.Path, network: FeatureNetwork, pixels: int, batch: int = 250) -> Tensor:
    """The features (N, D) of real pictures, resized to `pixels`, the side of the generated ones.

    The source is MNIST's folder, whose t10k is used; or a folder or zip file of pictures, whose validation split is
    used if it has one. One that cannot be read, or has fewer than two pictures, is refused.
    """
    try:
        bar = tqdm(_batches(source, pixels, batch), unit="batch", desc="reference", disable=None, leave=False)
        features = torch.cat([network(part)[0] for part in bar])
    except (OSError, ValueError) as error:
        raise UnsupportedAttentionError(f"--reference {source}: {error}") from error
    if len(features) < 2:
        raise UnsupportedAttentionError(f"--reference {source}: the statistics need two pictures or more")
    return features
