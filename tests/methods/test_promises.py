"""The promises that every method keeps: one matrix of random cases, and what has to be tested at chosen sizes.

The checks are in `promises.py`, and `attack_cases.py` draws their arguments. `test_attack.py` shows that each check
fails on a method that breaks its promise.
"""

import json
import os
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path

import hypothesis
import pytest
import torch

import hf_efficient_attn as hea
import promises
from attack_cases import PROMISES, Case, attack, check, drawn_arguments
from each import each_form, each_instance
from hf_efficient_attn.methods import learns
from instances import DEFAULTS, FIRST, INSTANCES, VARIANTS, forms, inputs
from test_heads import HEADS, KV_HEADS, parameters_of

OF_CAUSAL_FORMS = ("future", "length", "last_queries", "state")
EVERY = [*forms(), *((variant, False) for variant in VARIANTS)]
MATRIX = [
    pytest.param(name, i, c, id=f"{name}-{i}{'-causal' if c else ''}")
    for (name, promise), (i, c) in product(PROMISES.items(), EVERY)
    if name != "seeds" and promise.applies(i) and (c or name not in OF_CAUSAL_FORMS)
]
ATTACKS = []
for number, (promise, how) in enumerate(PROMISES.items()):
    applying = list(dict.fromkeys(i.method for i in INSTANCES if how.applies(i)))
    core = applying[number % len(applying)]  # another method for each promise
    ATTACKS += [
        pytest.param(promise, method, marks=[] if method == core else pytest.mark.exhaustive) for method in applying
    ]


def number_of_cases(name):
    """About five; with `--hypothesis-profile attack` about fifty."""
    return max(1, round(hypothesis.settings().max_examples * PROMISES[name].share / 8))


@pytest.mark.parametrize(("name", "instance", "is_causal"), MATRIX)
def test_promise(name, instance, is_causal):
    @hypothesis.seed(f"{name}:{instance}:{is_causal}")
    @hypothesis.settings(max_examples=number_of_cases(name))
    @hypothesis.given(drawn_arguments(name, instance, is_causal))
    def run(arguments):
        check(name, instance, arguments)

    run()


@pytest.mark.parametrize(("name", "method"), ATTACKS)
def test_attack(name, method):
    """The same with any hyperparameters."""
    attack(name, FIRST[method], number_of_cases(name))


# Cases that an attack has found.
FOUND = [
    # The queries of masked tokens moved others between blocks of slots, which changed the last bit of their outputs.
    Case(
        "masked_keys",
        "kdeformer",
        {
            "block_size": 28, "num_samples": 10, "num_hashes": 2, "near_field": "lsh", "columns": "all",
            "column_scores": "value_norm",
        },
        {
            "is_causal": True, "padding": "right", "q_len": 92, "num_heads": 1, "value_dim": 5, "seed": 6292,
            "dtype": torch.float64,
        },
    ),
    # The tables are float32 if the inputs are float64, so an average can exceed the values by their rounding.
    Case(
        "shapes",
        "linformer",
        {"projection_dim": 1, "max_length": 150},
        {"is_causal": False, "q_len": 1, "num_heads": 1, "head_dim": 1, "content": "outlier", "dtype": torch.float64},
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", FOUND, ids=range(len(FOUND)))
def test_what_an_attack_has_found_is_repaired(case):
    case.check()


# 2. The readable form, of sequences longer than all budgets and chunks. The Performer's has (N, N, features) numbers.


@pytest.mark.parametrize(("instance", "is_causal"), [(i, c) for i in DEFAULTS for c in i.forms], ids=str)
def test_the_fast_form_equals_the_readable_form_at_default_hyperparameters(instance, is_causal):
    promises.check_naive(instance, is_causal, num_heads=1, q_len=300 if "performer" in instance.method else 700)


@each_form
def test_padding_of_longer_sequences(instance, is_causal):
    """Sampling by values leaves out some of more than 383."""
    if "max_length" in instance.hyperparameters:
        pytest.skip("its tables have a longest sequence")
    for padding in ("left", "right"):
        promises.check_padding(instance, is_causal, 801, padding, seed=1)


# 3. The future. The block boundaries of the instances (8, 16, 40), those of blocks and chunks in the primitives (128,
# 256), and the positions next to them.


CUTS = (7, 8, 16, 39, 40, 127, 128, 129, 255, 256, 257)


@pytest.mark.parametrize("instance", [i for i, is_causal in forms() if is_causal], ids=str)
def test_later_tokens_have_no_influence_at_block_boundaries(instance):
    for cut in CUTS:
        promises.check_future(instance, 301, cut, seed=cut)
    for cut in (1, 128, 257):
        promises.check_length(instance, 301, cut)


# 4. The batch.


@pytest.mark.exhaustive
@each_form
def test_sequences_of_a_large_batch_are_independent(instance, is_causal):
    """The batch is so large that the primitives compute a few heads at a time."""
    # Methods whose work depends on the data compute one head at a time in any case, and are slow.
    short, long = (300, 700) if instance.data_dependent else (1500, 5000)
    if "max_length" in instance.hyperparameters:
        instance = instance.vary({**instance.hyperparameters, "max_length": long})
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    promises.check_batch(instance, is_causal, "right", q_len=short, **heads)
    promises.check_batch(instance, is_causal, q_len=long, batch=2, **heads)


# 5. Seeds, of sequences that are approximated.


@each_form
def test_seeds(instance, is_causal):
    promises.check_seeds(instance, is_causal)


# 7. Gradients of sequences longer than the chunks of 128 tokens, and for each element of short ones.


@pytest.mark.parametrize(("instance", "is_causal"), EVERY, ids=str)
def test_gradients_agree_with_finite_differences(instance, is_causal):
    promises.check_gradients(instance, is_causal, 140, 2, fast_mode=True)
    promises.check_gradients(instance, is_causal, 270, 3, fast_mode=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("instance", "is_causal"), EVERY, ids=str)
def test_every_element_of_the_gradients(instance, is_causal):
    promises.check_gradients(instance, is_causal, 13, 2)


LEARNING = [(i, c) for i, c in EVERY if learns(i.config())]


@pytest.mark.parametrize(("instance", "is_causal"), LEARNING, ids=str)
def test_gradients_of_learned_parameters(instance, is_causal):
    """Gradients agree with finite differences, and with the gradients of the readable form."""
    config, tensors = instance.reduced.config(), inputs(2, HEADS, 20, num_kv_heads=KV_HEADS, dtype=torch.float64)
    mask, options = torch.arange(20) < torch.tensor([[20], [13]]), {"is_causal": is_causal, "scale": 0.6}
    learned = {name: x.double().requires_grad_() for name, x in parameters_of(config, tensors[2]).items()}

    def output(form, *values):
        parameters = dict(zip(learned, values, strict=True))
        out = form(config, *tensors, attention_mask=mask, parameters=parameters, **options)
        return out.masked_fill(~mask[:, None, :, None], 0.0)

    leaves = tuple(learned.values())
    assert torch.autograd.gradcheck(partial(output, hea.attention), leaves, fast_mode=True)
    outs = [output(form, *leaves) for form in (hea.attention, hea.naive_attention)]
    for ours, other in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in outs), strict=True):
        promises.assert_close(ours, other, 1e-8)
        assert ours.abs().sum() > 1e-3


# 8. The budget.


@each_form
def test_convergence_to_exact_attention_with_the_budget(instance, is_causal):
    if instance.limit == "none":
        pytest.skip("the method defines its own attention")
    if instance.limit == "expectation":
        promises.check_converges_in_expectation(instance, is_causal)
    else:
        promises.check_converges(instance, is_causal)


# 9. Refusals: the message states what is refused, why, and what to do instead.


def refuses(sentence: str):
    return pytest.raises(hea.UnsupportedAttentionError, match=sentence)


@each_instance
def test_refuses_forms_that_the_method_does_not_have(instance):
    query, key, value = inputs(q_len=50, kv_len=60)
    if instance.rectangular:
        assert instance(query, key, value).shape == query.shape
    else:
        with refuses("as many queries as keys; got 50 and 60"):
            instance(query, key, value)
    if not instance.info.causal:
        with refuses(rf"{instance.method}: it has no causal form\. Methods that have one: .*longformer"):
            instance(query, key[:, :, :50], value[:, :, :50], is_causal=True)


@each_instance
def test_refuses_impossible_budgets(instance):
    for budget in (0, -3, 2.5, True, "64", None):
        with refuses("budget of .* columns is not possible"):
            instance.config().with_budget(budget)


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


# 10. Memory.

LONG = 32768
CHILD = """
import json, sys
import instances
import hf_efficient_attn as hea

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) / 1024

def reset():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")

for name, causal, backward, masked in json.loads(sys.argv[1]):
    instance = instances.Instance(name, instances.AT_LENGTH.get(name, {}))
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


def check_memory(cases: list, limit: float) -> None:
    """A call in a child process needs at most `limit` times the memory of its inputs, in addition to them.

    One byte per pair would be 42 times as much.
    """
    here, inputs_mib = Path(__file__).parents[1], 3 * LONG * 64 * 4 / 2**20
    path = os.pathsep.join((str(here), str(here.parent)))
    # Freed tensors are returned to the system at once, so that one case does not affect the next.
    environment = {**os.environ, "PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": str(1 << 18)}
    command = [sys.executable, "-c", CHILD, json.dumps(cases), str(LONG)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for *case, extra in map(json.loads, done.stdout.splitlines()):
        assert extra < limit * inputs_mib, f"{case}: {extra:.0f} MiB in addition to inputs of {inputs_mib:.0f} MiB"


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
