"""Every method's outputs and gradients on fixed inputs are, bit for bit, those that an earlier revision recorded.

This test accompanies a refactoring and is deleted at its end. Record on the earlier revision and compare on the later
one, on the same machine:

    python tests/test_recorded_outputs.py recorded.json
    HEA_RECORDED=recorded.json python -m pytest tests/test_recorded_outputs.py
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch

import hf_efficient_attn as hea
from instances import INSTANCES, Instance, inputs, padding_mask

KINDS = ("none", "left", "holes")
SETTINGS = [
    (instance, is_causal, dtype) for instance in INSTANCES for is_causal in instance.forms
    for dtype in (torch.float32, torch.bfloat16)
]  # fmt: skip


def name_of(instance: Instance, is_causal: bool, dtype: torch.dtype) -> str:
    config = json.dumps(instance.config().to_dict(), sort_keys=True)
    return f"{config} causal={is_causal} {dtype}"


def digest(*tensors: torch.Tensor) -> str:
    """Hash of the bytes of some tensors."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def record(instance: Instance, is_causal: bool, dtype: torch.dtype) -> dict[str, str]:
    """Digests of outputs (with each kind of padding, with dropout, by the readable form) and of gradients."""
    torch.set_num_threads(1)
    config, found = instance.config(), {}
    base = inputs(2, 4, 173, 16, num_kv_heads=2, dtype=dtype, seed=3)
    for kind in KINDS:
        mask = padding_mask(kind, 2, 173, seed=5)
        with torch.no_grad():
            found[f"forward {kind}"] = digest(
                hea.attention(config, *base, attention_mask=mask, is_causal=is_causal, seed=1)
            )
            found[f"naive {kind}"] = digest(
                hea.naive_attention(config, *base, attention_mask=mask, is_causal=is_causal, seed=1)
            )
        leaves = [x.clone().requires_grad_() for x in base]
        out = hea.attention(config, *leaves, attention_mask=mask, is_causal=is_causal, seed=1)
        out.float().square().sum().backward()
        found[f"gradients {kind}"] = digest(out, *(x.grad for x in leaves))
    torch.manual_seed(0)
    found["dropout"] = digest(hea.attention(config, *base, is_causal=is_causal, dropout_p=0.3, seed=None))
    if instance.info.rectangular:
        query, key, value = inputs(1, 2, 91, 16, kv_len=140, value_dim=24, dtype=dtype, seed=7)
        found["rectangular"] = digest(hea.attention(config, query, key, value))
    if is_causal:
        query, key, value = inputs(1, 2, 3, 16, kv_len=140, dtype=dtype, seed=7)
        found["decode"] = digest(hea.attention(config, query, key, value, is_causal=True))
    return found


@pytest.mark.skipif("HEA_RECORDED" not in os.environ, reason="HEA_RECORDED names no recorded outputs")
@pytest.mark.parametrize(("instance", "is_causal", "dtype"), SETTINGS)
def test_outputs_are_those_recorded(instance, is_causal, dtype):
    recorded = json.loads(Path(os.environ["HEA_RECORDED"]).read_text())
    assert record(instance, is_causal, dtype) == recorded[name_of(instance, is_causal, dtype)]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps({name_of(*s): record(*s) for s in SETTINGS}, indent=1))
