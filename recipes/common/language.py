"""Shared code of mlm.py and clm.py: windows of text, token losses, and evaluation."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import EvalPrediction, PreTrainedModel, Trainer
from transformers.loss.loss_utils import ForMaskedLMLoss
from transformers.utils import ModelOutput

from hf_efficient_attn.conversion.convert import num_positions
from hf_efficient_attn.io.reading import special_tokens
from recipes.common import training
from recipes.common.arguments import AttentionArguments, RecipeArguments, check_counts, check_share, option, several
from recipes.common.data import text
from recipes.common.language_models import Kind, ModelArguments, load_model, load_tokenizer

Metrics = Callable[[EvalPrediction], dict[str, float]]
DEFAULT_BLOCK = 1024  # the default --block_size of a model that takes more tokens


@dataclass
class TextArguments:
    """The source of the text, and how it is cut into windows."""

    _argument_group_name = "text"

    text: list[str] = several(
        "Files (.txt or .jsonl, optionally .gz; others are read as plain text) or folders of such files. A text file "
        "is one document, unless --document_separator splits it. A line of .jsonl is one document."
    )
    eval_text: list[str] = several("Text to evaluate on. Default: --eval_share.")
    dataset: str | None = option("A hub data set instead of --text. Each of its rows is one document.", None)
    dataset_config: str | None = option("Configuration of --dataset.", None)
    train_split: str = option("Split of --dataset to train on.", "train")
    eval_split: str | None = option("Split of --dataset to evaluate on. Default: --eval_share.", None)
    text_column: str = option("Column or .jsonl field of the text.", "text")
    document_separator: str | None = option(
        "Separates the documents of a plain text file; 'blank-line' for empty lines.", None
    )
    eval_share: float = option("Share of every document, at its end, that is held out for evaluation.", 0.05)
    block_size: int | None = option(
        f"Tokens of a window. Default: as many as the model takes, up to {DEFAULT_BLOCK}.", None
    )
    drop_short: bool = option("Drop the shorter window at the end of a document instead of padding it.", False)
    max_train_windows: int | None = option("Train on at most N windows, chosen at random.", None, metavar="N")
    max_eval_windows: int | None = option("Evaluate on the first N windows.", None, metavar="N")
    eval_only: bool = option("Evaluate the model as it is, without training.", False)

    def __post_init__(self) -> None:
        if bool(self.text) == bool(self.dataset):
            raise ValueError("give the text with --text PATH ... or --dataset ID" + (", not both" if self.text else ""))
        check_share("eval_share", self.eval_share)
        check_counts(self, "max_train_windows", "max_eval_windows")
        if self.document_separator is not None:
            self.document_separator = self.document_separator.replace("\\n", "\n")
            if not self.document_separator:
                raise ValueError("--document_separator is empty")

    def documents(self, *, evaluation: bool) -> list[str] | None:
        """The documents to train on, or to evaluate on; None if there is no source of the latter."""
        split, sources = (self.eval_split, self.eval_text) if evaluation else (self.train_split, self.text)
        if not (split if self.dataset else sources):
            return None
        if self.dataset:
            texts = list(text.documents_of_hub(self.dataset, self.dataset_config, split, self.text_column))
        else:
            options = {"column": self.text_column, "separator": self.document_separator}
            texts = [one for path in text.text_files(sources) for one in text.documents_of(path, **options)]
        training.check_not_empty(len(texts), f"{self.dataset}, split {split}" if self.dataset else ", ".join(sources))
        return texts

    def size_for(self, model: PreTrainedModel) -> int:
        """The number of tokens of a window. Refuses more than the model has positions for."""
        positions = num_positions(model)
        if self.block_size is None:
            return min(DEFAULT_BLOCK, positions or DEFAULT_BLOCK)
        if positions is not None and self.block_size > positions:
            rotary = getattr(model.config, "rope_parameters", None) is not None
            way = "--config_overrides max_position_embeddings=" if rotary else "--extend_positions "
            raise ValueError(
                f"--block_size {self.block_size} exceeds the model's {positions} positions: give "
                f"{way}{self.block_size}, or a smaller block size"
            )
        return self.block_size


def prepare(
    attention: AttentionArguments, words: TextArguments, which: ModelArguments, args: RecipeArguments, kind: Kind
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the text, load or make tokenizer and model, and cut the documents into windows.

    Returns:
        The arguments of a Trainer except for the collator and the metrics, and the part of the report about them.
    """
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


class LanguageTrainer(Trainer):
    """Trainer with separate metrics for each evaluation set, and without a cache of keys and values.

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
        self.metrics, self.causal = metrics, causal

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """As in Trainer, without a cache for causal models."""
        inputs = {**inputs, "use_cache": False} if self.causal else inputs
        return super().compute_loss(model, inputs, *args, **kwargs)

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
