"""Models that are divided over processes compute what one process computes, or are refused.

`hea.sequence_parallel`, and engines of others: tensor parallelism, FSDP2, context parallelism, Ulysses.
"""

import copy
import os
import re
import time

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_efficient_attn as hea
import processes
from each import close, few_methods, refuses
from helpers import model_types
from helpers.learned import shake
from processes import mesh, refused
from recipes.benchmarks.sequence_parallel import Traffic
from tiny_models import tiny_batch, tiny_config, tiny_model

LENGTHS = {1: (61,), 2: (33, 28), 4: (16, 15, 7, 23)}
LENGTH = 61
METHODS = {
    "linear": {},
    "hedgehog": {"method": "linear", "feature_map": "hedgehog", "num_features": 8},
    "performer": {"num_features": 16},
    "longformer": {"window_size": 6},
    "kdeformer": {"block_size": 8, "num_samples": 8},
    "nystromformer": {"num_landmarks": 8},
    "linformer": {"projection_dim": 8},
    "nearfar": {"block_size": 4, "num_samples": 12},
    "flurka_linear": {"projection_dim": 8},
    "eva": {"num_landmarks": 4, "window_size": 4},
}
CASES = [
    (model, method, padding)
    for model in ("bert", "gpt2", "llama")
    for method in METHODS
    for padding in ("right", "left")
    if method != "eva" and (model == "bert" or hea.method_info(METHODS[method].get("method", method)).causal)
]


def make(family, method, **options):
    """A model in float64 whose heads have different learned parameters."""
    model = tiny_model(family, head=family != "bert", max_position_embeddings=80, **options).double()
    return shake(hea.convert(model, {"method": method, **METHODS[method]}))


def batch(padding):
    ids = torch.randint(0, 60, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    if padding != "none":
        mask[(0, slice(-20, None)) if padding == "right" else (1, slice(9))] = 0
    return ids, mask


def own_tokens():
    lengths, rank = LENGTHS[dist.get_world_size()], dist.get_rank()
    return slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))


def compare(whole, divided, padding, own, is_summed=lambda name: True, share=1.0):
    """The largest difference of the outputs for valid tokens, and of the gradients of the parameters.

    A process has the part of the batch with the index `own`. The gradients are summed over the processes where
    `is_summed` says so; the whole model's loss is multiplied by `share`.
    """
    ids, mask = batch(padding)
    wanted, found = (model(ids[x], attention_mask=mask[x])[0] for model, x in ((whole, ()), (divided, own)))
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(4)).double() * mask[:, :, None]
    (wanted * weight).sum().mul(share).backward()
    (found * weight[own]).sum().backward()
    wanted, found = (x.detach() * mask[y][:, :, None] for x, y in ((wanted[own], own), (found, own)))
    errors = [float((found - wanted).abs().max() / wanted.abs().max())]
    for (name, one), (_, other) in zip(whole.named_parameters(), divided.named_parameters(), strict=True):
        if one.grad is not None:
            grad = other.grad.full_tensor() if hasattr(other.grad, "full_tensor") else other.grad.clone()
            if is_summed(name):
                dist.all_reduce(grad)
            errors.append(float((grad - one.grad).abs().max() / one.grad.abs().max().clamp(min=1.0)))
    return max(errors)


def check(results):
    wrong = {(rank, case): x for rank, found in enumerate(results) for case, x in found.items() if not x < 1e-6}
    assert not wrong, wrong


# Data parallelism. In float32 rounding decides between keys (docs/guides/many_processes.md).


@few_methods
def test_the_mean_of_the_gradients_of_two_halves_is_that_of_a_batch(method):
    """Also over steps of AdamW, and in training, where halves draw the same if their generators have the same state."""
    whole = tiny_model("vit", method, head=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).double()
    pictures, labels, losses = tiny_batch("vit", 4)["pixel_values"].double(), torch.tensor([0, 1, 1, 0]), []
    for model, parts in ((whole, 1), (copy.deepcopy(whole), 2)):
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
        for step in range(3):
            losses.append(0.0)
            optimizer.zero_grad()
            for some, targets in zip(pictures.chunk(parts), labels.chunk(parts), strict=True):
                torch.manual_seed(step)
                loss = model(some, labels=targets).loss / parts
                loss.backward()
                losses[-1] += loss.item()
            optimizer.step()
    assert len({round(x, 4) for x in losses}) == 3
    close(torch.tensor(losses[:3]), torch.tensor(losses[3:]), 1e-9)


# hea.sequence_parallel


def in_shards(cases):
    found = {}
    for case in cases:
        whole = make(*case[:2])
        divided = hea.sequence_parallel(copy.deepcopy(whole), dist.group.WORLD)
        found[case] = compare(whole, divided, case[2], (slice(None), own_tokens()))
        if case[0] == "bert":  # the first token is in the first process
            assert (divided(batch("none")[0][:, own_tokens()]).pooler_output is not None) == (dist.get_rank() == 0)
    return found


def test_models_on_two_processes(tmp_path):
    few = [case for case in CASES if case[2] == "right" and (case[0] == "bert" or case[1] in ("linear", "kdeformer"))]
    check(processes.run(2, tmp_path, in_shards, few))


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 2, 4])
def test_models_on_more_processes(tmp_path, size):
    check(processes.run(size, tmp_path, in_shards, CASES))


def one_mixed_call():
    """Layers of two methods and exact ones, gradient checkpointing, and two calls before one backward."""
    found = {}
    for checkpointing in (False, True):
        model = make("bert", "linear", attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
        hea.convert(model, "linear", layers=[1])
        hea.sequence_parallel(model, dist.group.WORLD).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        (ids, mask), own = batch("right"), own_tokens()
        first = model(ids[:, own], attention_mask=mask[:, own]).last_hidden_state
        second = model(ids[:, own].flip(1), attention_mask=torch.ones_like(mask[:, own])).last_hidden_state
        (first * second.detach() + second * 2).sum().backward()
        found[checkpointing] = [x.grad for x in model.parameters() if x.grad is not None]
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1.0)) for a, b in zip(*found.values(), strict=True))


def traffic_and_refusals():
    group, (ids, mask), own, rank = dist.group.WORLD, batch("right"), own_tokens(), dist.get_rank()
    ids, mask = ids[:, own], mask[:, own]
    model = hea.sequence_parallel(make("llama", "linear"), group)
    with torch.no_grad(), Traffic() as traffic:
        model(ids)
    single = torch.zeros(2, 5, 32).double(), (torch.ones(1, 5, 8).double(),) * 2
    training = hea.sequence_parallel(make("bert", "linear", attention_probs_dropout_prob=0.1), group).train()
    gpt = hea.sequence_parallel(make("gpt2", "linear"), group)
    long = torch.zeros(2, 50 if rank else 40, dtype=torch.int64)
    refusals = {
        "process 0 gives the model labels": lambda: model(ids, labels=ids),
        r"batches of \[1, 2\] sequences": lambda: model(ids[: 1 + rank]),
        "process 1 gives the model a key-value cache or use_cache=True": lambda: model(ids, use_cache=rank == 1),
        "process 0 gives the model an attention_mask that is": lambda: model(ids, attention_mask=mask[:, None, None]),
        "generate with a model in one process": lambda: model.generate(ids, max_new_tokens=2),
        "outside of a call of its model": lambda: model.model.layers[0].self_attn(*single),
        "attention_probs_dropout_prob": lambda: training(ids, attention_mask=mask),
        r"has 90 tokens and .* has 80 positions.*extend_positions\(model, 90\)": lambda: gpt(long),
    }
    messages = {sentence: refused(call) for sentence, call in refusals.items()}
    return dict(traffic.forward), messages, training_draws(group, ids), one_mixed_call()


def training_draws(group, ids):
    """In training all processes draw the same features, whatever their generators are."""
    model = make("bert", "performer", attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    hea.sequence_parallel(model, group).train()
    torch.manual_seed(dist.get_rank())
    shards = []
    handle = model.encoder.layer[0].attention.self.register_forward_pre_hook(
        lambda _, args, kwargs: shards.append(kwargs["sequence_shards"]), with_kwargs=True
    )
    model(ids)
    handle.remove()
    return shards[0].seed


def test_traffic_refusals_and_training(tmp_path):
    results = processes.run(2, tmp_path, traffic_and_refusals)
    for numbers_of_bytes, messages, seed, error in results:
        for sentence, message in messages.items():
            assert message is not None and re.search(sentence, message), (sentence, message)
        assert seed == results[0][2] is not None and error < 1e-5
        # Of each layer the states S (8, 8), Z in 8 columns and a log, of two key heads in two sequences. Of the call,
        # five integers.
        assert numbers_of_bytes == {"all_gather": 2 * 2 * 2 * (8 * (8 + 8) + 1) * 8 + 5 * 8}


@pytest.mark.parametrize(
    ("kind", "method", "group", "sentence"),
    [
        (transformers.BertForSequenceClassification, "linear", mesh(1), "model.base_model"),
        (transformers.ViTModel, "linear", mesh(1), "does not take tokens"),
        (transformers.BertModel, "linear", None, "init_process_group"),
        (transformers.BertModel, "linear", mesh(2), r"such as mesh\['sp'\]"),
        (transformers.BertModel, "sdpa", mesh(1), "convert it first"),
    ],
)
def test_models_that_cannot_be_divided(kind, method, group, sentence):
    model = kind(tiny_config("vit" if kind is transformers.ViTModel else "bert"))
    refuses(sentence, hea.sequence_parallel, hea.convert(model, method), group)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (torch.nn.Conv1d(32, 32, 3, padding=1), r"mixes tokens outside of attention, in mixer \(Conv1d\)"),
        (torch.nn.Conv2d(32, 32, (1, 3)), r"in mixer \(Conv2d\)"),
        (torch.nn.LSTM(32, 32), r"in mixer \(LSTM\)"),
        (torch.nn.GRU(32, 32), r"in mixer \(GRU\)"),
        ("recurrent", "state along the sequence"),
        ("linear_attention", "state along the sequence"),
    ],
    ids=str,
)
def test_models_that_mix_tokens_outside_of_attention(change, sentence):
    model = hea.convert(tiny_model("bert"), "linear")
    if isinstance(change, str):
        model.config.layer_types = [change, "full_attention"]
    else:
        model.mixer = change
    refuses(sentence, hea.sequence_parallel, model, mesh(1))


def test_a_bias_of_relative_positions_is_not_divided():
    kind, config, _ = model_types.case("MPNet")
    model = hea.convert(kind(config), "longformer", window_size=4)
    refuses("a bias of relative positions in encoder", hea.sequence_parallel, model, mesh(1))


def die_in_a_layer(when):
    model = hea.sequence_parallel(make("bert", "kdeformer"), dist.group.WORLD)
    ids, own = batch("right")[0], own_tokens()
    if dist.get_rank() == 1 and when == "forward":
        model.encoder.layer[1].attention.self.register_forward_pre_hook(lambda *_: os._exit(3))
    elif dist.get_rank() == 1:
        model.encoder.layer[0].register_full_backward_pre_hook(lambda *_: os._exit(3))
    model(ids[:, own]).last_hidden_state.sum().backward()


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_process_that_dies_ends_the_others(tmp_path, when):
    start = time.monotonic()
    found = refuses(r"exit codes \[1, 3\]", processes.run, 2, tmp_path, die_in_a_layer, when, error=AssertionError)
    if when == "forward":  # the backward pass is PyTorch's
        assert "all_to_all of a sequence that 2 processes share failed in process 0: another process has ended" in found
    assert time.monotonic() - start < 300  # and not only after the timeout of the test


# Engines of others


def by_engines(folder):
    """The differences from one process: tensor parallelism, with generated tokens, and FSDP2."""
    from torch.distributed.fsdp import fully_shard

    found, rank, load = {}, dist.get_rank(), transformers.LlamaForCausalLM.from_pretrained
    for method in ("kdeformer", "hedgehog", "eva"):
        whole = load(f"{folder}/{method}").double().eval()
        divided = load(f"{folder}/{method}", tp_plan="auto", dtype=torch.float64).eval()
        # Every process has the learned parameters of its own heads.
        found["tp", method] = compare(whole, divided, "none", (), lambda name: "learned_parameters" in name)
        tokens = [x.generate(batch("none")[0][:, :20], max_new_tokens=4, do_sample=False) for x in (whole, divided)]
        found["tp", method] += float((tokens[0] != tokens[1]).sum())
    for method in ("kdeformer", "hedgehog", "performer", "eva", "nearfar"):
        whole = make("llama", method)
        divided = copy.deepcopy(whole)
        for module in (*divided.model.layers, divided):
            fully_shard(module)
        # FSDP takes the mean over the processes.
        found["fsdp", method] = compare(whole, divided, "none", (slice(rank, rank + 1),), lambda name: False, 0.5)
    return found


def test_engines(tmp_path):
    for method in ("kdeformer", "hedgehog", "eva"):
        make("llama", method).save_pretrained(tmp_path / "models" / method)
    check(processes.run(2, tmp_path / "run", by_engines, str(tmp_path / "models")))


# Their parameters have no influence on sequences that are shorter than the window.
WINDOWS = {
    "linear": {"feature_map": "hedgehog", "num_features": 8, "window_size": 8},
    "eva": {"num_landmarks": 8, "window_size": 16, "proposal": "learned"},
}


def with_unequal_lengths():
    """The differences of DDP's and FSDP2's gradients from one process, with a short and a long batch in each step."""
    from torch.distributed.fsdp import fully_shard

    found, short_and_long = {}, [torch.arange(2 * n).view(2, n) % 60 for n in (6, LENGTH)]

    def backward(model, ids):
        model(ids, use_cache=False).logits.square().mean().backward()

    for method, values in WINDOWS.items():
        whole = shake(hea.convert(tiny_model("llama", head=True).double(), method, **values))
        sharded = copy.deepcopy(whole)
        for module in (*sharded.model.layers, sharded):
            fully_shard(module)
        engines = {"ddp": torch.nn.parallel.DistributedDataParallel(copy.deepcopy(whole)), "fsdp": sharded}
        refuses("wrap it then", hea.convert, engines["ddp"], "performer", feature_map="hedgehog")
        for ids in short_and_long:
            backward(whole, ids)
        for engine, model in engines.items():
            for step in range(2):
                model.zero_grad()
                backward(model, short_and_long[(dist.get_rank() + step) % 2])
                errors = []
                for one, other in zip(whole.parameters(), model.parameters(), strict=True):
                    grad = other.grad.full_tensor() if hasattr(other.grad, "full_tensor") else other.grad
                    errors.append(float((2 * grad - one.grad).abs().max() / one.grad.abs().max().clamp(min=1.0)))
                found[engine, method, step] = max(errors)
    return found


def test_processes_with_sequences_of_unequal_lengths(tmp_path):
    check(processes.run(2, tmp_path, with_unequal_lengths))


def in_context_parallelism():
    from torch.distributed.tensor.experimental import context_parallel

    models, (tokens, _) = [make("llama", "linear"), make("bert", "flurka_linear")], batch("none")
    tokens = tokens[:, :60].contiguous()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    with context_parallel(mesh["cp"], buffers=[tokens], buffer_seq_dims=[1]):
        inside = [refused(lambda model=model: model(tokens)) for model in models]
    return inside, [refused(lambda model=model: model(batch("none")[0])) for model in models]


def test_context_parallelism_is_refused(tmp_path):
    for inside, outside in processes.run(2, tmp_path, in_context_parallelism):
        assert outside == [None, None]
        assert all("cp_size" in text and "hf_efficient_attn.sequence_parallel" in text for text in inside)
    big_modeling, model = pytest.importorskip("accelerate.big_modeling"), make("llama", "linear")
    big_modeling._attach_context_parallel_hooks(model)
    refuses("context parallelism", model, batch("none")[0])


@pytest.mark.parametrize(("family", "method"), [("llama", "kdeformer"), ("bert", "flurka_linear")])
def test_an_engine_that_gives_attention_some_heads_is_refused(family, method, monkeypatch):
    """As DeepSpeed's Ulysses does, it puts a function of its own in the place of the method's."""
    attend, model = ALL_ATTENTION_FUNCTIONS[method], make(family, method, num_attention_heads=4)

    def wrapper(module, query, key, value, *args, **kwargs):
        return attend(module, query[:, :2], key[:, :1], value[:, :1], *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, method, wrapper)
    refuses(r"2 of 4 heads, .* not known which .*Ulysses \(sp_size\)", model, batch("none")[0])
