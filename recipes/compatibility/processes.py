"""Every test file in a process of its own, with a time limit."""

import json
import multiprocessing
import os
import pathlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

from hf_efficient_attn.io.writing import replacing
from recipes.common.memory import ROOT
from recipes.compatibility.common_tests import EXACT, run_common_tests

_FORKS = "forkserver" in multiprocessing.get_all_start_methods()
# Imports that take longer than most test files. Of another layout of the tests, these are left to the children.
_PRELOADED = (
    "recipes.compatibility.checks",
    "recipes.compatibility.processes",
    "tests.test_pipeline_mixin",
    "tests.causal_lm_tester",
    "tests.vlm_tester",
    "tests.alm_tester",
)


class Task(NamedTuple):
    """What is done with a test file.

    Attributes:
        source: the checkout.
        output: folder of the results.
        methods: names of methods.
        every_class: all classes of a model, instead of its base class and the first that generates.
        limit: seconds.
    """

    source: pathlib.Path
    output: pathlib.Path
    methods: Sequence[str]
    every_class: bool
    limit: int


def result_file(output: pathlib.Path, name: str) -> pathlib.Path:
    """The file of the results of a test file."""
    return output / f"{name.replace('/', '-')}.json"


def prepare(source: pathlib.Path) -> None:
    """Set what the processes of the test files inherit, before the first is started."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(source), str(ROOT), os.environ.get("PYTHONPATH"))))
    if _FORKS:
        multiprocessing.set_forkserver_preload(list(_PRELOADED))


def run_file(name: str, task: Task) -> None:
    """Run a test file in a child process and write its results, or why there are none."""
    path = result_file(task.output, name)
    error = in_child(_run_here, (name, task, path), task.limit)
    if not path.is_file():
        write(path, {"file": name, "error": error, "rows": []})


def run_common(name: str, task: Task) -> None:
    """Run the common tests in a file with exact attention and with a method, and write the results."""
    path = result_file(task.output, name)
    result: dict[str, Any] = {"file": name, "method": task.methods[0]}
    for key, method in (("exact", EXACT), ("ours", task.methods[0])):
        part = path.with_name(f"{path.name}.{key}.part")
        error = in_child(_run_common_here, (name, task.source, method, part), task.limit)
        if part.is_file():
            result[key] = json.loads(part.read_text(encoding="utf-8"))
            part.unlink()
        else:
            result["error"] = f"{method}: {error}"
    write(path, result)


def in_child(target: Callable[..., None], args: tuple[Any, ...], limit: int) -> str:
    """Call a function in a child process, and tell how it ended."""
    context: Any = multiprocessing.get_context("forkserver" if _FORKS else None)
    child = context.Process(target=target, args=args)
    child.start()
    child.join(limit)
    if child.is_alive():
        child.kill()
        child.join()
        return f"more than {limit} seconds"
    return f"exit status {child.exitcode}"


def _run_here(name: str, task: Task, path: pathlib.Path) -> None:
    """Run a test file in this process."""
    warnings.simplefilter("ignore")
    with _silence():
        import transformers

        import hf_efficient_attn  # noqa: F401 (registers the methods)
        from recipes.compatibility.checks import check, describe
        from recipes.compatibility.testers import cases

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        result: dict[str, Any] = {"file": name, "transformers": transformers.__version__, "rows": []}
        try:
            for case in cases(task.source, name, task.every_class):
                for method, finding in zip(task.methods, check(case, *task.methods), strict=True):
                    row = {"class": case.name, "type": case.config.model_type, "method": method}
                    result["rows"].append({**row, **finding._asdict()})
        except BaseException as error:  # noqa: BLE001 (whatever the test file raises, a skipped test included)
            result["error"] = describe(error)
    write(path, result)


def _run_common_here(name: str, source: pathlib.Path, method: str, path: pathlib.Path) -> None:
    """Run the common tests in a file with one implementation in this process."""
    with _silence():
        outcomes = run_common_tests(name, source, method)
    write(path, outcomes)


@contextmanager
def _silence() -> Iterator[None]:
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        yield


def write(path: pathlib.Path, result: dict[str, Any]) -> None:
    """Write a file of results, whole or not at all."""
    with replacing(path) as draft:
        draft.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
