"""Model cards of converted checkpoints, and the way to the Hugging Face Hub."""

from hf_efficient_attn.hub.card import write_card
