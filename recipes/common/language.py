"""Shared code of the text recipes: models and tokenizers, windows of text, token losses, and evaluation."""

import dataclasses
import functools
import math
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, EvalPrediction, PreTrainedModel
from transformers.loss.loss_utils import ForMaskedLMLoss
from transformers.utils import ModelOutput

import hf_efficient_attn as hea
from hf_efficient_attn.conversion.convert import is_rotary, num_positions
from hf_efficient_attn.errors import unknown_name
from hf_efficient_attn.io.reading import special_tokens
from recipes.common import arguments, training
from recipes.common.arguments import AttentionArguments, RecipeArguments, check_counts, option, several
from recipes.common.data import text

Metrics = Callable[[EvalPrediction], dict[str, float]]
DEFAULT_BLOCK = 1024  # the default --block_size of a model that takes more tokens


@dataclass
class ModelArguments:
    """The model and the tokenizer, pretrained or from scratch."""

    _argument_group_name = "model"

    model: str | None = option("A pretrained model: folder or hub id.", None, aliases=["--model_name_or_path"])
    model_type: str | None = option("Type of a new model instead, such as gpt2, llama, bert, roberta.", None)
    config_overrides: list[str] = several("Changes of the config, such as hidden_size=256 n_layer=4.", "KEY=VALUE")
    tokenizer: str | None = option("Folder or hub id. Default: the model's.", None)
    train_tokenizer: int | None = option("Train a byte-level BPE tokenizer of SIZE tokens.", None, metavar="SIZE")
    extend_positions: int | None = option("Extend learned positions to N tokens, by tiling.", None, metavar="N")

    def __post_init__(self) -> None:
        if bool(self.model) == bool(self.model_type):
            raise ValueError(f"give a pretrained --model or a new --model_type{', not both' if self.model else ''}")
        if self.tokenizer and self.train_tokenizer:
            raise ValueError("--tokenizer and --train_tokenizer exclude each other: give only one of them")
        if self.model and self.train_tokenizer:
            raise ValueError("--train_tokenizer needs a new --model_type: a pretrained --model has its own tokens")
        if self.model_type and not (self.tokenizer or self.train_tokenizer):
            raise ValueError("a new model needs a tokenizer: give --tokenizer FOLDER_OR_ID or --train_tokenizer SIZE")


class Kind(NamedTuple):
    """What language models of a kind have in common."""

    refusal: str  # of a model of another kind, after its type
    auto: Any  # the class of Transformers that loads and makes a model
    mapping: Any  # the configs of such models
    examples: tuple[str, ...]  # their types
    special: Mapping[str, str]  # the special tokens of a new tokenizer by their names in Transformers
    template: str | None = None  # where a new tokenizer adds them


MASKED = Kind(
    "is not a masked language model: train it with clm.py",
    transformers.AutoModelForMaskedLM,
    transformers.MODEL_FOR_MASKED_LM_MAPPING,
    ("bert", "roberta"),
    {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"},
    "[CLS] $A [SEP]",
)
CAUSAL = Kind(
    "is not a causal language model: train it with mlm.py",
    transformers.AutoModelForCausalLM,
    transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
    ("gpt2", "llama"),
    dict.fromkeys(("bos_token", "eos_token"), "<|endoftext|>"),
)
TRANSLATION = Kind(
    "is no encoder-decoder of text: give for example --model_type marian",
    transformers.AutoModelForSeq2SeqLM,
    transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    ("marian", "bart", "t5", "m2m_100"),
    {"pad_token": "<pad>", "eos_token": "</s>"},
    "$A </s>",
)


def load_tokenizer(
    which: ModelArguments, args: RecipeArguments, texts: Sequence[str], kind: Kind
) -> transformers.PreTrainedTokenizerBase:
    """Load the tokenizer, or train one once and save it in the output folder."""
    if not which.train_tokenizer:
        return AutoTokenizer.from_pretrained(which.tokenizer or which.model)
    folder = pathlib.Path(args.output_dir)
    with args.main_process_first(desc="training the tokenizer"):
        exists = args.resume_from_checkpoint and (folder / "tokenizer.json").is_file()
        if args.local_process_index == 0 and not exists:
            with tempfile.TemporaryDirectory(dir=folder) as draft:
                train_tokenizer(texts, which.train_tokenizer, kind).save_pretrained(draft)
                # The last file is the one whose presence says that all are complete.
                for path in sorted(pathlib.Path(draft).iterdir(), key=lambda path: path.name == "tokenizer.json"):
                    path.replace(folder / path.name)
    return AutoTokenizer.from_pretrained(folder)


def train_tokenizer(texts: Iterable[str], size: int, kind: Kind) -> transformers.PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with the special tokens of a kind of model."""
    special = list(dict.fromkeys(kind.special.values()))
    if size < 256 + len(special):
        raise ValueError(f"--train_tokenizer {size}: a byte-level vocabulary needs {256 + len(special)} tokens")
    tokenizer, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind is TRANSLATION)
    tokenizer.decoder = decoders.ByteLevel()
    bpe = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, bpe)
    if kind.template is not None:
        ids = [(token, tokenizer.token_to_id(token)) for token in kind.template.split() if token != "$A"]
        tokenizer.post_processor = processors.TemplateProcessing(single=kind.template, special_tokens=ids)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **kind.special)


def load_model(which: ModelArguments, tokenizer: transformers.PreTrainedTokenizerBase, kind: Kind) -> PreTrainedModel:
    """Load the pretrained model or make a new one, and extend its positions if requested.

    The tokenizer's `model_max_length` is set to the new number of positions. Refused are unknown types and config
    entries, models of the wrong kind, and a tokenizer with more tokens than the model.
    """
    changes = arguments.key_values("--config_overrides", which.config_overrides)
    if which.model:
        config = AutoConfig.from_pretrained(which.model)
    elif which.model_type in transformers.CONFIG_MAPPING:
        config = transformers.CONFIG_MAPPING[which.model_type]()
    else:
        raise ValueError(unknown_name("model type", which.model_type, kind.examples))
    # BERT and similar models have a causal form, but attend to the future unless the config sets is_decoder.
    encoder = kind is CAUSAL and type(config) in MASKED.mapping and not getattr(config, "is_decoder", False)
    if type(config) not in kind.mapping or encoder:
        raise ValueError(f"{config.model_type} {kind.refusal}")
    unknown = [key for key in changes if not hasattr(config, key)]
    if unknown:
        known = [key for key in config.to_dict() if not key.startswith("_")]
        raise ValueError(unknown_name(f"config entry of {config.model_type}", unknown[0], known))
    if which.model_type:
        ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        if kind is TRANSLATION:
            pad, end = ids["pad_token_id"], ids["eos_token_id"]
            ids |= {"decoder_start_token_id": pad, "bos_token_id": end, "forced_eos_token_id": None}
        model = kind.auto.from_config(type(config)(**{"vocab_size": len(tokenizer), **ids, **changes}))
    else:
        for key, value in changes.items():
            setattr(config, key, value)
        model = kind.auto.from_pretrained(which.model, config=config)
    size = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > size:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, but the model only {size}: give its --tokenizer")
    if which.extend_positions:
        hea.extend_positions(model, which.extend_positions)
    if which.extend_positions or which.model_type:
        tokenizer.model_max_length = num_positions(model) or tokenizer.model_max_length
    return model


@dataclass
class TextArguments:
    """The source of the text, and how it is cut into windows."""

    _argument_group_name = "text"

    text: list[str] = several(
        "Files (.txt or .jsonl, optionally .gz; others are read as plain text) or folders of such files. A text file "
        "is one document, and so is a line of .jsonl."
    )
    eval_text: list[str] = several("Text to evaluate on. Default: --eval_share.")
    dataset: str | None = option("A hub data set instead of --text. Each of its rows is one document.", None)
    dataset_config: str | None = option("Configuration of --dataset.", None)
    train_split: str = option("Split of --dataset to train on.", "train")
    eval_split: str | None = option("Split of --dataset to evaluate on. Default: --eval_share.", None)
    text_column: str = option("Column or .jsonl field of the text.", "text")
    eval_share: float = option("Share of every document, at its end, that is held out for evaluation.", 0.05)
    block_size: int | None = option(f"Tokens of a window. Default: the model's, up to {DEFAULT_BLOCK}.", None)
    drop_short: bool = option("Drop the shorter window at the end of a document instead of padding it.", False)
    max_train_windows: int | None = option("Train on at most N windows, chosen at random.", None, metavar="N")
    max_eval_windows: int | None = option("Evaluate on the first N windows.", None, metavar="N")
    eval_only: bool = option("Evaluate the model as it is, without training.", False)

    def __post_init__(self) -> None:
        if bool(self.text) == bool(self.dataset):
            raise ValueError("give the text with --text PATH ... or --dataset ID" + (", not both" if self.text else ""))
        arguments.check_share("eval_share", self.eval_share)
        check_counts(self, "max_train_windows", "max_eval_windows")

    def documents(self, *, evaluation: bool) -> list[str] | None:
        """The documents to train on, or to evaluate on; None if there is no source of the latter."""
        split, sources = (self.eval_split, self.eval_text) if evaluation else (self.train_split, self.text)
        if not (split if self.dataset else sources):
            return None
        if self.dataset:
            texts = list(text.documents_of_hub(self.dataset, self.dataset_config, split, self.text_column))
        else:
            texts = [one for path in text.text_files(sources) for one in text.documents_of(path, self.text_column)]
        training.check_not_empty(len(texts), f"{self.dataset}, split {split}" if self.dataset else ", ".join(sources))
        return texts

    def size_for(self, model: PreTrainedModel) -> int:
        """The number of tokens of a window. Refuses more than the model has positions for."""
        positions = num_positions(model)
        if self.block_size is None:
            return min(DEFAULT_BLOCK, positions or DEFAULT_BLOCK)
        if positions is not None and self.block_size > positions:
            way = "--config_overrides max_position_embeddings=" if is_rotary(model.config) else "--extend_positions "
            raise ValueError(
                f"--block_size {self.block_size} exceeds the model's {positions} positions: give {way}{self.block_size}"
            )
        return self.block_size


def prepare(
    attention: AttentionArguments, words: TextArguments, which: ModelArguments, args: RecipeArguments, kind: Kind
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the text, load or make tokenizer and model, and cut the documents into windows.

    The results are the arguments of a Trainer except for the collator and the metrics, and the report about them.
    """
    args.remove_unused_columns = False  # the collator needs the number of the window, which no model takes
    # The main process first, so that the others find the files of a hub in the cache.
    with args.main_process_first(desc="reading the text"):
        texts, others = words.documents(evaluation=False), words.documents(evaluation=True)
    tokenizer = load_tokenizer(which, args, texts, kind)
    model = load_model(which, tokenizer, kind)
    size, special = words.size_for(model), special_tokens(tokenizer)
    callbacks = training.prepare_attention(model, attention)
    kept, held = text.tokenize(texts, tokenizer), None if others is None else text.tokenize(others, tokenizer)
    if held is None:
        kept, held = text.split_tails(kept, words.eval_share)
    train, evaluation = (
        text.windows(ids, size, special, drop_short=words.drop_short, where=f"the text to {purpose} on")
        for ids, purpose in ((kept, "train"), (held, "evaluate"))
    )
    train = training.take(train, words.max_train_windows)
    evaluation = evaluation.select(range(min(len(evaluation), words.max_eval_windows or len(evaluation))))
    about = {"block_size": size, "train_windows": len(train), "train_tokens": int(np.sum(train["length"]))}
    about |= {"eval_windows": len(evaluation), **{type(o).__name__: dataclasses.asdict(o) for o in (words, which)}}
    return {
        "model": model, "args": args, "processing_class": tokenizer, "callbacks": callbacks, "train_dataset": train,
        "eval_dataset": evaluation,
    }, about  # fmt: skip


def token_losses(logits: Tensor, labels: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """The loss of every token in nats, and whether it has the largest logit: (B, N), float32; 0 without a label.

    Trainer collects these instead of the logits (B, N, V), which predict the next token if causal. Labels (B, N) are
    -100 for tokens without label.
    """
    logits = logits[0] if isinstance(logits, tuple) else logits
    nats = torch.zeros(labels.shape, dtype=torch.float32, device=labels.device)
    correct, first = torch.zeros_like(nats), int(causal)
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

    The models' own loss, a mean over one batch of one process, has larger weights for batches with fewer masked tokens.
    """
    return ForMaskedLMLoss(outputs.logits, labels, outputs.logits.shape[-1], num_items_in_batch)


class LanguageTrainer(transformers.Trainer):
    """Trainer with separate metrics for each evaluation set.

    The evaluation loss is the mean over all tokens, which `metrics` return. It replaces that of Trainer, a mean of the
    means over batches. `metrics` has a function of an EvalPrediction for each evaluation set; "" is the main set, which
    is `eval_dataset` during training.
    """

    counts_items = True  # the losses are means over the tokens of a whole step

    def __init__(self, *, metrics: Mapping[str, Metrics], causal: bool, **kwargs: Any) -> None:
        if not causal and not kwargs["args"].label_smoothing_factor:
            kwargs["compute_loss_func"] = masked_loss
        losses = functools.partial(token_losses, causal=causal)
        super().__init__(compute_metrics=metrics[""], preprocess_logits_for_metrics=losses, **kwargs)
        self.metrics = metrics

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
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
