"""`hea.sequence_parallel`: models whose sequences are divided over processes compute what one process computes."""

import copy
import os
import re
import time

import pytest
import torch
import torch.distributed as dist
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTModel,
)

import hf_efficient_attn as hea
import processes
from processes import refused
from recipes.benchmarks.sequence_parallel import Traffic
from test_engines import largest_error, relative

LENGTHS = {1: (61,), 2: (33, 28), 4: (16, 15, 7, 23)}
LENGTH = 61
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}


def bert(**options):
    config = BertConfig(vocab_size=60, max_position_embeddings=80, **SIZES, **options)
    return BertModel(config)


def gpt2(**options):
    return GPT2LMHeadModel(GPT2Config(vocab_size=60, n_positions=80, n_embd=32, n_layer=2, n_head=4, **options))


def llama(**options):
    config = LlamaConfig(vocab_size=60, max_position_embeddings=80, num_key_value_heads=2, **SIZES, **options)
    return LlamaForCausalLM(config)


MODELS = {"bert": bert, "gpt2": gpt2, "llama": llama}
METHODS = {
    "linear": {},
    "performer": {"num_features": 16},
    "longformer": {"window_size": 6},
    "kdeformer": {"block_size": 8, "num_samples": 8},
    "nystromformer": {"num_landmarks": 8},
    "linformer": {"projection_dim": 8},
    "nearfar": {"block_size": 4, "num_samples": 12},
    "flurka_linear": {"projection_dim": 8},
}
CASES = [
    (model, method, padding)
    for model in MODELS
    for method in METHODS
    for padding in ("right", "left")
    if hea.method_info(method).causal or model == "bert"
]


def make(model, method, **options):
    torch.manual_seed(0)
    made = MODELS[model](**options)
    return hea.convert(made.eval().double(), method, **METHODS[method])


def batch(padding):
    generator = torch.Generator().manual_seed(3)
    ids, mask = torch.randint(0, 60, (2, LENGTH), generator=generator), torch.ones(2, LENGTH, dtype=torch.int64)
    if padding == "right":
        mask[0, -20:] = 0
    elif padding == "left":
        mask[1, :9] = 0
    return ids, mask


def own_tokens():
    lengths, rank = LENGTHS[dist.get_world_size()], dist.get_rank()
    return slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))


def of_tokens(model, output):
    return output.last_hidden_state if model == "bert" else output.logits


def compare(model, method, padding, **options):
    """The largest difference of the outputs for valid tokens, and of the gradients of the parameters."""
    whole, (ids, mask) = make(model, method, **options), batch(padding)
    divided = hea.sequence_parallel(copy.deepcopy(whole), dist.group.WORLD)
    own, valid = own_tokens(), mask[:, :, None].bool()
    wanted = of_tokens(model, whole(input_ids=ids, attention_mask=mask)).masked_fill(~valid, 0.0)
    found = divided(input_ids=ids[:, own], attention_mask=mask[:, own])
    assert (getattr(found, "pooler_output", None) is not None) == (model == "bert" and dist.get_rank() == 0)
    found = of_tokens(model, found).masked_fill(~valid[:, own], 0.0)
    grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(4)).double()
    (wanted * grad).sum().backward()
    (found * grad[:, own]).sum().backward()
    return max(relative(found, wanted[:, own]), largest_error(whole, divided))


def compare_all(cases):
    return {case: compare(*case) for case in cases}


def check(results):
    wrong = {
        (rank, case): error for rank, found in enumerate(results) for case, error in found.items() if not error < 1e-6
    }
    assert not wrong, wrong


def test_models_on_two_processes(tmp_path):
    few = [case for case in CASES if case[2] == "right" and (case[0] == "bert" or case[1] in ("linear", "kdeformer"))]
    check(processes.run(2, tmp_path, compare_all, few))


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 2, 4])
def test_models_on_more_processes(tmp_path, size):
    check(processes.run(size, tmp_path, compare_all, CASES))


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
    ids, mask, found = ids[:, own], mask[:, own], {}
    model = hea.sequence_parallel(make("llama", "linear"), group)
    with torch.no_grad(), Traffic() as traffic:
        model(ids)
    found["bytes"] = dict(traffic.forward)
    found["labels"] = refused(lambda: model(ids, labels=ids))
    found["one process"] = refused(lambda: model(ids[: 1 + rank]))
    found["cache"] = refused(lambda: model(ids, use_cache=rank == 1))
    found["mask"] = refused(lambda: model(ids, attention_mask=mask[:, None, None]))
    found["generate"] = refused(lambda: model.generate(ids, max_new_tokens=2))
    single = torch.zeros(2, 5, 32).double(), (torch.ones(1, 5, 8).double(),) * 2
    found["module"] = refused(lambda: model.model.layers[0].self_attn(*single))
    training = hea.sequence_parallel(make("bert", "linear", attention_probs_dropout_prob=0.1), group).train()
    found["dropout"] = refused(lambda: training(ids, attention_mask=mask))
    long = hea.sequence_parallel(make("gpt2", "linear"), group)
    found["long"] = refused(lambda: long(torch.zeros(2, 50 if rank else 40, dtype=torch.int64)))
    found["random"] = training_draws(group, ids)
    found["mixed"] = one_mixed_call()
    return found


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
    sentences = {
        "labels": "process 0 gives the model labels",
        "one process": r"batches of \[1, 2\] sequences",
        "cache": "process 1 gives the model a key-value cache or use_cache=True",
        "mask": "process 0 gives the model an attention_mask that is not",
        "generate": "generate with a model in one process",
        "module": "outside of a call of its model",
        "dropout": "attention_probs_dropout_prob",
        "long": r"has 90 tokens and .* has 80 positions.*extend_positions\(model, 90\)",
    }
    for name, sentence in sentences.items():
        for found in results:
            assert found[name] is not None, name
            assert re.search(sentence, found[name]), found[name]
    assert results[0]["random"] == results[1]["random"] is not None
    for found in results:
        assert found["mixed"] < 1e-5
        # Of each layer the states S (8, 8), Z in 8 columns and a log, of two key heads in two sequences. Of the call,
        # five integers.
        assert found["bytes"] == {"all_gather": 2 * 2 * 2 * (8 * (8 + 8) + 1) * 8 + 5 * 8}


def classifier():
    return BertForSequenceClassification(bert().config)


def vision():
    return ViTModel(ViTConfig(image_size=16, patch_size=4, **SIZES))


@pytest.mark.parametrize(
    ("make_model", "dimensions", "sentence"),
    [
        (classifier, 1, "model.base_model"),
        (vision, 1, "does not take tokens"),
        (bert, 0, "init_process_group"),
        (bert, 2, r"such as mesh\['sp'\]"),
    ],
)
def test_models_that_cannot_be_divided(make_model, dimensions, sentence):
    group = fake_mesh(dimensions) if dimensions else None
    with pytest.raises(hea.UnsupportedAttentionError, match=sentence):
        hea.sequence_parallel(hea.convert(make_model(), "linear"), group)


def test_exact_attention_of_transformers_is_refused():
    with pytest.raises(hea.UnsupportedAttentionError, match="convert it first"):
        hea.sequence_parallel(bert(), fake_mesh(1))


def fake_mesh(dimensions):
    class Mesh:
        ndim = dimensions
        mesh_dim_names = ("dp", "sp")

        def get_group(self):
            return object()

    return Mesh()


def die_in_a_layer(when):
    model = hea.sequence_parallel(make("bert", "kdeformer"), dist.group.WORLD)
    ids, own = batch("right")[0], own_tokens()
    if dist.get_rank() == 1:
        module = model.encoder.layer[1].attention.self if when == "forward" else model.embeddings
        if when == "forward":
            module.register_forward_pre_hook(lambda *_: os._exit(3))
        else:
            module.register_full_backward_hook(lambda *_: os._exit(3))
            model.encoder.layer[0].register_full_backward_pre_hook(lambda *_: os._exit(3))
    model(ids[:, own]).last_hidden_state.sum().backward()


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_process_that_dies_ends_the_others(tmp_path, when):
    start = time.monotonic()
    with pytest.raises(AssertionError) as error:
        processes.run(2, tmp_path, die_in_a_layer, when)
    error.match(r"exit codes \[1, 3\]")
    if when == "forward":  # the backward pass is PyTorch's
        error.match("all_to_all of a sequence that 2 processes share failed in process 0: another process has ended")
    assert time.monotonic() - start < 300  # and not only after the timeout of the test
