"""Run the models of Transformers with the methods of this package, and tell which work and which are refused.

    python -m recipes.compatibility run --transformers-source CHECKOUT --output RESULTS --workers 2
    python -m recipes.compatibility show RESULTS --markdown docs/compatibility_table.txt

CHECKOUT is a checkout of Transformers' repository at the tag of the installed version, whose tests have a tiny config
and inputs for every architecture; `pip install parameterized pytest` is what they need. Every test file is run in a
separate process, and its results are a file in RESULTS. Files with results are not repeated.

Duration: about 5 seconds of one core for each of about 400 test files. Expected: the table of docs/compatibility.md.
"""

import concurrent.futures
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from tqdm import tqdm

from hf_efficient_attn.cli import main_of
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.io.writing import replacing
from recipes.common.commands import methods_option, new_app
from recipes.compatibility import common_tests, report
from recipes.compatibility.processes import Task, prepare, result_file, run_common, run_file
from recipes.compatibility.testers import test_files

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
    prepare(source)
    chosen = [method for text in methods or METHODS for method in text.split(",")]
    task = Task(source, output, chosen, every_class, limit)
    missing = [name for name in names if not result_file(output, name).is_file()]
    _in_order(missing, run_file, task, workers)
    show(output)


def _in_order(names: Sequence[str], function: Callable[[str, Task], None], task: Task, workers: int) -> None:
    """Call a function for test files, some at a time."""
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(function, name, task) for name in names]
        try:
            for future in tqdm(concurrent.futures.as_completed(futures), total=len(futures), unit="file"):
                future.result()
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise


@app.command("common-tests")
def run_common_tests(
    transformers_source: Source,
    output: Annotated[pathlib.Path, typer.Option(metavar="FOLDER", help="Folder of the results.")],
    method: Annotated[str, typer.Option(metavar="NAME", help="The method.")] = METHODS[0],
    only: Annotated[str, typer.Option(metavar="TEXT", help="Only test files whose name contains this text.")] = "",
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Number of simultaneous processes.")] = 1,
    limit: Annotated[int, typer.Option(metavar="SECONDS", min=1, help="Time limit of each process.")] = 1800,
) -> None:
    """Run Transformers' common tests of some models with exact attention and with a method as the default."""
    source = transformers_source.resolve()
    present = set(test_files(source))
    names = [name for name in common_tests.FILES if name in present and only in name]
    if not names:
        raise UnsupportedAttentionError(f"no test file has {only!r} in its name: leave --only out to see all names")
    output.mkdir(parents=True, exist_ok=True)
    output = output.resolve()
    prepare(source)
    missing = [name for name in names if not result_file(output, name).is_file()]
    _in_order(missing, run_common, Task(source, output, [method], False, limit), workers)
    typer.echo(common_tests.summary(_results(output)))


def _results(folder: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


@app.command()
def show(
    results: Annotated[pathlib.Path, typer.Argument(metavar="FOLDER", help="Folder of the results.")],
    markdown: Annotated[pathlib.Path | None, typer.Option(metavar="FILE", help="Write the table to this file.")] = None,
) -> None:
    """Print how many model types work, are refused, or fail, and everything that is not as it should be."""
    files = _results(results)
    if not files:
        raise UnsupportedAttentionError(f"{results} has no results: make some with the command run")
    typer.echo(report.summary(files))
    if markdown is not None:
        with replacing(markdown) as draft:
            draft.write_text(report.markdown(files), encoding="utf-8")


if __name__ == "__main__":
    main_of(app, "python -m recipes.compatibility")
