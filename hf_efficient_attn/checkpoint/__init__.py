"""Checkpoints from untrusted sources: their files are checked first, and no code that comes with them runs."""

from hf_efficient_attn.checkpoint.loading import load_model
from hf_efficient_attn.checkpoint.source import CheckedSource, open_checkpoint

__all__ = ["CheckedSource", "load_model", "open_checkpoint"]
