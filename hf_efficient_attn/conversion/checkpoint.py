"""A checkpoint converted into another: its tensors bit for bit, beside them what the method learns.

Tensors go from file to file without passing through a model, each in its own type, so that none is lost that the
model's class does not know. The model is built to learn from it what changes: the parameters that a method learns, the
position table that grows. What was written is opened and loaded again before it takes its place.
"""

import json
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from hf_efficient_attn.checkpoint import CheckedSource, open_checkpoint
from hf_efficient_attn.checkpoint.loading import load_with_report, quiet
from hf_efficient_attn.checkpoint.provenance import check_hub_id, provenance
from hf_efficient_attn.checkpoint.settings import learned_numbers
from hf_efficient_attn.checkpoint.staging import check_output, staged
from hf_efficient_attn.checkpoint.values import refusing, short
from hf_efficient_attn.checkpoint.weights import INDEX, output_name
from hf_efficient_attn.conversion.convert import convert
from hf_efficient_attn.conversion.positions import extend_positions
from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_name
from hf_efficient_attn.integration.layers import Layer, in_order
from hf_efficient_attn.integration.settings import EXACT_IMPLEMENTATIONS, EfficientAttentionConfig
from hf_efficient_attn.methods import MethodConfig, available_methods, make_config
from hf_efficient_attn.models import auto_class
from hf_efficient_attn.version import __version__

_LEARNED = "learned_parameters"


def convert_checkpoint(
    source: "str | os.PathLike",
    output: "str | os.PathLike",
    method: "str | EfficientAttentionConfig",
    *,
    hyperparameters: Mapping[str, Any] | None = None,
    layers: Sequence[int] | None = None,
    max_length: int | None = None,
    base_model: str | None = None,
    force: bool = False,
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """Write a folder that `from_pretrained` loads with a method of this package, wherever the package is imported.

    The tensors are those of the source, bit for bit, in as many files; the files of tokenizer, processor and
    sentence-transformers are copied as they are; a model card is written. The folder appears when all is done.

    Args:
        source: a folder or hub id, as `open_checkpoint` takes it.
        output: the folder to be written. It must not be there, or be empty.
        method: a name from `available_methods()`; or "sdpa": exact attention, without what methods had learned; or what
            stands in which layer, such as `hea.calibrate` returns.
        hyperparameters: replace the method's defaults, or what a checkpoint of the same method has.
        layers: indices of the layers to convert, all others being exact; None for all.
        max_length: tokens that the model shall take, if more than now: `extend_positions`, by tiling.
        base_model: hub id that the card names as the origin, where a local folder's own files do not say it.
        force: replace what is at `output`, once all is done.
        allow_pickle: as in `open_checkpoint`.

    Returns:
        what was done, as plain values: source, output, architecture, method, settings, layers (indices in which the
        method stands), positions, parameters {"kept", "new", "dropped"} as names of tensors, files with their sizes in
        bytes, left_out {file: why}, notes, and load, the lines that load it.

    Raises:
        UnsupportedAttentionError: before anything is written, if the source, the method, a hyperparameter, a layer or
            the output cannot be used.
        OSError: reading or writing failed; nothing is left of it.
    """
    from hf_efficient_attn.hub.card import write_card

    settings = method if isinstance(method, EfficientAttentionConfig) else None
    if settings is not None:
        if hyperparameters or layers is not None:
            raise UnsupportedAttentionError(
                "the configuration says already what stands in which layer: give hyperparameters and layers inside it"
            )
        method = settings.method
    else:
        _check_request(method, hyperparameters, layers)
    checked = open_checkpoint(source, allow_pickle=allow_pickle)
    place = check_output(output, checked.folder, force)
    model, notes, unused = load_with_report(checked)
    origin = provenance(checked, __version__)
    if base_model is not None:
        origin |= {"base_model": check_hub_id(base_model), "base_name": base_model.rpartition("/")[2]}
    if max_length is not None:
        origin["max_length"] = max_length
    before = _tensors_of(model)
    _switch(model, settings or method, hyperparameters or {}, layers, max_length)
    with staged(place) as draft:
        changes = _Changes(model, before, checked, draft)
        _write_config(draft, model, checked)
        _write_weights(draft, checked, changes)
        for name in checked.companions:
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checked.folder / name, draft / name)
        if max_length is not None:
            notes += _lengthen_tokenizer(draft, max_length)
        text = json.dumps(origin, indent=2, ensure_ascii=False) + "\n"
        (draft / "efficient_attention.json").write_text(text, encoding="utf-8")
        _check_result(draft, changes, unused)
        write_card(draft)
        files = [path for path in sorted(draft.rglob("*")) if path.is_file()]
        sizes = [{"name": path.relative_to(draft).as_posix(), "bytes": path.stat().st_size} for path in files]
    elsewhere = [key for key in checked.dropped_keys if not key.startswith("_")]
    if elsewhere:
        notes.append(f"config.json: left out {', '.join(elsewhere)}; code and files elsewhere are not used")
    if unused:
        notes.append(f"tensors that a {type(model).__name__} does not use, kept as they are: {', '.join(unused[:8])}")
    if changes.dropped and method not in EXACT_IMPLEMENTATIONS:
        notes.append(f"{len(changes.dropped)} learned parameters of another method or size are dropped")
    return {
        "source": os.fspath(source),
        "output": str(place),
        "architecture": type(model).__name__,
        "method": method,
        "settings": dict(model.config.efficient_attention or {}),
        "layers": _layers_of(model),
        "positions": getattr(model.config, "max_position_embeddings", None),
        "parameters": {"kept": changes.kept, "new": sorted(changes.new), "dropped": changes.dropped},
        "files": sizes,
        "left_out": dict(checked.left_out),
        "notes": notes,
        "load": _how_to_load(model, os.fspath(output)),
    }


def _check_request(method: str, hyperparameters: Mapping[str, Any] | None, layers: Sequence[int] | None) -> None:
    """What can be told to be wrong before a file is opened."""
    if method in EXACT_IMPLEMENTATIONS:
        if hyperparameters or layers is not None:
            raise UnsupportedAttentionError(
                f"{method} is exact attention in all layers and takes no hyperparameters or layers; to keep some "
                "layers exact name the others, with a method"
            )
        return
    if method not in available_methods():
        raise UnsupportedAttentionError(
            unknown_name("attention method", method, [*available_methods(), *EXACT_IMPLEMENTATIONS])
        )
    make_config(method, **(hyperparameters or {}))


def _switch(
    model: nn.Module,
    method: "str | EfficientAttentionConfig",
    hyperparameters: Mapping[str, Any],
    layers,
    max_length: int | None,
) -> None:
    """`extend_positions` and `convert`, with what goes wrong for want of memory as a refusal."""
    stored = model.config.efficient_attention
    # Its parameters were learned with its hyperparameters, and stay with them.
    present = [entry.config for entry in stored.settings.entries if entry.config.method == method] if stored else []
    name = method if isinstance(method, str) else method.method
    with quiet(), refusing(f"{name} in a {type(model).__name__}", OSError, UnsupportedAttentionError):
        if max_length is not None:
            if stored and not present:
                convert(model, "sdpa")  # tables of the present length go anyway
            extend_positions(model, max_length)
        if isinstance(method, EfficientAttentionConfig):
            for entry in method.entries:
                _check_size(model, entry.config)
            convert(model, method)
            return
        chosen = present[0] if len(present) == 1 else method
        if method not in EXACT_IMPLEMENTATIONS:
            _check_size(model, make_config(chosen, **hyperparameters))
        convert(model, chosen, layers=layers, **hyperparameters)


def _check_size(model: nn.Module, method: MethodConfig) -> None:
    """A slip in a hyperparameter shall not fill the memory."""
    length = getattr(model.config, "max_position_embeddings", None) or 1
    there = sum(parameter.numel() for parameter in model.parameters())
    learned = learned_numbers(method, length)
    if learned > max(2 * there, 2**24):
        raise UnsupportedAttentionError(
            f"{method.method}: with these hyperparameters each layer would learn {learned} numbers, and the "
            f"whole model has {there}"
        )


class _Changes:
    """What of the source's tensors stays, goes and comes, under the names that they have in files.

    Attributes:
        kept: number of tensors that are copied.
        new: name -> tensor, of those that are not in the source or are changed.
        dropped: names of the source's tensors that are not copied.
    """

    def __init__(
        self, model: nn.Module, before: Mapping[str, torch.Tensor], checked: CheckedSource, scratch: pathlib.Path
    ) -> None:
        shapes, after = checked.weights.shapes, _tensors_of(model)
        parameters = dict(model.named_parameters())
        fresh = [name for name in parameters if before.get(name) is not parameters[name]]
        learned = [name for name in parameters if _LEARNED in name.split(".")]
        saved = _as_saved(model, list(dict.fromkeys(fresh + learned)), scratch)
        names = {name: _stored_name(form, shapes, model.base_model_prefix) for name, form in saved.items()}
        self.new = {names[name]: parameters[name].detach() for name in fresh}
        for name, _ in model.named_buffers():
            # Old checkpoints hold position numbers, which grow with the table.
            stored = _stored_name(name, shapes, model.base_model_prefix)
            if stored in shapes and after[name].shape != before[name].shape:
                self.new[stored] = after[name]
        there = {names[name] for name in learned}
        self.dropped = sorted(name for name in shapes if _LEARNED in name.split(".") and name not in there)
        self.kept = sum(name not in self.new and name not in self.dropped for name in shapes)


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, under each of their names, and buffers."""
    return {**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False))}


def _as_saved(model: nn.Module, names: Sequence[str], scratch: pathlib.Path) -> dict[str, str]:
    """The names under which Transformers saves parameters, asked for with a number of its own for each."""
    from safetensors.torch import load_file

    if not names:
        return {}
    numbered = {name: torch.full((1,), float(number), dtype=torch.float64) for number, name in enumerate(names)}
    folder = scratch / "names"
    with quiet(), refusing("names of the new tensors", OSError):
        model.save_pretrained(folder, state_dict=dict(numbered))
        found = {names[int(tensor)]: name for name, tensor in load_file(folder / "model.safetensors").items()}
    shutil.rmtree(folder)
    return {name: found[name] for name in names}


def _stored_name(name: str, shapes: Mapping[str, Any], prefix: str) -> str:
    """The name in the source's own form: some checkpoints have, or lack, the prefix of the model inside."""
    forms = [name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")] if prefix else [name]
    for form in forms:
        if form in shapes:
            return form
    for form in forms:
        module = form.partition(f".{_LEARNED}.")[0] + "."
        if any(other.startswith(module) for other in shapes):
            return form
    return name


def _write_weights(draft: pathlib.Path, checked: CheckedSource, changes: _Changes) -> None:
    """The same files with the same tensors, but for what changes; a new tensor goes where its neighbours are."""
    from safetensors.torch import save_file

    weights = checked.weights
    homes = {name: _home(name, weights.files) for name in changes.new}
    places: dict[str, str] = {}
    size = numbers = 0
    for path in tqdm(weights.files, unit="file", desc="writing", disable=None, leave=False):
        tensors = {name: value for name, value in weights.tensors(path).items() if name not in changes.dropped}
        tensors |= {name: changes.new[name].contiguous() for name, home in homes.items() if home == path}
        target = output_name(path, weights)
        save_file(tensors, draft / target, metadata=weights.metadata(path))
        shutil.copymode(draft / "config.json", draft / target)  # the library writes files for their owner alone
        places |= dict.fromkeys(tensors, target)
        size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        numbers += sum(tensor.numel() for tensor in tensors.values())
    if weights.sharded:
        metadata = {**weights.index_metadata, "total_size": size}
        if "total_parameters" in metadata:
            metadata["total_parameters"] = numbers
        index = {"metadata": metadata, "weight_map": dict(sorted(places.items()))}
        (draft / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _home(name: str, files: Mapping[pathlib.Path, Mapping]) -> pathlib.Path:
    """The file whose tensors have the longest beginning of the name in common, by whole parts."""
    parts = name.split(".")

    def common(path: pathlib.Path) -> int:
        return max((_common(parts, other.split(".")) for other in files[path]), default=0)

    return max(files, key=common)


def _common(first: list[str], second: list[str]) -> int:
    if first == second:
        return len(first) + 1
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _write_config(draft: pathlib.Path, model, checked: CheckedSource) -> None:
    """As `save_pretrained` writes it, the classes named as they were."""
    config = model.config
    config.architectures = list(checked.config.get("architectures") or [type(model).__name__])
    with quiet(), refusing("config.json of the result", OSError):
        config.save_pretrained(draft)


def _check_result(draft: pathlib.Path, changes: _Changes, unused: list[str]) -> None:
    """Open and load what was written, as anybody will."""
    sentence = (
        "what was written does not load again, so that this checkpoint cannot be converted file by file; convert the "
        "model in Python instead, with hea.convert and save_pretrained"
    )
    with refusing(sentence, OSError):
        written = open_checkpoint(draft)
        shapes = written.weights.shapes
        lost = sorted(set(load_with_report(written)[2]) - set(unused))
        lost += [name for name in changes.new if name not in shapes]
        if lost or len(shapes) != changes.kept + len(changes.new):
            raise UnsupportedAttentionError(f"it does not find {short(lost[0] if lost else 'all tensors')}")


def _layers_of(model: nn.Module) -> list[Layer]:
    """The layers in which a method stands, in order."""
    from hf_efficient_attn.integration.configs import method_of, settings_of
    from hf_efficient_attn.integration.models import attention_modules

    found = set()
    for _, place, config, _ in attention_modules(model):
        settings = settings_of(config, name) if (name := method_of(config)) else None
        if settings is not None and place.layer is not None and settings.for_layer(place.layer) is not None:
            found.add(place.layer)
    return in_order(found)


def _lengthen_tokenizer(draft: pathlib.Path, max_length: int) -> list[str]:
    """Let the tokenizer cut at the new length rather than at the old one; returns what to tell the user."""
    path = draft / "tokenizer_config.json"
    if not path.is_file():
        return []
    said = json.loads(path.read_text(encoding="utf-8"))
    old = said.get("model_max_length")
    if type(old) is not int or old >= max_length:
        return []
    path.write_text(json.dumps({**said, "model_max_length": max_length}, indent=2, ensure_ascii=False) + "\n")
    return [f"tokenizer_config.json: model_max_length {max_length} in place of {old}; all else of the tokenizer stays"]


def _how_to_load(model: nn.Module, output: str) -> str:
    ours = auto_class(type(model).__name__)
    name = ours or type(model).__name__
    lines = ["import hf_efficient_attn"] if ours or model.config.efficient_attention else []
    return "\n".join([*lines, f"from transformers import {name}", f"model = {name}.from_pretrained({output!r})"])
