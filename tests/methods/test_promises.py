"""The promises that every method keeps: one matrix of random cases, and what has to be tested at chosen sizes.

The checks and the draws of their arguments are in `promises.py`. The last tests show that the checks can fail.
"""

import ast
from functools import partial
from itertools import product
from pathlib import Path

import hypothesis
import pytest
import torch
from torch import Tensor

import broken_methods as bad
import hf_efficient_attn as hea
import promises
from attack_cases import PROMISES, attack
from each import DEFAULT_FORMS, EVERY, Operators, each_first_form, each_form
from hf_efficient_attn.methods import learns
from hf_efficient_attn.ops import slices
from hf_efficient_attn.ops.backends import devices
from hf_efficient_attn.ops.backends.devices import product_dtype, sum_dtype
from instances import FIRST, HEADS, KV_HEADS, Instance, forms, inputs, padding_mask, parameters_of, relative_error
from promises import outputs_that_count


@pytest.fixture(autouse=True)
def half_products(monkeypatch):
    """Products of bfloat16 inputs are computed in bfloat16 whatever the processor."""
    monkeypatch.setattr(devices, "_CPU_HAS_BFLOAT16", True)


MATRIX = [
    pytest.param(name, i, c, id=f"{name}-{i}{'-causal' if c else ''}")
    for (name, promise), (i, c) in product(PROMISES.items(), EVERY)
    if name != "seeds" and promise.applies(i) and (c or name not in ("future", "length", "last_queries", "state"))
]
ATTACKS = []
for number, (promise, how) in enumerate(PROMISES.items()):
    applying = list(dict.fromkeys(i.method for i, _ in forms() if how.applies(i)))
    core = applying[number % len(applying)]  # another method for each promise
    marks = {method: pytest.mark.exhaustive for method in applying if method != core}
    ATTACKS += [pytest.param(promise, method, marks=marks.get(method, ())) for method in applying]


def number_of_cases(name):
    """About five; with `--hypothesis-profile attack` about fifty."""
    return max(1, round(hypothesis.settings().max_examples * PROMISES[name].share / 8))


@pytest.mark.parametrize(("name", "instance", "is_causal"), MATRIX)
def test_promise(name, instance, is_causal):
    attack(name, instance, number_of_cases(name), is_causal)


@pytest.mark.parametrize(("name", "method"), ATTACKS)
def test_attack(name, method):
    """The same with any hyperparameters."""
    attack(name, FIRST[method], number_of_cases(name))


def test_queries_of_masked_tokens_move_no_others():
    """An attack has found that they moved others between blocks of slots, which changed the last bit of outputs."""
    values = {"block_size": 28, "num_samples": 10, "num_hashes": 2, "near_field": "lsh", "columns": "all"}
    instance = FIRST["kdeformer"].vary({**values, "column_scores": "value_norm"})
    shape = {"q_len": 92, "num_heads": 1, "value_dim": 5, "seed": 6292, "dtype": torch.float64}
    promises.check_masked_keys(instance, True, "right", **shape)


# 2. The readable form, of sequences longer than all budgets and chunks. The Performer's has (N, N, features) numbers.


@pytest.mark.parametrize(("instance", "is_causal"), DEFAULT_FORMS, ids=str)
def test_the_fast_form_equals_the_readable_form_at_default_hyperparameters(instance, is_causal):
    promises.check_naive(instance, is_causal, num_heads=1, q_len=300 if "performer" in instance.method else 700)


@pytest.mark.parametrize("method", FIRST)
def test_every_row_equals_its_readable_form(method):
    """With padding, shared keys and gradients, also for rows that are not in the core suite."""
    shape = {"batch": 2, "q_len": 83, "num_kv_heads": 1, "head_dim": 6, "value_dim": 5}
    for instance, is_causal in forms():
        if instance.method == method:
            promises.check_naive(instance, is_causal, "holes", **shape)
            for kv_len in (40, 120) if instance.rectangular and not is_causal else ():
                promises.check_naive(instance, is_causal, "left", **shape, kv_len=kv_len, scale=0.7)
            padding = "none" if instance.reads_positions else "right"
            promises.check_naive_gradients(instance, is_causal, padding, **shape)


# 5. Seeds, of sequences that are approximated.


@each_form
def test_seeds(instance, is_causal):
    promises.check_seeds(instance, is_causal)


# 7. Gradients of learned parameters.


@pytest.mark.parametrize(("instance", "is_causal"), [(i, c) for i, c in EVERY if learns(i.config())], ids=str)
def test_gradients_of_learned_parameters(instance, is_causal):
    """Gradients agree with finite differences, and with the gradients of the readable form."""
    config, tensors = instance.reduced.config(), inputs(2, HEADS, 20, num_kv_heads=KV_HEADS, dtype=torch.float64)
    mask, options = torch.arange(20) < torch.tensor([[20], [13]]), {"is_causal": is_causal, "scale": 0.6}
    learned = {name: x.double().requires_grad_() for name, x in parameters_of(config, tensors[2]).items()}

    def output(form, *values):
        out = form(config, *tensors, attention_mask=mask, parameters=dict(zip(learned, values, strict=True)), **options)
        return out.masked_fill(~mask[:, None, :, None], 0.0)

    leaves = tuple(learned.values())
    assert torch.autograd.gradcheck(partial(output, hea.attention), leaves, fast_mode=True)
    outs = [output(form, *leaves) for form in (hea.attention, hea.naive_attention)]
    for ours, other in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in outs), strict=True):
        promises.assert_close(ours, other, 1e-8)
        assert ours.abs().sum() > 1e-3


# 8. The budget.


@pytest.mark.parametrize(("instance", "is_causal"), [(i, c) for i, c in forms() if i.limit != "none"], ids=str)
def test_convergence_to_exact_attention_with_the_budget(instance, is_causal):
    if instance.limit == "expectation":
        promises.check_converges_in_expectation(instance, is_causal)
    else:
        promises.check_converges(instance, is_causal)


# 11. Memory.

# With the default of approx_kmv, an error bound, it would take minutes.
AT_LENGTH = {"approx_kmv": {"num_samples": 256}}
# With gradients these reach the size of their slices late, and take seconds.
LATE = ("approx_kmv", "auto")


@pytest.mark.parametrize(
    ("instance", "is_causal"),
    [pytest.param(i, c, marks=[pytest.mark.exhaustive] * (i.method in LATE)) for i, c in DEFAULT_FORMS],
    ids=str,
)
def test_memory_grows_linearly(instance, is_causal):
    """It grows by less than 25 times what the inputs grow by, with a mask and gradients.

    One byte per pair would be 13 times as much for each tensor of all pairs.
    """
    lengths, peaks, sizes = (8192, 16384) if instance.method in LATE else (2048, 8192), [], []
    for length in lengths:
        leaves = [x.requires_grad_() for x in inputs(num_heads=1, q_len=length, head_dim=64)]
        instance, mask = Instance(instance.method, AT_LENGTH.get(instance.method, {})), padding_mask("left", 1, length)
        with promises.Memory() as memory:
            instance(*leaves, mask, is_causal=is_causal).sum().backward()
        peaks.append(memory.peak)
        sizes.append(sum(x.nbytes for x in leaves))
    assert peaks[1] - peaks[0] < 25 * (sizes[1] - sizes[0])


# Results in bfloat16 and with slices of other sizes than those of the CPU.

# An odd length, keys that several heads share, and values of another dimension: no dimension is a multiple of 8.
ODD = {"batch": 2, "num_heads": 4, "num_kv_heads": 2, "q_len": 83, "head_dim": 12, "value_dim": 7}
# FlashAttention and its form for the CPU need values of the dimension of the keys.
EVEN = ODD | {"q_len": 96, "head_dim": 16, "value_dim": 16}


def results(instance: Instance, is_causal: bool, mask: Tensor, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Outputs at valid queries, and the gradients of a weighted sum of them."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = instance(*leaves, mask, is_causal=is_causal)
    weight = inputs(1, *out.shape[1:], dtype=torch.float64, seed=7)[0]
    out = out.masked_fill(~outputs_that_count(mask, out).unsqueeze(-1), 0.0)
    return [out, *torch.autograd.grad((out * weight).sum(), leaves, materialize_grads=True)]


def check_close(ours: list[Tensor], other: list[Tensor], tolerance: float) -> None:
    for name, x, y in zip(("out", "query", "key", "value"), ours, other, strict=True):
        assert relative_error(x, y) <= tolerance, f"{name} differs by {relative_error(x, y)}"


def error_of(out: Tensor, mask: Tensor, tensors: tuple[Tensor, ...], is_causal: bool) -> float:
    """The error of an output at valid queries relative to exact attention in float64."""
    exact = hea.analysis.exact_output(*tensors, attention_mask=mask, is_causal=is_causal)
    return relative_error(out, exact.masked_fill(~outputs_that_count(mask, exact).unsqueeze(-1), 0.0))


# Methods that hash tokens or choose keys by scores: after rounding a few hashes and keys are others.
BY_SCORES = ("auto", "hyperattention", "kdeformer", "nearfar", "reformer")


@each_form
def test_the_size_of_a_slice_changes_rounding_only(instance, is_causal, monkeypatch):
    """One head or block at a time, and all at once as on an accelerator, with gradients; methods do not see it."""
    tensors, mask, found = inputs(**ODD, dtype=torch.float64), padding_mask("holes", 2, ODD["q_len"]), []
    for numel in (1, slices.ACCELERATOR_NUMEL):
        monkeypatch.setattr(slices, "CPU_NUMEL", numel)
        found.append(results(instance, is_causal, mask, tensors))
    check_close(*found, 1e-9)


@each_form
def test_the_bfloat16_form_is_close_to_float64(instance, is_causal):
    for shape in (ODD, EVEN):
        tensors = inputs(**shape, dtype=torch.bfloat16)
        mask = padding_mask("holes", shape["batch"], shape["q_len"])
        ours, exact = (results(instance, is_causal, mask, x) for x in (tensors, tuple(x.double() for x in tensors)))
        if instance.method not in BY_SCORES:
            check_close(ours, exact, 0.025)
        ours_error, exact_error = (error_of(x[0], mask, tensors, is_causal) for x in (ours, exact))
        assert ours_error <= 1.05 * exact_error + 0.01


@each_form
def test_compute_dtype_is_a_call_with_bfloat16(instance, is_causal):
    """Bit for bit, with a mask and shared keys; the output and the gradients are float32."""
    tensors, mask = inputs(**ODD), padding_mask("left", ODD["batch"], ODD["q_len"])
    ours = results(instance.row(compute_dtype="bfloat16"), is_causal, mask, tensors)
    other = results(instance, is_causal, mask, tuple(x.bfloat16() for x in tensors))
    assert {x.dtype for x in ours} == {torch.float32}
    assert torch.equal(ours[0], other[0].float())
    check_close(ours, other, 0.01)


@pytest.fixture
def medium_precision():
    """Products of float32 tensors in bfloat16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@each_first_form
def test_the_form_with_medium_precision_is_close_to_float64(instance, is_causal, medium_precision):
    tensors, mask = inputs(**ODD), padding_mask("holes", ODD["batch"], ODD["q_len"])
    ours, exact = (results(instance, is_causal, mask, x) for x in (tensors, tuple(x.double() for x in tensors)))
    assert {x.dtype for x in ours} == {torch.float32}
    if instance.method not in BY_SCORES:
        check_close(ours, exact, 0.025)


def test_dtype_of_products(monkeypatch, medium_precision):
    half, single, double = torch.bfloat16, torch.float32, torch.float64
    x = torch.ones(2)
    dtypes = (half, torch.float16, single, double)
    assert [product_dtype(x.to(t)) for t in dtypes] == [half, single, half, double]
    torch.set_float32_matmul_precision("high")
    assert [product_dtype(x.to(t)) for t in dtypes] == [half, single, single, double]
    on_device = x.to("meta", torch.float16)
    assert product_dtype(on_device) == torch.float16
    assert sum_dtype(on_device) == single
    monkeypatch.setattr(devices, "_CPU_HAS_BFLOAT16", False)
    assert product_dtype(x.to(half)) == single


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_first_form
def test_where_half_precision_is_slow_nothing_is_multiplied_in_it(instance, is_causal, dtype, monkeypatch):
    """Not even what only plans: hashes of such numbers took kdeformer on an EPYC with AVX2 as long as all the rest."""
    monkeypatch.setattr(devices, "_CPU_HAS_BFLOAT16", False)
    kinds = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm}
    products = []
    with Operators(lambda operator, args, x: products.append(x.dtype) if operator.overloadpacket in kinds else None):
        results(instance, is_causal, padding_mask("holes", ODD["batch"], ODD["q_len"]), inputs(**ODD, dtype=dtype))
    assert dtype not in products


# Methods that break promises, and words of the sentences with which the checks fail.

BROKEN = {
    "shapes": ("needs_even_lengths", "the call fails with RuntimeError"),
    "exact": ("never_converges", "is not that of exact attention. .*difference: [0-9]"),
    "arguments": ("writes_to_its_inputs", r"has written to its query: \d+ of \d+ numbers differ, by up to [0-9]"),
    "masked_keys": ("reads_masked_queries", "nan in masked keys changes the output: .* the first at .* is nan and not"),
    "empty_queries": ("attends_to_masked_keys", "of padding only is not 0: .* by up to [0-9]"),
    "padding": ("counts_masked_keys", "padding changes the output of the other tokens. .*difference: [0-9]"),
    "future": ("ignores_causality", r"later tokens change .*: \d+ of \d+ numbers differ, by up to [0-9]"),
    "length": ("depends_on_the_length", "the number of later tokens changes .*difference: [0-9]"),
    "last_queries": ("reads_masked_queries", "with a cache the output of the last queries .*difference: [0-9]"),
    "batch": ("mixes_the_batch", "another output alone than in a batch. .*difference: [0-9]"),
    "seeds": ("draws_from_the_global_state", "the global generator was used"),
    "sums": ("depends_on_the_length", "the average of equal values differs from them by [0-9]"),
    "gradients": ("detaches_the_keys", "a gradient is not that of finite differences. .*respect to the key"),
    "naive": ("never_converges", "`forward` and `naive` differ. .*difference: [0-9]"),
    "naive_gradients": ("detaches_the_keys", "the gradients of `forward` and `naive` differ. .*difference: [0-9]"),
    "whole_budget": ("never_converges", r"with a budget of all \d+ tokens the error is [0-9.e-]+, not 0"),
    "largest_tensor": ("correct", r"16 times as many have \[\d"),  # it is dense
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_correct_method_passes_and_a_broken_one_fails_with_a_sentence(name):
    method, words = BROKEN[name]
    if method != "correct":
        with bad.broken("correct", limit="exact") as row:
            attack(name, row, 8)
    # The method, the check with its arguments, and the promise.
    sentence = rf"(?s){method}.* breaks the promise of check_{name}\(.*\): [A-Z].*\. But .*{words}"
    with bad.broken(method, naive="correct", limit="exact") as row, pytest.raises(AssertionError, match=sentence):
        attack(name, row, 5 if name == "largest_tensor" else 15, phases=[hypothesis.Phase.generate])


def test_every_check_says_what_failed():
    """Users run the checks without pytest, which would show the values of a comparison."""
    for node in ast.walk(ast.parse(Path(promises.__file__).read_text(encoding="utf-8"))):
        assert not isinstance(node, ast.Assert) or node.msg is not None, node.lineno
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("assert_close", "assert_same"):
            assert len(node.args) == 3 + (ast.unparse(node.func) == "assert_close"), node.lineno
    checks = [value for name, value in vars(promises).items() if name.startswith("check_")]
    assert all(hasattr(check, "__wrapped__") for check in checks)  # @Promise or @explained


def test_an_overflow_in_half_precision_is_named():
    message = "with logits up to 10000 in torch.float16, the output has .* numbers that are NaN or infinite"
    with bad.broken("multiplies_in_half_precision") as instance, pytest.raises(AssertionError, match=message):
        promises.check_finite(instance, False, torch.float16, 1e4, False)


def test_a_seed_without_an_effect_and_an_error_that_stays_are_noticed():
    message = "another seed gave the same output"
    with bad.broken("ignores_the_seed", random=True) as instance, pytest.raises(AssertionError, match=message):
        promises.check_seeds(instance, False)
    for check in (promises.check_converges, promises.check_converges_in_expectation):
        with bad.broken("never_converges") as instance, pytest.raises(AssertionError):
            check(instance, False)
