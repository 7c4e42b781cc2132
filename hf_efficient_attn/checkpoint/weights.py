"""The tensors of a checkpoint: which file holds which. Their values are read when they are used."""

import os
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from hf_efficient_attn.checkpoint.files import plain_name, read_object, refusing, regular_file, short, short_name
from hf_efficient_attn.errors import UnsupportedAttentionError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# Files that can run code when they are loaded.
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".dill", ".msgpack", ".h5")


class Weights(NamedTuple):
    """The weight files of a checkpoint.

    Attributes:
        files: {path: {tensor name: tensor}}, in order. Tensors of safetensors are views of the file, on the CPU.
        metadata: {path: metadata of the file}.
        is_sharded: Whether there is an index. Otherwise there is one file.
    """

    files: Mapping[pathlib.Path, Mapping[str, Tensor]]
    metadata: Mapping[pathlib.Path, Mapping[str, str]]
    is_sharded: bool

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of all files."""
        return {name: tensor for tensors in self.files.values() for name, tensor in tensors.items()}

    def read_again(self) -> dict[str, Tensor]:
        """The tensors of all files for a model, whose training does not change the others."""
        found: dict[str, Tensor] = {}
        for path, tensors in self.files.items():
            is_mapped = path.suffix == ".safetensors"
            found |= load_file(path) if is_mapped else {name: tensor.clone() for name, tensor in tensors.items()}
        return found


def find_weights(folder: pathlib.Path, inside: pathlib.Path, *, allow_pickle: bool) -> Weights:
    """Find the weight files of a checkpoint, and open them.

    Links inside the folder `inside` are followed. `allow_pickle` allows `pytorch_model.bin` without safetensors.

    Raises:
        UnsupportedAttentionError: There are no weights, only pickles while `allow_pickle` is False, or a file is
            damaged; or an index names files in other folders.
    """
    for single, index in [(SINGLE, INDEX), (PICKLED, PICKLED_INDEX)][: 1 + allow_pickle]:
        is_sharded = not os.path.lexists(folder / single)
        if is_sharded and not os.path.lexists(folder / index):
            continue
        paths = _files_of(read_object(folder / index, inside), folder, index) if is_sharded else [folder / single]
        read = _load_pickle if single == PICKLED else _open_safetensors
        loaded = {path: read(path, inside) for path in paths}
        tensors = {path: found for path, (found, _) in loaded.items()}
        return Weights(tensors, {path: about for path, (_, about) in loaded.items()}, is_sharded)
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in PICKLES)
    if not pickles:
        raise UnsupportedAttentionError(f"{short(str(folder))} holds no weights: neither {SINGLE} nor {INDEX} exists")
    hint = "--allow-pickle (allow_pickle=True) reads it with PyTorch's weights_only=True"
    if PICKLED not in pickles and not (folder / PICKLED_INDEX).exists():
        hint = f"load it with the program that wrote it and save it as {SINGLE}"
    raise UnsupportedAttentionError(
        f"{short(str(folder))} holds its weights as {short(pickles[0])}, not as safetensors; such a file can run any "
        f"code when it is loaded. If you trust its origin: {hint}"
    )


def _files_of(listed: Mapping[str, Any], folder: pathlib.Path, index: str) -> list[pathlib.Path]:
    """The weight files that an index names, in order."""
    weight_map = listed.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnsupportedAttentionError(f"{index} has no weight_map, which says which file holds which tensor")
    suffix = ".bin" if index == PICKLED_INDEX else ".safetensors"
    names = {plain_name(name, f"{index}: weight_map") for name in weight_map.values()}
    for name in names:
        if not name.endswith(suffix):
            raise UnsupportedAttentionError(f"{index}: weight_map names {short(name)}, which is not a {suffix} file")
    return [folder / name for name in sorted(names)]


def _open_safetensors(path: pathlib.Path, inside: pathlib.Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file, whose header the library checks."""
    regular_file(path, inside)
    with refusing(f"{short_name(path, inside)} is damaged"), safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (a safe_open is not a dict)
        metadata = dict(file.metadata() or {})
    _check_types(tensors)
    return tensors, metadata


def _load_pickle(path: pathlib.Path, inside: pathlib.Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a PyTorch file, read with weights_only=True, so that no code in the file runs; no metadata."""
    regular_file(path, inside)
    name = short_name(path, inside)
    with refusing(f"{name} is damaged"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the error says the same in one line
        state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UnsupportedAttentionError(f"{name} holds more than named tensors: save model.state_dict() alone")
    for key, tensor in state.items():
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise UnsupportedAttentionError(f"{name}: tensor {short(key)} is sparse or quantised, which is not read")
    _check_types(state)
    # Safetensors refuses tensors that share memory, such as tied weights, so each tensor gets its own.
    return {str(key): tensor.detach().clone().contiguous() for key, tensor in state.items()}, {}


def _check_types(tensors: Mapping[str, Tensor]) -> None:
    """Refuse weights of types that need other values to be understood."""
    for name, tensor in tensors.items():
        if str(name).endswith(".weight") and not (tensor.is_floating_point() and tensor.element_size() > 1):
            raise UnsupportedAttentionError(
                f"tensor {short(name)} is of type {tensor.dtype}: quantised checkpoints are not read; give the "
                "checkpoint that this one was made from"
            )
