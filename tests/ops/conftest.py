"""The fixture of Triton's kernels, for all files of this folder."""

import pytest
import torch

from each import DEVICE
from hf_efficient_attn.ops import attend
from hf_efficient_attn.ops.backends import launches
from hf_efficient_attn.ops.nearfar import causal


@pytest.fixture
def kernels(monkeypatch):
    """The launches of the kernels, which take what they would take on a GPU, and are not checked."""
    launched, launch = [], launches.launch
    monkeypatch.setattr(launches, "launch", lambda call: (launched.append(call), launch(call)))
    if DEVICE == "cpu":
        monkeypatch.setattr(launches, "takes", lambda *x: all(y.dtype != torch.float64 for y in x))
    monkeypatch.setattr(launches, "passes_check", lambda *_: True)
    for module in (attend, causal):
        monkeypatch.setattr(module, "runs_block_kernels", lambda device: True)
    return launched
