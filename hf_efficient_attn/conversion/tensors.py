"""Which tensors of a checkpoint a conversion changes, and the weight files of the result."""

import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_efficient_attn.checkpoint import CheckedSource
from hf_efficient_attn.checkpoint.files import refusing, writing
from hf_efficient_attn.checkpoint.loading import quiet
from hf_efficient_attn.checkpoint.weights import INDEX
from hf_efficient_attn.io.json import write_json

_LEARNED = "learned_parameters"


class Changes(NamedTuple):
    """Which tensors of the source are copied, dropped or added. All names are those used in files.

    Attributes:
        kept: Number of tensors that are copied.
        new: {name: tensor} of tensors that are not in the source or are changed.
        dropped: Names of the source's tensors that are not copied.
    """

    kept: int
    new: dict[str, Tensor]
    dropped: list[str]


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, under each of their names, and all buffers."""
    return {**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False))}


def find_changes(
    model: PreTrainedModel,
    before: Mapping[str, Tensor],
    checked: CheckedSource,
    scratch: pathlib.Path,
    *,
    is_trained: bool,
) -> Changes:
    """Compare a converted model with its source.

    Args:
        model: The model.
        before: Its `named_tensors` before the conversion.
        checked: The source.
        scratch: A folder for temporary files.
        is_trained: Whether the values of its parameters may have changed.
    """
    shapes, prefix = checked.weights.shapes, model.base_model_prefix
    parameters = dict(model.named_parameters())
    changed = [name for name in parameters if before.get(name) is not parameters[name]]
    learned = [name for name in parameters if _LEARNED in name.split(".")]
    wanted = parameters if is_trained else dict.fromkeys(changed + learned)
    saved = _saved_names(model, list(wanted), scratch)
    names = {name: _stored_name(saved_name, shapes, prefix) for name, saved_name in saved.items()}
    new = {names[name]: parameters[name].detach() for name in changed}
    stored = dict(checked.weights.all_tensors()) if is_trained else {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # A parameter that is shared by two modules can be stored under both names.
        key = names[name] if name in names else _stored_name(name, shapes, prefix)
        if key in stored and key not in new:
            value = parameter.detach().to("cpu", stored[key].dtype)
            if not torch.equal(value, stored[key]):
                new[key] = value.clone()
    for name, buffer in model.named_buffers():
        # Old checkpoints contain position ids, which grow with the position table.
        key = _stored_name(name, shapes, prefix)
        if key in shapes and buffer.shape != before[name].shape:
            new[key] = buffer
    kept_learned = {names[name] for name in learned}
    dropped = sorted(name for name in shapes if _LEARNED in name.split(".") and name not in kept_learned)
    return Changes(sum(name not in new and name not in dropped for name in shapes), new, dropped)


def _saved_names(model: PreTrainedModel, names: Sequence[str], scratch: pathlib.Path) -> dict[str, str]:
    """The names under which Transformers saves parameters, found by saving a different number for each."""
    if not names:
        return {}
    numbered = {name: torch.full((1,), float(number), dtype=torch.float64) for number, name in enumerate(names)}
    folder = scratch / "names"
    with quiet(), refusing("names of the new tensors", OSError), writing(folder):
        model.save_pretrained(folder, state_dict=dict(numbered))
        found = {names[int(tensor)]: name for name, tensor in load_file(folder / "model.safetensors").items()}
    shutil.rmtree(folder)
    return {name: found[name] for name in names}


def _stored_name(name: str, shapes: Mapping[str, Any], prefix: str) -> str:
    """The name of a tensor in the source's files, which may have or lack the prefix of the base model."""
    forms = [name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")] if prefix else [name]
    for form in forms:
        if form in shapes:
            return form
    for form in forms:
        module = form.partition(f".{_LEARNED}.")[0] + "."
        if any(other.startswith(module) for other in shapes):
            return form
    return name


def write_weights(draft: pathlib.Path, checked: CheckedSource, changes: Changes) -> None:
    """Write the source's tensors to the same files, and the tensors that it does not have to the last of them."""
    weights, last = checked.weights, list(checked.weights.files)[-1]
    weight_map: dict[str, str] = {}
    num_bytes = num_values = 0
    for path, shapes in tqdm(weights.files.items(), unit="file", desc="writing", disable=None, leave=False):
        tensors = {name: value for name, value in weights.tensors(path).items() if name not in changes.dropped}
        for name, value in changes.new.items():
            if name in shapes or (path == last and name not in weights.shapes):
                tensors[name] = value.contiguous()
        target = weights.output_name(path)
        with writing(draft / target):
            save_file(tensors, draft / target, metadata=weights.metadata(path))
        shutil.copymode(draft / "config.json", draft / target)  # save_file makes it readable for its owner only
        weight_map |= dict.fromkeys(tensors, target)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        num_values += sum(tensor.numel() for tensor in tensors.values())
    if weights.sharded:
        metadata = {**weights.index_metadata, "total_size": num_bytes}
        if "total_parameters" in metadata:
            metadata["total_parameters"] = num_values
        write_json(draft / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})
