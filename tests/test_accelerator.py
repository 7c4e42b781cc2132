"""The choice between the forms of an operation."""

import pytest
import torch

from hf_efficient_attn.ops.accelerator import backend, use_backend


def test_the_device_of_the_tensors_decides() -> None:
    assert backend(torch.empty(1)) == "cpu"
    assert backend(torch.empty(1, device="meta"), torch.empty(1)) == "library"


@pytest.mark.parametrize("name", ["cpu", "library", "triton"])
def test_a_context_overrides_the_device(name: str) -> None:
    with use_backend(name):
        assert backend(torch.empty(1)) == backend(torch.empty(1, device="meta")) == name
        with use_backend("cpu"):
            assert backend(torch.empty(1, device="meta")) == "cpu"
        assert backend(torch.empty(1)) == name
    assert backend(torch.empty(1)) == "cpu"


def test_an_unknown_form_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="there is no backend 'flash': choose one of cpu, library, triton"),
        use_backend("flash"),
    ):
        pass


def test_a_compiled_graph_follows_the_context() -> None:
    """The form is part of what a graph was compiled for."""

    @torch.compile(backend="eager", fullgraph=True)
    def form(x: torch.Tensor) -> torch.Tensor:
        return x + {"cpu": 0, "library": 1, "triton": 2}[backend(x)]

    assert form(torch.zeros(1)).item() == 0
    with use_backend("library"):
        assert form(torch.zeros(1)).item() == 1
