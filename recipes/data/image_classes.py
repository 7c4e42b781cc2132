"""Which output of a model the classes of a data set are."""

import json
import pathlib
import zipfile
from collections import Counter
from collections.abc import Sequence

from recipes.data.images import WORDNET, load, sorted_classes


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
        try:
            lines = file.read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no text: a class list has a name on each line") from error
        names = [line.strip() for line in lines if line.strip()]
        numbers = [WORDNET.match(name) for name in names]
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
