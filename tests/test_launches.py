"""Kernels, synchronisations and memory of every method on an accelerator, counted on meta tensors."""

import csv
from typing import NamedTuple

import pytest
import torch

import hf_efficient_attn as hea
from hf_efficient_attn import cli
from instances import DEFAULTS
from recipes.benchmarks import launches as recipe
from recipes.common.launches import Kernel, count, launches

LENGTHS = (8192, 131_072)
SHAPE = (1, 16, 64)  # B, H, D


class Most(NamedTuple):
    """Upper limits: kernels of a forward pass and of a training step, synchronisations, and peak / inputs."""

    forward: int = 60
    step: int = 150
    synchronisations: int = 0
    peak: float = 3.0


# The goals, by method. Memory has one at 131,072 tokens: in shorter sequences, tables of a fixed size count for more.
GOALS = {"linear": Most(forward=25, step=40)}

# What misses a goal today, by method, causality and length; None if it needs the values of a tensor. A figure may fall
# but not grow, and an entry that is no longer needed must go.
TODAY: dict[tuple[str, bool, int], Most | None] = {
    ("thinformer", False, 8192): Most(263, 266, 0, 2.72),
    ("thinformer", False, 131072): Most(399, 404, 0, 2.74),
}  # fmt: skip

# The amount of work depends on the data.
NOT_COUNTED = ("approx_kmv",)


def goal(method: str, length: int) -> Most:
    found = GOALS.get(method, Most())
    return found if length == max(LENGTHS) else found._replace(peak=float("inf"))


def cases() -> list:
    found = []
    for instance in DEFAULTS:
        for is_causal in instance.forms:
            for length in LENGTHS:
                key = instance.method, is_causal, length
                today = TODAY.get(key)
                # Thousands of kernels take seconds to count.
                marks = [pytest.mark.exhaustive] if today is not None and today.step > 1000 else []
                if instance.method not in NOT_COUNTED:
                    found.append(pytest.param(*key, marks=marks))
    return found


def measured(method: str, is_causal: bool, length: int, form: str = "library") -> Most:
    config = hea.method_info(method).config_class().to_measure()
    forward, step = (
        launches(config, length, is_causal=is_causal, backward=backward, shape=SHAPE, form=form)
        for backward in (False, True)
    )
    inputs = 3 * SHAPE[0] * SHAPE[1] * SHAPE[2] * length * 2
    return Most(forward.kernels, step.kernels, step.synchronisations.total(), forward.peak / inputs)


@pytest.mark.parametrize("form", ["library", "triton"])
@pytest.mark.parametrize(("method", "is_causal", "length"), cases())
def test_kernels_synchronisations_and_memory_are_within_the_goals(method, is_causal, length, form):
    key = method, is_causal, length
    wanted, today = goal(method, length), TODAY.get(key)
    if key in TODAY and today is None:
        with pytest.raises(hea.UnsupportedAttentionError, match="the call needs values"):
            measured(*key, form)
        return
    found = measured(*key, form)
    most = wanted if today is None else Most(*map(max, wanted, today))
    too_many = {name: value for name, value in found._asdict().items() if value > getattr(most, name)}
    assert not too_many, f"more than {most}; recipes.benchmarks.launches --top lists the operators"
    if today is not None and form == "library":
        reached = all(value <= limit for value, limit in zip(found, wanted, strict=True))
        assert not reached, f"{key} reaches its goals with {found}: remove it from TODAY"


def meta(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


def test_a_known_call():
    x, weight = meta(64, 32), meta(32, 16)

    def call():
        y = x @ weight
        z = y.t().relu()
        del y
        return torch.empty_like(z).copy_(z).sum()

    found = count(call)
    size = 64 * 16 * 4
    assert found.by_kernel == {
        Kernel(name, "autograd"): 1 for name in ("mm", "relu", "copy_", "sum")
    }  # no line of the package calls them
    assert found.kernels == 4
    assert found.read == (64 * 32 + 32 * 16) * 4 + 3 * size
    assert found.written == 3 * size + 4
    assert found.peak == 2 * size + 4  # the copy and z, with the sum
    assert not found.synchronisations
    assert found.host_to_device == 0


def test_memory_excludes_inputs_and_their_views():
    x = meta(64, 32)
    assert count(lambda: x.t().view(4, 8, 64)[1:]).peak == 0
    assert count(lambda: x.t().exp().neg()).peak == 2 * 64 * 32 * 4
    assert count(lambda: x.mul_(2.0)).peak == 0


def test_both_passes_are_counted():
    x = meta(64, 32, requires_grad=True)
    # exp; of the gradients: ones like the output, and their product with the output
    found = count(lambda: torch.autograd.grad(x.exp(), x, torch.ones_like(x)))
    assert sorted(kernel.operator for kernel in found.by_kernel) == ["exp", "mul", "ones_like"]
    assert found.kernels == 3


def test_traffic_through_an_index_and_of_expanded_tensors():
    x, index, rows = meta(1000, 8), meta(10, dtype=torch.int64), meta(10, 8)
    found = count(lambda: x.index_select(0, index))
    assert (found.read, found.written) == (10 * 8 * 4 + 10 * 8, 10 * 8 * 4)
    found = count(lambda: x.index_add_(0, index, rows))
    assert (found.read, found.written) == (10 * 8 * 4 + 10 * 8, 10 * 8 * 4)
    found = count(lambda: x + meta(1, 8).expand(1000, 8))
    assert (found.read, found.written) == (1000 * 8 * 4 + 8 * 4, 1000 * 8 * 4)


def test_operators_on_the_host_are_no_kernels():
    found = count(lambda: meta(4) * torch.tensor(2.0).add(1.0).sum())
    assert [kernel.operator for kernel in found.by_kernel] == ["mul"]
    assert not found.synchronisations


@pytest.mark.parametrize(
    ("call", "to_device", "waits"),
    [
        (lambda x: torch.tensor(3, device=x.device), 1, 1),
        (lambda x: torch.as_tensor([1, 2], device=x.device), 1, 1),
        (lambda x: x.new_tensor([1.0, 2.0]), 1, 1),
        (lambda x: torch.arange(4).to(x.device), 1, 1),
        (lambda x: x.copy_(torch.ones(4)), 1, 1),
        (lambda x: x[torch.tensor([0, 1])], 1, 1),
        (lambda x: torch.nonzero(x), 0, 1),
        (lambda x: x[x > 0], 0, 1),
        (lambda x: x.masked_fill(x > 0, 1.0), 0, 0),
        (lambda x: torch.full((), 3, device=x.device), 0, 0),
        (lambda x: torch.as_tensor(x), 0, 0),
        (lambda x: x.to(torch.bfloat16), 0, 0),
    ],
)
def test_what_waits_for_the_device(call, to_device, waits):
    x = meta(4)
    found = count(lambda: call(x))
    assert found.host_to_device == to_device
    assert found.synchronisations.total() == waits


@pytest.mark.parametrize(
    "call", [lambda x: x.sum().item(), lambda x: bool(x.sum() > 0), lambda x: x.cpu(), lambda x: x.masked_select(x > 0)]
)
def test_a_call_that_needs_values_is_refused(call):
    x = meta(4)
    with pytest.raises(hea.UnsupportedAttentionError, match="the call needs values at a line outside the package"):
        count(lambda: call(x))


def test_the_operators_of_the_package_are_entered():
    blocks, scale = [meta(2, 3, 8, 16) for _ in range(3)], 0.25
    found = count(lambda: torch.ops.hf_efficient_attn.partial_attention(*blocks, None, scale))
    assert found.kernels >= 1
    assert not [kernel for kernel in found.by_kernel if kernel.operator == "partial_attention"]
    assert all(kernel.line.startswith("ops/") for kernel in found.by_kernel)


def test_an_operator_that_cannot_be_entered_is_refused():
    library = torch.library.Library("hf_efficient_attn", "FRAGMENT")
    library.define("of_a_test(Tensor x) -> Tensor")
    library.impl("of_a_test", lambda x: x + 1, "Meta")
    with pytest.raises(hea.UnsupportedAttentionError, match="cannot be counted; define it"):
        count(lambda: torch.ops.hf_efficient_attn.of_a_test(meta(4)))


def test_exact_attention_is_a_fused_kernel():
    x = meta(1, 2, 64, 16, dtype=torch.bfloat16)
    attend = torch.nn.functional.scaled_dot_product_attention
    assert [k.operator for k in count(lambda: attend(x, x, x)).by_kernel] == ["_scaled_dot_product_flash_attention"]
    mask = meta(1, 1, 1, 64, dtype=torch.bool)
    masked = count(lambda: attend(x, x, x, attn_mask=mask))
    assert "_scaled_dot_product_efficient_attention" in {k.operator for k in masked.by_kernel}
    assert masked.peak < 64 * 64 * 2 * 2  # no matrix of all pairs


def run(*arguments):
    return cli.run(recipe.app, list(arguments), "launches")


def test_command(tmp_path, capsys):
    path = tmp_path / "launches.csv"
    arguments = ["--length", "512,1024", "--method", "linear,nystromformer:num_landmarks=8", "--heads", "2"]
    assert run(*arguments, "--top", "3", "--csv", str(path)) == 0
    out, _ = capsys.readouterr()
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = ("linear", "nystromformer (num_landmarks=8)")
    assert [(row["length"], row["method"]) for row in rows] == [(n, name) for n in ("512", "1024") for name in names]
    expected = launches(hea.LinearConfig(), 512, shape=(1, 2, 64))
    assert int(rows[0]["kernels"]) == expected.kernels > 0
    assert float(rows[0]["gigabytes"]) == expected.traffic / 1e9
    assert int(rows[0]["step_kernels"]) > expected.kernels
    assert "| kernels | operator" in out


def test_command_continues_after_a_method_that_cannot_be_counted(capsys):
    assert run("--length", "512", "--method", "approx_kmv:num_samples=16,linear", "--heads", "1") == 0
    out, err = capsys.readouterr()
    assert "| linear" in out
    assert err.startswith("approx_kmv (num_samples=16), 512 tokens: the call needs values")
    assert run("--length", "512", "--method", "approx_kmv:num_samples=16", "--heads", "1") == 2
    assert run("--length", "512", "--method", "linformer", "--causal") == 2
    assert "no causal form" in capsys.readouterr().err
