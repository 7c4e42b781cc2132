"""The tasks image and pathfinder of the Long Range Arena: grey pixels of pictures as sequences of token ids."""

import pathlib
from collections.abc import Sequence

import numpy as np
from datasets import Dataset
from tqdm import tqdm

from hf_efficient_attn.errors import unknown_name
from hf_efficient_attn.io.text import read_text
from recipes.common.data import images
from recipes.common.data.lra import TASKS, Reading, choose, rows_of

DIFFICULTIES = {"easy": "curv_baseline", "intermediate": "curv_contour_length_9", "hard": "curv_contour_length_14"}


def load_image(
    source: str, reading: Reading, split: str | None = None, train_split: str | None = None
) -> dict[str, Dataset]:
    """Load the splits train and test of the image task from pictures with classes.

    Args:
        source: folder, zip file or hub id.
        reading: how the task is read.
        split: name of the split to evaluate on; None for test or another usual name.
        train_split: name of the split to train on; None for train.
    """
    splits = images.load(source)
    train = images.pick(splits, train_split, images.TRAIN_SPLITS, source)
    evaluation = images.pick(splits, split, ("test", *images.EVAL_SPLITS), source)
    if train is None or evaluation is None:
        raise ValueError(
            f"{source} has the splits {', '.join(splits)}: one to train on and one to evaluate on are needed"
        )
    numbers = {name: number for number, name in enumerate(train.class_names())}
    unknown = sorted(set(evaluation.classes) - set(numbers))
    if unknown:
        raise ValueError(f"{evaluation.where}: unknown labels {', '.join(unknown)}; known: {', '.join(numbers)}")
    if len(numbers) != TASKS["image"].labels:
        raise ValueError(f"{source} has {len(numbers)} classes, but the task has {TASKS['image'].labels}")
    found = {}
    for name, pictures in (("train", train), ("test", evaluation)):
        chosen = pictures.select(choose(len(pictures), reading.at_most(name)))
        found[name] = rows_of(*pixels(chosen, [numbers[c] for c in chosen.classes], reading), first=reading.first)
    return found


def pixels(pictures: images.Pictures, labels: Sequence[int], reading: Reading) -> tuple[list[np.ndarray], list[int]]:
    """Grey values (side * side,) uint8 of each picture that can be read, line by line from the top, and its label.

    Raises:
        ValueError: pictures cannot be read and are not skipped, or differ in size.
    """
    found, kept, bad, size = [], [], [], None
    bar = tqdm(range(len(pictures)), desc=pictures.where, unit=" pictures", disable=None, leave=False)
    for i in bar:
        try:
            picture = pictures.open(i).convert("L")
        except ValueError as error:
            bad.append(str(error))
            continue
        if reading.image_size is not None and picture.size != (reading.image_size, reading.image_size):
            picture = picture.resize((reading.image_size, reading.image_size))
        size = size or picture.size
        if picture.size != size or size[0] * size[1] > reading.max_length:
            raise ValueError(
                f"{pictures.where}: {pictures.name(i)} has {picture.size[0]} x {picture.size[1]} pixels, but "
                + (
                    f"others have {size[0]} x {size[1]}"
                    if picture.size != size
                    else f"at most {reading.max_length} fit"
                )
                + "; give --max_length or --image_size"
            )
        found.append(np.asarray(picture, np.uint8).reshape(-1))
        kept.append(labels[i])
    if bad and (not reading.skip_bad or not found):
        raise ValueError(
            f"{len(bad)} of {len(pictures)} pictures cannot be read: {'; '.join(bad[:3])}"
            + ("; ..." if len(bad) > 3 else "")
            + (". --skip_bad_images skips them" if found else "")
        )
    if bad:
        tqdm.write(f"skipped {len(bad)} of {len(pictures)} pictures: {'; '.join(bad[:3])}")
    if not found:
        raise ValueError(f"{pictures.where} is empty")
    return found, kept


def load_pathfinder(source: str, reading: Reading, difficulty: str = "hard") -> dict[str, Dataset]:
    """Load the pathfinder task and split it at random into train, validation and test, 80, 10 and 10 %.

    The benchmark splits by the order of its own files, which its release does not contain.
    """
    if difficulty not in DIFFICULTIES:
        raise ValueError(unknown_name("difficulty", difficulty, DIFFICULTIES))
    name = DIFFICULTIES[difficulty]
    root = pathlib.Path(source).expanduser()
    folder = next((p for p in (root / name, root / "pathfinder32" / name, root) if (p / "metadata").is_dir()), None)
    if folder is None:
        raise ValueError(f"{source} holds no {name}/metadata; the layout is {name}/metadata/*.npy and {name}/imgs/...")
    keys, labels = [], []
    for path in sorted((folder / "metadata").glob("*.npy"), key=lambda path: (len(path.name), path.name)):
        for number, line in enumerate(read_text(path).split("\n"), 1):
            cells = line.split()
            if not cells:
                continue
            if len(cells) < 4 or cells[3] not in ("0", "1"):
                raise ValueError(f"{path}, line {number}: expected FOLDER FILE NUMBER LABEL ..., with label 0 or 1")
            keys.append(f"{cells[0]}/{cells[1]}")
            labels.append(int(cells[3]))
    if len(keys) < 3:
        raise ValueError(f"{folder / 'metadata'}: {len(keys)} pictures are not enough to train and evaluate on")
    order = np.random.default_rng(0).permutation(len(keys))
    ends = [round(len(keys) * share) for share in (0.8, 0.9)]

    def read_bytes(key: str) -> bytes:
        return (folder / key).read_bytes()

    found = {}
    for split, part in zip(("train", "validation", "test"), np.split(order, ends), strict=True):
        chosen = part[choose(len(part), reading.at_most(split))].tolist()
        pictures = images.Pictures(
            f"{folder}, {split}", tuple(keys[i] for i in chosen), tuple(str(labels[i]) for i in chosen), read_bytes
        )
        found[split] = rows_of(*pixels(pictures, [labels[i] for i in chosen], reading), first=reading.first)
    return found
