"""Checkpoints from outside: opened with care, loaded without running anything that comes with them."""

from hf_efficient_attn.checkpoint.loading import load_model
from hf_efficient_attn.checkpoint.source import CheckedSource, open_checkpoint

__all__ = ["CheckedSource", "load_model", "open_checkpoint"]
