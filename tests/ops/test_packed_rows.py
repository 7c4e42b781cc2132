"""Several texts in one row are refused wherever the arguments of a call show them, and positions of padding are not."""

import inspect

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
    batches = [collated()]
    ids = batches[0]["input_ids"]
    batches.append(
        {"input_ids": ids, "position_ids": batches[0]["position_ids"], "attention_mask": torch.ones_like(ids)}
    )
    kinds = ({"return_flash_attn_kwargs": True}, {"return_seq_idx": True})
    batches += [collated(return_position_ids=False, **options) for options in kinds]
    batches.append({**batches[0], "input_ids": ids.expand(2, -1)})
    for batch in batches:
        for cache in caches(family):
            with pytest.raises(hea.UnsupportedAttentionError, match="packed sequences"):
                model(**batch, **cache)
    with pytest.raises(hea.UnsupportedAttentionError, match="packed sequences"):
        model.base_model(**batches[0])
    names = list(inspect.signature(model.forward).parameters)
    if "position_ids" in names:
        positional = [batches[0].get(name) for name in names[: names.index("position_ids") + 1]]
        with pytest.raises(hea.UnsupportedAttentionError, match="packed sequences"):
            model(*positional)
    hea.convert(model, "sdpa")(**batches[0])


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_positions_of_one_text(family, padding):
    if family == "distilbert":
        pytest.skip("the model takes no position_ids")
    model, batch = tiny_model(family, "linear", head=True), tiny_batch(family, padding=padding)
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    counted = mask.cumsum(1) - 1
    for fill in (0, 1):
        for cache in caches(family):
            model(**batch, position_ids=counted.masked_fill(mask == 0, fill), **cache)
    model(**batch, position_ids=torch.arange(70)[None])
    model(**batch, position_ids=torch.arange(0, 128)[:70][None] + 5)
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
