"""The attack: it finds what breaks a promise, reduces it, prints how to repeat it, and reports."""

import dataclasses
import json
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
    "training_seeds": ["draws_without_a_seed", "ignores_the_seed"],
    "finite": ["never_subtracts_the_maximum", "accumulates_in_half"],
    "sums": ["sums_in_half"],
    "gradients": ["forgets_the_denominator", "detaches_the_keys"],
    "naive": ["never_converges"],
    "naive_gradients": ["detaches_the_keys"],
    "budget": ["stops_short", "never_converges"],
    "compiles": ["counts_its_calls"],
    "memory": ["builds_all_pairs"],
}
BY_THE_PACKAGE = ["state", "refused", "transaction"]


def only(name: str, rows: dict, cases: int) -> attack.Result:
    return attack.attack(rows, [name], cases=cases)


def test_every_promise_has_something_that_breaks_it():
    assert sorted([*BROKEN, *BY_THE_PACKAGE]) == sorted(PROMISES)
    assert {promise.number for promise in PROMISES.values()} == set(range(1, 13))


@pytest.mark.parametrize(("name", "form"), [(name, form) for name, forms in BROKEN.items() for form in forms])
def test_finds_a_method_that_breaks_the_promise(name, form, monkeypatch, capsys):
    # `test_failures_are_reduced` takes more tries.
    monkeypatch.setattr(attack, "_TRIES", 4)
    # What depends on the hyperparameters is unknown, but not that these methods draw.
    facts = (lambda config: {"random": True}) if form == "ignores_the_seed" else (lambda config: {})
    with bad.broken(form, naive="correct", limit="exact", facts=facts) as row:
        result = only(name, {row.method: row}, {"compiles": 5, "memory": 1}.get(name, 15))
        assert result.failures[name, row.method] > 0
        case, message = result.found[0]
        # What is printed repeats the failure.
        line = next(line for line in capsys.readouterr().out.splitlines() if "--reproduce" in line)
        printed = Case.from_json(shlex.split(line)[-1])
        assert printed == case and attack.error_of(printed, row) is not None
        assert message.startswith(("AssertionError", "RuntimeError"))


def test_a_correct_method_breaks_no_promise():
    names = [name for name in PROMISES if name not in ("compiles", "memory")]  # it is dense
    with bad.broken("correct", limit="exact") as row:
        result = attack.attack({row.method: row}, names, cases=150)
    assert result.failures.total() == 0, result.found
    assert {name for name, _ in result.cases} >= set(BROKEN) - {"compiles", "memory", "gradients"}


@pytest.mark.parametrize("name", BY_THE_PACKAGE)
def test_finds_what_the_package_breaks(name, monkeypatch):
    def forgetting(config, state, *tensors, **options):
        return promises_state(config, None, *tensors, **options)

    def convert(model, *arguments, **options):
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        return hea_convert(model, *arguments, **options)

    promises_state, hea_convert = promises.attention_with_state, hea.convert
    monkeypatch.setattr(promises, "attention_with_state", forgetting)
    monkeypatch.setattr(call, "check_call", lambda *_: None)
    monkeypatch.setattr(hea, "convert", convert)
    assert only(name, {"linear": ROWS["linear"]}, 8).failures.total() > 0


@pytest.mark.parametrize("method", ROWS)
def test_dozens_of_cases_with_random_hyperparameters(method):
    """The matrix of `test_promises.py` has chosen hyperparameters."""
    names = [name for name in PROMISES if name not in ("compiles", "memory")]
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


@pytest.mark.slow
def test_a_minute_of_cases():
    result = attack.attack(ROWS, list(PROMISES), minutes=1.0, seed=2)
    assert result.failures.total() == 0, result.found
    assert result.cases.total() > 0


def test_failures_are_reduced():
    arguments = {"is_causal": False, "padding": "holes", "batch": 3, "q_len": 37, "kv_len": 37, "seed": 9}
    case = Case("shapes", "needs_even_lengths", {"columns": 17, "seed": 5}, arguments)
    with bad.broken("needs_even_lengths") as row:
        small, message = attack.reduce(case, attack.error_of(case, row), row)
    assert small.hyperparameters == {}
    assert small.arguments == {**arguments, "padding": "none", "batch": 1, "q_len": 1, "kv_len": 1, "seed": 0}
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


def test_command(tmp_path, capsys):
    file = tmp_path / "result.json"
    assert command("--cases", 12, "--method", "linear,longformer", "--promise", "refused,shapes", "--json", file) == 0
    out = capsys.readouterr().out
    assert "12 cases, 0 failures" in out
    for cell in ("| refused ", "| shapes ", "| linear ", "| longformer "):
        assert cell in out
    result = json.loads(file.read_text())
    assert (result["cases"], result["failures"], result["found"]) == (12, 0, [])
    assert sum(entry["cases"] for entry in result["by_promise_and_method"]) == 12


def test_command_for_a_given_time(capsys):
    assert command("--minutes", 0.01, "--promise", "refused") == 0
    assert " 0 failures" in capsys.readouterr().out


def test_command_with_failures(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(call, "check_call", lambda *_: None)
    file = tmp_path / "result.json"
    assert command("--cases", 20, "--method", "linear", "--promise", "refused", "--json", file) == 1
    captured = capsys.readouterr().out
    count = json.loads(file.read_text())["failures"]
    assert f"| refused | 10     | {count} of 20 |" in captured
    assert captured.count("FAILED refused of linear") == min(count, 5)
    case = json.loads(file.read_text())["found"][0]["case"]
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        command("--reproduce", json.dumps(case))
    monkeypatch.undo()
    assert command("--reproduce", json.dumps(case)) == 0
    assert "the promise was kept" in capsys.readouterr().out


def test_ctrl_c_shows_the_result_so_far(monkeypatch, tmp_path, capsys):
    def interrupted(case, row=None):
        if len(seen) == 3:
            raise KeyboardInterrupt
        seen.append(case)

    seen, file = [], tmp_path / "result.json"
    monkeypatch.setattr(attack, "error_of", interrupted)
    assert command("--minutes", 5, "--json", file) == 130
    assert "3 cases, 0 failures" in capsys.readouterr().out
    assert json.loads(file.read_text())["cases"] == 3


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
