"""The attack: it finds what breaks a promise, reduces it, prints how to repeat it, and reports."""

import dataclasses
import random
import shlex

import pytest
import torch

import attack
import broken_methods as bad
import hf_efficient_attn as hea
import promises
from attack_cases import PROMISES, ROWS, Case, draw_case, draw_hyperparameters
from hf_efficient_attn.cli import run
from hf_efficient_attn.methods._shared import call

# Methods that break each promise. What is not here is done by the package: `test_finds_what_the_package_breaks`.
BROKEN = {
    "shapes": ["needs_even_lengths", "returns_the_dimension_of_keys"],
    "exact": ["never_converges", "counts_masked_keys"],
    "arguments": ["writes_to_its_inputs"],
    "masked_keys": ["reads_masked_queries", "divides_by_the_norm_of_all_queries"],
    "masked_gradients": ["queries_without_keys_give_nan", "queries_without_keys_have_no_gradient"],
    "empty_queries": [
        "queries_without_keys_give_means",
        "queries_without_keys_give_nan",
        "queries_without_keys_have_no_gradient",
    ],
    "padding": ["counts_masked_keys", "centred_on_all_keys"],
    "holes": ["counts_masked_keys"],
    "future": ["sorts_the_sequence", "ignores_causality", "maximum_over_the_sequence"],
    "length": ["depends_on_the_length", "sorts_the_sequence"],
    "last_queries": ["reads_masked_queries"],
    "batch": ["mixes_the_batch", "draws_by_batch_index"],
    "seeds": ["draws_from_the_global_state", "ignores_the_seed"],
    "global_seed": ["draws_without_a_seed", "ignores_the_seed"],
    "finite": ["never_subtracts_the_maximum", "accumulates_in_half"],
    "sums": ["sums_in_half"],
    "gradients": ["forgets_the_denominator", "detaches_the_keys"],
    "naive": ["never_converges"],
    "naive_gradients": ["detaches_the_keys"],
    "whole_budget": ["stops_short", "never_converges"],
    "compiles": ["counts_its_calls"],
    "largest_tensor": ["builds_all_pairs"],
}
BY_THE_PACKAGE = ["state", "refused", "transaction"]


def failing_case(name: str, row, cases: int) -> Case | None:
    """The first of some random cases of a promise that fails."""
    drawn = (draw_case(random.Random(f"0:{i}"), {row.method: row}, [name]) for i in range(cases))
    return next((case for case in drawn if case is not None and attack.error_of(case, row) is not None), None)


def test_every_promise_has_something_that_breaks_it():
    assert sorted([*BROKEN, *BY_THE_PACKAGE]) == sorted(PROMISES)
    assert {promise.number for promise in PROMISES.values()} == set(range(1, 13))


@pytest.mark.parametrize(("name", "form"), [(name, form) for name, forms in BROKEN.items() for form in forms])
def test_finds_a_method_that_breaks_the_promise(name, form):
    # What depends on the hyperparameters is unknown, but not that these methods draw.
    facts = (lambda config: {"random": True}) if form == "ignores_the_seed" else (lambda config: {})
    with bad.broken(form, naive="correct", limit="exact", facts=facts) as row:
        assert failing_case(name, row, 5 if name in ("compiles", "largest_tensor") else 15) is not None


def test_a_correct_method_breaks_no_promise():
    names = [name for name in PROMISES if name not in ("compiles", "largest_tensor")]  # it is dense
    with bad.broken("correct", limit="exact") as row:
        result = attack.attack({row.method: row}, names, cases=150)
    assert result.failures.total() == 0, result.found
    assert {name for name, _ in result.cases} >= set(BROKEN) - {"compiles", "largest_tensor", "gradients"}


@pytest.mark.parametrize("name", BY_THE_PACKAGE)
def test_finds_what_the_package_breaks(name, monkeypatch):
    def forgetting(config, state, *tensors, **options):
        return with_state(config, None, *tensors, **options)

    def convert(model, *arguments, **options):
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        return hea_convert(model, *arguments, **options)

    with_state, hea_convert = promises.attention_with_state, hea.convert
    monkeypatch.setattr(promises, "attention_with_state", forgetting)
    monkeypatch.setattr(call, "check_call", lambda *_: None)
    monkeypatch.setattr(hea, "convert", convert)
    assert failing_case(name, ROWS["linear"], 8) is not None


@pytest.mark.parametrize(
    "method", ["auto", *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ROWS if x != "auto")]
)
def test_dozens_of_cases_with_random_hyperparameters(method):
    """The matrix of `test_promises.py` has chosen hyperparameters."""
    names = [name for name in PROMISES if name not in ("compiles", "largest_tensor")]
    for promised, cases in ((["naive", "naive_gradients"], 30), (names, 15)):
        result = attack.attack({method: ROWS[method]}, promised, cases=cases)
        assert result.failures.total() == 0, result.found
        assert result.cases.total() == cases


# Cases that an attack has found, as it printed them.
FOUND = [
    # The queries of masked tokens moved others between blocks of slots, which changed the last bit of their outputs.
    '{"promise": "masked_keys", "method": "kdeformer", "hyperparameters": {"block_size": 28, "num_samples": 10, '
    '"num_hashes": 2, "near_field": "lsh", "columns": "all", "column_scores": "value_norm"}, "arguments": '
    '{"is_causal": true, "padding": "right", "q_len": 92, "num_heads": 1, "value_dim": 5, "seed": 6292, '
    '"dtype": "float64"}}',
    # The tables are float32 if the inputs are float64, so an average can exceed the values by their rounding.
    '{"promise": "shapes", "method": "linformer", "hyperparameters": {"projection_dim": 1, "max_length": 150}, '
    '"arguments": {"is_causal": false, "q_len": 1, "num_heads": 1, "head_dim": 1, "content": "outlier", "dtype": '
    '"float64"}}',
]


@pytest.mark.parametrize("case", FOUND, ids=range(len(FOUND)))
def test_what_was_found_is_repaired(case):
    Case.from_json(case).run()


def test_failures_are_reduced():
    arguments = {"is_causal": False, "padding": "holes", "batch": 3, "q_len": 37, "kv_len": 37, "seed": 9}
    case = Case("shapes", "needs_even_lengths", {"columns": 17, "seed": 5}, arguments)
    with bad.broken("needs_even_lengths") as row:
        small, message = attack.reduce(case, attack.error_of(case, row), row)
    assert small.hyperparameters == {}
    assert small.arguments == {**arguments, "padding": "none", "batch": 1, "q_len": 1, "kv_len": 1, "seed": 1}
    assert message.startswith("RuntimeError")


@pytest.mark.parametrize("method", ROWS)
def test_every_value_of_every_hyperparameter_is_drawn(method):
    rng = random.Random(0)
    drawn = [ROWS[method].vary(draw_hyperparameters(rng, ROWS[method])).config() for _ in range(300)]
    for spec in dataclasses.fields(drawn[0]):
        values = {getattr(config, spec.name) for config in drawn}
        if spec.name == "compute_dtype":
            continue
        if spec.metadata["choices"] is not None:
            assert values == set(spec.metadata["choices"])
        elif isinstance(spec.default, bool):
            assert values == {False, True}
        elif spec.name != "max_length":
            assert min(values) == spec.metadata["minimum"] and len(values) > 5


def test_the_seed_determines_the_cases():
    first, again, other = (
        [draw_case(random.Random(f"{seed}:{i}"), ROWS, list(PROMISES)) for i in range(20)] for seed in (0, 0, 1)
    )
    assert first == again != other
    for case in first:
        assert case is None or Case.from_json(case.to_json()) == case


# The command.


def command(*arguments) -> int:
    return run(attack.app, [str(x) for x in arguments], "attack")


def test_command(capsys):
    chosen = ("--method", "linear,longformer", "--promise", "refused,shapes")
    assert command("--cases", 12, "--minutes", 0.001, *chosen) == 0
    out = capsys.readouterr().out
    assert " 0 failures" in out and "| refused " in out and "| shapes " in out


def test_command_with_failures(monkeypatch, capsys):
    """What is printed repeats the failure."""
    monkeypatch.setattr(call, "check_call", lambda *_: None)
    assert command("--cases", 20, "--method", "linear", "--promise", "refused") == 1
    lines = capsys.readouterr().out.splitlines()
    assert 0 < sum(line.startswith("FAILED refused of linear") for line in lines) <= 5
    case = shlex.split(next(line for line in lines if "--reproduce" in line))[-1]
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        command("--reproduce", case)
    monkeypatch.undo()
    assert command("--reproduce", case) == 0
    assert "the promise was kept" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--method", "liner"], "Did you mean 'linear'"), (["--promise", "paddin"], "Did you mean 'padding'")],
)
def test_unknown_names_are_refused(arguments, message, capsys):
    assert command(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("form", ["never_converges", "stops_short"])
def test_an_error_that_does_not_go_to_0_with_the_budget_is_noticed(form):
    checks = (promises.check_converges, promises.check_converges_in_expectation)
    with bad.broken(form) as instance:
        for check in checks:
            with pytest.raises(AssertionError):
                check(instance, False)
