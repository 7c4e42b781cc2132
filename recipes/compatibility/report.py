"""The tables of the results of `recipes.compatibility`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hf_efficient_attn.cli import table
from recipes.compatibility.testers import general

Row = Mapping[str, Any]
# From the best to the worst. The status of a model type is the worst of its classes'.
ORDER = ("untested", "works", "refused", "fails", "differs")


def by_type(files: Sequence[Row]) -> dict[str, dict[str, list[Row]]]:
    """The rows of every model type and method. A type that several test files have is one type."""
    found: dict[str, dict[str, list[Row]]] = {}
    for file in files:
        for row in file["rows"]:
            found.setdefault(row["type"], {}).setdefault(row["method"], []).append(row)
    return dict(sorted(found.items()))


def worst(rows: Sequence[Row]) -> Row:
    """The row with the worst status. Classes that are untested count only where nothing else was tested."""
    return max(rows, key=lambda row: ORDER.index(row["status"]))


def summary(files: Sequence[Row]) -> str:
    """Counts of model types by status, and all that fail, differ or were not tested."""
    types = by_type(files)
    methods = list(dict.fromkeys(method for rows in types.values() for method in rows))
    counts = {method: Counter(worst(rows[method])["status"] for rows in types.values()) for method in methods}
    lines = [table(("method", *ORDER), [(method, *(counts[method][status] for status in ORDER)) for method in methods])]
    lines.append(f"\n{len(types)} model types in {len(files)} test files.")
    lines += [
        f"{status}: {row['class']}, {method}: {row['reason']}"
        for status in ("differs", "fails", "untested")
        for rows in types.values()
        for method, own in rows.items()
        for row in own
        if row["status"] == status and (status != "untested" or worst(own)["status"] == status)
    ]
    lines += [f"no result: {file['file']}: {file['error']}" for file in files if file.get("error")]
    return "\n".join(lines)


def markdown(files: Sequence[Row]) -> str:
    """A table with a line for each model type and a column for each method, and the sentences of the refusals.

    Sentences are without the names of classes, and numbered from the one of most model types on.
    """
    found = {name: {method: worst(own) for method, own in rows.items()} for name, rows in by_type(files).items()}
    pairs = {(general(row["reason"]), name) for name, rows in found.items() for row in _refused(rows)}
    reasons = sorted(Counter(reason for reason, _ in sorted(pairs)).items(), key=lambda item: -item[1])
    numbers = {reason: index for index, (reason, _) in enumerate(reasons, start=1)}
    methods = list(dict.fromkeys(method for rows in found.values() for method in rows))
    lines = [
        "| model type | " + " | ".join(f"`{method}`" for method in methods) + " |",
        "|---" * (len(methods) + 1) + "|",
    ]
    for name, rows in found.items():
        cells = [
            f"refused ({numbers[general(row['reason'])]})" if row["status"] == "refused" else row["status"]
            for row in (rows[method] for method in methods)
        ]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in numbers.items())]) + "\n"


def _refused(rows: Mapping[str, Row]) -> list[Row]:
    return [row for row in rows.values() if row["status"] == "refused"]
