"""Train causal language models (GPT-2, Llama and similar) on any text, with any attention method.

    accelerate launch recipes/clm.py --model MODEL --text BOOKS --block_size 2048 --output_dir OUT --eval_positions
        --attention kdeformer --learning_rate 1e-4 --per_device_train_batch_size 2 --max_steps 100
    python recipes/clm.py --model MODEL --text BOOKS --block_size 2048 --output_dir OUT --eval_positions --eval_only
        --drop_short --max_eval_windows 24                                          (evaluates without training)
    python recipes/clm.py --model_type gpt2 --train_tokenizer 4096 --config_overrides n_layer=4 n_embd=256 n_head=4 ...

Each example is a window of a single document. `--eval_positions` measures how the loss depends on earlier tokens: by
position, and on passages that are repeated after 256, 768 and 1,536 tokens. A model that attends to the first
occurrence has a lower loss on the second one. A method that loses distant tokens does not lower it. A method without a
causal form is refused.

Duration for a GPT-2 of 4 layers with hidden size 256, trained on nine novels in windows of 2,048 tokens: a training
step of two windows takes 2.7 seconds on one core, with exact attention or `kdeformer`. The second command takes about a
minute. Expected from it: 4.047 nats per token; 4.07 on the first occurrence of the passages and 2.13, 2.56 and 2.96 on
the second. With `--attention longformer --set window_size=256` and no training: 4.36; 4.13, and 1.71, 4.21 and 5.20.
The model still copies from within the window, but not from outside.
"""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
    import recipes  # noqa: F401  # first: it reports missing packages

import numpy as np
from transformers import EvalPrediction

from recipes.common import arguments, language, training
from recipes.common.arguments import AttentionArguments, option
from recipes.common.data import text
from recipes.common.language import ModelArguments, TextArguments


@dataclass
class CausalArguments:
    """Options of causal language models."""

    _argument_group_name = "evaluation"

    eval_only: bool = option("Evaluate the model as it is, without training.", default=False)
    eval_positions: bool = option("Also measure the loss by position and on repeated passages.", default=False)
    position_bucket: int = option("Number of positions in a bucket of the loss by position.", default=256)
    repeat_tokens: int = option("Tokens of a repeated passage.", default=128)
    repeat_distances: list[int] = field(
        default_factory=lambda: [256, 768, 1536],
        metadata={"help": "Distances between the two occurrences of a passage, in tokens; 0 for no passages."},
    )

    def __post_init__(self) -> None:
        if self.position_bucket < 1:
            raise ValueError(f"--position_bucket {self.position_bucket}: give 1 or more")
        if any(distance < 0 for distance in self.repeat_distances):
            raise ValueError("--repeat_distances must be 0 or more")
        self.repeat_distances = [distance for distance in self.repeat_distances if distance]


def position_figures(prediction: EvalPrediction, bucket: int) -> dict[str, float]:
    """The metrics over all tokens, and `loss_at_<first>_<last>` for each bucket of positions."""
    figures = language.loss_figures(prediction, causal=True)
    nats, _, counts = language.counted(prediction, causal=True)
    for start in range(0, nats.shape[1], bucket):
        end = min(start + bucket, nats.shape[1])
        part = counts[:, start:end]
        if part.any():
            figures[f"loss_at_{start}_{end - 1}"] = float(nats[:, start:end][part].mean(dtype=np.float64))
    return figures


def repeat_figures(prediction: EvalPrediction) -> dict[str, float]:
    """Nats per token of the repeated passages, for their `first` and `second` occurrence."""
    nats, _, counts = language.counted(prediction, causal=True)
    means = nats[counts].reshape(len(nats), 2, -1).mean(axis=(0, 2), dtype=np.float64)
    return {"first": float(means[0]), "second": float(means[1])}


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the recipe with the given options; return the contents of metrics.json."""
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
    train, evaluation = language.windows(words, tokenizer, size, texts, others)
    sets, metrics = {"": evaluation}, {"": functools.partial(language.loss_figures, causal=True)}
    if causal.eval_positions:
        metrics[""] = functools.partial(position_figures, bucket=causal.position_bucket)
        if causal.repeat_distances:
            repeated = text.repeated_passages(
                evaluation, distances=causal.repeat_distances, passage=causal.repeat_tokens, block_size=size
            )
            sets |= {f"repeat_{distance}": windows for distance, windows in repeated.items()}
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
