"""What runs a test on every form, row or method of `instances.py`, and the comparison of tensors."""

import pytest
import torch

from instances import DEFAULTS, FIRST, INSTANCES, forms

FIRST_FORMS = [pytest.param(i, c, id=f"{i.method}{'-causal' if c else ''}") for i in FIRST.values() for c in i.forms]
FORMS = [pytest.param(i, c, id=f"{i}{'-causal' if c else ''}") for i, c in forms()]
each_form = pytest.mark.parametrize(("instance", "is_causal"), FORMS)
each_first_form = pytest.mark.parametrize(("instance", "is_causal"), FIRST_FORMS)
each_instance = pytest.mark.parametrize("instance", INSTANCES, ids=str)
each_method = pytest.mark.parametrize("instance", DEFAULTS, ids=str)
# A sample for models in the core suite: sampled keys, states, landmarks, learned tables and chunks. Tests on tensors
# have all methods.
FEW = ("kdeformer", "linear", "nearfar", "longformer", "linformer", "flurka_eva")
few_methods = pytest.mark.parametrize(
    "method", [pytest.param(i.method, marks=() if i.method in FEW else pytest.mark.exhaustive) for i in DEFAULTS]
)


def close(ours, other, tolerance: float = 1e-9) -> None:
    """Equal up to a tolerance, absolute and relative."""
    torch.testing.assert_close(ours, other, rtol=tolerance, atol=tolerance)


def differs(ours, other, least: float = 0.01) -> bool:
    """Whether the relative difference is larger than `least`, so that a comparison can fail."""
    return ((ours - other).double().norm() / other.double().norm()).item() > least
