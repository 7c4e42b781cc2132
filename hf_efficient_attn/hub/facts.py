"""What a converted folder says of itself: `config.json`, `efficient_attention.json`, `benchmark.json`, checked.

Other people wrote these files. Every value is checked for its type, numbers for being finite, and text is brought to
one line without control characters; what a value may do inside YAML, Markdown or a shell is not decided here.
"""

import json
import pathlib
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.settings import EXACT, EfficientAttentionConfig
from hf_efficient_attn.methods import available_methods

# A tokenizer may take megabytes; these files never do.
LARGEST = 16 * 2**20
TASKS = {
    "embedding": "feature-extraction",
    "causal-lm": "text-generation",
    "masked-lm": "fill-mask",
    "image-classification": "image-classification",
}
AGREEMENTS = ("cosine", "perplexity_ratio", "top1")
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
VERSION = re.compile(r"[0-9][0-9A-Za-z.+!-]{0,49}")


@dataclass(frozen=True)
class Measurement:
    """A row of benchmark.json; `own` where it is of the checkpoint's own method, hyperparameters and layers."""

    attention: str
    method: str
    own: bool
    length: int
    batch: int
    seconds: float
    speed_up: float
    peak_memory_mib: float | None
    error: float | None
    agreement: float | None


@dataclass(frozen=True)
class Benchmark:
    """benchmark.json: machine and data by their names there, rows by length, from which length a label pays."""

    task: str
    agreement: str
    machine: dict[str, str]
    data: str
    rows: int
    measurements: tuple[Measurement, ...]
    pays_from: dict[str, int | None]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """All that a card is made of.

    choices: (name of the part of a composite model, "" for the model itself; its methods).
    learned: names in the checkpoint of the parameters that its methods learn, without the layer.
    """

    folder: pathlib.Path
    architecture: str | None
    layers: int | None
    choices: tuple[tuple[str, EfficientAttentionConfig], ...]
    base_model: str | None
    base_name: str
    license: str | None
    tags: tuple[str, ...]
    pipeline_tag: str | None
    languages: tuple[str, ...]
    version: str | None
    max_length: int | None
    learned: tuple[str, ...]
    benchmark: Benchmark | None
    picture: bool
    sentence_transformers: bool

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of all methods in the model, in the order in which they are named."""
        entries = (entry.config.method for _, choice in self.choices for entry in choice.entries)
        return tuple(dict.fromkeys(entries))


def read_facts(folder: "str | pathlib.Path", *, may_be_exact: bool = False) -> Facts:
    """Read and check them; with `may_be_exact` also those of a checkpoint that was converted back to exact attention.

    Raises:
        UnsupportedAttentionError: no config.json, one that names no method of this package, or a file that is broken or
            holds a value of the wrong type; the message names the file and the key.
    """
    folder = pathlib.Path(folder)
    config = read_json(folder / "config.json")
    choices, about = tuple(_choices(config)), folder / "efficient_attention.json"
    if not choices and not (may_be_exact and about.exists()):
        raise UnsupportedAttentionError(
            f"{folder / 'config.json'} names no attention method of hf_efficient_attn: make a converted checkpoint of "
            "it with 'hf-efficient-attn convert', or model.save_pretrained(folder) after hea.convert(model, method)"
        )
    origin = _Reader(read_json(about) if about.exists() else {}, about.name)
    measured, own = folder / "benchmark.json", choices[0][1] if len(choices) == 1 else None
    base_model = origin.text("base_model")
    if base_model is not None:
        check_repo_id(base_model, f"{about.name}: base_model")
    version = origin.text("hf_efficient_attn")
    if version is not None and not VERSION.fullmatch(version):
        raise UnsupportedAttentionError(f"{about.name}: hf_efficient_attn={version!r} is no version")
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    if not isinstance(architecture, str) or not IDENTIFIER.fullmatch(architecture):
        architecture = None
    return Facts(
        folder=folder,
        architecture=architecture,
        layers=_first_count(config, ("num_hidden_layers", "n_layer", "n_layers")),
        choices=choices,
        base_model=base_model,
        base_name=origin.text("base_name") or (base_model or "").split("/")[-1],
        license=origin.text("license"),
        tags=origin.texts("tags"),
        pipeline_tag=origin.text("pipeline_tag"),
        languages=origin.texts("language"),
        version=version,
        max_length=origin.count("max_length", optional=True),
        learned=_learned(folder),
        benchmark=_benchmark(read_json(measured), measured.name, own) if measured.exists() else None,
        picture=measured.exists() and (folder / "benchmark.png").is_file(),
        sentence_transformers=(folder / "modules.json").is_file(),
    )


def clean(text: str, limit: int = 200) -> str:
    """Text on one line, without control characters, marks that turn the direction of reading, or lone surrogates."""
    plain = "".join(" " if unicodedata.category(c)[0] == "C" or c in "\u2028\u2029" else c for c in text[: 4 * limit])
    plain = " ".join(plain.split())
    return plain if len(plain) <= limit else plain[: limit - 1].rstrip() + "…"


def check_repo_id(name: str, where: str) -> None:
    """Raises `UnsupportedAttentionError`, beginning with `where`, if the hub would not take it for a repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UnsupportedAttentionError(f"{where}: {error}") from error


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object; raises `UnsupportedAttentionError` for what is none, or is larger than such a file ever is."""
    try:
        if path.stat().st_size > LARGEST:
            raise UnsupportedAttentionError(f"{path} has more than {LARGEST // 2**20} MiB: that is no such file")
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UnsupportedAttentionError(f"there is no {path}") from error
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, UnsupportedAttentionError):
            raise
        raise UnsupportedAttentionError(f"{path} cannot be read as JSON: {clean(str(error))}") from error
    if not isinstance(values, dict):
        raise UnsupportedAttentionError(f"{path} must hold a JSON object, not a {type(values).__name__}")
    return values


def _choices(config: Mapping[str, Any], name: str = "", depth: int = 0):
    """Every part of a config that names a method, by the way to it."""
    method, stored = config.get("attn_implementation"), config.get("efficient_attention")
    if isinstance(method, dict):  # one implementation a part; the parts hold theirs again
        method = method.get("")
    if isinstance(method, str) and method in available_methods():
        if stored is not None and not isinstance(stored, dict):
            raise UnsupportedAttentionError("config.json: efficient_attention must be a JSON object")
        choice = EfficientAttentionConfig.from_dict(stored or {}, method)
        yield name, choice if choice.method == method else EfficientAttentionConfig(method)
    if depth < 2:
        for key, part in config.items():
            if isinstance(part, dict) and key not in ("efficient_attention", "attn_implementation"):
                yield from _choices(part, f"{name}.{clean(key)}".lstrip("."), depth + 1)


def _first_count(values: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = values.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 100_000:
            return value
    return None


def _learned(folder: pathlib.Path) -> tuple[str, ...]:
    """Read from the headers of the weights, without loading any."""
    from safetensors import SafetensorError, safe_open

    found, path = [], folder
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as weights:
                found += weights.keys()
    except (SafetensorError, OSError) as error:
        raise UnsupportedAttentionError(f"{path} cannot be read: {clean(str(error))}") from error
    return tuple(sorted({clean(key.rpartition(".")[2]) for key in found if ".learned_parameters." in key}))


class _Reader:
    """Takes values out of a JSON object, and refuses those of the wrong type by file and key."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict):
            raise UnsupportedAttentionError(f"{where} must be a JSON object, not {type(values).__name__}")
        self.values, self.where = values, where

    def _refuse(self, key: str, wanted: str):
        value = clean(repr(self.values.get(key)), 60)
        raise UnsupportedAttentionError(f"{self.where}: {key} must be {wanted}, not {value}")

    def text(self, key: str, default: str | None = None) -> str | None:
        value = self.values.get(key, default)
        if value is not None and not isinstance(value, str):
            self._refuse(key, "text")
        return value if value is None else clean(value) or None

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key)
        value = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self._refuse(key, "a list of texts")
        return tuple(dict.fromkeys(plain for item in value[:1000] if (plain := clean(item))))

    def number(self, key: str, optional: bool = False) -> float | None:
        value = self.values.get(key)
        if value is None and optional:
            return None
        sane = isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300
        if not sane:  # NaN too
            self._refuse(key, "a finite number")
        return float(value)

    def count(self, key: str, optional: bool = False) -> int | None:
        value = self.values.get(key)
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
            self._refuse(key, "a count")
        return value

    def one_of(self, key: str, known) -> str:
        if not isinstance(self.values.get(key), str) or self.values[key] not in known:
            self._refuse(key, f"one of {', '.join(known)}")
        return self.values[key]

    def part(self, key: str) -> "_Reader":
        return _Reader(self.values.get(key), f"{self.where}: {key}")


def _benchmark(values: dict[str, Any], where: str, own: EfficientAttentionConfig | None) -> Benchmark:
    reader = _Reader(values, where)
    data, machine, pays = reader.part("data"), reader.part("machine"), reader.part("pays_from")
    rows = values.get("measurements")
    if not isinstance(rows, list) or len(rows) > 10_000:
        raise UnsupportedAttentionError(f"{where}: measurements must be a list")
    parsed = [_measurement(_Reader(row, f"{where}: a measurement"), own) for row in rows]
    return Benchmark(
        task=reader.one_of("task", TASKS),
        agreement=reader.one_of("agreement", AGREEMENTS),
        machine={clean(str(k)): clean(str(v)) for k, v in machine.values.items() if isinstance(v, (str, int, float))},
        data=data.text("name", "unnamed"),
        rows=data.count("rows"),
        measurements=tuple(sorted(parsed, key=lambda row: (row.length, row.batch, row.method != EXACT, not row.own))),
        notes=reader.texts("notes"),
        pays_from={clean(str(label)): pays.count(label, optional=True) for label in pays.values},
    )


def _measurement(row: _Reader, own: EfficientAttentionConfig | None) -> Measurement:
    method, settings = row.text("method"), row.part("settings").values
    return Measurement(
        attention=row.text("attention") or "unnamed",
        method=method or "unnamed",
        own=own is not None and _same(method, settings, own),
        length=row.count("length"),
        batch=row.count("batch"),
        seconds=row.number("seconds"),
        speed_up=row.number("speed_up"),
        peak_memory_mib=row.number("peak_memory_mib", optional=True),
        error=row.number("error", optional=True),
        agreement=row.number("agreement", optional=True),
    )


def _same(method: str | None, settings: dict[str, Any], own: EfficientAttentionConfig) -> bool:
    """Whether a row was measured with the methods of a checkpoint, in the same layers."""
    try:
        return EfficientAttentionConfig.from_dict({"method": method, **settings}) == own
    except UnsupportedAttentionError:  # exact attention, or a method that another version has
        return False
