"""Programs that measure and train with hf_efficient_attn; run from a checkout, not installed with the package."""
