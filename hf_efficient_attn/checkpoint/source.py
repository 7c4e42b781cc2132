"""Opening a checkpoint: finding its files and checking each one before it is used."""

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    validate_repo_id,
)

from hf_efficient_attn.checkpoint.files import (
    plain_name,
    read_object,
    refusing,
    regular_file,
    short,
    short_name,
)
from hf_efficient_attn.checkpoint.weights import PICKLES, Weights, find_weights
from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_method
from hf_efficient_attn.io.json import read_json
from hf_efficient_attn.methods import available_methods

# Exact implementations that Transformers contains. Other names are repositories whose code it would download and run.
_IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
# Keys that can make Transformers run code or read files from elsewhere. None of them describes the model.
_REMOVED = (
    "auto_map", "custom_pipelines", "experts_implementation", "fusion_config", "kernel_config", "name_or_path",
    "transformers_weights", "trust_remote_code",
)  # fmt: skip
_MAX_COMPANION = 2**30  # bytes
# Files of tokenizers, processors and pipelines, and licences. Code is not among them.
_WANTED = (".json", ".jinja", ".txt", ".model", ".vocab", ".bpe", ".tiktoken", ".spm", ".md", ".jsonl")
_WANTED_NAMES = ("license", "licence", "notice", "copying")
# Companions whose keys can name other files.
_NAMING = (
    "config_sentence_transformers.json", "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "sentence_bert_config.json", "special_tokens_map.json", "tokenizer_config.json",
)  # fmt: skip
# Files that a conversion writes itself, or that belong to a training run or to another method.
_REPLACED = (
    "README.md", "benchmark.json", "config.json", "distillation.json", "efficient_attention.json", "trainer_state.json",
    "training_args.bin",
)  # fmt: skip
_DOWNLOADED = ["*.safetensors", "LICENSE*", "LICENCE*", "NOTICE*", *(f"*{suffix}" for suffix in _WANTED)]
_NOT_DOWNLOADED = ["onnx/*", "openvino/*", "checkpoint-*/*", "runs/*"]


@dataclass(frozen=True)
class CheckedSource:
    """A checkpoint with files that have been checked. None of its code has run.

    Attributes:
        folder: The folder with its files.
        inside: The folder that no link in `folder` leads out of.
        name: The hub id, or the name of the folder.
        hub_id: The hub id if the checkpoint comes from the hub, else None.
        config: `config.json` without keys that refer to code or files elsewhere.
        dropped_keys: The names of these keys.
        weights: The weight files.
        companions: The files of tokenizer, processor, sentence-transformers and licence, as paths relative to the
            folder.
        left_out: {file: reason} for the other files, which are not read.
    """

    folder: pathlib.Path
    inside: pathlib.Path
    name: str
    hub_id: str | None
    config: Mapping[str, Any]
    dropped_keys: tuple[str, ...]
    weights: Weights
    companions: tuple[str, ...]
    left_out: Mapping[str, str]


def open_checkpoint(source: "str | os.PathLike[str]", *, allow_pickle: bool = False) -> CheckedSource:
    """Find a checkpoint, and check every file of it that will be used.

    Args:
        source: A folder; or the id of a model on the Hugging Face hub. Its safetensors, JSON and tokenizer files are
            downloaded unless they are in the cache.
        allow_pickle: Whether to read `pytorch_model.bin`, with weights_only=True, if there are no safetensors.

    Returns:
        The checkpoint. `load_model` builds the model from it.

    Raises:
        UnsupportedAttentionError: There is no such checkpoint, one of its files is missing or damaged, a link or a
            name leads out of the folder, or the weights are pickles.
        OSError: The download failed.
    """
    text = os.fspath(source)
    with refusing(f"the source {short(text)} is not the name of a folder"):  # too long, or with a null character
        text.encode()  # files of weights need names in UTF-8
        path = pathlib.Path(text).resolve()
        is_folder, exists = bool(text) and path.is_dir(), bool(text) and os.path.lexists(text)
    if is_folder:
        return _check(path, path, None, allow_pickle)
    if exists:
        raise UnsupportedAttentionError(f"{short(text)} is a file; give the folder that holds config.json")
    folder = _download(text, allow_pickle)
    # In the hub's cache the files of a snapshot are links to blobs, two folders up.
    return _check(folder, folder.parent.parent, text, allow_pickle)


@contextlib.contextmanager
def progress_of_hub() -> Iterator[None]:
    """Hide the progress bars of huggingface_hub unless stderr is a terminal."""
    if are_progress_bars_disabled() or sys.stderr.isatty():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _download(name: str, allow_pickle: bool) -> pathlib.Path:
    """Download a checkpoint, or find it in the cache; return its folder."""
    patterns, ignored = [*_DOWNLOADED], _NOT_DOWNLOADED
    try:
        validate_repo_id(name)
        with progress_of_hub():
            folder = pathlib.Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=ignored))
            if allow_pickle and not any(folder.glob("*.safetensors")):
                snapshot_download(name, allow_patterns=[*patterns, "pytorch_model*.bin"], ignore_patterns=ignored)
    except (HFValidationError, RepositoryNotFoundError, LocalEntryNotFoundError) as error:
        raise UnsupportedAttentionError(
            f"{short(name)} is neither a folder nor the id (ORGANISATION/NAME) of a model that is in the cache or that "
            "you can read on the hub: log in for a private one, and check that the hub can be reached"
        ) from error
    return folder


def _check(folder: pathlib.Path, inside: pathlib.Path, hub_id: str | None, allow_pickle: bool) -> CheckedSource:
    """Check the files of a folder; no link in it may lead out of the folder `inside`."""
    where = short(str(folder) if hub_id is None else hub_id)
    if not os.path.lexists(folder / "config.json"):
        raise UnsupportedAttentionError(
            f"{where} holds no config.json, so it is not a checkpoint of Transformers; if modules.json of "
            "sentence-transformers puts the model into a subfolder, convert that"
        )
    if (folder / "adapter_config.json").exists():
        raise UnsupportedAttentionError(f"{where} holds an adapter: merge it into its model, and give the merged model")
    values = read_object(folder / "config.json", inside)
    weights = find_weights(folder, inside, allow_pickle=allow_pickle)
    with refusing("config.json", UnsupportedAttentionError):
        config, dropped = _check_config(values)
    companions, left_out = _find_companions(folder, inside, weights)
    name = hub_id or folder.name
    return CheckedSource(folder, inside, name, hub_id, config, tuple(dropped), weights, tuple(companions), left_out)


def _find_companions(folder: pathlib.Path, inside: pathlib.Path, weights: Weights) -> tuple[list[str], dict[str, str]]:
    """Return the files that are copied by a conversion, and the reasons why the others are not."""
    companions: list[str] = []
    left_out: dict[str, str] = {}
    subfolders = {"additional_chat_templates", *_module_folders(folder, inside)}
    parts = [folder / name for name in sorted(subfolders) if (folder / name).is_dir()]
    skipped = {*_REPLACED, *(path.name for path in weights.files)}
    for path in (path for part in (folder, *parts) for path in sorted(part.iterdir())):
        name, at_root = path.name, path.parent == folder
        if name.startswith(".") or path in parts or (at_root and name in skipped):
            continue
        # The weights of a module of sentence-transformers are in its folder.
        is_weights = path.suffix == ".safetensors" and not at_root
        is_wanted = path.suffix.lower() in _WANTED or name.lower().startswith(_WANTED_NAMES)
        if path.is_dir() or not name.isprintable() or name.endswith(".index.json") or not (is_weights or is_wanted):
            is_pickle = path.suffix.lower() in PICKLES
            reason = "a pickle, or of another kind that is not read" if is_pickle else "not a part that the model needs"
            left_out[short_name(path, folder)] = reason
            continue
        if regular_file(path, inside).st_size > _MAX_COMPANION and not is_weights:
            raise UnsupportedAttentionError(
                f"{short_name(path, folder)} is larger than {_MAX_COMPANION} bytes, the limit for such a file"
            )
        if name in _NAMING:
            _check_paths(path, inside)
        companions.append(path.relative_to(folder).as_posix())
    return companions, left_out


def _module_folders(folder: pathlib.Path, inside: pathlib.Path) -> list[str]:
    """The subfolders that `modules.json` of sentence-transformers names."""
    path = folder / "modules.json"
    if not os.path.lexists(path):
        return []
    regular_file(path, inside)
    modules = read_json(path, name="modules.json")
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise UnsupportedAttentionError("modules.json: a list of JSON objects is expected")
    return [plain_name(module["path"], "modules.json") for module in modules if module.get("path", "") != ""]


def _check_paths(path: pathlib.Path, inside: pathlib.Path) -> None:
    """Refuse a file of settings that names files in other folders."""
    for key, value in read_object(path, inside).items():
        if isinstance(value, str) and key.lower().endswith(("_file", "_files", "path")):
            pure = pathlib.PurePath(value.replace("\\", "/"))
            if pure.is_absolute() or ".." in pure.parts or value[1:2] == ":":
                raise UnsupportedAttentionError(f"{path.name}: {short(key)} leads out of the folder, to {short(value)}")


def _check_config(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Copy `config.json` without what refers to code or files elsewhere; also return the names of the keys left out.

    Raises:
        UnsupportedAttentionError: There is no model type, an attention implementation is unknown, or the checkpoint is
            of a kind that cannot be converted: it is quantised, or uses the weights of another checkpoint.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise UnsupportedAttentionError("config.json has no model_type, so the type of the model is unknown")
    if values.get("quantization_config") is not None:
        raise UnsupportedAttentionError(
            "the checkpoint is quantised: convert the checkpoint that it was made from instead"
        )
    removed: set[str] = set()
    return _without_code(values, removed), sorted(removed)


def _without_code(value: Any, removed: set[str]) -> Any:
    """Copy a part of the config without the keys that are removed, at any depth; their names go into `removed`."""
    if isinstance(value, list):
        return [_without_code(part, removed) for part in value]
    if not isinstance(value, dict):
        return value
    if value.get("use_pretrained_backbone"):
        raise UnsupportedAttentionError(
            "config.json asks for the weights of another model (use_pretrained_backbone), which are not downloaded"
        )
    kept = {key: part for key, part in value.items() if key not in _REMOVED and not key.startswith("_")}
    removed |= value.keys() - kept.keys()
    chosen = kept.pop("attn_implementation", None)
    by_part = chosen if isinstance(chosen, dict) else {"": chosen}
    for name in by_part.values():
        if name is not None and name not in (*available_methods(), *_IMPLEMENTATIONS):
            text = name[:60] if isinstance(name, str) else short(name)
            raise UnsupportedAttentionError(
                f"config.json: {unknown_method(text, [*available_methods(), 'sdpa', 'eager'])}"
            )
    # An exact implementation is not kept: the user who loads the model may not have it, and chooses one.
    methods = {part: name for part, name in by_part.items() if name in available_methods()}
    kept = {key: _without_code(part, removed) for key, part in kept.items()}
    if methods:
        kept["attn_implementation"] = methods if isinstance(chosen, dict) else chosen
    return kept
