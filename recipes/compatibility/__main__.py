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
from typing import Annotated, Any

import typer
from tqdm import tqdm

from hf_efficient_attn.cli import main_of, split_list
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.io.json import write_json
from hf_efficient_attn.io.writing import replacing
from recipes.common.commands import methods_option, new_app, option
from recipes.common.memory import ROOT
from recipes.compatibility import report
from recipes.compatibility.testers import test_files

app = new_app(no_args_is_help=True)

METHODS = ("kdeformer", "nearfar", "linear", "longformer")
# The time limit of each process in seconds.
_LIMIT = 600


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
    typer.echo(report.summary(files))
    if markdown is not None:
        with replacing(markdown) as draft:
            draft.write_text(report.markdown(files), encoding="utf-8")


if __name__ == "__main__":
    main_of(app, "python -m recipes.compatibility")
