"""Model cards of converted checkpoints, and uploading to the Hugging Face Hub."""

from hf_efficient_attn.hub.card import write_card
from hf_efficient_attn.hub.push import PushError, PushPlan, PushReport, plan_push, push

__all__ = ["PushError", "PushPlan", "PushReport", "plan_push", "push", "write_card"]
