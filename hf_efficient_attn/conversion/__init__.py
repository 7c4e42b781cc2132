"""Conversion of models in memory (`convert`, `extend_positions`) and of checkpoint folders (`checkpoint`)."""

from hf_efficient_attn.conversion.convert import convert as convert
from hf_efficient_attn.conversion.convert import extend_positions as extend_positions
