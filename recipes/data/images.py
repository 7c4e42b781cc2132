"""Pictures for classification: where they lie, which class each is of, and how they become tensors.

A source is a folder or a zip file (`<split>/<class>/<file>`, `<class>/<file>`, or files that all begin with a WordNet
number, `n01440764_tench.jpg`), or a data set of the `datasets` library: a hub id, or a folder with its parquet or arrow
files. `load` gives its splits as `Pictures`, which know names and classes and open a picture when it is asked for.

Pillow reads and cuts the pictures; torchvision is not used even where it is installed, so that the same command gives
the same numbers with and without it.
"""

import contextlib
import hashlib
import io
import json
import math
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
from torch import Tensor
from tqdm import tqdm

from hf_efficient_attn.errors import unknown_name

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm")
TRAIN_SPLITS = ("train", "training")
# In the order in which one of them is taken.
EVAL_SPLITS = ("validation", "val", "valid", "dev", "eval", "test", "testing")
_WORDNET = re.compile(r"n\d{8}(?![0-9A-Za-z])")
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


def decode(content: bytes):
    """The bytes of a picture file -> a Pillow image in RGB.

    Colours under transparency are kept, as `convert` does; 16-bit grey keeps its 8 upper bits, which `convert` would
    clip to white.
    """
    from PIL import Image, ImageOps

    picture = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    if picture.mode.startswith("I;16"):
        import numpy as np

        picture = Image.fromarray((np.asarray(picture) >> 8).astype("uint8"))
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    return picture.convert("RGB")


def sorted_classes(names) -> list[str]:
    """Each name once, sorted; numbers by their value, so that 10 follows 9."""
    names = set(names)
    return sorted(names, key=lambda name: (int(name), name)) if all(n.isdecimal() for n in names) else sorted(names)


# ------------------------------------------------------------------------------------------------- where pictures lie


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
    numbered = all(_WORDNET.match(part[-1]) for part in parts)

    def is_split(name: str) -> bool:
        return name.lower() in TRAIN_SPLITS + EVAL_SPLITS

    # A folder around everything says nothing, unless it is a split or the only class.
    while all(len(p) > (1 if numbered else 2) and p[0] == parts[0][0] for p in parts) and not is_split(parts[0][0]):
        root.append(parts[0][0])
        parts = [p[1:] for p in parts]
    depths = {len(p) - 1 for p in parts}
    split_first = all(len(p) > 1 and is_split(p[0]) for p in parts)
    if depths == {0} and numbered:
        places = [("", _WORDNET.match(p[-1]).group()) for p in parts]
    elif depths == {1} and split_first and numbered:
        places = [(p[0], _WORDNET.match(p[-1]).group()) for p in parts]
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
    """Two disjoint parts, the second with this share of all pictures, drawn at random by the seed."""
    if not 0 < share < 1:
        raise ValueError(f"a share of {share} leaves one of the parts empty: give one between 0 and 1")
    count = round(share * len(pictures))
    if not 0 < count < len(pictures):
        raise ValueError(f"{pictures.where}: a share of {share} of {len(pictures)} pictures leaves one part empty")
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(seed)).tolist()
    return pictures.select(sorted(order[count:])), pictures.select(sorted(order[:count]))


def at_most(pictures: Pictures, count: int | None, seed: int) -> Pictures:
    """So many of them, drawn at random by the seed (the first ones would be of the first classes); None for all."""
    if count is None or count >= len(pictures):
        return pictures
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(seed)).tolist()
    return pictures.select(sorted(order[:count]))


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


# ---------------------------------------------------------------------------------------------------- what class it is


def read_class_list(path: str) -> list[str]:
    """Class names in the order of a model's outputs.

    Args:
        path: a text file with a name on each line, of which only the WordNet number counts where every line begins with
            one; a JSON file, {"0": name or [WordNet number, name], ...} or a list; or a folder or zip file of pictures
            of all classes, whose sorted names are the list.

    Raises:
        ValueError: there is no such file, or a name stands in it twice.
    """
    file = pathlib.Path(path).expanduser()
    if not file.exists():
        raise ValueError(f"there is no class list {path}")
    if file.is_dir() or zipfile.is_zipfile(file):
        names = sorted_classes(name for split in load(path).values() for name in split.classes)
    elif file.suffix == ".json":
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(values, dict):
                values = [values[str(i)] for i in range(len(values))]
        except (json.JSONDecodeError, KeyError) as error:
            raise ValueError(f'{path}: a class list in JSON is a list, or {{"0": name, "1": name, ...}}') from error
        names = [str(value[0]) if isinstance(value, list) else str(value) for value in values]
    else:
        with contextlib.suppress(UnicodeDecodeError):
            names = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
            numbers = [_WORDNET.match(name) for name in names]
            names = [number.group() for number in numbers] if all(numbers) else names
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice or not names:
        raise ValueError(f"{path}: " + (f"the class {twice[0]!r} stands in it twice" if twice else "it is empty"))
    return names


def class_indices(
    names: Sequence[str], labels: Sequence[str], *, class_list: Sequence[str] | None = None, own_order: bool = False
) -> tuple[dict[str, int], str]:
    """Which output of a model each class of the data is.

    In this order: the class list; the model's own label names, where all the data's names are among them; numbers; the
    data's order (sorted names, or the source's own), where it has as many classes as the model has labels and no name
    of both says otherwise. So a thousand folders named by WordNet numbers are ImageNet's classes in their usual order.

    Args:
        names: all classes of the data, in the data's order.
        labels: the model's label names, by output.
        class_list: names in the order of the model's outputs.
        own_order: whether the order of the names is that of numbered labels.

    Returns:
        name -> output, and in a few words how that was told.

    Raises:
        ValueError: it cannot be told.
    """
    advice = "give --class_list FILE with a name a line in the order of the model's labels"
    if class_list is not None:
        if len(class_list) != len(labels):
            raise ValueError(f"the class list has {len(class_list)} names and the model {len(labels)} labels")
        known = {name: i for i, name in enumerate(class_list)}
        missing = [name for name in names if name not in known]
        if missing:
            raise ValueError(f"unknown label: {_some(missing)} of the data are not in the class list")
        return {name: known[name] for name in names}, "by the class list"
    counts = Counter(labels)
    by_name = {name: i for i, name in enumerate(labels) if counts[name] == 1}
    unknown = [name for name in names if name not in by_name]
    if not unknown:
        return {name: by_name[name] for name in names}, "by the names of the model's labels"
    if len(names) == len(labels):
        if not own_order and all(name.isdecimal() for name in names) and int(names[-1]) < len(labels):
            return {name: int(name) for name in names}, "by number"
        elsewhere = [name for i, name in enumerate(names) if by_name.get(name, i) != i]
        if elsewhere:
            raise ValueError(
                f"the data and the model have {len(labels)} classes each, but the order of the data's is not the "
                f"model's ({_some(elsewhere)}), and the model has no label named {_some(unknown)}: {advice}"
            )
        return {name: i for i, name in enumerate(names)}, f"by the order of the data's {len(names)} names"
    if all(name.isdecimal() and int(name) < len(labels) for name in names) and not own_order:
        return {name: int(name) for name in names}, "by number"
    raise ValueError(
        f"unknown label: the data have {len(names)} classes, the model {len(labels)} labels, none of them named "
        f"{_some(unknown)}: {advice}, or --new_head to train a new classifier for the data's classes"
    )


def _some(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} others" if len(names) > most else "")


# --------------------------------------------------------------------------------------------- how it becomes a tensor


class Norm(NamedTuple):
    """How a model wants its pictures: values / 255 less `mean`, over `std`, by channel; `resample` as Pillow counts."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Norm":
        """Out of a `preprocessor_config.json`.

        Raises:
            ValueError: it scales the values otherwise.
        """
        if not settings.get("do_rescale", True) or abs(settings.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-3:
            raise ValueError("the checkpoint's preprocessor does not scale the values by 1/255, which is all known here")
        if not settings.get("do_normalize", True):
            return cls((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), int(settings.get("resample", 2)))
        mean, std = (tuple(map(float, settings[f"image_{name}"])) for name in ("mean", "std"))
        return cls(mean, std, int(settings.get("resample", 2)))


def to_tensor(picture, norm: Norm) -> Tensor:
    """An RGB picture -> (3, height, width), float32."""
    import numpy as np

    values = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (norm.mean, norm.std))
    return (values - mean) / std


def centre_square(picture, pixels: int, ratio: float, resample: int):
    """The square in the middle, `ratio` of the shorter side wide, as pixels x pixels.

    As in the usual evaluation: the shorter side is resized to pixels / ratio, and the square cut out of that.
    """
    shorter, side = min(picture.size), round(pixels / ratio)
    size = tuple(side * length // shorter for length in picture.size)
    left, top = (round((length - pixels) / 2) for length in size)
    return picture.resize(size, resample).crop((left, top, left + pixels, top + pixels))


@dataclass(frozen=True)
class Evaluation:
    """The square in the middle; `crop_ratio` of the shorter side wide."""

    pixels: int
    norm: Norm
    crop_ratio: float = 0.875

    def __call__(self, picture, generator: torch.Generator | None = None) -> Tensor:
        """A picture -> (3, pixels, pixels); nothing is drawn."""
        return to_tensor(centre_square(picture, self.pixels, self.crop_ratio, self.norm.resample), self.norm)


@dataclass(frozen=True)
class Training:
    """A random part of the picture, resized, perhaps mirrored, perhaps changed in colour or shape.

    scale, ratio: the part's share of the area, uniform, and its width over its height, uniform in the logarithm
        (Szegedy et al. 2015, section 6).
    flip: probability of the mirror image.
    jitter: brightness, contrast and saturation change by up to this share, in random order.
    trivial: one operation of random strength as well (TrivialAugment, Mueller and Hutter 2021, its wide ranges).
    """

    pixels: int
    norm: Norm
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    jitter: float = 0.0
    trivial: bool = False

    def __call__(self, picture, generator: torch.Generator) -> Tensor:
        """A picture -> (3, pixels, pixels); all that is random comes from the generator."""
        from PIL import Image

        box = self.box(*picture.size, generator)
        picture = picture.resize((self.pixels, self.pixels), self.norm.resample, box=box)
        if _uniform(generator) < self.flip:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.trivial:
            picture = trivial_augment(picture, generator)
        if self.jitter:
            picture = color_jitter(picture, self.jitter, generator)
        return to_tensor(picture, self.norm)

    def box(self, width: int, height: int, generator: torch.Generator) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of the part that is cut out."""
        for _ in range(10):
            area = width * height * _uniform(generator, *self.scale)
            ratio = math.exp(_uniform(generator, *map(math.log, self.ratio)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                left, top = _below(width - w + 1, generator), _below(height - h + 1, generator)
                return left, top, left + w, top + h
        # Of a picture too long for any of these the middle, as near to a square as the ratios allow.
        ratio = min(max(width / height, self.ratio[0]), self.ratio[1])
        w, h = min(width, round(height * ratio)), min(height, round(width / ratio))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + w, top + h


def _uniform(generator: torch.Generator, low: float = 0.0, high: float = 1.0) -> float:
    return low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64).item()


def _below(limit: int, generator: torch.Generator) -> int:
    return int(torch.randint(limit, (), generator=generator))


def color_jitter(picture, strength: float, generator: torch.Generator):
    """Brightness, contrast and saturation times 1 +- strength, in random order."""
    from PIL import ImageEnhance

    kinds = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for i in torch.randperm(3, generator=generator).tolist():
        picture = kinds[i](picture).enhance(_uniform(generator, max(0.0, 1 - strength), 1 + strength))
    return picture


def trivial_augment(picture, generator: torch.Generator):
    """One of fourteen operations, at a strength of one of 31 steps and, where that makes sense, of either sign."""
    from PIL import Image, ImageEnhance, ImageOps

    strength = _below(31, generator) / 30
    sign = 1 - 2 * _below(2, generator)

    def shift(a=0.0, b=0.0, c=0.0, d=0.0):
        # Output (x, y) is taken from (x + a y + b, c x + y + d).
        return lambda p: p.transform(p.size, Image.Transform.AFFINE, (1, a, b, c, 1, d), Image.Resampling.NEAREST)

    operations = (
        lambda p: p,
        ImageOps.autocontrast,
        ImageOps.equalize,
        lambda p: ImageOps.posterize(p, 8 - round(6 * strength)),
        lambda p: ImageOps.solarize(p, round(255 * (1 - strength))),
        *(
            lambda p, kind=kind: kind(p).enhance(1 + sign * 0.99 * strength)
            for kind in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color, ImageEnhance.Sharpness)
        ),
        lambda p: p.rotate(sign * 135 * strength),
        shift(a=sign * 0.99 * strength),
        shift(c=sign * 0.99 * strength),
        # 32 of 224 pixels, whatever the size.
        shift(b=sign * strength * picture.size[0] / 7),
        shift(d=sign * strength * picture.size[1] / 7),
    )
    return operations[_below(len(operations), generator)](picture)


class PictureDataset(torch.utils.data.Dataset):
    """Pictures with their labels, as a model takes them: {"pixel_values": (3, P, P), "labels": int}.

    What is random about a picture follows from the seed, the epoch and its place in the data alone: not from the global
    state, of which a batch that was fetched ahead when a checkpoint was written would have used up some. So a resumed
    run sees what the run that was not stopped would have seen, and any number of workers and processes sees the same.

    Args:
        pictures: the pictures.
        indices: output of the model by class name.
        transform: (picture, generator) -> tensor.
        seed: of what is random in `transform`.
    """

    def __init__(
        self, pictures: Pictures, indices: Mapping[str, int], transform: Callable[..., Tensor], seed: int = 0
    ) -> None:
        self.pictures, self.transform, self.seed = pictures, transform, seed
        self.labels = [indices[name] for name in pictures.classes]
        # Shared, so that workers which outlive an epoch see the next one.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """To be called before each epoch, in the main process."""
        self.epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = hashlib.blake2b(f"{self.seed},{int(self.epoch)},{index}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(drawn, "little") >> 1)
        return {
            "pixel_values": self.transform(self.pictures.open(index), generator),
            "labels": self.labels[index],
        }
