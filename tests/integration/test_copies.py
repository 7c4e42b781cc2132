"""Copies of a converted model compute with their own parameters: replicas, deep copies, and functional calls."""

import copy
import threading

import pytest
import torch
from torch import nn

import hf_efficient_attn as hea
from tiny_models import METHODS, SMALL, output, tiny_batch, tiny_model

CASES = [
    *((family, method, {}) for family in ("bert", "vit") for method in METHODS),
    *(("llama", method, {}) for method in METHODS if hea.method_info(method).causal),
    ("bert", "linformer", {"share": "kv"}),
    ("distilbert", "flurka_linear", {}),
]
CHOSEN = {"kdeformer", "linear", "flurka_eva"}


def cases():
    for family, method, more in CASES:
        marks = () if method in CHOSEN or more else pytest.mark.exhaustive
        yield pytest.param(family, method, more, marks=marks, id="-".join([family, method, *more.values()]))


each_case = pytest.mark.parametrize(("family", "method", "more"), list(cases()))


def model_of(family: str, method: str, more: dict):
    model = tiny_model(family, method)
    if more:
        hea.convert(model, method, **{**SMALL[method], **more})
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():  # learned ones need not stay what a conversion starts from
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def replicate(model: nn.Module, number: int) -> list[nn.Module]:
    """What `torch.nn.parallel.replicate` does, on the CPU: parameters of a replica are functions of the originals."""
    modules = list(model.modules())
    copies = [{id(p): p * (1.0 + i) for p in model.parameters()} for i in range(number)]
    made = {module: [module._replicate_for_data_parallel() for _ in range(number)] for module in modules}
    for module in modules:
        for i, replica in enumerate(made[module]):
            replica._former_parameters = {}
            for key, child in module._modules.items():
                if child is None:
                    replica._modules[key] = None
                else:
                    setattr(replica, key, made[child][i])
            for key, parameter in module._parameters.items():
                if parameter is None:
                    replica._parameters[key] = None
                else:
                    setattr(replica, key, copies[i][id(parameter)])
                    replica._former_parameters[key] = copies[i][id(parameter)]
            for key, buffer in module._buffers.items():
                replica._buffers[key] = buffer
    return made[model]


def scaled(model: nn.Module, factor: float) -> nn.Module:
    """A deep copy whose parameters are multiplied by a factor."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


def backward(model: nn.Module, inputs: dict) -> torch.Tensor:
    out = model(**inputs)[0]
    (out * torch.linspace(-1, 1, out.shape[-1])).mean().backward()
    return out.detach()


@each_case
def test_replicas(family, method, more):
    """As `torch.nn.DataParallel` computes: each replica in a thread, with tensors of its own and without parameters."""
    model, inputs = model_of(family, method, more), tiny_batch(family, padding="left")
    expected = [scaled(model, 1.0 + i) for i in range(3)]
    outs = [backward(other, inputs) for other in expected]
    replicas, found, errors = replicate(model, 3), [None] * 3, []

    def run(i: int) -> None:
        try:
            found[i] = backward(replicas[i], inputs)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for one, other in zip(found, outs, strict=True):
        torch.testing.assert_close(one, other)
    others = [dict(other.named_parameters()) for other in expected]
    for name, parameter in model.named_parameters():
        gradients = [(1.0 + i) * other[name].grad for i, other in enumerate(others) if other[name].grad is not None]
        assert (parameter.grad is None) == (not gradients), name
        if gradients:
            torch.testing.assert_close(parameter.grad, sum(gradients), rtol=1e-3, atol=1e-5, msg=name)
    # The original is as before.
    assert all(replica is not model for replica in replicas)
    torch.testing.assert_close(output(model, inputs), outs[0])


@each_case
def test_a_deep_copy(family, method, more):
    model, inputs = model_of(family, method, more), tiny_batch(family, padding="left")
    before = output(model, inputs)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    assert torch.equal(output(other, inputs), before)


@each_case
def test_functional_call(family, method, more):
    model, inputs = model_of(family, method, more), tiny_batch(family, padding="left")
    parameters = {name: p.detach() * 2.0 for name, p in model.named_parameters()}
    expected = output(scaled(model, 2.0), inputs)
    with torch.no_grad():
        assert torch.equal(torch.func.functional_call(model, parameters, (), inputs)[0], expected)
