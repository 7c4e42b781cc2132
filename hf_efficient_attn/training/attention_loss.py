"""Losses of one attention layer for distillation: how far a method is from exact attention on the same inputs.

- "output": |out - exact|^2 / |exact|^2, summed over the valid queries of a head, averaged over sequences and heads.
- "weights": the cross entropy of the attention weights, sum_j -w_ij log(w'_ij) (Zhang et al., Hedgehog, ICLR 2024,
  Eq. 9), averaged over valid queries and heads, for blocks of keys: the weights of a block of keys are the output for
  values that are the block's columns of the identity. An (N, N) matrix is never held.
- "both": the sum of the two, with the cross entropy multiplied by `WEIGHTS_SHARE`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_name
from hf_efficient_attn.evaluation.capture import Call, exact_output
from hf_efficient_attn.methods import MethodConfig

LOSSES = ("output", "weights", "both")
# The cross entropy is some nats, and the loss of the output below 1.
WEIGHTS_SHARE = 0.1
# Keys of a block of weights.
_BLOCK = 128
# Smallest weight in a logarithm, as in float32's log(1e-9).
_LEAST = 1e-9


def check_loss(name: str) -> None:
    """Refuse an unknown loss."""
    if name not in LOSSES:
        raise UnsupportedAttentionError(unknown_name("loss", name, LOSSES))


def squared_error(call: Call, config: MethodConfig, parameters: Mapping[str, Tensor]) -> Tensor:
    """|out - exact|^2 / |exact|^2 over the valid queries of every sequence and head, without those of padding alone."""
    out, exact = call.compute(config, parameters).float(), call.exact.float()
    error, size = ((x.square().sum(-1) * _valid(call)).sum(-1) for x in (out - exact, exact))
    return (error / size.clamp(min=torch.finfo(size.dtype).tiny))[size > 0]


def relative_error(call: Call, config: MethodConfig, parameters: Mapping[str, Tensor]) -> float:
    """|out - exact| / |exact| in the Frobenius norm: the root of the loss "output"."""
    return squared_error(call, config, parameters).mean().sqrt().item()


def backward(call: Call, config: MethodConfig, parameters: Mapping[str, Tensor], loss: str) -> float:
    """Add the gradients of the loss of one call to those of the parameters, and return the loss.

    Args:
        call: the call, with the output of exact attention.
        config: the method.
        parameters: its learned parameters by name, which require gradients. Gradients must be enabled.
        loss: one of `LOSSES`.
    """
    total = 0.0
    if loss != "weights":
        errors = squared_error(call, config, parameters)
        value = errors.sum() / max(1, len(errors))
        value.backward()
        total = value.item()
    if loss == "output":
        return total
    valid = _valid(call).expand(*call.query.shape[:3])
    factor = (1.0 if loss == "weights" else WEIGHTS_SHARE) / max(1, int(valid.sum()))
    positions = torch.arange(call.key.shape[2], device=call.value.device)
    for keys in positions.split(_BLOCK):
        columns = torch.eq(positions[:, None], keys).to(call.value.dtype)
        block = call._replace(value=columns.expand(*call.value.shape[:2], -1, -1))
        weights = exact_output(block) * valid[..., None]  # (B, H, Nq, block)
        entropy = -factor * (weights * block.compute(config, parameters).float().clamp(min=_LEAST).log()).sum()
        # The cast of parameters to another dtype is shared by all blocks.
        entropy.backward(retain_graph=True)
        total += entropy.item()
    return total


def _valid(call: Call) -> Tensor:
    """Bool, broadcastable to (B, H, Nq): the queries that are not padding, as far as they are known."""
    if call.key_mask is None or call.query.shape[2] != call.key.shape[2]:
        return torch.ones(1, 1, 1, dtype=torch.bool, device=call.query.device)
    return call.key_mask[:, None]
