"""Calls with some of the heads, in a graph of `torch.compile`, and from threads compute what a plain call computes."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import hf_efficient_attn as hea
import promises
from each import each_first_form, each_form
from hf_efficient_attn.methods import attention_with_state, parameters_of_slice
from hf_efficient_attn.ops import index
from hf_efficient_attn.ops.shards import HeadSlice
from instances import FIRST, HEADS, INSTANCES, KV_HEADS, Instance, forms, inputs, padding_mask, parameters_of


def call(
    instance: Instance,
    is_causal: bool,
    form=hea.attention,
    *,
    heads: slice = slice(0, HEADS),
    length: int = 75,
    padding: str = "right",
    last: int = 0,
    needs_grad: bool = True,
    **options,
) -> tuple[Tensor, ...]:
    """The output, and the gradients of query, key, value and learned parameters if they are needed.

    Four heads share two key heads. `heads` are those of the call, and its queries are all or the `last`.
    """
    config, own = instance.config(), range(HEADS)[heads]
    query, key, value = inputs(2, HEADS, length, 8, num_kv_heads=KV_HEADS, seed=5)
    learned = parameters_of(config, value)
    if len(own) < HEADS:
        options["heads"] = HeadSlice(own[0], HEADS)
        learned = parameters_of_slice(config, learned, options["heads"], len(own))
    keys = slice(own[0] // 2, own[-1] // 2 + 1)
    leaves = (query[:, heads, -last:], key[:, keys], value[:, keys], *learned.values())
    leaves = [x.clone().requires_grad_(needs_grad) for x in leaves]
    options |= {"is_causal": is_causal, "parameters": dict(zip(learned, leaves[3:], strict=True))}
    out = form(config, *leaves[:3], attention_mask=padding_mask(padding, 2, length), **options)
    return (out, *torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True)) if needs_grad else (out,)


def equal(results: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(results, others, strict=True))


# Some of the heads, as in a process that holds them.


@pytest.mark.parametrize("count", [1, 2])
@each_form
def test_heads_of_a_slice_are_those_of_the_whole(instance, is_causal, count):
    whole = call(instance, is_causal, seed=7)
    for first in range(0, HEADS, count):
        heads = slice(first, first + count)
        for part, every in zip(call(instance, is_causal, heads=heads, seed=7)[:2], whole[:2], strict=True):
            torch.testing.assert_close(part, every[:, heads], rtol=1e-4, atol=1e-5)


def test_auto_is_exact_up_to_the_length_for_all_heads():
    config = hea.AutoAttentionConfig(columns=32, max_error=0.0)
    lengths = [config.exact_up_to(x, 64, torch.float32, False, torch.device("cpu")) for x in (2, 8)]
    tensors = [x.float() for x in inputs(1, 8, sum(lengths) // 2, 64)]
    part = hea.attention(config, *(x[:, 2:4] for x in tensors), heads=HeadSlice(2, 8))
    torch.testing.assert_close(part, hea.attention(config, *tensors)[:, 2:4], rtol=1e-4, atol=1e-5)


def test_a_slice_has_an_end():
    with pytest.raises(hea.UnsupportedAttentionError, match="2 heads from head 3 on are not among the 4 heads"):
        hea.attention("kdeformer", *inputs(1, 2, 75, 8), heads=HeadSlice(3, 4))


# Devices. With "meta" as the default device, a factory function without `device=` returns a meta tensor. An operation
# that mixes it with the inputs, which are on the CPU, raises an error.


def on_meta(form):
    def called(*arguments, **options):
        with torch.device("meta"):
            return form(*arguments, **options)

    return called


@pytest.mark.parametrize("form", [hea.attention, hea.naive_attention], ids=["forward", "naive"])
@pytest.mark.parametrize("padding", ["none", "left", "holes"])
@pytest.mark.parametrize(("instance", "is_causal"), [(i, c) for i in INSTANCES for c in i.forms], ids=str)
def test_created_tensors_are_on_the_device_of_the_inputs(instance, is_causal, padding, form):
    for length in (7, 61):
        (out,) = call(instance, is_causal, on_meta(form), length=length, padding=padding, needs_grad=False)
        assert out.device.type == "cpu"


@pytest.mark.parametrize("instance", [i for i in INSTANCES if i.info.causal], ids=str)
def test_tensors_created_in_decoding_are_on_the_device_of_the_inputs(instance, monkeypatch):
    (out,) = call(instance, True, on_meta(hea.attention), length=61, padding="left", last=3, needs_grad=False)
    assert out.device.type == "cpu"
    if instance.info.recurrent:
        monkeypatch.setattr(promises, "attention_with_state", on_meta(attention_with_state))
        promises.check_state(instance, [40, 60], "left", q_len=61)


# Graphs, which call a method as one operator.


class Graphs:
    """A backend that runs the graphs as they are and counts their calls of operators, and those of a method."""

    def __init__(self) -> None:
        self.count = self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list) -> torch.fx.GraphModule:
        self.count += 1
        self.calls += sum("hf_efficient_attn.attention" in str(node.target) for node in graph.graph.nodes)
        return graph


def compiled(backend):
    torch.compiler.reset()
    return torch.compile(hea.attention, fullgraph=True, backend=backend)


IN_CORE = ("auto", "kdeformer", "linear", "flurka_eva")  # one operator calls all methods


@pytest.mark.parametrize(
    ("instance", "is_causal"),
    [pytest.param(i, c, marks=[pytest.mark.exhaustive] * (i.method not in IN_CORE)) for i, c in forms()],
    ids=str,
)
def test_the_graph_calls_the_eager_form(instance, is_causal):
    """Bit for bit, with gradients, for shared keys, a mask and a seed, also for methods whose work depends on the data.

    The form of some methods depends on whether a gradient is wanted.
    """
    graphs, found = Graphs(), []
    for form in (compiled(graphs), hea.attention):
        results = call(instance, is_causal, form, padding="left", seed=5, scale=0.3)
        with torch.no_grad():
            found.append((*results, *call(instance, is_causal, form, padding="left", needs_grad=False)))
    assert equal(*found)
    assert graphs.calls == graphs.count > 0


@pytest.mark.parametrize("method", ["kdeformer", "linear"])
def test_numbers_of_heads_reach_operators_of_a_graph(method):
    forms = (hea.attention, compiled("aot_eager"))
    assert equal(*(call(FIRST[method], False, form, heads=slice(2, 4)) for form in forms))


def test_under_autocast_the_products_of_the_method_are_in_its_own_dtype():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, eager = (call(FIRST["kdeformer"], False, form) for form in (compiled(Graphs()), hea.attention))
    assert ours[0].dtype == torch.bfloat16
    assert equal(ours, eager)


def test_dropout_in_a_graph_has_the_gradient_of_what_it_drew():
    """With values of 1 and keys of 0 every output counts the weights that were kept, and so does the gradient."""
    query, key, _ = (torch.zeros(1, 1, 60, 8) for _ in range(3))
    value = torch.ones(1, 1, 60, 8, requires_grad=True)
    out = compiled("aot_eager")(hea.LongformerConfig(window_size=8), query, key, value, dropout_p=0.5)
    assert 0.5 < out.mean() < 1.5
    assert out.std() > 0.05
    out[..., 0].sum().backward()
    torch.testing.assert_close((value.grad[..., 0]).sum(), out[..., 0].sum())


# Threads.

THREADS = 4


def calls_of(instance, is_causal):
    """Calls with all heads and with some of them, with and without gradients, of several seeds."""
    chosen = ({"seed": 7}, {"seed": torch.tensor(8), "needs_grad": False}, {"seed": 7, "heads": slice(2, 4)})
    return [functools.partial(call, instance, is_causal, **options) for options in chosen]


@each_first_form
def test_calls_of_several_threads(instance, is_causal):
    """Each call in each of four threads that begin at once."""
    calls = calls_of(instance, is_causal)
    expected = [call() for call in calls]
    index._results.clear()  # so that threads make them at the same time
    barrier = threading.Barrier(THREADS)

    def run(thread):
        barrier.wait()
        order = [(thread + i) % len(calls) for i in range(len(calls))]
        return [(i, calls[i]()) for i in order]

    with ThreadPoolExecutor(THREADS) as pool:
        results = [result for results in pool.map(run, range(THREADS)) for result in results]
    results += enumerate(call() for call in calls)  # no thread leaves anything behind
    assert all(equal(outputs, expected[i]) for i, outputs in results)


@each_first_form
def test_another_thread_compiles(instance, is_causal, monkeypatch):
    """`torch.compiler.is_compiling` and `is_exporting` hold for the whole process while a thread compiles."""
    calls = calls_of(instance, is_causal)
    expected = [call() for call in calls]
    for name in ("_is_compiling_flag", "_is_exporting_flag"):
        monkeypatch.setattr(torch.compiler, name, True)
    assert torch.compiler.is_compiling()
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    assert all(equal(call(), outputs) for call, outputs in zip(calls, expected, strict=True))
