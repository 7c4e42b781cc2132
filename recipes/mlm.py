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

import dataclasses
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
from recipes.common.language import TextArguments
from recipes.common.language_models import MASKED, ModelArguments


@dataclass
class MaskingArguments:
    """Options of masked language models."""

    _argument_group_name = "masking"

    mask_probability: float = option("Share of the tokens that are masked.", default=0.15)
    whole_words: bool = option("Mask whole words instead of tokens.", default=False)
    eval_only: bool = option("Evaluate the model as it is, without training.", default=False)

    def __post_init__(self) -> None:
        if not 0 < self.mask_probability < 1:
            raise ValueError(f"--mask_probability {self.mask_probability:g} must be between 0 and 1")


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the recipe with the given options; return the contents of metrics.json."""
    attention, words, kind, masking, args = arguments.parse(
        AttentionArguments,
        TextArguments,
        ModelArguments,
        MaskingArguments,
        description=__doc__,
        argv=argv,
        # The collator needs the number of the window, which is not an argument of the model.
        defaults={"remove_unused_columns": False},
    )
    tokenizer, model, callbacks, train, evaluation, size = language.prepare(
        attention, words, kind, args, MASKED, offsets=masking.whole_words
    )
    collator = text.MaskingCollator(
        tokenizer, probability=masking.mask_probability, whole_words=masking.whole_words, seed=args.seed
    )
    extra = language.about_text(train, evaluation, size, words, kind) | {"masking": dataclasses.asdict(masking)}
    evaluation = collator.mask_once(evaluation)
    trivial = text.baselines(train, evaluation, len(tokenizer), collator.special)
    training.show_baselines(trivial, args)
    extra["baselines"] = trivial
    trainer = language.LanguageTrainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        data_collator=collator,
        processing_class=tokenizer,
        callbacks=[*callbacks, text.EpochOfMasks(collator)],
        metrics={"": functools.partial(language.loss_figures, causal=False)},
        causal=False,
    )
    if masking.eval_only:
        return training.evaluate_and_report(trainer, attention, evaluate={"": evaluation}, extra=extra)
    return training.train_and_report(trainer, attention, evaluate=evaluation, extra=extra, metric="eval_accuracy")


if __name__ == "__main__":
    arguments.main_of(run)
