"""`hf-efficient-attn push`."""

import contextlib
import pathlib
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from hf_efficient_attn.cli.common import Json, app, print_json, table


@app.command(
    epilog="Example: hf-efficient-attn push OUT my-name/minilm-kdeformer --private, and the same with --yes once the "
    "list is right"
)
def push(
    folder: Annotated[pathlib.Path, typer.Argument(metavar="OUT", help="Folder of a converted checkpoint.")],
    repository: Annotated[str, typer.Argument(metavar="ORG/NAME", help="Repository on the hub; made if it is new.")],
    private: Annotated[bool, typer.Option("--private", help="Only you and your organisation see it.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it. Without, nothing is sent, nor asked of the hub.")] = False,
    message: Annotated[str | None, typer.Option(metavar="TEXT", help="Title of the commits.")] = None,
    as_json: Json = False,
) -> None:
    """Send a converted checkpoint to the Hugging Face Hub, the card last; without --yes only say what would go up."""
    import hf_efficient_attn.hub as hub

    if not yes:
        plan = hub.plan_push(folder, repository, private=private)
        return print_json(_plain(plan)) if as_json else _say_plan(plan)
    with _quiet():
        report = hub.push(folder, repository, private=private, message=message)
    if as_json:
        done = {"url": report.url, "commits": list(report.commits), "warnings": list(report.warnings)}
        return print_json({**_plain(report.plan), "sent": True, **done})
    size = sum(size for _, size in report.plan.files)
    typer.echo(f"{len(report.plan.files)} files, {_bytes(size)}: {report.url}")
    for line in report.warnings:
        typer.echo(f"The hub says: {line}")


def _plain(plan) -> dict[str, Any]:
    return {
        "repository": plan.repo_id,
        "private": plan.private,
        "files": [{"path": path, "bytes": size} for path, size in plan.files],
        "stays": list(plan.stays),
        "card_problems": list(plan.problems),
        "sent": False,
    }


def _say_plan(plan) -> None:
    typer.echo(
        f"To {plan.repo_id} ({'private' if plan.private else 'public, if it is new'}) would go, in this order:\n"
    )
    typer.echo(table(("file", "size"), [(path, _bytes(size)) for path, size in plan.files]))
    typer.echo(
        f"\n{len(plan.files)} files, {_bytes(sum(size for _, size in plan.files))}; the card by itself, at the end."
    )
    typer.echo("Weights of an earlier push that are not in the folder are removed there.")
    for name in plan.stays:
        typer.echo(f"Stays here: {name}")
    for problem in plan.problems:
        typer.echo(f"Card: {problem}")
    typer.echo("\nNothing was sent. The same with --yes sends it.")


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Bars and warnings of huggingface_hub on a terminal only."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    level, bars = logging.get_verbosity(), not are_progress_bars_disabled()
    if sys.stderr.isatty():
        yield
        return
    logging.set_verbosity_error()
    disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            enable_progress_bars()
