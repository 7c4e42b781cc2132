"""Train causal language models (GPT-2, Llama and similar) on any text, with any attention method.

    accelerate launch recipes/clm.py --model MODEL --text BOOKS --block_size 2048 --output_dir OUT --eval_positions
        --attention kdeformer --learning_rate 1e-4 --per_device_train_batch_size 2 --max_steps 100
    python recipes/clm.py --model MODEL --text BOOKS --block_size 2048 --output_dir OUT --eval_positions --eval_only
        --drop_short --max_eval_windows 24                                          (evaluates without training)
    python recipes/clm.py --model_type gpt2 --train_tokenizer 4096 --config_overrides n_layer=4 n_embd=256 n_head=4 ...

Each example is a window of a single document. `--eval_positions` measures how the loss depends on earlier tokens: by
position, and on passages that are repeated after `--distances`. A model that attends to the first occurrence has a
lower loss on the second one, unless its method loses distant tokens. A method without a causal form is refused.

Duration for a GPT-2 of 4 layers with hidden size 256, trained on nine novels in windows of 2,048 tokens: a training
step of two windows takes 2.7 seconds on one core, with exact attention or `kdeformer`. The second command takes about a
minute. Expected from it: 4.047 nats per token; 4.07 on the first occurrence of the passages and 2.13, 2.56 and 2.96 on
the second. With `--attention longformer --set window_size=256` and no training: 4.36; 4.13, and 1.71, 4.21 and 5.20.
"""

import functools
import pathlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
    import recipes  # noqa: F401  # first: it reports missing packages

import numpy as np
from datasets import Dataset
from transformers import EvalPrediction

from recipes.common import arguments, language, training
from recipes.common.arguments import AttentionArguments, option
from recipes.common.data import text
from recipes.common.language import CAUSAL, ModelArguments, TextArguments

# Positions of a bucket, and tokens of a repeated passage.
BUCKET, PASSAGE = 256, 128


@dataclass
class CausalArguments:
    """Options of the evaluation of causal language models."""

    _argument_group_name = "evaluation"

    eval_positions: bool = option("Also measure the loss by position and on repeated passages.", False)
    distances: list[int] = option("Tokens from these passages to their repetition.", [256, 768, 1536], metavar="N")

    def __post_init__(self) -> None:
        if min(self.distances) < PASSAGE:
            raise ValueError(f"--distances {min(self.distances)} is less than the {PASSAGE} tokens of a passage")


def position_figures(prediction: EvalPrediction, bucket: int) -> dict[str, float]:
    """The metrics over all tokens, and `loss_at_<first>_<last>` for each bucket of positions."""
    figures = language.loss_figures(prediction, causal=True)
    nats, _, counts = language.counted(prediction, causal=True)
    for start in range(0, nats.shape[1], bucket):
        part, end = counts[:, start : start + bucket], min(start + bucket, nats.shape[1])
        if part.any():
            figures[f"loss_at_{start}_{end - 1}"] = float(nats[:, start:end][part].mean(dtype=np.float64))
    return figures


def repeat_figures(prediction: EvalPrediction) -> dict[str, float]:
    """Nats per token of the repeated passages, for their `first` and `second` occurrence."""
    nats, _, counts = language.counted(prediction, causal=True)
    means = nats[counts].reshape(len(nats), 2, -1).mean(axis=(0, 2), dtype=np.float64)
    return {"first": float(means[0]), "second": float(means[1])}


def repeated_passages(rows: Dataset, *, distances: Sequence[int], passage: int, block_size: int) -> dict[int, Dataset]:
    """Insert a passage into full windows (block_size,) a second time, several `distances` after its start.

    What is pushed beyond the end is dropped. The passages and their first positions are the same for all distances.
    Only the tokens of the two occurrences have `labels`, except for the first token of each: nothing announces the
    second occurrence. Refused are distances for which both do not fit into a window.
    """
    last = block_size - max(distances) - passage
    if last < 1:
        raise ValueError(
            f"a passage of {passage} tokens and its repetition {max(distances)} tokens later do not fit into windows "
            f"of {block_size}: give a larger --block_size"
        )
    full = [row["input_ids"] for row in rows if row["length"] == block_size]
    if not full:
        raise ValueError(f"no evaluation window has {block_size} tokens: repeated passages need full windows")
    generator = np.random.default_rng(0)
    starts = [int(generator.integers(1, last + 1)) for _ in full]
    examples: dict[int, list] = {distance: [] for distance in distances}
    for distance in distances:
        for ids, start in zip(full, starts, strict=True):
            second = start + distance
            repeated = np.concatenate((ids[:second], ids[start : start + passage], ids[second:]))[:block_size]
            labels = np.full_like(repeated, text.IGNORED)
            for first in (start + 1, second + 1):
                labels[first : first + passage - 1] = repeated[first : first + passage - 1]
            examples[distance].append({"input_ids": repeated, "labels": labels})
    return {distance: Dataset.from_list(found).with_format("numpy") for distance, found in examples.items()}


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the recipe with the given options; return the contents of metrics.json."""
    types = AttentionArguments, TextArguments, ModelArguments, CausalArguments
    attention, words, kind, causal, args = arguments.parse(*types, description=__doc__, argv=argv)
    given, about = language.prepare(attention, words, kind, args, CAUSAL)
    sets, metrics = {"": given["eval_dataset"]}, {"": functools.partial(language.loss_figures, causal=True)}
    if causal.eval_positions:
        metrics[""] = functools.partial(position_figures, bucket=BUCKET)
        size = about["block_size"]
        repeated = repeated_passages(sets[""], distances=causal.distances, passage=PASSAGE, block_size=size)
        for distance, rows in repeated.items():
            sets[f"repeat_{distance}"], metrics[f"repeat_{distance}"] = rows, repeat_figures
    collate = functools.partial(text.collate, pad_token_id=given["processing_class"].pad_token_id or 0)
    trainer = language.LanguageTrainer(**given, data_collator=collate, metrics=metrics, causal=True)
    evaluate, extra = sets if len(sets) > 1 else sets[""], {**about, "evaluation": vars(causal)}
    return training.run_and_report(trainer, attention, evaluate=evaluate, extra=extra, train=not words.eval_only)


if __name__ == "__main__":
    arguments.main_of(run)
