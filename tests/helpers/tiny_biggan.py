"""A tiny BigGAN of which every part affects the output, and its inputs and images."""

import torch

from hf_efficient_attn.models.biggan import BigGANConfig, BigGANModel, truncated_noise

# Images of 32 pixels; attention works at 16 x 16 pixels, with 256 queries and 64 keys.
LAYERS = [[True, 16, 8], [False, 8, 8], [True, 8, 4], [False, 4, 2], [True, 2, 1]]
SIZES = {"channel_width": 8, "z_dim": 12, "num_classes": 6, "layers": LAYERS, "attention_layer_position": 3}


@torch.no_grad()
def randomized(model: torch.nn.Module, sharpness: float = 1.5):
    """Return a model of this package or of the original one in eval mode, every part of which affects the output."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("gamma"):
            parameter.fill_(0.8)
        elif parameter.ndim > 1:
            std = sharpness if "theta" in name or "phi" in name else 1.0
            parameter.copy_(std * noise / parameter[0].numel() ** 0.5)
        else:
            parameter.copy_(0.6 * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("running_means"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
        elif name.endswith("running_vars"):
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    # Steps of the power iteration, since the vectors of a spectral norm still belong to the weights before.
    model.train()
    for _ in range(30 if any(name.endswith("_u") for name, _ in model.named_buffers()) else 0):
        model(
            torch.randn(1, 12, generator=generator), torch.rand(1, model.config.num_classes, generator=generator), 0.5
        )
    return model.eval()


def tiny(sharpness: float = 1.5, **changes) -> BigGANModel:
    return randomized(BigGANModel(BigGANConfig(**{**SIZES, **changes})), sharpness)


def inputs(batch: int = 3, truncation: float = 0.5) -> dict:
    z = truncated_noise(batch, SIZES["z_dim"], truncation, seed=5)
    return {"z": z, "class_label": torch.arange(batch) % SIZES["num_classes"], "truncation": truncation}


@torch.no_grad()
def images(model: BigGANModel, **changes) -> torch.Tensor:
    return model(**{**inputs(), **changes}).images


def enable_checkpointing(model, **options) -> None:
    """By the name that this version of Transformers has; it changed in 5.23."""
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{kind}_checkpointing_enable")(options)
