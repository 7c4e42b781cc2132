"""Distill a method's learned parameters from the exact attention of a checkpoint, on texts or pictures.

    python recipes/distill.py --model_name_or_path MODEL --data book.txt --attention linear --set feature_map=hedgehog
        --output_dir OUT
    accelerate launch --config_file recipes/configs/cpu.yaml recipes/distill.py ...            (two processes)
    accelerate launch --config_file recipes/configs/eight_gpus.yaml recipes/distill.py ...

The recipe does the same as `hf-efficient-attn distill`, in one or several processes. Each process learns from its own
part of the data, and the gradients are averaged, so that all have the same parameters. A step of P processes has P
batches. Accelerate's config file sets the processes and the precision.

The data are a text file (.txt, .jsonl, or gzipped), or a folder or zip file of pictures. --finetune_steps adds the
second stage, in which the whole model learns the outputs of the exact one. OUT gets the checkpoint with its tokenizer
or image processor, a model card, distillation.json and distillation.png. The state is saved in OUT.partial. After an
interruption, the same command continues from there, bit for bit.

Duration for MiniLM with --length 128 --steps 100 on a novel: three minutes on one thread of a busy machine. Expected:
the mean error of the layers on held-out inputs falls from .72 to .36.
"""

import pathlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
    import recipes  # noqa: F401  # first: it reports missing packages

import accelerate

from hf_efficient_attn.cli.distill import Rows
from hf_efficient_attn.evaluation.analyze import Source
from hf_efficient_attn.evaluation.progress import Interrupted
from hf_efficient_attn.methods import MethodConfig
from hf_efficient_attn.training import DistillationOptions, FinetuningOptions
from hf_efficient_attn.training.distill_checkpoint import Plan, distill_checkpoint
from recipes.common import arguments
from recipes.common.arguments import AttentionArguments, option


@dataclass
class DistillationArguments:
    """Model, data, training and output. The options are checked on construction."""

    _argument_group_name = "distillation"

    model_name_or_path: str = option("Folder or hub id of a checkpoint with exact attention.")
    data: str = option("Text (.txt, .jsonl with 'text', or gzipped), or a folder or zip file of pictures.")
    output_dir: str = option("A new folder.")
    overwrite: bool = option("Replace an output folder that is not empty.", False)
    restart: bool = option("Discard the saved state and start again.", False)
    steps: int = option("Steps of the first stage.", 300)
    loss: str = option("Loss of the first stage: output, weights or both.", "output")
    learning_rate: float = option("Learning rate of the first stage.", 2e-2)
    length: int | None = option(
        "Tokens of an input; pictures are resized. Default: those that the model takes, at most 2048; for pictures, "
        "those of its own size.",
        None,
    )
    max_length: int | None = option("Let the result take N tokens, as in `convert`.", None, metavar="N")
    per_device_train_batch_size: int = option("Inputs of a batch of one process.", 4)
    save_steps: int = option("Measure the error and save the state after every N steps.", 50, metavar="N")
    seed: int = option("Seed of the order of the batches.", 0)
    finetune_steps: int = option("Steps of the second stage.", 0)
    finetune_target: str = option("What it compares: hidden_states or logits.", "hidden_states")
    finetune_learning_rate: float = option("Its learning rate.", 5e-5)
    lora_rank: int | None = option("Train LoRA adapters of this rank in it.", None)

    def __post_init__(self) -> None:
        arguments.check_counts(
            self, "steps", "length", "max_length", "per_device_train_batch_size", "save_steps", "lora_rank"
        )
        if self.lora_rank is not None and not self.finetune_steps:
            raise ValueError("--lora_rank needs --finetune_steps")


def plan_of(args: DistillationArguments, attention: AttentionArguments) -> Plan:
    """What the options ask for.

    Raises:
        ValueError: --attention names no method, or there are stages.
    """
    if attention.stages or attention.preset:
        raise ValueError("--stages and --preset are for training with labels: name one method with --attention")
    config, layers = attention.method() or (None, None)
    if not isinstance(config, MethodConfig):
        raise ValueError("--attention must name a method with learned parameters (`hf-efficient-attn methods`)")
    second = None
    if args.finetune_steps:
        second = FinetuningOptions(
            steps=args.finetune_steps,
            target=args.finetune_target,
            learning_rate=args.finetune_learning_rate,
            lora_rank=args.lora_rank,
        )
    return Plan(
        output=pathlib.Path(args.output_dir),
        method=config.method,
        hyperparameters={name: value for name, value in config.to_dict().items() if name != "method"},
        layers=layers,
        max_length=args.max_length,
        force=args.overwrite,
        restart=args.restart,
        steps=args.steps,
        loss=args.loss,
        length=args.length,
        batch_size=args.per_device_train_batch_size,
        save_steps=args.save_steps,
        options=DistillationOptions(learning_rate=args.learning_rate, seed=args.seed, finetuning=second),
    )


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the recipe with the given options; return the report of `distill_checkpoint`."""
    args, attention = arguments.parse_only(DistillationArguments, AttentionArguments, description=__doc__, argv=argv)
    plan, accelerator = plan_of(args, attention), accelerate.Accelerator()
    arguments.check_connected(accelerator.num_processes)
    accelerate.utils.set_seed(args.seed)
    rows = Rows(is_silent=not accelerator.is_main_process)
    try:
        with accelerator.autocast():
            source = Source(args.model_name_or_path, device=accelerator.device)
            report = distill_checkpoint(source, args.data, plan, rows.execution())
    except Interrupted as interruption:
        found = interruption.result
        if accelerator.is_main_process:
            print(f"Stopped after {found['steps_done']} of {found['steps']} steps. The state is in {found['folder']}: "
                  "the same command continues.", file=sys.stderr)  # fmt: skip
        raise KeyboardInterrupt from None
    if accelerator.is_main_process:
        rows.conclude(report)
    return report


if __name__ == "__main__":
    arguments.main_of(run)
