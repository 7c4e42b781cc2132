"""Long Range Arena (Tay et al., ICLR 2021): a small encoder from scratch on one of its tasks, at any attention.

    accelerate launch recipes/lra.py --task listops --attention nystromformer --max_steps 1000 --output_dir OUT
    accelerate launch recipes/lra.py --task text --data IMDB --attention kdeformer --output_dir OUT
    accelerate launch recipes/lra.py --task image --data CIFAR10.zip --stages linear:0.25 flurka_linear:1.0 ...
    accelerate launch recipes/lra.py --task retrieval --data lra_release/tsv_data --output_dir OUT
    accelerate launch recipes/lra.py --task pathfinder --data lra_release/pathfinder32 --output_dir OUT

The encoder is a Transformers BERT of the benchmark's size: 2 layers, width 64, 2 heads, feed-forward 128, learned
positions; an MLP classifies the mean of its output over the tokens (with --pooling cls the output at a first token).
Retrieval encodes both texts a and b with it and classifies [a, b, a*b, a-b]. ListOps are drawn by the benchmark's rules
and kept in --cache_dir; where the other data come from is told in recipes/data/lra.py.

Seconds of one core (CPU time) for a step of training, default hyperparameters:

    task, batch               exact   kdeformer   linear
    listops, 8                 0.89      0.49       0.18
    text, 4,096 bytes, 8       3.1       0.92       0.36
    image, 32                  1.4       1.3        0.52

The benchmark trains for thousands of steps. To expect after 300 (`--attention linear --max_steps 300`): image, batch
32, 5,000 training and 1,000 test pictures (JPEGs), an accuracy of .22, chance being .10; ListOps, batch 16, still .17,
which is no more than guessing.
"""

import dataclasses
import math
import os
import pathlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])  # as a file: the folder above recipes

import torch
from datasets import Dataset
from sklearn.metrics import accuracy_score
from torch import Tensor, nn
from transformers import BertConfig, BertModel, BertPreTrainedModel, EvalPrediction, Trainer
from transformers.modeling_outputs import SequenceClassifierOutput

from recipes import arguments, training
from recipes.arguments import AttentionArguments
from recipes.data import listops, lra

DEFAULTS = {
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 32,
    "warmup_steps": 0.1,
    "remove_unused_columns": False,
}


@dataclass
class TaskArguments:
    """Which task, and where its data are.

    Raises:
        ValueError: no such task, or no data for it.
    """

    _argument_group_name = "task"

    task: str | None = field(default=None, metadata={"help": f"One of {', '.join(lra.TASKS)}. Needed."})
    data: str | None = field(
        default=None,
        metadata={"help": "Folder in the benchmark's layout; for text and image also a hub id, for image a zip file."},
    )
    max_length: int | None = field(
        default=None, metadata={"help": "Tokens of a row at most, at which texts are cut. Default: the benchmark's."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on so many, drawn at random."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on so many, drawn at random."})
    eval_split: str | None = field(
        default=None, metadata={"help": "Of image: the split to evaluate on. Default: test."}
    )
    difficulty: str = field(default="hard", metadata={"help": "Of pathfinder.", "choices": list(lra.DIFFICULTIES)})
    skip_bad_images: bool = field(default=False, metadata={"help": "Go on without images that cannot be read."})
    cache_dir: str | None = field(
        default=None,
        metadata={"help": "Folder for ListOps that were drawn. Default: hf_efficient_attn in the user's cache."},
    )
    listops_train: int = field(default=96000, metadata={"help": "ListOps to train on, where --data is not given."})
    listops_eval: int = field(default=2000, metadata={"help": "ListOps to evaluate on."})
    listops_seed: int = field(default=0, metadata={"help": "Of the ListOps that are drawn."})
    min_length: int = field(
        default=500,
        metadata={"help": "ListOps that are drawn are longer than so many tokens, and shorter than --max_length."},
    )

    def __post_init__(self) -> None:
        if self.task is None:
            raise ValueError(f"--task is missing: one of {', '.join(lra.TASKS)}")
        lra.task_of(self.task)
        if self.data is None and self.task != "listops":
            raise ValueError(f"--task {self.task} needs --data: a folder in the benchmark's layout")
        for name in ("max_length", "max_train_samples", "max_eval_samples", "listops_train", "listops_eval"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"--{name} {count}: give 1 or more")
        if self.task == "image" and self.max_length and math.isqrt(self.max_length) ** 2 != self.max_length:
            raise ValueError(f"--max_length {self.max_length} is no square: pictures of side S have S * S tokens")
        if self.task == "listops" and self.data is None:
            self.rules()

    def rules(self) -> listops.Rules:
        """What ListOps are drawn."""
        longest = self.max_length or lra.TASKS["listops"].max_length
        return listops.Rules(min_length=self.min_length, max_length=longest)


@dataclass
class EncoderArguments:
    """The encoder; the defaults are the benchmark's."""

    _argument_group_name = "encoder"

    num_layers: int = field(default=2, metadata={"help": "Layers."})
    hidden_size: int = field(default=64, metadata={"help": "Width."})
    num_heads: int = field(default=2, metadata={"help": "Attention heads."})
    intermediate_size: int = field(default=128, metadata={"help": "Width of the feed-forward layers and the MLP."})
    dropout: float = field(default=0.1, metadata={"help": "Of hidden states."})
    attention_dropout: float = field(
        default=0.0,
        metadata={"help": "Of attention. The benchmark has 0.1, with which exact attention has no fast path on a CPU."},
    )
    pooling: str = field(
        default="mean", metadata={"help": "mean of all tokens, or cls: a first token.", "choices": ["mean", "cls"]}
    )

    def __post_init__(self) -> None:
        if min(self.num_layers, self.hidden_size, self.num_heads, self.intermediate_size) < 1:
            raise ValueError("the encoder's sizes must be 1 or more")
        if self.hidden_size % self.num_heads:
            raise ValueError(f"--hidden_size {self.hidden_size} is no multiple of --num_heads {self.num_heads}")


class LongRangeModel(BertPreTrainedModel):
    """BERT with the benchmark's classifier.

    Args:
        config: a BertConfig with, besides its own entries, `pooling` ("mean" or "cls") and `pairs` (whether it takes
            two sequences).
    """

    def __init__(self, config: BertConfig):
        super().__init__(config)
        width = config.hidden_size
        self.bert = BertModel(config, add_pooling_layer=False)
        self.classifier = nn.Sequential(
            nn.Linear(width * (4 if config.pairs else 1), config.intermediate_size),
            nn.ReLU(),
            nn.Linear(config.intermediate_size, config.num_labels),
        )
        self.post_init()

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """(B, N) -> (B, width)."""
        states = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        if self.config.pooling == "cls":
            return states[:, 0]
        if attention_mask is None:
            return states.mean(1)
        there = attention_mask.unsqueeze(-1).to(states.dtype)
        return (states * there).sum(1) / there.sum(1)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        other_ids: Tensor | None = None,
        other_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """input_ids (B, N), for pairs also other_ids (B, M), with masks of 1 where a token stands; labels (B,)."""
        pooled = self.encode(input_ids, attention_mask)
        if self.config.pairs:
            other = self.encode(other_ids, other_mask)
            pooled = torch.cat((pooled, other, pooled * other, pooled - other), dim=-1)
        logits = self.classifier(pooled)
        loss = None if labels is None else nn.functional.cross_entropy(logits.float(), labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def make_model(task: lra.Task, encoder: EncoderArguments, max_length: int) -> LongRangeModel:
    """A new model for rows of up to `max_length` tokens."""
    config = BertConfig(
        vocab_size=task.tokens + lra.OFFSET,
        hidden_size=encoder.hidden_size,
        num_hidden_layers=encoder.num_layers,
        num_attention_heads=encoder.num_heads,
        intermediate_size=encoder.intermediate_size,
        hidden_dropout_prob=encoder.dropout,
        attention_probs_dropout_prob=encoder.attention_dropout,
        max_position_embeddings=max_length + (encoder.pooling == "cls"),
        type_vocab_size=1,
        pad_token_id=lra.PAD,
        num_labels=task.labels,
        pooling=encoder.pooling,
        pairs=task.pairs,
    )
    return LongRangeModel(config)


def load(asked: TaskArguments, wanted: lra.Wanted) -> dict[str, Dataset]:
    """The rows of the task by split: train, and validation, test or both.

    Raises:
        ValueError: data that are missing, empty or not in the benchmark's layout.
    """
    if asked.task == "listops":
        return lra.load_listops(asked.data or draw_listops(asked), wanted)
    if asked.task == "text":
        return lra.load_text(asked.data, wanted)
    if asked.task == "image":
        return lra.load_image(asked.data, wanted, asked.eval_split)
    if asked.task == "retrieval":
        return lra.load_retrieval(asked.data, wanted)
    return lra.load_pathfinder(asked.data, wanted, asked.difficulty)


def draw_listops(asked: TaskArguments) -> str:
    """The folder of ListOps as asked for, drawn if it is not there yet."""
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(asked.cache_dir or pathlib.Path(cache) / "hf_efficient_attn")
    return str(
        listops.generate(
            folder,
            train=asked.listops_train,
            evaluation=asked.listops_eval,
            rules=asked.rules(),
            seed=asked.listops_seed,
        )
    )


def figures(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy of logits (rows, labels)."""
    return {"accuracy": float(accuracy_score(prediction.label_ids, prediction.predictions.argmax(-1)))}


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train as the command line says; returns what metrics.json holds."""
    asked, encoder, attention, args = arguments.parse(
        TaskArguments, EncoderArguments, AttentionArguments, description=__doc__, argv=argv, defaults=DEFAULTS
    )
    task = lra.task_of(asked.task)
    max_length = asked.max_length or task.max_length
    wanted = lra.Wanted(
        max_length,
        {"train": asked.max_train_samples, "evaluation": asked.max_eval_samples},
        first=encoder.pooling == "cls",
        image_size=math.isqrt(max_length) if asked.task == "image" else None,
        skip_bad=asked.skip_bad_images,
    )
    # Before the data, which may take minutes: what cannot be is refused at once.
    model = make_model(task, encoder, max_length)
    callbacks = training.prepare_attention(model, attention)
    with args.main_process_first(desc="reading the data"):
        rows = load(asked, wanted)
    for split, here in rows.items():
        training.check_not_empty(here, f"{asked.task}, {split}")
    evaluation = {split: here for split, here in rows.items() if split != "train"}
    # The figures of both, if there are two; while it trains, and for a name without a split, those of the first.
    single = next(iter(evaluation.values()))
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows["train"],
        eval_dataset=single,
        data_collator=lra.collate,
        compute_metrics=figures,
        callbacks=callbacks,
    )
    extra = {
        "task": dataclasses.asdict(asked) | {"max_length": max_length},
        "encoder": dataclasses.asdict(encoder),
        "rows": {split: len(here) for split, here in rows.items()},
        "mean_length": {split: float(here["length"][:].mean()) for split, here in rows.items()},
    }
    return training.train_and_report(
        trainer,
        attention,
        evaluate=evaluation if len(evaluation) > 1 else single,
        metric="eval_accuracy",
        extra=extra,
    )


if __name__ == "__main__":
    arguments.main_of(run)
