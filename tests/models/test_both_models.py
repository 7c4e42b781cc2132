"""BigGAN and T2T-ViT: half precision, gradients, and gradient checkpointing."""

import functools

import pytest
import torch

import hf_efficient_attn as hea
import test_biggan as biggan
import test_t2t_vit as t2t_vit
from each import close
from tiny_models import SMALL

# How to make a model in eval mode, and a loss of its output for six images.
biggan_of = functools.partial(biggan.tiny, sharpness=20.0)  # its logits reach some hundreds: they are not scaled
performer = functools.partial(t2t_vit.tiny, tokens_type="performer")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("make", "method"),
    [(biggan_of, "sdpa"), (biggan_of, "kdeformer"), (t2t_vit.tiny, "sdpa"), (performer, "sdpa")],
    ids=["biggan", "biggan-kdeformer", "t2t_vit", "performer"],
)
def test_half_precision(make, method, dtype):
    model = make()
    model.set_attn_implementation(method)
    run = biggan.images if make is biggan_of else t2t_vit.logits
    expected = run(model)
    with torch.autocast("cpu", dtype=dtype):
        mixed = run(model)
    for found in (mixed, run(model.to(dtype))):
        assert torch.isfinite(found).all() and (found.float() - expected).norm() < 0.35 * expected.norm()
    assert found.dtype == dtype


def loss_of(model) -> torch.Tensor:
    torch.manual_seed(1)
    if isinstance(model, biggan.BigGANModel):
        images = model(torch.randn(6, 12), torch.arange(6)).images
        return (images * torch.randn(6, 3, 32, 32)).sum()
    return model(t2t_vit.images(8, 3, 32, 32), labels=torch.arange(8) % 3).loss


DROPOUT = {"hidden_dropout_prob": 0.1, "drop_path_rate": 0.3, "token_dropout_prob": 0.1}
NORM = functools.partial(biggan.tiny, spectral_norm=True)
VIT = functools.partial(t2t_vit.tiny, **DROPOUT)


@pytest.mark.parametrize(
    ("make", "method"),
    [
        (biggan.tiny, "linformer"),
        (NORM, "kdeformer"),
        (functools.partial(performer, **DROPOUT), "sdpa"),
        *((VIT, method) for method in ("kdeformer", "flurka_linear", "nystromformer")),
    ],
)
def test_gradients_reach_every_parameter(make, method):
    """The same gradients with gradient checkpointing, reentrant or not."""
    found = []
    for checkpointing in (False,) if make is NORM else (False, True):
        model = hea.convert(make(), method, **SMALL.get(method, {})).train()
        if checkpointing:
            biggan.enable_checkpointing(model, use_reentrant=make is VIT)
            assert sum(getattr(module, "gradient_checkpointing", False) for module in model.modules()) >= 4
        loss_of(model).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    close(found[-1], found[0], 1e-5 if make is biggan.tiny else 0)
    for name, grad in found[0].items():
        # Learned parameters may be longer than the sequence, or the output may not depend on some of their directions,
        # and batch normalization by batch statistics cancels a preceding bias.
        is_unused = "learned_parameters" in name or name.endswith(("conv_0.bias", "conv_1.bias", "conv_2.bias"))
        assert torch.isfinite(grad).all() and (is_unused or grad.abs().sum() > 0), name
    frozen = {name: p.grad for name, p in model.named_parameters() if not p.requires_grad}
    assert all(name.endswith(("position_embeddings", ".w")) and grad is None for name, grad in frozen.items())
