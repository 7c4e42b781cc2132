"""Train encoder-decoder models (Marian and similar) to translate, with any attention method in the encoder.

    python recipes/translation.py --generate 20000 --model_type marian --train_tokenizer 400
        --config_overrides d_model=64 encoder_layers=2 decoder_layers=2 encoder_attention_heads=4
        decoder_attention_heads=4 encoder_ffn_dim=128 decoder_ffn_dim=128 --attention linear --output_dir OUT ...
    python recipes/translation.py --source train.en --target train.de --model Helsinki-NLP/opus-mt-en-de ...
    python recipes/translation.py --dataset wmt14 --dataset_config de-en --eval_split validation
        --source_language en --target_language de --model t5-small --source_prefix "translate English to German: " ...
    python recipes/translation.py ... --preset nmt --variant flurka_performer
    python recipes/translation.py --restore BOOKS --model_type t5 --train_tokenizer 4096 --max_source_length 512
        --config_overrides d_model=128 d_kv=32 d_ff=256 num_layers=4 num_decoder_layers=1 num_heads=4
        --max_target_length 96 --max_eval_samples 16 --per_device_train_batch_size 8 --learning_rate 3e-3
        --max_steps 800 --generation_max_length 8 --output_dir OUT

The first command trains a new model on generated lists of number words, the others a pretrained one. --source and
--target are text files in which line i of one is the translation of line i of the other. With --restore a model learns
from any text, as T5 did: the source is a passage in which spans of words are missing, and the target is these words.
Without --layers only the encoder is converted, as in the FLuRKA paper: most methods are for encoders, and the decoder
attends to few tokens. The evaluation translates, and reports BLEU and chrF (sacrebleu) and the share of translations
that are right to the letter.

`python -m recipes.experiments run translation` has complete options of the first command. Duration of its 300 steps: up
to a minute of one core. Expected: the table of recipes/README.md, a BLEU of 69 with exact attention.
"""

import dataclasses
import pathlib
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

if __package__ in (None, ""):
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
    import recipes  # noqa: F401  # first: it reports missing packages

import numpy as np
import sacrebleu
import transformers
from datasets import Dataset, load_dataset
from torch.utils.data import SequentialSampler
from transformers import EvalPrediction, PreTrainedTokenizerBase

from hf_efficient_attn.conversion.convert import num_positions
from hf_efficient_attn.io.reading import read_text
from recipes.common import arguments, training
from recipes.common.arguments import AttentionArguments, RecipeArguments, check_counts, option, samples, several
from recipes.common.data.text import text_files
from recipes.common.language import TRANSLATION, ModelArguments, load_model, load_tokenizer


@dataclass
class TranslationArguments:
    """The pairs of sentences, and how long they may be."""

    _argument_group_name = "translation"

    source: list[str] = several("Text files (also .gz), one sentence per line.")
    target: list[str] = several("Files with the translations of --source, line by line.")
    eval_source: list[str] = several("As --source, to evaluate on. Default: --eval_share.")
    eval_target: list[str] = several("Translations of --eval_source.")
    dataset: str | None = option("A hub data set instead of --source and --target.", None)
    dataset_config: str | None = option("Configuration of --dataset.", None)
    source_language: str = option("Its key in the rows of --dataset.", "en")
    target_language: str = option("Its key in the rows of --dataset.", "de")
    train_split: str = option("Split of --dataset to train on.", "train")
    eval_split: str | None = option("Split of --dataset to evaluate on. Default: --eval_share.", None)
    generate: int | None = option(
        "Train on N generated pairs instead: lists of English number words, and the German ones in the same or in "
        "reverse order. They are the same for every --seed.",
        None,
        metavar="N",
    )
    restore: list[str] = several(
        "Train on pairs made of these text files or folders instead: passages without some words, and these words."
    )
    eval_share: float = option("Share of the pairs that is held out for evaluation, at random.", 0.05)
    max_train_samples: int | None = samples("Train on")
    max_eval_samples: int | None = samples("Evaluate on")
    max_source_length: int = option("Tokens of a source; longer ones are truncated.", 128)
    max_target_length: int = option("Tokens of a target; longer ones are truncated.", 128)
    source_prefix: str = option("Text before every source, as T5 has it.", "")
    eval_only: bool = option("Evaluate the model as it is, without training.", False)

    def __post_init__(self) -> None:
        sources = [bool(self.source), bool(self.dataset), bool(self.generate), bool(self.restore)]
        sides = (self.source, self.target), (self.eval_source, self.eval_target)
        if sum(sources) != 1 or any(bool(one) != bool(other) for one, other in sides):
            raise ValueError(
                "give the pairs with --source and --target PATH ..., --dataset ID, --generate N or --restore PATH"
            )
        if self.eval_source and not self.source:
            raise ValueError("--eval_source belongs to --source: give --eval_split for a --dataset")
        arguments.check_share("eval_share", self.eval_share)
        counts = "generate", "max_train_samples", "max_eval_samples", "max_source_length", "max_target_length"
        check_counts(self, *counts)


@dataclass
class EncoderAttentionArguments(AttentionArguments):
    """AttentionArguments for the encoder, unless --layers names other layers."""

    default_layers: ClassVar[list[int | str] | None] = ["encoder"]


@dataclass
class TranslationTrainingArguments(RecipeArguments, transformers.Seq2SeqTrainingArguments):
    """RecipeArguments whose evaluation translates: BLEU needs text, not the loss of a given text."""


_ENGLISH = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine",
    "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_ENGLISH_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_GERMAN = [
    "null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun",
    "zehn", "elf", "zwölf", "dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn", "neunzehn",
]  # fmt: skip
_GERMAN_TENS = ["zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"]


def _pairs(found: Iterable[Sequence[str | None]]) -> Dataset:
    """The pairs without surrounding spaces. Those with an empty side are left out."""
    kept = [(a.strip(), b.strip()) for a, b in found if a and b and a.strip() and b.strip()]
    return Dataset.from_dict({"source": [a for a, _ in kept], "target": [b for _, b in kept]})


def pairs_of_files(source: Sequence[str], target: Sequence[str]) -> Dataset:
    """The lines of text files (.txt, also gzipped) and those of their translations, which must be as many."""
    sides = [
        [line for path in text_files(files) for line in read_text(path).removesuffix("\n").split("\n")]
        for files in (source, target)
    ]
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"{', '.join(source)} has {len(sides[0])} lines and {', '.join(target)} has {len(sides[1])}, not as many"
        )
    return _pairs(zip(*sides, strict=True))


def pairs_of_hub(name: str, subset: str | None, split: str, languages: tuple[str, str]) -> Dataset:
    """The pairs of a hub data set, whose rows have a "translation" with both languages, or a column for each."""
    rows = load_dataset(name, subset, split=split)
    found = rows["translation"] if "translation" in rows.column_names else rows
    known = sorted(found[0]) if len(found) else []
    if not set(languages) <= set(known):
        raise ValueError(
            f"{name}, split {split}: no {' and '.join(languages)} (there are {', '.join(known) or 'no rows'}); give "
            "--source_language and --target_language"
        )
    return _pairs([row[language] for language in languages] for row in found)


def english(number: int) -> str:
    """The words of a number below 100: "forty five"."""
    tens, ones = divmod(number, 10)
    return _ENGLISH[number] if tens < 2 else _ENGLISH_TENS[tens - 2] + (f" {_ENGLISH[ones]}" if ones else "")


def german(number: int) -> str:
    """The words of a number below 100, with spaces between them: "fünf und vierzig"."""
    tens, ones = divmod(number, 10)
    if tens < 2:
        return _GERMAN[number]
    return (f"{'ein' if ones == 1 else _GERMAN[ones]} und " if ones else "") + _GERMAN_TENS[tens - 2]


def number_lists(count: int, held_out: int) -> tuple[Dataset, Dataset]:
    """Generated pairs: lists of two to five English number words, and the German ones in the same or in reverse order.

    The first word of the source says which order. German puts the ones before the tens, so that a translation needs
    the words around each word and, in reverse, those at the other end of the list. The results are `count` pairs to
    train on and `held_out` others to evaluate on, without a common source.
    """
    generator = random.Random(0)
    found: dict[str, str] = {}
    while len(found) < count + held_out:
        order = generator.choice(("forward", "backward"))
        numbers = [generator.randrange(100) for _ in range(generator.randint(2, 5))]
        target = numbers if order == "forward" else numbers[::-1]
        found[f"{order} {' , '.join(map(english, numbers))}"] = " , ".join(map(german, target))
    pairs = _pairs(found.items())
    return pairs.select(range(held_out, count + held_out)), pairs.select(range(held_out))


# Words of a passage of `passages`, of which one in `_SPAN_EVERY` begins a missing span of `_SPAN` words on average.
_PASSAGE, _SPAN, _SPAN_EVERY = 300, 3, 20


def passages(paths: Sequence[str]) -> Dataset:
    """Pairs for the objective of T5 (Raffel et al., JMLR 2020, section 3.1.4): passages, and the words missing in them.

    A missing span is "_" in the source, and "_" and its words in the target.
    """
    generator, found = random.Random(0), []
    for path in text_files(paths):
        words = [word for word in read_text(path).split() if "_" not in word]
        for start in range(0, len(words) - _PASSAGE + 1, _PASSAGE):
            source: list[str] = []
            target: list[str] = []
            passage = words[start : start + _PASSAGE]
            while passage:
                if generator.randrange(_SPAN_EVERY) == 0:
                    size = generator.randint(1, 2 * _SPAN - 1)
                    source, target, passage = [*source, "_"], [*target, "_", *passage[:size]], passage[size:]
                else:
                    source.append(passage.pop(0))
            found.append((" ".join(source), " ".join(target)))
    return _pairs(found)


def load_pairs(options: TranslationArguments) -> tuple[Dataset, Dataset]:
    """The pairs to train on and to evaluate on, with the requested numbers of examples."""
    if options.generate:
        pairs, other = number_lists(options.generate, max(1, round(options.generate * options.eval_share)))
    elif options.dataset:
        languages = options.source_language, options.target_language
        splits = (options.train_split, options.eval_split)
        pairs, other = (s and pairs_of_hub(options.dataset, options.dataset_config, s, languages) for s in splits)
    elif options.restore:
        pairs, other = passages(options.restore), None
    else:
        sides = (options.source, options.target), (options.eval_source, options.eval_target)
        pairs, other = (pairs_of_files(*side) if all(side) else None for side in sides)
    if other is None:
        order = pairs.shuffle(seed=0)  # not by the seed of the training, so that all runs have the same examples
        count = round(len(pairs) * options.eval_share)
        pairs, other = order.select(range(count, len(pairs))), order.select(range(count))
    for one in (pairs, other):
        training.check_not_empty(len(one), "the set of pairs")
    return training.take(pairs, options.max_train_samples), training.take(other, options.max_eval_samples)


def tokenize(pairs: Dataset, tokenizer: PreTrainedTokenizerBase, options: TranslationArguments) -> Dataset:
    """Token ids of the pairs. The batches are padded later."""
    sources = [options.source_prefix + text for text in pairs["source"]]
    found = tokenizer(sources, truncation=True, max_length=options.max_source_length, return_token_type_ids=False)
    targets = tokenizer(text_target=list(pairs["target"]), truncation=True, max_length=options.max_target_length)
    return Dataset.from_dict({**found, "labels": targets["input_ids"]})


def scores(translations: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """BLEU and chrF of sacrebleu, from 0 to 100, and the share of translations that equal their reference."""
    return {
        "bleu": sacrebleu.corpus_bleu(list(translations), [list(references)]).score,
        "chrf": sacrebleu.corpus_chrf(list(translations), [list(references)]).score,
        "exact_match": sum(map(str.__eq__, translations, references)) / len(references),
    }


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the recipe with the given options; return the contents of metrics.json."""
    types = TranslationArguments, ModelArguments, EncoderAttentionArguments, TranslationTrainingArguments
    options, kind, attention, args = arguments.parse(
        *types, description=__doc__, argv=argv, warmup_steps=0.1, predict_with_generate=True, **arguments.PER_EPOCH
    )
    with args.main_process_first():
        pairs, others = load_pairs(options)
    tokenizer = load_tokenizer(kind, args, [*pairs["source"], *pairs["target"]], TRANSLATION)
    if tokenizer.pad_token_id is None:
        raise ValueError("the tokenizer has no padding token, which batches need: use one that has one")
    model = load_model(kind, tokenizer, TRANSLATION)
    positions = num_positions(model)
    for name in ("max_source_length", "max_target_length"):
        if positions is not None and getattr(options, name) > positions:
            raise ValueError(f"--{name} {getattr(options, name)} exceeds the model's {positions} positions")
    args.generation_max_length = args.generation_max_length or options.max_target_length
    callbacks = training.prepare_attention(model, attention)
    examples, evaluation = (tokenize(one, tokenizer, options) for one in (pairs, others))
    references = [text.strip() for text in others["target"]]
    trivial = {f"copy_{name}": value for name, value in scores(others["source"], references).items()}
    training.show_baselines(trivial, args)

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        ids = np.where(prediction.predictions == -100, tokenizer.pad_token_id, prediction.predictions)
        return scores([text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)], references)

    trainer = transformers.Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=examples,
        eval_dataset=evaluation,
        processing_class=tokenizer,
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=compute_metrics if args.predict_with_generate else None,
        callbacks=callbacks,
    )
    # With group_by_length, Trainer would change the order of the sentences, and the references would not match them.
    trainer._get_eval_sampler = SequentialSampler
    extra = {
        "translation": dataclasses.asdict(options),
        "model": dataclasses.asdict(kind),
        "rows": {"train": len(examples), "eval": len(evaluation)},
        "source_tokens": float(np.mean([len(ids) for ids in evaluation["input_ids"]])),
        "baselines": trivial,
    }
    metric = "eval_bleu" if args.predict_with_generate else "eval_loss"
    train = not options.eval_only
    return training.run_and_report(trainer, attention, evaluate=evaluation, extra=extra, metric=metric, train=train)


if __name__ == "__main__":
    arguments.main_of(run)
