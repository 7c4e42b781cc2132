"""What mlm.py and clm.py share: arguments, model and tokenizer, rows of text, token losses, evaluation."""

import ast
import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    EvalPrediction,
    PreTrainedTokenizerFast,
    Trainer,
)

import hf_efficient_attn as hea
from hf_efficient_attn.errors import unknown_name
from recipes import training
from recipes.arguments import RecipeArguments
from recipes.data import text

DEFAULT_BLOCK = 1024  # tokens of a row at most, where --block_size does not say


@dataclass
class TextArguments:
    """Where the text comes from, and how it becomes rows.

    Raises:
        ValueError: no source or two, or a share that is none.
    """

    _argument_group_name = "text"

    text: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Files (.txt, .jsonl, either with .gz; others are read as plain text) or folders of them. A file "
            "is one document unless --document_separator says more; a .jsonl line is one.",
            "metavar": "PATH",
            "action": "extend",
        },
    )
    eval_text: list[str] = field(
        default_factory=list,
        metadata={"help": "The same, to evaluate on. Default: --eval_share.", "metavar": "PATH", "action": "extend"},
    )
    dataset: str | None = field(
        default=None, metadata={"help": "A data set of a hub instead of --text; rows are documents."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of --dataset."})
    train_split: str = field(default="train", metadata={"help": "Split of --dataset to train on."})
    eval_split: str | None = field(
        default=None, metadata={"help": "Split of --dataset to evaluate on. Default: --eval_share of the other."}
    )
    text_column: str = field(default="text", metadata={"help": "Column or .jsonl field that holds the text."})
    document_separator: str | None = field(
        default=None,
        metadata={"help": "What stands between the documents of a plain text file; 'blank-line' for empty lines."},
    )
    eval_share: float = field(default=0.05, metadata={"help": "Share that is evaluated on and not trained on."})
    eval_from: str = field(
        default="tails",
        metadata={
            "help": "Of what --eval_share is taken: the end of every document, or whole documents.",
            "choices": ["tails", "documents"],
        },
    )
    block_size: int | None = field(
        default=None,
        metadata={"help": f"Tokens of a row at most. Default: what the model takes, up to {DEFAULT_BLOCK}."},
    )
    drop_short: bool = field(
        default=False, metadata={"help": "Drop what is left at the end of a document rather than pad it."}
    )
    max_train_windows: int | None = field(default=None, metadata={"help": "Train on so many rows, drawn at random."})
    max_eval_windows: int | None = field(default=None, metadata={"help": "Evaluate on the first so many rows."})

    def __post_init__(self) -> None:
        if bool(self.text) == bool(self.dataset):
            raise ValueError(
                "give the text by --text PATH ... or by --dataset ID" + (", not both" if self.text else "")
            )
        if not 0 < self.eval_share < 1:
            raise ValueError(f"--eval_share {self.eval_share:g} is no share between 0 and 1")
        for name in ("max_train_windows", "max_eval_windows"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"--{name} {count}: give 1 or more, or leave it out for all")
        if self.document_separator is not None:
            self.document_separator = self.document_separator.replace("\\n", "\n")
            if not self.document_separator:
                raise ValueError("--document_separator is empty")


@dataclass
class ModelArguments:
    """Which model and tokenizer, pretrained or from scratch.

    Raises:
        ValueError: no model or two.
    """

    _argument_group_name = "model"

    model: str | None = field(
        default=None,
        metadata={"help": "A pretrained model: folder or hub id.", "aliases": ["--model_name_or_path"]},
    )
    model_type: str | None = field(
        default=None, metadata={"help": "A new model of this type instead, such as gpt2, llama, bert, roberta."}
    )
    config_overrides: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Entries of the model's config, such as hidden_size=256 num_hidden_layers=4.",
            "metavar": "KEY=VALUE",
            "action": "extend",
        },
    )
    tokenizer: str | None = field(default=None, metadata={"help": "Folder or hub id. Default: the model's."})
    train_tokenizer: int | None = field(
        default=None,
        metadata={"help": "Train a byte-level BPE of so many tokens on the text instead.", "metavar": "SIZE"},
    )
    extend_positions: int | None = field(
        default=None, metadata={"help": "Grow the model's learned positions to so many tokens, by tiling."}
    )

    def __post_init__(self) -> None:
        if bool(self.model) == bool(self.model_type):
            raise ValueError(
                "give a pretrained --model"
                + (" or a new --model_type, not both" if self.model else ", or --model_type")
            )
        if self.tokenizer and self.train_tokenizer:
            raise ValueError("--tokenizer and --train_tokenizer exclude each other")
        if self.model and self.train_tokenizer:
            raise ValueError("a pretrained --model knows its own tokens: --train_tokenizer is for a new --model_type")
        if self.model_type and not (self.tokenizer or self.train_tokenizer):
            raise ValueError("a new model needs a tokenizer: give --tokenizer FOLDER_OR_ID or --train_tokenizer SIZE")


def overrides(entries: Sequence[str]) -> dict[str, Any]:
    """key=value entries with Python's numbers, booleans and lists; anything else is text."""
    found = {}
    for entry in entries:
        key, equals, value = entry.partition("=")
        if not (key and equals and value):
            raise ValueError(f"--config_overrides {entry!r} is not of the form key=value")
        named = {"true": True, "false": False, "none": None}
        try:
            found[key] = named[value.lower()] if value.lower() in named else ast.literal_eval(value)
        except (SyntaxError, ValueError):
            found[key] = value
    return found


def load_texts(arguments: TextArguments, args: RecipeArguments) -> tuple[list[str], list[str] | None]:
    """The documents to train on, and those to evaluate on where they have a source of their own (else None).

    Raises:
        ValueError: nothing is there, or it cannot be read.
    """
    # One process first: what comes from a hub is in the cache then.
    with args.main_process_first(desc="reading the text"):
        return documents(arguments, evaluation=False), documents(arguments, evaluation=True)


def documents(arguments: TextArguments, *, evaluation: bool) -> list[str] | None:
    """The documents of one of the two sources; None where there is no source to evaluate on."""
    column = arguments.text_column
    if arguments.dataset:
        split = arguments.eval_split if evaluation else arguments.train_split
        if split is None:
            return None
        found = list(text.documents_of_hub(arguments.dataset, arguments.dataset_config, split, column))
        where = f"{arguments.dataset}, split {split}"
    else:
        sources = arguments.eval_text if evaluation else arguments.text
        if evaluation and not sources:
            return None
        found = [
            one
            for path in text.text_files(sources)
            for one in text.documents_of(path, column=column, separator=arguments.document_separator)
        ]
        where = ", ".join(sources)
    training.check_not_empty(found, where)
    return found


def load_tokenizer(arguments: ModelArguments, args: RecipeArguments, texts: Sequence[str], *, masked: bool):
    """The tokenizer of the arguments; one that is to be trained is made once, in the output folder."""
    if not arguments.train_tokenizer:
        return AutoTokenizer.from_pretrained(arguments.tokenizer or arguments.model)
    folder = pathlib.Path(args.output_dir)
    with args.main_process_first(desc="training the tokenizer"):
        there = args.resume_from_checkpoint and (folder / "tokenizer.json").is_file()
        if args.local_process_index == 0 and not there:
            train_tokenizer(texts, arguments.train_tokenizer, masked=masked).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def train_tokenizer(texts: Iterable[str], size: int, *, masked: bool) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `size` tokens; `masked`: with BERT's special tokens, else with <|endoftext|> alone.

    Raises:
        ValueError: the size has no room for the bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"] if masked else ["<|endoftext|>"]
    least = 256 + len(special)
    if size < least:
        raise ValueError(f"--train_tokenizer {size}: a byte-level vocabulary has {least} tokens at least")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if not masked:
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[0])
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    names = {f"{token[1:-1].lower()}_token": token for token in special}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def load_model(arguments: ModelArguments, tokenizer, *, masked: bool) -> nn.Module:
    """The pretrained or new model, its positions grown where that is asked; the tokenizer learns of their number.

    Raises:
        ValueError: an unknown type or config entry, a model of the wrong kind, or a tokenizer that knows more tokens
            than the model.
        UnsupportedAttentionError: positions that cannot grow.
    """
    changes = overrides(arguments.config_overrides)
    if arguments.model:
        config = AutoConfig.from_pretrained(arguments.model)
    elif arguments.model_type in CONFIG_MAPPING:
        config = CONFIG_MAPPING[arguments.model_type]()
    else:
        raise ValueError(unknown_name("model type", arguments.model_type, ["gpt2", "llama", "bert", "roberta"]))
    unknown = [key for key in changes if not hasattr(config, key)]
    if unknown:
        known = [key for key in config.to_dict() if not key.startswith("_")]
        raise ValueError(unknown_name(f"config entry of {config.model_type}", unknown[0], known))
    if arguments.model_type:
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids = {name: getattr(tokenizer, name) for name in names}
        config = type(config)(**{"vocab_size": len(tokenizer), **ids, **changes})
    else:
        for key, value in changes.items():
            setattr(config, key, value)
    _check_kind(config, masked)
    auto = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    model = auto.from_pretrained(arguments.model, config=config) if arguments.model else auto.from_config(config)
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {rows}: they do not belong together; "
            "give the model's own --tokenizer"
        )
    if arguments.extend_positions:
        hea.extend_positions(model, arguments.extend_positions)
    if arguments.extend_positions or arguments.model_type:
        tokenizer.model_max_length = positions_of(model) or tokenizer.model_max_length  # it is saved with the model
    return model


def _check_kind(config, masked: bool) -> None:
    kind, other = ("masked", "clm.py") if masked else ("causal", "mlm.py")
    has_form = type(config) in (MODEL_FOR_MASKED_LM_MAPPING if masked else MODEL_FOR_CAUSAL_LM_MAPPING)
    # BERT and its like have a causal form, which sees the future unless the config says is_decoder.
    encoder = not masked and type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    if not has_form or encoder:
        raise ValueError(f"{config.model_type} is no {kind} language model; train it with {other}")


def positions_of(model: nn.Module) -> int | None:
    """Tokens that a model takes; None where its config does not say."""
    count = getattr(model.config, "max_position_embeddings", None)
    for module in model.modules():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, nn.Embedding) and table.padding_idx is not None:
            return table.num_embeddings - table.padding_idx - 1  # RoBERTa's first rows are no positions
    return count


def block_size(arguments: TextArguments, model: nn.Module) -> int:
    """Tokens of a row.

    Raises:
        ValueError: more than the model has positions for.
    """
    positions = positions_of(model)
    if arguments.block_size is None:
        return min(DEFAULT_BLOCK, positions or DEFAULT_BLOCK)
    if positions is not None and arguments.block_size > positions:
        rotary = getattr(model.config, "rope_parameters", None) is not None
        way = "--config_overrides max_position_embeddings=" if rotary else "--extend_positions "
        raise ValueError(
            f"--block_size {arguments.block_size} is beyond the model's {positions} positions: give "
            f"{way}{arguments.block_size}, or a smaller block size"
        )
    return arguments.block_size


def rows(
    arguments: TextArguments,
    tokenizer,
    size: int,
    texts: Sequence[str],
    others: Sequence[str] | None,
    *,
    offsets: bool = False,
) -> tuple[Dataset, Dataset]:
    """Rows to train on and to evaluate on, of `size` tokens at most, out of what `load_texts` found.

    Raises:
        ValueError: one of the two is empty.
    """
    prefix, suffix = text.special_tokens(tokenizer)
    cut = text.Cut(size, arguments.drop_short, prefix, suffix, offsets)
    found = text.tokenize(texts, tokenizer, offsets=offsets, total=len(texts))
    if others is not None:
        kept, held = found, text.tokenize(others, tokenizer, offsets=offsets, total=len(others))
    elif arguments.eval_from == "documents":
        kept, held = text.split_documents(found, arguments.eval_share)
    else:
        kept, held = text.split_tails(found, arguments.eval_share)
    train = text.windows(kept, cut, "the text to train on")
    evaluation = text.windows(held, cut, "the text to evaluate on")
    return (
        training.take(train, arguments.max_train_windows),
        text.first(evaluation, arguments.max_eval_windows),
    )


def token_losses(logits: Tensor, labels: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Of every token: -log of its probability, and whether it was the likeliest; for Trainer, in place of logits.

    Args:
        logits: (B, N, V).
        labels: (B, N), -100 where there is none.
        causal: whether the logits at one position are those of the next token.

    Returns:
        nats (B, N) and right (B, N), float32; 0 where there is no label.
    """
    logits = logits[0] if isinstance(logits, tuple) else logits
    nats = torch.zeros(labels.shape, dtype=torch.float32, device=labels.device)
    right = torch.zeros_like(nats)
    first = int(causal)
    logits, labels = logits[:, : labels.shape[1] - first], labels[:, first:]
    # A row at a time: in float32 the logits of a batch are the largest tensor of all.
    for i in range(labels.shape[0]):
        nats[i, first:] = nn.functional.cross_entropy(
            logits[i].float(), labels[i], ignore_index=text.IGNORED, reduction="none"
        )
        right[i, first:] = (logits[i].argmax(-1) == labels[i]).float()
    return nats, right


def counted(prediction: EvalPrediction, *, causal: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """nats, right and which tokens count, (rows, N) each, of what `token_losses` left.

    The first token of a causal row counts in no loss: nothing stands before it.
    """
    nats, right = prediction.predictions
    there = prediction.label_ids != text.IGNORED
    if causal:
        there[:, 0] = False
    return nats, right, there


def loss_figures(prediction: EvalPrediction, *, causal: bool) -> dict[str, float]:
    """`loss` (nats), `perplexity` and `accuracy` over all tokens that have a label, and how many `tokens` these are."""
    nats, right, there = counted(prediction, causal=causal)
    if not there.any():
        raise ValueError("no token of the evaluation rows has a label: give more or longer evaluation text")
    mean = float(nats[there].mean(dtype=np.float64))
    return {
        "loss": mean,
        "perplexity": math.exp(min(mean, 700.0)),
        "accuracy": float(right[there].mean(dtype=np.float64)),
        "tokens": int(there.sum()),
    }


def masked_loss(outputs, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Mean over the masked tokens of a whole step: of all processes and accumulated batches.

    The models' own loss is a mean over one batch of one process, in which a masked token counts the more the fewer
    there are: two processes would not train as one does.
    """
    logits = outputs.logits.flatten(0, 1).float()
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=text.IGNORED, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


class LanguageTrainer(Trainer):
    """Trainer that scores each evaluation set in its own way, and keeps no cache of keys and values.

    The loss of an evaluation is the mean over its tokens, which `metrics` return; it replaces Trainer's own, a mean of
    means over batches.

    Args:
        metrics: name of an evaluation set -> figures of an EvalPrediction; "" for the main one, which is `eval_dataset`
            while training.
        causal: whether the model predicts the next token.
    """

    def __init__(self, *args, metrics: Mapping[str, Callable], causal: bool, **kwargs):
        def losses(logits, labels):
            return token_losses(logits, labels, causal=causal)

        if not causal and not kwargs["args"].label_smoothing_factor:
            kwargs["compute_loss_func"] = masked_loss
        super().__init__(*args, compute_metrics=metrics[""], preprocess_logits_for_metrics=losses, **kwargs)
        self.metrics, self.causal = metrics, causal

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.causal:
            inputs = {**inputs, "use_cache": False}
        return super().compute_loss(model, inputs, *args, **kwargs)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        if not isinstance(eval_dataset, dict):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        figures: dict[str, float] = {}
        for name, dataset in eval_dataset.items():
            self.compute_metrics = self.metrics[name]
            prefix = f"{metric_key_prefix}_{name}" if name else metric_key_prefix
            figures |= super().evaluate(dataset, ignore_keys, prefix)
        self.compute_metrics = self.metrics[""]
        return figures


def about_text(train: Dataset, evaluation: Dataset, size: int, *arguments) -> dict[str, Any]:
    """The part of the report that says what was read."""
    return {
        "block_size": size,
        "train_windows": len(train),
        "train_tokens": int(np.sum(train["length"])),
        "eval_windows": len(evaluation),
        **{type(one).__name__: dataclasses.asdict(one) for one in arguments},
    }
