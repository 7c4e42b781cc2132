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
from transformers import ResNetConfig, ResNetForImageClassification, ViTImageProcessorPil

from hf_efficient_attn.cli import main_of
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.timing import use_threads
from recipes.common import gan
from recipes.common.commands import Data, Seed, Threads, data_folder, new_app, option

app = new_app()
_RATE = 2e-3


def make_classifier(classes: int = 10, widths: tuple[int, ...] = (32, 64, 128)) -> ResNetForImageClassification:
    """An untrained classifier of 32 x 32 pictures."""
    config = ResNetConfig(
        num_channels=3, embedding_size=widths[0], hidden_sizes=list(widths), depths=[1] * len(widths),
        layer_type="basic", num_labels=classes,
    )  # fmt: skip
    return ResNetForImageClassification(config)


def train_classifier(
    model: nn.Module, data: tuple[Tensor, Tensor], *, minutes: float, steps: int | None, batch: int = 128, seed: int = 0
) -> int:
    """Train with AdamW and a learning rate that decreases to 0, and return the number of steps.

    The data are pictures (N, H, W) uint8 and their classes (N,) int64. `minutes` is the duration if `steps` is None.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=1e-2)
    model.train()
    start, done = time.monotonic(), 0
    with tqdm(total=steps, unit="step", disable=None, leave=False) as bar:
        while (over := done / steps if steps is not None else (time.monotonic() - start) / (60 * minutes)) < 1:
            optimizer.param_groups[0]["lr"] = _RATE * (1 - over)
            chosen = torch.randint(len(data[1]), (batch,), generator=generator)
            # All pictures of the batch are shifted by the same number of pixels.
            shift = torch.randint(-2, 3, (2,), generator=generator).tolist()
            inputs = gan.as_input(data[0][chosen]).roll(shift[::-1], (2, 3))
            loss = nn.functional.cross_entropy(model(pixel_values=inputs).logits, data[1][chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            bar.update()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return done


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
    training, test = (gan.load_digits(data_folder(data), split) for split in ("train", "t10k"))
    torch.manual_seed(seed)
    model = make_classifier(int(training[1].max()) + 1)
    with use_threads(threads):
        done = train_classifier(model, training, minutes=minutes, steps=steps, seed=seed)
        with torch.inference_mode():
            guesses = [model.eval()(pixel_values=gan.as_input(part)).logits.argmax(1) for part in test[0].split(500)]
        accuracy = (torch.cat(guesses) == test[1]).float().mean().item()
    model.save_pretrained(output)
    half, size = [0.5] * 3, {"height": 32, "width": 32}
    ViTImageProcessorPil(size=size, image_mean=half, image_std=half).save_pretrained(output)
    typer.echo(f"{output}: {done} steps, accuracy {accuracy:.4f} on {len(test[1])} test pictures")


if __name__ == "__main__":
    main_of(app, "python -m recipes.biggan_features")
