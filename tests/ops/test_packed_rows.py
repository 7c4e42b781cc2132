"""Several texts in one row are refused wherever the arguments of a call show them, and positions of padding are not."""

import inspect
from functools import partial

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from tiny_models import tiny_batch, tiny_model

TEXTS = [{"input_ids": list(range(5, 5 + length))} for length in (30, 1, 25)]
MODELS = ["llama", "gpt2", "bert", "distilbert"]


def collated(**options) -> dict:
    batch = transformers.DataCollatorWithFlattening(**options)(TEXTS, return_tensors="pt")
    batch.pop("labels")
    return batch


def caches(family: str) -> list[dict]:
    return [{}] if family in ("bert", "distilbert") else [{"use_cache": True}, {"use_cache": False}, {}]


@pytest.mark.parametrize("layers", [None, [1]], ids=str)
@pytest.mark.parametrize("family", MODELS)
def test_the_rows_of_the_collator(family, layers):
    model = hea.convert(tiny_model(family, head=True), "linear", layers=layers)
    first = collated()
    ids = first["input_ids"]
    batches = [first, {**first, "attention_mask": torch.ones_like(ids)}, {**first, "input_ids": ids.expand(2, -1)}]
    kinds = ({"return_flash_attn_kwargs": True}, {"return_seq_idx": True})
    batches += [collated(return_position_ids=False, **options) for options in kinds]
    calls = [partial(model, **batch, **cache) for batch in batches for cache in caches(family)]
    calls.append(partial(model.base_model, **first))
    names = list(inspect.signature(model.forward).parameters)
    if "position_ids" in names:
        calls.append(partial(model, *(first.get(name) for name in names[: names.index("position_ids") + 1])))
    for call in calls:
        with pytest.raises(hea.UnsupportedAttentionError, match="packed sequences"):
            call()
    hea.convert(model, "sdpa")(**first)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_positions_of_one_text(family, padding):
    if family == "distilbert":
        pytest.skip("the model takes no position_ids")
    model, batch = tiny_model(family, "linear", head=True), tiny_batch(family, padding=padding)
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    counted = mask.cumsum(1) - 1
    for positions in (counted.masked_fill(mask == 0, 0), counted.masked_fill(mask == 0, 1), torch.arange(5, 75)[None]):
        for cache in caches(family):
            model(**batch, position_ids=positions, **cache)
    if family in ("llama", "gpt2") and padding != "right":
        model.generate(**batch, max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize("use_cache", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_compiled(use_cache):
    """The values are not known while the graph is traced, so the check is part of the graph."""
    torch.compiler.reset()
    model, ids = tiny_model("llama", "linear"), tiny_batch("llama")["input_ids"]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    plain, packed = torch.arange(70)[None], torch.cat((torch.arange(30), torch.arange(40)))[None]
    with torch.no_grad():
        compiled(ids, position_ids=plain, use_cache=use_cache)
        with pytest.raises(RuntimeError, match="packed sequences"):
            compiled(ids, position_ids=packed, use_cache=use_cache)
