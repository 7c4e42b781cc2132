"""A checkpoint from outside, opened: which files it has, checked before any of them is used."""

import os
import pathlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from hf_efficient_attn.checkpoint.settings import check_config
from hf_efficient_attn.checkpoint.values import plain_name, read_json, regular_file, short, short_name, walk
from hf_efficient_attn.checkpoint.weights import PICKLES, Weights, find_weights
from hf_efficient_attn.errors import UnsupportedAttentionError

_LARGEST_CONFIG = 8 * 2**20
_LARGEST_COMPANION = 2**30
_MOST_FILES = 10_000
# What a tokenizer, a processor, a pipeline or a reader of the licence needs. Code is not among it.
_WANTED = (".json", ".jinja", ".txt", ".model", ".vocab", ".bpe", ".tiktoken", ".spm", ".md", ".jsonl")
_WANTED_NAMES = ("license", "licence", "notice", "copying")
# Small ones that name files or modules.
_NAMING = ("tokenizer_config.json", "special_tokens_map.json", "preprocessor_config.json", "processor_config.json")
_NAMING += ("generation_config.json", "sentence_bert_config.json", "config_sentence_transformers.json")
# Written anew, or true only of the run or the method that they came from.
_REPLACED = ("config.json", "README.md", "efficient_attention.json", "benchmark.json", "training_args.bin")
_REPLACED += ("trainer_state.json",)
_DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.vocab", "*.bpe", "*.tiktoken", "*.spm"]
_DOWNLOADED += ["README.md", "LICENSE*", "LICENCE*", "NOTICE*"]
_NOT_DOWNLOADED = ["onnx/*", "openvino/*", "checkpoint-*/*", "runs/*"]


@dataclass(frozen=True)
class CheckedSource:
    """A checkpoint whose files were checked; nothing of it was run, and of its tensors only the headers were read.

    Attributes:
        folder: where its files are, on this machine.
        name: the hub id, or the folder's own name.
        hub_id: the hub id if it came from the hub, else None.
        config: `config.json` without what leads elsewhere.
        dropped_keys: names of what was taken out of it (`auto_map` and the like).
        weights: its weight files.
        companions: files of tokenizer, processor, sentence-transformers and licence, as paths from the folder on.
        left_out: {file: why} for the other files; none of them is read.
    """

    folder: pathlib.Path
    name: str
    hub_id: str | None
    config: Mapping
    dropped_keys: tuple[str, ...]
    weights: Weights
    companions: tuple[str, ...]
    left_out: Mapping[str, str]


def open_checkpoint(source: "str | os.PathLike", *, allow_pickle: bool = False) -> CheckedSource:
    """Find a checkpoint and check every file of it that will be used, before it is used.

    Args:
        source: a folder, or the id of a model on the Hugging Face hub, whose safetensors, JSON and tokenizer files are
            then downloaded (or found among those that were).
        allow_pickle: also read `pytorch_model.bin`, with weights_only=True, where there are no safetensors.

    Returns:
        what was found; `load_model` makes a model of it.

    Raises:
        UnsupportedAttentionError: there is no such checkpoint; or one of its files is missing, broken or hostile: a
            config that no such tensors can have, damaged safetensors, a link out of the folder, weights as pickles.
        OSError: the download failed.
    """
    text = os.fspath(source)
    path = pathlib.Path(text)
    try:
        there = bool(text) and path.is_dir()
        other = bool(text) and not there and (path.exists() or path.is_symlink())
    except (OSError, ValueError) as error:  # too long for a path, or with a character that no path has
        raise UnsupportedAttentionError(f"{short(text)} names no folder") from error
    if other:
        raise UnsupportedAttentionError(f"{short(text)} is a file; give the folder that holds config.json")
    if there:
        return _check(path.resolve(), path.resolve(), path.resolve().name, None, allow_pickle)
    folder = _download(text, allow_pickle)
    # In the hub's cache the files of a snapshot are links to blobs, two folders up.
    return _check(folder, folder.parent.parent, text, text, allow_pickle)


def _download(name: str, allow_pickle: bool) -> pathlib.Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
        validate_repo_id,
    )

    sentence = f"{short(name)} is neither a folder nor the id of a model on the hub"
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UnsupportedAttentionError(f"{sentence}, which has the form ORGANISATION/NAME") from error
    options = {"ignore_patterns": _NOT_DOWNLOADED}
    quiet = not are_progress_bars_disabled() and not sys.stderr.isatty()
    try:
        if quiet:
            disable_progress_bars()
        folder = pathlib.Path(snapshot_download(name, allow_patterns=_DOWNLOADED, **options))
        if allow_pickle and not any(folder.glob("*.safetensors")):
            patterns = [*_DOWNLOADED, "pytorch_model*.bin"]
            folder = pathlib.Path(snapshot_download(name, allow_patterns=patterns, **options))
    except RepositoryNotFoundError as error:
        raise UnsupportedAttentionError(f"{sentence} that is there for you; if it is private, log in first") from error
    except LocalEntryNotFoundError as error:
        raise UnsupportedAttentionError(
            f"{sentence} that can be had now: it was not downloaded before, and the hub cannot be reached"
        ) from error
    finally:
        if quiet:
            enable_progress_bars()
    return folder


def _check(folder: pathlib.Path, inside: pathlib.Path, name: str, hub_id: str | None, allow_pickle: bool):
    where = short(str(folder)) if hub_id is None else short(hub_id)
    config_file = folder / "config.json"
    if not config_file.exists() and not config_file.is_symlink():
        raise UnsupportedAttentionError(f"{where} holds no config.json, and so no checkpoint of Transformers")
    names = _list(folder)
    if (folder / "adapter_config.json").exists():
        raise UnsupportedAttentionError(f"{where} holds an adapter: merge it into its model, and give the merged one")
    values = read_json(config_file, inside, _LARGEST_CONFIG)
    weights = find_weights(folder, allow_pickle, inside)
    config, dropped = check_config(values, weights)
    companions, left_out = _sort(folder, inside, names, weights)
    return CheckedSource(folder, name, hub_id, config, tuple(dropped), weights, companions, left_out)


def _list(folder: pathlib.Path) -> list[str]:
    with os.scandir(folder) as entries:
        names = []
        for entry in entries:
            names.append(entry.name)
            if len(names) > _MOST_FILES:
                raise UnsupportedAttentionError(f"{short(str(folder))} holds more than {_MOST_FILES} files")
    return sorted(names)


def _sort(folder, inside, names: list[str], weights: Weights) -> tuple[tuple[str, ...], dict[str, str]]:
    """The files that go along, and why the others do not; what goes along is checked."""
    companions: list[str] = []
    left_out: dict[str, str] = {}
    parts = _parts(folder, inside) if "modules.json" in names else []
    used = {path.name for path in weights.files}
    waiting = [(folder, name) for name in names]
    while waiting:
        place, name = waiting.pop(0)
        path = place / name
        shown = short_name(path, folder)
        if name.startswith(".") or (place == folder and (name in used or name in _REPLACED)):
            continue
        if path.is_dir() and not path.is_symlink():
            if place == folder and (name in parts or name == "additional_chat_templates"):
                waiting += [(path, inner) for inner in _list(path)]
            else:
                left_out[shown] = "a folder that is no part of the model"
            continue
        why = _unwanted(name, place == folder)
        if why is not None:
            left_out[shown] = why
            continue
        if regular_file(path, inside, shown).st_size > _LARGEST_COMPANION and path.suffix != ".safetensors":
            raise UnsupportedAttentionError(f"{shown} is larger than any file of a tokenizer or processor")
        _check_file(path, inside, name)
        companions.append(path.relative_to(folder).as_posix())
    return tuple(companions), left_out


def _unwanted(name: str, at_root: bool) -> str | None:
    ending, lower = pathlib.PurePath(name).suffix.lower(), name.lower()
    if not name.isprintable():
        return "a name that cannot be printed"
    if ending in PICKLES:
        return "a pickle or of a kind that is not read"
    if ending == ".safetensors":
        return "weights that the model does not use" if at_root else None
    if lower.endswith(".index.json"):
        return "an index of other weights"
    if ending in _WANTED or lower.startswith(_WANTED_NAMES):
        return None
    return "not of a kind that a model needs"


def _parts(folder: pathlib.Path, inside: pathlib.Path) -> list[str]:
    """The subfolders that sentence-transformers' modules.json names."""
    modules = read_json(folder / "modules.json", inside, _LARGEST_CONFIG, list)
    parts = []
    for module in modules:
        place = module.get("path", "") if isinstance(module, dict) else None
        if place != "":
            parts.append(plain_name(place, "modules.json"))
    return parts


def _check_file(path: pathlib.Path, inside: pathlib.Path, name: str) -> None:
    """Files that name others must not name any elsewhere."""
    if path.suffix == ".safetensors":
        from hf_efficient_attn.checkpoint.weights import read_header

        read_header(path, inside)
    if name not in _NAMING:
        return
    for key, part, _ in walk(read_json(path, inside, _LARGEST_CONFIG)):
        if isinstance(part, str) and key.lower().endswith(("_file", "_files", "path")):
            pure = pathlib.PurePath(part.replace("\\", "/"))
            if pure.is_absolute() or ".." in pure.parts or part[1:2] == ":":
                raise UnsupportedAttentionError(f"{name}: {short(key)} leads out of the folder, to {short(part)}")
