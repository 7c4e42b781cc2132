"""Pictures for classification and their class names, from folders, zip files and data sets.

A source is a folder or a zip file (`<split>/<class>/<file>`, `<class>/<file>`, or files whose names all begin with a
WordNet number, such as `n01440764_tench.jpg`), or a data set of the `datasets` library: a hub id, or a folder with
parquet files. `load` returns its splits as `Pictures`, which hold names and classes and open pictures on
demand.
"""

import functools
import os
import pathlib
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import datasets
import PIL.Image
import torch
from datasets import Dataset
from PIL.Image import Image

from hf_efficient_attn.io.reading import decode

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm")
TRAIN_SPLITS = ("train", "training")
# In order of preference.
EVAL_SPLITS = ("validation", "val", "valid", "dev", "eval", "test", "testing")
# ImageNet's name of a class.
WORDNET = re.compile(r"n\d{8}(?![0-9A-Za-z])")
_STORED = ("*.parquet", "*/*.parquet")


@dataclass(frozen=True)
class Pictures:
    """Pictures of one split, which are read on demand.

    The key of a picture is its file or its row, from which `reader` makes the bytes. `order` has all class names in the
    order of the source's numbered labels; it is None for files in folders.
    """

    where: str
    keys: tuple[str | int, ...]
    classes: tuple[str, ...]
    reader: Callable[[Any], bytes]
    order: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def open(self, index: int) -> Image:
        """Open a picture in RGB, rotated as its EXIF orientation says. Refuses one that cannot be read by its name."""
        try:
            return decode(self.reader(self.keys[index]))
        except Exception as error:
            # Pillow's message for other files contains little more than the address of a buffer.
            unknown = isinstance(error, PIL.UnidentifiedImageError)
            reason = "not a picture of a known format" if unknown else " ".join(str(error).split())
            raise ValueError(f"{self.where}: {self.keys[index]} cannot be read: {reason}") from error

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


def load(source: str) -> dict[str, Pictures]:
    """Load the splits of a folder, a zip file or a hub id by name. A source without splits has a single one named "".

    Refuses a source that does not exist, holds no pictures, or does not show the classes of its pictures.
    """
    path = pathlib.Path(source).expanduser()
    if path.is_dir() and not any(any(path.glob(pattern)) for pattern in _STORED):
        names = [file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()]
        return _splits(source, names, functools.partial(_read, path))
    if path.is_file():
        if not zipfile.is_zipfile(path):
            raise ValueError(f"{source} is neither a zip file nor a folder: unpack it or convert it to zip")
        return _splits(source, _archive(path, os.getpid()).namelist(), functools.partial(_read, path))
    if not path.is_dir() and (not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source) or source.endswith(".zip")):
        raise ValueError(f"no such folder or zip file: {source}")
    try:
        splits = datasets.load_dataset(source)
    except (OSError, ValueError) as error:
        raise ValueError(f"{source} is neither a folder nor a zip file, and no data set: {error}") from error
    return {name: _rows(f"{source}, {name}", data) for name, data in splits.items()}


@functools.cache
def _archive(path: pathlib.Path, process: int) -> zipfile.ZipFile:
    """The open zip file of one process: forked processes would share the position of a file that was opened before."""
    return zipfile.ZipFile(path)


def _read(source: pathlib.Path, key: str) -> bytes:
    """The bytes of a file in a folder or a zip file."""
    return (source / key).read_bytes() if source.is_dir() else _archive(source, os.getpid()).read(key)


def _splits(where: str, names: Sequence[str], reader: Callable[[Any], bytes]) -> dict[str, Pictures]:
    """The splits of a source, from the names of all its files. Refuses a layout that shows no classes.

    The class of a picture is its folder, or the WordNet number that all file names begin with, and the split is a
    folder above with the name of a split. All pictures have the same other folders around them.
    """
    names = [n for n in names if not any(part.startswith((".", "__MACOSX")) for part in n.split("/"))]
    keys = sorted(name for name in names if name.lower().endswith(SUFFIXES))
    if not keys:
        kinds = ", ".join(SUFFIXES)
        raise ValueError(f"{where} holds no picture ({kinds}) and no data set of the datasets library")
    is_numbered = all(WORDNET.match(key.rpartition("/")[2]) for key in keys)
    splits = (is_numbered and _arranged(keys, True)) or _arranged(keys, False)
    if not splits:
        examples = {key.count("/"): key for key in reversed(keys)}
        raise ValueError(
            f"{where}: the class of a picture is unknown, as in {', '.join(sorted(examples.values())[:3])}. "
            "Arrange the files as <class>/<file> or <split>/<class>/<file>, with splits named "
            f"{', '.join(TRAIN_SPLITS[:1] + EVAL_SPLITS)}"
        )
    return {
        split: Pictures(f"{where}, {split}" if split else where, *map(tuple, zip(*pairs, strict=True)), reader)
        for split, pairs in splits.items()
    }


def _arranged(keys: Sequence[str], is_numbered: bool) -> dict[str, list[tuple[str, str]]] | None:
    """File and class of each picture by split; None if the folders do not show them."""
    splits: dict[str, list[tuple[str, str]]] = {}
    around = set()
    for key in keys:
        *folders, file = key.split("/")
        name = file[:9] if is_numbered else folders.pop() if folders else ""
        split = next((folder for folder in folders if folder.lower() in TRAIN_SPLITS + EVAL_SPLITS), "")
        around.add((bool(name), bool(split), *(folder for folder in folders if folder not in (split, name))))
        splits.setdefault(split, []).append((key, name))
    return splits if len(around) == 1 and next(iter(around))[0] else None


def _rows(where: str, data: Dataset) -> Pictures:
    """The pictures of one split of a data set."""
    image, label = _column(where, data, "image", datasets.Image), _column(where, data, "label", datasets.ClassLabel)
    if not len(data):
        raise ValueError(f"{where}: the split is empty")
    values, names = data[label], getattr(data.features[label], "names", None)
    without = sum(value is None or (names is not None and value < 0) for value in values)
    if without:
        raise ValueError(f"{where}: {without} of {len(values)} rows have no label in the column {label!r}")
    classes = tuple(str(value) if names is None else names[value] for value in values)
    reader = functools.partial(_read_row, data.cast_column(image, datasets.Image(decode=False)), image)
    return Pictures(where, tuple(range(len(classes))), classes, reader, tuple(names) if names else None)


def _read_row(data: Dataset, column: str, key: int) -> bytes:
    value = data[key][column]
    if value is None:
        raise ValueError("the row has no picture")
    return value["bytes"] if value["bytes"] is not None else pathlib.Path(value["path"]).read_bytes()


def _column(where: str, data: Dataset, usual: str, kind: type) -> str:
    """The column with the usual name, or the only one of a type."""
    fitting = [name for name, feature in data.features.items() if isinstance(feature, kind)]
    if usual not in data.features and len(fitting) != 1:
        raise ValueError(f"{where}: no column {usual!r} among {', '.join(data.features)}: rename the one that it is")
    return usual if usual in data.features else fitting[0]


def pick(splits: Mapping[str, Pictures], given: str | None, usual: Sequence[str], where: str) -> Pictures | None:
    """The given split, or by default the first one with a usual name; None if there is none."""
    if given is not None:
        if given not in splits:
            known = ", ".join(name for name in splits if name) or "none, since its pictures are not arranged in splits"
            raise ValueError(f"{where} has no split {given!r}. Its splits: {known}")
        return splits[given]
    named = {name.lower(): pictures for name, pictures in splits.items()}
    return next((named[name] for name in usual if name in named), None)


def divide(pictures: Pictures, share: float) -> tuple[Pictures, Pictures]:
    """Split the pictures at random into two parts, the second with about this share of the pictures of every class."""
    count = round(share * len(pictures))
    if not 0 < count < len(pictures):
        raise ValueError(f"{pictures.where}: a share of {share} of {len(pictures)} pictures leaves one part empty")
    order = _evenly(pictures)
    return pictures.select(sorted(order[count:])), pictures.select(sorted(order[:count]))


def at_most(pictures: Pictures, count: int | None) -> Pictures:
    """Choose `count` pictures at random, evenly from all classes; all pictures if `count` is None."""
    if count is None or count >= len(pictures):
        return pictures
    return pictures.select(sorted(_evenly(pictures)[:count]))


def _evenly(pictures: Pictures) -> list[int]:
    """A random order, the same in every run, in which every prefix has about the same share of every class."""
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(0)).tolist()
    sizes, counts, positions = Counter(pictures.classes), Counter(), {}
    for i in order:
        name = pictures.classes[i]
        counts[name] += 1
        # A single picture of a class is in the middle, so that `divide` puts most of them in the larger part.
        positions[i] = counts[name] / (sizes[name] + 1)
    return sorted(order, key=positions.__getitem__)


def read_class_list(path: str) -> list[str]:
    """Read different class names in the order of a model's outputs.

    The path is a text file with one name per line, of which only the WordNet number is used if every line begins with
    one; or a folder or zip file of pictures, whose class names are sorted.
    """
    file = pathlib.Path(path).expanduser()
    if not file.exists():
        raise ValueError(f"no such class list: {path}")
    if file.is_dir() or zipfile.is_zipfile(file):
        names = sorted_classes(name for split in load(path).values() for name in split.classes)
    else:
        names = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        if all(map(WORDNET.match, names)):
            names = [name[:9] for name in names]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice or not names:
        raise ValueError(f"{path}: " + (f"the class {twice[0]!r} occurs twice" if twice else "the class list is empty"))
    return names


def class_indices(
    names: Sequence[str], labels: Sequence[str], *, class_list: Sequence[str] | None = None, own_order: bool = False
) -> tuple[dict[str, int], str]:
    """Match every class of the data with an output of the model; return these by name, and how they were found.

    `class_list` has names and `labels` the model's label names, both in the order of its outputs. In order, the
    following are tried: the class list; the label names, if they include all `names`; numbers, unless `own_order` says
    that the names are numbered labels; and the order of `names`, if the data and the model have equally many classes
    and no common name contradicts it. So a thousand folders named by WordNet numbers are ImageNet's classes in order.
    """
    advice = "give --class_list FILE with one name per line in the order of the model's labels"
    if class_list is not None:
        if len(class_list) != len(labels):
            raise ValueError(f"the class list has {len(class_list)} names and the model {len(labels)} labels")
        missing = [name for name in names if name not in class_list]
        if missing:
            raise ValueError(f"unknown label: the class list does not contain {_some(missing)}")
        return {name: list(class_list).index(name) for name in names}, "by the class list"
    counts = Counter(labels)
    by_name = {name: i for i, name in enumerate(labels) if counts[name] == 1}
    unknown = [name for name in names if name not in by_name]
    if not unknown:
        return {name: by_name[name] for name in names}, "by the names of the model's labels"
    if not own_order and all(name.isdecimal() and int(name) < len(labels) for name in names):
        return {name: int(name) for name in names}, "by number"
    if len(names) != len(labels):
        raise ValueError(
            f"unknown label: the data has {len(names)} classes, but the model has {len(labels)} labels and none named "
            f"{_some(unknown)}: {advice}, or --new_head to train a new classifier for the data's classes"
        )
    elsewhere = [name for i, name in enumerate(names) if by_name.get(name, i) != i]
    if elsewhere:
        raise ValueError(
            f"the data and the model have {len(labels)} classes each, but in different orders ({_some(elsewhere)}), "
            f"and the model has no label named {_some(unknown)}: {advice}"
        )
    return {name: i for i, name in enumerate(names)}, f"by the order of the data's {len(names)} names"


def _some(names: Sequence[str], most: int = 3) -> str:
    """The first names, and the number of the others."""
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} others" if len(names) > most else "")
