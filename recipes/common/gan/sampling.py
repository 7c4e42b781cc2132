"""Pictures of a `BigGANModel` with several attention methods on the same noise, and the cost of its attention layer."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

import hf_efficient_attn as hea
from hf_efficient_attn.checkpoint.loading import no_progress_bar
from hf_efficient_attn.cli import parse_methods
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.capture import capture_attention
from hf_efficient_attn.evaluation.timing import paired
from hf_efficient_attn.methods import MethodConfig, method_info
from hf_efficient_attn.models.biggan import BigGANConfig, BigGANModel, class_index, truncated_noise
from recipes.common.arguments import for_length
from recipes.common.counting import count


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
        raise UnsupportedAttentionError(
            f"--budget: the layer has {kv_len} keys, so that nothing is approximated; give a smaller budget"
        )
    swaps = [EXACT_SWAP]
    for name, config in parse_methods(methods or rectangular, settings).items():
        if config.method not in rectangular:
            raise UnsupportedAttentionError(
                f"{config.method} needs as many keys as queries, but BigGAN has a quarter as many; use one of "
                f"{', '.join(rectangular)}"
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
def pictures(model: BigGANModel, draw: Draw, batch: int, bar: tqdm | None = None) -> Iterator[Tensor]:
    """Generate pictures in batches (b, 3, P, P) in [-1, 1]."""
    for noise, labels in zip(draw.noise.split(batch), draw.labels.split(batch), strict=True):
        made = model(noise, labels, truncation=draw.truncation).images
        if not made.isfinite().all():
            raise UnsupportedAttentionError("the pictures hold NaN or infinity: check the checkpoint")
        yield made
        if bar is not None:
            bar.update(len(made))


@torch.inference_mode()
def layer_costs(
    model: BigGANModel, draw: Draw, swaps: Sequence[Swap], rounds: int, bar: tqdm | None = None
) -> list[dict[str, Any]]:
    """The cost of the attention layer with each method, on the layer's inputs for up to 8 pictures of the draw.

    Returns:
        for each method the GFLOP of the products for one picture with a multiply-add as one operation, how many times
        fewer they are and how many times faster it is than exact attention (None without rounds of paired timings), and
        whether the times are unsteady.
    """
    recorded = []
    few = Draw(draw.noise[:8], draw.labels[:8], draw.truncation)
    with capture_attention(model, lambda call: recorded.append((call.query, call.key, call.value, call.scale))):
        next(pictures(model, few, 8))
    *inputs, scale = recorded[0]

    def work(config: MethodConfig | None) -> Callable[[], Tensor]:
        if config is None:
            return lambda: torch.nn.functional.scaled_dot_product_attention(*inputs, scale=scale)
        return lambda: hea.attention(config, *inputs, scale=scale)

    calls = {swap.label: work(swap.config) for swap in swaps if swap.config is not None}
    timed = paired(work(None), calls, rounds, bar)[1] if rounds and calls else {}
    products = [count(work(swap.config), multiply_adds_as_one=True).products // len(inputs[0]) for swap in swaps]
    costs = []
    for swap, number in zip(swaps, products, strict=True):
        timing = timed.get(swap.label)
        cost = {"gflop": number / 1e9, "fewer": products[0] / number, "times_faster": timing and timing.ratio}
        costs.append(cost | {"unsteady": timing is not None and timing.unsteady})
    return costs
