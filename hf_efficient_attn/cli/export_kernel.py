"""`hf-efficient-attn export-kernel`."""

from typing import Annotated

import typer

from hf_efficient_attn.cli import common


@common.command("export-kernel nearfar --repo my-org/nearfar -o nearfar-kernel")
def export_kernel(
    method: Annotated[
        str,
        typer.Argument(
            metavar="METHOD", help="A method without learned parameters.", autocompletion=common.complete_methods
        ),
    ],
    output: common.Output,
    repo: Annotated[
        str | None,
        typer.Option(metavar="ORG/NAME", help="Hub id of the repository. [default: ORG and the name of the folder]"),
    ] = None,
    force: common.ForceFolder = False,
    as_json: common.Json = False,
) -> None:
    """Write a repository for Hugging Face's kernels library, so that models with the method load without this package.

    The folder contains plain PyTorch, copied from this package, for CPU, CUDA, Metal, ROCm and XPU. `convert --kernel
    ORG/NAME` writes a checkpoint that names it.

    Exit status: 0 done, 1 an error of writing, 2 refused, 130 interrupted. The output folder is either complete or does
    not appear.
    """
    from hf_efficient_attn.standalone.kernel import export_kernel

    done = export_kernel(method, output, repo_id=repo, force=force)
    if as_json:
        return common.print_json(done)
    typer.echo(
        f"{done['method']} -> {done['output']}: {done['modules']} modules, {done['lines']:,} lines, for "
        f"{', '.join(done['backends'])}\n\nTo use it, after an upload (the command is in its README.md):\n"
        f'    AutoModel.from_pretrained(..., attn_implementation="{done["function"]}", allow_all_kernels=True)'
    )
