"""auto: when attention is exact, and how heads are judged, beyond what the promises check."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import hf_efficient_attn as hea
from hf_efficient_attn.methods import auto as module
from hf_efficient_attn.methods._shared.crossover import built_in_table
from instances import inputs, numbers, relative_error

auto = hea.functional.auto_attention


def _mixed(length=700):
    """Two heads that few landmarks approximate well, and two whose queries attend to single keys far away."""
    query, key, value = (numbers(1, 4, length, 8, seed=i).float() for i in range(3))
    centers = numbers(1, 2, 20, 8, seed=4).float()
    key[:, :2] = centers[:, :, torch.arange(length) * 7 % 20] + 0.05 * key[:, :2]
    query[:, 2:] = 4.0 * key[:, 2:, torch.randperm(length, generator=torch.Generator().manual_seed(0))]
    return query, key, value


def _errors(ours, tensors):
    exact = scaled_dot_product_attention(*tensors)
    return [relative_error(ours[:, h], exact[:, h]) for h in range(ours.shape[1])]


def test_heads_above_the_bound_are_exact_and_the_others_are_not():
    tensors = _mixed()
    errors = _errors(auto(*tensors, columns=64, crossover=100), tensors)
    assert all(1e-4 < error <= 0.1 for error in errors[:2])
    assert all(error < 1e-5 for error in errors[2:])
    unbounded = _errors(auto(*tensors, columns=64, crossover=100, max_error=0.0), tensors)
    assert min(unbounded[2:]) > 0.1


def test_a_head_gets_more_columns_before_it_becomes_exact(monkeypatch):
    tried = []
    nearfar = module._nearfar
    monkeypatch.setattr(module, "_nearfar", lambda heads, n, o: tried.append(n) or nearfar(heads, n, o))
    query, key, value = _mixed()
    tensors = query[:, :2], key[:, :2] + 0.1 * key[:, 2:], value[:, :2]
    errors = _errors(auto(*tensors, columns=16, crossover=100, max_error=0.2), tensors)
    assert tried[0] == 16 and max(tried) in (32, 64)
    assert all(1e-4 < error <= 0.2 for error in errors)


def test_a_sequence_whose_best_head_fails_is_exact_after_one_attempt(monkeypatch):
    sizes = []
    nearfar = module._nearfar
    monkeypatch.setattr(module, "_nearfar", lambda heads, n, o: sizes.append(len(heads.query)) or nearfar(heads, n, o))
    query, key, value = _mixed()
    tensors = [x[:, 2:].repeat(2, 4, 1, 1) for x in (query, key, value)]  # 2 sequences of 8 heads
    assert max(_errors(auto(*tensors, columns=64, crossover=100), tensors)) < 1e-5
    assert sum(sizes) == 2


def test_up_to_the_crossover_every_sequence_is_exact():
    tensors = inputs(batch=2, num_heads=2, q_len=200, head_dim=8)
    key_mask = torch.ones(2, 200, dtype=torch.bool)
    key_mask[1, 90:] = False
    exact = scaled_dot_product_attention(*tensors, attn_mask=key_mask[:, None, None])
    options = {"attention_mask": key_mask, "columns": 20, "max_error": 0.0}
    torch.testing.assert_close(auto(*tensors, crossover=200, **options), exact)
    ours = auto(*tensors, crossover=100, **options)
    assert not torch.allclose(ours[0], exact[0], atol=1e-3)
    torch.testing.assert_close(ours[1], exact[1])


def test_the_crossover_of_the_machine_is_that_of_one_sequence(monkeypatch):
    """With the whole batch it would depend on the batch."""
    seen = []

    def length(method, total_dim, **options):
        seen.append((method, total_dim, options["dtype"], options["is_causal"], options["relative_cost"]))
        return 150

    monkeypatch.setattr(module, "crossover_length", length)
    tensors = inputs(batch=3, num_heads=2, q_len=200, head_dim=8, dtype=torch.bfloat16)
    auto(*tensors, columns=64, is_causal=True)
    assert seen == [("nearfar", 16, torch.bfloat16, True, 0.25)]


def test_the_built_in_crossover_decides_before_the_machine_is_measured():
    config = hea.method_info("auto").config_class()
    assert config.exact_length == built_in_table("cpu")["float32"].at(1024)


def test_with_a_gradient_every_head_has_the_same_columns():
    tensors = _mixed()
    plain = auto(*tensors, columns=64, crossover=100, max_error=0.0)
    leaves = [x.clone().requires_grad_() for x in tensors]
    torch.testing.assert_close(auto(*leaves, columns=64, crossover=100).detach(), plain)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "0.1", True, None])
def test_a_bound_that_is_no_number_is_refused(value):
    with pytest.raises(hea.UnsupportedAttentionError, match=r"max_error=.* must be (a number|at least 0)"):
        hea.method_info("auto").config_class(max_error=value)
