"""Train masked language models (BERT, RoBERTa and similar) on any text, with any attention method.

    accelerate launch recipes/mlm.py --model_type bert --train_tokenizer 4096 --text BOOKS --block_size 128
        --config_overrides hidden_size=128 num_hidden_layers=4 num_attention_heads=4 intermediate_size=512
        --attention nystromformer --set num_landmarks=16 --learning_rate 1e-3 --warmup_steps 0.1
        --per_device_train_batch_size 32 --max_steps 300 --max_eval_windows 200 --output_dir OUT
    accelerate launch recipes/mlm.py --model bert-base-uncased --extend_positions 2048 --block_size 2048 ...

The first command trains a new model, the second a pretrained one. Each example is a window of a single document.
Training draws a new mask in every epoch; every evaluation uses the same masks. The metrics are accuracy (the share of
masked tokens that the model predicts), loss (nats per masked token) and perplexity. What the frequencies of the tokens
alone would have is printed before, and is in metrics.json.

Duration of the first command on nine novels: six minutes on one thread of a busy machine, 1.2 seconds a step. Expected
after these few steps: a loss of 6.38 and an accuracy of .082.
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

from recipes.common import arguments, language, training
from recipes.common.arguments import AttentionArguments, option
from recipes.common.data import text
from recipes.common.language import MASKED, ModelArguments, TextArguments


@dataclass
class MaskingArguments:
    """Options of masked language models."""

    _argument_group_name = "masking"

    mask_probability: float = option("Share of the tokens that are masked.", 0.15)

    def __post_init__(self) -> None:
        arguments.check_share("mask_probability", self.mask_probability)


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the recipe with the given options; return the contents of metrics.json."""
    types = AttentionArguments, TextArguments, ModelArguments, MaskingArguments
    attention, words, kind, masking, args = arguments.parse(*types, description=__doc__, argv=argv)
    given, about = language.prepare(attention, words, kind, args, MASKED)
    tokenizer = given["processing_class"]
    collator = text.MaskingCollator(tokenizer, masking.mask_probability, args.seed)
    given["eval_dataset"] = collator.mask_once(given["eval_dataset"])
    given["callbacks"].append(training.Epochs(collator.epoch))
    metrics = {"": functools.partial(language.loss_figures, causal=False)}
    trainer = language.LanguageTrainer(**given, data_collator=collator, metrics=metrics, causal=False)
    options = {"evaluate": given["eval_dataset"], "metric": "eval_accuracy", "train": not words.eval_only}
    extra = {**about, "masking": vars(masking)}
    return training.run_and_report(trainer, attention, extra=extra, **options)


if __name__ == "__main__":
    arguments.main_of(run)
