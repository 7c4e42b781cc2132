"""`hf-efficient-attn push`."""

import pathlib
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
    message: Annotated[str | None, typer.Option(metavar="TEXT", help="Title of the commit.")] = None,
    as_json: Json = False,
) -> None:
    """Push a converted checkpoint to the Hugging Face Hub. Without --yes, only list what would be sent."""
    from hf_efficient_attn import hub

    if yes and (dry_run or show_card):
        raise UnsupportedAttentionError("--dry-run and --show-card send nothing: leave them out, or leave out --yes")
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
    report = hub.push(folder, repository, private=private, install=install, message=message)
    if as_json:
        done = {"url": report.url, "commit": report.commit, "warnings": list(report.warnings)}
        return print_json({**_to_dict(report.plan), "sent": True, **done})
    typer.echo(f"{_total(report.plan)}: {report.url}")
    for problem in report.plan.problems:
        typer.echo(f"Card: {problem}")
    for warning in report.warnings:
        typer.echo(f"The hub says: {warning}")
    return None


def _to_dict(plan: "PushPlan") -> dict[str, Any]:
    """A plan as plain values for JSON."""
    return {
        "repository": plan.repo_id,
        "private": plan.private,
        "files": [{"path": path, "bytes": size} for path, size in plan.files],
        "card_problems": list(plan.problems),
        "refusals": list(plan.refusals),
        "install": plan.install,
        "sent": False,
    }


def _show_plan(plan: "PushPlan") -> None:
    visibility = "private" if plan.private else "public, if it is new"
    typer.echo(f"Files that would be sent to {plan.repo_id} ({visibility}):\n")
    print_table(("file", "MB"), [(path, f"{size / 1e6:.3f}") for path, size in plan.files])
    lines = [
        f"\n{_total(plan)}. --show-card prints the model card.",
        "Weights of an earlier push that are not in the folder would be deleted from the repository.",
        *([] if plan.install is None else [f"Card: tells its readers to 'pip install {plan.install}'"]),
        *(f"Card: {problem}" for problem in plan.problems),
        *(f"--yes would refuse: {reason}" for reason in plan.refusals),
        f"\nNothing was sent. {'Correct this first, then add' if plan.refusals else 'Add'} --yes to send the files.",
    ]
    typer.echo("\n".join(lines))


def _total(plan: "PushPlan") -> str:
    return f"{len(plan.files)} files, {sum(size for _, size in plan.files) / 1e6:.1f} MB"
