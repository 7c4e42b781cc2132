"""Pictures of a `BigGANModel` with one attention after another, on the same noise, and what its attention costs."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.cli import parse_methods
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.capture import watching
from hf_efficient_attn.evaluation.demo import quiet_loading
from hf_efficient_attn.methods import MethodConfig, method_info
from recipes.benchmarks.counting import Operations, count
from recipes.benchmarks.tasks import for_length
from recipes.benchmarks.timing import Timing, paired

EXACT = "exact"


def load_generator(folder: str):
    """A `BigGANModel` for inference, its spectral norm folded in, with exact attention.

    Raises:
        UnsupportedAttentionError: it is no checkpoint of one.
    """
    from hf_efficient_attn.models.biggan import BigGANModel

    try:
        with quiet_loading():
            model = BigGANModel.from_pretrained(folder, spectral_norm=False)
    except (OSError, ValueError) as error:
        raise UnsupportedAttentionError(f"{folder} is no checkpoint of a BigGAN: {error}") from error
    return hea.convert(model.eval(), "sdpa")


def parse_classes(names: Sequence[str], config) -> list[int]:
    """Numbers of the classes that the command line names: by number, by the model's own names, or by ImageNet's.

    Raises:
        UnsupportedAttentionError: there is no such class.
    """
    from hf_efficient_attn.models.biggan import class_index

    own = {str(name).lower(): number for number, name in (config.id2label or {}).items()}
    found = []
    for name in names:
        if name.isdecimal() and int(name) < config.num_classes:
            found.append(int(name))
        elif name.lower() in own:
            found.append(int(own[name.lower()]))
        elif config.num_classes == 1000 and not name.isdecimal():
            try:
                found.append(class_index(name))
            except ValueError as error:
                raise UnsupportedAttentionError(f"--classes: {error}") from error
        else:
            raise UnsupportedAttentionError(
                f"--classes: the model has no class {name!r}; its {config.num_classes} are numbered from 0"
            )
    return found


class Draw(NamedTuple):
    """What goes in: noise (N, z_dim), classes (N,), and the truncation of both noise and statistics."""

    noise: Tensor
    labels: Tensor
    truncation: float

    @classmethod
    def of(
        cls, config, classes: Sequence[int], number: int, truncation: float, seed: int, *, shuffled: bool = False
    ) -> "Draw":
        """So many pictures, of the classes in turn, or of as many of each in any order; of all where none is named."""
        from hf_efficient_attn.models.biggan import truncated_noise

        if not 0 < truncation <= 1:
            raise UnsupportedAttentionError(f"--truncation {truncation} must be above 0 and at most 1")
        chosen = torch.tensor(list(classes) or list(range(config.num_classes)))
        labels = chosen.repeat(-(-number // len(chosen)))[:number]
        if shuffled:
            labels = labels[torch.randperm(number, generator=torch.Generator().manual_seed(seed))]
        return cls(truncated_noise(number, config.z_dim, truncation, seed), labels, truncation)


class Swap(NamedTuple):
    """An attention to be put in: its name, its budget in columns (None where none was given), its config or exact."""

    name: str
    budget: int | None
    config: MethodConfig | None

    @property
    def label(self) -> str:
        return self.name if self.budget is None else f"{self.name}, {self.budget}"


def rectangular_names() -> list[str]:
    return [name for name in hea.available_methods() if method_info(name).rectangular]


def swaps_of(methods: Sequence[str], settings: Sequence[str], budgets: Sequence[int], keys: int) -> list[Swap]:
    """Exact attention, and every method at every budget below the number of keys, each once.

    Raises:
        UnsupportedAttentionError: a method has no rectangular form, or no budget is below the number of keys.
    """
    configs = parse_methods(methods or rectangular_names(), settings)
    for config in configs.values():
        if not method_info(config.method).rectangular:
            raise UnsupportedAttentionError(
                f"{config.method} takes as many keys as queries, and BigGAN has a quarter of them; methods that do "
                f"not: {', '.join(rectangular_names())}"
            )
    below = [budget for budget in budgets if budget < keys]
    if budgets and not below:
        raise UnsupportedAttentionError(
            f"--budget: the layer has {keys} keys, and at a budget of as many or more there is nothing to approximate"
        )
    swaps = [Swap(EXACT, None, None)]
    for name, config in configs.items():
        sized = []
        for budget in below or [None]:
            # Some methods cannot have a budget so small.
            with contextlib.suppress(UnsupportedAttentionError):
                one = config if budget is None else config.with_budget(budget)
                sized.append(Swap(name, budget, for_length(one, keys)))
        # A method without a budget is the same at all of them, and stands there once.
        same = len(sized) > 1 and len({swap.config for swap in sized}) == 1
        swaps += [sized[0]._replace(budget=None)] if same else sized
    return swaps


def put_in(model, swap: Swap):
    """The model with another attention, in place."""
    return hea.convert(model, "sdpa" if swap.config is None else swap.config)


@torch.inference_mode()
def pictures(model, draw: Draw, batch: int, bar=None) -> Iterator[Tensor]:
    """Batches (b, 3, P, P) in [-1, 1]."""
    for noise, labels in zip(draw.noise.split(batch), draw.labels.split(batch), strict=True):
        found = model(noise, labels, truncation=draw.truncation).images
        if not found.isfinite().all():
            raise UnsupportedAttentionError("the pictures hold NaN or infinity: look at the checkpoint")
        yield found
        if bar is not None:
            bar.update(len(found))


class Cost(NamedTuple):
    """Of the attention layer: operations for one picture, and exact attention's time over the method's."""

    operations: Operations
    timing: Timing | None


@torch.inference_mode()
def layer_costs(model, draw: Draw, swaps: Sequence[Swap], rounds: int, bar=None) -> list[Cost]:
    """What each attention costs on what reaches the layer for the first pictures of the draw, 8 at most.

    Args:
        rounds: paired timings of each against exact attention; 0 for none.
    """
    seen = []
    few = Draw(draw.noise[:8], draw.labels[:8], draw.truncation)
    with watching(model, lambda call: seen.append((call.query, call.key, call.value, call.scale))):
        next(pictures(model, few, 8))
    (query, key, value, scale) = seen[0]

    def work(config: MethodConfig | None):
        if config is None:
            return lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scale)
        return lambda: hea.attention(config, query, key, value, scale=scale)

    calls = {swap.label: work(swap.config) for swap in swaps if swap.config is not None}
    timed = paired(work(None), calls, rounds, bar)[1] if rounds and calls else {}
    costs = []
    for swap in swaps:
        whole = count(work(swap.config))
        costs.append(Cost(Operations(*(number // len(query) for number in whole)), timed.get(swap.label)))
    return costs
