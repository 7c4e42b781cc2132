"""`hf-efficient-attn distill`."""

from typing import Annotated, Any

import typer

from hf_efficient_attn.cli import benchmark, common, convert
from hf_efficient_attn.errors import UnsupportedAttentionError

_method = "A method with learned parameters: `methods` marks them."
_loss = "output: squared error of the output. weights: cross entropy of the attention weights. both: their sum."
_length = (
    "Number of tokens of an input; pictures are resized. Use the length of your inputs. [default: those that the model "
    "takes, at most 2048; for pictures, those of its own size]"
)
_finetune_steps = "Then train the whole model for N batches on the outputs of the exact model."
_target = "What --finetune-steps compare: hidden_states of all layers, or logits. [default: hidden_states]"
_lora = "Fine-tune LoRA adapters of this rank, and merge them at the end."
_finetune_rate = "Learning rate of the fine-tuning. [default: 5e-05]"
_save_steps = "Measure the error and save the state after every N steps."
_write_now = "Write the checkpoint from the saved state, without more training."
_minutes = "End the training after about this time and save its state, as Ctrl-C does."


@common.command(
    "distill sentence-transformers/all-MiniLM-L6-v2 --method linear --set feature_map=hedgehog "
    "--data book.txt -o minilm-hedgehog"
)
def distill(
    source: common.Source,
    data: benchmark.Data,
    output: common.Output,
    method: Annotated[str, common.names_option(_method)],
    setting: common.MethodSettings = [],  # noqa: B006 (typer copies it)
    layers: common.Layers = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Number of batches to learn from.")] = 300,
    loss: Annotated[str, typer.Option(metavar="NAME", help=_loss)] = "output",
    learning_rate: Annotated[float, typer.Option(metavar="X", help="Learning rate of the learned parameters.")] = 2e-2,
    length: Annotated[int | None, typer.Option(metavar="N", min=2, help=_length)] = None,
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Inputs of a batch.")] = 4,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the order of the batches.")] = 0,
    finetune_steps: Annotated[int, typer.Option(metavar="N", min=0, help=_finetune_steps)] = 0,
    finetune_target: Annotated[str | None, typer.Option(metavar="NAME", help=_target)] = None,
    lora_rank: Annotated[int | None, typer.Option(metavar="N", min=1, help=_lora)] = None,
    finetune_learning_rate: Annotated[float | None, typer.Option(metavar="X", help=_finetune_rate)] = None,
    max_length: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Let the result take N tokens, as in `convert`.")
    ] = None,
    base_model: common.BaseModel = None,
    save_steps: Annotated[int, typer.Option(metavar="N", min=1, help=_save_steps)] = 50,
    restart: Annotated[bool, typer.Option("--restart", help="Discard the saved state and start again.")] = False,
    write_now: Annotated[bool, typer.Option("--write-now", help=_write_now)] = False,
    minutes: Annotated[float | None, typer.Option("--minutes", metavar="X", min=1e-9, help=_minutes)] = None,
    threads: common.Threads = None,
    device: common.Device = None,
    force: common.ForceFolder = False,
    allow_pickle: common.AllowPickle = False,
    as_json: common.Json = False,
) -> None:
    """Convert a checkpoint, and train the method's learned parameters to imitate its exact attention on your data.

    No labels are needed. A twentieth of the data is held out to measure the error of each layer before and after. The
    model card gets both, and distillation.json and distillation.png are written beside it.

    Ctrl-C, or the end of --minutes, ends the training after the present step and saves its state in OUTPUT.partial.
    The same command continues from there. The exit status is 130, because OUTPUT is not written yet. The state stays
    there at the end, so that the command with more --steps and --force continues a finished training.
    """
    from hf_efficient_attn.evaluation.progress import Execution
    from hf_efficient_attn.integration.layers import parse_layers
    from hf_efficient_attn.training.distill_checkpoint import Plan, distill_checkpoint
    from hf_efficient_attn.training.distillation import DistillationOptions
    from hf_efficient_attn.training.finetuning import FinetuningOptions

    if write_now and (restart or minutes is not None):
        raise UnsupportedAttentionError(
            "--write-now does not train: leave out --restart, which discards the state that it needs, and --minutes"
        )
    chosen, hyperparameters = convert.parse_method(method, setting)
    if hyperparameters is None:
        raise UnsupportedAttentionError(
            f"--method {method} is exact attention, which learns nothing: give a method that `methods` marks"
        )
    given = {"target": finetune_target, "lora_rank": lora_rank, "learning_rate": finetune_learning_rate}
    second: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if second and not finetune_steps:
        raise UnsupportedAttentionError("--finetune-target, -learning-rate and --lora-rank need --finetune-steps N")
    finetuning = FinetuningOptions(steps=finetune_steps, **second) if finetune_steps else None
    plan = Plan(
        source=source, data=data, output=output, method=str(chosen), hyperparameters=hyperparameters, steps=steps,
        layers=None if layers is None else parse_layers(layers), base_model=base_model, loss=loss, length=length,
        options=DistillationOptions(learning_rate=learning_rate, seed=seed, finetuning=finetuning),
        batch_size=batch_size, save_steps=save_steps, force=force, restart=restart, write_now=write_now,
        max_length=max_length, allow_pickle=allow_pickle, device=common.parse_device(device),
    )  # fmt: skip
    rows = Rows()
    execution = Execution(minutes) if as_json else Execution(minutes, rows.add, rows.begin)
    done, status = common.until_interrupted(lambda: distill_checkpoint(plan, execution), threads)
    if status:
        why = ", at the end of --minutes" if done["is_over"] else ""
        typer.echo(
            f"Stopped after {done['steps_done']} of {done['steps']} steps{why}. The state is in {done['folder']}: the "
            "same command continues; with --write-now it writes the checkpoint as it is.",
            err=True,
        )
    elif as_json:
        common.print_json(done)
    else:
        rows.conclude(done)
    raise typer.Exit(status)


class Rows:
    """What is trained, and the table of losses and errors, which grows during the training."""

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
        typer.echo(
            "loss: mean of the steps since the row before. held out: the relative error of the output on held-out "
            "inputs, as a mean over the layers; in the stage outputs, the loss there.\n"
        )
        self._table = common.LiveTable(["stage", "step", "loss", "held out"], [7, 6, 8, 8], left=["stage"])

    def add(self, row: dict[str, Any]) -> None:
        """Print a row of the history."""
        self._table.add([row["stage"], row["step"], _number(row["loss"]), _number(row["held_out"])])

    def conclude(self, done: dict[str, Any]) -> None:
        """Explain the table, and print the errors and what was written."""
        result = done["distillation"]
        rows = [
            (x["name"] if x["layer"] is None else x["layer"], _number(x["before"]), _number(x["after"]))
            for x in result["layers"]
        ]
        rows.append(("mean", _number(result["error_before"]), _number(result["error_after"])))
        typer.echo("\n" + common.table(("layer", "error before", "error after"), rows))
        if (outputs := result["outputs"]) is not None:
            loss = f"{_number(outputs['before'])} before and is {_number(outputs['after'])} now"
            typer.echo(f"\nFine-tuning: the loss on held-out inputs was {loss}.")
        typer.echo("\n" + "\n".join(convert.describe_conversion(done)))
        if result["complete"] and done["state"] is not None:
            typer.echo(
                f"\nMore --steps and --force continue this training. If you do not need that, delete {done['state']}."
            )


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"
