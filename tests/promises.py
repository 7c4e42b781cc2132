"""The checks of the promises that every method keeps.

A check is a function of an instance that raises `AssertionError` if the promise is broken. The message is a sentence,
also without pytest: the method, the case, the promise (the first sentence of the check's docstring), what is wrong and
by how much. `test_promises.py` runs each check on every instance and on random hyperparameters, with arguments that the
function above it draws. `**shape` are arguments of `inputs`.
"""

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError
from torch.utils._python_dispatch import TorchDispatchMode

import hf_efficient_attn as hea
from attack_cases import PADDINGS, Draw, Promise, explained
from hf_efficient_attn.analysis import exact_output
from hf_efficient_attn.methods import attention_with_state
from hf_efficient_attn.ops.exact import biased_exact
from hf_efficient_attn.ops.sampled_keys import bidirectional, causal
from instances import Instance, inputs, padding_mask, relative_error


def assert_close(ours: Tensor, other: Tensor, tolerance: float, failure: str = "two results differ") -> None:
    """Equal up to `tolerance` times the largest number. `failure` says what it means if they are not."""
    largest = other.abs().max().item() if other.numel() else 0.0

    def sentence(found: str) -> str:
        return f"{failure}. " + " ".join(found.removeprefix("Tensor-likes are not close!").split())

    torch.testing.assert_close(ours, other, rtol=tolerance, atol=tolerance * max(1.0, largest), msg=sentence)


def assert_same(ours: Tensor, other: Tensor, failure: str) -> None:
    """Equal bit for bit."""
    assert ours.shape == other.shape, f"{failure}: it has shape {tuple(ours.shape)}, not {tuple(other.shape)}"
    differs = ours != other  # NaN differs from NaN
    index = tuple(differs.nonzero()[0].tolist()) if differs.any() else ()
    assert not differs.any(), (
        f"{failure}: {differs.sum()} of {differs.numel()} numbers differ, by up to "
        f"{(ours.double() - other.double())[differs].abs().max():.3g}; the first at {index} is {ours[index]:.6g} and "
        f"not {other[index]:.6g}"
    )


def assert_finite(tensors: Iterable[Tensor], name: str) -> None:
    for x in tensors:
        assert x.isfinite().all(), f"{name} has {(~x.isfinite()).sum()} of {x.numel()} numbers that are NaN or infinite"


def outputs_that_count(key_mask: Tensor | None, out: Tensor) -> Tensor:
    """bool (B, H, Nq), True for the outputs at valid queries. In self-attention the key mask masks queries as well."""
    if key_mask is None or key_mask.shape[1] != out.shape[2]:
        return torch.ones(out.shape[:3], dtype=torch.bool)
    return key_mask[:, None].expand(out.shape[:3])


def drawn(padding: str, **shape: Any) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """Query, key and value, and the key mask."""
    tensors = inputs(**{"dtype": torch.float64, **shape})
    return tensors, padding_mask(padding, tensors[1].shape[0], tensors[1].shape[2])


def _is_causal(instance: Instance) -> bool:
    return instance.info.causal


# 1. Shapes, and exactness within the budget.


@Promise(lambda d: d.shape(padding=d.padding(), dtype=d.dtype(), content=d.any_content()))
def check_shapes(instance: Instance, is_causal: bool, padding: str = "none", **shape: Any) -> None:
    """The output has the right shape and dtype and is finite, and it is an average of values."""
    (query, key, value), key_mask = drawn(padding, **{"dtype": torch.float32, **shape})
    out = instance(query, key, value, key_mask, is_causal=is_causal)
    expected = (*query.shape[:3], value.shape[3])
    assert out.shape == expected, f"the output has shape {tuple(out.shape)}, not {expected}"
    assert out.dtype == value.dtype, f"the output has {out.dtype}, but the values have {value.dtype}"
    assert_finite([out], "the output")
    if instance.averages:
        # The tables of the projections are float32 in any case.
        rounding = 1.0 + 20.0 * max(torch.finfo(dtype).eps for dtype in (value.dtype, torch.float32))
        largest = (out.abs().max().item(), value.abs().max().item())
        assert largest[0] <= largest[1] * rounding + 1e-6, f"an output exceeds all values: {largest[0]} > {largest[1]}"


def exact_of(instance: Instance, tensors: Sequence[Tensor], key_mask: Tensor | None, is_causal: bool) -> Tensor:
    """Exact attention with the bias or the sinks of an instance."""
    more = instance.adapt(*tensors, key_mask)[1]
    if not more.keys() & {"distance_bias", "sinks"}:
        return exact_output(*tensors, attention_mask=key_mask, is_causal=is_causal)
    query, key, value = (x.repeat_interleave(tensors[0].shape[1] // x.shape[1], 1) for x in tensors)
    key, value = (x if key_mask is None else x.masked_fill(~key_mask[:, None, :, None], 0.0) for x in (key, value))
    given = {"is_causal": is_causal, "scale": query.shape[3] ** -0.5}
    if "sinks" in more:
        return exact_with_sinks(query, key, value, more["sinks"], key_mask, **given)
    return biased_exact(query, key, value, more["distance_bias"], key_mask, **given)


def exact_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, key_mask: Tensor | None, *, is_causal: bool, scale: float
) -> Tensor:
    """Exact attention to one more key, the first one, whose score is the sink of the head, and whose value is 0."""
    first = torch.cat(
        (torch.zeros_like(key[:, :, :1]), (sinks / scale).view(1, -1, 1, 1).expand(len(key), -1, 1, 1)), 3
    )
    query, key = torch.cat((query, torch.ones_like(query[..., :1])), 3), torch.nn.functional.pad(key, (0, 1))
    key, value = torch.cat((first, key), 2), torch.nn.functional.pad(value, (0, 0, 1, 0))
    mask = None if key_mask is None else torch.nn.functional.pad(key_mask, (1, 0), value=True)
    return exact_output(query, key, value, attention_mask=mask, is_causal=is_causal, scale=scale)


def _within_budget(d: Draw) -> dict[str, Any]:
    length = d.choice(1, d.instance.budget, d.between(1, d.instance.budget))
    return d.shape(length, padding=d.padding(), content=d.any_content())


@Promise(_within_budget, applies=lambda i: i.budget > 0)
def check_exact(instance: Instance, is_causal: bool, padding: str = "none", **shape: Any) -> None:
    """The output is that of `scaled_dot_product_attention` with a dense mask."""
    tensors, key_mask = drawn(padding, **shape)
    out = instance(*tensors, key_mask, is_causal=is_causal)
    exact = exact_of(instance, tensors, key_mask, is_causal)
    if instance.skips_masked_queries and key_mask is not None and out.shape[2] == key_mask.shape[1]:
        exact = exact.masked_fill(~key_mask[:, None, :, None], 0.0)
    assert_close(out, exact, 1e-9, "within its budget the output is not that of exact attention")


@Promise(lambda d: d.shape(padding=d.padding()))
def check_arguments(instance: Instance, is_causal: bool, padding: str = "none", **shape: Any) -> None:
    """Grouped queries use the keys of their group; strides have no influence; inputs are not modified."""
    tensors, key_mask = drawn(padding, **shape)
    given = [x.clone() for x in tensors]
    out = instance(*given, key_mask, is_causal=is_causal)
    for name, x, y in zip(("query", "key", "value"), given, tensors, strict=True):
        assert_same(x, y, f"the call has written to its {name}")
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    groups = tensors[0].shape[1] // tensors[1].shape[1]
    views[1:] = [x.repeat_interleave(groups, 1) for x in views[1:]]
    out_of_views = instance(*views, key_mask, is_causal=is_causal)
    assert_close(out_of_views, out, 1e-8, "keys that heads share, or the strides of the inputs, change the output")


# 2. Padding.


def _masked(d: Draw) -> dict[str, Any]:
    dtype = d.choice(torch.float32, torch.float64, torch.bfloat16)
    return d.shape(padding=d.choice(*PADDINGS), dtype=dtype, content=d.any_content())


@Promise(_masked, share=2.0)
def check_masked_keys(instance: Instance, is_causal: bool, padding: str = "holes", **shape: Any) -> None:
    """The outputs at valid queries are the same bit for bit, whatever the masked keys and values contain."""
    tensors, key_mask = drawn(padding, **{"dtype": torch.float32, **shape})
    clean = instance(*tensors, key_mask, is_causal=is_causal)
    valid = outputs_that_count(key_mask, clean)
    for garbage in (torch.nan, torch.inf, -torch.inf, 1e30):
        changed = [x.masked_fill(~key_mask[:, None, :, None], garbage) for x in tensors[1:]]
        # In self-attention the padding has queries as well, and only the outputs of those may change.
        out = instance(tensors[0].masked_fill(~valid.unsqueeze(3), garbage), *changed, key_mask, is_causal=is_causal)
        assert_same(out[valid], clean[valid], f"{garbage} in masked keys changes the output")


@Promise(lambda d: d.shape(batch=d.choice(1, 2), dtype=d.choice(torch.float32, torch.bfloat16)))
def check_masked_gradients(instance: Instance, is_causal: bool, **shape: Any) -> None:
    """NaN in masked keys and values reaches no gradient, and their own gradient is 0."""
    (query, key, value), key_mask = drawn("holes", **{"batch": 2, "q_len": 70, "dtype": torch.float32, **shape})
    key_mask[0, :3] = False
    leaves = [query, *(x.masked_fill(~key_mask[:, None, :, None], torch.nan) for x in (key, value))]
    leaves = [x.requires_grad_() for x in leaves]
    out = instance(*leaves, key_mask, is_causal=is_causal)
    loss = out[outputs_that_count(key_mask, out)].square().sum()
    # Where nothing is attended to, there may be no graph, which means a gradient of 0.
    grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
    assert_finite(grads, "with NaN in masked keys, a gradient")
    masked = [grad.masked_fill(key_mask[:, None, :, None], 0.0) for grad in grads[1:]]
    for name, grad in zip(("key", "value"), masked, strict=True):
        assert_same(grad, torch.zeros_like(grad), f"a masked {name} has a gradient other than 0")


@Promise(lambda d: {"is_causal": d.is_causal, "length": d.length(2), **d.heads(content="normal", dtype=d.dtype())})
def check_empty_queries(instance: Instance, is_causal: bool, length: int = 90, **shape: Any) -> None:
    """If all keys of a query are masked or in the future, its output is 0 and all gradients are finite."""
    leaves = [x.requires_grad_() for x in inputs(**{"batch": 2, "q_len": length, **shape})]
    key_mask = torch.zeros(2, length, dtype=torch.bool)
    key_mask[1, length // 2 :] = True
    out = instance(*leaves, key_mask, is_causal=is_causal)
    empty = torch.zeros_like(out)
    assert_same(out[0], empty[0], "the output of a sequence of padding only is not 0")
    if is_causal:
        before = slice(length // 2)
        assert_same(out[1, :, before], empty[1, :, before], "the output of a query whose keys are all masked is not 0")
    assert_finite([out], "with a sequence of padding only, the output")
    assert out[1, :, length // 2 :].abs().amax(-1).min() > 0, "the output of a query that has keys is 0"
    grads = torch.autograd.grad(out.sum(), leaves, materialize_grads=True)
    assert_finite(grads, "with a sequence of padding only, a gradient")


def _padded(d: Draw) -> dict[str, Any]:
    kinds = ("left", "right") if d.instance.reads_positions else ("left", "right", "holes", "empty", "one")
    length = d.length(1, d.choice(70, 150))
    return {"is_causal": d.is_causal, "length": length, **d.heads(batch=d.choice(1, 2), padding=d.choice(*kinds))}


# Sampling by values leaves out some of more than 383.
@Promise(_padded, share=2.0, at=[{"length": 801, "padding": side, "seed": 1} for side in ("left", "right")])
def check_padding(
    instance: Instance, is_causal: bool, length: int, padding: str = "left", seed: int = 0, **shape: Any
) -> None:
    """The output is that without the masked tokens: they count in no mean, rank or denominator."""
    tensors = inputs(**{"batch": 2, "dtype": torch.float64, **shape}, q_len=length, seed=seed)
    key_mask = padding_mask(padding, len(tensors[0]), length, seed)
    out = instance(*tensors, key_mask, is_causal=is_causal)
    for b, valid in enumerate(key_mask):
        if valid.any():
            alone = instance(*(x[b : b + 1, :, valid] for x in tensors), is_causal=is_causal)
            assert_close(out[b : b + 1, :, valid], alone, 1e-8, "padding changes the output of the other tokens")


# 3. The future. The cuts are at the block boundaries of the instances (8, 16, 40), at those of blocks and chunks in the
# primitives (128, 256), and next to them.

CUTS = (7, 8, 16, 39, 40, 127, 128, 129, 255, 256, 257)
# How large later tokens are. Some products of their squares leave the range of float32.
LATER = (40.0, 1e8)


def _any_tokens(d: Draw) -> dict[str, Any]:
    dtype = d.choice(torch.float32, torch.bfloat16)
    given = d.heads(padding=d.padding(), content=d.any_content(), dtype=dtype)
    return {**d.length_and_cut(), **given, "later": d.choice(*LATER)}


@Promise(
    _any_tokens,
    share=2.0,
    applies=_is_causal,
    at=[{"length": 301, "cut": cut, "seed": cut, "later": later} for cut in CUTS for later in LATER],
)
def check_future(
    instance: Instance, length: int, cut: int, later: float, padding: str = "none", seed: int = 0, **shape: Any
) -> None:
    """If all tokens from the cut on and their mask are replaced, the outputs before it are the same bit for bit."""
    # The fused kernel is used if value_dim equals head_dim, and the package's own kernel otherwise.
    shape = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 6, "value_dim": 6 - seed % 2, **shape}
    shape |= {"batch": 2, "q_len": length}
    original, other = inputs(**shape, seed=seed), inputs(**{**shape, "spread": later}, seed=seed + 1)
    key_mask, other_mask = (padding_mask(padding, 2, length, seed + i) for i in (0, 1))
    changed = [torch.cat((a[:, :, :cut], b[:, :, cut:]), 2) for a, b in zip(original, other, strict=True)]
    changed_mask = None if key_mask is None else torch.cat((key_mask[:, :cut], other_mask[:, cut:]), 1)
    out = instance(*original, key_mask, is_causal=True)
    changed_out = instance(*changed, changed_mask, is_causal=True)
    assert_same(changed_out[:, :, :cut], out[:, :, :cut], "later tokens change the output of earlier ones")


@Promise(
    lambda d: {**d.length_and_cut(), **d.heads()},
    applies=lambda i: _is_causal(i) and not i.switches,
    at=[{"length": 301, "cut": cut} for cut in (1, 128, 257)],
)
def check_length(instance: Instance, length: int, cut: int, **shape: Any) -> None:
    """An output does not depend on the number of later tokens."""
    whole = inputs(**{"dtype": torch.float64, **shape}, q_len=length)
    out = instance(*(x[:, :, :cut] for x in whole), is_causal=True)
    whole_out = instance(*whole, is_causal=True)[:, :, :cut]
    assert_close(out, whole_out, 1e-9, "the number of later tokens changes the output of earlier ones")


def _last_queries(d: Draw) -> dict[str, Any]:
    length = d.length(2)
    # More than 128 new queries are not decoded, but computed like a whole sequence.
    most = min(length - 1, 128) if d.instance.exact_steps else length - 1
    last = min(d.choice(1, 1, 2, d.length()), most)
    return {"last": last, **d.heads(padding=d.padding(), batch=d.choice(1, 2), q_len=length)}


@Promise(_last_queries, applies=_is_causal)
def check_last_queries(instance: Instance, last: int, padding: str = "none", seed: int = 0, **shape: Any) -> None:
    """With a cache the output is the end of the whole sequence, or exact attention if the method decodes exactly."""
    query, key, value = inputs(**{"batch": 2, "q_len": 120, "dtype": torch.float64, **shape}, seed=seed)
    key_mask = padding_mask(padding, key.shape[0], key.shape[2], seed)
    if instance.exact_steps:
        expected = exact_of(instance, (query, key, value), key_mask, True)
    else:
        expected = instance(query, key, value, key_mask, is_causal=True)
    ours = instance(query[:, :, -last:], key, value, key_mask, is_causal=True)
    assert_close(ours, expected[:, :, -last:], 1e-8, "with a cache the output of the last queries is another one")


def _cuts(d: Draw) -> dict[str, Any]:
    length = d.length()
    every = length < 30 and d.choice(False, False, True)
    cuts = range(length) if every else sorted(d.draw(st.sets(st.integers(0, length), max_size=20)))
    return {"cuts": list(cuts), **d.heads(padding=d.padding(), q_len=length)}


@Promise(_cuts, share=2.0, applies=lambda i: i.info.recurrent)
def check_state(instance: Instance, cuts: list[int], padding: str = "none", **shape: Any) -> None:
    """Causal attention of one chunk of tokens after the other, each from the state before it, is the causal form."""
    (query, key, value), key_mask = drawn(padding, **{"batch": 2, **shape})
    state, outs = None, []
    for start, end in itertools.pairwise(sorted({0, query.shape[2], *cuts})):
        chunk_mask = None if key_mask is None else key_mask[:, start:end]
        tokens = (x[:, :, start:end] for x in (query, key, value))
        out, state = attention_with_state(instance.config(), state, *tokens, attention_mask=chunk_mask)
        outs.append(out)
    whole = instance(query, key, value, key_mask, is_causal=True)
    assert_close(torch.cat(outs, 2), whole, 1e-9, "in chunks, from state to state, the output is another one")


# 4. The batch.


@Promise(lambda d: d.shape(padding=d.padding(), batch=d.choice(2, 3, 4)))
def check_batch(instance: Instance, is_causal: bool, padding: str = "none", **shape: Any) -> None:
    """The output of each sequence of a batch is that of the sequence alone."""
    tensors, key_mask = drawn(padding, **{"batch": 3, **shape})
    out = instance(*tensors, key_mask, is_causal=is_causal)
    for b in range(len(out)):
        own_mask = None if key_mask is None else key_mask[b : b + 1]
        alone = instance(*(x[b : b + 1] for x in tensors), own_mask, is_causal=is_causal)
        assert_close(out[b : b + 1], alone, 1e-8, "a sequence has another output alone than in a batch")


# 5. Seeds.


@Promise(lambda d: d.shape(dtype=d.dtype(), content=d.any_content()))
def check_seeds(instance: Instance, is_causal: bool, **shape: Any) -> None:
    """The seed alone determines the output, and the global generator is not used."""
    tensors = inputs(**{"q_len": 130, **shape})
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    first, again, other = (instance(*tensors, is_causal=is_causal, seed=s) for s in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator was used"
    assert_same(again, first, "the same seed gave another output")
    random = instance.random if instance.draws_causally or not is_causal else False
    effect = "another seed gave " + ("the same" if random else "another") + " output"
    assert random is None or torch.equal(first, other) != random, effect
    if instance.call_seed:
        seeds = [dataclasses.replace(instance, hyperparameters=instance.hyperparameters | {"seed": s}) for s in (3, 0)]
        configured, called = seeds[0](*tensors, is_causal=is_causal), seeds[1](*tensors, is_causal=is_causal, seed=3)
        assert_same(configured, called, "the config's seed is not the same as the call's")
    # With seed=None, for training, the state of the global generator determines the output.
    drawn = []
    for start in (0, 0, 1):
        torch.manual_seed(start)
        drawn.append(instance(*tensors, is_causal=is_causal, seed=None))
    used = not torch.equal(torch.random.get_rng_state(), torch.manual_seed(1).get_state())
    assert_same(drawn[1], drawn[0], "with seed=None the same state of the global generator gave another output")
    if random is not None:
        assert torch.equal(drawn[0], drawn[2]) != random, f"with seed=None {effect}"
        assert used or not random, "with seed=None nothing was drawn from the global generator"


# 6. Finite outputs.


def _large_logits(d: Draw) -> dict[str, Any]:
    dtype = d.choice(torch.float32, torch.bfloat16, torch.float16)
    return {
        "is_causal": d.is_causal,
        "dtype": dtype,
        "logit": d.choice(0.0, 1.0, 30.0, 100.0, 1e3, 1e4),
        "autocast": dtype != torch.float32 and d.choice(False, True),
        "length": d.length(),
        "head_dim": d.choice(1, 4, 16, 64),
        "seed": d.seed(),
    }


@Promise(_large_logits)
def check_finite(
    instance: Instance,
    is_causal: bool,
    dtype: torch.dtype,
    logit: float,
    autocast: bool,
    *,
    length: int = 75,
    head_dim: int = 64,
    seed: int = 0,
) -> None:
    """Logits of both signs up to `logit`. With head_dim 64, q . k before scaling exceeds the largest float16 number."""
    size = (logit * head_dim**0.5 / head_dim) ** 0.5
    query, key, value = inputs(q_len=length, head_dim=head_dim, seed=seed)
    query, key, value, turn = query.sign() * size, key.sign() * size, 100.0 * value, torch.arange(length)[:, None] % 3
    key = torch.where(turn == 0, query, torch.where(turn == 1, -query, key))
    leaves = [x.to(dtype).requires_grad_() for x in (query, key, value)]
    key_mask = padding_mask("left", 1, length, 3)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        given = [x.float() if autocast else x for x in leaves]
        for mask in (None, key_mask):
            out = instance(*given, mask, is_causal=is_causal)
            assert out.dtype == dtype, f"the output has {out.dtype}, not {dtype}"
            assert_finite([out], f"with logits up to {logit:g} in {dtype}, the output")
            largest = (out.abs().max().item(), value.abs().max().item())
            assert not instance.averages or largest[0] <= largest[1] * 1.01, (
                f"with logits up to {logit:g} in {dtype} an output exceeds all values: {largest[0]} > {largest[1]}"
            )
    if dtype != torch.float16:
        grads = torch.autograd.grad(out.float().sum(), leaves, materialize_grads=True)
        assert_finite(grads, f"with logits up to {logit:g} in {dtype}, a gradient")


@Promise(
    lambda d: d.shape(d.length(), batch=1, dtype=d.choice(torch.bfloat16, torch.float16), spread=0.05),
    applies=lambda i: i.averages,
)
def check_sums(instance: Instance, is_causal: bool, dtype: torch.dtype, **shape: Any) -> None:
    """Weights are summed in float32: the average of 700 equal values is this value up to the precision of `dtype`."""
    query, key, value = inputs(**{"q_len": 700, "head_dim": 16, "spread": 0.05, **shape}, dtype=dtype)
    value = torch.full_like(value, 1.0)
    out = instance(query, key, value, is_causal=is_causal)
    # Some methods round twice: the projected values, and the output.
    error = (out - torch.ones_like(out)).abs().max().item()
    allowed = 2 * torch.finfo(dtype).eps
    assert error <= allowed, f"in {dtype} the average of equal values differs from them by {error:.2g} > {allowed:.2g}"


# 7. Gradients, and the readable form.


@contextmanager
def held_plans() -> Iterator[None]:
    """Use the hash and the samples of the first call in all later calls, as the gradient does."""
    plans = {}

    def holding(plan: Callable) -> Callable:
        def planned(*arguments: Any, **options: Any) -> Any:
            if plan.__name__ not in plans:
                plans[plan.__name__] = plan(*arguments, **options)
            return plans[plan.__name__]

        return planned

    near_far, segments = holding(bidirectional.make_plan), holding(causal.plan_intervals)
    with patch.object(bidirectional, "make_plan", near_far), patch.object(causal, "plan_intervals", segments):
        yield


def _few_tokens(d: Draw) -> dict[str, Any]:
    length = d.length(5, 20)
    sizes = {"length": length, "value_dim": d.choice(1, 2, 3), "seed": d.seed()}
    return {"is_causal": d.is_causal, **sizes, "fast_mode": length > 8 or d.choice(True, True, False)}


# 270 tokens are more than two chunks.
@Promise(_few_tokens, share=0.4, at=[{"length": 270, "value_dim": 3, "fast_mode": True}])
def check_gradients(
    instance: Instance, is_causal: bool, length: int, value_dim: int, fast_mode: bool = False, seed: int = 0
) -> None:
    """Gradients agree with finite differences in float64, with hash and samples held fixed."""
    shape = {"batch": 2, "num_heads": 1, "q_len": length, "head_dim": 2, "value_dim": value_dim, "seed": seed}
    key_mask = torch.ones(2, length, dtype=torch.bool)
    key_mask[0, -2:] = False
    key_mask[1, :1] = False

    def output(*leaves: Tensor) -> Tensor:
        return instance.reduced(*leaves, key_mask, is_causal=is_causal).masked_fill(~key_mask[:, None, :, None], 0.0)

    with held_plans():
        leaves = [x.requires_grad_() for x in inputs(**shape, dtype=torch.float64)]
        try:
            torch.autograd.gradcheck(output, leaves, fast_mode=fast_mode)
        except GradcheckError as error:
            found = " ".join(str(error).split())
            for number, name in enumerate(("query", "key", "value")):
                found = found.replace(f"with respect to input {number}", f"with respect to the {name}")
            raise AssertionError(f"a gradient is not that of finite differences. {found}") from error


@Promise(lambda d: d.shape(padding=d.padding(), scale=d.choice(None, None, 0.0, -0.5, 1.7)), share=2.0)
def check_naive(
    instance: Instance, is_causal: bool, padding: str = "none", scale: float | None = None, **shape: Any
) -> None:
    """The fast form is the readable form."""
    tensors, key_mask = drawn(padding, **shape)
    ours = instance(*tensors, key_mask, is_causal=is_causal, scale=scale, seed=3)
    other = instance.naive(*tensors, key_mask, is_causal=is_causal, scale=scale, seed=3)
    valid = outputs_that_count(key_mask, ours)
    assert_close(ours[valid], other[valid], 1e-9, "`forward` and `naive` differ")


# In the readable form queries without a key have no gradient, and in a window such are queries far in the padding.
@Promise(
    lambda d: d.shape(padding="none" if d.instance.reads_positions else d.choice("none", "right"), batch=d.choice(1, 2))
)
def check_naive_gradients(instance: Instance, is_causal: bool, padding: str = "right", **shape: Any) -> None:
    """The gradients of the fast form are those of the readable form."""
    tensors = [x.requires_grad_() for x in inputs(**{"batch": 2, "dtype": torch.float64, **shape})]
    # Every sequence has valid keys: the readable form has no gradient at queries without keys.
    key_mask = padding_mask(padding, tensors[1].shape[0], tensors[1].shape[2])
    grads = []
    for form in (instance, instance.naive):
        out = form(*tensors, key_mask, is_causal=is_causal)
        weight = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        loss = (out * weight)[outputs_that_count(key_mask, out)].sum()
        grads.append(torch.autograd.grad(loss, tensors, materialize_grads=True))
    for ours, other in zip(*grads, strict=True):
        assert_close(ours, other, 1e-8, "the gradients of `forward` and `naive` differ")


# 8. The budget.


def budget_error(instance: Instance, is_causal: bool, budget: int, seeds: int = 4, **shape: Any) -> float:
    """The error with a budget relative to exact attention, as a root mean square over seeds."""
    tensors = inputs(**{"head_dim": 8, "num_heads": 4, "dtype": torch.float64, **shape})
    exact = exact_output(*tensors, is_causal=is_causal)
    config = instance.config().with_budget(budget)
    errors = [relative_error(hea.attention(config, *tensors, is_causal=is_causal, seed=s), exact) for s in range(seeds)]
    return (sum(e**2 for e in errors) / seeds) ** 0.5


def _budget(d: Draw) -> dict[str, Any]:
    # The global tokens are a part of the budget.
    smallest = d.instance.hyperparameters.get("global_tokens", 0) // 2 + 1
    return {"is_causal": d.is_causal, "length": d.length(smallest), **d.heads(num_heads=4, num_kv_heads=4)}


@Promise(_budget, applies=lambda i: i.limit in ("exact", "bounded"))
def check_whole_budget(instance: Instance, is_causal: bool, length: int, **shape: Any) -> None:
    """The error is 0 if the budget is as large as the sequence."""
    error = budget_error(instance, is_causal, 2 * length + 1, 1, q_len=length, **shape)
    assert error < 1e-9, f"with a budget of all {length} tokens the error is {error:.2g}, not 0"


@explained
def check_converges(instance: Instance, is_causal: bool, length: int = 200) -> None:
    """The error decreases with the budget, and is 0 if the budget is as large as the sequence."""
    errors = [budget_error(instance, is_causal, c, q_len=length) for c in (length // 8, length // 3, length - 20)]
    if instance.limit == "bounded" and not is_causal:  # with fewer columns more heads are exact
        assert all(0 < error <= instance.config().max_error for error in errors), f"errors beyond the bound: {errors}"
    else:
        assert errors[0] > errors[1] > errors[2] > 0, f"the error does not fall with the budget: {errors}"
    whole = budget_error(instance, is_causal, 2 * length + 1, 1, q_len=length)
    assert whole < 1e-9, f"with a budget of all {length} tokens the error is {whole:.2g}, not 0"


@explained
def check_converges_in_expectation(instance: Instance, is_causal: bool, length: int = 60) -> None:
    """Eight times the budget more than halves the error.

    The variance of random features grows with the exponential of the logits, so the inputs are half as large as usual.
    """
    errors = [budget_error(instance, is_causal, c, 8, q_len=length, spread=0.5) for c in (32, 256, 2048)]
    assert all(small < large / 2 for large, small in itertools.pairwise(errors)), (
        f"the error does not fall with the budget: {errors}"
    )


# 11. Memory.


class Memory(TorchDispatchMode):
    """Records the largest number of elements of a tensor that an operator returns, and the bytes that are in use.

    Attributes:
        operators: the number of operators.
        numel: the number of elements of the largest tensor.
        peak: the most bytes of all tensors at a time that operators have returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.numel = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        self.operators += 1
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):  # a view that is expanded needs no memory of its own
                storage = x.untyped_storage()
                self.numel = max(self.numel, storage.nbytes() // x.element_size())
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._sizes.pop, storage._cdata)
        self.peak = max(self.peak, sum(self._sizes.values()))
        return result


@Promise(
    lambda d: {"is_causal": d.is_causal, "length": d.between(400, 600), "num_heads": 1, "content": d.any_content()},
    share=0.05,
    applies=lambda i: i.hyperparameters.get("max_length", 2400) >= 2400,
)
def check_largest_tensor(instance: Instance, is_causal: bool, length: int, **shape: Any) -> None:
    """Four times the length makes no tensor more than eight times as large. One for all pairs is 16 times as large.

    What is computed in chunks of a constant size may reach this size first, so a second step counts as well.
    """
    sizes: list[int] = []
    for q_len in (length, 4 * length, 16 * length):
        with Memory() as memory:
            instance(*inputs(**shape, q_len=q_len), is_causal=is_causal)
        if sizes and memory.numel <= 8 * sizes[-1]:
            return
        sizes.append(memory.numel)
    raise AssertionError(f"the largest tensors for {length} tokens, 4 and 16 times as many have {sizes} numbers")
