"""The eleven promises that every method keeps, on every instance; each check is also shown to fail on a broken method.

A check is a plain function of an instance that raises `AssertionError`; the tests on good methods draw its arguments.
"""

import itertools
import json
import math
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import broken_methods as bad
import hf_efficient_attn as hea
from hf_efficient_attn.ops import causal as causal_ops
from hf_efficient_attn.ops import near_far as near_far_ops
from instances import DEFAULTS, INSTANCES, Instance, forms, inputs, padding_mask, relative_error

FORMS = [pytest.param(i, c, id=f"{i}{'-causal' if c else ''}") for i, c in forms()]
each_form = pytest.mark.parametrize(("instance", "is_causal"), FORMS)
each_instance = pytest.mark.parametrize("instance", INSTANCES, ids=str)
some_cases = settings(max_examples=12, deadline=None, derandomize=True)

MASKS = ("none", "left", "right", "holes", "empty")


def draw_inputs(draw, instance: Instance, is_causal: bool, **fixed):
    """Arguments of `inputs` that suit the instance: lengths from 1 to beyond three budgets, grouped queries, widths."""
    length = draw(st.one_of(st.just(1), st.integers(2, 45), st.integers(46, 150)), label="queries")
    keys = length
    if instance.info.rectangular and not is_causal and draw(st.booleans(), label="rectangular"):
        keys = draw(st.integers(1, 150), label="keys")
    key_heads = draw(st.integers(1, 2), label="key_heads")
    width = draw(st.integers(1, 9), label="width")
    return {
        "batch": draw(st.integers(1, 3), label="batch"),
        "num_heads": key_heads * draw(st.integers(1, 2), label="groups"),
        "num_kv_heads": key_heads,
        "q_len": length,
        "kv_len": keys,
        "head_dim": width,
        "value_dim": draw(st.sampled_from((width, 1, 5)), label="value_width"),
        "seed": draw(st.integers(0, 1000), label="seed"),
        **fixed,
    }


# 1. Shapes, and exactness within the budget.


def check_shapes(instance: Instance, is_causal: bool, mask: str = "none", **shape) -> None:
    query, key, value = inputs(**shape)
    there = padding_mask(mask, key.shape[0], key.shape[2])
    out = instance(query, key, value, there, is_causal=is_causal)
    assert out.shape == (*query.shape[:3], value.shape[3])
    assert out.dtype == value.dtype
    assert out.isfinite().all()


@each_form
@some_cases
@given(data=st.data(), mask=st.sampled_from(MASKS))
def test_any_shape(instance, is_causal, data, mask):
    check_shapes(instance, is_causal, mask, **draw_inputs(data.draw, instance, is_causal))


def check_exact(instance: Instance, is_causal: bool, length: int, mask: str = "none") -> None:
    """Against the attention of torch, with its own dense mask."""
    query, key, value = inputs(batch=2, q_len=length, dtype=torch.float64)
    there = padding_mask(mask, 2, length)
    pairs = torch.ones(length, length, dtype=torch.bool)
    pairs = (pairs.tril() if is_causal else pairs).expand(2, 1, -1, -1)
    pairs = pairs if there is None else pairs & there[:, None, None]
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=pairs)
    out = instance(query, key, value, there, is_causal=is_causal)
    rows = pairs.any(-1, keepdim=True)
    torch.testing.assert_close(out, exact.masked_fill(~rows, 0.0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mask", MASKS)
@each_form
def test_exact_within_the_budget(instance, is_causal, mask):
    if not instance.budget:
        pytest.skip("an attention of its own, or one without a budget in columns")
    for length in (1, instance.budget - 1, instance.budget):
        check_exact(instance, is_causal, length, mask)
    with pytest.raises(AssertionError):
        check_exact(instance, is_causal, 2 * instance.budget)


# 2. Padding.


def check_masked_keys(instance: Instance, is_causal: bool, mask: str = "holes", **shape) -> None:
    """Nothing that stands where the mask is False moves an output where it is True by one bit."""
    query, key, value = inputs(**shape)
    batch, columns = key.shape[0], key.shape[2]
    there = padding_mask(mask, batch, columns)
    own = query.shape[2] == columns
    clean = instance(query, key, value, there, is_causal=is_causal)
    for garbage in (torch.nan, torch.inf, -torch.inf, 1e30):
        changed = [x.masked_fill(~there[:, None, :, None], garbage) for x in (key, value)]
        # In self-attention padding has queries as well; only their own outputs may show it.
        asked = query.masked_fill(~there[:, None, :, None], garbage) if own else query
        out = instance(asked, *changed, there, is_causal=is_causal)
        rows = there[:, None, :].expand(out.shape[:3]) if own else torch.ones(out.shape[:3], dtype=torch.bool)
        assert torch.equal(out[rows], clean[rows]), f"{garbage} behind the mask shows"


@each_form
@some_cases
@given(data=st.data(), mask=st.sampled_from(MASKS[1:]))
def test_masked_keys_do_not_show(instance, is_causal, data, mask):
    check_masked_keys(instance, is_causal, mask, **draw_inputs(data.draw, instance, is_causal))


def check_masked_gradients(instance: Instance, is_causal: bool) -> None:
    """NaN behind the mask reaches no gradient, and what stands there gets none."""
    query, key, value = inputs(batch=2, q_len=70)
    there = padding_mask("holes", 2, 70)
    there[0, :3] = False
    leaves = [query, *(x.masked_fill(~there[:, None, :, None], torch.nan) for x in (key, value))]
    leaves = [x.requires_grad_() for x in leaves]
    instance(*leaves, there, is_causal=is_causal)[there[:, None, :].expand(-1, 2, -1)].square().sum().backward()
    for leaf in leaves:
        assert leaf.grad.isfinite().all()
    for leaf in leaves[1:]:
        hidden = leaf.grad[~there[:, None, :].expand(-1, 2, -1)]
        assert torch.equal(hidden, torch.zeros_like(hidden))


@each_form
def test_masked_keys_do_not_show_in_gradients(instance, is_causal):
    check_masked_gradients(instance, is_causal)


def check_empty_rows(instance: Instance, is_causal: bool, length: int = 90) -> None:
    """Rows of a batch, and causal queries, that have nothing to attend to give 0 and gradients that are numbers."""
    leaves = [x.requires_grad_() for x in inputs(batch=2, q_len=length)]
    there = torch.zeros(2, length, dtype=torch.bool)
    there[1, length // 2 :] = True
    out = instance(*leaves, there, is_causal=is_causal)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    if is_causal:
        before = out[1, :, : length // 2]
        assert torch.equal(before, torch.zeros_like(before))
    assert out.isfinite().all()
    assert out[1, :, length // 2 :].abs().amax(-1).min() > 0
    out.sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


@each_form
def test_rows_with_nothing_to_attend_to_are_zero(instance, is_causal):
    for length in (2, 30, 90, 300):
        check_empty_rows(instance, is_causal, length)


def check_padding_beside(instance: Instance, is_causal: bool, length: int, before: int, after: int) -> None:
    """A row's output is that of the row without its padding: masked keys count in no mean, rank or denominator."""
    row = inputs(q_len=length, dtype=torch.float64)
    padded = [torch.nn.functional.pad(x, (0, 0, before, after), value=3.0) for x in row]
    other = inputs(q_len=before + length + after, dtype=torch.float64, seed=1)
    there = torch.ones(2, before + length + after, dtype=torch.bool)
    there[0, :before] = False
    there[0, before + length :] = False
    both = instance(*(torch.cat(pair) for pair in zip(padded, other, strict=True)), there, is_causal=is_causal)
    alone = instance(*row, is_causal=is_causal)
    torch.testing.assert_close(both[:1, :, before : before + length], alone, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(both[1:], instance(*other, is_causal=is_causal), rtol=1e-8, atol=1e-8)


@each_form
@some_cases
@given(length=st.integers(1, 130), before=st.integers(0, 90), after=st.integers(0, 90))
def test_padding_beside_a_row_does_not_matter(instance, is_causal, length, before, after):
    check_padding_beside(instance, is_causal, length, before, after)


def check_holes(instance: Instance, is_causal: bool, length: int, seed: int = 0) -> None:
    """Holes in a mask are the absence of their tokens, for a method that does not read distances."""
    row = inputs(q_len=length, dtype=torch.float64, seed=seed)
    there = padding_mask("holes", 1, length, seed)
    there[0, -1] = True
    out = instance(*row, there, is_causal=is_causal)[:, :, there[0]]
    alone = instance(*(x[:, :, there[0]] for x in row), is_causal=is_causal)
    torch.testing.assert_close(out, alone, rtol=1e-8, atol=1e-8)


@each_form
def test_holes_are_absent_tokens(instance, is_causal):
    if instance.reads_positions:
        pytest.skip("a window is one of positions")
    for length, seed in ((1, 0), (50, 1), (70, 2), (200, 3)):
        check_holes(instance, is_causal, length, seed)


# 3. The future.


def check_future(instance: Instance, length: int, cut: int, mask: str = "none", seed: int = 0) -> None:
    """Everything from the cut on is replaced, the mask too; what stands before it comes out the same to the bit."""
    # Values as wide as keys go through the fused kernel, others through our own.
    shape = {"batch": 2, "num_heads": 2, "q_len": length, "num_kv_heads": 1, "head_dim": 6, "value_dim": 6 - seed % 2}
    here, other = inputs(**shape, seed=seed), inputs(**shape, seed=seed + 1, spread=40.0)
    there, elsewhere = padding_mask(mask, 2, length, seed), padding_mask(mask, 2, length, seed + 1)
    changed = [torch.cat((a[:, :, :cut], b[:, :, cut:]), 2) for a, b in zip(here, other, strict=True)]
    shown = None if there is None else torch.cat((there[:, :cut], elsewhere[:, cut:]), 1)
    out = instance(*here, there, is_causal=True)
    assert torch.equal(instance(*changed, shown, is_causal=True)[:, :, :cut], out[:, :, :cut])


CAUSAL = [i for i, is_causal in forms() if is_causal]
each_causal = pytest.mark.parametrize("instance", CAUSAL, ids=str)
# Block boundaries of the instances (8, 16, 40), of the tiles and chunks (128, 256), and the places beside them.
CUTS = sorted({max(0, at + beside) for at in (1, 8, 16, 24, 32, 40, 64, 128, 256, 300) for beside in (-1, 0, 1)})


@each_causal
def test_the_future_does_not_show_at_boundaries(instance):
    for cut in CUTS:
        check_future(instance, 301, min(cut, 300), seed=cut)


@each_causal
@some_cases
@given(data=st.data(), length=st.integers(1, 200), mask=st.sampled_from(MASKS), seed=st.integers(0, 99))
def test_the_future_does_not_show(instance, data, length, mask, seed):
    check_future(instance, length, data.draw(st.integers(0, length - 1), label="cut"), mask, seed)


def check_length(instance: Instance, length: int, cut: int) -> None:
    """An output does not depend on how many tokens follow."""
    whole = inputs(q_len=length, dtype=torch.float64)
    out = instance(*(x[:, :, :cut] for x in whole), is_causal=True)
    torch.testing.assert_close(out, instance(*whole, is_causal=True)[:, :, :cut], rtol=1e-9, atol=1e-9)


@each_causal
def test_the_number_of_tokens_that_follow_does_not_show(instance):
    for cut in CUTS:
        check_length(instance, 301, max(1, min(cut, 300)))


# 4. The batch.


def check_batch(instance: Instance, is_causal: bool, mask: str = "none", **shape) -> None:
    shape = {"batch": 3, "dtype": torch.float64, **shape}
    rows = inputs(**shape)
    there = padding_mask(mask, shape["batch"], rows[1].shape[2])
    out = instance(*rows, there, is_causal=is_causal)
    for b in range(shape["batch"]):
        alone = [x[b : b + 1] for x in rows]
        own = None if there is None else there[b : b + 1]
        row = instance(*alone, own, is_causal=is_causal)
        torch.testing.assert_close(out[b : b + 1], row, rtol=1e-8, atol=1e-8)


@each_form
@some_cases
@given(data=st.data(), mask=st.sampled_from(MASKS))
def test_rows_of_a_batch_are_alone(instance, is_causal, data, mask):
    fixed = {"batch": 3, "dtype": torch.float64}
    check_batch(instance, is_causal, mask, **draw_inputs(data.draw, instance, is_causal, **fixed))


@each_form
def test_rows_of_a_large_batch_are_alone(instance, is_causal):
    """So large that heads and rows are worked on a few at a time."""
    # What is hashed for densities and kernels works on one head at a time anyway, and takes its time.
    short, long = (300, 700) if instance.data_dependent else (1500, 5000)
    check_batch(instance, is_causal, "right", num_heads=4, num_kv_heads=2, q_len=short, head_dim=64)
    check_batch(instance, is_causal, num_heads=6, num_kv_heads=3, q_len=long, head_dim=64, batch=2)


# 5. Seeds.


def check_seeds(instance: Instance, is_causal: bool) -> None:
    row = inputs(q_len=90)
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    first, again, other = (instance(*row, is_causal=is_causal, seed=s) for s in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator was used"
    assert torch.equal(first, again), "the same seed gave another output"
    assert torch.equal(first, other) != instance.random, "another seed"
    configured = hea.attention(instance.config(seed=3), *row, is_causal=is_causal)
    assert torch.equal(configured, first), "the config's seed is not the same as the call's"


def check_global_seed(instance: Instance, is_causal: bool) -> None:
    """seed=None is for training: it draws from the global generator, so that setting this one's state repeats it."""
    row = inputs(q_len=90)
    outs = []
    for start in (0, 0, 1):
        torch.manual_seed(start)
        outs.append(instance(*row, is_causal=is_causal, seed=None))
    state = torch.random.get_rng_state()
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2]) != instance.random
    instance(*row, is_causal=is_causal, seed=None)
    assert torch.equal(torch.random.get_rng_state(), state) != instance.random


@each_form
def test_seeds(instance, is_causal):
    check_seeds(instance, is_causal)
    if instance.random:
        check_global_seed(instance, is_causal)


# 6. Finite.


def check_finite(instance: Instance, is_causal: bool, dtype: torch.dtype, logit: float, autocast: bool) -> None:
    """Width 64 and logits of both signs up to `logit`: q . k without its scale then passes the largest float16."""
    width, length = 64, 75
    size = (logit * width**0.5 / width) ** 0.5
    query, key, value = (x.sign() * size for x in inputs(q_len=length, head_dim=width))
    key = torch.where(torch.arange(length)[:, None] % 3 == 0, query, key)
    key = torch.where(torch.arange(length)[:, None] % 3 == 1, -query, key)
    value = inputs(q_len=length, head_dim=width, spread=100.0)[2]
    leaves = [x.to(dtype).requires_grad_() for x in (query, key, value)]
    there = padding_mask("left", 1, length, 3)
    context = torch.autocast("cpu", dtype=dtype, enabled=autocast)
    with context:
        given = [x.float() if autocast else x for x in leaves]
        for mask in (None, there):
            out = instance(*given, mask, is_causal=is_causal)
            assert out.dtype == dtype
            assert out.isfinite().all()
            assert not instance.averages or out.abs().max() <= value.abs().max() * 1.01
    if dtype != torch.float16:
        out.float().sum().backward()
        assert all(leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@each_form
def test_finite(instance, is_causal, dtype):
    for logit, autocast in itertools.product((0.0, 1.0, 100.0, 1e4), (False, True)):
        if dtype != torch.float32 or not autocast:
            check_finite(instance, is_causal, dtype, logit, autocast)


def check_sums(instance: Instance, is_causal: bool, dtype: torch.dtype) -> None:
    """Weights are summed in float32: the average of 700 equal values is that value to the last bit of `dtype`."""
    query, key, value = inputs(q_len=700, head_dim=16, spread=0.05, dtype=dtype)
    value = torch.full_like(value, 1.0)
    out = instance(query, key, value, is_causal=is_causal)
    torch.testing.assert_close(out, value, rtol=torch.finfo(dtype).eps, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each_form
def test_sums_are_kept_in_float32(instance, is_causal, dtype):
    check_sums(instance, is_causal, dtype)


# 7. Gradients.


@contextmanager
def held_plans():
    """Hash and samples of the first call serve all later ones, as a gradient takes them."""
    plans = {}

    def holding(plan):
        def planned(*arguments, **options):
            if plan.__name__ not in plans:
                plans[plan.__name__] = plan(*arguments, **options)
            return plans[plan.__name__]

        return planned

    near_far, segments = holding(near_far_ops.make_plan), holding(causal_ops.plan_intervals)
    with patch.object(near_far_ops, "make_plan", near_far), patch.object(causal_ops, "plan_intervals", segments):
        yield


def check_gradients(instance: Instance, is_causal: bool, length: int, value_width: int, fast_mode=False) -> None:
    query, key, value = inputs(
        batch=2, num_heads=1, q_len=length, head_dim=2, value_dim=value_width, dtype=torch.float64
    )
    there = torch.ones(2, length, dtype=torch.bool)
    there[0, -2:] = False
    there[1, :1] = False

    def output(*leaves):
        out = hea.attention(instance.config(**instance.small), *leaves, attention_mask=there, is_causal=is_causal)
        return out.masked_fill(~there[:, None, :, None], 0.0)

    with held_plans():
        leaves = [x.requires_grad_() for x in (query, key, value)]
        assert torch.autograd.gradcheck(output, leaves, fast_mode=fast_mode, raise_exception=False)


@each_form
def test_gradients_agree_with_finite_differences(instance, is_causal):
    check_gradients(instance, is_causal, 13, 2)
    check_gradients(instance, is_causal, 13, 3)


@each_form
def test_gradients_across_chunks(instance, is_causal):
    """Longer than the tiles and chunks of 128, by random directions."""
    check_gradients(instance, is_causal, 140, 2, fast_mode=True)
    check_gradients(instance, is_causal, 270, 3, fast_mode=True)


# 8. The budget.


def budget_error(instance, is_causal: bool, columns: int, length: int, seeds: int = 4, spread: float = 1.0) -> float:
    """Error of `with_budget(columns)` against the attention of torch: root mean square over seeds."""
    row = inputs(q_len=length, head_dim=8, num_heads=4, dtype=torch.float64, spread=spread)
    exact = torch.nn.functional.scaled_dot_product_attention(*row, is_causal=is_causal)
    config = instance.config().with_budget(columns)
    errors = [relative_error(hea.attention(config, *row, is_causal=is_causal, seed=s), exact) for s in range(seeds)]
    return (sum(e**2 for e in errors) / seeds) ** 0.5


def check_converges(instance: Instance, is_causal: bool, length: int = 200) -> None:
    """The error falls with every step of the budget, and is nothing once the budget holds the sequence."""
    errors = [budget_error(instance, is_causal, c, length) for c in (length // 8, length // 3, length - 20)]
    assert errors[0] > errors[1] > errors[2] > 0, errors
    assert budget_error(instance, is_causal, 2 * length + 1, length) < 1e-9


def check_converges_in_expectation(instance: Instance, is_causal: bool, length: int = 60) -> None:
    """Eight times the budget more than halves the error, wherever one starts.

    The inputs are half as large as a model's: the variance of random features grows with the exponential of the logits.
    """
    errors = [budget_error(instance, is_causal, c, length, 8, spread=0.5) for c in (32, 256, 2048)]
    assert all(small < large / 2 for large, small in itertools.pairwise(errors)), errors


@each_form
def test_the_budget_leads_to_exact_attention(instance, is_causal):
    if instance.limit == "none":
        pytest.skip("an attention of its own")
    check = check_converges if instance.limit == "exact" else check_converges_in_expectation
    check(instance, is_causal)


# 9. Compiling.


def check_compiles(instance: Instance, is_causal: bool, backend: str = "aot_eager") -> None:
    """No graph break, so no branch on a value; forward and gradients are those of eager mode."""
    row = [x.requires_grad_() for x in inputs(batch=2, q_len=61, dtype=torch.float64)]
    there = padding_mask("left", 2, 61)
    torch._dynamo.reset()

    def call(query, key, value, mask):
        return instance(query, key, value, mask, is_causal=is_causal)

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    outs = []
    for form in (call, compiled):
        try:
            out = form(*row, there)
        except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError) as error:
            raise AssertionError(f"it does not compile in one graph: {error}") from error
        outs.append((out, *torch.autograd.grad(out.square().sum(), row)))
    for eager, other in zip(*outs, strict=True):
        torch.testing.assert_close(other, eager, rtol=1e-8, atol=1e-8)


@each_form
def test_compiles(instance, is_causal):
    if instance.data_dependent:
        pytest.skip("its work depends on the data by definition")
    check_compiles(instance, is_causal)


@pytest.mark.parametrize("name", ["kdeformer", "linear"])
def test_compiles_with_inductor(name):
    check_compiles(next(i for i in INSTANCES if i.method == name), name == "linear", backend="inductor")


# 10. Refusals: each one sentence that says what, why and what instead, before any work is done.


def refuses(sentence: str):
    return pytest.raises(hea.UnsupportedAttentionError, match=sentence)


@each_instance
def test_refuses_masks_that_are_not_of_keys(instance):
    row = inputs(batch=2, q_len=50)
    with refuses(r"4-D attention mask .*bool mask of shape \(2, 50\)"):
        instance(*row, torch.ones(2, 1, 50, 50, dtype=torch.bool))
    with refuses(r"must be bool \(2, 50\), True = attend; got torch.float32 \(2, 50\)"):
        instance(*row, torch.zeros(2, 50))
    with refuses(r"must be bool \(2, 50\).*torch.int64"):
        instance(*row, torch.ones(2, 50, dtype=torch.int64))
    for shape in ((2, 49), (1, 50), (50,), (2, 50, 50)):
        with refuses(r"must be bool \(2, 50\)"):
            instance(*row, torch.ones(shape, dtype=torch.bool))


@each_instance
def test_refuses_shapes_and_types_that_do_not_fit(instance):
    query, key, value = inputs(batch=2, num_heads=4, q_len=50)
    with refuses("batch, num_heads, length, head_dim"):
        instance(query[0], key[0], value[0])
    for wrong in ((query, key[:, :, :-1], value), (query, key[..., :-1], value), (query[:1], key, value)):
        with refuses("do not fit together"):
            instance(*wrong)
    with refuses("number of key heads, 3, must divide the number of query heads, 4"):
        instance(query, key[:, :3], value[:, :3])
    with refuses("number of key heads, 0"):
        instance(query, key[:, :0], value[:, :0])
    for wrong in ((query, key.double(), value), (query, key, value.half())):
        with refuses("the same floating-point dtype"):
            instance(*wrong)
    with refuses("the same floating-point dtype"):
        instance(query.int(), key.int(), value.int())


@each_instance
def test_refuses_a_rectangle_without_a_form_for_it(instance):
    query, key, value = inputs(q_len=50, kv_len=60)
    if instance.info.rectangular:
        assert instance(query, key, value).shape == query.shape
    else:
        with refuses("as many queries as keys; got 50 and 60"):
            instance(query, key, value)


@each_instance
@pytest.mark.parametrize("budget", [0, -3, 2.5, True, "64", None])
def test_refuses_budgets_that_make_no_attention(instance, budget):
    with refuses("budget of .* columns is not possible"):
        instance.config().with_budget(budget)


def test_refuses_causality_without_a_form_for_it():
    with bad.broken(bad.correct, causal=False) as instance:
        row = inputs(q_len=20)
        assert instance(*row).isfinite().all()
        with refuses(r"correct: it has no causal form\. Methods that have one: .*longformer"):
            instance(*row, is_causal=True)


@each_instance
def test_refuses_unknown_names_and_names_the_nearest(instance):
    row = inputs(q_len=20)
    name, known = instance.method, list(instance.config().to_dict())[-1]
    with refuses(rf"unknown attention method '{name}x'\. Did you mean '{name}'\? Known: .*performer"):
        hea.attention(name + "x", *row)
    with refuses(rf"{name}: unknown hyperparameter '{known}x'\. Did you mean '{known}'\?"):
        hea.attention(name, *row, **{known + "x": 1})
    with refuses(rf"{name}: unknown hyperparameter 'qqq'\. Known: .*{known}"):
        hea.attention(name, *row, qqq=1)
    with refuses("unknown attention method 3"):
        hea.attention(3, *row)


@each_instance
def test_refuses_seeds_and_dropout_that_make_no_sense(instance):
    row = inputs(q_len=20)
    for dropout_p in (-0.1, 1.0, 2.0, math.nan):
        with refuses("dropout_p=.* must be at least 0 and below 1"):
            instance(*row, dropout_p=dropout_p)
    for seed in ("0", 1.5, [1]):
        with refuses("seed must be an integer or None, not "):
            instance(*row, seed=seed)


# 11. Memory.

LONG = 32768
CHILD = """
import json, sys
import broken_methods, instances
import hf_efficient_attn as hea
from contextlib import nullcontext

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) / 1024

def reset():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")

for name, causal, backward, masked in json.loads(sys.argv[1]):
    form = getattr(broken_methods, name, None)
    good = instances.Instance(name, instances.AT_LENGTH.get(name, {}))
    with broken_methods.broken(form) if form else nullcontext(good) as instance:
        for length in (1024, int(sys.argv[2])):
            row = [x.requires_grad_(backward) for x in instances.inputs(num_heads=1, q_len=length, head_dim=64)]
            mask = instances.padding_mask("left", 1, length) if masked else None
            reset()
            before = status("VmRSS")
            out = instance(*row, mask, is_causal=causal)
            if backward:
                out.sum().backward()
            peak = status("VmHWM")
    print(json.dumps([name, causal, backward, masked, peak - before]), flush=True)
"""


def extra_memory(cases: list) -> list:
    """MiB by which the peak of a child process exceeds what it holds before a call with 32768 tokens, for each case."""
    here = Path(__file__).parent
    path = os.pathsep.join((str(here), str(here.parent)))
    # Freed tensors go back to the system at once, so that the peak of a case is its own.
    environment = {**os.environ, "PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": str(1 << 18)}
    command = [sys.executable, "-c", CHILD, json.dumps(cases), str(LONG)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_memory(cases: list, limit: float) -> None:
    """At most `limit` times the three inputs; one byte for each of N x N pairs would be 42 times them."""
    inputs_mib = 3 * LONG * 64 * 4 / 2**20
    for *case, extra in extra_memory(cases):
        assert extra < limit * inputs_mib, f"{case}: {extra:.0f} MiB beside inputs of {inputs_mib:.0f}"


needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux' /proc")


@needs_proc
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_memory_is_linear(masked):
    check_memory([(i.method, c, False, masked) for i in DEFAULTS for c in i.forms], limit=10)


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
def test_memory_is_linear_with_gradients(is_causal):
    check_memory([(i.method, is_causal, True, True) for i in DEFAULTS if is_causal in i.forms], limit=25)


# Every check fails where it should.


def check_memory_of(instance: Instance) -> None:
    check_memory([(instance.method, False, False, False)], limit=10)


def fails(form, check, *arguments, promised=None, **options):
    """A case of `test_checks_catch_broken_methods`: `check` must fail on `form`."""
    return pytest.param(form, check, arguments, promised or {}, options, id=f"{check.__name__}-{form.__name__}")


CAUGHT = [
    fails(bad.needs_even_lengths, check_shapes, False, q_len=7),
    fails(bad.returns_the_width_of_keys, check_shapes, False, value_dim=5),
    fails(bad.never_converges, check_exact, False, 8),
    fails(bad.counts_masked_keys, check_exact, False, 8, "holes"),
    fails(bad.reads_masked_queries, check_masked_keys, False),
    fails(bad.reads_masked_values, check_masked_keys, True),
    fails(bad.empty_rows_are_nan, check_masked_gradients, True),
    fails(bad.empty_rows_have_no_gradient, check_masked_gradients, True),
    fails(bad.empty_rows_have_no_gradient, check_empty_rows, False),
    fails(bad.empty_rows_are_nan, check_empty_rows, False),
    fails(bad.empty_rows_are_nan, check_empty_rows, True),
    fails(bad.empty_rows_are_means, check_empty_rows, False),
    fails(bad.centred_on_all_keys, check_padding_beside, False, 20, 0, 5),
    fails(bad.counts_masked_keys, check_padding_beside, False, 20, 5, 0),
    fails(bad.counts_masked_keys, check_holes, True, 50),
    fails(bad.ignores_causality, check_future, 30, 10),
    fails(bad.maximum_over_the_sequence, check_future, 30, 10),
    fails(bad.sorts_the_sequence, check_future, 30, 10),
    fails(bad.divides_by_the_length, check_length, 30, 10),
    fails(bad.sorts_the_sequence, check_length, 30, 10),
    fails(bad.mixes_the_batch, check_batch, False),
    fails(bad.draws_by_batch_row, check_batch, True),
    fails(bad.draws_from_the_global_state, check_seeds, False, promised={"random": True}),
    fails(bad.ignores_the_seed, check_seeds, False, promised={"random": True}),
    fails(bad.ignores_the_seed, check_global_seed, False, promised={"random": True}),
    fails(bad.accumulates_in_half, check_finite, False, torch.float16, 1e4, False),
    fails(bad.accumulates_in_half, check_finite, False, torch.float16, 1e4, True),
    fails(bad.never_subtracts_the_maximum, check_finite, False, torch.float32, 100.0, False),
    fails(bad.sums_in_half, check_sums, False, torch.bfloat16),
    fails(bad.sums_in_half, check_sums, True, torch.bfloat16),
    fails(bad.detaches_the_keys, check_gradients, False, 13, 2),
    fails(bad.forgets_the_denominator, check_gradients, False, 13, 2),
    fails(bad.forgets_the_denominator, check_gradients, True, 140, 2, fast_mode=True),
    fails(bad.never_converges, check_converges, False),
    fails(bad.stops_short, check_converges, False),
    fails(bad.stops_short, check_converges_in_expectation, False),
    fails(bad.branches_on_values, check_compiles, False),
    pytest.param(bad.builds_all_pairs, check_memory_of, (), {}, {}, marks=needs_proc, id="check_memory"),
]


@pytest.mark.parametrize(("form", "check", "arguments", "promised", "options"), CAUGHT)
def test_checks_catch_broken_methods(form, check, arguments, promised, options):
    with bad.broken(form, **promised) as instance, pytest.raises((AssertionError, RuntimeError)) as caught:
        check(instance, *arguments, **options)
    # A method that raises where it should compute is caught as well, but only the one that is made to.
    assert isinstance(caught.value, AssertionError) or form is bad.needs_even_lengths


def test_checks_pass_a_correct_method():
    with bad.broken(bad.correct) as instance:
        for is_causal in (False, True):
            check_shapes(instance, is_causal, "holes", q_len=7, value_dim=5)
            check_exact(instance, is_causal, 8, "holes")
            check_masked_gradients(instance, is_causal)
            check_empty_rows(instance, is_causal)
            check_padding_beside(instance, is_causal, 20, 5, 5)
            check_holes(instance, is_causal, 50)
            check_batch(instance, is_causal)
            check_seeds(instance, is_causal)
            check_finite(instance, is_causal, torch.float16, 1e4, True)
            check_sums(instance, is_causal, torch.bfloat16)
            check_gradients(instance, is_causal, 13, 2)
            check_compiles(instance, is_causal)
        check_future(instance, 30, 10)
        check_length(instance, 30, 10)


def test_every_method_is_tested():
    assert {i.method for i in INSTANCES} == set(hea.available_methods())
