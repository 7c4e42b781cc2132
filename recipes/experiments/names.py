"""The folders of runs, and how a figure with several seeds is written."""

import pathlib
import statistics
from collections.abc import Sequence


def slug(text: str) -> str:
    """The text as a folder name."""
    return "-".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


def folder_of(output: pathlib.Path, line: str, task: str, seed: int) -> pathlib.Path:
    """The folder of a run."""
    return output / slug(task) / f"{slug(line)}-{seed}"


def mean_and_range(values: Sequence[float], digits: int = 3) -> str:
    """The mean, and half the range if there are several values."""
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {(max(values) - min(values)) / 2:.{digits}f}"
