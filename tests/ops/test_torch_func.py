"""Transforms of `torch.func`, gradients of gradients, and traces: right, or refused in a sentence."""

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import hf_efficient_attn as hea
from each import close, each_first_form, each_form, refuses
from hf_efficient_attn.ops import index
from hf_efficient_attn.ops.draws import Draws
from instances import inputs, padding_mask
from tiny_models import METHODS, tiny_batch, tiny_model

LENGTH = 90


def tensors_of(num_kv_heads=2, batch=3, length=LENGTH):
    return inputs(batch, 2, length, 8, num_kv_heads=num_kv_heads, dtype=torch.float64)


def gradients(function, tensors):
    leaves = [x.clone().requires_grad_() for x in tensors]
    return torch.autograd.grad(function(*leaves), leaves)


@each_form
def test_grad_vjp_and_vmap(instance, is_causal):
    """`grad` and `vjp` give what `backward` gives, and `vmap` of calls and of their gradients what a loop gives."""
    tensors = [x.unsqueeze(1) for x in tensors_of()]
    key_mask = padding_mask("right", 3, LENGTH).unsqueeze(1)

    def call(query, key, value, mask):
        return instance(query, key, value, mask, is_causal=is_causal)

    def loss(*arguments):
        return call(*arguments).square().sum()

    whole = tensors_of(num_kv_heads=1)
    own = padding_mask("right", 3, LENGTH)
    expected = gradients(lambda *x: loss(*x, own), whole)
    value, pull_back = vjp(lambda *x: loss(*x, own), *whole)
    close(grad(lambda *x: loss(*x, own), argnums=(0, 1, 2))(*whole), expected)
    close([value, *pull_back(torch.ones_like(value))], [loss(*whole, own), *expected])
    out = call(*(x.requires_grad_() for x in whole), own)
    batched = torch.autograd.grad(out, whole, 2 * out.detach()[None], is_grads_batched=True)
    close(batched, [x[None] for x in expected])
    rows = list(zip(*tensors, key_mask, strict=True))
    close([vmap(call)(*tensors, key_mask)], [torch.stack([call(*row) for row in rows])])
    expected = [gradients(lambda *x, m=row[3]: loss(*x, m), row[:3]) for row in rows]
    expected = [torch.stack(x) for x in zip(*expected, strict=True)]
    close(vmap(grad(loss, argnums=(0, 1, 2)))(*tensors, key_mask), expected)
    # One query for all keys, which lie along another dimension.
    shared = vmap(call, in_dims=(None, 2, 1, None), out_dims=1)(
        tensors[0][0], tensors[1].movedim(0, 2), tensors[2].movedim(0, 1), None
    )
    close([shared], [torch.stack([call(tensors[0][0], row[1], row[2], None) for row in rows], 1)])


@each_first_form
def test_what_is_refused(instance, is_causal):
    """Forward mode and gradients of gradients are refused, and a call after that gives what a call before it gave."""
    tensors, method = tensors_of(batch=1), instance.method

    def loss(*tensors):
        return instance(*tensors, is_causal=is_causal).sum()

    def twice(*tensors):
        leaves = [x.requires_grad_() for x in tensors]
        return torch.autograd.grad(loss(*leaves), leaves, create_graph=True)

    before = instance(*tensors, is_causal=is_causal)
    forward_mode, second = "forward-mode derivatives .* use torch.func", "the gradient of a gradient .*restore_sdpa"
    for attempt, message in (
        (lambda: jvp(loss, tensors, tensors), forward_mode),
        (lambda: jacfwd(loss)(*tensors), forward_mode),
        (lambda: twice(*(x.clone() for x in tensors)), second),
        (lambda: grad(lambda *x: grad(loss)(*x).sum())(*tensors), second),
        (lambda: jacrev(jacrev(loss))(*(x[..., :2] for x in tensors)), second),
        (lambda: hessian(loss)(*tensors), ""),
    ):
        refuses(f"{method}: {message}", attempt)
    assert torch.equal(instance(*tensors, is_causal=is_causal), before)


def test_dropout():
    """The gradient uses the weights that the forward pass kept."""
    query, key, value = tensors_of()

    def call(value):
        return hea.attention("kdeformer", query, key, value, dropout_p=0.4)

    out, pull_back = vjp(call, value)
    # The output is linear in the values, so that it follows from its gradients.
    torch.testing.assert_close(out.sum(), (pull_back(torch.ones_like(out))[0] * value).sum())
    assert not torch.equal(call(value), out)
    refuses("vmap of attention with dropout is not computed", vmap(call, randomness="different"), value[:, None])


def test_models():
    """Gradients of a model by its parameters, of a batch and of each of its sequences."""
    model, batch = tiny_model("bert", "kdeformer").eval(), tiny_batch("bert", padding="left")
    parameters = {name: x.detach() for name, x in model.named_parameters()}

    def loss(parameters, batch):
        return functional_call(model, parameters, (), batch).last_hidden_state.square().sum()

    each = vmap(grad(loss), in_dims=(None, 0))(parameters, {name: x[:, None] for name, x in batch.items()})
    whole = grad(loss)(parameters, batch)
    found = torch.autograd.grad(loss(dict(model.named_parameters()), batch), model.parameters(), allow_unused=True)
    for name, expected in zip(parameters, found, strict=True):
        if expected is not None:
            close((whole[name], each[name].sum(0)), (expected, expected), 2e-3)


def test_nothing_is_kept_that_a_transform_has_wrapped():
    def draws(x):
        return x * Draws(987_654, x.device).normal((3,), 0) + index.integers(91, x.device)[:3]

    x = torch.ones(3, dtype=torch.float64)
    torch.testing.assert_close(grad(lambda x: draws(x).sum())(x), draws(x) - torch.arange(3))
    assert all(index._has_memory(kept) for kept in index._results.values())


@pytest.mark.parametrize("method", METHODS)
def test_traces_are_refused(method):
    model = tiny_model("bert", method).eval()
    model.config.return_dict = False
    calls = ((lambda *x: hea.attention(method, *x), tensors_of(batch=1)), (model, (tiny_batch("bert")["input_ids"],)))
    message = f"{method}: torch.jit.trace .* torch.compile or torch.export, or torch.onnx.export"
    for call, arguments in calls:
        refuses(message, torch.jit.trace, call, arguments)
