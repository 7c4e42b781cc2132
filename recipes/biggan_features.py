"""Train a small classifier of digits, whose features FID is measured with.

    python -m recipes.biggan_features --data DATA --output features --minutes 4

The classifier is a ResNet of Transformers with three stages of one basic block and 32, 64 and 128 channels. It is
trained on the digits in `DATA/images/mnist` (32 x 32 pixels, three equal channels, shifted by up to two pixels) and
saved with a `preprocessor_config.json`, so that `recipes.biggan score --features features` reads it like any other
folder of `AutoModelForImageClassification`.

Duration: --minutes. Expected after 4 minutes on one core: accuracy .99 on the ten thousand pictures of t10k.
"""

import pathlib
import time

import torch
import typer
from torch import Tensor, nn
from tqdm import tqdm
from transformers import ResNetConfig, ResNetForImageClassification

from hf_efficient_attn.cli import main_of
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.timing import use_threads
from recipes.common.commands import Data, Seed, Threads, data_folder, new_app, option
from recipes.common.gan import digits
from recipes.common.gan.features import save

app = new_app()


def make_classifier(classes: int = 10, widths: tuple[int, ...] = (32, 64, 128)) -> ResNetForImageClassification:
    """An untrained classifier of 32 x 32 pictures."""
    config = ResNetConfig(
        num_channels=3, embedding_size=widths[0], hidden_sizes=list(widths), depths=[1] * len(widths),
        layer_type="basic", num_labels=classes,
    )  # fmt: skip
    return ResNetForImageClassification(config)


def _shifted(pictures: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Shift all pictures of the batch by the same random number of pixels, up to `most`, cyclically."""
    across, down = torch.randint(-most, most + 1, (2,), generator=generator).tolist()
    return pictures.roll((down, across), (2, 3))


def train_classifier(
    model: nn.Module,
    pictures: Tensor,
    labels: Tensor,
    *,
    minutes: float,
    steps: int | None,
    batch: int = 128,
    seed: int = 0,
) -> int:
    """Train with AdamW and a learning rate that decreases to 0, and return the number of steps.

    Args:
        model: the classifier.
        pictures: (N, H, W) uint8.
        labels: (N,) int64.
        minutes: duration, used if `steps` is None.
        steps: number of steps.
        batch: batch size.
        seed: seed of the batches and shifts.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    model.train()
    start, done = time.monotonic(), 0
    with tqdm(total=steps, unit="step", disable=None, leave=False) as bar:
        while (over := done / steps if steps is not None else (time.monotonic() - start) / (60 * minutes)) < 1:
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * (1 - over)
            chosen = torch.randint(len(labels), (batch,), generator=generator)
            inputs = _shifted(digits.as_input(pictures[chosen]), 2, generator)
            loss = nn.functional.cross_entropy(model(pixel_values=inputs).logits, labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            bar.update()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return done


@torch.inference_mode()
def accuracy(model: nn.Module, pictures: Tensor, labels: Tensor, batch: int = 500) -> float:
    """Share of the pictures (N, H, W) uint8 whose class (N,) has the largest logit."""
    model.eval()
    correct = 0
    for part, wanted in zip(pictures.split(batch), labels.split(batch), strict=True):
        correct += int((model(pixel_values=digits.as_input(part)).logits.argmax(1) == wanted).sum())
    return correct / len(labels)


@app.command(epilog="Example: python -m recipes.biggan_features --data ../shared/data --output features --steps 500")
def features(
    output: option(pathlib.Path, "Folder for the classifier.", metavar="FOLDER"),
    data: Data = None,
    minutes: option(float, "Minutes of training.", min=0.01) = 4.0,
    steps: option(int | None, "Steps of training, instead of minutes.", min=1) = None,
    threads: Threads = 1,
    seed: Seed = 0,
) -> None:
    """Train the classifier whose features FID is measured with."""
    if output.is_file():
        raise UnsupportedAttentionError(f"--output {output} is a file: give a folder")
    folder = data_folder(data)
    (pictures, labels), (others, wanted) = (digits.load(folder, split) for split in ("train", "t10k"))
    torch.manual_seed(seed)
    model = make_classifier(int(labels.max()) + 1)
    with use_threads(threads):
        done = train_classifier(model, pictures, labels, minutes=minutes, steps=steps, seed=seed)
        found = accuracy(model, others, wanted)
    save(model, output)
    typer.echo(f"{output}: {done} steps, accuracy {found:.4f} on {len(wanted)} test pictures")


if __name__ == "__main__":
    main_of(app, "python -m recipes.biggan_features")
