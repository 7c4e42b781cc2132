"""What the files of a converted checkpoint say.

They are `config.json`, `efficient_attention.json`, `benchmark.json` and `distillation.json`. Values are checked for
their type. Numbers must be finite, and texts are brought to one line without control characters.
"""

import pathlib
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from safetensors import SafetensorError, safe_open

from hf_efficient_attn.checkpoint.limits import sentence_limit
from hf_efficient_attn.checkpoint.provenance import FILE, INSTALL, TRAINED, check_hub_id
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.hub.install import check_install, known_source
from hf_efficient_attn.integration.settings import EXACT, EfficientAttentionConfig
from hf_efficient_attn.io.json import read_json_object
from hf_efficient_attn.methods import available_methods

TASKS = {
    "embedding": "feature-extraction",
    "causal-lm": "text-generation",
    "masked-lm": "fill-mask",
    "text-to-text": "text2text-generation",
    "speech-to-text": "automatic-speech-recognition",
    "image-classification": "image-classification",
}
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+!-]{0,49}")

# What the files contain. `_checked` explains the form. Other keys are not read.
_TEXT, _NUMBER, _COUNT = (str, None), (float, None), (int, None)
_TEXTS: Any = ([str], [])
_ORIGIN = {
    "base_model": _TEXT,
    "license": _TEXT,
    "tags": _TEXTS,
    "pipeline_tag": _TEXT,
    "language": _TEXTS,
    "max_length": _COUNT,  # the tokens that a conversion was told to take
    TRAINED: _COUNT,  # those that the model took before it; earlier versions did not store this
    INSTALL: _TEXT,
    "hf_efficient_attn": _TEXT,
}
_MEASUREMENT = {
    "attention": (str, "unnamed"),
    "method": (str, "unnamed"),
    "settings": dict,
    "length": int,
    "batch": int,
    "seconds": float,
    "speed_up": float,
    "peak_memory_mib": _NUMBER,
    "error": _NUMBER,
    "agreement": _NUMBER,
    "first_token_seconds": _NUMBER,
    "tokens_per_second": _NUMBER,
}
_BENCHMARK = {
    "task": set(TASKS),
    "agreement": {"cosine", "perplexity_ratio", "top1"},
    "machine": dict,
    "data": {"name": (str, "unnamed"), "rows": int},
    "measurements": [_MEASUREMENT],
    "pays_from": {str: _COUNT},  # for each label the tokens from which it is faster than exact attention
    "notes": _TEXTS,
    "complete": bool,  # whether the measurement reached its end
}
_ERRORS = {"before": _NUMBER, "after": _NUMBER}
_DISTILLATION = {
    "data": {"name": (str, "unnamed"), "rows": int, "held_out": int},
    "plan": {
        "batch_size": int,
        "steps": int,
        "loss": {"output", "weights", "both"},
        "learning_rate": float,
        "seed": int,
        "finetune_steps": _COUNT,
    },
    "tokens": int,
    "steps_done": int,
    "layers": [{"layer": object, "name": (str, "unnamed"), **_ERRORS}],
    "error_before": _NUMBER,
    "error_after": _NUMBER,
    "outputs": (_ERRORS, None),
    "complete": bool,
}
_FINETUNING = {
    "finetune_steps": int,
    "finetune_target": {"hidden_states", "logits"},
    "finetune_learning_rate": float,
    "lora_rank": _COUNT,
}


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
        sentence_limit: The number of tokens at which sentence-transformers truncates; None if the files do not say.
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
    sentence_limit: int | None

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
    """Read and check the files of a converted checkpoint.

    Args:
        folder: The folder of the checkpoint.
        may_be_exact: Whether to accept a checkpoint that was converted back to exact attention.

    Raises:
        UnsupportedAttentionError: There is no `config.json`, it names no method of this package, or a file is damaged
            or contains a value of the wrong type. The message names the file and the key.
    """
    folder = pathlib.Path(folder)
    config = read_json_object(folder / "config.json")
    choices, stored = tuple(_choices(config)), _read(folder / FILE, _ORIGIN)
    if not choices and not (may_be_exact and stored):
        raise UnsupportedAttentionError(
            f"{folder / 'config.json'} names no attention method of hf_efficient_attn: make a converted checkpoint of "
            "it with 'hf-efficient-attn convert', or model.save_pretrained(folder) after hea.convert(model, method)"
        )
    origin = stored or _checked({}, _ORIGIN, FILE)
    version, install, limit = origin["hf_efficient_attn"], origin[INSTALL], None
    if origin["base_model"] is not None:
        check_hub_id(origin["base_model"], f"{FILE}: base_model")
    if version is not None and not _VERSION.fullmatch(version):
        raise UnsupportedAttentionError(f"{FILE}: hf_efficient_attn={version!r} is not a version")
    install = known_source() if install is None else check_install(install, f"{FILE}: {INSTALL}")
    architecture, layers, windowed = _shape_of_model(config)
    if (folder / "modules.json").is_file():
        limit = sentence_limit(folder)
    return Facts(
        folder=folder,
        architecture=architecture,
        layers=layers,
        windowed=windowed,
        choices=choices,
        origin={**origin, INSTALL: install},
        learned=_learned_names(folder),
        benchmark=_benchmark(folder, choices[0][1] if len(choices) == 1 else None),
        distillation=_distillation(folder),
        sentence_limit=None if limit is None else limit.tokens,
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


def _shape_of_model(config: Mapping[str, Any]) -> tuple[str | None, int | None, tuple[int, ...]]:
    """The class, the number of layers, and those with a sliding window, as the config states them; see `window_of`."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    is_name = isinstance(name, str) and name.isascii() and name.isidentifier()
    counts = [config.get(key) for key in ("num_hidden_layers", "n_layer", "n_layers")]
    count = next((count for count in counts if type(count) is int and 0 < count < 100_000), None)
    keys = ("layer_types", "sliding_window", "local_attention", "max_position_embeddings")
    types, size, half, positions = map(config.get, keys)
    if type(size) is not int and type(half) is int:
        size = half // 2 + 1  # ModernBERT states the keys on both sides
    is_windowed = type(size) is int and not (type(positions) is int and positions <= size)
    kinds = enumerate(types) if isinstance(types, list) and is_windowed else ()
    windowed = tuple(index for index, kind in kinds if isinstance(kind, str) and "sliding" in kind)
    return name if is_name else None, count, windowed


def _learned_names(folder: pathlib.Path) -> tuple[str, ...]:
    """The names of learned parameters, from the headers of the weights."""
    found, path = [], folder
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as weights:
                found += weights.keys()
    except (SafetensorError, OSError) as error:
        raise UnsupportedAttentionError(f"{path} cannot be read: {clean(str(error))}") from error
    names = {key.rpartition(".")[2] for key in found if ".learned_parameters." in key}
    return tuple(sorted(name for name in names if name.isidentifier()))


def _read(path: pathlib.Path, form: Any) -> dict[str, Any] | None:
    """The contents of a JSON file, checked; None if it does not exist."""
    return _checked(read_json_object(path), form, path.name) if path.exists() else None


_EXPECTED: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    str: ("text", lambda value: isinstance(value, str)),
    int: ("a count", lambda value: type(value) is int and 0 <= value < 2**53),
    # The comparison is False for NaN and for infinity.
    float: ("a finite number", lambda value: type(value) in (int, float) and abs(value) < 1e300),
    dict: ("a JSON object", lambda value: isinstance(value, dict)),
    list: ("a list", lambda value: isinstance(value, list)),
}


def _checked(value: Any, form: Any, where: str) -> Any:
    """A value from a JSON file, with every text in it brought to one line.

    Args:
        value: The value.
        form: What is accepted: `str`, `int` (a count), `float` (a finite number), `bool` (anything but false is true),
            `dict` or `object` (returned as it is); a set of texts, one of which it must be; [form] for a list;
            {key: form} for an object with these keys, {str: form} for one with any keys; or (form, what null and an
            empty text become).
        where: The file and key, for the error message.

    Raises:
        UnsupportedAttentionError: The value is of another form.
    """
    if isinstance(form, tuple):
        found = None if value is None else _checked(value, form[0], where)
        return form[1] if found is None or found == "" else found
    if form in (bool, object):
        return value is not False if form is bool else value
    if isinstance(form, set):
        expected, fits = f"one of {', '.join(sorted(form))}", isinstance(value, str) and value in form
    elif form == [str]:
        value = [value] if isinstance(value, str) else value
        expected, fits = "a list of texts", isinstance(value, list) and all(isinstance(text, str) for text in value)
    else:
        expected, test = _EXPECTED[form if isinstance(form, type) else type(form)]
        fits = test(value)
    if not fits:
        raise UnsupportedAttentionError(f"{where} must be {expected}, not {clean(repr(value), 60)}")
    if isinstance(form, dict):
        forms = dict.fromkeys(value, form[str]) if str in form else form
        return {clean(key): _checked(value.get(key), part, f"{where}: {key}") for key, part in forms.items()}
    if isinstance(form, list):
        parts = [_checked(part, form[0], f"{where}: an entry") for part in value]
        return list(dict.fromkeys(filter(None, parts))) if form == [str] else parts
    return clean(value) if form is str else float(value) if form is float else value


def _benchmark(folder: pathlib.Path, own: EfficientAttentionConfig | None) -> dict[str, Any] | None:
    """Read `benchmark.json`; `own` are the methods of the checkpoint."""
    measured = _read(folder / "benchmark.json", _BENCHMARK)
    if measured is None:
        return None
    machine = {clean(key): clean(str(v)) for key, v in measured["machine"].items() if isinstance(v, (str, int, float))}
    rows = [{**row, "own": _is_same(row["method"], row["settings"], own)} for row in measured["measurements"]]
    rows.sort(key=lambda row: (row["length"], row["batch"], row["method"] != EXACT, not row["own"]))
    return {**measured, "machine": machine, "measurements": rows}


def _distillation(folder: pathlib.Path) -> dict[str, Any] | None:
    """Read `distillation.json`."""
    path = folder / "distillation.json"
    learned = _read(path, _DISTILLATION)
    if learned is None:
        return None
    for row in learned["layers"]:  # layers of some models have names instead of numbers
        row["name"] = str(row["layer"]) if type(row["layer"]) is int else row["name"]
    second = None
    if learned["plan"]["finetune_steps"] is not None and learned["outputs"] is not None:
        second = _checked(read_json_object(path)["plan"], _FINETUNING, f"{path.name}: plan") | learned["outputs"]
    return {**learned, "finetuning": second}


def _is_same(method: str, settings: dict[str, Any], own: EfficientAttentionConfig | None) -> bool:
    """Whether a measurement is of the methods and layers of a checkpoint."""
    try:
        return own is not None and EfficientAttentionConfig.from_dict({"method": method, **settings}) == own
    except UnsupportedAttentionError:  # exact attention, or a method that this version does not have
        return False
