"""Shared code of mlm.py and clm.py: options, model and tokenizer, windows of text, token losses and evaluation."""

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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
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
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
)
from transformers.utils import ModelOutput

import hf_efficient_attn as hea
from hf_efficient_attn.errors import unknown_name
from recipes.common import training
from recipes.common.arguments import RecipeArguments, check_counts, option
from recipes.common.data import text

DEFAULT_BLOCK = 1024  # the default --block_size of a model that takes more tokens


@dataclass
class TextArguments:
    """The source of the text, and how it is cut into windows.

    Raises:
        ValueError: there is no source or more than one, or a number is out of range.
    """

    _argument_group_name = "text"

    text: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Files (.txt or .jsonl, optionally .gz; others are read as plain text) or folders of such files. A "
            "text file is one document, unless --document_separator splits it. A line of .jsonl is one document.",
            "metavar": "PATH",
            "action": "extend",
        },
    )
    eval_text: list[str] = field(
        default_factory=list,
        metadata={"help": "Text to evaluate on. Default: --eval_share.", "metavar": "PATH", "action": "extend"},
    )
    dataset: str | None = option("A hub data set instead of --text. Each of its rows is one document.", default=None)
    dataset_config: str | None = option("Configuration of --dataset.", default=None)
    train_split: str = option("Split of --dataset to train on.", default="train")
    eval_split: str | None = option("Split of --dataset to evaluate on. Default: --eval_share.", default=None)
    text_column: str = option("Column or .jsonl field of the text.", default="text")
    document_separator: str | None = option(
        "Separates the documents of a plain text file; 'blank-line' for empty lines.", default=None
    )
    eval_share: float = option("Share of the text that is held out for evaluation.", default=0.05)
    eval_from: str = option(
        "Where --eval_share comes from: the end of every document, or whole documents.",
        default="tails",
        choices=["tails", "documents"],
    )
    block_size: int | None = option(
        f"Tokens of a window. Default: as many as the model takes, up to {DEFAULT_BLOCK}.", default=None
    )
    drop_short: bool = option("Drop the shorter window at the end of a document instead of padding it.", default=False)
    max_train_windows: int | None = option("Train on at most N windows, chosen at random.", default=None, metavar="N")
    max_eval_windows: int | None = option("Evaluate on the first N windows.", default=None, metavar="N")

    def __post_init__(self) -> None:
        if bool(self.text) == bool(self.dataset):
            raise ValueError("give the text with --text PATH ... or --dataset ID" + (", not both" if self.text else ""))
        if not 0 < self.eval_share < 1:
            raise ValueError(f"--eval_share {self.eval_share:g} must be between 0 and 1")
        check_counts(self, "max_train_windows", "max_eval_windows")
        if self.document_separator is not None:
            self.document_separator = self.document_separator.replace("\\n", "\n")
            if not self.document_separator:
                raise ValueError("--document_separator is empty")


@dataclass
class ModelArguments:
    """The model and the tokenizer, pretrained or from scratch.

    Raises:
        ValueError: options are missing or contradict each other.
    """

    _argument_group_name = "model"

    model: str | None = option("A pretrained model: folder or hub id.", default=None, aliases=["--model_name_or_path"])
    model_type: str | None = option("Type of a new model instead, such as gpt2, llama, bert, roberta.", default=None)
    config_overrides: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Changes of the model's config, such as hidden_size=256 num_hidden_layers=4.",
            "metavar": "KEY=VALUE",
            "action": "extend",
        },
    )
    tokenizer: str | None = option("Folder or hub id. Default: the model's.", default=None)
    train_tokenizer: int | None = option(
        "Train a byte-level BPE tokenizer with SIZE tokens on the text instead.", default=None, metavar="SIZE"
    )
    extend_positions: int | None = option(
        "Extend the model's learned positions to N tokens, by tiling.", default=None, metavar="N"
    )

    def __post_init__(self) -> None:
        if bool(self.model) == bool(self.model_type):
            raise ValueError(
                "give a pretrained --model"
                + (" or a new --model_type, not both" if self.model else " or a new --model_type")
            )
        if self.tokenizer and self.train_tokenizer:
            raise ValueError("--tokenizer and --train_tokenizer exclude each other: give only one of them")
        if self.model and self.train_tokenizer:
            raise ValueError("--train_tokenizer needs a new --model_type: a pretrained --model has its own tokens")
        if self.model_type and not (self.tokenizer or self.train_tokenizer):
            raise ValueError("a new model needs a tokenizer: give --tokenizer FOLDER_OR_ID or --train_tokenizer SIZE")


def overrides(entries: Sequence[str]) -> dict[str, Any]:
    """Parse key=value entries. Values are Python numbers, booleans, None or lists, or otherwise text."""
    found = {}
    for entry in entries:
        key, equals, value = entry.partition("=")
        if not (key and equals and value):
            raise ValueError(f"--config_overrides {entry!r} must have the form key=value")
        named = {"true": True, "false": False, "none": None}
        try:
            found[key] = named[value.lower()] if value.lower() in named else ast.literal_eval(value)
        except (SyntaxError, ValueError):
            found[key] = value
    return found


def load_texts(arguments: TextArguments, args: RecipeArguments) -> tuple[list[str], list[str] | None]:
    """The documents to train on, and those to evaluate on, or None if they have no source of their own.

    Raises:
        ValueError: a source is empty or cannot be read.
    """
    # The main process first, so that the others find the files of a hub in the cache.
    with args.main_process_first(desc="reading the text"):
        return documents(arguments, evaluation=False), documents(arguments, evaluation=True)


def documents(arguments: TextArguments, *, evaluation: bool) -> list[str] | None:
    """The documents to train on, or to evaluate on; None if there is no source of the latter."""
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


def load_tokenizer(
    arguments: ModelArguments, args: RecipeArguments, texts: Sequence[str], *, masked: bool
) -> PreTrainedTokenizerBase:
    """Load the tokenizer, or train one once and save it in the output folder."""
    if not arguments.train_tokenizer:
        return AutoTokenizer.from_pretrained(arguments.tokenizer or arguments.model)
    folder = pathlib.Path(args.output_dir)
    with args.main_process_first(desc="training the tokenizer"):
        exists = args.resume_from_checkpoint and (folder / "tokenizer.json").is_file()
        if args.local_process_index == 0 and not exists:
            train_tokenizer(texts, arguments.train_tokenizer, masked=masked).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def train_tokenizer(texts: Iterable[str], size: int, *, masked: bool) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer.

    Args:
        texts: the text.
        size: number of tokens.
        masked: use BERT's special tokens instead of <|endoftext|>.

    Raises:
        ValueError: `size` is too small for the bytes and the special tokens.
    """
    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"] if masked else ["<|endoftext|>"]
    least = 256 + len(special)
    if size < least:
        raise ValueError(f"--train_tokenizer {size}: a byte-level vocabulary needs at least {least} tokens")
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


def load_model(arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase, *, masked: bool) -> PreTrainedModel:
    """Load the pretrained model or make a new one, and extend its positions if requested.

    The tokenizer's `model_max_length` is set to the new number of positions.

    Raises:
        ValueError: the type or a config entry is unknown, the model is of the wrong kind, or the tokenizer has more
            tokens than the model.
        UnsupportedAttentionError: the positions cannot be extended.
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
    vocab_size = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, but the model only {vocab_size}: give the model's own "
            "--tokenizer"
        )
    if arguments.extend_positions:
        hea.extend_positions(model, arguments.extend_positions)
    if arguments.extend_positions or arguments.model_type:
        tokenizer.model_max_length = positions_of(model) or tokenizer.model_max_length
    return model


def _check_kind(config: PretrainedConfig, masked: bool) -> None:
    """Raise ValueError if the model is not a masked, or not a causal, language model."""
    kind, other = ("masked", "clm.py") if masked else ("causal", "mlm.py")
    has_form = type(config) in (MODEL_FOR_MASKED_LM_MAPPING if masked else MODEL_FOR_CAUSAL_LM_MAPPING)
    # BERT and similar models have a causal form, but attend to the future unless the config sets is_decoder.
    encoder = not masked and type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    if not has_form or encoder:
        raise ValueError(f"{config.model_type} is not a {kind} language model: train it with {other}")


def positions_of(model: nn.Module) -> int | None:
    """Number of positions of a model; None if its config does not say."""
    count = getattr(model.config, "max_position_embeddings", None)
    for module in model.modules():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, nn.Embedding) and table.padding_idx is not None:
            return table.num_embeddings - table.padding_idx - 1  # RoBERTa's first entries are not positions
    return count


def block_size(arguments: TextArguments, model: nn.Module) -> int:
    """Number of tokens of a window.

    Raises:
        ValueError: the model has fewer positions.
    """
    positions = positions_of(model)
    if arguments.block_size is None:
        return min(DEFAULT_BLOCK, positions or DEFAULT_BLOCK)
    if positions is not None and arguments.block_size > positions:
        rotary = getattr(model.config, "rope_parameters", None) is not None
        way = "--config_overrides max_position_embeddings=" if rotary else "--extend_positions "
        raise ValueError(
            f"--block_size {arguments.block_size} exceeds the model's {positions} positions: give "
            f"{way}{arguments.block_size}, or a smaller block size"
        )
    return arguments.block_size


def windows(
    arguments: TextArguments,
    tokenizer: PreTrainedTokenizerBase,
    size: int,
    texts: Sequence[str],
    others: Sequence[str] | None,
    *,
    offsets: bool = False,
) -> tuple[Dataset, Dataset]:
    """Cut the documents of `load_texts` into windows to train on and to evaluate on.

    Args:
        arguments: the options.
        tokenizer: the tokenizer.
        size: largest number of tokens of a window.
        texts: documents to train on.
        others: documents to evaluate on; None to hold out --eval_share of `texts`.
        offsets: keep the position of each token in the text, which whole-word masking needs.

    Raises:
        ValueError: one of the two sets is empty.
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
    """The loss of every token, and whether it has the largest logit. Trainer collects these instead of the logits.

    Args:
        logits: (B, N, V).
        labels: (B, N), -100 for tokens without label.
        causal: the logits at one position predict the next token.

    Returns:
        Losses in nats (B, N) and correctness (B, N), float32; 0 for tokens without label.
    """
    logits = logits[0] if isinstance(logits, tuple) else logits
    nats = torch.zeros(labels.shape, dtype=torch.float32, device=labels.device)
    correct = torch.zeros_like(nats)
    first = int(causal)
    logits, labels = logits[:, : labels.shape[1] - first], labels[:, first:]
    # One sequence at a time, since the float32 logits of a whole batch would be the largest tensor of all.
    for i in range(labels.shape[0]):
        nats[i, first:] = nn.functional.cross_entropy(
            logits[i].float(), labels[i], ignore_index=text.IGNORED, reduction="none"
        )
        correct[i, first:] = (logits[i].argmax(-1) == labels[i]).float()
    return nats, correct


def counted(prediction: EvalPrediction, *, causal: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Losses in nats, correctness and which tokens count, (windows, N) each, from the results of `token_losses`.

    The first token of a causal window does not count, since no token precedes it.
    """
    nats, correct = prediction.predictions
    counts = prediction.label_ids != text.IGNORED
    if causal:
        counts[:, 0] = False
    return nats, correct, counts


def loss_figures(prediction: EvalPrediction, *, causal: bool) -> dict[str, float]:
    """`loss` (nats), `perplexity` and `accuracy` over all tokens with a label, and their number, `tokens`."""
    nats, correct, counts = counted(prediction, causal=causal)
    if not counts.any():
        raise ValueError("no token of the evaluation windows has a label: give more or longer evaluation text")
    mean = float(nats[counts].mean(dtype=np.float64))
    return {
        "loss": mean,
        "perplexity": math.exp(min(mean, 700.0)),
        "accuracy": float(correct[counts].mean(dtype=np.float64)),
        "tokens": int(counts.sum()),
    }


def masked_loss(outputs: ModelOutput, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Mean loss over the masked tokens of a whole step, that is of all processes and accumulated batches.

    The models' own loss is the mean over one batch of one process. It gives masked tokens more weight in batches with
    fewer of them, so that two processes would not train like one.
    """
    logits = outputs.logits.flatten(0, 1).float()
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=text.IGNORED, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


class LanguageTrainer(Trainer):
    """Trainer with separate metrics for each evaluation set, and without a cache of keys and values.

    The evaluation loss is the mean over all tokens, which `metrics` return. It replaces that of Trainer, a mean of the
    means over batches.

    Args:
        *args: arguments of Trainer.
        metrics: the metrics of an EvalPrediction, by name of the evaluation set. "" is the main set, which is
            `eval_dataset` during training.
        causal: the model predicts the next token.
        **kwargs: arguments of Trainer.
    """

    def __init__(
        self,
        *args: Any,
        metrics: Mapping[str, Callable[[EvalPrediction], dict[str, float]]],
        causal: bool,
        **kwargs: Any,
    ) -> None:
        def losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            return token_losses(logits, labels, causal=causal)

        if not causal and not kwargs["args"].label_smoothing_factor:
            kwargs["compute_loss_func"] = masked_loss
        super().__init__(*args, compute_metrics=metrics[""], preprocess_logits_for_metrics=losses, **kwargs)
        self.metrics, self.causal = metrics, causal

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """As in Trainer, without a cache for causal models."""
        if self.causal:
            inputs = {**inputs, "use_cache": False}
        return super().compute_loss(model, inputs, *args, **kwargs)

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """As in Trainer, with the metrics of each evaluation set."""
        if not isinstance(eval_dataset, dict):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        figures: dict[str, float] = {}
        for name, dataset in eval_dataset.items():
            self.compute_metrics = self.metrics[name]
            prefix = f"{metric_key_prefix}_{name}" if name else metric_key_prefix
            figures |= super().evaluate(dataset, ignore_keys, prefix)
        self.compute_metrics = self.metrics[""]
        return figures


def about_text(train: Dataset, evaluation: Dataset, size: int, *arguments: Any) -> dict[str, Any]:
    """The part of the report about the text and the options, which are dataclasses."""
    return {
        "block_size": size,
        "train_windows": len(train),
        "train_tokens": int(np.sum(train["length"])),
        "eval_windows": len(evaluation),
        **{type(one).__name__: dataclasses.asdict(one) for one in arguments},
    }
