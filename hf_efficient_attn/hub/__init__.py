"""Model cards of converted checkpoints, and the way to the Hugging Face Hub."""

from hf_efficient_attn.hub.card import write_card
from hf_efficient_attn.hub.push import PushError, PushPlan, PushReport, plan_push, push
