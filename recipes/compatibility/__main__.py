"""Run the models of Transformers with the methods of this package, and tell which work and which are refused.

    python -m recipes.compatibility run --transformers-source CHECKOUT --output RESULTS --workers 2
    python -m recipes.compatibility show RESULTS --markdown docs/compatibility_table.md

CHECKOUT is a checkout of Transformers' repository at the tag of the installed version, whose tests have a tiny config
and inputs for every architecture; `pip install parameterized pytest` is what they need. Every test file is run in a
separate process, and its results are a file in RESULTS. Files with results are not repeated.

Duration: about 5 seconds of one core for each of about 350 test files. Expected: the table of docs/compatibility.md.
"""

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from tqdm import tqdm

from hf_efficient_attn.cli import main_of
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.io.writing import replacing
from recipes.common.commands import methods_option, new_app
from recipes.common.memory import ROOT
from recipes.compatibility import report
from recipes.compatibility.testers import cases, test_files

app = new_app(no_args_is_help=True)

METHODS = ("kdeformer", "nearfar", "linear", "longformer")

Source = Annotated[
    pathlib.Path,
    typer.Option("--transformers-source", metavar="FOLDER", help="Checkout of Transformers' repository."),
]
Every = Annotated[
    bool,
    typer.Option("--every-class", help="All classes of a model, not only its base class and the first that generates."),
]


def _file_of(output: pathlib.Path, name: str) -> pathlib.Path:
    return output / f"{name.replace('/', '-')}.json"


def run_one(
    name: str, methods: Sequence[str], source: pathlib.Path, output: pathlib.Path, every: bool, limit: int
) -> None:
    """Run a test file in a child process and write its results, or why there are none."""
    path = _file_of(output, name)
    command = [
        sys.executable, "-m", "recipes.compatibility", "one", name, "--output", str(path), "--transformers-source",
        str(source), "--methods", ",".join(methods), *(["--every-class"] if every else []),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            command, cwd=output, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
        lines = done.stderr.strip().splitlines()
        error = lines[-1] if lines else f"exit status {done.returncode}"
    except subprocess.TimeoutExpired:
        error = f"more than {limit} seconds"
    if not path.is_file():
        _write(path, {"file": name, "error": error[:300], "rows": []})


def _write(path: pathlib.Path, result: dict[str, Any]) -> None:
    with replacing(path) as draft:
        draft.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


@app.command(epilog="Example: python -m recipes.compatibility run --transformers-source transformers --output results")
def run(
    transformers_source: Source,
    output: Annotated[pathlib.Path, typer.Option(metavar="FOLDER", help="Folder of the results.")],
    methods: methods_option(", ".join(METHODS)) = [],  # type: ignore[valid-type]  # noqa: B006 (typer copies it)
    only: Annotated[str, typer.Option(metavar="TEXT", help="Only test files whose name contains this text.")] = "",
    every_class: Every = False,
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Number of simultaneous processes.")] = 1,
    limit: Annotated[int, typer.Option(metavar="SECONDS", min=1, help="Time limit of each process.")] = 600,
) -> None:
    """Run the test files without results, and print the table."""
    source = transformers_source.resolve()
    names = [name for name in test_files(source) if only in name]
    if not names:
        raise UnsupportedAttentionError(f"no test file has {only!r} in its name: leave --only out to see all names")
    output.mkdir(parents=True, exist_ok=True)
    output = output.resolve()
    missing = [name for name in names if not _file_of(output, name).is_file()]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        futures = [
            pool.submit(run_one, name, methods or METHODS, source, output, every_class, limit) for name in missing
        ]
        try:
            for future in tqdm(concurrent.futures.as_completed(futures), total=len(futures), unit="file"):
                future.result()
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    show(output)


@app.command()
def one(
    name: Annotated[str, typer.Argument(help="A test file, such as bert/test_modeling_bert.")],
    transformers_source: Source,
    output: Annotated[pathlib.Path, typer.Option(metavar="FILE", help="File of the results.")],
    methods: methods_option(", ".join(METHODS)) = [],  # type: ignore[valid-type]  # noqa: B006
    every_class: Every = False,
) -> None:
    """Run one test file in this process. `run` calls it."""
    import transformers

    import hf_efficient_attn  # noqa: F401 (registers the methods)
    from recipes.compatibility.checks import check

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    chosen = [method for text in methods or METHODS for method in text.split(",")]
    rows = [
        {"class": case.name, "type": case.config.model_type, "method": method, **check(case, method)._asdict()}
        for case in cases(transformers_source.resolve(), name, every_class)
        for method in chosen
    ]
    _write(output, {"file": name, "transformers": transformers.__version__, "rows": rows})


@app.command()
def show(
    results: Annotated[pathlib.Path, typer.Argument(metavar="FOLDER", help="Folder of the results.")],
    markdown: Annotated[pathlib.Path | None, typer.Option(metavar="FILE", help="Write the table to this file.")] = None,
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
