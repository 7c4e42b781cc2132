"""`hf-efficient-attn distill`."""

import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_efficient_attn.cli.common import (
    AllowPickle,
    Device,
    Json,
    LiveTable,
    Source,
    Threads,
    check_minutes,
    command,
    complete_methods,
    parse_device,
    parse_layers,
    print_json,
    print_table,
    until_interrupted,
)
from hf_efficient_attn.cli.convert import describe_conversion, parse_method
from hf_efficient_attn.errors import UnsupportedAttentionError

if TYPE_CHECKING:
    from hf_efficient_attn.evaluation.progress import Execution
    from hf_efficient_attn.training.finetuning import FinetuningOptions


@command(
    "distill sentence-transformers/all-MiniLM-L6-v2 --method linear --set feature_map=hedgehog "
    "--data book.txt -o minilm-hedgehog"
)
def distill(
    source: Source,
    data: Annotated[
        pathlib.Path,
        typer.Option(
            metavar="FILE", help='Text (.txt, .jsonl with "text", or gzipped), or a folder or zip file of pictures.'
        ),
    ],
    output: Annotated[pathlib.Path, typer.Option("--output", "-o", metavar="FOLDER", help="A new folder.")],
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="A method with learned parameters: `methods` marks them.",
            autocompletion=complete_methods,
        ),
    ],
    setting: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="A hyperparameter of the method; repeatable.")
    ] = [],  # noqa: B006 (typer copies it)
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="0-5,8",
            help="Layers to convert, by number or name ('encoder'); the others stay exact. [default: all]",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Number of batches to learn from.")] = 300,
    loss: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="output: squared error of the output. weights: cross entropy of the attention weights. both: their "
            "sum.",
        ),
    ] = "output",
    learning_rate: Annotated[float, typer.Option(metavar="X", help="Learning rate of the learned parameters.")] = 2e-2,
    length: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            show_default=False,
            help="Number of tokens of an input; pictures are resized. Use the length of your inputs. [default: those "
            "that the model takes, at most 2048; for pictures, those of its own size]",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Inputs of a batch.")] = 4,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the order of the batches.")] = 0,
    finetune_steps: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Then train the whole model for N batches on the outputs of the exact model."
        ),
    ] = 0,
    finetune_target: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="What --finetune-steps compare: hidden_states of all layers, or logits. [default: hidden_states]",
        ),
    ] = None,
    lora_rank: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Fine-tune LoRA adapters of this rank, and merge them at the end."),
    ] = None,
    finetune_learning_rate: Annotated[
        float | None,
        typer.Option(metavar="X", show_default=False, help="Learning rate of the fine-tuning. [default: 5e-05]"),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Let the result take N tokens, as in `convert`.")
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(metavar="ORG/NAME", help="Hub id of the original model for the card, if SOURCE is a folder."),
    ] = None,
    save_steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Measure the error and save the state after every N steps.")
    ] = 50,
    restart: Annotated[bool, typer.Option("--restart", help="Discard the saved state and start again.")] = False,
    write_now: Annotated[
        bool, typer.Option("--write-now", help="Write the checkpoint from the saved state, without more training.")
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes",
            metavar="X",
            callback=check_minutes,
            help="End the training after about this time and save its state, as Ctrl-C does.",
        ),
    ] = None,
    threads: Threads = None,
    device: Device = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output folder if it exists.")] = False,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint, and train the method's learned parameters to imitate its exact attention on your data.

    No labels are needed. A twentieth of the data is held out to measure the error of each layer before and after. The
    model card gets both, and distillation.json and distillation.png are written beside it.

    Ctrl-C, or the end of --minutes, ends the training after the present step and saves its state in OUTPUT.partial.
    The same command continues from there. The exit status is 130, because OUTPUT is not written yet.
    """
    from hf_efficient_attn.evaluation.analyze import Source as Checkpoint
    from hf_efficient_attn.evaluation.timing import use_threads
    from hf_efficient_attn.training.distill_checkpoint import Plan, distill_checkpoint
    from hf_efficient_attn.training.distillation import DistillationOptions

    if restart and write_now:
        raise UnsupportedAttentionError("--restart discards the state that --write-now needs: give one of them")
    if minutes is not None and write_now:
        raise UnsupportedAttentionError(
            "--write-now does not train, so that --minutes limits nothing: give one of them"
        )
    chosen, hyperparameters = parse_method(method, setting)
    if hyperparameters is None:
        raise UnsupportedAttentionError(
            f"--method {method} is exact attention, which learns nothing: give a method that `methods` marks"
        )
    second = {"target": finetune_target, "lora_rank": lora_rank, "learning_rate": finetune_learning_rate}
    plan = Plan(
        output=output,
        method=str(chosen),
        hyperparameters=hyperparameters,
        layers=None if layers is None else parse_layers(layers),
        max_length=max_length,
        base_model=base_model,
        force=force,
        restart=restart,
        write_now=write_now,
        steps=steps,
        loss=loss,
        length=length,
        batch_size=batch_size,
        save_steps=save_steps,
        options=DistillationOptions(
            learning_rate=learning_rate, seed=seed, finetuning=_finetuning(finetune_steps, second)
        ),
    )
    checkpoint = Checkpoint(source, allow_pickle, parse_device(device))
    rows = Rows(is_silent=as_json)
    with use_threads(threads):
        done, status = until_interrupted(lambda: distill_checkpoint(checkpoint, data, plan, rows.execution(minutes)))
    if status:
        why = ", at the end of --minutes" if done["is_over"] else ""
        typer.echo(
            f"Stopped after {done['steps_done']} of {done['steps']} steps{why}. The state is in {done['folder']}: the "
            "same command continues; with --write-now it writes the checkpoint as it is.",
            err=True,
        )
    elif as_json:
        print_json(done)
    else:
        rows.conclude(done)
    raise typer.Exit(status)


def _finetuning(steps: int, options: dict[str, Any]) -> "FinetuningOptions | None":
    """The second stage, if it has any steps."""
    from hf_efficient_attn.training.finetuning import FinetuningOptions

    given = {name: value for name, value in options.items() if value is not None}
    if steps:
        return FinetuningOptions(steps=steps, **given)
    if given:
        names = {"target": "--finetune-target", "lora_rank": "--lora-rank", "learning_rate": "--finetune-learning-rate"}
        raise UnsupportedAttentionError(f"{names[next(iter(given))]} needs --finetune-steps N")
    return None


class Rows:
    """What is trained, and the table of losses and errors, which grows during the training.

    Args:
        is_silent: whether to print nothing, for --json.
    """

    def __init__(self, *, is_silent: bool) -> None:
        self._is_silent = is_silent
        self._table: LiveTable | None = None

    def execution(self, minutes: float | None = None) -> "Execution":
        """The functions that print, and the limit of time."""
        from hf_efficient_attn.evaluation.progress import Execution

        return Execution(minutes) if self._is_silent else Execution(minutes, on_begin=self.begin, on_row=self.add)

    def begin(self, about: dict[str, Any]) -> None:
        """Say what is trained, and where."""
        from hf_efficient_attn.evaluation.timing import describe

        plan, data = about["plan"], about["data"]
        second = f", then {plan['finetune_steps']} of fine-tuning" if plan["finetune_steps"] else ""
        typer.echo(
            f"{about['source']} to {about['attention']}: {plan['steps']} steps of {plan['batch_size']} x "
            f"{about['tokens']} tokens of {data['name']}{second}\n{describe(about['machine'])}\n"
            f"Inputs: {data['rows']} to learn from, {data['held_out']} held out."
        )
        if about["resumed_at"] is not None:
            typer.echo(f"Continues after step {about['resumed_at']}.")

    def add(self, row: dict[str, Any]) -> None:
        """Print a row of the history."""
        if self._table is None:
            typer.echo()
            self._table = LiveTable(["stage", "step", "loss", "held out"], [7, 6, 8, 8], left=["stage"])
        self._table.add([row["stage"], row["step"], _number(row["loss"]), _number(row["held_out"])])

    def conclude(self, done: dict[str, Any]) -> None:
        """Explain the table, and print the errors and what was written."""
        result = done["distillation"]
        held_out = "the relative error of the output on held-out inputs, as a mean over the layers"
        if result["outputs"] is not None:
            held_out += "; in the stage outputs, the loss there"
        typer.echo(f"\nloss: mean of the steps since the row before. held out: {held_out}.\n")
        rows = [
            (x["name"] if x["layer"] is None else x["layer"], _number(x["before"]), _number(x["after"]))
            for x in result["layers"]
        ]
        mean = ("mean", _number(result["error_before"]), _number(result["error_after"]))
        print_table(("layer", "error before", "error after"), [*rows, mean])
        if result["outputs"] is not None:
            before, after = (_number(result["outputs"][key]) for key in ("before", "after"))
            typer.echo(f"\nFine-tuning: the loss on held-out inputs was {before} before and is {after} now.")
        typer.echo("\n" + "\n".join(describe_conversion(done)))


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"
