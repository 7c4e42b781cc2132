"""Fine-tune on GLUE in a custom training loop with Accelerate instead of Trainer, with the same up-training stages.

    python recipes/accelerate_loop.py --task mrpc --data DATA/glue --model_name_or_path MODEL --output_dir OUT
        --stages linformer:0.25 flurka_performer:1.0
    accelerate launch --config_file recipes/configs/cpu.yaml recipes/accelerate_loop.py ...

Accelerate's config file sets the processes and the precision. The loop calls `schedule.step` before every optimizer
step. OUT gets the model, metrics.json and learning_curve.png. Interrupted runs start anew; glue.py continues them.

Duration: three minutes on one thread of a shared AMD EPYC for MiniLM on MRPC with --stages
linformer,projection_dim=128:0.25 flurka_performer:1.0 --max_steps 80 --per_device_train_batch_size 16 --learning_rate
2e-4. Expected: a switch at step 20, F1 .785, accuracy .657. That is less than the .684 of always answering
"equivalent": 1,280 examples only show that the loop works.
"""

import math
import pathlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
    import recipes  # noqa: F401  # first: it reports missing packages

import accelerate
import torch
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import DataCollatorWithPadding, get_linear_schedule_with_warmup

from hf_efficient_attn.training.switch import log_entries, training_batches
from recipes.common import arguments, reporting, training
from recipes.common.arguments import option
from recipes.common.data import glue
from recipes.glue import GlueArguments, load_data, load_model, tokenize


@dataclass
class LoopArguments:
    """Options of the training loop, in place of Trainer's."""

    _argument_group_name = "training"

    output_dir: str = option("Folder for the model and its figures.")
    overwrite: bool = option("Write into an output folder that is not empty.", False)
    num_train_epochs: float = option("Epochs.", 3.0)
    max_steps: int | None = option("Optimizer steps, instead of epochs.", None)
    per_device_train_batch_size: int = option("Examples of a forward pass of one process.", 32)
    gradient_accumulation_steps: int = option("Forward passes for one optimizer step.", 1)
    learning_rate: float = option("Highest learning rate, after a tenth of the steps; then a linear decay to 0.", 5e-5)
    seed: int = option("Seed of new weights, data order, dropout and random draws.", 0)

    def __post_init__(self) -> None:
        arguments.check_counts(self, "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps")


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the recipe with the given options; return the contents of metrics.json."""
    kinds = GlueArguments, arguments.AttentionArguments, LoopArguments
    options, attention, args = arguments.parse_only(*kinds, description=__doc__, argv=argv)
    accelerator = accelerate.Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    accelerate.utils.set_seed(args.seed)
    arguments.prepare_output(args.output_dir, accelerator.state, False, args.overwrite)
    folder, task = pathlib.Path(args.output_dir), glue.task_of(options.task)
    with accelerator.main_process_first():
        data = load_data(options)
    model, tokenizer = load_model(options.model_name_or_path, task, options.max_length)
    training.prepare_attention(model, attention)
    tokens, collate = tokenize(data, tokenizer, options.max_length), DataCollatorWithPadding(tokenizer)
    size = args.per_device_train_batch_size
    # A separate generator, so that loading data does not change the random state that dropout uses.
    order = torch.Generator().manual_seed(args.seed)
    loader = DataLoader(tokens["train"], batch_size=size, shuffle=True, collate_fn=collate, generator=order)
    loader = accelerator.prepare(loader)
    steps_of_epoch = math.ceil(len(loader) / args.gradient_accumulation_steps)
    total = args.max_steps or math.ceil(args.num_train_epochs * steps_of_epoch)
    schedule = attention.schedule(total)
    # For stages with distill=N. They are read by index, so that the loader is not disturbed.
    processes = accelerator.process_index, accelerator.num_processes
    samples = training_batches(tokens["train"], collate, size, *processes)
    if schedule is not None:
        schedule.step(model, None, 0)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    rate = get_linear_schedule_with_warmup(optimizer, round(0.1 * total), total)
    model, optimizer = accelerator.prepare(model, optimizer)

    step, epoch, log, losses, started = 0, 0, list[dict[str, Any]](), [], time.perf_counter()
    bar = tqdm(total=total, disable=not (accelerator.is_main_process and sys.stderr.isatty()))
    model.train()
    while step < total:
        loader.set_epoch(epoch)
        for batch in loader:
            if schedule is not None and not losses and (switch := schedule.step(model, optimizer, step, samples)):
                log.append({"step": step, **log_entries(switch)})
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
            if step == total:
                break
        epoch += 1
    bar.close()
    seconds = (time.perf_counter() - started) / max(1, step)

    results = {}
    for split in tokens:
        if split != "train":
            loader = accelerator.prepare(DataLoader(tokens[split], batch_size=64, collate_fn=collate))
            figures = evaluate(accelerator, model.eval(), loader, options.task)
            results |= {f"eval{split.removeprefix('validation')}_{name}": value for name, value in figures.items()}
    log.append({"step": step, **results})
    unwrapped, is_main = accelerator.unwrap_model(model), accelerator.is_main_process
    unwrapped.save_pretrained(folder, is_main_process=is_main, state_dict=accelerator.get_state_dict(model))
    report = {
        "metrics": results, "steps": step, "seconds_per_step": seconds, "seed": args.seed,
        "precision": accelerator.mixed_precision, "switches": reporting.switches_of(log),
        **reporting.about_run(attention, unwrapped, accelerator.num_processes, accelerator.device),
    }  # fmt: skip
    if is_main:
        tokenizer.save_pretrained(folder)
        reporting.write_report(report, log, folder, next(iter(results)))
    accelerator.wait_for_everyone()
    return report


@torch.no_grad()
def evaluate(accelerator: accelerate.Accelerator, model: Any, loader: DataLoader, task: str) -> dict[str, float]:
    """The official metrics on a split, gathered from all processes."""
    outputs = [accelerator.gather_for_metrics((model(**batch).logits.float(), batch["labels"])) for batch in loader]
    logits, labels = (torch.cat(parts).cpu().numpy() for parts in zip(*outputs, strict=True))
    return glue.figures(task, logits, labels)


if __name__ == "__main__":
    arguments.main_of(run)
