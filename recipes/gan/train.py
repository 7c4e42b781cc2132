"""A small class-conditional BigGAN on MNIST, with an attention layer of 1,024 queries and 256 keys.

    python -m recipes.gan.train --data DATA --output OUT --minutes 16
    python -m recipes.gan.train --data DATA --output OUT --minutes 16 --resume       (go on after a kill)

The generator is this package's `BigGANModel` at 32 x 32 (six blocks, attention after the fourth), the discriminator a
small residual one with projection and spectral norm; hinge loss, Adam with betas (0, .999), one step of each in turn,
an average of the generator's weights (Brock et al. 2019, sections 3 and 4), and a small mode-seeking term (Mao et al.
2019), without which the noise is ignored for as long as this takes. The factor of the attention, gamma, starts
at --gamma, not at 0: in so short a training it would hardly leave 0, and the attention would not matter. At the end
the averaged weights get their tables of batch norm statistics by truncation and are saved with `save_pretrained`, with
exact attention; beside them `samples.png` (a row for each digit), `losses.csv` and `metrics.json` with the last gamma.

Every --every steps the whole state goes to `training.pt` and a sheet of samples to `samples.png`. To expect of 16
minutes on one core (1,471 steps of .65 s): digits that can be read, gamma 1.02, FID 1.97 and inception score 9.50 by
the classifier of `recipes.gan.features` (real pictures: .16 and 9.78; the same generator with gamma 0: 42.6 and 6.0).
"""

import contextlib
import csv
import json
import pathlib
import sys
import time
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from tqdm import tqdm

from hf_efficient_attn.cli import main_of
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.io.writing import replacing
from hf_efficient_attn.models.biggan import BigGANConfig, BigGANModel
from recipes.benchmarks.error import Data, data_folder
from recipes.benchmarks.timing import use_threads
from recipes.gan import digits
from recipes.gan.discriminator import Discriminator, hinge_of_discriminator, hinge_of_generator, sameness
from recipes.gan.pictures import grid, save_png

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

STATE = "training.pt"
# (doubles the picture, channels before, channels after), in multiples of the channel width; 4 x 4 to 32 x 32 pixels.
LAYERS = [(False, 16, 16), (True, 16, 16), (True, 16, 8), (True, 8, 4), (False, 4, 2), (False, 2, 1)]
# Where the picture has its full size: attention stands before this block.
ATTENTION = 4


def make_generator(classes: int, *, width: int = 16, z_dim: int = 32, gamma: float = 1.0) -> BigGANModel:
    """A generator of 32 x 32 pictures, not trained.

    Args:
        width: channels of the last block; the attention has 4 times as many.
        gamma: the factor of the attention at the start.
    """
    config = BigGANConfig(
        z_dim=z_dim, class_embed_dim=z_dim, channel_width=width, num_classes=classes,
        layers=[list(layer) for layer in LAYERS], attention_layer_position=ATTENTION, n_stats=11,
        spectral_norm=True,
    )  # fmt: skip
    model = BigGANModel(config)
    with torch.no_grad():
        attention_factor(model).fill_(gamma)
        # As wide as the noise beside it, or the classes would long be lost in that.
        model.embeddings.weight.normal_()
    return model


def attention_factor(model: nn.Module) -> Tensor:
    """gamma, the factor of the attention's output (Zhang et al. 2019, eq. 3)."""
    return next(value for name, value in model.named_parameters() if name.rpartition(".")[2] == "gamma")


def _average(average: Tensor, current: Tensor, seen: Tensor | int, decay: float = 0.999) -> Tensor:
    """Exponential moving average that is not held back by the first, untrained weights."""
    return average + (current - average) * (1 - min(decay, (1 + float(seen)) / (10 + float(seen))))


class Training:
    """Generator, discriminator, average and optimizers, and one step of them."""

    def __init__(
        self,
        generator: BigGANModel,
        discriminator: Discriminator,
        rates: tuple[float, float],
        batch: int,
        diversity: float = 0.1,
    ) -> None:
        """`batch` must be even; `diversity`, the weight of `sameness` beside the generator's hinge loss."""
        self.diversity = diversity
        self.generator, self.discriminator, self.batch = generator.train(), discriminator.train(), batch
        self.average = AveragedModel(generator, avg_fn=_average)
        self.rates = rates
        self.optimizers = [
            torch.optim.Adam(model.parameters(), lr=rate, betas=(0.0, 0.999))
            for model, rate in zip((generator, discriminator), rates, strict=True)
        ]
        self.step, self.seconds = 0, 0.0
        self.log: list[dict[str, float]] = []
        self.draw = torch.Generator().manual_seed(torch.initial_seed() % 2**63)

    def state(self) -> dict[str, Any]:
        return {
            "generator": self.generator.state_dict(), "discriminator": self.discriminator.state_dict(),
            "average": self.average.state_dict(), "optimizers": [one.state_dict() for one in self.optimizers],
            "step": self.step, "seconds": self.seconds, "log": self.log, "draw": self.draw.get_state(),
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        for name in ("generator", "discriminator", "average"):
            getattr(self, name).load_state_dict(state[name])
        for one, kept in zip(self.optimizers, state["optimizers"], strict=True):
            one.load_state_dict(kept)
        self.step, self.seconds, self.log = state["step"], state["seconds"], state["log"]
        self.draw.set_state(state["draw"])

    def _fake(self) -> tuple[Tensor, Tensor, Tensor]:
        config = self.generator.config
        noise = torch.randn(self.batch, config.z_dim, generator=self.draw)
        # In two halves of the same classes, of which `sameness` asks that they differ.
        labels = torch.randint(config.num_classes, (self.batch // 2,), generator=self.draw).repeat(2)
        return self.generator(noise, labels, truncation=1.0).images, labels, noise

    def run(self, real: Tensor, labels: Tensor, over: float) -> dict[str, float]:
        """A step of each on real pictures (B, 3, P, P) and their classes; `over`, the share of the training done."""
        start = time.process_time()
        for one, rate in zip(self.optimizers, self.rates, strict=True):
            # Constant in the first half, then down to 0.
            one.param_groups[0]["lr"] = rate * min(1.0, 2 * (1 - over))
        fake, fake_labels, noise = self._fake()
        # One batch of both: the spectral norms are estimated once.
        scores = self.discriminator(torch.cat((real, fake.detach())), torch.cat((labels, fake_labels)))
        loss = hinge_of_discriminator(scores[: len(real)], scores[len(real) :])
        self._update(1, loss)
        self.discriminator.requires_grad_(False)
        # The same pictures serve the generator's step: they are what costs most.
        gain = hinge_of_generator(self.discriminator(fake, fake_labels))
        same = sameness(fake, noise)
        self._update(0, gain + self.diversity * same)
        self.discriminator.requires_grad_(True)
        self.average.update_parameters(self.generator)
        self.step += 1
        self.seconds += time.process_time() - start
        found = {"step": self.step, "discriminator": loss.item(), "generator": gain.item()}
        found["sameness"] = same.item()
        found["gamma"] = attention_factor(self.generator).item()
        if not all(map(torch.isfinite, map(torch.tensor, found.values()))):
            raise UnsupportedAttentionError(f"the losses are no numbers at step {self.step}: lower --rate")
        self.log.append(found)
        return found

    def _update(self, which: int, loss: Tensor) -> None:
        self.optimizers[which].zero_grad(set_to_none=True)
        loss.backward()
        self.optimizers[which].step()

    @torch.no_grad()
    def samples(self, each: int = 10, seed: int = 0) -> Tensor:
        """Pictures of the averaged generator, `each` of every class, by the statistics of this batch."""
        config = self.generator.config
        noise = torch.randn(each, config.z_dim, generator=torch.Generator().manual_seed(seed))
        labels = torch.arange(config.num_classes).repeat_interleave(each)
        model = self.average.module
        with _training(model):
            return model(noise.repeat(config.num_classes, 1), labels, truncation=1.0).images


@contextlib.contextmanager
def _training(model: nn.Module):
    """The model by the statistics of its batch, without keeping anything of that."""
    kept = {name: value.clone() for name, value in model.named_buffers()}
    before = model.training
    try:
        yield model.train()
    finally:
        model.train(before)
        for name, value in model.named_buffers():
            value.copy_(kept[name])


def finish(training: Training, output: pathlib.Path, number: int, about: dict[str, Any]) -> BigGANModel:
    """The averaged generator with its tables of statistics, of `number` pictures each, saved; the figures beside it."""
    model = training.average.module
    model.set_statistics(num_samples=number, batch_size=training.batch, progress=sys.stderr.isatty())
    model.eval().save_pretrained(output)
    report = {
        **about, "steps": training.step, "seconds": round(training.seconds, 1), "gamma": attention_factor(model).item(),
        "parameters": {
            "generator": sum(p.numel() for p in model.parameters()),
            "discriminator": sum(p.numel() for p in training.discriminator.parameters()),
        },
    }  # fmt: skip
    with replacing(output / "metrics.json") as draft:
        draft.write_text(json.dumps(report, indent=2) + "\n")
    with replacing(output / "losses.csv") as draft, draft.open("w", newline="") as file:
        writer = csv.DictWriter(file, training.log[0])
        writer.writeheader()
        writer.writerows(training.log)
    return model


def keep(training: Training, output: pathlib.Path) -> None:
    """The whole state, and a sheet of samples."""
    with replacing(output / STATE) as draft:
        torch.save(training.state(), draft)
    save_png(grid(training.samples(), 10), output / "samples.png")


@app.command(epilog="Example: python -m recipes.gan.train --data ../shared/data --output gan --steps 200")
def train(
    output: Annotated[pathlib.Path, typer.Option(metavar="FOLDER", help="Where the generator goes.")],
    data: Data = None,
    minutes: Annotated[float, typer.Option(metavar="X", min=0.01, help="Of processor time.")] = 16.0,
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="Of training, instead of minutes.")] = None,
    batch: Annotated[int, typer.Option(metavar="N", min=2, help="Pictures of a step, even.")] = 32,
    width: Annotated[int, typer.Option(metavar="N", min=3, help="Channels of the generator's last block.")] = 16,
    rate: Annotated[float, typer.Option(metavar="X", min=0.0, help="Of the generator.")] = 4e-4,
    discriminator_rate: Annotated[float, typer.Option(metavar="X", min=0.0, help="Of the discriminator.")] = 1e-3,
    diversity: Annotated[float, typer.Option(metavar="X", min=0.0, help="Weight of the mode-seeking term.")] = 0.1,
    gamma: Annotated[float, typer.Option(metavar="X", help="Of the attention at the start.")] = 1.0,
    every: Annotated[int, typer.Option(metavar="N", min=1, help="Steps from one saved state to the next.")] = 100,
    statistics: Annotated[
        int, typer.Option(metavar="N", min=2, help="Pictures at each truncation for the batch norm's tables.")
    ] = 1000,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    threads: Annotated[int, typer.Option(metavar="N", min=1)] = 1,
    seed: Annotated[int, typer.Option(metavar="N", min=0)] = 0,
) -> None:
    """Train a small class-conditional BigGAN on digits."""
    if output.is_file():
        raise UnsupportedAttentionError(f"--output {output} is a file")
    if batch % 2:
        raise UnsupportedAttentionError(f"--batch {batch} must be even: its halves are of the same classes")
    there = (output / STATE).is_file()
    if resume and not there:
        raise UnsupportedAttentionError(f"--resume: there is no {STATE} in {output}")
    if there and not resume:
        raise UnsupportedAttentionError(
            f"there is a run in {output}: go on with it by --resume, or choose another folder"
        )
    pictures, labels = digits.load(data_folder(data), "train")
    output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    classes = int(labels.max()) + 1
    with use_threads(threads):
        training = Training(
            make_generator(classes, width=width, gamma=gamma),
            Discriminator(classes),
            (rate, discriminator_rate),
            batch,
            diversity,
        )
        if resume:
            training.load(torch.load(output / STATE, weights_only=True))
        with tqdm(total=steps, initial=training.step, unit="step", disable=None, leave=False) as bar:
            while (over := training.step / steps if steps else training.seconds / (60 * minutes)) < 1:
                here = torch.randint(len(labels), (batch,), generator=training.draw)
                found = training.run(digits.as_input(pictures[here]), labels[here], over)
                bar.update()
                bar.set_postfix({k: f"{v:.2f}" for k, v in found.items() if k != "step"}, refresh=False)
                if training.step % every == 0:
                    keep(training, output)
                    if bar.disable:
                        typer.echo(f"{training.seconds:.0f} s, {json.dumps(found)}")
        keep(training, output)
        about = {"gamma_at_start": gamma, "diversity": diversity, "batch": batch, "rates": [rate, discriminator_rate]}
        model = finish(training, output, statistics, about)
    seconds = training.seconds / max(training.step, 1)
    typer.echo(
        f"{output}: {training.step} steps of {seconds:.2f} s; gamma {attention_factor(model).item():.3f}; "
        f"samples in {output / 'samples.png'}"
    )


if __name__ == "__main__":
    main_of(app, "python -m recipes.gan.train")
