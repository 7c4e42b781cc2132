"""What runs a test on every form, row or method of `instances.py`, comparisons, refusals, and a readable `attend`."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hf_efficient_attn as hea
from hf_efficient_attn.ops.attend import Partial, safe_row_max
from instances import DEFAULTS, FIRST, INSTANCES, VARIANTS, WITH_SINKS, forms

FIRST_FORMS = [pytest.param(i, c, id=f"{i.method}{'-causal' if c else ''}") for i in FIRST.values() for c in i.forms]
FORMS = [pytest.param(i, c, id=f"{i}{'-causal' if c else ''}") for i, c in forms()]
DEFAULT_FORMS = [(instance, is_causal) for instance in DEFAULTS for is_causal in instance.forms]
# All forms of all rows. Of the variants Longformer, the last one, has a causal form with a bias.
EVERY = [*forms(), *((variant, False) for variant in VARIANTS), (VARIANTS[-1], True)]
EVERY += [(instance, is_causal) for instance in WITH_SINKS for is_causal in instance.forms]
each_form = pytest.mark.parametrize(("instance", "is_causal"), FORMS)
each_first_form = pytest.mark.parametrize(("instance", "is_causal"), FIRST_FORMS)
each_instance = pytest.mark.parametrize("instance", INSTANCES, ids=str)
each_method = pytest.mark.parametrize("instance", DEFAULTS, ids=str)
# A sample for models in the core suite: sampled keys, states, landmarks, learned tables and chunks. Tests on tensors
# have all methods.
FEW = ("kdeformer", "linear", "nearfar", "longformer", "linformer", "flurka_eva")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install 'hf_efficient_attn[gpu-test]'"
)
# Where the kernels of Triton run. On the CPU that is the interpreter.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
few_methods = pytest.mark.parametrize(
    "method", [pytest.param(i.method, marks=() if i.method in FEW else pytest.mark.exhaustive) for i in DEFAULTS]
)


def close(ours, other, tolerance: float = 1e-9) -> None:
    """Equal up to a tolerance, absolute and relative."""
    torch.testing.assert_close(ours, other, rtol=tolerance, atol=tolerance)


def differs(ours, other, least: float = 0.01) -> bool:
    """Whether the relative difference is larger than `least`, so that a comparison can fail."""
    return ((ours - other).double().norm() / other.double().norm()).item() > least


def refuses(
    message: str | None,
    call: Callable[..., Any],
    *given: Any,
    error: type | tuple[type, ...] = hea.UnsupportedAttentionError,
    **named: Any,
) -> str:
    """Check that a call is refused with a message, or with any if it is None; the whole message."""
    with pytest.raises(error, match=message) as refusal:
        call(*given, **named)
    return str(refusal.value)


class Operators(TorchDispatchMode):
    """Calls `see(operator, arguments, result)` after each operator."""

    def __init__(self, see):
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.see(operator, args, result)
        return result


def attend_naive(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *, scale: float) -> Partial:
    """The readable form of `attend`, with the same arguments and result."""
    scores = query @ key.transpose(-1, -2) * scale + (0.0 if bias is None else bias)
    # Not by logsumexp, whose gradient is NaN if all pairs of a query are excluded.
    row_max = safe_row_max(scores.detach().amax(-1, keepdim=True)) if scores.shape[-1] else scores.new_zeros(())
    weights = torch.exp(scores - row_max)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    return Partial(weights / total @ value, (total.log() + row_max).masked_fill(empty, -torch.inf).squeeze(-1))


def count_moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the bytes that kernels in Triton's interpreter load and store with a mask from now on, in one number."""
    from triton.runtime.interpreter import InterpreterBuilder

    moved = [0]

    def counted(function: Callable[..., Any], position: int) -> Callable[..., Any]:
        def call(self: Any, pointers: Any, *given: Any) -> Any:
            moved[0] += int(given[position].data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
            return function(self, pointers, *given)

        return call

    for name, position in (("load", 0), ("store", 1)):
        function = getattr(InterpreterBuilder, f"create_masked_{name}")
        monkeypatch.setattr(InterpreterBuilder, f"create_masked_{name}", counted(function, position))
    return moved
