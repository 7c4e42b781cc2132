"""Generation: steps with a cache, batches, and the table in docs/guides/running.md of ways and kinds of caches.

"Works" in the table is checked against a plain loop: the prompt in one call, and then one token after the other.
"""

import copy
import pathlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import MagicMock

import pytest
import torch
import transformers
from transformers.cache_utils import CacheLayerMixin, DynamicCache, QuantizedLayer

import hf_efficient_attn as hea
from each import few_methods, refuses
from helpers.encoder_decoders import tiny
from helpers.windowed_models import converted, exact_model
from hf_efficient_attn.integration.cache import StateLayer, cache_argument
from tiny_models import CAUSAL, DECODERS, EXACT, SAME_BY_STEP, SMALL, decode, generate, reloaded, tiny_batch, tiny_model

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "guides" / "running.md").read_text(encoding="utf-8")
# The kinds of caches, by the columns of the table.
KINDS = {
    "exact steps": [name for name in CAUSAL if name not in SAME_BY_STEP],
    "own steps": [name for name in CAUSAL if name in SAME_BY_STEP and not hea.method_info(name).recurrent],
    "state": [name for name in CAUSAL if hea.method_info(name).recurrent],
    "landmarks": ["nearfar"],
    "look-ups": ["nearfar"],
}
# Those of `NearFarCache`.
BY_COLUMNS = ("landmarks", "look-ups")
NEW = 12
LENGTH = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
# A cell of the table for a way that has a cache of its own.
NOTHING = "\N{EN DASH}"
RECORDS = hasattr(transformers.Cache, "activate_past_recording")
each_family = pytest.mark.parametrize("family", DECODERS)


@few_methods
@each_family
def test_decoding_steps_with_the_cache(family, method):
    """After a prompt, the logits of one token and of 40 equal the whole sequence's, where the method promises it."""
    model, ids = tiny_model(family, method, head=True), tiny_batch(family)["input_ids"]
    exact = tiny_model(family, head=True)
    if method not in SAME_BY_STEP:
        # These methods are documented to attend to all cached keys exactly. With exact attention in the first layer,
        # the logits are those of an exact model.
        model = hea.convert(copy.deepcopy(exact), method, layers=[1], **SMALL[method])
    with torch.no_grad():
        whole = (model if method in SAME_BY_STEP else exact)(ids, use_cache=False).logits
    for step in (1, 40):
        torch.testing.assert_close(decode(model, ids, [70 - step])[:, -step:], whole[:, -step:], atol=1e-4, rtol=1e-4)


@few_methods
@each_family
def test_batches_with_left_padding_generate_as_each_alone(family, method):
    model, inputs = tiny_model(family, method, head=True), tiny_batch(family, padding="left")
    together = generate(model, inputs)
    for row, ids in ((0, inputs["input_ids"][:1]), (1, inputs["input_ids"][1:, -50:])):
        assert torch.equal(together[row : row + 1], generate(model, {"input_ids": ids}))


def rows_of(title: str) -> list[list[str]]:
    """The cells of a table of the page, by its first line."""
    _, _, rest = PAGE.partition(f"\n{title}\n")
    lines = rest.partition("\n\n")[0].splitlines()[1:]
    assert lines, f"the page has no table {title}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


TABLE = {row[0]: dict(zip(KINDS, row[1:], strict=True)) for row in rows_of(f"| way | {' | '.join(KINDS)} |")}
ESCAPED = {way: re.escape(sentence) for way, sentence in rows_of("| way | sentence |")}
SENTENCES = {way: text.replace("<name>", r"\w+").replace("<n>", r"\d+") for way, text in ESCAPED.items()}


def new_cache(model, kind: str):
    if kind in BY_COLUMNS:
        return hea.NearFarCache(model.config, 24, look_up=kind == "look-ups")
    return DynamicCache(config=model.config)


def options_of(model, kind: str, options: dict) -> dict:
    """Options of `generate`, which makes most kinds of caches itself."""
    return {**({cache_argument(): new_cache(model, kind)} if kind in BY_COLUMNS else {}), **options}


def tokens_of(model, inputs, kind: str, **options) -> torch.Tensor:
    return generate(model, inputs, NEW, **options_of(model, kind, options))


def plain_loop(model, inputs, new: torch.Tensor, cuts, kind: str) -> torch.Tensor:
    """The logits for each new token, after a prompt that comes in calls that end at `cuts`, and one token at a time."""
    ids, prompt = torch.cat((inputs["input_ids"], new), 1)[:, :-1], inputs["input_ids"].shape[1]
    mask = torch.ones_like(ids)
    mask[:, :prompt] = inputs.get("attention_mask", mask[:, :prompt])
    cuts = [*cuts, *range(cuts[-1] + 1, ids.shape[1])]
    return decode(model, ids, cuts, new_cache(model, kind), mask)[:, prompt - 1 :]


def without_end(logits: torch.Tensor) -> torch.Tensor:
    """Logits without the end of the text, which `generate` excludes up to the minimum of new tokens."""
    return logits.index_fill(2, torch.tensor(3), -torch.inf)


def check_tokens(model, inputs, new: torch.Tensor, cuts, kind: str) -> None:
    """Check that each new token is the most likely one after the tokens before it."""
    assert torch.equal(without_end(plain_loop(model, inputs, new, cuts, kind)).argmax(2), new)


# --- the ways, by the rows of the table ---


def greedy_and_sampling(model, kind):
    inputs = tiny_batch("gpt2", padding="left")
    check_tokens(model, inputs, tokens_of(model, inputs, kind), [70], kind)
    found = tokens_of(model, inputs, kind, do_sample=True, top_k=0)
    logits = without_end(plain_loop(model, inputs, found, [70], kind))
    torch.manual_seed(3)
    drawn = [torch.multinomial(step.softmax(1), 1) for step in logits.unbind(1)]
    assert torch.equal(torch.cat(drawn, 1), found)


def beams(model, kind):
    """The score of the best beam is that of its tokens alone."""
    inputs = tiny_batch("gpt2", batch=1)
    options = {"num_beams": 3, "return_dict_in_generate": True, "output_scores": True}
    out = model.generate(**inputs, **LENGTH, **options_of(model, kind, options))
    new = out.sequences[:, 70:]
    scores = plain_loop(model, inputs, new, [70], kind).log_softmax(2).gather(2, new[..., None])
    assert float(out.sequences_scores[0]) == pytest.approx(float(scores.mean()), abs=1e-3)


def check_assisted(model, inputs, kind, **options):
    """Assisted generation gives the plain loop's tokens, whose first call includes the drafts of the first round."""
    calls, prompt = [], inputs["input_ids"].shape[1]
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs["input_ids"]), with_kwargs=True)
    found = tokens_of(model, inputs, kind, **options)
    hook.remove()
    first = calls[0][:, prompt:]
    assert max(ids.shape[1] for ids in calls[1:]) > 1 or first.shape[1] > 0, "there were no drafts"
    same = (found[:, : first.shape[1]] == first)[0].long().cumprod(0).sum()
    check_tokens(model, inputs, found, [prompt + int(same)], kind)
    assert kind == "exact steps" or torch.equal(found, tokens_of(model, inputs, kind))


def assisted(model, kind):
    family, method, inputs = model.config.model_type, model.config._attn_implementation, tiny_batch("gpt2", batch=1)
    exact = tiny_model(family, head=True)
    for assistant in (exact, tiny_model(family, method, head=True, seed=1)):
        check_assisted(model, inputs, kind, assistant_model=assistant)
    assert torch.equal(tokens_of(exact, inputs, "", assistant_model=model), tokens_of(exact, inputs, ""))


def prompt_lookup(model, kind):
    inputs = {"input_ids": tiny_batch("gpt2", batch=1, length=7)["input_ids"].repeat(1, 10)}
    check_assisted(model, inputs, kind, prompt_lookup_num_tokens=5)


def chunks(model, kind):
    inputs = tiny_batch("gpt2", padding="left")
    found = tokens_of(model, inputs, kind, prefill_chunk_size=16)
    check_tokens(model, inputs, found, [16, 32, 48, 64, 70], kind)
    # The others compute the second chunk exactly.
    assert kind in ("exact steps", "landmarks") or torch.equal(found, tokens_of(model, inputs, kind))


@torch.no_grad()
def crop(model, kind):
    ids = tiny_batch("gpt2")["input_ids"]
    cache = new_cache(model, kind)
    for piece in (ids[:, :40], ids[:, 50:65]):
        model(piece, **{cache_argument(): cache})
    # In earlier versions `crop` takes the length that remains.
    cache.crop(-15 if hasattr(CacheLayerMixin, "get_max_length") else 40)
    last = model(ids[:, 40:41], **{cache_argument(): cache}).logits
    torch.testing.assert_close(last, decode(model, ids[:, :41], [40])[:, 40:], atol=1e-4, rtol=1e-4)


@contextmanager
def without_streams() -> Iterator[pytest.MonkeyPatch]:
    """Offloaded caches wait for no stream: without a GPU, the build of PyTorch decides whether there are streams."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Stream", MagicMock)
        patch.setattr(torch.cuda, "default_stream", MagicMock())
        yield patch


def offloaded(model, kind):
    """Without a second device, offloaded tensors are float64: an operation on both dtypes fails, as on two devices."""

    def move(dtype):
        def change(layer):
            if layer.is_initialized and layer.keys is not None:
                layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)

        return change

    inputs, options = tiny_batch("gpt2", padding="left"), {"cache_implementation": "offloaded"}
    with without_streams() as patch:
        patch.setattr(CacheLayerMixin, "offload", move(torch.float64))
        patch.setattr(CacheLayerMixin, "prefetch", move(torch.float32))
        out = model.generate(**inputs, **LENGTH, **options, return_dict_in_generate=True)
    kept = (out.cache if hasattr(out, "cache") else out.past_key_values).layers
    kept = [layer.keys.dtype for layer in kept if not isinstance(layer, StateLayer)]
    assert kept in ([], [torch.float32, torch.float64]), "the last layer was not offloaded"
    assert torch.equal(out.sequences[:, 70:], tokens_of(model, inputs, kind))


class Lossless(QuantizedLayer):
    """The cache layer of a quantization that rounds nothing."""

    def __init__(self):
        super().__init__(residual_length=4)

    def _quantize(self, tensor, axis=None):
        return tensor.clone()

    def _dequantize(self, q_tensor):
        return q_tensor


def another_cache(model, kind, cache=None):
    inputs, cache = tiny_batch("gpt2", padding="left"), DynamicCache() if cache is None else cache
    assert torch.equal(tokens_of(model, inputs, kind, **{cache_argument(): cache}), tokens_of(model, inputs, kind))
    assert cache.get_seq_length() == 70 + NEW - 1 and cache.layers[0].keys is not None


def quantized(model, kind):
    another_cache(model, kind, transformers.Cache(layers=[Lossless(), Lossless()]))


def static(model, kind):
    for padding in ("left", "none"):
        inputs = tiny_batch("gpt2", padding=padding)
        expected = tokens_of(model, inputs, kind)
        for name in ("static", "offloaded_static"):
            with without_streams():
                assert torch.equal(tokens_of(model, inputs, kind, cache_implementation=name), expected)


def continuous(model, kind):
    prompt = tiny_batch("gpt2", batch=1)["input_ids"][0].tolist()
    options = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=1)
    model.generate_batch([prompt], generation_config=options)


def attentions(model, kind):
    options = {"output_attentions": True, "return_dict_in_generate": True}
    model.generate(**tiny_batch("gpt2"), **LENGTH, **options_of(model, kind, options))


def own_window(model, kind):
    """A model with windows of its own in some layers, which stay exact and keep the keys of their window."""
    method, inputs = model.config._attn_implementation, tiny_batch("llama", padding="left")
    exact = exact_model("Qwen2" if model.config.model_type == "gpt2" else "Gemma3Text", "ForCausalLM")
    config = hea.method_info(method).config_class(**SMALL[method])
    if method in EXACT:
        # With a budget of the whole prompt, the new tokens are those of the exact model with its window.
        other = converted(exact, config.with_budget(512))
        assert torch.equal(tokens_of(other, inputs, kind), tokens_of(exact, inputs, ""))
    other = converted(exact, config)
    found = tokens_of(other, inputs, kind)
    assert found.shape == (2, NEW)
    if kind not in BY_COLUMNS:
        assert torch.equal(tokens_of(other, inputs, kind, cache_implementation="static"), found)
    assert kind not in ("own steps", "state") or torch.equal(found, tokens_of(other, inputs, "", use_cache=False))


WAYS = {
    "greedy search and sampling": greedy_and_sampling,
    "beam search": beams,
    "assisted generation (`assistant_model`)": assisted,
    "prompt lookup (`prompt_lookup_num_tokens`)": prompt_lookup,
    "prompt in chunks (`prefill_chunk_size`)": chunks,
    "`cache.crop(-n)`": crop,
    'offloaded cache (`cache_implementation="offloaded"`)': offloaded,
    'quantized cache (`cache_implementation="quantized"`)': quantized,
    "`DynamicCache()` without a config": another_cache,
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


@pytest.mark.parametrize("case", list(cases()))
@each_family
def test_ways(family, case):
    method, kind, way = case
    said, run, model = TABLE[way][kind].partition(" [")[0], WAYS[way], tiny_model(family, method, head=True)
    if run in (assisted, prompt_lookup) and kind in ("state", *BY_COLUMNS) and not RECORDS:
        pytest.skip("this Transformers records no past")
    if said == "works":
        run(model, kind)
        return
    assert said == "refused"
    refuses(f"^{SENTENCES[way]}", run, model, kind)


def test_timestamps_of_tokens_leave_the_model_converted(tmp_path):
    """For these Whisper's `generate` writes "eager" into the config."""
    model = tiny("whisper", vocab_size=100, decoder_start_token_id=4)
    values = {"alignment_heads": [[1, 0]], "no_timestamps_token_id": 90, "is_multilingual": False, "max_new_tokens": 6}
    for name, value in values.items():
        setattr(model.generation_config, name, value)
    sound, mask = torch.randn(1, 8, 200), torch.ones(1, 200, dtype=torch.long)
    hea.convert(model.eval(), "nystromformer", layers=["encoder"], **SMALL["nystromformer"])
    ids = model.generate(sound)
    refuses("^return_token_timestamps=True", model.generate, sound, return_token_timestamps=True, attention_mask=mask)
    assert torch.equal(model.generate(sound), ids)
    assert reloaded(model, tmp_path).config._attn_implementation == "nystromformer"
    found = hea.convert(model, "linear").generate(sound, return_dict_in_generate=True)  # reads keys from the cache
    assert torch.equal(found.sequences, model.generate(sound, use_cache=False, return_dict_in_generate=True).sequences)
    timed = hea.convert(model, "eager").generate(sound, return_token_timestamps=True, attention_mask=mask)
    assert "token_timestamps" in timed


@pytest.mark.parametrize("method", ["nearfar", "kdeformer", "auto"])
def test_a_compiled_step_with_a_static_cache_is_one_graph(method):
    torch.compiler.reset()
    model = hea.convert(tiny_model("llama", head=True), method, **SMALL[method])
    ids = tiny_batch("llama", padding="none")["input_ids"]
    expected = generate(model, {"input_ids": ids}, 5)
    cache = transformers.StaticCache(config=model.config, max_cache_len=90)
    step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    found = []
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        token = model(ids, **{cache_argument(): cache}).logits[:, -1:].argmax(2)
        for _ in range(4):
            found.append(token)
            token = step(token, **{cache_argument(): cache}).logits[:, -1:].argmax(2)
    assert torch.equal(torch.cat([*found, token], 1), expected)
