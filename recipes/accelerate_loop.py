"""A training loop of one's own, without Trainer: GLUE by Accelerate, with the same up-training schedule.

    python recipes/accelerate_loop.py --task mrpc --data DATA/glue --model_name_or_path MODEL --output_dir OUT \\
        --stages linformer:0.25 flurka_performer:1.0
    accelerate launch --config_file recipes/configs/cpu.yaml recipes/accelerate_loop.py ...

Accelerate has the processes and the precision, from its config file. `schedule.step` comes before every optimizer step;
a checkpoint holds the model, the optimizer, the learning rate and all random states, and --resume goes on from the last
whole one as if nothing had happened. Written to OUT: the model, metrics.json, learning_curve.png.

To expect: MiniLM on MRPC with --stages linformer,projection_dim=128:0.25 flurka_performer:1.0 --max_steps 80
--per_device_train_batch_size 16 --learning_rate 2e-4: a switch at step 20, F1 .785, accuracy .657, which is less than
the .684 of answering "equivalent" throughout: 1,280 rows show that it runs, not what it can learn. Three minutes of one
thread of a shared AMD EPYC.
"""

import json
import math
import pathlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import accelerate
import torch
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import DataCollatorWithPadding, get_linear_schedule_with_warmup

from hf_efficient_attn.io.writing import replacing
from recipes import arguments, reporting, training
from recipes.data import glue
from recipes.glue import GlueArguments, load_model, load_rows, tokenize


@dataclass
class LoopArguments:
    """What Trainer's arguments would say."""

    _argument_group_name = "training"

    output_dir: str = field(metadata={"help": "Folder for the model, its checkpoints and its figures."})
    overwrite: bool = field(default=False, metadata={"help": "Write into an output folder that is not empty."})
    resume: bool = field(default=False, metadata={"help": "Go on from the last whole checkpoint in the output folder."})
    num_train_epochs: float = field(default=3.0, metadata={"help": "Passes over the training set."})
    max_steps: int | None = field(default=None, metadata={"help": "Optimizer steps instead of passes."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Rows of a process and a forward pass."})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Forward passes of an optimizer step."})
    learning_rate: float = field(default=5e-5, metadata={"help": "Highest; it falls linearly after the warm-up."})
    warmup_share: float = field(default=0.1, metadata={"help": "Share of the steps in which the rate grows."})
    weight_decay: float = field(default=0.0, metadata={"help": "Of AdamW."})
    save_steps: int = field(default=500, metadata={"help": "Steps from one checkpoint to the next."})
    seed: int = field(default=0, metadata={"help": "Of the new weights, the order of the data, dropout and draws."})

    def __post_init__(self) -> None:
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "save_steps", "max_steps"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: give 1 or more")


def last_checkpoint(folder: str) -> tuple[pathlib.Path, dict[str, Any]] | None:
    """The newest checkpoint with its `loop.json`, which is written last and in one piece."""
    found = [
        (json.loads(path.read_text()), path.parent) for path in pathlib.Path(folder).glob("checkpoint-*/loop.json")
    ]
    return max(((path, done) for done, path in found), key=lambda pair: pair[1]["step"], default=None)


@torch.no_grad()
def evaluate(accelerator, model, rows, collate, task: str) -> dict[str, float]:
    """The official figures on a split, from all processes."""
    loader = accelerator.prepare(DataLoader(rows, batch_size=64, collate_fn=collate))
    outputs = [accelerator.gather_for_metrics((model(**batch).logits.float(), batch["labels"])) for batch in loader]
    logits, labels = (torch.cat(parts).cpu().numpy() for parts in zip(*outputs, strict=True))
    return glue.figures(task, logits, labels)


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train as the command line says; returns what metrics.json holds."""
    asked, attention, args = arguments.parse_only(
        GlueArguments, arguments.AttentionArguments, LoopArguments, description=__doc__, argv=argv
    )
    accelerator = accelerate.Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    accelerate.utils.set_seed(args.seed)
    arguments.prepare_output(args.output_dir, accelerator.state, args.resume, args.overwrite)
    if not sys.stderr.isatty():
        arguments.no_bars()
    folder, task = pathlib.Path(args.output_dir), glue.task_of(asked.task)
    with accelerator.main_process_first():
        rows = load_rows(asked)
    model, tokenizer = load_model(asked.model_name_or_path, task)
    training.check_length(model, asked.max_length)
    training.prepare_attention(model, attention)
    tokens, collate = tokenize(rows, tokenizer, asked.max_length), DataCollatorWithPadding(tokenizer)
    # A generator of its own: fetching data takes nothing from the random state that dropout draws from.
    loader = accelerator.prepare(
        DataLoader(tokens["train"], batch_size=args.per_device_train_batch_size, shuffle=True, collate_fn=collate,
                   generator=torch.Generator().manual_seed(args.seed))
    )  # fmt: skip
    steps_of_epoch = math.ceil(len(loader) / args.gradient_accumulation_steps)
    total = args.max_steps or math.ceil(args.num_train_epochs * steps_of_epoch)
    schedule = attention.schedule(total)
    found = last_checkpoint(args.output_dir) if args.resume else None
    done = found[1] if found else {"step": 0, "epoch": 0, "batch": 0, "log": []}
    if schedule is not None:
        # The stage of the first step, or that in which the checkpoint was saved: a switch comes before its step.
        schedule.step(model, None, max(0, done["step"] - 1))

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    rate = get_linear_schedule_with_warmup(optimizer, round(args.warmup_share * total), total)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(rate)
    if found:
        accelerator.load_state(str(found[0]))

    step, epoch, log, losses, started = done["step"], done["epoch"], done["log"], [], time.perf_counter()
    bar = tqdm(total=total, initial=step, disable=not (accelerator.is_main_process and sys.stderr.isatty()))
    model.train()
    while step < total:
        loader.set_epoch(epoch)
        skipped = done["batch"] if epoch == done["epoch"] else 0
        for batch_number, batch in enumerate(accelerate.skip_first_batches(loader, skipped), start=skipped + 1):
            if schedule is not None and not losses and (switch := schedule.step(model, optimizer, step)):
                log.append({"step": step, "uptraining_from": switch["from"], "uptraining_stage": switch["to"]})
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                losses.append(loss.detach())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            rate.step()
            step, loss = step + 1, accelerator.gather(torch.stack(losses).mean()).mean().item()
            log.append({"step": step, "loss": loss})
            losses = []
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}")
            if step % args.save_steps == 0:
                save(accelerator, folder, {"step": step, "epoch": epoch, "batch": batch_number, "log": log})
            if step == total:
                break
        epoch += 1
    bar.close()
    seconds = (time.perf_counter() - started) / max(1, step - done["step"])

    model.eval()
    results = {}
    for split in tokens:
        if split != "train":
            figures = evaluate(accelerator, model, tokens[split], collate, asked.task)
            results |= {f"eval{split.removeprefix('validation')}_{name}": value for name, value in figures.items()}
    log.append({"step": step, **results})
    bare = accelerator.unwrap_model(model)
    bare.save_pretrained(
        folder, is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )
    report = {"metrics": results, "steps": step, "seconds_per_step": seconds, "seed": args.seed,
              "precision": accelerator.mixed_precision, "switches": reporting.switches_of(log),
              **reporting.about_run(attention, bare, accelerator.num_processes, accelerator.device)}  # fmt: skip
    if accelerator.is_main_process:
        tokenizer.save_pretrained(folder)
        reporting.write_report(report, log, folder, next(iter(results)))
    accelerator.wait_for_everyone()
    return report


def save(accelerator, folder: pathlib.Path, done: dict[str, Any]) -> None:
    """A checkpoint, whole when its `loop.json` is there."""
    path = folder / f"checkpoint-{done['step']}"
    accelerator.save_state(str(path))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        with replacing(path / "loop.json") as draft:
            draft.write_text(json.dumps(done))


if __name__ == "__main__":
    arguments.main_of(run)
