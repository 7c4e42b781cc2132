"""Budgets bound the cost of a call, counted and not timed, and say which sequences are exact."""

from functools import partial
from typing import NamedTuple

import pytest
import torch

import hf_efficient_attn as hea
from hf_efficient_attn.analysis import exact_output
from instances import APPROXIMATE, FIRST, inputs, relative_error
from recipes.common.counting import count

LENGTH, HEAD_DIM = 512, 16


class Cost(NamedTuple):
    """What a query costs: products in keys of exact attention, steps of sorting, and gathered keys."""

    keys: float
    sorting: float = 0.0
    gathered: float = 0.0


# With a budget of 64 columns, of the form that is not causal and of the causal one, planning included. Of a method
# without a row only the growth with the budget is bounded.
COSTS = {
    "approx_kmv": [Cost(130, 1825, 120)],
    "auto": [Cost(456, 1203, 22), Cost(318, 443, 27)],
    "eva": [Cost(65, 0, 2), Cost(70, 1, 4)],
    "flurka_eva": [Cost(67, 0, 2)],
    "flurka_linear": [Cost(77)],
    "flurka_performer": [Cost(66)],
    "hyperattention": [Cost(88, 19, 7), Cost(84, 0, 2)],
    "kdeformer": [Cost(110, 104, 7), Cost(132, 18, 3)],
    "linear": [Cost(20), Cost(106)],
    "linformer": [Cost(128)],
    "longformer": [Cost(94), Cost(63)],
    "nearfar": [Cost(456, 1203, 22), Cost(318, 443, 27)],
    "nystromformer": [Cost(114)],
    "performer": [Cost(128), Cost(343)],
    "reformer": [Cost(80, 38, 7)],
    "scatterbrain": [Cost(117, 1, 0), Cost(128)],
    "thinformer": [Cost(160, 0, 2)],
    "wildcat": [Cost(188, 16, 1)],
}
# The most keys that one more column of the budget costs.
GROWTH = 3.0


def cost(method: str, columns: int, is_causal: bool) -> Cost:
    config = hea.method_info(method).config_class(**APPROXIMATE.get(method, {})).with_budget(columns)
    tensors = inputs(1, 2, LENGTH, HEAD_DIM)
    with torch.no_grad():
        found = count(lambda: hea.attention(config, *tensors, is_causal=is_causal))
    # A key is multiplied and its value is multiplied: four operations for each of their numbers. Both are gathered.
    rows = 2 * LENGTH
    return Cost(found.products / (4 * HEAD_DIM * rows), found.sorting / rows, found.gathers / (2 * HEAD_DIM * rows))


@pytest.mark.parametrize(
    ("method", "is_causal"),
    [(i.method, c) for i in FIRST.values() for c in ((False, True) if i.info.causal else (False,))],
)
def test_a_budget_bounds_the_cost(method, is_causal):
    large = cost(method, 64, is_causal)
    if method not in COSTS:
        grown = (large.keys - cost(method, 32, is_causal).keys) / 32
        assert grown <= GROWTH, f"one more column of the budget of {method} costs {grown:.2f} more keys"
    else:
        for kind, found, usual in zip(Cost._fields, large, COSTS[method][is_causal], strict=True):
            assert found <= 1.15 * usual + 1, f"with 64 columns {method} costs {found:.0f} ({kind}), not {usual:.0f}"
    if method == "eva":  # a window longer than the sequence
        assert cost(method, 64 * LENGTH, is_causal).keys < 2.1 * LENGTH


@pytest.mark.parametrize("instance", [i for i in FIRST.values() if i.limit == "exact"], ids=str)
def test_the_exact_length_is_that_of_the_longest_exact_sequence(instance):
    """Longer ones are approximated, at least in one of the forms."""

    def error(length: int) -> float:
        tensors = inputs(q_len=length, dtype=torch.float64)
        calls = (partial(hea.attention, config), exact_output)
        pairs = ([call(*tensors, is_causal=c) for call in calls] for c in instance.forms)
        return max(relative_error(*pair) for pair in pairs)

    configs = [instance.config().with_budget(columns) for columns in (5, 6, 8, 9, 13, 20)]
    if instance.method == "eva":  # its two forms are exact at different lengths
        sizes = [(window, chunks) for window in (1, 3, 5, 7, 8) for chunks in (2, 7, 16, 31)]
        configs += [hea.EvaConfig(window_size=window, num_landmarks=chunks) for window, chunks in sizes]
    for config in configs:
        length = config.exact_length
        assert error(length) < 1e-9 and error(length + 1) > 1e-3, f"{length} tokens with {config}"
