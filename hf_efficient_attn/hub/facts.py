"""What the files of a converted checkpoint say.

They are `config.json`, `efficient_attention.json`, `benchmark.json` and `distillation.json`. Numbers must be finite,
and texts are brought to one line without control characters.
"""

import math
import pathlib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hf_efficient_attn.checkpoint.files import refusing
from hf_efficient_attn.checkpoint.provenance import FILE, TRAINED, read_origin
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.settings import EXACT, EfficientAttentionConfig
from hf_efficient_attn.io.json import read_json_object
from hf_efficient_attn.methods import MethodConfig, available_methods, get_method

# Keys of a measurement that can be missing.
_OPTIONAL = dict.fromkeys(("peak_memory_mib", "error", "agreement", "first_token_seconds", "tokens_per_second"))


class OwnFile(NamedTuple):
    """A method that is not part of this package, and the file that registers it; None for a program or notebook."""

    method: str
    name: str | None

    @property
    def line(self) -> str:
        """The line of Python that registers the method."""
        if self.name is None:
            return f"# first run the code that registers {self.method}"
        return f"import {self.name.removesuffix('.py').replace('/', '.')}  # registers {self.method}"


def own_files_of(config_classes: Iterable[type[MethodConfig]]) -> list[OwnFile]:
    """The methods that are registered outside of this package, by the classes of their configs, sorted by module."""
    return [
        OwnFile(method, None if module == "__main__" else f"{module.replace('.', '/')}.py")
        for module, method in sorted({(one.__module__, one.method) for one in config_classes})
        if not module.startswith("hf_efficient_attn.")
    ]


@dataclass(frozen=True)
class Facts:
    """Everything that a card is made of.

    Attributes:
        folder: The folder of the checkpoint.
        architecture: The name of the model's class, or None.
        layers: The number of layers, or None.
        windowed: The layers that have a sliding window of the model's own.
        choices: Pairs of the name of a part of a composite model ("" for the model itself) and its methods.
        origin: The contents of `efficient_attention.json`, with None for keys that it does not have.
        kernel: The kernel repository that computes the attention, as ORG/NAME:METHOD; None without one.
        code: The auto class that loads the model with the code in the checkpoint (`trust_remote_code=True`); None if
            there is no such code.
        benchmark: The contents of `benchmark.json`, with the measurements sorted by length; None without the file. A
            measurement is `own` if it was made with the methods, hyperparameters and layers of the checkpoint.
        distillation: The contents of `distillation.json`, or None.
    """

    folder: pathlib.Path
    architecture: str | None
    layers: int | None
    windowed: tuple[int, ...]
    choices: tuple[tuple[str, EfficientAttentionConfig], ...]
    origin: dict[str, Any]
    kernel: str | None
    code: str | None
    benchmark: dict[str, Any] | None
    distillation: dict[str, Any] | None

    @property
    def configs(self) -> list[MethodConfig]:
        """The configs of all methods in the model, in the order of the config."""
        return [entry.config for _, choice in self.choices for entry in choice.entries]

    @property
    def methods(self) -> list[str]:
        """The names of all methods in the model."""
        return list(dict.fromkeys(config.method for config in self.configs))

    @property
    def learned(self) -> list[str]:
        """The names of the parameters that the methods learn."""
        sizes = dict.fromkeys(("num_heads", "head_dim", "value_dim", "max_length"), 1)
        with torch.device("meta"):
            return sorted({x for c in self.configs for x in get_method(c.method).initial_parameters(c, **sizes)})

    @property
    def own_files(self) -> list[OwnFile]:
        """The methods that are registered by files outside of this package."""
        return own_files_of(map(type, self.configs))

    @property
    def import_options(self) -> list[str]:
        """The options of a command of this package for `own_files`."""
        names = dict.fromkeys(file.name for file in self.own_files if file.name)
        return [word for name in names for word in ("--import", name)]

    @property
    def is_extended(self) -> bool:
        """Whether the position table is longer than the trained one."""
        return (self.origin["max_length"] or 0) > (self.origin[TRAINED] or 0)

    def has(self, name: str) -> bool:
        """Whether there is a file of this name in the folder."""
        return (self.folder / name).is_file()


def read_facts(folder: "str | pathlib.Path", *, may_be_exact: bool = False) -> Facts:
    """Read and check the files of a converted checkpoint, with `may_be_exact` also of one that was converted back.

    Raises:
        UnsupportedAttentionError: There is no `config.json`, it names no method of this package, or a file is damaged.
            The message names the file.
    """
    folder = pathlib.Path(folder)
    config, origin = read_json_object(folder / "config.json"), read_origin(folder / FILE, folder)
    choices, implementation = tuple(_choices(config)), config.get("attn_implementation")
    if not choices and not (may_be_exact and (folder / FILE).exists()):
        raise UnsupportedAttentionError(
            f"{folder / 'config.json'} names no attention method of hf_efficient_attn: make a converted checkpoint of "
            "it with 'hf-efficient-attn convert', or model.save_pretrained(folder) after hea.convert(model, method)"
        )
    with refusing(f"{folder / 'config.json'} cannot be understood"):
        name = (config.get("architectures") or [None])[0]
        is_name = isinstance(name, str) and name.isascii() and name.isidentifier()
        count = next((config[key] for key in ("num_hidden_layers", "n_layer", "n_layers") if key in config), None)
        windowed = _windowed(config)
    return Facts(
        folder=folder,
        architecture=name if is_name else None,
        layers=count if type(count) is int and count > 0 else None,
        windowed=windowed,
        choices=choices,
        origin=origin,
        kernel=implementation if isinstance(implementation, str) and "/" in implementation else None,
        code=_auto_class(config.get("auto_map"), name),
        benchmark=_benchmark(folder, choices[0][1] if len(choices) == 1 else None),
        distillation=_read(folder / "distillation.json"),
    )


def clean(text: str, limit: int = 200) -> str:
    """Bring text to one line of at most `limit` characters, without control characters and lone surrogates."""
    plain = "".join(" " if unicodedata.category(c)[0] == "C" or c in "\u2028\u2029" else c for c in text[: 4 * limit])
    plain = " ".join(plain.split())
    return plain if len(plain) <= limit else plain[: limit - 1].rstrip() + "…"


def _choices(
    config: Mapping[str, Any], part: str = "", depth: int = 0
) -> Iterator[tuple[str, EfficientAttentionConfig]]:
    """(name of the part, its methods) of every part of a config that names a method."""
    method, stored = config.get("attn_implementation"), config.get("efficient_attention")
    if isinstance(method, dict):  # a composite model; "" is the model itself, and the parts repeat their own
        method = method.get("")
    elif depth and method is None and isinstance(stored, dict):  # a part of a composite model
        method = stored.get("method")
    if isinstance(method, str):
        method = method.rpartition(":")[2]  # of a kernel repository, ORG/NAME:METHOD
    if isinstance(method, str) and method in available_methods():
        choice = EfficientAttentionConfig.from_dict(stored or {}, method)
        yield part, choice if choice.method == method else EfficientAttentionConfig(method)
    if depth < 2:
        for key, value in config.items():
            if isinstance(value, dict) and key not in ("efficient_attention", "attn_implementation"):
                yield from _choices(value, f"{part}.{clean(key)}".lstrip("."), depth + 1)


def _auto_class(auto_map: Any, architecture: object) -> str | None:
    """The key of a config's `auto_map` whose class has the name of the model's class."""
    entries = auto_map.items() if isinstance(auto_map, dict) else ()
    names = [key for key, value in entries if str(value).rpartition(".")[2] == architecture and key.isidentifier()]
    return names[-1] if names else None


def _windowed(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers with a sliding window that is shorter than the model's positions, as the config states them."""
    size, positions = config.get("sliding_window"), config.get("max_position_embeddings")
    if size is None and "local_attention" in config:
        size = config["local_attention"] // 2 + 1  # ModernBERT states the keys on both sides
    if size is None or (positions is not None and positions <= size):
        return ()
    return tuple(index for index, kind in enumerate(config.get("layer_types") or ()) if "sliding" in kind)


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    """The contents of a JSON file with finite numbers, with every text in one line; None if it does not exist."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            raise UnsupportedAttentionError(f"{path.name}: {value} is not a finite number")
        if isinstance(value, dict):
            return {clean(name): plain(part) for name, part in value.items()}
        if isinstance(value, list):
            return [plain(part) for part in value]
        return clean(value) if isinstance(value, str) else value

    return plain(read_json_object(path)) if path.exists() else None


def _benchmark(folder: pathlib.Path, own: EfficientAttentionConfig | None) -> dict[str, Any] | None:
    """Read `benchmark.json`; `own` are the methods of the checkpoint."""
    name = "benchmark.json"
    measured = _read(folder / name)
    if measured is None:
        return None
    with refusing(f"{name} is not as 'hf-efficient-attn benchmark' writes it"):
        rows = [
            {**_OPTIONAL, **row, "own": _is_same(row["method"], row["settings"], own)}
            for row in measured["measurements"]
        ]
        rows.sort(key=lambda row: (row["length"], row["batch"], row["method"] != EXACT, not row["own"]))
    return {"notes": [], "complete": True, **measured, "measurements": rows}


def _is_same(method: str, settings: dict[str, Any], own: EfficientAttentionConfig | None) -> bool:
    """Whether a measurement is of the methods and layers of a checkpoint."""
    try:
        return own is not None and EfficientAttentionConfig.from_dict({"method": method, **settings}) == own
    except UnsupportedAttentionError:  # exact attention, or a method that this version does not have
        return False
