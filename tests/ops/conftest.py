"""The fixture of Triton's kernels, for all files of this folder."""

import pytest


@pytest.fixture
def kernels(monkeypatch):
    """The launches of the kernels, which take what they would take on a GPU, and are not checked."""
    # Not at the top: this file is imported before `TRITON_INTERPRET` is set.
    import torch

    from hf_efficient_attn.ops import attend
    from hf_efficient_attn.ops.backends import launches
    from hf_efficient_attn.ops.nearfar import causal

    launched, launch = [], launches.launch
    monkeypatch.setattr(launches, "launch", lambda call: (launched.append(call), launch(call)))
    if not torch.cuda.is_available():
        monkeypatch.setattr(launches, "takes", lambda *x: all(y.dtype != torch.float64 for y in x))
    monkeypatch.setattr(launches, "passes_check", lambda *_: True)
    for module in (attend, causal):
        monkeypatch.setattr(module, "runs_block_kernels", lambda device: True)
    return launched
