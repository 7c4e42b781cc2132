"""A small classifier whose features FID is measured on, and the features of any image classifier's folder.

    python -m recipes.gan.features --data DATA --output features --minutes 4

Trains a ResNet of Transformers (three stages of one basic block, 32, 64 and 128 channels) on the digits of
`DATA/images/mnist` (32 x 32, three equal channels, shifted by up to two pixels) and saves it with a
`preprocessor_config.json`, so that `recipes.biggan score --features features` can use it as it can any folder of
`AutoModelForImageClassification`. To expect after 4 minutes on one core: accuracy .99 on the ten thousand of t10k.
"""

import json
import pathlib
import time
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from tqdm import tqdm

from hf_efficient_attn.cli import main_of
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.demo import quiet_loading
from recipes.benchmarks.error import Data, data_folder
from recipes.benchmarks.timing import use_threads
from recipes.gan import digits

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def make_classifier(classes: int = 10, widths: tuple[int, ...] = (32, 64, 128)) -> nn.Module:
    """A `ResNetForImageClassification` for 32 x 32 pictures, not trained."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        num_channels=3, embedding_size=widths[0], hidden_sizes=list(widths), depths=[1] * len(widths),
        layer_type="basic", num_labels=classes,
    )  # fmt: skip
    return ResNetForImageClassification(config)


def _shifted(pictures: Tensor, most: int, draw: torch.Generator) -> Tensor:
    """All pictures of the batch moved alike by up to so many pixels; the border comes in from the other side."""
    across, down = torch.randint(-most, most + 1, (2,), generator=draw).tolist()
    return pictures.roll((down, across), (2, 3))


def train_classifier(
    model: nn.Module, pictures: Tensor, labels: Tensor, *, minutes: float, steps: int | None, batch: int = 128, seed=0
) -> int:
    """AdamW with a rate that falls to 0 over the time or the steps; the number of steps done.

    Args:
        pictures: (N, H, W) uint8.
        minutes: how long, unless `steps` says.
    """
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    model.train()
    start, done = time.monotonic(), 0
    with tqdm(total=steps, unit="step", disable=None, leave=False) as bar:
        while (over := done / steps if steps is not None else (time.monotonic() - start) / (60 * minutes)) < 1:
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * (1 - over)
            here = torch.randint(len(labels), (batch,), generator=draw)
            inputs = _shifted(digits.as_input(pictures[here]), 2, draw)
            loss = nn.functional.cross_entropy(model(pixel_values=inputs).logits, labels[here])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            bar.update()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return done


@torch.inference_mode()
def accuracy(model: nn.Module, pictures: Tensor, labels: Tensor, batch: int = 500) -> float:
    """Share of the pictures (N, H, W), uint8, whose class comes first."""
    model.eval()
    right = 0
    for part, wanted in zip(pictures.split(batch), labels.split(batch), strict=True):
        right += int((model(pixel_values=digits.as_input(part)).logits.argmax(1) == wanted).sum())
    return right / len(labels)


class FeatureNetwork:
    """An image classifier as feature network: what goes into its last layer, and its probabilities.

    Args:
        folder: any folder of `AutoModelForImageClassification`. Pictures are resized to the size of its
            `preprocessor_config.json` and normalised by the mean and deviation there; without that file they go in as
            they are, in [-1, 1].

    Raises:
        UnsupportedAttentionError: it is no such folder, or its classifier is not a linear layer.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        from transformers import AutoModelForImageClassification

        if not (folder / "config.json").is_file():
            raise UnsupportedAttentionError(
                f"--features {folder} holds no config.json; it must be the folder of an image classifier, such as "
                "`python -m recipes.gan.features` writes"
            )
        with quiet_loading():
            self.model = AutoModelForImageClassification.from_pretrained(folder, local_files_only=True).eval()
        settings = folder / "preprocessor_config.json"
        self._settings: dict[str, Any] = json.loads(settings.read_text()) if settings.is_file() else {}
        heads = [
            module
            for module in self.model.modules()
            if isinstance(module, nn.Linear) and module.out_features == self.model.config.num_labels
        ]
        if not heads:
            raise UnsupportedAttentionError(f"--features {folder}: the classifier has no linear layer to its labels")
        self._head, self._seen = heads[-1], []
        self._head.register_forward_pre_hook(lambda _, inputs: self._seen.append(inputs[0]))

    def prepare(self, pictures: Tensor) -> Tensor:
        """(N, 3, P, P) in [-1, 1] -> what the network takes."""
        size = self._settings.get("size") if self._settings.get("do_resize", True) else None
        if size is not None:
            side = size if isinstance(size, int) else size.get("height", size.get("shortest_edge"))
            if side is not None and side != pictures.shape[-1]:
                pictures = nn.functional.interpolate(pictures, (side, side), mode="bilinear", antialias=True)
        if not self._settings or not self._settings.get("do_normalize", True):
            return pictures if not self._settings else (pictures + 1) / 2
        mean, std = (
            torch.tensor(self._settings[f"image_{what}"], dtype=pictures.dtype).view(-1, 1, 1)
            for what in ("mean", "std")
        )
        return ((pictures + 1) / 2 - mean) / std

    @torch.inference_mode()
    def __call__(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """(N, 3, P, P) in [-1, 1] -> features (N, D) and probabilities (N, classes)."""
        self._seen.clear()
        logits = self.model(pixel_values=self.prepare(pictures)).logits
        return self._seen.pop().flatten(1), logits.softmax(1)


def save(model: nn.Module, folder: pathlib.Path, pixels: int = 32) -> None:
    """The classifier with a `preprocessor_config.json` that says how pictures are put in."""
    model.save_pretrained(folder)
    settings = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": pixels, "width": pixels},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n")


@app.command(epilog="Example: python -m recipes.gan.features --data ../shared/data --output features --steps 500")
def features(
    output: Annotated[pathlib.Path, typer.Option(metavar="FOLDER", help="Where the classifier goes.")],
    data: Data = None,
    minutes: Annotated[float, typer.Option(metavar="X", min=0.01, help="Of training.")] = 4.0,
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="Of training, instead of minutes.")] = None,
    threads: Annotated[int, typer.Option(metavar="N", min=1)] = 1,
    seed: Annotated[int, typer.Option(metavar="N", min=0)] = 0,
) -> None:
    """Train the classifier whose features FID is measured on."""
    if output.is_file():
        raise UnsupportedAttentionError(f"--output {output} is a file")
    folder = data_folder(data)
    (pictures, labels), (others, wanted) = (digits.load(folder, split) for split in ("train", "t10k"))
    torch.manual_seed(seed)
    model = make_classifier(int(labels.max()) + 1)
    with use_threads(threads):
        done = train_classifier(model, pictures, labels, minutes=minutes, steps=steps, seed=seed)
        found = accuracy(model, others, wanted)
    save(model, output)
    typer.echo(f"{output}: {done} steps, accuracy {found:.4f} on {len(wanted)} pictures that it has not seen")


if __name__ == "__main__":
    main_of(app, "python -m recipes.gan.features")
