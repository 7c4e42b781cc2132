"""Which tensors of a checkpoint a conversion changes, and the weight files of the result."""

import pathlib
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_efficient_attn.checkpoint.files import refusing
from hf_efficient_attn.checkpoint.loading import quiet
from hf_efficient_attn.checkpoint.weights import INDEX, SINGLE, Weights
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
    weights: Weights,
    scratch: pathlib.Path,
    *,
    is_trained: bool,
) -> Changes:
    """Compare a converted model with its source.

    Args:
        model: The model.
        before: Its `named_tensors` before the conversion.
        weights: The weights of the source.
        scratch: A folder for temporary files.
        is_trained: Whether the values of its parameters may have changed.
    """
    shapes, prefix = weights.shapes, model.base_model_prefix
    parameters = dict(model.named_parameters())
    changed = [name for name in parameters if before.get(name) is not parameters[name]]
    learned = [name for name in parameters if _LEARNED in name.split(".")]
    saved = _saved_names(model, list(parameters) if is_trained else [*dict.fromkeys(changed + learned)], scratch)

    def stored_name(name: str) -> str:
        return _stored_name(saved.get(name, name), shapes, prefix)

    new = {stored_name(name): parameters[name].detach() for name in changed}
    if is_trained:
        stored = dict(weights.all_tensors())
        # A parameter that is shared by two modules can be stored under both names.
        for name, parameter in model.named_parameters(remove_duplicate=False):
            key = stored_name(name)
            if key in stored and key not in new:
                value = parameter.detach().to("cpu", stored[key].dtype)
                if not torch.equal(value, stored[key]):
                    new[key] = value.clone()
    for name, buffer in model.named_buffers():
        # Old checkpoints contain position ids, which grow with the position table.
        if stored_name(name) in shapes and buffer.shape != before[name].shape:
            new[stored_name(name)] = buffer
    kept = {stored_name(name) for name in learned}
    dropped = sorted(name for name in shapes if _LEARNED in name.split(".") and name not in kept)
    return Changes(sum(name not in new and name not in dropped for name in shapes), new, dropped)


def _saved_names(model: PreTrainedModel, names: Sequence[str], scratch: pathlib.Path) -> dict[str, str]:
    """The names under which Transformers saves parameters, found by saving a different number for each."""
    if not names:
        return {}
    folder, passing = scratch / "names", (OSError, SafetensorError)
    with quiet(), refusing("names of the new tensors", *passing):
        numbered = {name: torch.full((1,), float(number), dtype=torch.float64) for number, name in enumerate(names)}
        model.save_pretrained(folder, state_dict=numbered)
        found = {names[int(tensor)]: name for name, tensor in load_file(folder / SINGLE).items()}
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


def write_weights(draft: pathlib.Path, weights: Weights, changes: Changes) -> None:
    """Write the source's tensors to the same files, and the tensors that it does not have to the last of them."""
    last = list(weights.files)[-1]
    weight_map: dict[str, str] = {}
    num_bytes = num_values = 0
    for path, shapes in tqdm(weights.files.items(), unit="file", desc="writing", disable=None, leave=False):
        tensors, metadata = weights.read(path)
        tensors = {name: value for name, value in tensors.items() if name not in changes.dropped}
        for name, value in changes.new.items():
            if name in shapes or (path == last and name not in weights.shapes):
                tensors[name] = value.contiguous()
        target = re.sub(r"^pytorch_model", "model", path.stem) + ".safetensors"
        save_file(tensors, draft / target, metadata={**metadata, "format": "pt"})  # Transformers requires the format
        shutil.copymode(draft / "config.json", draft / target)  # save_file makes it readable for its owner only
        weight_map |= dict.fromkeys(tensors, target)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        num_values += sum(tensor.numel() for tensor in tensors.values())
    if weights.sharded:
        about = {**weights.index_metadata, "total_size": num_bytes}
        if "total_parameters" in about:
            about["total_parameters"] = num_values
        write_json(draft / INDEX, {"metadata": about, "weight_map": dict(sorted(weight_map.items()))})
