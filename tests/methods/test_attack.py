"""Every check of a promise fails on a method that breaks the promise."""

import pytest
from hypothesis import Phase

import broken_methods as bad
import promises
from attack_cases import PROMISES, attack
from instances import FIRST

# Methods that break each promise. The package keeps the state.
BROKEN = {
    "shapes": ["needs_even_lengths"],
    "exact": ["never_converges"],
    "arguments": ["writes_to_its_inputs"],
    "masked_keys": ["reads_masked_queries"],
    "masked_gradients": ["queries_without_keys_give_nan"],
    "empty_queries": ["queries_without_keys_give_means", "queries_without_keys_give_nan"],
    "padding": ["counts_masked_keys"],
    "future": ["sorts_the_sequence", "ignores_causality"],
    "length": ["depends_on_the_length"],
    "last_queries": ["reads_masked_queries"],
    "batch": ["mixes_the_batch"],
    "seeds": ["draws_from_the_global_state"],
    "finite": ["accumulates_in_half"],
    "sums": ["sums_in_half"],
    "gradients": ["detaches_the_keys"],
    "naive": ["never_converges"],
    "naive_gradients": ["detaches_the_keys"],
    "whole_budget": ["stops_short", "never_converges"],
    "largest_tensor": ["builds_all_pairs"],
}


def check_found(name: str, row, cases: int) -> None:
    """One of some random cases of a promise fails."""
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        attack(name, row, cases, phases=[Phase.generate])


def test_every_promise_has_something_that_breaks_it():
    assert sorted([*BROKEN, "state"]) == sorted(PROMISES)


@pytest.mark.parametrize(("name", "form"), [(name, form) for name, forms in BROKEN.items() for form in forms])
def test_finds_a_method_that_breaks_the_promise(name, form):
    with bad.broken(form, naive="correct", limit="exact") as row:
        check_found(name, row, 5 if name == "largest_tensor" else 15)


@pytest.mark.parametrize("name", [name for name in BROKEN if name != "largest_tensor"])  # it is dense
def test_a_correct_method_breaks_no_promise(name):
    with bad.broken("correct", limit="exact") as row:
        attack(name, row, 8)


def test_finds_a_forgotten_state(monkeypatch):
    with_state = promises.attention_with_state

    def forgetting(config, state, *tensors, **options):
        return with_state(config, None, *tensors, **options)

    monkeypatch.setattr(promises, "attention_with_state", forgetting)
    check_found("state", FIRST["linear"], 8)


def test_a_seed_without_an_effect_is_noticed():
    with bad.broken("ignores_the_seed", random=True) as instance, pytest.raises(AssertionError, match="another seed"):
        promises.check_seeds(instance, False)


@pytest.mark.parametrize("form", ["never_converges", "stops_short"])
def test_an_error_that_does_not_go_to_0_with_the_budget_is_noticed(form):
    checks = (promises.check_converges, promises.check_converges_in_expectation)
    with bad.broken(form) as instance:
        for check in checks:
            with pytest.raises(AssertionError):
                check(instance, False)
