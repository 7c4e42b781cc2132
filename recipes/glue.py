"""Fine-tune an encoder on a task of GLUE, with any attention, or by up-training through several.

    python recipes/glue.py --task mrpc --data DATA/glue --model_name_or_path MODEL --output_dir OUT
    python recipes/glue.py ... --attention kdeformer --set num_samples=32
    python recipes/glue.py ... --stages performer:0.25 flurka_performer:1.0
    accelerate launch --config_file recipes/configs/eight_gpus.yaml recipes/glue.py ...

DATA/glue holds the official files (MRPC/train.tsv, also .tsv.gz); a hub id such as nyu-mll/glue serves as well. Written
to OUT: the model, metrics.json, learning_curve.png. The same command gives the same numbers.

To expect: MiniLM (a BERT of 6 layers and 22.7 million parameters) on MRPC with --attention sdpa --learning_rate 2e-4
--num_train_epochs 1 (115 steps of 32 rows): F1 .831, accuracy .730, where the answer "equivalent" throughout has .812
and .684. Five minutes of one thread of a shared AMD EPYC; 2.1 GiB.
"""

import pathlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, Trainer

from recipes import arguments, training
from recipes.data import glue


@dataclass
class GlueArguments:
    """What is trained on what."""

    _argument_group_name = "GLUE"

    task: str = field(metadata={"help": f"One of {', '.join(glue.TASKS)}."})
    data: str = field(metadata={"help": "Folder that holds <TASK>/train.tsv and dev.tsv, or a hub id."})
    model_name_or_path: str = field(metadata={"help": "Encoder: a folder or a hub id.", "aliases": ["--model"]})
    max_length: int = field(default=128, metadata={"help": "Tokens of a row; longer rows are cut."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on so many rows, drawn at random."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on so many rows, drawn at random."})
    skip_bad_rows: bool = field(default=False, metadata={"help": "Leave out rows that cannot be read, and count them."})

    def __post_init__(self) -> None:
        glue.task_of(self.task)


DEFAULTS = {
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 64,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 2,
    "warmup_steps": 0.1,
}


def load_rows(asked: GlueArguments):
    """The splits that are asked for, each with as many rows."""
    rows = glue.load(asked.task, asked.data, skip_bad_rows=asked.skip_bad_rows)
    for split in rows:
        rows[split] = training.take(
            rows[split], asked.max_train_samples if split == "train" else asked.max_eval_samples
        )
    return rows


def load_model(name_or_path: str, task: glue.Task) -> tuple[Any, Any]:
    """The pretrained model with a new head for the task, and its tokenizer.

    Raises:
        ValueError: the tokenizer has no padding token.
    """
    tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    if tokenizer.pad_token is None:
        raise ValueError(f"the tokenizer of {name_or_path} has no padding token, which rows of a batch need")
    head = {"num_labels": 1, "problem_type": "regression"}
    if not task.regression:
        head = {
            "id2label": dict(enumerate(task.names)),
            "label2id": {name: number for number, name in enumerate(task.names)},
            "problem_type": "single_label_classification",
        }
    return AutoModelForSequenceClassification.from_pretrained(name_or_path, **head), tokenizer


def tokenize(rows, tokenizer, max_length: int):
    """All splits with token numbers instead of texts; padding comes with the batches."""
    texts = [name for name in next(iter(rows.values())).column_names if name != "label"]
    return rows.map(
        lambda batch: tokenizer(*(batch[name] for name in texts), truncation=True, max_length=max_length),
        batched=True,
        remove_columns=texts,
    )


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train as the command line says; returns what metrics.json holds."""
    asked, attention, args = arguments.parse(
        GlueArguments, arguments.AttentionArguments, description=__doc__, argv=argv, defaults=DEFAULTS
    )
    task = glue.task_of(asked.task)
    with args.main_process_first():
        rows = load_rows(asked)
    model, tokenizer = load_model(asked.model_name_or_path, task)
    training.check_length(model, asked.max_length)
    callbacks = training.prepare_attention(model, attention)
    tokens = tokenize(rows, tokenizer, asked.max_length)
    train, dev = tokens.pop("train"), {split.partition("_")[2]: tokens[split] for split in tokens if split != "train"}
    # MNLI's two development sets get figures of their own; a single one needs no name.
    evaluation = dev if len(dev) > 1 else next(iter(dev.values()))
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda output: glue.figures(asked.task, output.predictions, output.label_ids),
        callbacks=callbacks,
    )
    prefix = "eval_matched" if len(dev) > 1 else "eval"
    return training.train_and_report(
        trainer,
        attention,
        evaluate=evaluation,
        metric=f"{prefix}_{task.metrics[0]}",
        extra={"task": asked.task, "rows": rows.num_rows},
    )


if __name__ == "__main__":
    arguments.main_of(run)
