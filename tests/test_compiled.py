"""Methods that a graph of `torch.compile` calls as one operator."""

import pytest
import torch
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.ops.accelerator import use_backend
from instances import INSTANCES, Instance, inputs, padding_mask

FORMS = [
    pytest.param(i, c, id=f"{i}{'-causal' if c else ''}")
    for i in INSTANCES
    for c in i.forms
    if ("causal" if c else "bidirectional") in i.info.config_class.runs_in_chunks
]


class Graphs:
    """A backend that runs the graphs as they are and keeps the names of their operators."""

    def __init__(self) -> None:
        self.operators: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, _: list) -> torch.fx.GraphModule:
        self.operators.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    def calls(self) -> int:
        return sum("hf_efficient_attn.method" in name for names in self.operators for name in names)


def attend(config: hea.methods.MethodConfig, tensors: tuple[Tensor, ...], mask: Tensor | None, **options) -> Tensor:
    return hea.attention(config, *tensors, attention_mask=mask, **options)


def compiled(graphs: Graphs):
    torch.compiler.reset()
    return torch.compile(attend, fullgraph=True, backend=graphs)


@pytest.mark.parametrize(("instance", "is_causal"), FORMS)
def test_the_graph_calls_the_eager_form(instance: Instance, is_causal):
    """Bit for bit, for shared keys, a mask and another seed, also for methods whose work depends on the data."""
    graphs = Graphs()
    form, config = compiled(graphs), instance.config()
    tensors = inputs(2, 4, 130, 16, num_kv_heads=2, value_dim=12)
    for mask, seed in ((None, 0), (padding_mask("left", 2, 130), 5)):
        options = {"is_causal": is_causal, "seed": seed, "scale": 0.3}
        assert torch.equal(form(config, tensors, mask, **options), attend(config, tensors, mask, **options))
    assert graphs.calls() == len(graphs.operators) > 0


def test_other_hyperparameters_are_another_graph():
    graphs = Graphs()
    form, tensors = compiled(graphs), inputs(1, 2, 90, 8)
    for window_size in (4, 9):
        config = hea.LongformerConfig(window_size=window_size, compute_dtype="bfloat16")
        assert torch.equal(form(config, tensors, None), attend(config, tensors, None))
    assert len(graphs.operators) == 2


def test_under_autocast_the_products_of_the_method_are_in_its_own_dtype():
    form, config, tensors = compiled(Graphs()), hea.KDEformerConfig(block_size=8, num_samples=16), inputs(1, 2, 90, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, eager = (f(config, tensors, None) for f in (form, attend))
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, eager)


def test_what_needs_a_gradient_or_another_form_is_in_the_graph_itself():
    config, tensors = hea.LongformerConfig(window_size=8), inputs(1, 2, 60, 8)
    graphs = Graphs()
    form = compiled(graphs)
    form(config, [x.requires_grad_() for x in tensors], None).sum().backward()
    assert all(x.grad is not None for x in tensors)
    with torch.no_grad():
        form(config, tensors, None, dropout_p=0.1)
        with use_backend("library"):
            form(config, tensors, None)
        assert graphs.calls() == 0 < len(graphs.operators)
        form(config, tensors, None)
    assert graphs.calls() == 1


def test_an_operator_of_inductor():
    torch.compiler.reset()
    form, config = torch.compile(attend, fullgraph=True), hea.LongformerConfig(window_size=8, global_tokens=2)
    tensors, mask = inputs(2, 2, 70, 8), padding_mask("right", 2, 70)
    assert torch.equal(form(config, tensors, mask), attend(config, tensors, mask))
