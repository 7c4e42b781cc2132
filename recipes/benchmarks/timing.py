"""Paired timing, which is the package's own: `hf_efficient_attn.evaluation.timing`."""

from hf_efficient_attn.evaluation.timing import UNSTEADY, Timing, Work, paired, summary, use_threads

__all__ = ["UNSTEADY", "Timing", "Work", "paired", "summary", "use_threads"]
