"""Conversion of models in memory (`convert`, `extend_positions`) and of checkpoint folders (`checkpoint`)."""

from hf_efficient_attn.conversion.convert import convert, extend_positions

__all__ = ["convert", "extend_positions"]
