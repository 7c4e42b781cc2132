"""The tensors of a checkpoint: which file holds which, of what shape, checked from the headers before any is read."""

import math
import pathlib
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from hf_efficient_attn.checkpoint.values import (
    parse_json,
    plain_name,
    read_json,
    refusing,
    regular_file,
    short,
    short_name,
)
from hf_efficient_attn.errors import UnsupportedAttentionError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz", ".h5", ".msgpack")
LARGEST_INDEX = 32 * 2**20
LARGEST_HEADER = 32 * 2**20


@dataclass(frozen=True)
class Weights:
    """The weight files of a checkpoint and what their headers say.

    Attributes:
        files: path -> {tensor name: shape}, in the order of the index; one file for a checkpoint that is not sharded.
        sharded: whether there is an index.
        index_metadata: what the index says beside the map.
        pickled: whether these are PyTorch pickles, whose tensors were read with weights_only=True.
        loaded: the tensors of pickles, which have no header to read them by; empty for safetensors.
    """

    files: Mapping[pathlib.Path, Mapping[str, tuple[int, ...]]]
    sharded: bool
    index_metadata: Mapping
    pickled: bool
    loaded: Mapping[pathlib.Path, Mapping[str, torch.Tensor]]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor name -> shape, of all files."""
        return {name: shape for shapes in self.files.values() for name, shape in shapes.items()}

    @property
    def largest_dimension(self) -> int:
        """The greatest size of any tensor along any of its dimensions."""
        return max((size for shape in self.shapes.values() for size in shape), default=0)

    @property
    def numbers(self) -> int:
        """How many numbers all tensors hold together."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def tensors(self, path: pathlib.Path) -> dict[str, torch.Tensor]:
        """The tensors of one of the files, on the CPU; those of safetensors are views of the file, not read yet."""
        if path in self.loaded:
            return dict(self.loaded[path])
        from safetensors import safe_open

        with refusing(path.name), safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (a safe_open is no dict)

    def metadata(self, path: pathlib.Path) -> dict[str, str]:
        """The metadata of one of the files, with what Transformers asks for."""
        if path in self.loaded:
            return {"format": "pt"}
        from safetensors import safe_open

        with refusing(path.name), safe_open(path, "pt") as file:
            return {**(file.metadata() or {}), "format": "pt"}


def find_weights(folder: pathlib.Path, allow_pickle: bool, inside: pathlib.Path | None = None) -> Weights:
    """The weight files of a folder: safetensors where there are any, pickles only where asked for.

    Args:
        inside: the folder out of which no link may lead; `folder` itself by default.

    Raises:
        UnsupportedAttentionError: there are none, or only pickles and `allow_pickle` is False; a file that is not what
            it says; an index that names files elsewhere, or tensors that are not there.
    """
    inside = inside or folder
    for single, index, pickled in ((SINGLE, INDEX, False), (PICKLED, PICKLED_INDEX, True)):
        there = [name for name in (single, index) if (folder / name).is_symlink() or (folder / name).exists()]
        if not there:
            continue
        if pickled and not allow_pickle:
            break
        if single in there:
            return _read(folder, inside, [folder / single], None, pickled)
        listed = read_json(folder / index, inside, LARGEST_INDEX)
        return _read(folder, inside, _files_of(listed, folder, index), listed, pickled)
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in PICKLES)
    if not pickles:
        raise UnsupportedAttentionError(f"{short(str(folder))} holds no weights: neither {SINGLE} nor {INDEX} is there")
    hint = "--allow-pickle (allow_pickle=True) reads it with PyTorch's weights_only=True"
    if PICKLED not in pickles and not (folder / PICKLED_INDEX).exists():
        hint = f"load it with the program that wrote it and save it as {SINGLE}"
    raise UnsupportedAttentionError(
        f"{short(str(folder))} holds its weights as {short(pickles[0])}, not as safetensors; such a file can run any "
        f"code when it is loaded. If you trust where it comes from: {hint}"
    )


def _files_of(listed: dict, folder: pathlib.Path, index: str) -> list[pathlib.Path]:
    places = listed.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UnsupportedAttentionError(f"{index} has no weight_map, which says which file holds which tensor")
    if not isinstance(listed.get("metadata", {}), dict):
        raise UnsupportedAttentionError(f"{index}: metadata is no JSON object")
    suffix = ".bin" if index == PICKLED_INDEX else ".safetensors"
    names: dict[str, None] = {}
    for name in places.values():
        if not isinstance(name, str) or name not in names:
            names[plain_name(name, f"{index}: weight_map")] = None
            if not name.endswith(suffix):
                raise UnsupportedAttentionError(f"{index}: weight_map names {short(name)}, which is no {suffix} file")
    if len({name.lower() for name in names}) < len(names):
        raise UnsupportedAttentionError(f"{index}: weight_map names files that differ in nothing but capital letters")
    return [folder / name for name in sorted(names)]


def _read(
    folder: pathlib.Path, inside: pathlib.Path, paths: list[pathlib.Path], listed: dict | None, pickled: bool
) -> Weights:
    files, loaded = {}, {}
    for path in paths:
        if pickled:
            loaded[path] = load_pickle(path, inside)
            files[path] = {name: tuple(tensor.shape) for name, tensor in loaded[path].items()}
        else:
            files[path] = read_header(path, inside)
    owners: dict[str, pathlib.Path] = {}
    for path, shapes in files.items():
        for name in shapes:
            if name in owners:
                raise UnsupportedAttentionError(
                    f"tensor {short(name)} stands in two files, {owners[name].name} and {path.name}"
                )
            owners[name] = path
    if listed is not None:
        for name, file in listed["weight_map"].items():
            if owners.get(name) != folder / file:
                raise UnsupportedAttentionError(
                    f"{short(file)} lacks tensor {short(name)}, which the index says it has"
                )
        for name, path in owners.items():
            if name not in listed["weight_map"]:
                raise UnsupportedAttentionError(
                    f"{path.name} has tensor {short(name)}, of which the index says nothing"
                )
    if not owners:
        raise UnsupportedAttentionError(f"{paths[0].name} holds no tensors")
    return Weights(files, listed is not None, (listed or {}).get("metadata", {}), pickled, loaded)


def read_header(path: pathlib.Path, inside: pathlib.Path) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, from the header of a safetensors file.

    Raises:
        UnsupportedAttentionError: the file is cut off, or its header does not describe exactly what follows it.
    """
    what = short_name(path, inside)
    size = regular_file(path, inside, what).st_size
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if length < 2 or length > size - 8:
                raise UnsupportedAttentionError(f"{what} is cut off or no safetensors file: it has {size} bytes")
            if length > LARGEST_HEADER:
                raise UnsupportedAttentionError(f"{what} says that its header has {length} bytes, more than any has")
            raw = file.read(length)
    except OSError as error:
        raise UnsupportedAttentionError(f"{what} cannot be read: {error.strerror}") from error
    header = parse_json(raw, f"{what}: header")  # a key that stands there twice would otherwise pass
    if not isinstance(header, dict):
        raise UnsupportedAttentionError(f"{what}: header is no JSON object")
    _check_names(header, what)
    from safetensors import safe_open

    # The library checks types, shapes and offsets: every byte belongs to one tensor.
    with refusing(f"{what} is damaged"), safe_open(path, "pt") as opened:
        names = list(opened.keys())
        if set(names) != header.keys() - {"__metadata__"}:
            raise UnsupportedAttentionError("its header can be read in two ways")
        shapes = {}
        for name in names:
            part = opened.get_slice(name)
            _check_type(name, part.get_dtype(), ("F64", "F32", "F16", "BF16"))
            shapes[name] = tuple(part.get_shape())
        return shapes


def _check_type(name: str, kind: object, floating: tuple) -> None:
    """Weights of another type are quantised, and mean nothing without what they were quantised by."""
    if name.endswith(".weight") and kind not in floating:
        raise UnsupportedAttentionError(
            f"tensor {short(name)} is of type {short(str(kind))}: quantised checkpoints are not read, give the one "
            "that it was made from"
        )


def _check_names(names, what: str) -> None:
    for name in names:
        if not isinstance(name, str) or not 0 < len(name) <= 500 or not name.isprintable():
            raise UnsupportedAttentionError(f"{what} names a tensor {short(name)}")


def load_pickle(path: pathlib.Path, inside: pathlib.Path) -> dict[str, torch.Tensor]:
    """The tensors of a PyTorch file, read with weights_only=True: no code of the file runs.

    Raises:
        UnsupportedAttentionError: it holds anything but named tensors, or is of the format before PyTorch 1.6, or
            compressed, so that its size in memory cannot be told.
    """
    what = short_name(path, inside)
    size = regular_file(path, inside, what).st_size
    with refusing(f"{what} is damaged"):
        if not zipfile.is_zipfile(path):
            raise UnsupportedAttentionError("it is not in the format that PyTorch writes since version 1.6")
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > size:
                raise UnsupportedAttentionError("it is compressed, which PyTorch's files are not")
        state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UnsupportedAttentionError(f"{what} holds more than named tensors: save model.state_dict() alone")
    _check_names(state, what)
    for name, tensor in state.items():
        _check_type(name, tensor.dtype, (torch.float64, torch.float32, torch.float16, torch.bfloat16))
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise UnsupportedAttentionError(f"{what}: tensor {short(name)} is sparse or quantised, which is not read")
    # Tied tensors share their memory, and stand in safetensors once each.
    if sum(tensor.numel() * tensor.element_size() for tensor in state.values()) > 4 * size:
        raise UnsupportedAttentionError(f"{what}: its tensors are larger than the file")
    # Tensors of one memory would be written as one by nobody; and a view of a large one would keep it alive.
    return {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}


def output_name(path: pathlib.Path, weights: Weights) -> str:
    """The safetensors file that takes the place of a weight file."""
    if not weights.sharded:
        return SINGLE
    if not weights.pickled:
        return path.name
    return re.sub(r"^pytorch_model", "model", path.stem) + ".safetensors"


def all_tensors(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all files."""
    for path in weights.files:
        yield from weights.tensors(path).items()
