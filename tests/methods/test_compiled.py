"""Methods that a graph of `torch.compile` calls as one operator."""

import pytest
import torch
from torch import Tensor

import hf_efficient_attn as hea
from instances import forms, inputs, padding_mask
from test_heads import HEADS, KV_HEADS, parameters_of


class Graphs:
    """A backend that runs the graphs as they are and keeps the names of their operators."""

    def __init__(self) -> None:
        self.operators: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, _: list) -> torch.fx.GraphModule:
        self.operators.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    def calls(self) -> int:
        return sum("hf_efficient_attn.attention" in name for names in self.operators for name in names)


def attend(config: hea.methods.MethodConfig, tensors: tuple[Tensor, ...], mask: Tensor | None, **options) -> Tensor:
    return hea.attention(config, *tensors, attention_mask=mask, **options)


def compiled(graphs: Graphs):
    torch.compiler.reset()
    return torch.compile(attend, fullgraph=True, backend=graphs)


IN_CORE = ("auto", "kdeformer", "linear", "flurka_eva")  # one operator calls all methods
FORMS = [
    pytest.param(i, c, id=f"{i}{'-causal' if c else ''}", marks=[] if i.method in IN_CORE else pytest.mark.exhaustive)
    for i, c in forms()
]


@pytest.mark.parametrize(("instance", "is_causal"), FORMS)
def test_the_graph_calls_the_eager_form(instance, is_causal):
    """Bit for bit, with gradients, for shared keys, a mask and a seed, also for methods whose work depends on the data.

    The form of some methods depends on whether a gradient is wanted.
    """
    graphs, config, found = Graphs(), instance.config(), []
    tensors, mask = inputs(2, HEADS, 130, 8, num_kv_heads=KV_HEADS), padding_mask("left", 2, 130)
    learned = parameters_of(config, tensors[2])
    for call in (compiled(graphs), attend):
        leaves = [x.clone().requires_grad_() for x in (*tensors, *learned.values())]
        parameters = dict(zip(learned, leaves[3:], strict=True))
        options = {"is_causal": is_causal, "parameters": parameters}
        out = call(config, leaves[:3], mask, **options, seed=5, scale=0.3)
        grads = torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True)
        with torch.no_grad():
            other = call(config, leaves[:3], mask, **options)
        found.append((out, other, *grads))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    assert graphs.calls() == len(graphs.operators) > 0


@pytest.mark.exhaustive
def test_inductor():
    tensors = [x.requires_grad_() for x in inputs(2, 2, 61, 8, dtype=torch.float64)]
    config, mask = hea.KDEformerConfig(block_size=8, num_samples=16), padding_mask("left", 2, 61)
    outs = [f(config, tensors, mask) for f in (attend, torch.compile(attend, fullgraph=True))]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), tensors) for out in outs))


def test_under_autocast_the_products_of_the_method_are_in_its_own_dtype():
    form, config, tensors = compiled(Graphs()), hea.KDEformerConfig(block_size=8, num_samples=16), inputs(1, 2, 90, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, eager = (f(config, tensors, None) for f in (form, attend))
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, eager)


def test_dropout_in_a_graph_has_the_gradient_of_what_it_drew():
    """With values of 1 and keys of 0 every output counts the weights that were kept, and so does the gradient."""
    form, config = torch.compile(attend, fullgraph=True, backend="aot_eager"), hea.LongformerConfig(window_size=8)
    query, key, _ = (torch.zeros(1, 1, 60, 8) for _ in range(3))
    value = torch.ones(1, 1, 60, 8, requires_grad=True)
    out = form(config, (query, key, value), None, dropout_p=0.5)
    assert 0.5 < out.mean() < 1.5
    assert out.std() > 0.05
    out[..., 0].sum().backward()
    torch.testing.assert_close((value.grad[..., 0]).sum(), out[..., 0].sum())
