"""Run the models of Transformers with the methods of this package, and tell which work and which are refused.

    python -m recipes.compatibility run --transformers-source CHECKOUT --output RESULTS --workers 2
    python -m recipes.compatibility show RESULTS --markdown docs/compatibility_table.txt

CHECKOUT is a checkout of Transformers' repository at the tag of the installed version, whose tests have a tiny config
and inputs for every architecture; `pip install parameterized pytest` is what they need. Every test file is run in a
separate process, and its results are a file in RESULTS. Files with results are not repeated. Transformers' common tests
of some models are run by `recipes.compatibility.common_tests`.

Duration: about 15 seconds of one core for each of about 400 test files. Expected: the table of docs/compatibility.md.
"""

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from tqdm import tqdm

from hf_efficient_attn.cli import main_of, split_list, table
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.io.json import write_json
from hf_efficient_attn.io.writing import replacing
from recipes.common.commands import methods_option, new_app, option
from recipes.common.memory import ROOT
from recipes.compatibility.testers import general, test_files

app = new_app(no_args_is_help=True)

METHODS = ("kdeformer", "nearfar", "linear", "longformer")
# The time limit of each process in seconds.
_LIMIT = 600
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


def table_of(files: Sequence[Row]) -> str:
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


@app.command(epilog="Example: python -m recipes.compatibility run --transformers-source transformers --output results")
def run(
    transformers_source: option(pathlib.Path, "Checkout of Transformers' repository.", metavar="FOLDER"),
    output: option(pathlib.Path, "Folder of the results.", metavar="FOLDER"),
    methods: methods_option(", ".join(METHODS)) = [],  # type: ignore[valid-type]  # noqa: B006 (typer copies it)
    only: option(str, "Only test files whose name contains this text.", metavar="TEXT") = "",
    workers: option(int, "Number of simultaneous processes.", min=1) = 1,
) -> None:
    """Run the test files without results, and print the table."""
    source, output = transformers_source.resolve(), output.resolve()
    names = [name for name in test_files(source) if only in name]
    if not names:
        raise UnsupportedAttentionError(f"no test file has {only!r} in its name: leave --only out to see all names")
    output.mkdir(parents=True, exist_ok=True)

    def run_file(name: str, path: pathlib.Path) -> None:
        error = in_child([name, str(path), *(split_list(methods) or METHODS)], source)
        if not path.is_file():
            _write(path, {"file": name, "error": error, "rows": []})

    paths = {name: output / f"{name.replace('/', '-')}.json" for name in names}
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(run_file, name, path) for name, path in paths.items() if not path.is_file()]
        try:
            for future in tqdm(concurrent.futures.as_completed(futures), total=len(futures), unit="file"):
                future.result()
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    show(output)


def in_child(given: list[str], source: pathlib.Path) -> str:
    """Call `child` in a process of its own without output, and tell how it ended."""
    paths = os.pathsep.join(filter(None, (str(source), str(ROOT), os.environ.get("PYTHONPATH"))))
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": paths}
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "timeout": _LIMIT}
    command = [sys.executable, "-m", "recipes.compatibility", "child", *given]
    try:
        done = subprocess.run(command, cwd=source, env={**os.environ, **settings}, **quiet)
    except subprocess.TimeoutExpired:
        return f"more than {_LIMIT} seconds"
    return f"exit status {done.returncode}"


@app.command(hidden=True)
def child(name: str, path: pathlib.Path, methods: list[str]) -> None:
    """Run one test file in this process, and write its results."""
    import transformers

    from recipes.compatibility.checks import check, describe
    from recipes.compatibility.testers import cases

    warnings.simplefilter("ignore")
    result: dict[str, Any] = {"file": name, "transformers": transformers.__version__, "rows": []}
    try:
        for case in cases(name):
            for method, finding in zip(methods, check(case, *methods), strict=True):
                row = {"class": case.name, "type": case.config.model_type, "method": method}
                result["rows"].append({**row, **finding._asdict()})
    except BaseException as error:  # noqa: BLE001 (whatever the test file raises, a skipped test included)
        result["error"] = describe(error)
    _write(path, result)


def _write(path: pathlib.Path, result: Any) -> None:
    with replacing(path) as draft:
        write_json(draft, result)


@app.command()
def show(
    results: Annotated[pathlib.Path, typer.Argument(metavar="FOLDER", help="Folder of the results.")],
    markdown: option(pathlib.Path | None, "Write the table to this file.", metavar="FILE") = None,
) -> None:
    """Print how many model types work, are refused, or fail, and everything that is not as it should be."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))]
    if not files:
        raise UnsupportedAttentionError(f"{results} has no results: make some with the command run")
    typer.echo(summary(files))
    if markdown is not None:
        with replacing(markdown) as draft:
            draft.write_text(table_of(files), encoding="utf-8")


if __name__ == "__main__":
    main_of(app, "python -m recipes.compatibility")
