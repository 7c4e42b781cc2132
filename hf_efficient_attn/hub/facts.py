"""What the files of a converted checkpoint say.

They are `config.json`, `efficient_attention.json`, `benchmark.json` and `distillation.json`.
"""

import pathlib
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hf_efficient_attn.checkpoint.files import refusing
from hf_efficient_attn.checkpoint.provenance import FILE, TRAINED, read_origin
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.settings import EfficientAttentionConfig
from hf_efficient_attn.io.json import read_json_object
from hf_efficient_attn.methods import MethodConfig, available_methods, get_method


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
        benchmark: The contents of `benchmark.json`, or None.
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
        """The methods that are registered outside of this package, sorted by module."""
        return [
            OwnFile(method, None if module == "__main__" else f"{module.replace('.', '/')}.py")
            for module, method in sorted({(type(config).__module__, config.method) for config in self.configs})
            if not module.startswith("hf_efficient_attn.")
        ]

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
        benchmark=_read(folder / "benchmark.json"),
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
    return read_json_object(path) if path.exists() else None
