"""The file with the lengths from which on methods are faster than exact attention, as measured on some machines.

`hf_efficient_attn.methods._shared.crossover` describes these lengths, and `evaluation.crossover` measures them.
"""

import functools
import os
import pathlib
import platform
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from hf_efficient_attn.io.json import read_json_object, write_json
from hf_efficient_attn.io.writing import replacing
from hf_efficient_attn.methods import crossover
from hf_efficient_attn.version import __version__

_FORMAT = 1
# The size of a file that is read at most: a damaged one cannot fill the memory.
_MAX_BYTES = 1 << 20
_COMMAND = "hf-efficient-attn crossover --renew"


def cache_file() -> pathlib.Path:
    """Where the lengths are stored.

    `crossover.json` in the folder $HEA_CACHE, or else in `hf_efficient_attn` in $XDG_CACHE_HOME or ~/.cache.
    """
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


@functools.cache
def processor_name() -> str:
    """The processor's name according to the operating system."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def measured_table(method: str, device: torch.device) -> crossover.Table | None:
    """The lengths of a method on this machine, None if there are none. The file is read once in a process.

    Warns:
        UserWarning: the file cannot be read, or is not of this package. Then there are none.
    """
    return _read_table(cache_file(), machine_name(device), method)


@functools.lru_cache(maxsize=64)
def _read_table(path: pathlib.Path, machine: str, method: str) -> crossover.Table | None:
    try:
        methods = _read(path).get(machine, {})
        rows = methods.get(method) if isinstance(methods, dict) else methods
        if rows is None:
            return None
        known = crossover.built_in_table("cpu")
        if not isinstance(rows, dict) or not rows or not all(name in known and _is_pair(x) for name, x in rows.items()):
            raise ValueError(f"the lengths of {method} are damaged")
        return {name: crossover.Crossover(*pair) for name, pair in rows.items()}
    except ValueError as error:
        warnings.warn(
            f"{path} holds no lengths that can be used ({error}), so that built-in lengths decide where {method} "
            f"replaces exact attention. `{_COMMAND}` writes the file again",
            stacklevel=2,
        )
        return None


def _is_pair(value: Any) -> bool:
    is_list = isinstance(value, list) and len(value) == 2
    return is_list and all(type(x) is int and 1 <= x <= crossover.NEVER for x in value)


def _read(path: pathlib.Path) -> dict[str, Any]:
    """The machines in a file: name -> method -> row -> [small, large]. Empty if there is no file."""
    if not os.path.exists(path):
        return {}
    values = read_json_object(path, max_bytes=_MAX_BYTES, name="it")
    if values.get("format") != _FORMAT or not isinstance(values.get("machines"), dict):
        raise ValueError("it has another format")
    return dict(values["machines"])


def store_crossover(method: str, device: torch.device, found: Mapping[str, crossover.Crossover]) -> None:
    """Write the lengths of a method on this machine into the user's cache folder. Those of others are kept.

    Raises:
        OSError: the file cannot be written.
    """
    path, machine = cache_file(), machine_name(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        machines = _read(path)
    except ValueError:  # `measured_table` has warned of it
        machines = {}
    methods = machines[machine] if isinstance(machines.get(machine), dict) else {}
    machines[machine] = {**methods, method: {name: list(lengths) for name, lengths in found.items()}}
    with replacing(path) as draft:
        write_json(draft, {"format": _FORMAT, "machines": machines})
    forget()


def register() -> None:
    """Let `auto` look its lengths up in the file."""
    crossover.use_measured(measured_table)


def forget() -> None:
    """Read the file again at the next call."""
    _read_table.cache_clear()
    register()
