"""What the files of a converted checkpoint say.

They are `config.json`, `efficient_attention.json`, `benchmark.json` and `distillation.json`.

Values are checked for their type. Numbers must be finite, and texts are brought to one line without control characters.
"""

import pathlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open

from hf_efficient_attn.checkpoint.limits import sentence_limit
from hf_efficient_attn.checkpoint.provenance import FILE, INSTALL, TRAINED
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
AGREEMENTS = ("cosine", "perplexity_ratio", "top1")
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+!-]{0,49}")


@dataclass(frozen=True)
class Measurement:
    """One entry of the measurements in `benchmark.json`.

    `own` is True if it was measured with the methods, hyperparameters and layers of the checkpoint.
    """

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
    first_token_seconds: float | None
    tokens_per_second: float | None


@dataclass(frozen=True)
class Benchmark:
    """The contents of `benchmark.json`, with the measurements sorted by length.

    `pays_from` gives for each label the length in tokens from which it is faster than exact attention, or None.
    `complete` is False if the measurement was stopped before its end.
    """

    task: str
    agreement: str
    machine: dict[str, str]
    data: str
    rows: int
    measurements: tuple[Measurement, ...]
    pays_from: dict[str, int | None]
    notes: tuple[str, ...]
    complete: bool

    @property
    def has_generation(self) -> bool:
        """Whether the speed of generation was measured."""
        return any(entry.tokens_per_second is not None for entry in self.measurements)


@dataclass(frozen=True)
class LayerErrors:
    """The error of a layer before and after a distillation; None if it was not a number."""

    name: str
    before: float | None
    after: float | None


@dataclass(frozen=True)
class Finetuning:
    """The second stage of a distillation, with its loss on the held-out inputs before and after."""

    steps: int
    target: str
    learning_rate: float
    lora_rank: int | None
    before: float | None
    after: float | None


@dataclass(frozen=True)
class Distillation:
    """The contents of `distillation.json`.

    `tokens` is the number of tokens of an input, `rows` the number of inputs to learn from, and `held_out` that of the
    inputs on which the errors were measured. `complete` is False if the training was stopped before its end, after
    `steps_done` steps of both stages.
    """

    data: str
    rows: int
    held_out: int
    tokens: int
    batch_size: int
    steps: int
    steps_done: int
    loss: str
    learning_rate: float
    seed: int
    layers: tuple[LayerErrors, ...]
    error_before: float | None
    error_after: float | None
    finetuning: Finetuning | None
    complete: bool


@dataclass(frozen=True)
class Facts:
    """Everything that a card is made of.

    `choices` are pairs of the name of a part of a composite model ("" for the model itself) and its methods. `learned`
    are the names of the parameters that the methods learn, without those of the layers. `install` is what pip takes to
    install this package, if that is known. `max_length` is the number of tokens that a conversion was told to take, and
    `trained_positions` the number that the model took before. `sentence_limit` is the number of tokens at which
    sentence-transformers truncates; None if the files do not say, or if there are none of sentence-transformers.
    """

    folder: pathlib.Path
    architecture: str | None
    layers: int | None
    windowed: tuple[int, ...]
    choices: tuple[tuple[str, EfficientAttentionConfig], ...]
    base_model: str | None
    license: str | None
    tags: tuple[str, ...]
    pipeline_tag: str | None
    languages: tuple[str, ...]
    version: str | None
    max_length: int | None
    trained_positions: int | None
    learned: tuple[str, ...]
    benchmark: Benchmark | None
    picture: bool
    distillation: Distillation | None
    distillation_picture: bool
    sentence_transformers: bool
    sentence_limit: int | None
    install: str | None

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of all methods in the model, in the order of the config."""
        entries = (entry.config.method for _, choice in self.choices for entry in choice.entries)
        return tuple(dict.fromkeys(entries))

    @property
    def is_extended(self) -> bool:
        """Whether the position table is longer than the trained one, whose size earlier versions did not store."""
        return self.max_length is not None and (self.trained_positions or 0) < self.max_length


def read_facts(folder: "str | pathlib.Path", *, may_be_exact: bool = False) -> Facts:
    """Read and check the files of a converted checkpoint.

    Args:
        folder: The folder of the checkpoint.
        may_be_exact: Whether to accept a checkpoint that was converted back to exact attention.

    Returns:
        The facts.

    Raises:
        UnsupportedAttentionError: There is no `config.json`, it names no method of this package, or a file is damaged
            or contains a value of the wrong type. The message names the file and the key.
    """
    folder = pathlib.Path(folder)
    config = read_json_object(folder / "config.json")
    choices, about = tuple(_choices(config)), folder / FILE
    if not choices and not (may_be_exact and about.exists()):
        raise UnsupportedAttentionError(
            f"{folder / 'config.json'} names no attention method of hf_efficient_attn: make a converted checkpoint of "
            "it with 'hf-efficient-attn convert', or model.save_pretrained(folder) after hea.convert(model, method)"
        )
    origin = _Object(read_json_object(about) if about.exists() else {}, about.name)
    measured, distilled = folder / "benchmark.json", folder / "distillation.json"
    base_model, version = origin.optional_text("base_model"), origin.optional_text("hf_efficient_attn")
    if base_model is not None:
        check_repo_id(base_model, f"{about.name}: base_model")
    if version is not None and not _VERSION.fullmatch(version):
        raise UnsupportedAttentionError(f"{about.name}: hf_efficient_attn={version!r} is not a version")
    own = choices[0][1] if len(choices) == 1 else None
    install, limit = origin.optional_text(INSTALL), None
    if is_sentence_model := (folder / "modules.json").is_file():
        limit = sentence_limit(folder)
    return Facts(
        folder=folder,
        architecture=_architecture(config),
        layers=_num_layers(config),
        windowed=_windowed_layers(config),
        choices=choices,
        base_model=base_model,
        license=origin.optional_text("license"),
        tags=origin.texts("tags"),
        pipeline_tag=origin.optional_text("pipeline_tag"),
        languages=origin.texts("language"),
        version=version,
        max_length=origin.optional_count("max_length"),
        trained_positions=origin.optional_count(TRAINED),
        learned=_learned_names(folder),
        benchmark=_benchmark(_Object(read_json_object(measured), measured.name), own) if measured.exists() else None,
        picture=measured.exists() and (folder / "benchmark.png").is_file(),
        distillation=(
            _distillation(_Object(read_json_object(distilled), distilled.name)) if distilled.exists() else None
        ),
        distillation_picture=distilled.exists() and (folder / "distillation.png").is_file(),
        sentence_transformers=is_sentence_model,
        sentence_limit=None if limit is None else limit.tokens,
        install=known_source() if install is None else check_install(install, f"{about.name}: {INSTALL}"),
    )


def clean(text: str, limit: int = 200) -> str:
    """Bring text to one line of at most `limit` characters, without control characters and lone surrogates."""
    plain = "".join(" " if unicodedata.category(c)[0] == "C" or c in "\u2028\u2029" else c for c in text[: 4 * limit])
    plain = " ".join(plain.split())
    return plain if len(plain) <= limit else plain[: limit - 1].rstrip() + "…"


def check_repo_id(name: str, where: str) -> None:
    """Check that `name` can be a repository on the hub.

    Raises:
        UnsupportedAttentionError: It cannot. The message begins with `where`.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UnsupportedAttentionError(f"{where}: {error}") from error


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


def _architecture(config: Mapping[str, Any]) -> str | None:
    """The first architecture that a config names, if it can be the name of a class."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) and name.isascii() and name.isidentifier() else None


def _num_layers(config: Mapping[str, Any]) -> int | None:
    """The number of layers that a config states."""
    for key in ("num_hidden_layers", "n_layer", "n_layers"):
        value = config.get(key)
        if type(value) is int and 0 < value < 100_000:
            return value
    return None


def _windowed_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers that have a sliding window of the model's own, as the config states it; see `windows.window_of`."""
    types, size, positions = config.get("layer_types"), config.get("sliding_window"), _positions(config)
    half = config.get("local_attention")  # ModernBERT: the keys on both sides
    if type(size) is not int:
        size = half // 2 + 1 if type(half) is int else None
    if not isinstance(types, list) or size is None or (positions is not None and positions <= size):
        return ()
    return tuple(index for index, kind in enumerate(types) if isinstance(kind, str) and "sliding" in kind)


def _positions(config: Mapping[str, Any]) -> int | None:
    value = config.get("max_position_embeddings")
    return value if type(value) is int else None


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


class _Object:
    """A JSON object of which values are read by type. Other values are refused with the name of the file and key."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict):
            raise UnsupportedAttentionError(f"{where} must be a JSON object, not {type(values).__name__}")
        self.values, self.where = values, where

    def _refuse(self, key: str, expected: str) -> NoReturn:
        value = clean(repr(self.values.get(key)), 60)
        raise UnsupportedAttentionError(f"{self.where}: {key} must be {expected}, not {value}")

    def optional_text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            self._refuse(key, "text")
        return value if value is None else clean(value) or None

    def text(self, key: str) -> str:
        return self.optional_text(key) or "unnamed"

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key)
        value = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self._refuse(key, "a list of texts")
        return tuple(dict.fromkeys(plain for item in value if (plain := clean(item))))

    def number(self, key: str) -> float:
        value = self.values.get(key)
        # The comparison is False for NaN and for infinity.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
            self._refuse(key, "a finite number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def count(self, key: str) -> int:
        value = self.values.get(key)
        if type(value) is not int or not 0 <= value < 2**53:
            self._refuse(key, "a count")
        return value

    def optional_count(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.count(key)

    def one_of(self, key: str, known: Iterable[str]) -> str:
        value = self.values.get(key)
        if not isinstance(value, str) or value not in known:
            self._refuse(key, f"one of {', '.join(known)}")
        return value

    def part(self, key: str) -> "_Object":
        return _Object(self.values.get(key), f"{self.where}: {key}")


def _benchmark(values: _Object, own: EfficientAttentionConfig | None) -> Benchmark:
    """Read `benchmark.json`; `own` are the methods of the checkpoint."""
    data, machine, pays_from = values.part("data"), values.part("machine"), values.part("pays_from")
    entries = values.values.get("measurements")
    if not isinstance(entries, list):
        raise UnsupportedAttentionError(f"{values.where}: measurements must be a list")
    measurements = [_measurement(_Object(entry, f"{values.where}: a measurement"), own) for entry in entries]
    return Benchmark(
        task=values.one_of("task", TASKS),
        agreement=values.one_of("agreement", AGREEMENTS),
        machine={clean(str(k)): clean(str(v)) for k, v in machine.values.items() if isinstance(v, (str, int, float))},
        data=data.text("name"),
        rows=data.count("rows"),
        measurements=tuple(
            sorted(measurements, key=lambda entry: (entry.length, entry.batch, entry.method != EXACT, not entry.own))
        ),
        notes=values.texts("notes"),
        complete=values.values.get("complete") is not False,
        pays_from={clean(str(label)): pays_from.optional_count(label) for label in pays_from.values},
    )


def _distillation(values: _Object) -> Distillation:
    """Read `distillation.json`."""
    data, plan, entries = values.part("data"), values.part("plan"), values.values.get("layers")
    if not isinstance(entries, list):
        raise UnsupportedAttentionError(f"{values.where}: layers must be a list")
    layers = []
    for entry in (_Object(entry, f"{values.where}: a layer") for entry in entries):
        number = None if isinstance(entry.values.get("layer"), str) else entry.optional_count("layer")
        name = entry.text("name") if number is None else str(number)
        layers.append(LayerErrors(name, entry.optional_number("before"), entry.optional_number("after")))
    finetuning = None
    if plan.values.get("finetune_steps") is not None and values.values.get("outputs") is not None:
        outputs = values.part("outputs")
        finetuning = Finetuning(
            steps=plan.count("finetune_steps"),
            target=plan.one_of("finetune_target", ("hidden_states", "logits")),
            learning_rate=plan.number("finetune_learning_rate"),
            lora_rank=plan.optional_count("lora_rank"),
            before=outputs.optional_number("before"),
            after=outputs.optional_number("after"),
        )
    return Distillation(
        data=data.text("name"),
        rows=data.count("rows"),
        held_out=data.count("held_out"),
        tokens=values.count("tokens"),
        batch_size=plan.count("batch_size"),
        steps=plan.count("steps"),
        steps_done=values.count("steps_done"),
        loss=plan.one_of("loss", ("output", "weights", "both")),
        learning_rate=plan.number("learning_rate"),
        seed=plan.count("seed"),
        layers=tuple(layers),
        error_before=values.optional_number("error_before"),
        error_after=values.optional_number("error_after"),
        finetuning=finetuning,
        complete=values.values.get("complete") is not False,
    )


def _measurement(values: _Object, own: EfficientAttentionConfig | None) -> Measurement:
    """Read an entry of the measurements."""
    method, settings = values.optional_text("method"), values.part("settings").values
    return Measurement(
        attention=values.text("attention"),
        method=method or "unnamed",
        own=own is not None and _is_same(method, settings, own),
        length=values.count("length"),
        batch=values.count("batch"),
        seconds=values.number("seconds"),
        speed_up=values.number("speed_up"),
        peak_memory_mib=values.optional_number("peak_memory_mib"),
        error=values.optional_number("error"),
        agreement=values.optional_number("agreement"),
        first_token_seconds=values.optional_number("first_token_seconds"),
        tokens_per_second=values.optional_number("tokens_per_second"),
    )


def _is_same(method: str | None, settings: dict[str, Any], own: EfficientAttentionConfig) -> bool:
    """Whether a measurement is of the methods and layers of a checkpoint."""
    try:
        return EfficientAttentionConfig.from_dict({"method": method, **settings}) == own
    except UnsupportedAttentionError:  # exact attention, or a method that this version does not have
        return False
