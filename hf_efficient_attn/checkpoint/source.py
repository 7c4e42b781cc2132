"""Opening a checkpoint: finding its files and checking each one before it is used; and where it comes from."""

import os
import pathlib
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub import metadata_load, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from hf_efficient_attn.checkpoint.files import plain_name, read_object, regular_file, short_name
from hf_efficient_attn.errors import UnsupportedAttentionError, refusing, shown, unknown_method
from hf_efficient_attn.io.json import read_json
from hf_efficient_attn.methods import available_methods
from hf_efficient_attn.version import __version__

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
# Files that can run code when they are loaded.
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".dill", ".msgpack", ".h5")
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
_CACHED = "models--"
_NOT_DOWNLOADED = ["onnx/*", "openvino/*", "checkpoint-*/*", "runs/*"]
# The file of a conversion with the origin of its checkpoint, and keys in it.
FILE = "efficient_attention.json"
INSTALL, TRAINED, VERSION = "install", "trained_positions", "hf_efficient_attn"
THIS_VERSION = f"{VERSION}=={__version__}"  # as pip takes it
_MAX_CARD = 2**20  # bytes
_NAME = r"hf[-_.]efficient[-_.]attn(\[[a-z,]+\])?"
_PINNED = re.compile(rf"{_NAME} ?== ?[0-9][0-9A-Za-z.+!-]{{0,49}}")
_URL = re.compile(rf"({_NAME} ?@ ?)?(git\+)?https://[A-Za-z0-9.:-]+/[A-Za-z0-9._~:/?#@!+,=%&-]{{1,400}}")
# The keys of the file, by the form of their values: lists of texts, numbers above 0, texts.
_LISTS, _COUNTS = ("tags", "language"), ("max_length", TRAINED)
_KEYS = ("base_model", "license", "pipeline_tag", INSTALL, VERSION, *_LISTS, *_COUNTS)
_FROM_CARD = ("license", "pipeline_tag", *_LISTS)


# The weight files of a checkpoint, in order: their paths, tensors by name, and metadata. Tensors of safetensors are
# views of the file, on the CPU.
Weights = Mapping[pathlib.Path, tuple[Mapping[str, Tensor], Mapping[str, str]]]


@dataclass(frozen=True)
class CheckedSource:
    """A checkpoint with files that have been checked. None of its code has run."""

    folder: pathlib.Path
    inside: pathlib.Path  # the folder that no link in `folder` leads out of
    hub_id: str | None  # None for one that does not come from the hub
    config: Mapping[str, Any]  # `config.json` without keys that refer to code or files elsewhere
    dropped_keys: tuple[str, ...]  # their names
    weights: Weights
    companions: tuple[str, ...]  # paths in the folder of files of tokenizer, processor, sentence-transformers, licence
    left_out: tuple[str, ...]  # the names of the other files, which are not read

    @property
    def title(self) -> str:
        """The hub id, or the end of the path: the name of the folder alone is often "model"."""
        return self.hub_id or "/".join(self.folder.parts[1:][-2:])

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of all weight files by their names."""
        return {name: tensor for tensors, _ in self.weights.values() for name, tensor in tensors.items()}


def open_checkpoint(source: "str | os.PathLike[str]", *, allow_pickle: bool = False) -> CheckedSource:
    """Find a checkpoint, and check every file of it that will be used. `load_model` builds the model from the result.

    `source` is a folder, also one of the hub's cache, or the id of a model on the Hugging Face hub, whose safetensors,
    JSON and tokenizer files are downloaded unless they are in the cache. With `allow_pickle`, `pytorch_model.bin` is
    read, with weights_only=True, if there are no safetensors.

    Refused are a name of no checkpoint, missing and damaged files, links and names that lead out of the folder, and
    pickles. A download that fails ends in an OSError.
    """
    text = os.fspath(source)
    with refusing(f"the source {shown(text)} is not the name of a folder"):  # too long, or with a null character
        text.encode()  # files of weights need names in UTF-8
        folder = inside = pathlib.Path(text).resolve()
        is_folder, exists = bool(text) and folder.is_dir(), bool(text) and os.path.lexists(text)
    if exists and not is_folder:
        raise UnsupportedAttentionError(f"{shown(text)} is a file; give the folder that holds config.json")
    hub_id = None if exists else text
    if not exists:
        folder = _download(text, allow_pickle)
        inside = folder.parent.parent  # where the hub's cache has the blobs to which the files of a snapshot are links
    elif (snapshot := _snapshot_of(folder)) is not None:
        inside = snapshot.parent.parent
        hub_id = inside.name.removeprefix(_CACHED).replace("--", "/") if snapshot == folder else None
    if not os.path.lexists(folder / "config.json"):
        raise UnsupportedAttentionError(
            f"{shown(text)} holds no config.json, so it is not a checkpoint of Transformers; if modules.json of "
            "sentence-transformers puts the model into a subfolder, convert that"
        )
    if (folder / "adapter_config.json").exists():
        raise UnsupportedAttentionError(f"{shown(text)} holds an adapter: merge it into its model, and give the result")
    values = read_object(folder / "config.json", inside)
    weights = find_weights(folder, inside, allow_pickle=allow_pickle)
    removed: set[str] = set()
    with refusing("config.json", UnsupportedAttentionError):  # for example a nested one
        config = _checked_config(values, removed)
    files = dict(_other_files(folder, inside, {*_REPLACED, *(path.name for path in weights)}))
    companions, left_out = (tuple(name for name, used in files.items() if used is wanted) for wanted in (True, False))
    return CheckedSource(folder, inside, hub_id, config, tuple(sorted(removed)), weights, companions, left_out)


def _snapshot_of(folder: pathlib.Path) -> pathlib.Path | None:
    """The snapshot in the hub's cache that a folder is, or is in: models--ORG--NAME/snapshots/REVISION; or None."""
    for path in (folder, *folder.parents):
        root = path.parent.parent
        if path.parent.name == "snapshots" and root.name.startswith(_CACHED) and (root / "blobs").is_dir():
            return path
    return None


def _download(name: str, allow_pickle: bool) -> pathlib.Path:
    """Download a checkpoint, or find it in the cache; return its folder."""
    try:
        patterns = [*_DOWNLOADED, *["pytorch_model.bin"] * allow_pickle]
        folder = snapshot_download(name, allow_patterns=patterns, ignore_patterns=_NOT_DOWNLOADED)
    except (HFValidationError, RepositoryNotFoundError, LocalEntryNotFoundError) as error:
        raise UnsupportedAttentionError(
            f"{shown(name)} is neither a folder nor the id (ORGANISATION/NAME) of a model that is in the cache or that "
            "you can read on the hub: log in for a private one, and check that the hub can be reached"
        ) from error
    return pathlib.Path(folder)


def _other_files(folder: pathlib.Path, inside: pathlib.Path, skipped: set[str]) -> Iterator[tuple[str, bool]]:
    """The paths of the files that are not in `skipped`, and whether each is one that a conversion copies."""
    subfolders = {"additional_chat_templates"}
    if os.path.lexists(folder / "modules.json"):  # of sentence-transformers
        regular_file(folder / "modules.json", inside)
        modules = read_json(folder / "modules.json", name="modules.json")
        if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
            raise UnsupportedAttentionError("modules.json: a list of JSON objects is expected")
        subfolders |= {plain_name(module["path"], "modules.json") for module in modules if module.get("path", "") != ""}
    parts = [folder / name for name in sorted(subfolders) if (folder / name).is_dir()]
    for path in (path for part in (folder, *parts) for path in sorted(part.iterdir())):
        name, at_root = path.name, path.parent == folder
        if name.startswith(".") or path in parts or (at_root and name in skipped):
            continue
        # The weights of a module of sentence-transformers are in its folder.
        is_weights = path.suffix == ".safetensors" and not at_root
        is_wanted = path.suffix.lower() in _WANTED or name.lower().startswith(_WANTED_NAMES)
        if path.is_dir() or not name.isprintable() or name.endswith(".index.json") or not (is_weights or is_wanted):
            yield short_name(path, folder), False
            continue
        regular_file(path, inside, None if is_weights else _MAX_COMPANION)
        if name in _NAMING:
            _check_paths(path, inside)
        yield path.relative_to(folder).as_posix(), True


def _check_paths(path: pathlib.Path, inside: pathlib.Path) -> None:
    """Refuse a file of settings that names files in other folders."""
    for key, value in read_object(path, inside).items():
        if isinstance(value, str) and key.lower().endswith(("_file", "_files", "path")):
            pure = pathlib.PurePath(value.replace("\\", "/"))
            if pure.is_absolute() or ".." in pure.parts or value[1:2] == ":":
                raise UnsupportedAttentionError(f"{path.name}: {shown(key)} leads out of the folder, to {shown(value)}")


def _checked_config(value: Any, removed: set[str], *, is_part: bool = False) -> Any:
    """Copy a config, or a part of it, without what refers to code or files elsewhere, at any depth.

    Those of the keys in `_REMOVED` that it has go into `removed`. Refused are a config without a model type or with an
    unknown attention implementation, and checkpoints that are quantised or use the weights of another one.
    """
    if isinstance(value, list):
        return [_checked_config(part, removed, is_part=True) for part in value]
    if not isinstance(value, dict):
        return value
    if not is_part and not (isinstance(value.get("model_type"), str) and value["model_type"]):
        raise UnsupportedAttentionError("config.json has no model_type, so the type of the model is unknown")
    if value.get("quantization_config") is not None:
        raise UnsupportedAttentionError("the checkpoint is quantised: convert the one that it was made from")
    if value.get("use_pretrained_backbone"):
        raise UnsupportedAttentionError(
            "config.json asks for the weights of another model (use_pretrained_backbone), which are not downloaded"
        )
    kept = {key: part for key, part in value.items() if key not in _REMOVED and not key.startswith("_")}
    removed |= value.keys() & {*_REMOVED}
    chosen = kept.pop("attn_implementation", None)
    if isinstance(chosen, str) and "/" in chosen:  # a kernel repository with a method of this package
        chosen = chosen.rpartition(":")[2]
    by_part = chosen if isinstance(chosen, dict) else {"": chosen}
    for name in by_part.values():
        if name is not None and name not in (*available_methods(), *_IMPLEMENTATIONS):
            text = name[:60] if isinstance(name, str) else shown(name)
            raise UnsupportedAttentionError(
                f"config.json: {unknown_method(text, [*available_methods(), 'sdpa', 'eager'])}"
            )
    # An exact implementation is not kept: the user who loads the model may not have it, and chooses one.
    methods = {part: name for part, name in by_part.items() if name in available_methods()}
    kept = {key: _checked_config(part, removed, is_part=True) for key, part in kept.items()}
    if methods:
        kept["attn_implementation"] = methods if isinstance(chosen, dict) else chosen
    return kept


def find_weights(folder: pathlib.Path, inside: pathlib.Path, *, allow_pickle: bool) -> Weights:
    """Find the weight files of a checkpoint, and open them. Links inside the folder `inside` are followed.

    `allow_pickle` allows `pytorch_model.bin` without safetensors. Refused are a folder without weights or with pickles
    that are not allowed, damaged files, and an index that names files in other folders.
    """
    present = [name for name in (SINGLE, INDEX, *[PICKLED] * allow_pickle) if os.path.lexists(folder / name)]
    paths = [folder / name for name in present[:1]]
    if present[:1] == [INDEX]:
        weight_map = read_object(folder / INDEX, inside).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UnsupportedAttentionError(f"{INDEX} has no weight_map, which says which file holds which tensor")
        names = sorted({plain_name(name, f"{INDEX}: weight_map") for name in weight_map.values()})
        for name in (name for name in names if not name.endswith(".safetensors")):
            raise UnsupportedAttentionError(f"{INDEX}: weight_map names {shown(name)}, which is no safetensors file")
        paths = [folder / name for name in names]
    if paths:
        return {path: _read_tensors(path, inside) for path in paths}
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in PICKLES)
    if not pickles:
        raise UnsupportedAttentionError(f"{shown(str(folder))} holds no weights: neither {SINGLE} nor {INDEX} exists")
    hint = "--allow-pickle (allow_pickle=True) reads it with PyTorch's weights_only=True"
    if PICKLED not in pickles:
        hint = f"load it with the program that wrote it and save it as {SINGLE}"
    raise UnsupportedAttentionError(
        f"{shown(str(folder))} holds its weights as {shown(pickles[0])}, not as safetensors; such a file can run any "
        f"code when it is loaded. If you trust its origin: {hint}"
    )


def _read_tensors(path: pathlib.Path, inside: pathlib.Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file. No code in it runs: of a pickle only weights are read."""
    regular_file(path, inside)
    name, metadata = short_name(path, inside), dict[str, str]()
    with refusing(f"{name} is damaged"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the error says the same in one line
        if path.suffix == ".safetensors":  # the library checks the header
            with safe_open(path, "pt") as file:
                metadata = dict(file.metadata() or {})
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UnsupportedAttentionError(f"{name} holds more than named tensors: save model.state_dict() alone")
    for key, tensor in state.items():
        is_weight = tensor.is_floating_point() and tensor.element_size() > 1 and not tensor.is_quantized
        if tensor.layout != torch.strided or (str(key).endswith(".weight") and not is_weight):
            raise UnsupportedAttentionError(
                f"{name}: tensor {shown(key)} is sparse or of type {tensor.dtype}: quantised checkpoints are not read; "
                "give the checkpoint that this one was made from"
            )
    if path.suffix != ".safetensors":
        # Safetensors refuses tensors that share memory, such as tied weights, so each tensor gets its own.
        state = {str(key): tensor.detach().clone().contiguous() for key, tensor in state.items()}
    return state, metadata


def _is_fit(key: str, value: Any) -> bool:
    """Whether a value has the form that a key requires."""
    if key in _COUNTS:
        return type(value) is int and value > 0
    texts = value if isinstance(value, list) and key in _LISTS else [value]
    are_texts = all(isinstance(x, str) and 0 < len(x) <= 500 and x.isprintable() for x in texts)
    return are_texts and isinstance(value, list) == (key in _LISTS)


def provenance(checked: CheckedSource) -> dict[str, Any]:
    """Where a checkpoint comes from: the contents of `efficient_attention.json` for its conversion.

    The base model is the one that was converted first; licence, tags, task and languages are those of its card. Values
    of the card that are not plain text are left out, and a card that cannot be read is refused. `max_length` is the
    number of tokens that a conversion was told to take, `trained_positions` those that the model took before it,
    `install` what pip takes to install this package, and `hf_efficient_attn` the version of this package.
    """
    origin = read_origin(checked.folder / FILE, checked.inside)
    if not os.path.lexists(checked.folder / FILE):
        path, card = checked.folder / "README.md", dict[str, Any]()
        if os.path.lexists(path):
            regular_file(path, checked.inside, _MAX_CARD)
            with refusing("README.md: its front matter cannot be read"):
                card = metadata_load(path) or {}
        language = card.get("language")
        card["language"] = [language] if isinstance(language, str) else language
        origin |= {key: card[key] for key in _FROM_CARD if _is_fit(key, card.get(key))}
        origin["base_model"] = checked.hub_id
    return {**origin, VERSION: __version__}


def read_origin(path: pathlib.Path, inside: pathlib.Path) -> dict[str, Any]:
    """The contents of an `efficient_attention.json`, with None for keys that it does not have, also without the file.

    A file that leads out of the folder `inside`, or has a value of another form, is refused.
    """
    values = read_object(path, inside) if os.path.lexists(path) else {}
    origin: dict[str, Any] = {key: values.get(key) for key in _KEYS}
    for key, value in origin.items():
        if value is not None and not _is_fit(key, value):
            raise UnsupportedAttentionError(f"{FILE}: {key} cannot be {shown(value)}: correct or delete it")
    if origin["base_model"] is not None:
        check_hub_id(origin["base_model"], f"{FILE}: base_model")
    if origin[INSTALL] is not None:
        check_install(origin[INSTALL], f"{FILE}: {INSTALL}")
    return origin


def check_hub_id(name: str, what: str) -> None:
    """Check that a name can be the id of a model on the hub; `what` begins the message if it cannot."""
    with refusing(f"{what} {name!r} cannot be the id of a model"):
        validate_repo_id(name)


def check_install(text: str, where: str = "--install") -> None:
    """Refuse what a card cannot tell its readers to install, such as a path; the message begins with `where`."""
    if not _URL.fullmatch(text) and not _PINNED.fullmatch(text):
        raise UnsupportedAttentionError(
            f"{where}: give what others can install, a URL (https://... or git+https://...) without a password or "
            f"token, or a version ({THIS_VERSION}): a name alone could be another package"
        )
