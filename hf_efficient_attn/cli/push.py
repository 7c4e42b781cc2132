"""`hf-efficient-attn push`."""

import pathlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_efficient_attn.cli.common import Json, command, print_json, print_table
from hf_efficient_attn.errors import UnsupportedAttentionError

if TYPE_CHECKING:
    from hf_efficient_attn.hub import PushPlan


@command("push OUT my-name/minilm-kdeformer --private, and again with --yes when the list is right")
def push(
    folder: Annotated[pathlib.Path, typer.Argument(metavar="OUT", help="Folder of a converted checkpoint.")],
    repository: Annotated[
        str, typer.Argument(metavar="ORG/NAME", help="Repository on the hub; it is created if it does not exist.")
    ],
    private: Annotated[bool, typer.Option("--private", help="Create it as a private repository.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Push. Without this option nothing is sent, and the hub is not contacted.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be sent, as without --yes.")] = False,
    install: Annotated[
        str | None,
        typer.Option(
            metavar="URL_OR_REQUIREMENT",
            help="What readers of the card give to `pip install` to get this package, such as git+https://HOST/REPO or "
            "hf_efficient_attn==0.2.0. A push with --yes stores it for later ones.",
        ),
    ] = None,
    show_card: Annotated[
        bool,
        typer.Option("--show-card", help="Print the card as it would be sent, instead of the list of files."),
    ] = False,
    message: Annotated[str | None, typer.Option(metavar="TEXT", help="Title of the commits.")] = None,
    as_json: Json = False,
) -> None:
    """Push a converted checkpoint to the Hugging Face Hub. Without --yes, only list what would be sent."""
    from huggingface_hub.utils import logging

    from hf_efficient_attn import hub
    from hf_efficient_attn.checkpoint.source import progress_of_hub

    if yes and dry_run:
        raise UnsupportedAttentionError("--dry-run sends nothing, and --yes sends the files: give one of them")
    if yes and show_card:
        raise UnsupportedAttentionError("--show-card sends nothing: look at the card first, and then give --yes alone")
    if not yes:
        plan = hub.plan_push(folder, repository, private=private, install=install)
        if as_json:
            return print_json({**_to_dict(plan), **({"card": plan.card} if show_card else {})})
        if not show_card:
            return _show_plan(plan)
        typer.echo(plan.card, nl=False)
        for reason in plan.refusals:
            typer.echo(f"--yes would refuse: {reason}", err=True)
        return None
    if not sys.stderr.isatty():
        logging.set_verbosity_error()
    with progress_of_hub():
        report = hub.push(folder, repository, private=private, install=install, message=message)
    if as_json:
        done = {"url": report.url, "commits": list(report.commits), "warnings": list(report.warnings)}
        return print_json({**_to_dict(report.plan), "sent": True, **done})
    size = sum(size for _, size in report.plan.files)
    typer.echo(f"{len(report.plan.files)} files, {_format_bytes(size)}: {report.url}")
    for line in [f"Card: {problem}" for problem in report.plan.problems] + [
        f"The hub says: {x}" for x in report.warnings
    ]:
        typer.echo(line)


def _to_dict(plan: "PushPlan") -> dict[str, Any]:
    """A plan as plain values for JSON."""
    return {
        "repository": plan.repo_id,
        "private": plan.private,
        "files": [{"path": path, "bytes": size} for path, size in plan.files],
        "stays": list(plan.stays),
        "card_problems": list(plan.problems),
        "refusals": list(plan.refusals),
        "install": plan.install,
        "sent": False,
    }


def _show_plan(plan: "PushPlan") -> None:
    visibility = "private" if plan.private else "public, if it is new"
    typer.echo(f"Files that would be sent to {plan.repo_id} ({visibility}), in this order:\n")
    print_table(("file", "size"), [(path, _format_bytes(size)) for path, size in plan.files])
    size = sum(size for _, size in plan.files)
    lines = [
        f"\n{len(plan.files)} files, {_format_bytes(size)}. The model card is sent last, in a commit of its own; "
        "--show-card prints it.",
        "Weights of an earlier push that are not in the folder would be deleted from the repository.",
        *(f"Not sent: {name}" for name in plan.stays),
        *([] if plan.install is None else [f"Card: tells its readers to 'pip install {plan.install}'"]),
        *(f"Card: {problem}" for problem in plan.problems),
        *(f"--yes would refuse: {reason}" for reason in plan.refusals),
        f"\nNothing was sent. {'Correct this first, then add' if plan.refusals else 'Add'} --yes to send the files.",
    ]
    typer.echo("\n".join(lines))


def _format_bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
