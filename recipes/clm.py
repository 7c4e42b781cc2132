"""Causal language models (GPT-2, Llama and their like) on any text, from scratch or pretrained, at any attention.

    accelerate launch recipes/clm.py --model MODEL --text BOOKS --block_size 2048 --output_dir OUT --eval_positions
        --attention kdeformer --learning_rate 1e-4 --per_device_train_batch_size 2 --max_steps 100
    python recipes/clm.py --model MODEL --text BOOKS --block_size 2048 --output_dir OUT --eval_positions --eval_only
        --drop_short --max_eval_windows 24                                          as it is, without training
    python recipes/clm.py --model_type gpt2 --train_tokenizer 4096 --config_overrides n_layer=4 n_embd=256 n_head=4 ...

Every row is a window of one document: two documents never share a row. `--eval_positions` says how the loss depends on
what the model can look back to: by position, and on passages that stand a second time 256, 768 and 1,536 tokens after
their first place. A model that finds the passage again has a lower loss at the second place; with a method that loses
far tokens it has not. A method without a causal form is refused.

To expect of a GPT-2 of 4 layers, 256 wide, that was trained on nine novels in windows of 2,048 tokens: a step of two
windows takes 2.7 seconds of one core, exact or with `kdeformer`. The second command says 4.047 nats a token in about a
minute of one core; passages have 4.07 at their first place and 2.13, 2.56, 2.96 at the second. With `--attention
longformer --set window_size=256`, not trained for it, it says 4.36, and passages 4.13 and 1.71, 4.21, 5.20: it still
copies what lies within its window, and nothing farther back.
"""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])  # as a file: the folder above recipes

import numpy as np
from transformers import EvalPrediction

from recipes import arguments, language, training
from recipes.arguments import AttentionArguments
from recipes.data import text
from recipes.language import ModelArguments, TextArguments


@dataclass
class CausalArguments:
    """What is particular to causal language models."""

    _argument_group_name = "evaluation"

    eval_only: bool = field(default=False, metadata={"help": "Evaluate the model as it is, without training."})
    eval_positions: bool = field(
        default=False, metadata={"help": "Also the loss by position, and on repeated passages."}
    )
    position_bucket: int = field(default=256, metadata={"help": "Positions that are averaged over."})
    repeat_tokens: int = field(default=128, metadata={"help": "Tokens of a passage that is repeated."})
    repeat_distances: list[int] = field(
        default_factory=lambda: [256, 768, 1536],
        metadata={"help": "How many tokens after its first place it stands again; 0 for no passages."},
    )

    def __post_init__(self) -> None:
        if self.position_bucket < 1:
            raise ValueError("--position_bucket must be 1 or more")
        if any(distance < 0 for distance in self.repeat_distances):
            raise ValueError("--repeat_distances are counts of tokens")
        self.repeat_distances = [distance for distance in self.repeat_distances if distance]


def position_figures(prediction: EvalPrediction, bucket: int) -> dict[str, float]:
    """The figures over all tokens, and `loss_at_<first>_<last>` of each bucket of positions."""
    figures = language.loss_figures(prediction, causal=True)
    nats, _, there = language.counted(prediction, causal=True)
    for start in range(0, nats.shape[1], bucket):
        end = min(start + bucket, nats.shape[1])
        here = there[:, start:end]
        if here.any():
            figures[f"loss_at_{start}_{end - 1}"] = float(nats[:, start:end][here].mean(dtype=np.float64))
    return figures


def repeat_figures(prediction: EvalPrediction) -> dict[str, float]:
    """`first` and `second`: nats a token of the passages at their first and their second place."""
    nats, _, there = language.counted(prediction, causal=True)
    places = nats[there].reshape(len(nats), 2, -1).mean(axis=(0, 2), dtype=np.float64)
    return {"first": float(places[0]), "second": float(places[1])}


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, or only evaluate, as the command line says; returns what metrics.json holds."""
    attention, words, kind, causal, args = arguments.parse(
        AttentionArguments,
        TextArguments,
        ModelArguments,
        CausalArguments,
        description=__doc__,
        argv=argv,
        defaults={"remove_unused_columns": False},
    )
    texts, others = language.load_texts(words, args)
    tokenizer = language.load_tokenizer(kind, args, texts, masked=False)
    model = language.load_model(kind, tokenizer, masked=False)
    size = language.block_size(words, model)
    callbacks = training.prepare_attention(model, attention)
    train, evaluation = language.rows(words, tokenizer, size, texts, others)
    sets, metrics = {"": evaluation}, {"": functools.partial(language.loss_figures, causal=True)}
    if causal.eval_positions:
        metrics[""] = functools.partial(position_figures, bucket=causal.position_bucket)
        if causal.repeat_distances:
            repeated = text.repeated_passages(
                evaluation, distances=causal.repeat_distances, passage=causal.repeat_tokens, block_size=size
            )
            sets |= {f"repeat_{distance}": rows for distance, rows in repeated.items()}
            metrics |= dict.fromkeys((f"repeat_{distance}" for distance in repeated), repeat_figures)
    trainer = language.LanguageTrainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        data_collator=text.CausalCollator(tokenizer.pad_token_id or 0),
        processing_class=tokenizer,
        callbacks=callbacks,
        metrics=metrics,
        causal=True,
    )
    extra = language.about_text(train, evaluation, size, words, kind) | {"evaluation": dataclasses.asdict(causal)}
    if causal.eval_only:
        return training.evaluate_and_report(trainer, attention, evaluate=sets, extra=extra)
    return training.train_and_report(trainer, attention, evaluate=sets if len(sets) > 1 else evaluation, extra=extra)


if __name__ == "__main__":
    arguments.main_of(run)
