"""The table in docs/guides/running.md: every way of generating, with every kind of cache, works or is refused as said.

"Works" is checked against a plain loop: the prompt in one call, and then one token after the other.
"""

import copy
import pathlib
import re

import pytest
import torch
import transformers
from transformers.cache_utils import CacheLayerMixin, DynamicCache, QuantizedLayer

import hf_efficient_attn as hea
from hf_efficient_attn.integration.cache import StateLayer
from tiny_models import DECODERS, EXACT, METHODS, SAME_BY_STEP, SIZES, SMALL, TEXT, tiny_batch, tiny_model

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "guides" / "running.md").read_text(encoding="utf-8")
CAUSAL = [name for name in METHODS if hea.method_info(name).causal]
# The kinds of caches, by the columns of the table.
KINDS = {
    "exact steps": [name for name in CAUSAL if name not in SAME_BY_STEP],
    "own steps": [name for name in CAUSAL if name in SAME_BY_STEP and not hea.method_info(name).recurrent],
    "state": [name for name in CAUSAL if hea.method_info(name).recurrent],
    "landmarks": ["nearfar"],
}
NEW = 12
# A cell of the table for a way that has a cache of its own.
NOTHING = "\N{EN DASH}"
RECORDS = hasattr(transformers.Cache, "activate_past_recording")


def rows_of(title: str) -> list[list[str]]:
    """The cells of a table of the page, by its first line."""
    _, _, rest = PAGE.partition(f"\n{title}\n")
    lines = rest.partition("\n\n")[0].splitlines()[1:]
    assert lines, f"the page has no table {title}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


TABLE = {row[0]: dict(zip(KINDS, row[1:], strict=True)) for row in rows_of(f"| way | {' | '.join(KINDS)} |")}
SENTENCES = {
    way: re.escape(sentence).replace("<name>", r"\w+").replace("<n>", r"\d+")
    for way, sentence in rows_of("| way | sentence |")
}


def model_of(family: str, method: str, seed: int = 0):
    sizes = {"n_positions": 256} if family == "gpt2" else {"max_position_embeddings": 256}
    model = tiny_model(family, head=True, seed=seed, **sizes)
    return model if method == "sdpa" else hea.convert(model, method, **SMALL[method])


def new_cache(model, kind: str):
    return hea.NearFarCache(model.config, 24) if kind == "landmarks" else None


def generate(model, inputs, kind: str, **options):
    cache = new_cache(model, kind)
    options = {"do_sample": False, **({} if cache is None else {"past_key_values": cache}), **options}
    torch.manual_seed(3)
    out = model.generate(**inputs, max_new_tokens=NEW, min_new_tokens=NEW, **options)
    # Some versions of Transformers return one token too many if all drafts are right.
    return out[:, : inputs["input_ids"].shape[1] + NEW] if isinstance(out, torch.Tensor) else out


def new_tokens(model, inputs, kind: str, **options) -> torch.Tensor:
    return generate(model, inputs, kind, **options)[:, inputs["input_ids"].shape[1] :]


@torch.no_grad()
def logits_of(model, ids, cuts, kind: str, mask=None) -> torch.Tensor:
    """The logits of all tokens, which come in pieces that end at `cuts`."""
    mask, cache, outs, start = torch.ones_like(ids) if mask is None else mask, new_cache(model, kind), [], 0
    cache = DynamicCache(config=model.config) if cache is None else cache
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for end in [*cuts, *range(cuts[-1] + 1, ids.shape[1] + 1)]:
        options = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
        outs.append(model(ids[:, start:end], past_key_values=cache, use_cache=True, **options).logits)
        start = end
    return torch.cat(outs, 1)


def check_tokens(model, ids, prompt: int, cuts, kind: str, mask=None) -> None:
    """Check that each new token is the most likely one after the tokens before it."""
    mask = None if mask is None else torch.cat((mask, mask.new_ones(len(ids), ids.shape[1] - prompt)), 1)
    logits = logits_of(model, ids[:, :-1], cuts, kind, None if mask is None else mask[:, :-1])[:, prompt - 1 :]
    logits[..., 3] = -torch.inf  # the end of the text, which `generate` excludes up to the minimum of new tokens
    assert torch.equal(logits.argmax(2), ids[:, prompt:])


# --- the ways, by the rows of the table ---


def greedy_and_sampling(family, method, kind):
    model, inputs = model_of(family, method), tiny_batch(family, padding="left")
    check_tokens(model, generate(model, inputs, kind), 70, [70], kind, inputs["attention_mask"])
    found = generate(model, inputs, kind, do_sample=True, top_k=0)
    mask = torch.cat((inputs["attention_mask"], torch.ones(2, NEW, dtype=torch.int64)), 1)
    logits = logits_of(model, found[:, :-1], [70], kind, mask[:, :-1])[:, 69:]
    logits[..., 3] = -torch.inf
    torch.manual_seed(3)
    drawn = [torch.multinomial(step.softmax(1), 1) for step in logits.unbind(1)]
    assert torch.equal(torch.cat(drawn, 1), found[:, 70:])


def beams(family, method, kind):
    """The score of the best beam is that of its tokens alone."""
    model, inputs = model_of(family, method), tiny_batch(family, batch=1)
    out = generate(model, inputs, kind, num_beams=3, return_dict_in_generate=True, output_scores=True)
    logits = logits_of(model, out.sequences[:, :-1], [70], kind)[:, 69:]
    scores = logits.log_softmax(2).gather(2, out.sequences[:, 70:, None])
    assert float(out.sequences_scores[0]) == pytest.approx(float(scores.mean()), abs=1e-3)


def check_assisted(model, inputs, kind, **options):
    """The tokens are those of the plain loop, in whose first call the accepted drafts of the first round follow."""
    lengths, prompt = [], inputs["input_ids"].shape[1]
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"]), with_kwargs=True
    )
    found = generate(model, inputs, kind, **options)
    hook.remove()
    first = lengths[0]
    assert max(ids.shape[1] for ids in lengths[1:]) > 1 or first.shape[1] > prompt, "there were no drafts"
    same = (found[:, prompt : first.shape[1]] == first[:, prompt:])[0].long().cumprod(0).sum()
    check_tokens(model, found, prompt, [prompt + int(same)], kind)
    return found[:, prompt:]


def assisted(family, method, kind):
    model, inputs = model_of(family, method), tiny_batch(family, batch=1)
    plain = new_tokens(model, inputs, kind)
    for assistant in (model_of(family, "sdpa"), model_of(family, method, seed=1)):
        tokens = check_assisted(model, inputs, kind, assistant_model=assistant)
        assert kind == "exact steps" or torch.equal(tokens, plain)
    exact = model_of(family, "sdpa")
    tokens = new_tokens(exact, inputs, "", assistant_model=model_of(family, method))
    assert torch.equal(tokens, new_tokens(exact, inputs, ""))


def prompt_lookup(family, method, kind):
    model = model_of(family, method)
    inputs = {"input_ids": tiny_batch(family, batch=1, length=7)["input_ids"].repeat(1, 10)}
    tokens = check_assisted(model, inputs, kind, prompt_lookup_num_tokens=5)
    assert kind == "exact steps" or torch.equal(tokens, new_tokens(model, inputs, kind))


def chunks(family, method, kind):
    model, inputs = model_of(family, method), tiny_batch(family, padding="left")
    found = generate(model, inputs, kind, prefill_chunk_size=16)
    check_tokens(model, found, 70, [16, 32, 48, 64, 70], kind, inputs["attention_mask"])
    if kind in ("exact steps", "landmarks"):
        # The second chunk is exact: with exact attention in the first layer, its logits are those of an exact model.
        part = hea.convert(model_of(family, "sdpa"), method, layers=[1], **SMALL[method])
        ids = inputs["input_ids"]
        last = logits_of(part, ids, [30, 70], "exact steps")[:, 30:]
        torch.testing.assert_close(
            last, logits_of(model_of(family, "sdpa"), ids, [70], "")[:, 30:], atol=1e-3, rtol=1e-3
        )
    else:
        assert torch.equal(found[:, 70:], new_tokens(model, inputs, kind))


@torch.no_grad()
def crop(family, method, kind):
    model, ids = model_of(family, method), tiny_batch(family)["input_ids"]
    cache = new_cache(model, kind) or DynamicCache(config=model.config)
    model(ids[:, :40], past_key_values=cache)
    model(ids[:, 50:65], past_key_values=cache)
    # In earlier versions `crop` takes the length that remains.
    cache.crop(-15 if hasattr(CacheLayerMixin, "get_max_length") else 40)
    last = model(ids[:, 40:41], past_key_values=cache).logits
    torch.testing.assert_close(last, logits_of(model, ids[:, :41], [40], kind)[:, 40:], atol=1e-4, rtol=1e-4)


class Stream:
    """What an offloading cache needs of a stream of an accelerator."""

    def wait_stream(self, other):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


def offloaded(family, method, kind):
    """Without a second device, offloaded tensors are float64: an operation on both dtypes fails, as on two devices."""

    def move(dtype):
        def change(layer):
            if layer.is_initialized and layer.keys is not None:
                layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)

        return change

    model, inputs = model_of(family, method), tiny_batch(family, padding="left")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Stream", Stream)
        patch.setattr(torch.cuda, "default_stream", lambda device=None: Stream())
        patch.setattr(CacheLayerMixin, "offload", move(torch.float64))
        patch.setattr(CacheLayerMixin, "prefetch", move(torch.float32))
        out = generate(model, inputs, kind, cache_implementation="offloaded", return_dict_in_generate=True)
    kept = (out.cache if hasattr(out, "cache") else out.past_key_values).layers
    kept = [layer.keys.dtype for layer in kept if not isinstance(layer, StateLayer)]
    assert kept in ([], [torch.float32, torch.float64]), "the last layer was not offloaded"
    assert torch.equal(out.sequences[:, 70:], new_tokens(model, inputs, kind))


class Lossless(QuantizedLayer):
    """The cache layer of a quantization that rounds nothing."""

    def __init__(self):
        super().__init__(residual_length=4)

    def _quantize(self, tensor, axis=None):
        return tensor.clone()

    def _dequantize(self, q_tensor):
        return q_tensor


def quantized(family, method, kind):
    model, inputs = model_of(family, method), tiny_batch(family, padding="left")
    cache = transformers.Cache(layers=[Lossless(), Lossless()])
    assert torch.equal(new_tokens(model, inputs, kind, past_key_values=cache), new_tokens(model, inputs, kind))


def without_config(family, method, kind):
    model, inputs, cache = model_of(family, method), tiny_batch(family, padding="left"), DynamicCache()
    assert torch.equal(new_tokens(model, inputs, kind, past_key_values=cache), new_tokens(model, inputs, kind))
    assert cache.layers[0].keys.shape[2] == 70 + NEW - 1


def static(family, method, kind):
    for name in ("static", "offloaded_static"):
        model, inputs = model_of(family, method), tiny_batch(family)
        try:
            new_tokens(model, inputs, kind, cache_implementation=name)
        except hea.UnsupportedAttentionError:
            if name == "offloaded_static":
                raise


def continuous(family, method, kind):
    prompt = tiny_batch(family, batch=1)["input_ids"][0].tolist()
    options = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=1)
    model_of(family, method).generate_batch([prompt], generation_config=options)


def attentions(family, method, kind):
    generate(model_of(family, method), tiny_batch(family), kind, output_attentions=True, return_dict_in_generate=True)


def own_window(family, method, kind):
    """A model with windows of its own in some layers, which stay exact; tests/integration/test_windows.py has more."""
    sizes = {**SIZES, **TEXT, "num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20, "use_sliding_window": True}
    torch.manual_seed(0)
    exact = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **tokens, **kinds)).eval()
    inputs, small = tiny_batch("llama"), SMALL[method]
    model = hea.convert(copy.deepcopy(exact), method, layers=[1], **small)
    if method in EXACT:
        # With a budget of the whole prompt, the new tokens are those of the exact model with its window.
        large = hea.method_info(method).config_class(**small).with_budget(512)
        other = hea.convert(copy.deepcopy(exact), large, layers=[1])
        assert torch.equal(new_tokens(other, inputs, kind), new_tokens(exact, inputs, ""))
    assert new_tokens(model, inputs, kind).shape == (2, NEW)


WAYS = {
    "greedy search and sampling": greedy_and_sampling,
    "beam search": beams,
    "assisted generation (`assistant_model`)": assisted,
    "prompt lookup (`prompt_lookup_num_tokens`)": prompt_lookup,
    "prompt in chunks (`prefill_chunk_size`)": chunks,
    "`cache.crop(-n)`": crop,
    'offloaded cache (`cache_implementation="offloaded"`)': offloaded,
    'quantized cache (`cache_implementation="quantized"`)': quantized,
    "`DynamicCache()` without a config": without_config,
    'static cache (`cache_implementation="static"`)': static,
    "continuous batching (`generate_batch`)": continuous,
    "`output_attentions=True`": attentions,
    "layers with a sliding window of the model's own": own_window,
}


def test_the_table_has_every_way():
    assert list(TABLE) == list(WAYS)
    refused = [way for way, cells in TABLE.items() if any(cell.startswith("refused") for cell in cells.values())]
    assert refused == list(SENTENCES)


def cases():
    """A method, a kind of cache and a way; the core suite has each kind and way with one method."""
    for kind, methods in KINDS.items():
        for number, (way, cells) in enumerate(TABLE.items()):
            for method in methods if cells[kind] != NOTHING else ():
                marks = () if method == methods[number % len(methods)] else pytest.mark.exhaustive
                yield pytest.param((method, kind, way), marks=marks, id=f"{method}-{kind}-{WAYS[way].__name__}")


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("family", DECODERS)
def test_ways(family, case):
    method, kind, way = case
    said, run = TABLE[way][kind].partition(" [")[0], WAYS[way]
    if run in (assisted, prompt_lookup) and kind in ("state", "landmarks") and not RECORDS:
        pytest.skip("this Transformers records no past")
    if said == "works":
        run(family, method, kind)
        return
    assert said == "refused"
    with pytest.raises(hea.UnsupportedAttentionError, match=f"^{SENTENCES[way]}"):
        run(family, method, kind)
