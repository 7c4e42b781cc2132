"""The tensors of a checkpoint: which file holds which. Their names and shapes are read before their values."""

import math
import os
import pathlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hf_efficient_attn.checkpoint.files import plain_name, read_object, refusing, regular_file, short, short_name
from hf_efficient_attn.errors import UnsupportedAttentionError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# Files that can run code when they are loaded.
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".dill", ".msgpack", ".h5")


@dataclass(frozen=True)
class Weights:
    """The weight files of a checkpoint.

    Attributes:
        files: {path: {tensor name: shape}}. One file if the checkpoint is not sharded.
        is_sharded: Whether there is an index.
        loaded: {path: {tensor name: tensor}} of PyTorch files, which have no header. Empty for safetensors.
    """

    files: Mapping[pathlib.Path, Mapping[str, tuple[int, ...]]]
    is_sharded: bool
    loaded: Mapping[pathlib.Path, Mapping[str, Tensor]]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{tensor name: shape} of all files."""
        return {name: shape for shapes in self.files.values() for name, shape in shapes.items()}

    @property
    def num_values(self) -> int:
        """The number of elements of all tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def read(self, path: pathlib.Path) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors of one file on the CPU, those of safetensors as views of the file, and its metadata."""
        if path in self.loaded:
            return dict(self.loaded[path]), {}
        with refusing(path.name), safe_open(path, "pt") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})

    def all_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of all files."""
        for path in self.files:
            yield from self.read(path)[0].items()


def find_weights(folder: pathlib.Path, inside: pathlib.Path, *, allow_pickle: bool) -> Weights:
    """Find the weight files of a checkpoint, and read the names and shapes of its tensors.

    Args:
        folder: The folder of the checkpoint.
        inside: Links to files inside this folder are followed.
        allow_pickle: Whether to read `pytorch_model.bin` if there are no safetensors.

    Raises:
        UnsupportedAttentionError: There are no weights, only pickles while `allow_pickle` is False, or a file is
            damaged; or an index names files in other folders.
    """
    for single, index in [(SINGLE, INDEX), (PICKLED, PICKLED_INDEX)][: 1 + allow_pickle]:
        is_sharded = not os.path.lexists(folder / single)
        if is_sharded and not os.path.lexists(folder / index):
            continue
        paths = _files_of(read_object(folder / index, inside), folder, index) if is_sharded else [folder / single]
        if single == PICKLED:
            loaded = {path: _load_pickle(path, inside) for path in paths}
            shapes = {path: {key: tuple(x.shape) for key, x in tensors.items()} for path, tensors in loaded.items()}
            return Weights(shapes, is_sharded, loaded)
        return Weights({path: _shapes_of(path, inside) for path in paths}, is_sharded, {})
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


def _shapes_of(path: pathlib.Path, inside: pathlib.Path) -> dict[str, tuple[int, ...]]:
    """{tensor name: shape} of a safetensors file, from its header, which the library checks."""
    regular_file(path, inside)
    shapes = {}
    with refusing(f"{short_name(path, inside)} is damaged", UnsupportedAttentionError), safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 (a safe_open is not a dict)
            part = file.get_slice(name)
            _check_type(name, part.get_dtype() in ("F64", "F32", "F16", "BF16"), part.get_dtype())
            shapes[name] = tuple(part.get_shape())
    return shapes


def _load_pickle(path: pathlib.Path, inside: pathlib.Path) -> dict[str, Tensor]:
    """The tensors of a PyTorch file, read with weights_only=True, so that no code in the file runs."""
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
        _check_type(key, tensor.is_floating_point() and tensor.element_size() > 1, tensor.dtype)
    # Safetensors refuses tensors that share memory, such as tied weights, so each tensor gets its own.
    return {str(key): tensor.detach().clone().contiguous() for key, tensor in state.items()}


def _check_type(name: str, supported: bool, dtype: object) -> None:
    """Refuse weights of types that need other values to be understood."""
    if str(name).endswith(".weight") and not supported:
        raise UnsupportedAttentionError(
            f"tensor {short(name)} is of type {dtype}: quantised checkpoints are not read; give the checkpoint that "
            "this one was made from"
        )
