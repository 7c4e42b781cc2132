"""Which tensors of a checkpoint a conversion changes, and the weight files of the result."""

import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_efficient_attn.checkpoint.files import refusing
from hf_efficient_attn.checkpoint.loading import quiet
from hf_efficient_attn.checkpoint.source import INDEX, PICKLED, SINGLE, Weights
from hf_efficient_attn.io.json import write_json

_LEARNED = "learned_parameters"


class Changes(NamedTuple):
    """Which tensors of the source are copied, dropped or added, by their names in files.

    `kept` is the number of tensors that are copied, `new` has tensors that are not in the source or are changed, and
    `dropped` the names of the source's tensors that are not copied.
    """

    kept: int
    new: dict[str, Tensor]
    dropped: list[str]


def find_changes(model: PreTrainedModel, weights: Weights, missing: Sequence[str], scratch: pathlib.Path) -> Changes:
    """Compare a converted model with the weights of its source.

    `missing` are the parameters that the source does not contain either, `scratch` is a folder for temporary files.
    """
    stored, prefix, new = weights.tensors, model.base_model_prefix, dict[str, Tensor]()
    saved, present = _saved_names(model, scratch), set[str]()
    # A parameter that is shared by two modules can be stored under both names. Old checkpoints contain position ids.
    for name, tensor in (*model.named_buffers(), *model.named_parameters(remove_duplicate=False)):
        key, value = _stored_name(saved.get(name, name), stored, prefix), tensor.detach().cpu()
        if key not in stored and name in saved and name not in missing:
            new[key] = value
        elif key in stored and not torch.equal(stored[key].to(value.dtype), value):
            new[key] = value.to(stored[key].dtype, copy=True)  # shared parameters need memory of their own
        present.add(key)
    dropped = sorted(name for name in stored if _LEARNED in name.split(".") and name not in present)
    return Changes(sum(name not in new and name not in dropped for name in stored), new, dropped)


def _saved_names(model: PreTrainedModel, scratch: pathlib.Path) -> dict[str, str]:
    """The names under which Transformers saves the parameters, found by saving a different number for each."""
    folder, names = scratch / "names", [name for name, _ in model.named_parameters()]
    with quiet(), refusing("names of the tensors", OSError, SafetensorError):
        numbered = {name: torch.full((1,), float(number), dtype=torch.float64) for number, name in enumerate(names)}
        model.save_pretrained(folder, state_dict=numbered)
        found = {names[int(tensor)]: name for name, tensor in load_file(folder / SINGLE).items()}
    shutil.rmtree(folder)
    return found


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
    weight_map: dict[str, str] = {}
    sizes = {"total_parameters": 0, "total_size": 0}
    added, last = changes.new.keys() - weights.tensors.keys(), list(weights.files)[-1]
    for path, stored in tqdm(weights.files.items(), unit="file", desc="writing", disable=None, leave=False):
        names = [*(stored.keys() - changes.dropped), *(added if path == last else ())]
        tensors = {name: (changes.new[name] if name in changes.new else stored[name]).contiguous() for name in names}
        target = SINGLE if path.name == PICKLED else path.name
        # Transformers requires the format.
        save_file(tensors, draft / target, metadata={**weights.metadata[path], "format": "pt"})
        shutil.copymode(draft / "config.json", draft / target)  # save_file makes it readable for its owner only
        weight_map |= dict.fromkeys(tensors, target)
        sizes["total_parameters"] += sum(tensor.numel() for tensor in tensors.values())
        sizes["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
    if weights.is_sharded:
        write_json(draft / INDEX, {"metadata": sizes, "weight_map": dict(sorted(weight_map.items()))})
