"""Pictures for classification and their class names, from folders, zip files and data sets.

A source is a folder or a zip file (`<split>/<class>/<file>`, `<class>/<file>`, or files whose names all begin with a
WordNet number, such as `n01440764_tench.jpg`), or a data set of the `datasets` library: a hub id, or a folder with
parquet or arrow files. `load` returns its splits as `Pictures`, which hold names and classes and open pictures on
demand.
"""

import io
import os
import pathlib
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import datasets
import PIL.Image
import torch
from datasets import Dataset
from PIL.Image import Image
from tqdm import tqdm

from hf_efficient_attn.errors import unknown_name
from hf_efficient_attn.io.reading import decode

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm")
TRAIN_SPLITS = ("train", "training")
# In order of preference.
EVAL_SPLITS = ("validation", "val", "valid", "dev", "eval", "test", "testing")
# ImageNet's name of a class.
WORDNET = re.compile(r"n\d{8}(?![0-9A-Za-z])")
_STORED = ("*.parquet", "*.arrow", "data/*.parquet", "*/*.parquet", "dataset_dict.json", "*/*.arrow")


@dataclass(frozen=True)
class Pictures:
    """Pictures of one split, which are read on demand.

    Attributes:
        where: the source and the split, for messages.
        keys: the key of each picture, for `reader`.
        classes: the class name of each picture.
        reader: returns the bytes of the file with a given key.
        order: all class names in the order of the source's numbered labels; None for files in folders.
    """

    where: str
    keys: tuple[str | int, ...]
    classes: tuple[str, ...]
    reader: Callable[[Any], bytes]
    order: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def name(self, index: int) -> str:
        """Name of the file, or the row of a data set."""
        key = self.keys[index]
        return f"row {key}" if isinstance(key, int) else key

    def open(self, index: int) -> Image:
        """Open a picture in RGB, rotated as its EXIF orientation says.

        Raises:
            ValueError: the picture cannot be read. The message names it.
        """
        try:
            return decode(self.reader(self.keys[index]))
        except Exception as error:
            raise ValueError(f"{self.where}: {self.name(index)} cannot be read: {_reason(error)}") from error

    def select(self, indices: Sequence[int]) -> "Pictures":
        """The pictures at the given indices, in their order."""
        keys, classes = (tuple(column[i] for i in indices) for column in (self.keys, self.classes))
        return replace(self, keys=keys, classes=classes)

    def class_names(self) -> list[str]:
        """All class names in the source's own order, or sorted, with numbers in numeric order."""
        return list(self.order) if self.order else sorted_classes(self.classes)


def sorted_classes(names: Iterable[str]) -> list[str]:
    """Different names, sorted; numbers in numeric order, so that 10 follows 9."""
    names = set(names)
    return sorted(names, key=lambda name: (int(name), name)) if all(n.isdecimal() for n in names) else sorted(names)


def load(
    source: str, *, config: str | None = None, image_column: str | None = None, label_column: str | None = None
) -> dict[str, Pictures]:
    """Load the splits of a source by name. A source without splits has a single one named "".

    Args:
        source: a folder, a zip file, or a hub id.
        config: configuration of a hub data set.
        image_column: column of the pictures of a data set. Default: the only one of its type.
        label_column: column of the labels of a data set. Default: the only one of its type.

    Raises:
        ValueError: the source does not exist, holds no pictures, has a class without pictures, or does not show the
            classes of its pictures.
    """
    path = pathlib.Path(source).expanduser()
    if path.is_dir() and any(any(path.glob(pattern)) for pattern in _STORED):
        return _load_data_set(source, config, image_column, label_column)
    if config or image_column or label_column:
        if path.exists():
            raise ValueError(
                f"{source} is not a data set of the datasets library: it has no configuration and no columns"
            )
        return _load_data_set(source, config, image_column, label_column)
    if path.is_dir():
        return _load_folder(path)
    if path.is_file():
        if not zipfile.is_zipfile(path):
            raise ValueError(f"{source} is neither a zip file nor a folder: unpack it or convert it to zip")
        return _load_zip(path)
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source) or source.endswith(".zip"):
        raise ValueError(f"no such folder or zip file: {source}")
    return _load_data_set(source, config, image_column, label_column)


class _FolderReader(NamedTuple):
    """Reads files of a folder."""

    root: pathlib.Path

    def __call__(self, key: str) -> bytes:
        return (self.root / key).read_bytes()


class _ZipReader:
    """Reads members of a zip file. Every process opens the file itself, since forks would share the file position."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path, self._open = path, (0, None)

    def __call__(self, key: str) -> bytes:
        process, archive = self._open
        if process != os.getpid():
            archive = zipfile.ZipFile(self.path)
            self._open = (os.getpid(), archive)
        return archive.read(key)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_open": (0, None)}


class _ColumnReader:
    """Reads the picture column of a data set that does not decode its pictures."""

    def __init__(self, data: Dataset, column: str) -> None:
        self.data, self.column = data, column

    def __call__(self, key: int) -> bytes:
        value = self.data[key][self.column]
        if value is None:
            raise ValueError("the row has no picture")
        return value["bytes"] if value["bytes"] is not None else pathlib.Path(value["path"]).read_bytes()


def _load_folder(root: pathlib.Path) -> dict[str, Pictures]:
    files, folders = [], []
    for parent, subfolders, names in os.walk(root, followlinks=True):
        relative = pathlib.Path(parent).relative_to(root)
        folders += [(relative / name).as_posix() for name in subfolders]
        files += [(relative / name).as_posix() for name in names]
    return _splits(str(root), files, folders, _FolderReader(root))


def _load_zip(path: pathlib.Path) -> dict[str, Pictures]:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    folders = [name.rstrip("/") for name in names if name.endswith("/")]
    return _splits(str(path), [name for name in names if not name.endswith("/")], folders, _ZipReader(path))


def _splits(
    where: str, files: Sequence[str], folders: Sequence[str], reader: Callable[[Any], bytes]
) -> dict[str, Pictures]:
    """The splits of a source, from the names of all its files and folders."""
    keys = sorted(key for key in files if key.lower().endswith(SUFFIXES) and not _is_hidden(key))
    if not keys:
        kinds = ", ".join(SUFFIXES)
        raise ValueError(f"{where} holds no picture ({kinds}) and no data set of the datasets library")
    found: dict[str, list[tuple[str, str]]] = {}
    root, layout = _layout(where, keys)
    for key, (split, name) in zip(keys, layout, strict=True):
        found.setdefault(split, []).append((key, name))
    _check_folders(where, root, keys, [folder for folder in folders if not _is_hidden(folder)], "" not in found)
    return {
        split: Pictures(f"{where}, {split}" if split else where, *map(tuple, zip(*pairs, strict=True)), reader)
        for split, pairs in found.items()
    }


def _is_hidden(key: str) -> bool:
    """Whether the file belongs to the system."""
    return any(part.startswith((".", "__MACOSX")) for part in key.split("/"))


def _layout(where: str, keys: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """The folder that holds everything ("" for the source itself), and the split and class of each file.

    Raises:
        ValueError: the layout is neither <split>/<class>/<file> nor <class>/<file>, and not all names begin with
        WordNet
            numbers.
    """
    parts, root = [key.split("/") for key in keys], []
    numbered = all(WORDNET.match(part[-1]) for part in parts)

    def is_split(name: str) -> bool:
        return name.lower() in TRAIN_SPLITS + EVAL_SPLITS

    # Ignore a single outer folder, unless it is a split or the only class.
    while all(len(p) > (1 if numbered else 2) and p[0] == parts[0][0] for p in parts) and not is_split(parts[0][0]):
        root.append(parts[0][0])
        parts = [p[1:] for p in parts]
    depths = {len(p) - 1 for p in parts}
    split_first = all(len(p) > 1 and is_split(p[0]) for p in parts)
    if depths == {0} and numbered:
        layout = [("", WORDNET.match(p[-1]).group()) for p in parts]
    elif depths == {1} and split_first and numbered:
        layout = [(p[0], WORDNET.match(p[-1]).group()) for p in parts]
    elif depths == {1}:
        layout = [("", p[0]) for p in parts]
    elif depths == {2} and split_first:
        layout = [(p[0], p[1]) for p in parts]
    else:
        examples = {len(p): "/".join(p) for p in reversed(parts)}
        raise ValueError(
            f"{where}: the class of a picture is unknown, as in {', '.join(sorted(examples.values())[:3])}. "
            "Arrange the files as <class>/<file> or <split>/<class>/<file>, with splits named "
            f"{', '.join(TRAIN_SPLITS[:1] + EVAL_SPLITS)}"
        )
    return "/".join(root), layout


def _check_folders(where: str, root: str, keys: Sequence[str], folders: Sequence[str], splits: bool) -> None:
    """Refuse a folder on the level of the classes that holds no picture."""
    full = {"/".join(key.split("/")[:n]) for key in keys for n in range(1, key.count("/") + 1)}
    depth = (root.count("/") + 1 if root else 0) + 1 + splits
    for folder in sorted(folders):
        parent = folder.rpartition("/")[0]
        if folder not in full and folder.count("/") + 1 == depth and (not parent or parent in full):
            raise ValueError(f"{where}: the class {folder} has no picture: add some to its folder, or remove it")


def _load_data_set(
    source: str, config: str | None, image_column: str | None, label_column: str | None
) -> dict[str, Pictures]:
    try:
        if pathlib.Path(source, "dataset_dict.json").is_file():
            splits = datasets.load_from_disk(source)
        else:
            splits = datasets.load_dataset(source, config)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{source} is neither a folder nor a zip file, and the datasets library refuses it: {error}"
        ) from error
    return {name: _rows(f"{source}, {name}", data, image_column, label_column) for name, data in splits.items()}


def _rows(where: str, data: Dataset, image_column: str | None, label_column: str | None) -> Pictures:
    """The pictures of one split of a data set."""
    features = data.features
    image = _column(
        where, features, image_column, "image", [n for n, f in features.items() if isinstance(f, datasets.Image)]
    )
    classes = [n for n, f in features.items() if isinstance(f, datasets.ClassLabel)]
    label = _column(where, features, label_column, "label", classes)
    if not len(data):
        raise ValueError(f"{where}: the split is empty")
    values, feature, order = data[label], features[label], None
    if isinstance(feature, datasets.ClassLabel):
        without = sum(value is None or value < 0 for value in values)
        order = tuple(feature.names)
        names = [] if without else [order[value] for value in values]
    else:
        without, names = sum(value is None for value in values), [str(value) for value in values]
    if without:
        raise ValueError(f"{where}: {without} of {len(values)} rows have no label in the column {label!r}")
    reader = _ColumnReader(data.cast_column(image, datasets.Image(decode=False)), image)
    return Pictures(where, tuple(range(len(names))), tuple(names), reader, order)


def _column(where: str, features: Mapping[str, Any], given: str | None, what: str, fitting: Sequence[str]) -> str:
    """The given column, or by default the one with the usual name or the only one of the type."""
    if given is not None:
        if given not in features:
            raise ValueError(f"{where}: {unknown_name(f'column for --{what}_column', given, features)}")
        return given
    if what in features:
        return what
    if len(fitting) != 1:
        raise ValueError(f"{where}: give the column of the {what} with --{what}_column, one of {', '.join(features)}")
    return fitting[0]


def pick(splits: Mapping[str, Pictures], given: str | None, usual: Sequence[str], where: str) -> Pictures | None:
    """The given split, or by default the first one with a usual name; None if there is none.

    Raises:
        ValueError: the given split does not exist.
    """
    if given is not None:
        if given not in splits:
            known = ", ".join(name for name in splits if name) or "none, since its pictures are not arranged in splits"
            raise ValueError(f"{where} has no split {given!r}. Its splits: {known}")
        return splits[given]
    named = {name.lower(): name for name in splits}
    return next((splits[named[name]] for name in usual if name in named), None)


def divide(pictures: Pictures, share: float, seed: int) -> tuple[Pictures, Pictures]:
    """Split the pictures at random into two parts, the second with about this share of the pictures of every class.

    Raises:
        ValueError: a part would be empty.
    """
    count = round(share * len(pictures))
    if not 0 < count < len(pictures):
        raise ValueError(f"{pictures.where}: a share of {share} of {len(pictures)} pictures leaves one part empty")
    order = _evenly(pictures, seed)
    return pictures.select(sorted(order[count:])), pictures.select(sorted(order[:count]))


def at_most(pictures: Pictures, count: int | None, seed: int) -> Pictures:
    """Choose `count` pictures at random, evenly from all classes; all pictures if `count` is None."""
    if count is None or count >= len(pictures):
        return pictures
    return pictures.select(sorted(_evenly(pictures, seed)[:count]))


def _evenly(pictures: Pictures, seed: int) -> list[int]:
    """A random order in which every prefix has about the same share of every class."""
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(seed)).tolist()
    sizes, counts, positions = Counter(pictures.classes), Counter(), {}
    for i in order:
        name = pictures.classes[i]
        counts[name] += 1
        # A single picture of a class is in the middle, so that `divide` puts most of them in the larger part.
        positions[i] = counts[name] / (sizes[name] + 1)
    return sorted(order, key=positions.__getitem__)


def readable(pictures: Pictures, *, skip: bool, threads: int = 1) -> tuple[Pictures, list[str]]:
    """Decode every picture once, to find broken ones before the training.

    JPEGs are decoded at an eighth of their size. This still reads every byte, in about a third of the time.

    Args:
        pictures: the pictures.
        skip: skip pictures that cannot be read.
        threads: number of threads.

    Returns:
        The readable pictures, and the names of the others with the reasons.

    Raises:
        ValueError: a picture cannot be read and `skip` is False, or none can be read.
    """
    with ThreadPoolExecutor(max(1, threads)) as pool:
        tries = pool.map(lambda i: _why_broken(pictures, i), range(len(pictures)))
        bar = tqdm(tries, f"reading {pictures.where}", len(pictures), disable=None, leave=False, unit="picture")
        reasons = list(bar)
    broken = [f"{pictures.name(i)} ({reason})" for i, reason in enumerate(reasons) if reason]
    if broken and (not skip or len(broken) == len(pictures)):
        listed = ", ".join(broken[:10]) + (f" and {len(broken) - 10} others" if len(broken) > 10 else "")
        advice = "" if skip else "; repair or remove them, or skip them with --skip_bad_images"
        raise ValueError(f"{pictures.where}: {len(broken)} of {len(pictures)} cannot be read: {listed}{advice}")
    return pictures.select([i for i, reason in enumerate(reasons) if not reason]), broken


def _why_broken(pictures: Pictures, index: int) -> str:
    """Why a picture cannot be decoded; empty if it can."""
    try:
        with PIL.Image.open(io.BytesIO(pictures.reader(pictures.keys[index]))) as picture:
            picture.draft("RGB", (1, 1))
            picture.load()
    except Exception as error:  # noqa: BLE001 (decoders raise all kinds of errors for broken files)
        return _reason(error)
    return ""


def _reason(error: Exception) -> str:
    """The message of an error in one line."""
    # Pillow's message contains little more than the address of a buffer.
    if type(error).__name__ == "UnidentifiedImageError":
        return "not a picture of a known format"
    return " ".join(str(error).split()) or type(error).__name__
