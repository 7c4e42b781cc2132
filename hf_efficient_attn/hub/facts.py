"""What the files of a converted checkpoint say.

They are `config.json`, `efficient_attention.json`, `benchmark.json` and `distillation.json`. Numbers must be finite,
and texts are brought to one line without control characters.
"""

import importlib.metadata
import json
import pathlib
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from safetensors import safe_open

from hf_efficient_attn.checkpoint.files import refusing
from hf_efficient_attn.checkpoint.provenance import FILE, INSTALL, TRAINED, plain_origin, read_origin
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.settings import EXACT, EfficientAttentionConfig
from hf_efficient_attn.io.json import read_json_object
from hf_efficient_attn.methods import available_methods

_PACKAGE = "hf_efficient_attn"
_NAME = r"hf[-_.]efficient[-_.]attn(\[[a-z,]+\])?"
_PINNED = re.compile(rf"{_NAME} ?== ?[0-9][0-9A-Za-z.+!-]{{0,49}}")
_URL = re.compile(rf"({_NAME} ?@ ?)?(?P<url>(git\+)?https://[A-Za-z0-9._~:/?#@!+,=%&-]{{1,400}})")
TASKS = {
    "embedding": "feature-extraction",
    "causal-lm": "text-generation",
    "masked-lm": "fill-mask",
    "text-to-text": "text2text-generation",
    "speech-to-text": "automatic-speech-recognition",
    "image-classification": "image-classification",
}
# The types of values in benchmark.json and distillation.json, by their keys; null is accepted too.
_NUMBERS = (
    "after", "batch", "batch_size", "before", "error", "error_after", "error_before", "finetune_learning_rate",
    "finetune_steps", "first_token_seconds", "held_out", "learning_rate", "length", "lora_rank", "peak_memory_mib",
    "rows", "seconds", "seed", "speed_up", "steps", "steps_done", "tokens", "tokens_per_second",
)  # fmt: skip
_TYPES = {
    **dict.fromkeys(_NUMBERS, ("a finite number", (int, float))),
    **dict.fromkeys(("data", "machine", "pays_from", "plan", "settings"), ("a JSON object", (dict,))),
    **dict.fromkeys(("layers", "measurements", "notes"), ("a list", (list,))),
}
# Keys of a measurement that can be missing.
_OPTIONAL = dict.fromkeys(("peak_memory_mib", "error", "agreement", "first_token_seconds", "tokens_per_second"))


@dataclass(frozen=True)
class Facts:
    """Everything that a card is made of.

    Attributes:
        folder: The folder of the checkpoint.
        architecture: The name of the model's class, or None.
        layers: The number of layers, or None.
        windowed: The layers that have a sliding window of the model's own.
        choices: Pairs of the name of a part of a composite model ("" for the model itself) and its methods.
        origin: The contents of `efficient_attention.json`. `install` is what pip takes to install this package, also
            if the file does not say it; None if it is not known.
        learned: The names of the parameters that the methods learn, without those of the layers.
        benchmark: The contents of `benchmark.json`, with the measurements sorted by length; None without the file. A
            measurement is `own` if it was made with the methods, hyperparameters and layers of the checkpoint.
        distillation: The contents of `distillation.json`, or None. `finetuning` is the second stage, or None.
    """

    folder: pathlib.Path
    architecture: str | None
    layers: int | None
    windowed: tuple[int, ...]
    choices: tuple[tuple[str, EfficientAttentionConfig], ...]
    origin: dict[str, Any]
    learned: tuple[str, ...]
    benchmark: dict[str, Any] | None
    distillation: dict[str, Any] | None

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of all methods in the model, in the order of the config."""
        entries = (entry.config.method for _, choice in self.choices for entry in choice.entries)
        return tuple(dict.fromkeys(entries))

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
        UnsupportedAttentionError: There is no `config.json`, it names no method of this package, or a file is damaged
            or contains a value of the wrong type. The message names the file.
    """
    folder = pathlib.Path(folder)
    config, stored = read_json_object(folder / "config.json"), read_origin(folder / FILE, folder)
    choices = tuple(_choices(config))
    if not choices and not (may_be_exact and stored):
        raise UnsupportedAttentionError(
            f"{folder / 'config.json'} names no attention method of hf_efficient_attn: make a converted checkpoint of "
            "it with 'hf-efficient-attn convert', or model.save_pretrained(folder) after hea.convert(model, method)"
        )
    origin = stored or plain_origin({})
    install = known_source() if origin[INSTALL] is None else check_install(origin[INSTALL], f"{FILE}: {INSTALL}")
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
        origin={**origin, INSTALL: install},
        learned=_learned_names(folder),
        benchmark=_benchmark(folder, choices[0][1] if len(choices) == 1 else None),
        distillation=_distillation(folder),
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
    if isinstance(method, str) and method in available_methods():
        if stored is not None and not isinstance(stored, dict):
            raise UnsupportedAttentionError("config.json: efficient_attention must be a JSON object")
        choice = EfficientAttentionConfig.from_dict(stored or {}, method)
        yield part, choice if choice.method == method else EfficientAttentionConfig(method)
    if depth < 2:
        for key, value in config.items():
            if isinstance(value, dict) and key not in ("efficient_attention", "attn_implementation"):
                yield from _choices(value, f"{part}.{clean(key)}".lstrip("."), depth + 1)


def _windowed(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers with a sliding window that is shorter than the model's positions, as the config states them."""
    size, positions = config.get("sliding_window"), config.get("max_position_embeddings")
    if size is None and "local_attention" in config:
        size = config["local_attention"] // 2 + 1  # ModernBERT states the keys on both sides
    if size is None or (positions is not None and positions <= size):
        return ()
    return tuple(index for index, kind in enumerate(config.get("layer_types") or ()) if "sliding" in kind)


def _learned_names(folder: pathlib.Path) -> tuple[str, ...]:
    """The names of learned parameters, from the headers of the weights."""
    found: list[str] = []
    for path in sorted(folder.glob("*.safetensors")):
        with refusing(f"{path} cannot be read"), safe_open(path, framework="pt") as weights:
            found += weights.keys()
    names = {key.rpartition(".")[2] for key in found if ".learned_parameters." in key}
    return tuple(sorted(name for name in names if name.isidentifier()))


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    """The contents of a JSON file, with every text in one line; None if it does not exist."""
    return _plain(read_json_object(path), path.name) if path.exists() else None


def _plain(value: Any, where: str, key: str = "") -> Any:
    """A value of a JSON file with every text in one line; refuse one that is not of the type of its key."""
    is_finite = not isinstance(value, float) or abs(value) < 1e300
    expected, types = _TYPES.get(key, ("a finite number", (type(value),)))
    if not is_finite or (value is not None and type(value) not in types):
        raise UnsupportedAttentionError(f"{where}: {key} must be {expected}, not {clean(repr(value), 60)}")
    if isinstance(value, dict):
        return {clean(name): _plain(part, where, name) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain(part, where) for part in value]
    return clean(value) if isinstance(value, str) else value


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
    if measured.get("task") not in TASKS:
        raise UnsupportedAttentionError(f"{name}: task must be one of {', '.join(TASKS)}")
    return {"notes": [], "complete": True, **measured, "measurements": rows}


def _distillation(folder: pathlib.Path) -> dict[str, Any] | None:
    """Read `distillation.json`."""
    name = "distillation.json"
    learned = _read(folder / name)
    if learned is None:
        return None
    with refusing(f"{name} is not as 'hf-efficient-attn distill' writes it"):
        plan, outputs, layers = learned["plan"], learned.get("outputs"), learned["layers"]
        # Layers of some models have names instead of numbers.
        rows = [{**row, "name": row["name"] if row["layer"] is None else str(row["layer"])} for row in layers]
        second = {"lora_rank": None, **plan, **outputs} if plan.get("finetune_steps") and outputs else None
    return {**learned, "layers": rows, "finetuning": second}


def _is_same(method: str, settings: dict[str, Any], own: EfficientAttentionConfig | None) -> bool:
    """Whether a measurement is of the methods and layers of a checkpoint."""
    try:
        return own is not None and EfficientAttentionConfig.from_dict({"method": method, **settings}) == own
    except UnsupportedAttentionError:  # exact attention, or a method that this version does not have
        return False


def check_install(text: str, where: str = "--install") -> str:
    """Check what a card is to tell its readers to install; the message begins with `where`.

    Returns:
        The text: a URL that pip takes (https://... or git+https://...), or a requirement with a version, such as
        hf_efficient_attn==0.2.0.

    Raises:
        UnsupportedAttentionError: It is a path on this machine, a name without a version, a URL with a password or
            token, or something else.
    """
    text = text.strip()
    url = _URL.fullmatch(text)
    if url is not None and "@" in urlsplit(url["url"].removeprefix("git+")).netloc:
        raise UnsupportedAttentionError(
            f"{where}: the URL contains a user, password or token, which everybody could read: leave it out"
        )
    if url is None and not _PINNED.fullmatch(text):
        raise UnsupportedAttentionError(
            f"{where} {text!r}: give what others can install, a URL (https://... or git+https://...) or a version "
            f"({_PACKAGE}==0.2.0); a path exists only on this machine, and a name alone could be another package"
        )
    return text


def known_source() -> str | None:
    """The public URL that pip recorded when it installed this package (PEP 610); None if there is none."""
    try:
        recorded = json.loads(importlib.metadata.distribution(_PACKAGE).read_text("direct_url.json") or "{}")
        if "vcs_info" in recorded:
            system = recorded["vcs_info"]
            return check_install(f"{system['vcs']}+{recorded['url']}@{system['commit_id']}")
        return check_install(recorded["url"])
    except (importlib.metadata.PackageNotFoundError, KeyError, TypeError, ValueError):  # or a path on this machine
        return None
