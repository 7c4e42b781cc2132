"""Calls from several threads give, bit for bit, what one thread gives."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

import hf_efficient_attn as hea
from each import each_first_form
from hf_efficient_attn.methods import parameters_of_slice
from hf_efficient_attn.ops import tokens as tokens_ops
from hf_efficient_attn.ops.shards import HeadSlice
from instances import inputs, padding_mask
from test_heads import HEADS, KV_HEADS, parameters_of

THREADS, ROUNDS = 4, 2


def check(calls):
    """Run each call several times in each of four threads that begin at once."""
    expected, barrier = [call() for call in calls], threading.Barrier(THREADS)

    def run(thread):
        barrier.wait()
        order = [(thread + i) % len(calls) for i in range(ROUNDS * len(calls))]
        return [(i, calls[i]()) for i in order]

    with ThreadPoolExecutor(THREADS) as pool:
        results = [result for results in pool.map(run, range(THREADS)) for result in results]
    for i, outputs in [*results, *enumerate(call() for call in calls)]:  # no thread leaves anything behind
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected[i], strict=True)), f"call {i} differs"


def calls_of(instance, is_causal, function):
    """Calls with all heads and with some of them, with and without gradients, of several seeds."""
    config = instance.config()
    tensors = inputs(2, HEADS, 75, 8, num_kv_heads=KV_HEADS, seed=5)
    parameters = parameters_of(config, tensors[2])
    options = {"attention_mask": padding_mask("right", 2, 75), "is_causal": is_causal}

    def call(heads, seed, needs_grad):
        count = HEADS if heads is None else 2
        first = 0 if heads is None else heads.first
        own = parameters if heads is None else parameters_of_slice(config, parameters, heads, count)
        query = tensors[0][:, first : first + count]
        key, value = (x[:, first // 2 : (first + count) // 2] for x in tensors[1:])
        leaves = [x.clone().requires_grad_(needs_grad) for x in (query, key, value)]
        out = function(config, *leaves, **options, seed=seed, parameters=own, heads=heads)
        return (out, *torch.autograd.grad(out.square().sum(), leaves)) if needs_grad else (out,)

    chosen = ((None, 7, True), (None, torch.tensor(8), False), (HeadSlice(2, HEADS), 7, False))
    return [functools.partial(call, *arguments) for arguments in chosen]


@each_first_form
def test_calls(instance, is_causal):
    tokens_ops._results.clear()  # so that threads make them at the same time
    check(calls_of(instance, is_causal, hea.attention))


@each_first_form
def test_another_thread_compiles(instance, is_causal, monkeypatch):
    """`torch.compiler.is_compiling` and `is_exporting` hold for the whole process while a thread compiles."""
    calls = calls_of(instance, is_causal, hea.attention)
    expected = [call() for call in calls]
    for name in ("_is_compiling_flag", "_is_exporting_flag"):
        monkeypatch.setattr(torch.compiler, name, True)
    assert torch.compiler.is_compiling()
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    for call, outputs in zip(calls, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(call(), outputs, strict=True))
