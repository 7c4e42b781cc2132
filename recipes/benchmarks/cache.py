"""Compare decoding with `hea.NearFarCache` with exact decoding and with sliding windows.

    python -m recipes.benchmarks.cache --data DATA

GPT-2 reads the last 2,048 tokens of novels that it was trained on the beginning of: 64 tokens as a prompt, and then one
token after the other, through a cache of a number of columns: all keys (exact); at most so many keys and landmarks
(NearFarCache); all keys, of which a token reads those that it chooses (look-ups, by `look_up=True`); as many of the
newest keys as fit into the memory of NearFarCache (window, by `longformer`); or the same with the first four tokens,
which GPT-2 attends to when it has nothing better to attend to (Xiao et al. 2024, "Efficient streaming language models
with attention sinks").

"nats" is the loss per token from position 1,024 on, "repeated" that on a passage of 128 tokens that occurred 768 tokens
earlier, "same token" the share of positions at which the most likely next token is that of exact decoding, and
"generated" the share of tokens that are equal when each decodes 64 tokens greedily after a prompt of 1,024.

Duration: about 10 minutes on one core. Expected: with 256 columns the loss on plain text is that of exact decoding to
within .02 nats, where a window of the same memory loses .3, or .15 with the first tokens. Of those in bounded memory
none copies a passage from far back. Look-ups copy it as exact decoding does, with 128 columns nearly so. The share of
generated tokens is small, because texts part at the first token that differs.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_efficient_attn as hea
from hf_efficient_attn.checkpoint.loading import no_progress_bar
from hf_efficient_attn.cli import main_of, parse_lengths
from hf_efficient_attn.evaluation.timing import use_threads
from hf_efficient_attn.integration.cache import cache_argument
from hf_efficient_attn.io.reading import read_text
from recipes.common import commands
from recipes.common.inputs import book_paths

app = commands.new_app()

BUDGETS, _LENGTH, _PROMPT, _FROM = [64, 128, 256, 512], 2048, 64, 1024
_PASSAGE, _START, _DISTANCE = 128, 700, 768
_GENERATED, _SINKS = 64, 4
COLUMNS = {
    "cache": "{cache}", "columns": "{columns}", "numbers": "{numel:,}", "nats": "{nats:.2f}",
    "repeated": "{repeated:.2f}", "same token": "{same:.0%}", "generated": "{generated:.0%}",
}  # fmt: skip


def load(data: Path, inputs: int) -> tuple[PreTrainedModel, Tensor]:
    """GPT-2, and the last tokens of books: int64 (inputs, 2048)."""
    folder = commands.existing(data / "models" / "gpt2-books", "GPT-2")
    with no_progress_bar():
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    texts = [read_text(book)[-8 * _LENGTH :] for book in book_paths(data, inputs)]
    return model, torch.tensor([tokenizer(text, verbose=False)["input_ids"][-_LENGTH:] for text in texts])


def read(model: PreTrainedModel, ids: Tensor, cache: Any = None) -> Tensor:
    """Log-probabilities (B, N, vocabulary) of the next tokens, read through a cache or, without one, at once."""
    if cache is None:
        return model(ids).logits.log_softmax(2)
    parts = [model(part, **{cache_argument(): cache}).logits for part in (ids[:, :_PROMPT], ids[:, _PROMPT:])]
    return torch.cat(parts, 1).log_softmax(2)


def nats(scores: Tensor, ids: Tensor, first: int, last: int) -> float:
    """The mean loss of the tokens from position `first` to before `last`."""
    return -float(scores[:, first - 1 : last - 1].gather(2, ids[:, first:last, None]).mean())


def measure(
    model: PreTrainedModel, ids: Tensor, columns: int | None, exact: Any, *, look_up: bool = False
) -> dict[str, Any]:
    """One row of the table, with `columns` in a `NearFarCache` or without one; `exact` are the "tensors" of exact."""

    def cache() -> hea.NearFarCache | None:
        return None if columns is None else hea.NearFarCache(model.config, columns, look_up)

    used, repeated, second = cache(), ids.clone(), _START + _DISTANCE
    repeated[:, second:][:, :_PASSAGE] = ids[:, _START : _START + _PASSAGE]
    scores = read(model, ids, used)
    new = model.generate(
        ids[:, :_FROM], attention_mask=torch.ones_like(ids[:, :_FROM]), do_sample=False, max_new_tokens=_GENERATED,
        min_new_tokens=_GENERATED, pad_token_id=0, **{cache_argument(): cache()},
    )[:, _FROM:]  # fmt: skip
    tensors = {"best": scores[:, _FROM:].argmax(2), "new": new}
    compared = tensors if exact is None else exact
    return {
        "nats": nats(scores, ids, _FROM, _LENGTH),
        # The first token of the passage cannot be foreseen.
        "repeated": nats(read(model, repeated, cache()), repeated, second + 1, second + _PASSAGE),
        "same": float((tensors["best"] == compared["best"]).float().mean()),
        "generated": float((new == compared["new"]).float().mean()),
        "numel": None if used is None else used.numel() // len(ids),
        "tensors": tensors,
    }


def compare(model: PreTrainedModel, ids: Tensor, budgets: list[int]) -> list[dict[str, Any]]:
    """All rows: exact decoding, and for every budget a `NearFarCache`, look-ups, and two windows in bounded memory."""
    config = model.config
    numel_of_key = 2 * config.n_embd * config.n_layer
    hea.convert(model, hea.NearFarConfig().with_budget(_LENGTH))
    exact = measure(model, ids, None, None)
    rows = [{"cache": "exact", "columns": _LENGTH, **exact, "numel": _LENGTH * numel_of_key}]
    for columns in budgets:
        hea.convert(model, hea.NearFarConfig().with_budget(_LENGTH))
        row = measure(model, ids, columns, exact["tensors"])
        rows.append({"cache": "NearFarCache", "columns": columns, **row})
        own = measure(model, ids, columns, exact["tensors"], look_up=True)
        rows.append({"cache": "look-ups", "columns": columns, **own})
        window = row["numel"] // numel_of_key
        for name, sinks in (("window", 0), (f"window, first {_SINKS}", _SINKS)):
            hea.convert(model, "longformer", window_size=window - sinks, global_tokens=sinks)
            own = measure(model, ids, None, exact["tensors"])
            rows.append({"cache": name, "columns": window, **own, "numel": window * numel_of_key})
    for row in rows:
        del row["tensors"]
    return rows


@app.command(epilog="Example: python -m recipes.benchmarks.cache --data data --budget 256 --inputs 1")
def cache(
    data: commands.Data = None,
    budgets: commands.numbers_option("Columns of the cache", "64,128,256,512", "--budget") = [],  # noqa: B006
    inputs: commands.option(int, "Number of books.", min=1) = 6,
    threads: commands.Threads = None,
    csv: commands.Csv = None,
) -> None:
    """Compare decoding with `hea.NearFarCache` with exact decoding and with sliding windows."""
    with use_threads(threads), torch.no_grad():
        rows = compare(*load(commands.data_folder(data), inputs), parse_lengths(budgets) or BUDGETS)
    commands.report(rows, COLUMNS, csv=csv)


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.cache")
