"""Pictures for classification: where they lie, and the name of the class of each.

A source is a folder or a zip file (`<split>/<class>/<file>`, `<class>/<file>`, or files that all begin with a WordNet
number, `n01440764_tench.jpg`), or a data set of the `datasets` library: a hub id, or a folder with its parquet or arrow
files. `load` gives its splits as `Pictures`, which know names and classes and open a picture when it is asked for.
"""

import io
import os
import pathlib
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from hf_efficient_attn.errors import unknown_name
from hf_efficient_attn.io.reading import decode

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm")
TRAIN_SPLITS = ("train", "training")
# In the order in which one of them is taken.
EVAL_SPLITS = ("validation", "val", "valid", "dev", "eval", "test", "testing")
# The number with which ImageNet names a class.
WORDNET = re.compile(r"n\d{8}(?![0-9A-Za-z])")
_STORED = ("*.parquet", "*.arrow", "data/*.parquet", "*/*.parquet", "dataset_dict.json", "*/*.arrow")


@dataclass(frozen=True)
class Pictures:
    """Pictures of one split, read when they are asked for.

    where: the source and the split, for messages.
    keys: what `reader` takes for each picture.
    classes: the name of the class of each.
    reader: key -> the bytes of the file.
    order: all class names in the order that the source itself gives them, which it does where it is a data set with
        numbered labels; None for files in folders.
    """

    where: str
    keys: tuple[str | int, ...]
    classes: tuple[str, ...]
    reader: Callable[[Any], bytes]
    order: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def name(self, index: int) -> str:
        """The file, or the row of a data set."""
        key = self.keys[index]
        return f"row {key}" if isinstance(key, int) else key

    def open(self, index: int):
        """The picture in RGB, the way up that its EXIF orientation says.

        Raises:
            ValueError: it cannot be read; the message names it.
        """
        try:
            return decode(self.reader(self.keys[index]))
        except Exception as error:
            raise ValueError(f"{self.where}: {self.name(index)} cannot be read: {_reason(error)}") from error

    def select(self, indices: Sequence[int]) -> "Pictures":
        """Those at the indices, in their order."""
        keys, classes = (tuple(column[i] for i in indices) for column in (self.keys, self.classes))
        return replace(self, keys=keys, classes=classes)

    def class_names(self) -> list[str]:
        """The names of all classes: in the source's own order, or sorted, numbers by their value."""
        return list(self.order) if self.order else sorted_classes(self.classes)


def sorted_classes(names) -> list[str]:
    """Each name once, sorted; numbers by their value, so that 10 follows 9."""
    names = set(names)
    return sorted(names, key=lambda name: (int(name), name)) if all(n.isdecimal() for n in names) else sorted(names)


def load(
    source: str, *, config: str | None = None, image_column: str | None = None, label_column: str | None = None
) -> dict[str, Pictures]:
    """The splits of a source by name; one without splits has the name "".

    Args:
        source: a folder, a zip file, or a hub id.
        config: which configuration of a hub data set.
        image_column, label_column: of a data set; by default the only ones that can be meant.

    Raises:
        ValueError: there is no such source, no picture in it, a class without pictures, or no telling what is a class.
    """
    path = pathlib.Path(source).expanduser()
    if path.is_dir() and any(any(path.glob(pattern)) for pattern in _STORED):
        return _load_data_set(source, config, image_column, label_column)
    if config or image_column or label_column:
        if path.exists():
            raise ValueError(f"{source} is no data set of the datasets library: it has no configuration and no columns")
        return _load_data_set(source, config, image_column, label_column)
    if path.is_dir():
        return _load_folder(path)
    if path.is_file():
        if not zipfile.is_zipfile(path):
            raise ValueError(f"{source} is neither a zip file nor a folder: unpack it, or pack it as zip")
        return _load_zip(path)
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source) or source.endswith(".zip"):
        raise ValueError(f"there is no folder and no zip file {source}")
    return _load_data_set(source, config, image_column, label_column)


class _Folder(NamedTuple):
    root: pathlib.Path

    def __call__(self, key: str) -> bytes:
        return (self.root / key).read_bytes()


class _Zip:
    """Reads members; the file is opened once a process, since forked ones would share its position."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path, self._open = path, (0, None)

    def __call__(self, key: str) -> bytes:
        process, archive = self._open
        if process != os.getpid():
            archive = zipfile.ZipFile(self.path)
            self._open = (os.getpid(), archive)
        return archive.read(key)

    def __getstate__(self) -> dict:
        return {"path": self.path, "_open": (0, None)}


class _Rows:
    """Reads the picture column of a data set, whose pictures are not decoded."""

    def __init__(self, data, column: str) -> None:
        self.data, self.column = data, column

    def __call__(self, key: int) -> bytes:
        value = self.data[key][self.column]
        if value is None:
            raise ValueError("the row has no picture")
        return value["bytes"] if value["bytes"] is not None else pathlib.Path(value["path"]).read_bytes()


def _load_folder(root: pathlib.Path) -> dict[str, Pictures]:
    files, folders = [], []
    for at, below, names in os.walk(root, followlinks=True):
        here = pathlib.Path(at).relative_to(root)
        folders += [(here / name).as_posix() for name in below]
        files += [(here / name).as_posix() for name in names]
    return _splits(str(root), files, folders, _Folder(root))


def _load_zip(path: pathlib.Path) -> dict[str, Pictures]:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    folders = [name.rstrip("/") for name in names if name.endswith("/")]
    return _splits(str(path), [name for name in names if not name.endswith("/")], folders, _Zip(path))


def _splits(where: str, files: Sequence[str], folders: Sequence[str], reader) -> dict[str, Pictures]:
    """Pictures by split, out of all files and folders of a source."""
    keys = sorted(key for key in files if key.lower().endswith(SUFFIXES) and not _hidden(key))
    if not keys:
        kinds = ", ".join(SUFFIXES)
        raise ValueError(f"{where}: there is no picture in it ({kinds}), and no data set of the datasets library")
    found: dict[str, list[tuple[str, str]]] = {}
    root, places = _places(where, keys)
    for key, (split, name) in zip(keys, places, strict=True):
        found.setdefault(split, []).append((key, name))
    _check_folders(where, root, keys, [folder for folder in folders if not _hidden(folder)], "" not in found)
    return {
        split: Pictures(f"{where}, {split}" if split else where, *map(tuple, zip(*pairs, strict=True)), reader)
        for split, pairs in found.items()
    }


def _hidden(key: str) -> bool:
    return any(part.startswith((".", "__MACOSX")) for part in key.split("/"))


def _places(where: str, keys: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """The folder that holds everything ("" for the source itself), and the split and class of each file.

    Raises:
        ValueError: the files lie neither as <split>/<class>/<file> nor as <class>/<file>, and do not all begin with
            WordNet numbers.
    """
    parts, root = [key.split("/") for key in keys], []
    numbered = all(WORDNET.match(part[-1]) for part in parts)

    def is_split(name: str) -> bool:
        return name.lower() in TRAIN_SPLITS + EVAL_SPLITS

    # A folder around everything says nothing, unless it is a split or the only class.
    while all(len(p) > (1 if numbered else 2) and p[0] == parts[0][0] for p in parts) and not is_split(parts[0][0]):
        root.append(parts[0][0])
        parts = [p[1:] for p in parts]
    depths = {len(p) - 1 for p in parts}
    split_first = all(len(p) > 1 and is_split(p[0]) for p in parts)
    if depths == {0} and numbered:
        places = [("", WORDNET.match(p[-1]).group()) for p in parts]
    elif depths == {1} and split_first and numbered:
        places = [(p[0], WORDNET.match(p[-1]).group()) for p in parts]
    elif depths == {1}:
        places = [("", p[0]) for p in parts]
    elif depths == {2} and split_first:
        places = [(p[0], p[1]) for p in parts]
    else:
        examples = {len(p): "/".join(p) for p in reversed(parts)}
        raise ValueError(
            f"{where}: no telling which class a picture is of, as in {', '.join(sorted(examples.values())[:3])}. "
            "Lay them out as <class>/<file> or <split>/<class>/<file>, with splits named "
            f"{', '.join(TRAIN_SPLITS[:1] + EVAL_SPLITS)}"
        )
    return "/".join(root), places


def _check_folders(where: str, root: str, keys: Sequence[str], folders: Sequence[str], splits: bool) -> None:
    """Refuse a folder that stands where classes stand and has no picture."""
    full = {"/".join(key.split("/")[:n]) for key in keys for n in range(1, key.count("/") + 1)}
    depth = (root.count("/") + 1 if root else 0) + 1 + splits
    for folder in sorted(folders):
        parent = folder.rpartition("/")[0]
        if folder not in full and folder.count("/") + 1 == depth and (not parent or parent in full):
            raise ValueError(f"{where}: the class {folder} has no picture; put some into its folder, or remove it")


def _load_data_set(source: str, config, image_column, label_column) -> dict[str, Pictures]:
    import datasets

    try:
        if pathlib.Path(source, "dataset_dict.json").is_file():
            splits = datasets.load_from_disk(source)
        else:
            splits = datasets.load_dataset(source, config)
    except (OSError, ValueError) as error:
        raise ValueError(f"{source}: no folder, no zip file, and the datasets library says: {error}") from error
    return {name: _rows(f"{source}, {name}", data, image_column, label_column) for name, data in splits.items()}


def _rows(where: str, data, image_column: str | None, label_column: str | None) -> Pictures:
    import datasets

    features = data.features
    image = _column(where, features, image_column, "image", [n for n, f in features.items() if _is(f, datasets.Image)])
    classes = [n for n, f in features.items() if _is(f, datasets.ClassLabel)]
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
    reader = _Rows(data.cast_column(image, datasets.Image(decode=False)), image)
    return Pictures(where, tuple(range(len(names))), tuple(names), reader, order)


def _is(feature, kind: type) -> bool:
    return isinstance(feature, kind)


def _column(where: str, features, given: str | None, what: str, fitting: Sequence[str]) -> str:
    """The column given, or the one that can be meant: of the usual name, or the only one of the type."""
    if given is not None:
        if given not in features:
            raise ValueError(f"{where}: {unknown_name(f'column for --{what}_column', given, features)}")
        return given
    if what in features:
        return what
    if len(fitting) != 1:
        raise ValueError(f"{where}: name the column of the {what} by --{what}_column; there are {', '.join(features)}")
    return fitting[0]


def pick(splits: Mapping[str, Pictures], given: str | None, usual: Sequence[str], where: str) -> Pictures | None:
    """The split of a name, or the first that has one of the usual names; None where there is none of these.

    Raises:
        ValueError: there is no split `given`.
    """
    if given is not None:
        if given not in splits:
            known = ", ".join(name for name in splits if name) or "none: its pictures are not laid out in splits"
            raise ValueError(f"{where} has no split {given!r}. Its splits: {known}")
        return splits[given]
    named = {name.lower(): name for name in splits}
    return next((splits[named[name]] for name in usual if name in named), None)


def divide(pictures: Pictures, share: float, seed: int) -> tuple[Pictures, Pictures]:
    """Two disjoint parts, the second with this share of the pictures, as near as may be of each class, drawn at random.

    Raises:
        ValueError: one part would be empty.
    """
    count = round(share * len(pictures))
    if not 0 < count < len(pictures):
        raise ValueError(f"{pictures.where}: a share of {share} of {len(pictures)} pictures leaves one part empty")
    order = _evenly(pictures, seed)
    return pictures.select(sorted(order[count:])), pictures.select(sorted(order[:count]))


def at_most(pictures: Pictures, count: int | None, seed: int) -> Pictures:
    """So many of them, of all classes alike, drawn at random; None for all."""
    if count is None or count >= len(pictures):
        return pictures
    return pictures.select(sorted(_evenly(pictures, seed)[:count]))


def _evenly(pictures: Pictures, seed: int) -> list[int]:
    """A random order of which every beginning has its share of every class."""
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(seed)).tolist()
    sizes, seen, places = Counter(pictures.classes), Counter(), {}
    for i in order:
        name = pictures.classes[i]
        seen[name] += 1
        # Of a single picture in the middle: of most classes with one, it stays in the greater part.
        places[i] = seen[name] / (sizes[name] + 1)
    return sorted(order, key=places.__getitem__)


def readable(pictures: Pictures, *, skip: bool, threads: int = 1) -> tuple[Pictures, list[str]]:
    """Decodes every picture once, so that a broken one is met before the training rather than within it.

    JPEGs are decoded at an eighth of their size: every byte is read all the same, in about a third of the time.

    Args:
        skip: leave out those that cannot be read.
        threads: that decode.

    Returns:
        the pictures, without the broken ones, and the names of those with the reasons.

    Raises:
        ValueError: some cannot be read and `skip` is False, or none can.
    """
    with ThreadPoolExecutor(max(1, threads)) as pool:
        tries = pool.map(lambda i: _why_broken(pictures, i), range(len(pictures)))
        bar = tqdm(tries, f"reading {pictures.where}", len(pictures), disable=None, leave=False, unit="picture")
        reasons = list(bar)
    broken = [f"{pictures.name(i)} ({reason})" for i, reason in enumerate(reasons) if reason]
    if broken and (not skip or len(broken) == len(pictures)):
        listed = ", ".join(broken[:10]) + (f" and {len(broken) - 10} others" if len(broken) > 10 else "")
        advice = "" if skip else "; repair or remove them, or go on without them by --skip_bad_images"
        raise ValueError(f"{pictures.where}: {len(broken)} of {len(pictures)} cannot be read: {listed}{advice}")
    return pictures.select([i for i, reason in enumerate(reasons) if not reason]), broken


def _why_broken(pictures: Pictures, index: int) -> str:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(pictures.reader(pictures.keys[index]))) as picture:
            picture.draft("RGB", (1, 1))
            picture.load()
    except Exception as error:  # noqa: BLE001 (a decoder raises whatever it meets, and all of it means the same)
        return _reason(error)
    return ""


def _reason(error: Exception) -> str:
    # Pillow's own says little more than the address of a buffer.
    if type(error).__name__ == "UnidentifiedImageError":
        return "no picture of a known format"
    return " ".join(str(error).split()) or type(error).__name__
