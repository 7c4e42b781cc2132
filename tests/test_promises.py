"""The promises that every method keeps, checked on every instance.

The checks are in `promises.py`. At the end of the file each of them runs on a method that breaks its promise, to show
that it fails.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import broken_methods as bad
import hf_efficient_attn as hea
from instances import DEFAULTS, INSTANCES, Instance, forms, inputs
from promises import (
    REFUSED,
    check_batch,
    check_bounded,
    check_compiles,
    check_converges,
    check_converges_in_expectation,
    check_exact,
    check_finite,
    check_future,
    check_global_seed,
    check_gradients,
    check_holes,
    check_largest_tensor,
    check_length,
    check_masked_gradients,
    check_masked_keys,
    check_padding,
    check_queries_without_keys,
    check_refused,
    check_seeds,
    check_shapes,
    check_sums,
)

FORMS = [pytest.param(i, c, id=f"{i}{'-causal' if c else ''}") for i, c in forms()]
each_form = pytest.mark.parametrize(("instance", "is_causal"), FORMS)
each_instance = pytest.mark.parametrize("instance", INSTANCES, ids=str)
some_cases = settings(max_examples=12, deadline=None, derandomize=True)

PADDINGS = ("none", "left", "right", "holes", "empty")


def draw_inputs(draw, instance: Instance, is_causal: bool, **fixed):
    """Arguments of `inputs` that the instance supports, with lengths from 1 to more than three budgets."""
    q_len = draw(st.one_of(st.just(1), st.integers(2, 45), st.integers(46, 150)), label="q_len")
    kv_len = q_len
    if instance.rectangular and not is_causal and draw(st.booleans(), label="rectangular"):
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


@each_form
@some_cases
@given(data=st.data(), padding=st.sampled_from(PADDINGS))
def test_any_shape(instance, is_causal, data, padding):
    check_shapes(instance, is_causal, padding, **draw_inputs(data.draw, instance, is_causal))


@pytest.mark.parametrize("padding", PADDINGS)
@each_form
def test_exact_within_the_budget(instance, is_causal, padding):
    if not instance.budget:
        pytest.skip("the method never switches to exact attention")
    for length in (1, instance.budget - 1, instance.budget):
        check_exact(instance, is_causal, length, padding)
    with pytest.raises(AssertionError):
        # Heads whose error is bounded have 2.25 times the budget.
        check_exact(instance, is_causal, (3 if instance.limit == "bounded" else 2) * instance.budget)


# 2. Padding.


@each_form
@some_cases
@given(data=st.data(), padding=st.sampled_from(PADDINGS[1:]))
def test_masked_keys_have_no_influence(instance, is_causal, data, padding):
    check_masked_keys(instance, is_causal, padding, **draw_inputs(data.draw, instance, is_causal))


@each_form
def test_masked_keys_have_no_influence_on_gradients(instance, is_causal):
    check_masked_gradients(instance, is_causal)


@each_form
def test_outputs_of_queries_without_keys_are_zero(instance, is_causal):
    for length in (2, 30, 90, 300):
        check_queries_without_keys(instance, is_causal, length)


@each_form
@some_cases
@given(length=st.integers(1, 130), before=st.integers(0, 90), after=st.integers(0, 90))
def test_padding_does_not_change_the_output(instance, is_causal, length, before, after):
    check_padding(instance, is_causal, length, before, after)


@each_form
def test_masked_tokens_inside_the_sequence_are_like_absent_ones(instance, is_causal):
    if instance.reads_positions:
        pytest.skip("the window depends on positions")
    for length, seed in ((1, 0), (50, 1), (70, 2), (200, 3)):
        check_holes(instance, is_causal, length, seed)


# 3. The future.


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


@each_causal
def test_the_number_of_later_tokens_has_no_influence(instance):
    for cut in CUTS:
        check_length(instance, 301, max(1, min(cut, 300)))


# 4. The batch.


@each_form
@some_cases
@given(data=st.data(), padding=st.sampled_from(PADDINGS))
def test_sequences_of_a_batch_are_independent(instance, is_causal, data, padding):
    fixed = {"batch": 3, "dtype": torch.float64}
    check_batch(instance, is_causal, padding, **draw_inputs(data.draw, instance, is_causal, **fixed))


@pytest.mark.exhaustive
@each_form
def test_sequences_of_a_large_batch_are_independent(instance, is_causal):
    """The batch is so large that the primitives compute a few heads at a time."""
    # Methods whose work depends on the data compute one head at a time in any case, and are slow.
    short, long = (300, 700) if instance.data_dependent else (1500, 5000)
    if "max_length" in instance.hyperparameters:
        instance = instance.vary({**instance.hyperparameters, "max_length": long})
    check_batch(instance, is_causal, "right", num_heads=4, num_kv_heads=2, q_len=short, head_dim=64)
    check_batch(instance, is_causal, num_heads=6, num_kv_heads=3, q_len=long, head_dim=64, batch=2)


# 5. Seeds.


@each_form
def test_seeds(instance, is_causal):
    check_seeds(instance, is_causal)
    if instance.random:
        check_global_seed(instance, is_causal)


# 6. Finite outputs.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@each_form
def test_finite(instance, is_causal, dtype):
    for logit, autocast in itertools.product((0.0, 1.0, 100.0, 1e4), (False, True)):
        if dtype != torch.float32 or not autocast:
            check_finite(instance, is_causal, dtype, logit, autocast)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each_form
def test_sums_are_kept_in_float32(instance, is_causal, dtype):
    check_sums(instance, is_causal, dtype)


# 7. Gradients.


@pytest.mark.parametrize("fast_mode", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
@each_form
def test_gradients_agree_with_finite_differences(instance, is_causal, fast_mode):
    """In a random direction, or for each element of the inputs."""
    check_gradients(instance, is_causal, 13, 3 if fast_mode else 2, fast_mode=fast_mode)


@each_form
def test_gradients_across_chunks(instance, is_causal):
    """Sequences longer than the chunks of 128 tokens, in random directions."""
    check_gradients(instance, is_causal, 140, 2, fast_mode=True)
    check_gradients(instance, is_causal, 270, 3, fast_mode=True)


# 8. The budget.


@each_form
def test_convergence_to_exact_attention_with_the_budget(instance, is_causal):
    if instance.limit == "none":
        pytest.skip("the method defines its own attention")
    if instance.limit == "bounded" and not is_causal:
        check_bounded(instance, is_causal)
    elif instance.limit == "expectation":
        check_converges_in_expectation(instance, is_causal)
    else:
        check_converges(instance, is_causal)


# 9. torch.compile.


@each_form
def test_compiles(instance, is_causal):
    """To one graph. Its gradient is that of eager mode."""
    check_compiles(instance, is_causal, "eager")


# Tracing the gradient takes three times as long.
@pytest.mark.exhaustive
@each_form
def test_compiles_with_its_gradient(instance, is_causal):
    check_compiles(instance, is_causal, "aot_eager")


@pytest.mark.parametrize("name", [pytest.param("kdeformer", marks=pytest.mark.exhaustive), "linear"])
def test_compiles_with_inductor(name):
    check_compiles(next(i for i in INSTANCES if i.method == name), name == "linear", backend="inductor")


# 10. Refusals: the message states what is refused, why, and what to do instead.


@each_instance
def test_refuses_what_does_not_fit_together(instance):
    for what in REFUSED:
        check_refused(instance, what)


def refuses(sentence: str):
    return pytest.raises(hea.UnsupportedAttentionError, match=sentence)


@each_instance
def test_refuses_unequal_lengths_without_a_rectangular_form(instance):
    query, key, value = inputs(q_len=50, kv_len=60)
    if instance.rectangular:
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


@each_form
def test_no_tensor_holds_all_pairs(instance, is_causal):
    check_largest_tensor(instance, is_causal, 600)


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the test reads the peak from /proc, which only Linux has"
)


@pytest.mark.exhaustive
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
    fails(bad.counts_its_calls, check_compiles, False),
    fails(bad.builds_all_pairs, check_largest_tensor, False, 300),
    pytest.param(
        bad.builds_all_pairs, check_memory_of, (), {}, {}, marks=[needs_proc, pytest.mark.exhaustive], id="check_memory"
    ),
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
