"""`hf-efficient-attn push` and `export-kernel`."""

import pathlib
from typing import Annotated, Any

import typer

from hf_efficient_attn.cli.common import ForceFolder, Json, Output, command, complete_methods, print_json, table
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.version import __version__

_repository = "Repository on the hub; it is created if it does not exist."
_yes = "Push. Without this option nothing is sent, and the hub is not contacted."
_install = (
    "What readers of the card give to `pip install` to get this package, such as git+https://HOST/REPO or "
    f"hf_efficient_attn=={__version__}. A push with --yes stores it for later ones."
)
_card = "Print the card as it would be sent, instead of the list of files."
_method = "A method without learned parameters."
_repo = "Hub id of the repository. [default: ORG and the name of the folder]"


@command("push OUT my-name/minilm-kdeformer --private, and again with --yes when the list is right")
def push(
    folder: Annotated[pathlib.Path, typer.Argument(metavar="OUT", help="Folder of a converted checkpoint.")],
    repository: Annotated[str, typer.Argument(metavar="ORG/NAME", help=_repository)],
    private: Annotated[bool, typer.Option("--private", help="Create it as a private repository.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help=_yes)] = False,
    install: Annotated[str | None, typer.Option(metavar="URL_OR_REQUIREMENT", help=_install)] = None,
    show_card: Annotated[bool, typer.Option("--show-card", help=_card)] = False,
    as_json: Json = False,
) -> None:
    """Push a converted checkpoint to the Hugging Face Hub. Without --yes, only list what would be sent."""
    from hf_efficient_attn import hub

    if yes and show_card:
        raise UnsupportedAttentionError("--show-card sends nothing: leave it out, or leave out --yes")
    report = hub.push(folder, repository, private=private, install=install) if yes else None
    plan = report.plan if report else hub.plan_push(folder, repository, install=install)
    size = sum(size for _, size in plan.files)
    if as_json:
        values: dict[str, Any] = {
            "repository": repository,
            "private": private,
            "files": [{"path": path, "bytes": size} for path, size in plan.files],
            "card_problems": list(plan.problems),
            "refusals": list(plan.refusals),
            "install": plan.install,
            "sent": yes,
            "card": plan.card,
        }
        return print_json(values | ({"url": report.url, "commit": report.commit} if report else {}))
    if show_card:
        typer.echo(plan.card, nl=False)
        return typer.echo("".join(f"--yes would refuse: {reason}\n" for reason in plan.refusals), nl=False, err=True)
    typer.echo(table(("file", "MB"), [(path, f"{size / 1e6:.3f}") for path, size in plan.files]))
    visibility = "private" if private else "public, if it is new"
    lines = [f"\n{len(plan.files)} files, {size / 1e6:.1f} MB for {repository} ({visibility})"]
    lines += [] if plan.install is None else [f"Card: tells its readers to 'pip install {plan.install}'"]
    lines += [f"Card: {problem}" for problem in plan.problems]
    if report:
        lines.append(f"Sent to {report.url}")
    else:
        lines += [f"--yes would refuse: {reason}" for reason in plan.refusals]
        lines.append("Weights of an earlier push that are not in the folder would be deleted from the repository.")
        step = "Correct this first, then add" if plan.refusals else "Add"
        lines.append(f"Nothing was sent. {step} --yes to send the files.")
    typer.echo("\n".join(lines))


@command("export-kernel nearfar --repo my-org/nearfar -o nearfar-kernel")
def export_kernel(
    method: Annotated[str, typer.Argument(metavar="METHOD", help=_method, autocompletion=complete_methods)],
    output: Output,
    repo: Annotated[str | None, typer.Option(metavar="ORG/NAME", help=_repo)] = None,
    force: ForceFolder = False,
    as_json: Json = False,
) -> None:
    """Write a repository for Hugging Face's kernels library, so that models with the method load without this package.

    The folder contains plain PyTorch, copied from this package, for CPU, CUDA, Metal, ROCm and XPU. `convert --kernel
    ORG/NAME` writes a checkpoint that names it.

    Exit status: 0 done, 1 an error of writing, 2 refused, 130 interrupted: then the output folder does not appear.
    """
    from hf_efficient_attn.standalone.export import export_kernel

    done = export_kernel(method, output, repo_id=repo, force=force)
    if as_json:
        return print_json(done)
    typer.echo(
        f"{done['method']} -> {done['output']}, for {', '.join(done['backends'])}\n\n"
        "To use it, after an upload (the command is in its README.md):\n"
        f'    AutoModel.from_pretrained(..., attn_implementation="{done["function"]}", allow_all_kernels=True)'
    )
