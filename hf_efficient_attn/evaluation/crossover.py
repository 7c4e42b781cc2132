"""Measures from which length on methods are faster than exact attention on this machine, and keeps that in a file.

`hf_efficient_attn.methods._shared.crossover` describes what the lengths depend on, and looks them up.
"""

import functools
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from hf_efficient_attn.errors import UnsupportedAttentionError, warn
from hf_efficient_attn.evaluation.timing import Work, processor_name, use_device
from hf_efficient_attn.io.json import read_json_object, write_json
from hf_efficient_attn.io.writing import replacing
from hf_efficient_attn.methods import MethodConfig, attention, crossover, learns, make_config
from hf_efficient_attn.ops.nearfar.attempts import attempt_length
from hf_efficient_attn.version import __version__

_HEAD_DIM = 64
# Lengths between which is searched. The search begins at a length beyond which attention is quadratic for certain.
_SHORTEST, _FIRST, _LONGEST = 256, 4096, 1 << 17
# Exact attention is not measured at longer sequences: its time grows with the square of the length.
_QUADRATIC = 2048
# Calls are repeated until they take this time in seconds.
_MIN_SECONDS = 0.05
# A call of a method that takes longer is not followed by one at twice the length: the ratio is taken to grow in
# proportion to the length.
_MAX_SECONDS = 2.0
# A ratio that is large enough for a search to stop there; a ratio just above 1 may be due to chance.
_CLEAR = 1.1
_FORMAT = 1
_COMMAND = "hf-efficient-attn crossover --renew"


def measure_crossover(method: str, device: torch.device) -> dict[str, crossover.Crossover]:
    """Measure the lengths of a method with its default hyperparameters, which takes some seconds.

    On an otherwise idle machine two measurements of a length differ by up to a tenth. Returns row of the table ->
    lengths, for float32 and bfloat16, and causal if the method has a causal form. An unknown method, one with learned
    parameters, and one that switches to another are refused.
    """
    config = make_config(method)
    if config.switches_to:
        raise UnsupportedAttentionError(
            f"{method} replaces exact attention from the length on that is measured for {config.switches_to}: name "
            f"{config.switches_to}, or leave --method out"
        )
    if learns(config):
        raise UnsupportedAttentionError(
            f"{method} has learned parameters and does not approximate exact attention before training, so that it "
            "replaces exact attention at no length: name another method"
        )
    dims = (crossover.SMALL_DIM, crossover.LARGE_DIM)
    cases = list(itertools.product((torch.float32, torch.bfloat16), (False, True)[: 1 + config.causal], dims))
    lengths: dict[str, list[int]] = {}
    with torch.no_grad(), use_device(device), tqdm(cases, leave=False, disable=None) as bar:
        for dtype, is_causal, dim in bar:
            row, num_heads = crossover.table_key(dtype, is_causal), dim // _HEAD_DIM
            bar.set_description(f"{method}, {row}, {num_heads} heads")
            measure = functools.partial(
                measure_ratio, config=config, num_heads=num_heads, dtype=dtype, device=device, is_causal=is_causal
            )
            lengths.setdefault(row, []).append(find_crossover(measure, max(_SHORTEST, config.exact_length + 1)))
    return {row: crossover.Crossover(*found) for row, found in lengths.items()}


def measure_ratio(
    length: int, *, config: MethodConfig, num_heads: int, dtype: torch.dtype, device: torch.device, is_causal: bool
) -> tuple[float, float]:
    """Median time of exact attention of one sequence divided by that of a method, and the seconds of the method."""
    from torch.utils.benchmark import Timer  # it imports setuptools, and the package imports this module

    def seconds(work: Work) -> float:
        timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
        return timer.blocked_autorange(min_run_time=_MIN_SECONDS).median

    generator = torch.Generator().manual_seed(0)
    tensors = torch.randn(3, 1, num_heads, length, _HEAD_DIM, generator=generator, dtype=torch.float32)
    tensors = tensors.to(device, dtype)
    query, key, value = tensors[:, :, :, :_QUADRATIC]
    method = seconds(lambda: attention(config, *tensors, is_causal=is_causal))
    exact = seconds(lambda: scaled_dot_product_attention(query, key, value, is_causal=is_causal))
    return exact / method * (length / query.shape[2]) ** 2, method


def lengths_of_auto(device: torch.device, rows: Iterable[str]) -> dict[str, dict[int, int]]:
    """Numbers of tokens up to which `auto` with its defaults is exact, whatever the data, in large calls.

    Returns row of the table -> head_dim -> the number. It is greater than the crossover of the method that `auto`
    switches to, because its columns cost more, and because with a bound an attempt may fail.
    """
    config: Any = make_config("auto")
    found: dict[str, dict[int, int]] = {row: {} for row in rows}
    for dtype, is_causal, head_dim in itertools.product((torch.float32, torch.bfloat16), (False, True), (64, 32)):
        row = crossover.table_key(dtype, is_causal)
        if row in found:
            length = config.exact_up_to(crossover.LARGE_DIM // head_dim, head_dim, dtype, is_causal, device)
            # Nothing bounds the error of the causal form.
            found[row][head_dim] = length if is_causal else min(crossover.NEVER, attempt_length(length))
    return found


def find_crossover(measure: Callable[[int], tuple[float, float]], shortest: int) -> int:
    """The largest length at which a noisy ratio that grows with the length reaches 1, from `shortest` to `NEVER`.

    `measure(length)` returns the ratio, and the seconds of a call of the method. The search begins at a long sequence
    and goes by factors of two: up until the ratio is clearly above 1, then down until it is below 1. So a method that
    is fast at lengths that it computes exactly is not taken to be fast in between.
    """
    measure, length = functools.cache(measure), max(shortest, _FIRST)
    lengths = [length]
    while measure(length)[0] < _CLEAR:
        if 2 * length > _LONGEST or 2.0 * measure(length)[1] > _MAX_SECONDS:
            return min(crossover.NEVER, round(length / measure(length)[0]))
        length *= 2
        lengths.append(length)
    while measure(lengths[0])[0] >= 1.0:
        if lengths[0] == shortest:
            return shortest
        lengths.insert(0, max(shortest, lengths[0] // 2))
    low = max(length for length in lengths if measure(length)[0] < 1.0)
    high = lengths[lengths.index(low) + 1]
    for _ in range(2):  # to less than 1.2 times `low`; the ratio may jump anywhere in between
        middle = round(math.sqrt(low * high))
        low, high = (middle, high) if measure(middle)[0] < 1.0 else (low, middle)
    # Where the ratio reaches 1, if it is a power of the length.
    below, above = (math.log(measure(length)[0]) for length in (low, high))
    return round(low * math.pow(high / low, min(1.0, -below / max(1e-9, above - below))))


def cache_file() -> pathlib.Path:
    """`crossover.json` in the folder $HEA_CACHE, or else in `hf_efficient_attn` in $XDG_CACHE_HOME or ~/.cache."""
    own, general = os.environ.get("HEA_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return pathlib.Path(own) / "crossover.json"
    return (pathlib.Path(general) if general else pathlib.Path.home() / ".cache") / "hf_efficient_attn/crossover.json"


def machine_name(device: torch.device) -> str:
    """What the measured lengths depend on: processor, device, threads, and the versions of PyTorch and this package."""
    where = processor_name()
    if device.type != "cpu":
        where = f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else device.type} and {where}"
    threads = torch.get_num_threads()
    return f"{where}, {threads} thread{'s' * (threads != 1)}, torch {torch.__version__}, version {__version__}"


def measured_table(method: str, device: torch.device) -> crossover.Table | None:
    """The lengths of a method on this machine, None if there are none, or, with a warning, if the file is damaged."""
    path = cache_file()
    try:
        rows = _read_machines(path).get(machine_name(device), {}).get(method)
        if rows is None:
            return None
        table = {name: crossover.Crossover(*pair) for name, pair in rows.items()}
        lengths = [length for pair in table.values() for length in pair]
        is_known = bool(lengths) and set(table) <= set(crossover.built_in_table("cpu"))
        if not is_known or not all(type(length) is int and 1 <= length <= crossover.NEVER for length in lengths):
            raise ValueError(f"the lengths of {method} are damaged")
        return table
    except (ValueError, TypeError, AttributeError) as error:
        warn(
            f"{path} holds no lengths that can be used ({error}), so that built-in lengths decide where {method} "
            f"replaces exact attention. `{_COMMAND}` writes the file again"
        )
        return None


def _read_machines(path: pathlib.Path) -> dict[str, Any]:
    """The machines in a file: name -> method -> row -> [small, large]. Empty if there is no file."""
    if not os.path.exists(path):
        return {}
    values = read_json_object(path, name="it")
    if values.get("format") != _FORMAT or not isinstance(values.get("machines"), dict):
        raise ValueError("it has another format")
    return dict(values["machines"])


def store_crossover(method: str, device: torch.device, found: Mapping[str, crossover.Crossover]) -> None:
    """Write the lengths of a method on this machine into the user's cache folder. Those of others are kept."""
    path, machine = cache_file(), machine_name(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        machines = _read_machines(path)
    except ValueError:  # `measured_table` has warned of it
        machines = {}
    methods = machines[machine] if isinstance(machines.get(machine), dict) else {}
    machines[machine] = {**methods, method: {name: list(lengths) for name, lengths in found.items()}}
    with replacing(path) as draft:
        write_json(draft, {"format": _FORMAT, "machines": machines})
    register()


def register() -> None:
    """Let `auto` look its lengths up in the file, which is read once for each kind of call."""
    crossover.use_measured(measured_table)
