"""auto: when attention is exact, and how heads are judged, beyond what the promises check."""

import dataclasses
from unittest.mock import Mock

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import hf_efficient_attn as hea
from hf_efficient_attn.methods import auto as module
from hf_efficient_attn.methods._shared.crossover import built_in_table
from hf_efficient_attn.ops import row_error
from hf_efficient_attn.ops.row_error import screening_error
from instances import inputs, numbers, relative_error

auto = hea.functional.auto_attention


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    """The number of rows that bound the error is that of users."""
    monkeypatch.setattr(row_error, "NUM_ROWS", 64)


def _mixed(length=700):
    """Two heads that few landmarks approximate well, and two whose queries attend to many keys that are all unlike."""
    query, key, value = inputs(1, 4, length, 8)
    centers = numbers(1, 2, 8, 8, seed=4).float()
    key[:, :2] = centers[:, :, torch.arange(length) * 7 % 8] + 0.05 * key[:, :2]
    return query, key, value


def _errors(tensors, **options):
    """The error of each head, with 64 columns."""
    ours, exact = auto(*tensors, columns=64, **options), scaled_dot_product_attention(*tensors)
    return [relative_error(ours[:, h], exact[:, h]) for h in range(ours.shape[1])]


def test_heads_above_the_bound_are_exact_and_the_others_are_not():
    tensors = _mixed()
    errors = _errors(tensors, crossover=400)
    assert all(1e-4 < error <= 0.1 for error in errors[:2]) and max(errors[2:]) < 1e-5
    assert min(_errors(tensors, crossover=100, max_error=0.0)[2:]) > 0.1


@pytest.fixture
def attempts(monkeypatch):
    """The number of heads and of columns of each attempt."""
    made = []
    within = row_error.attend_within_bound

    def attend(heads, forms, *args):
        def spy(query, key, value, columns):
            made.append((len(query), columns))
            return forms.approximate(query, key, value, columns)

        return within(heads, forms._replace(approximate=spy), *args)

    monkeypatch.setattr(module, "attend_within_bound", attend)
    return made


def test_a_head_gets_more_columns_before_it_becomes_exact(attempts):
    errors = _errors(_mixed(), crossover=100)
    assert len({columns for _, columns in attempts}) > 1
    assert all(1e-4 < error <= 0.1 for error in errors)


def test_heads_that_need_exact_attention_cost_next_to_no_attempts(monkeypatch, attempts):
    tensors = [x[:, 2:].repeat(2, 4, 1, 1) for x in _mixed(1200)]  # 2 sequences of 8 heads
    assert max(_errors(tensors, crossover=400)) < 1e-5
    assert not attempts  # the copies tell
    monkeypatch.setattr(row_error, "screening_error", lambda query, *_, **__: query.new_full(query.shape[:1], 0.1))
    assert max(_errors(tensors, crossover=400)) < 1e-5
    assert 2 <= sum(heads for heads, _ in attempts) <= 6  # of 16


def test_the_crossover_of_the_machine_is_that_of_one_sequence(monkeypatch):
    """With the whole batch it would depend on the batch."""
    length = Mock(return_value=150)
    monkeypatch.setattr(module, "crossover_length", length)
    auto(*inputs(batch=3, num_heads=2, q_len=200, head_dim=8, dtype=torch.bfloat16), columns=64, is_causal=True)
    expected = {"dtype": torch.bfloat16, "is_causal": True, "relative_cost": pytest.approx(0.3125 * 8 ** (5 / 12))}
    assert length.call_count == 1 and length.call_args.args == ("nearfar", 16)
    assert length.call_args.kwargs | expected == length.call_args.kwargs


def test_the_built_in_crossover_decides_before_the_machine_is_measured():
    config = hea.method_info("auto").config_class()
    length = built_in_table("cpu")["float32"].at(1024)
    # Without a bound all heads have near keys, which costs more than nearfar with its default hyperparameters.
    assert 0.9 * length < config.exact_length < dataclasses.replace(config, max_error=0.0).exact_length < 1.5 * length


@pytest.mark.parametrize("compiled", [False, True])
def test_with_a_gradient_or_a_drawn_seed_every_head_has_the_same_columns(compiled):
    """Reentrant checkpointing computes without a gradient first, and repeats the call for its gradients."""
    tensors = _mixed()
    attend = torch.compile(auto, backend="aot_eager") if compiled else auto
    outs = []
    for needs_grad in (False, True):
        torch.manual_seed(3)
        leaves = [x.clone().requires_grad_(needs_grad) for x in tensors]
        outs.append(attend(*leaves, columns=64, crossover=100, seed=None).detach())
    torch.testing.assert_close(*outs)
    assert not torch.allclose(outs[0], auto(*tensors, columns=64, crossover=100), atol=1e-3)
    plain = hea.attention(module._approximation(hea.method_info("auto").config_class(), 64), *tensors)
    torch.testing.assert_close(auto(*leaves, columns=64, crossover=100).detach(), plain, rtol=2e-4, atol=2e-4)


def test_the_static_form():
    """In training and in the causal form; the data decide in all other calls."""
    tensors = _mixed()
    leaves = [x.clone().requires_grad_() for x in tensors]
    sizes = {"columns": 64, "crossover": 100}
    options = {**sizes, "static_form": "exact"}
    torch.testing.assert_close(auto(*leaves, **options), scaled_dot_product_attention(*tensors))
    exact = scaled_dot_product_attention(*tensors, is_causal=True)
    torch.testing.assert_close(auto(*tensors, is_causal=True, **options), exact)
    torch.testing.assert_close(auto(*tensors, **options), auto(*tensors, **sizes))
    assert relative_error(auto(*tensors, **options), scaled_dot_product_attention(*tensors)) > 1e-3
    torch.testing.assert_close(*(auto(*tensors, **x, max_error=0.0) for x in (options, sizes)))


def test_the_copy_of_a_head_tells_whether_landmarks_approximate_it():
    query, key, value = (x[0] for x in _mixed(1200))
    error = screening_error(query, key, value, scale=8**-0.5)
    assert max(error[:2]) < 0.5 * min(error[2:])
    # Every head is judged apart from the others.
    torch.testing.assert_close(error[2:], screening_error(query[2:], key[2:], value[2:], scale=8**-0.5))
    assert screening_error(100.0 * query, 1e3 * key, value, scale=1.0).isfinite().all()
    assert (screening_error(query, key, torch.zeros_like(value), scale=1.0) == 0.0).all()
