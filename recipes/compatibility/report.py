"""The tables of the results of `recipes.compatibility`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hf_efficient_attn.cli import table
from recipes.compatibility.testers import general

# From the best to the worst. The status of a model type is the worst of its classes'.
ORDER = ("untested", "works", "refused", "fails", "differs")


def by_type(files: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[Mapping[str, Any]]]]:
    """The rows of every model type and method. A type that several test files have is one type."""
    found: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for file in files:
        for row in file["rows"]:
            found.setdefault(row["type"], {}).setdefault(row["method"], []).append(row)
    return dict(sorted(found.items()))


def worst(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The row with the worst status. Classes that are untested count only where nothing else was tested."""
    return max(rows, key=lambda row: ORDER.index(row["status"]))


def summary(files: Sequence[Mapping[str, Any]]) -> str:
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


def reasons(files: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The sentences of the refusals, without the names of classes, and the model types that each stands for."""
    found: dict[str, list[str]] = {}
    for name, rows in by_type(files).items():
        for own in rows.values():
            row = worst(own)
            if row["status"] == "refused":
                types = found.setdefault(general(row["reason"]), [])
                if name not in types:
                    types.append(name)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def markdown(files: Sequence[Mapping[str, Any]]) -> str:
    """A table with a line for each model type and a column for each method, and the sentences of the refusals."""
    types = by_type(files)
    methods = list(dict.fromkeys(method for rows in types.values() for method in rows))
    numbers = {reason: index for index, reason in enumerate(reasons(files), start=1)}
    lines = [
        "| model type | " + " | ".join(f"`{method}`" for method in methods) + " |",
        "|---" * (len(methods) + 1) + "|",
    ]
    for name, rows in types.items():
        cells = []
        for method in methods:
            row = worst(rows[method])
            number = numbers.get(general(row["reason"])) if row["status"] == "refused" else None
            cells.append(row["status"] + (f" ({number})" if number else ""))
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    lines += ["", *(f"{number}. {reason}" for reason, number in numbers.items())]
    return "\n".join(lines) + "\n"
