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

from hf_efficient_attn.checkpoint.files import plain_name, read_object, refusing, regular_file, short_name
from hf_efficient_attn.errors import UnsupportedAttentionError, shown

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
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


def find_weights(folder: pathlib.Path, inside: pathlib.Path, *, allow_pickle: bool) -> Weights:
    """Find the weight files of a checkpoint, and open them.

    Links inside the folder `inside` are followed. `allow_pickle` allows `pytorch_model.bin` without safetensors.

    Raises:
        UnsupportedAttentionError: There are no weights, only pickles while `allow_pickle` is False, or a file is
            damaged; or an index names files in other folders.
    """
    is_sharded, paths = False, [folder / SINGLE]
    if not os.path.lexists(folder / SINGLE) and os.path.lexists(folder / INDEX):
        is_sharded, paths = True, _files_of(read_object(folder / INDEX, inside), folder)
    elif allow_pickle and not os.path.lexists(folder / SINGLE) and os.path.lexists(folder / PICKLED):
        paths = [folder / PICKLED]
    if os.path.lexists(paths[0]) or is_sharded:
        read = {path: _read(path, inside) for path in paths}
        metadata = {path: about for path, (_, about) in read.items()}
        return Weights({path: tensors for path, (tensors, _) in read.items()}, metadata, is_sharded)
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


def _files_of(listed: Mapping[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """The weight files that an index names, in order."""
    weight_map = listed.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnsupportedAttentionError(f"{INDEX} has no weight_map, which says which file holds which tensor")
    names = {plain_name(name, f"{INDEX}: weight_map") for name in weight_map.values()}
    for name in names:
        if not name.endswith(".safetensors"):
            raise UnsupportedAttentionError(f"{INDEX}: weight_map names {shown(name)}, which is no safetensors file")
    return [folder / name for name in sorted(names)]


def _read(path: pathlib.Path, inside: pathlib.Path) -> tuple[dict[str, Tensor], dict[str, str]]:
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
