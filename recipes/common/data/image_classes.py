"""Matches the classes of a data set with the outputs of a model."""

import json
import pathlib
import zipfile
from collections import Counter
from collections.abc import Sequence

from recipes.common.data.images import WORDNET, load, sorted_classes


def read_class_list(path: str) -> list[str]:
    """Read class names in the order of a model's outputs. Refuses a name that occurs twice.

    The path is a text file with one name per line, of which only the WordNet number is used if every line begins with
    one; a JSON file, {"0": name or [WordNet number, name], ...} or a list; or a folder or zip file of pictures of all
    classes, whose names are sorted.
    """
    file = pathlib.Path(path).expanduser()
    if not file.exists():
        raise ValueError(f"no such class list: {path}")
    if file.is_dir() or zipfile.is_zipfile(file):
        names = sorted_classes(name for split in load(path).values() for name in split.classes)
    elif file.suffix == ".json":
        values = json.loads(file.read_text(encoding="utf-8"))
        values = [values[key] for key in sorted(values, key=int)] if isinstance(values, dict) else values
        names = [str(value[0]) if isinstance(value, list) else str(value) for value in values]
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
    """Match every class of the data with an output of the model.

    The following are tried in order: the class list; the model's label names, if they include all names of the data;
    numbers; and the data's order, if the data and the model have equally many classes and no common name contradicts
    it. So a thousand folders named by WordNet numbers are ImageNet's classes in their usual order.

    Args:
        names: all classes of the data, in the data's order.
        labels: the model's label names, in the order of its outputs.
        class_list: names in the order of the model's outputs.
        own_order: the order of `names` is that of numbered labels.

    Returns:
        The output of every name, and a short description of how it was found.
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
