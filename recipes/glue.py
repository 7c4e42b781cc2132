"""Fine-tune an encoder on a GLUE task with any attention method, or up-train it through several.

    python recipes/glue.py --task mrpc --data DATA/glue --model_name_or_path MODEL --output_dir OUT
    python recipes/glue.py ... --attention kdeformer --set block_size=8 num_samples=8
    python recipes/glue.py ... --stages performer:0.25 flurka_performer:1.0
    accelerate launch --config_file recipes/configs/eight_gpus.yaml recipes/glue.py ...

DATA/glue holds the official files (MRPC/train.tsv, also .tsv.gz). A hub id such as nyu-mll/glue works as well. OUT gets
the model, metrics.json and learning_curve.png. The same command gives the same numbers.

Duration: five minutes on one thread of a shared AMD EPYC, with 2.1 GiB, for MiniLM (a BERT of 6 layers and 22.7 million
parameters) on MRPC with --attention sdpa --learning_rate 2e-4 --num_train_epochs 1 (115 steps of 32 sentence pairs).
Expected: F1 .831, accuracy .730. Always answering "equivalent" has .812 and .684.
"""

import pathlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
    import recipes  # noqa: F401  # first: it reports missing packages

import transformers
from datasets import DatasetDict
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_efficient_attn.conversion.convert import is_rotary, num_positions
from recipes.common import arguments, training
from recipes.common.arguments import PER_EPOCH, option, samples
from recipes.common.data import glue


@dataclass
class GlueArguments:
    """Task, data and model."""

    _argument_group_name = "GLUE"

    task: str = option(f"One of {', '.join(glue.TASKS)}.")
    data: str = option("Folder that holds <TASK>/train.tsv and dev.tsv, or a hub id.")
    model_name_or_path: str = option("Encoder: a folder or a hub id.", aliases=["--model"])
    max_length: int = option("Tokens of an example; longer ones are truncated.", 128)
    max_train_samples: int | None = samples("Train on")
    max_eval_samples: int | None = samples("Evaluate on")
    skip_bad_rows: bool = option("Skip rows that cannot be read, and report them.", False)

    def __post_init__(self) -> None:
        glue.task_of(self.task)


DEFAULTS = {"per_device_train_batch_size": 32, "per_device_eval_batch_size": 64, "warmup_steps": 0.1, **PER_EPOCH}


def load_data(options: GlueArguments) -> DatasetDict:
    """The splits of the task, with the requested number of examples."""
    data = glue.load(options.task, options.data, skip_bad_rows=options.skip_bad_rows)
    for split in data:
        count = options.max_train_samples if split == "train" else options.max_eval_samples
        data[split] = training.take(data[split], count)
    return data


def load_model(name_or_path: str, task: glue.Task, length: int = 0) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The pretrained model with a new head for the task, and its tokenizer.

    Refused are a tokenizer without a padding token, and a table of positions for fewer than `length` tokens.
    """
    tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    if tokenizer.pad_token is None:
        raise ValueError(f"the tokenizer of {name_or_path} has no padding token, which batches need: use another")
    head: dict[str, Any] = {"num_labels": 1, "problem_type": "regression"}
    if task.labels:
        names = dict(enumerate(task.labels.values()))
        head = {"id2label": names, "label2id": {name: number for number, name in names.items()}}
        head["problem_type"] = "single_label_classification"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(name_or_path, **head)
    limit = num_positions(model)
    if limit is not None and length > limit and not is_rotary(model.config):
        raise ValueError(f"--max_length {length}: the model has positions for {limit} tokens (hea.extend_positions)")
    return model, tokenizer


def tokenize(data: DatasetDict, tokenizer: PreTrainedTokenizerBase, max_length: int) -> DatasetDict:
    """Replace the texts of all splits by token ids. The batches are padded later."""
    texts = [name for name in next(iter(data.values())).column_names if name != "label"]
    return data.map(
        lambda batch: tokenizer(*(batch[name] for name in texts), truncation=True, max_length=max_length),
        batched=True,
        remove_columns=texts,
    )


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the recipe with the given options; return the contents of metrics.json."""
    kinds = GlueArguments, arguments.AttentionArguments
    options, attention, args = arguments.parse(*kinds, description=__doc__, argv=argv, **DEFAULTS)
    task = glue.task_of(options.task)
    if args.label_smoothing_factor and not task.labels:
        raise ValueError(f"--label_smoothing_factor smooths classes, and {options.task} has none: leave it out")
    with args.main_process_first():
        data = load_data(options)
    model, tokenizer = load_model(options.model_name_or_path, task, options.max_length)
    callbacks = training.prepare_attention(model, attention)
    tokens = tokenize(data, tokenizer, options.max_length)
    train, dev = tokens.pop("train"), {split.partition("_")[2]: tokens[split] for split in tokens if split != "train"}
    # MNLI has two development sets, whose metrics are named after them.
    evaluation = dev if len(dev) > 1 else next(iter(dev.values()))
    trainer = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=tokenizer,
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda output: glue.figures(options.task, output.predictions, output.label_ids),
        callbacks=callbacks,
    )
    prefix = "eval_matched" if len(dev) > 1 else "eval"
    extra, metric = {"task": options.task, "rows": data.num_rows}, f"{prefix}_{task.metrics[0]}"
    return training.run_and_report(trainer, attention, evaluate=evaluation, metric=metric, extra=extra)


if __name__ == "__main__":
    arguments.main_of(run)
