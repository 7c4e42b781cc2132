"""The eleven promises that every method keeps, checked on every instance.

A check is a function of an instance that raises `AssertionError` if the promise is broken. At the end of the file each
check runs on a method that breaks its promise, to show that it fails.
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

PADDINGS = ("none", "left", "right", "holes", "empty")


def draw_inputs(draw, instance: Instance, is_causal: bool, **fixed):
    """Arguments of `inputs` that the instance supports, with lengths from 1 to more than three budgets."""
    q_len = draw(st.one_of(st.just(1), st.integers(2, 45), st.integers(46, 150)), label="q_len")
    kv_len = q_len
    if instance.info.rectangular and not is_causal and draw(st.booleans(), label="rectangular"):
        kv_len = draw(st.integers(1, 150), label="kv_len")
    num_kv_heads = draw(st.integers(1, 2), label="num_kv_heads")
    head_dim = draw(st.integers(1, 9), label="head_dim")
    return {
        "batch": draw(st.integers(1, 3), label="batch"),
        "num_heads": num_kv_heads * draw(st.integers(1, 2), label="groups"),
        "num_kv_heads": num_kv_heads,
        "q_len": q_len,
        "kv_len": kv_len,
        "head_dim": head_dim,
        "value_dim": draw(st.sampled_from((head_dim, 1, 5)), label="value_dim"),
        "seed": draw(st.integers(0, 1000), label="seed"),
        **fixed,
    }


# 1. Shapes, and exactness within the budget.


def check_shapes(instance: Instance, is_causal: bool, padding: str = "none", **shape) -> None:
    """The output has the right shape and dtype and is finite."""
    query, key, value = inputs(**shape)
    key_mask = padding_mask(padding, key.shape[0], key.shape[2])
    out = instance(query, key, value, key_mask, is_causal=is_causal)
    assert out.shape == (*query.shape[:3], value.shape[3])
    assert out.dtype == value.dtype
    assert out.isfinite().all()


@each_form
@some_cases
@given(data=st.data(), padding=st.sampled_from(PADDINGS))
def test_any_shape(instance, is_causal, data, padding):
    check_shapes(instance, is_causal, padding, **draw_inputs(data.draw, instance, is_causal))


def check_exact(instance: Instance, is_causal: bool, length: int, padding: str = "none") -> None:
    """The output is that of `scaled_dot_product_attention` with a dense mask."""
    query, key, value = inputs(batch=2, q_len=length, dtype=torch.float64)
    key_mask = padding_mask(padding, 2, length)
    pairs = torch.ones(length, length, dtype=torch.bool)
    pairs = (pairs.tril() if is_causal else pairs).expand(2, 1, -1, -1)
    pairs = pairs if key_mask is None else pairs & key_mask[:, None, None]
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=pairs)
    out = instance(query, key, value, key_mask, is_causal=is_causal)
    exact = exact.masked_fill(~pairs.any(-1, keepdim=True), 0.0)
    torch.testing.assert_close(out, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("padding", PADDINGS)
@each_form
def test_exact_within_the_budget(instance, is_causal, padding):
    if not instance.budget:
        pytest.skip("the method never switches to exact attention")
    for length in (1, instance.budget - 1, instance.budget):
        check_exact(instance, is_causal, length, padding)
    with pytest.raises(AssertionError):
        check_exact(instance, is_causal, 2 * instance.budget)


# 2. Padding.


def check_masked_keys(instance: Instance, is_causal: bool, padding: str = "holes", **shape) -> None:
    """The outputs at valid queries are the same bit for bit, whatever the masked keys and values contain."""
    query, key, value = inputs(**shape)
    key_mask = padding_mask(padding, key.shape[0], key.shape[2])
    is_self_attention = query.shape[2] == key.shape[2]
    clean = instance(query, key, value, key_mask, is_causal=is_causal)
    for garbage in (torch.nan, torch.inf, -torch.inf, 1e30):
        changed = [x.masked_fill(~key_mask[:, None, :, None], garbage) for x in (key, value)]
        # In self-attention the padding has queries as well, and only the outputs of those may change.
        changed_query = query.masked_fill(~key_mask[:, None, :, None], garbage) if is_self_attention else query
        out = instance(changed_query, *changed, key_mask, is_causal=is_causal)
        valid = torch.ones(out.shape[:3], dtype=torch.bool)
        if is_self_attention:
            valid = key_mask[:, None, :].expand(out.shape[:3])
        assert torch.equal(out[valid], clean[valid]), f"{garbage} in masked keys changes the output"


@each_form
@some_cases
@given(data=st.data(), padding=st.sampled_from(PADDINGS[1:]))
def test_masked_keys_have_no_influence(instance, is_causal, data, padding):
    check_masked_keys(instance, is_causal, padding, **draw_inputs(data.draw, instance, is_causal))


def check_masked_gradients(instance: Instance, is_causal: bool) -> None:
    """NaN in masked keys and values reaches no gradient, and their own gradient is 0."""
    query, key, value = inputs(batch=2, q_len=70)
    key_mask = padding_mask("holes", 2, 70)
    key_mask[0, :3] = False
    leaves = [query, *(x.masked_fill(~key_mask[:, None, :, None], torch.nan) for x in (key, value))]
    leaves = [x.requires_grad_() for x in leaves]
    instance(*leaves, key_mask, is_causal=is_causal)[key_mask[:, None, :].expand(-1, 2, -1)].square().sum().backward()
    for leaf in leaves:
        assert leaf.grad.isfinite().all()
    for leaf in leaves[1:]:
        masked = leaf.grad[~key_mask[:, None, :].expand(-1, 2, -1)]
        assert torch.equal(masked, torch.zeros_like(masked))


@each_form
def test_masked_keys_have_no_influence_on_gradients(instance, is_causal):
    check_masked_gradients(instance, is_causal)


def check_queries_without_keys(instance: Instance, is_causal: bool, length: int = 90) -> None:
    """If all keys of a query are masked or in the future, its output is 0 and all gradients are finite."""
    leaves = [x.requires_grad_() for x in inputs(batch=2, q_len=length)]
    key_mask = torch.zeros(2, length, dtype=torch.bool)
    key_mask[1, length // 2 :] = True
    out = instance(*leaves, key_mask, is_causal=is_causal)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    if is_causal:
        before = out[1, :, : length // 2]
        assert torch.equal(before, torch.zeros_like(before))
    assert out.isfinite().all()
    assert out[1, :, length // 2 :].abs().amax(-1).min() > 0
    out.sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


@each_form
def test_outputs_of_queries_without_keys_are_zero(instance, is_causal):
    for length in (2, 30, 90, 300):
        check_queries_without_keys(instance, is_causal, length)


def check_padding(instance: Instance, is_causal: bool, length: int, before: int, after: int) -> None:
    """The output is that without padding: masked keys count in no mean, rank or denominator."""
    tensors = inputs(q_len=length, dtype=torch.float64)
    padded = [torch.nn.functional.pad(x, (0, 0, before, after), value=3.0) for x in tensors]
    other = inputs(q_len=before + length + after, dtype=torch.float64, seed=1)
    key_mask = torch.ones(2, before + length + after, dtype=torch.bool)
    key_mask[0, :before] = False
    key_mask[0, before + length :] = False
    both = instance(*(torch.cat(pair) for pair in zip(padded, other, strict=True)), key_mask, is_causal=is_causal)
    alone = instance(*tensors, is_causal=is_causal)
    torch.testing.assert_close(both[:1, :, before : before + length], alone, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(both[1:], instance(*other, is_causal=is_causal), rtol=1e-8, atol=1e-8)


@each_form
@some_cases
@given(length=st.integers(1, 130), before=st.integers(0, 90), after=st.integers(0, 90))
def test_padding_does_not_change_the_output(instance, is_causal, length, before, after):
    check_padding(instance, is_causal, length, before, after)


def check_holes(instance: Instance, is_causal: bool, length: int, seed: int = 0) -> None:
    """Masking tokens inside the sequence gives the output without these tokens."""
    tensors = inputs(q_len=length, dtype=torch.float64, seed=seed)
    key_mask = padding_mask("holes", 1, length, seed)
    key_mask[0, -1] = True
    out = instance(*tensors, key_mask, is_causal=is_causal)[:, :, key_mask[0]]
    alone = instance(*(x[:, :, key_mask[0]] for x in tensors), is_causal=is_causal)
    torch.testing.assert_close(out, alone, rtol=1e-8, atol=1e-8)


@each_form
def test_masked_tokens_inside_the_sequence_are_like_absent_ones(instance, is_causal):
    if instance.reads_positions:
        pytest.skip("the window depends on positions")
    for length, seed in ((1, 0), (50, 1), (70, 2), (200, 3)):
        check_holes(instance, is_causal, length, seed)


# 3. The future.


def check_future(instance: Instance, length: int, cut: int, padding: str = "none", seed: int = 0) -> None:
    """If all tokens from the cut on and their mask are replaced, the outputs before it are the same bit for bit."""
    # The fused kernel is used if value_dim equals head_dim, and the package's own kernel otherwise.
    shape = {"batch": 2, "num_heads": 2, "q_len": length, "num_kv_heads": 1, "head_dim": 6, "value_dim": 6 - seed % 2}
    original, other = inputs(**shape, seed=seed), inputs(**shape, seed=seed + 1, spread=40.0)
    key_mask, other_mask = (padding_mask(padding, 2, length, seed + i) for i in (0, 1))
    changed = [torch.cat((a[:, :, :cut], b[:, :, cut:]), 2) for a, b in zip(original, other, strict=True)]
    changed_mask = None if key_mask is None else torch.cat((key_mask[:, :cut], other_mask[:, cut:]), 1)
    out = instance(*original, key_mask, is_causal=True)
    assert torch.equal(instance(*changed, changed_mask, is_causal=True)[:, :, :cut], out[:, :, :cut])


CAUSAL = [i for i, is_causal in forms() if is_causal]
each_causal = pytest.mark.parametrize("instance", CAUSAL, ids=str)
# The block boundaries of the instances (8, 16, 40), those of blocks and chunks in the primitives (128, 256), and the
# positions next to them.
CUTS = sorted({max(0, at + offset) for at in (1, 8, 16, 24, 32, 40, 64, 128, 256, 300) for offset in (-1, 0, 1)})


@each_causal
def test_later_tokens_have_no_influence_at_block_boundaries(instance):
    for cut in CUTS:
        check_future(instance, 301, min(cut, 300), seed=cut)


@each_causal
@some_cases
@given(data=st.data(), length=st.integers(1, 200), padding=st.sampled_from(PADDINGS), seed=st.integers(0, 99))
def test_later_tokens_have_no_influence(instance, data, length, padding, seed):
    check_future(instance, length, data.draw(st.integers(0, length - 1), label="cut"), padding, seed)


def check_length(instance: Instance, length: int, cut: int) -> None:
    """An output does not depend on the number of later tokens."""
    whole = inputs(q_len=length, dtype=torch.float64)
    out = instance(*(x[:, :, :cut] for x in whole), is_causal=True)
    torch.testing.assert_close(out, instance(*whole, is_causal=True)[:, :, :cut], rtol=1e-9, atol=1e-9)


@each_causal
def test_the_number_of_later_tokens_has_no_influence(instance):
    for cut in CUTS:
        check_length(instance, 301, max(1, min(cut, 300)))


# 4. The batch.


def check_batch(instance: Instance, is_causal: bool, padding: str = "none", **shape) -> None:
    """The output of each sequence of a batch is that of the sequence alone."""
    shape = {"batch": 3, "dtype": torch.float64, **shape}
    tensors = inputs(**shape)
    key_mask = padding_mask(padding, shape["batch"], tensors[1].shape[2])
    out = instance(*tensors, key_mask, is_causal=is_causal)
    for b in range(shape["batch"]):
        own_mask = None if key_mask is None else key_mask[b : b + 1]
        alone = instance(*(x[b : b + 1] for x in tensors), own_mask, is_causal=is_causal)
        torch.testing.assert_close(out[b : b + 1], alone, rtol=1e-8, atol=1e-8)


@each_form
@some_cases
@given(data=st.data(), padding=st.sampled_from(PADDINGS))
def test_sequences_of_a_batch_are_independent(instance, is_causal, data, padding):
    fixed = {"batch": 3, "dtype": torch.float64}
    check_batch(instance, is_causal, padding, **draw_inputs(data.draw, instance, is_causal, **fixed))


@each_form
def test_sequences_of_a_large_batch_are_independent(instance, is_causal):
    """The batch is so large that the primitives compute a few heads at a time."""
    # Methods whose work depends on the data compute one head at a time in any case, and are slow.
    short, long = (300, 700) if instance.data_dependent else (1500, 5000)
    check_batch(instance, is_causal, "right", num_heads=4, num_kv_heads=2, q_len=short, head_dim=64)
    check_batch(instance, is_causal, num_heads=6, num_kv_heads=3, q_len=long, head_dim=64, batch=2)


# 5. Seeds.


def check_seeds(instance: Instance, is_causal: bool) -> None:
    """The seed alone determines the output, and the global generator is not used."""
    tensors = inputs(q_len=90)
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    first, again, other = (instance(*tensors, is_causal=is_causal, seed=s) for s in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator was used"
    assert torch.equal(first, again), "the same seed gave another output"
    assert torch.equal(first, other) != instance.random, "another seed"
    configured = hea.attention(instance.config(seed=3), *tensors, is_causal=is_causal)
    assert torch.equal(configured, first), "the config's seed is not the same as the call's"


def check_global_seed(instance: Instance, is_causal: bool) -> None:
    """With seed=None, for training, the state of the global generator determines the output."""
    tensors = inputs(q_len=90)
    outs = []
    for start in (0, 0, 1):
        torch.manual_seed(start)
        outs.append(instance(*tensors, is_causal=is_causal, seed=None))
    state = torch.random.get_rng_state()
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2]) != instance.random
    instance(*tensors, is_causal=is_causal, seed=None)
    assert torch.equal(torch.random.get_rng_state(), state) != instance.random


@each_form
def test_seeds(instance, is_causal):
    check_seeds(instance, is_causal)
    if instance.random:
        check_global_seed(instance, is_causal)


# 6. Finite outputs.


def check_finite(instance: Instance, is_causal: bool, dtype: torch.dtype, logit: float, autocast: bool) -> None:
    """Logits of both signs up to `logit`. With head_dim 64, q . k before scaling exceeds the largest float16 number."""
    head_dim, length = 64, 75
    size = (logit * head_dim**0.5 / head_dim) ** 0.5
    query, key, value = (x.sign() * size for x in inputs(q_len=length, head_dim=head_dim))
    key = torch.where(torch.arange(length)[:, None] % 3 == 0, query, key)
    key = torch.where(torch.arange(length)[:, None] % 3 == 1, -query, key)
    value = inputs(q_len=length, head_dim=head_dim, spread=100.0)[2]
    leaves = [x.to(dtype).requires_grad_() for x in (query, key, value)]
    key_mask = padding_mask("left", 1, length, 3)
    context = torch.autocast("cpu", dtype=dtype, enabled=autocast)
    with context:
        given = [x.float() if autocast else x for x in leaves]
        for mask in (None, key_mask):
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
    """Weights are summed in float32: the average of 700 equal values is this value up to the precision of `dtype`."""
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
    """Use the hash and the samples of the first call in all later calls, as the gradient does."""
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


def check_gradients(instance: Instance, is_causal: bool, length: int, value_dim: int, fast_mode=False) -> None:
    """Gradients agree with finite differences in float64, with hash and samples held fixed."""
    query, key, value = inputs(batch=2, num_heads=1, q_len=length, head_dim=2, value_dim=value_dim, dtype=torch.float64)
    key_mask = torch.ones(2, length, dtype=torch.bool)
    key_mask[0, -2:] = False
    key_mask[1, :1] = False

    def output(*leaves):
        out = hea.attention(instance.config(**instance.small), *leaves, attention_mask=key_mask, is_causal=is_causal)
        return out.masked_fill(~key_mask[:, None, :, None], 0.0)

    with held_plans():
        leaves = [x.requires_grad_() for x in (query, key, value)]
        assert torch.autograd.gradcheck(output, leaves, fast_mode=fast_mode, raise_exception=False)


@each_form
def test_gradients_agree_with_finite_differences(instance, is_causal):
    check_gradients(instance, is_causal, 13, 2)
    check_gradients(instance, is_causal, 13, 3)


@each_form
def test_gradients_across_chunks(instance, is_causal):
    """Sequences longer than the chunks of 128 tokens, in random directions."""
    check_gradients(instance, is_causal, 140, 2, fast_mode=True)
    check_gradients(instance, is_causal, 270, 3, fast_mode=True)


# 8. The budget.


def budget_error(instance, is_causal: bool, budget: int, length: int, seeds: int = 4, spread: float = 1.0) -> float:
    """The error with a budget relative to exact attention, as a root mean square over seeds."""
    tensors = inputs(q_len=length, head_dim=8, num_heads=4, dtype=torch.float64, spread=spread)
    exact = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=is_causal)
    config = instance.config().with_budget(budget)
    errors = [relative_error(hea.attention(config, *tensors, is_causal=is_causal, seed=s), exact) for s in range(seeds)]
    return (sum(e**2 for e in errors) / seeds) ** 0.5


def check_converges(instance: Instance, is_causal: bool, length: int = 200) -> None:
    """The error decreases with the budget, and is 0 if the budget is as large as the sequence."""
    errors = [budget_error(instance, is_causal, c, length) for c in (length // 8, length // 3, length - 20)]
    assert errors[0] > errors[1] > errors[2] > 0, errors
    assert budget_error(instance, is_causal, 2 * length + 1, length) < 1e-9


def check_converges_in_expectation(instance: Instance, is_causal: bool, length: int = 60) -> None:
    """Eight times the budget more than halves the error.

    The variance of random features grows with the exponential of the logits, so the inputs are half as large as usual.
    """
    errors = [budget_error(instance, is_causal, c, length, 8, spread=0.5) for c in (32, 256, 2048)]
    assert all(small < large / 2 for large, small in itertools.pairwise(errors)), errors


@each_form
def test_convergence_to_exact_attention_with_the_budget(instance, is_causal):
    if instance.limit == "none":
        pytest.skip("the method defines its own attention")
    check = check_converges if instance.limit == "exact" else check_converges_in_expectation
    check(instance, is_causal)


# 9. torch.compile.


def check_compiles(instance: Instance, is_causal: bool, backend: str = "aot_eager") -> None:
    """The graph has no break, so no branch depends on values. Output and gradients are those of eager mode."""
    leaves = [x.requires_grad_() for x in inputs(batch=2, q_len=61, dtype=torch.float64)]
    key_mask = padding_mask("left", 2, 61)
    torch._dynamo.reset()

    def call(query, key, value, mask):
        return instance(query, key, value, mask, is_causal=is_causal)

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    outs = []
    for form in (call, compiled):
        try:
            out = form(*leaves, key_mask)
        except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError) as error:
            raise AssertionError(f"it does not compile in one graph: {error}") from error
        outs.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for eager, other in zip(*outs, strict=True):
        torch.testing.assert_close(other, eager, rtol=1e-8, atol=1e-8)


@each_form
def test_compiles(instance, is_causal):
    if instance.data_dependent:
        pytest.skip("the amount of work depends on the data")
    check_compiles(instance, is_causal)


@pytest.mark.parametrize("name", ["kdeformer", "linear"])
def test_compiles_with_inductor(name):
    check_compiles(next(i for i in INSTANCES if i.method == name), name == "linear", backend="inductor")


# 10. Refusals: the message states what is refused, why, and what to do instead.


def refuses(sentence: str):
    return pytest.raises(hea.UnsupportedAttentionError, match=sentence)


@each_instance
def test_refuses_masks_of_other_shapes_and_dtypes(instance):
    tensors = inputs(batch=2, q_len=50)
    with refuses(r"4-D attention mask .*bool mask of shape \(2, 50\)"):
        instance(*tensors, torch.ones(2, 1, 50, 50, dtype=torch.bool))
    with refuses(r"must be bool \(2, 50\), True = attend; got torch.float32 \(2, 50\)"):
        instance(*tensors, torch.zeros(2, 50))
    with refuses(r"must be bool \(2, 50\).*torch.int64"):
        instance(*tensors, torch.ones(2, 50, dtype=torch.int64))
    for shape in ((2, 49), (1, 50), (50,), (2, 50, 50)):
        with refuses(r"must be bool \(2, 50\)"):
            instance(*tensors, torch.ones(shape, dtype=torch.bool))


@each_instance
def test_refuses_shapes_and_dtypes_that_do_not_fit_together(instance):
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
def test_refuses_unequal_lengths_without_a_rectangular_form(instance):
    query, key, value = inputs(q_len=50, kv_len=60)
    if instance.info.rectangular:
        assert instance(query, key, value).shape == query.shape
    else:
        with refuses("as many queries as keys; got 50 and 60"):
            instance(query, key, value)


@each_instance
@pytest.mark.parametrize("budget", [0, -3, 2.5, True, "64", None])
def test_refuses_impossible_budgets(instance, budget):
    with refuses("budget of .* columns is not possible"):
        instance.config().with_budget(budget)


def test_refuses_causal_attention_without_a_causal_form():
    with bad.broken(bad.correct, causal=False) as instance:
        tensors = inputs(q_len=20)
        assert instance(*tensors).isfinite().all()
        with refuses(r"correct: it has no causal form\. Methods that have one: .*longformer"):
            instance(*tensors, is_causal=True)


@each_instance
def test_refuses_unknown_names_and_suggests_the_most_similar(instance):
    tensors = inputs(q_len=20)
    name, known = instance.method, list(instance.config().to_dict())[-1]
    with refuses(rf"unknown attention method '{name}x'\. Did you mean '{name}'\? Known: .*performer"):
        hea.attention(name + "x", *tensors)
    with refuses(rf"{name}: unknown hyperparameter '{known}x'\. Did you mean '{known}'\?"):
        hea.attention(name, *tensors, **{known + "x": 1})
    with refuses(rf"{name}: unknown hyperparameter 'qqq'\. Known: .*{known}"):
        hea.attention(name, *tensors, qqq=1)
    with refuses("unknown attention method 3"):
        hea.attention(3, *tensors)


@each_instance
def test_refuses_impossible_seeds_and_dropout(instance):
    tensors = inputs(q_len=20)
    for dropout_p in (-0.1, 1.0, 2.0, math.nan):
        with refuses("dropout_p=.* must be at least 0 and below 1"):
            instance(*tensors, dropout_p=dropout_p)
    for seed in ("0", 1.5, [1]):
        with refuses("seed must be an integer or None, not "):
            instance(*tensors, seed=seed)


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
            tensors = [x.requires_grad_(backward) for x in instances.inputs(num_heads=1, q_len=length, head_dim=64)]
            mask = instances.padding_mask("left", 1, length) if masked else None
            reset()
            before = status("VmRSS")
            out = instance(*tensors, mask, is_causal=causal)
            if backward:
                out.sum().backward()
            peak = status("VmHWM")
    print(json.dumps([name, causal, backward, masked, peak - before]), flush=True)
"""


def extra_memory(cases: list) -> list:
    """The peak memory in MiB, in addition to its inputs, of a call with 32768 tokens in a child process, by case."""
    here = Path(__file__).parent
    path = os.pathsep.join((str(here), str(here.parent)))
    # Freed tensors are returned to the system at once, so that one case does not affect the next.
    environment = {**os.environ, "PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": str(1 << 18)}
    command = [sys.executable, "-c", CHILD, json.dumps(cases), str(LONG)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_memory(cases: list, limit: float) -> None:
    """The call needs at most `limit` times the memory of its inputs. One byte per pair would be 42 times as much."""
    inputs_mib = 3 * LONG * 64 * 4 / 2**20
    for *case, extra in extra_memory(cases):
        assert extra < limit * inputs_mib, f"{case}: {extra:.0f} MiB in addition to inputs of {inputs_mib:.0f} MiB"


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the test reads the peak from /proc, which only Linux has"
)


@needs_proc
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_memory_is_linear(masked):
    check_memory([(i.method, c, False, masked) for i in DEFAULTS for c in i.forms], limit=10)


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
def test_memory_is_linear_with_gradients(is_causal):
    check_memory([(i.method, is_causal, True, True) for i in DEFAULTS if is_causal in i.forms], limit=25)


# Each check fails on a method that breaks its promise.


def check_memory_of(instance: Instance) -> None:
    check_memory([(instance.method, False, False, False)], limit=10)


def fails(form, check, *arguments, promised=None, **options):
    """A case of `test_checks_fail_on_broken_methods`: `check` must fail on `form`."""
    return pytest.param(form, check, arguments, promised or {}, options, id=f"{check.__name__}-{form.__name__}")


BROKEN = [
    fails(bad.needs_even_lengths, check_shapes, False, q_len=7),
    fails(bad.returns_the_dimension_of_keys, check_shapes, False, value_dim=5),
    fails(bad.never_converges, check_exact, False, 8),
    fails(bad.counts_masked_keys, check_exact, False, 8, "holes"),
    fails(bad.reads_masked_queries, check_masked_keys, False),
    fails(bad.divides_by_the_norm_of_all_queries, check_masked_keys, True),
    fails(bad.queries_without_keys_give_nan, check_masked_gradients, True),
    fails(bad.queries_without_keys_have_no_gradient, check_masked_gradients, True),
    fails(bad.queries_without_keys_have_no_gradient, check_queries_without_keys, False),
    fails(bad.queries_without_keys_give_nan, check_queries_without_keys, False),
    fails(bad.queries_without_keys_give_nan, check_queries_without_keys, True),
    fails(bad.queries_without_keys_give_means, check_queries_without_keys, False),
    fails(bad.centred_on_all_keys, check_padding, False, 20, 0, 5),
    fails(bad.counts_masked_keys, check_padding, False, 20, 5, 0),
    fails(bad.counts_masked_keys, check_holes, True, 50),
    fails(bad.ignores_causality, check_future, 30, 10),
    fails(bad.maximum_over_the_sequence, check_future, 30, 10),
    fails(bad.sorts_the_sequence, check_future, 30, 10),
    fails(bad.depends_on_the_length, check_length, 30, 10),
    fails(bad.sorts_the_sequence, check_length, 30, 10),
    fails(bad.mixes_the_batch, check_batch, False),
    fails(bad.draws_by_batch_index, check_batch, True),
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


@pytest.mark.parametrize(("form", "check", "arguments", "promised", "options"), BROKEN)
def test_checks_fail_on_broken_methods(form, check, arguments, promised, options):
    with bad.broken(form, **promised) as instance, pytest.raises((AssertionError, RuntimeError)) as caught:
        check(instance, *arguments, **options)
    # Only this method is meant to raise another error.
    assert isinstance(caught.value, AssertionError) or form is bad.needs_even_lengths


def test_checks_pass_on_a_correct_method():
    with bad.broken(bad.correct) as instance:
        for is_causal in (False, True):
            check_shapes(instance, is_causal, "holes", q_len=7, value_dim=5)
            check_exact(instance, is_causal, 8, "holes")
            check_masked_gradients(instance, is_causal)
            check_queries_without_keys(instance, is_causal)
            check_padding(instance, is_causal, 20, 5, 5)
            check_holes(instance, is_causal, 50)
            check_batch(instance, is_causal)
            check_seeds(instance, is_causal)
            check_finite(instance, is_causal, torch.float16, 1e4, True)
            check_sums(instance, is_causal, torch.bfloat16)
            check_gradients(instance, is_causal, 13, 2)
            check_compiles(instance, is_causal)
        check_future(instance, 30, 10)
        check_length(instance, 30, 10)
