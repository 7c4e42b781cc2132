"""Every method that learns, with small sizes, and the learned parameters in a model."""

import torch

from hf_efficient_attn.integration.learned import LearnedParameters

LEARNING = {
    "eva": {"window_size": 8, "num_landmarks": 8, "proposal": "learned"},
    "linformer": {"projection_dim": 16, "share": "none"},
    "nystromformer": {"num_landmarks": 16, "conv_kernel_size": 3},
    "flurka_linear": {"projection_dim": 16},
    "flurka_performer": {"projection_dim": 16},
    "flurka_eva": {"projection_dim": 16},
    "linear": {"feature_map": "hedgehog", "num_features": 8, "window_size": 4},
    "performer": {"feature_map": "t2r", "num_features": 8},
}


def learned_in(model) -> dict[str, LearnedParameters]:
    return {name: m for name, m in model.named_modules() if isinstance(m, LearnedParameters)}


def shake(model):
    """Change every learned parameter, so that none has its start value."""
    with torch.no_grad():
        for module in learned_in(model).values():
            for parameter in module.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
    return model
