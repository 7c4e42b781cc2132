"""Losses of one attention layer for distillation: how far a method is from exact attention on the same inputs.

- "output": |out - exact|^2 / |exact|^2, summed over the valid queries of a head, averaged over sequences and heads.
- "weights": the cross entropy of the attention weights, sum_j -w_ij log(w'_ij) (Zhang et al., Hedgehog, ICLR 2024,
  Eq. 9), averaged over valid queries and heads, for blocks of keys: the method's weights of a block of keys are its
  output for values that are the block's columns of the identity. An (N, N) matrix is never held.
- "both": the sum of the two, with the cross entropy multiplied by `WEIGHTS_SHARE`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_name
from hf_efficient_attn.evaluation.capture import Call
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
    error, size = (out - exact).square().sum(-1), exact.square().sum(-1)
    valid = valid_queries(call)
    if valid is not None:
        error, size = error * valid[:, None], size * valid[:, None]
    error, size = error.sum(-1), size.sum(-1)
    return (error / size.clamp(min=torch.finfo(size.dtype).tiny))[size > 0]


def valid_queries(call: Call) -> Tensor | None:
    """Bool (B, Nq): the queries that are not padding; None if none are known to be."""
    return call.key_mask if call.key_mask is not None and call.query.shape[2] == call.key.shape[2] else None


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
    if loss in ("output", "both"):
        errors = squared_error(call, config, parameters)
        value = errors.sum() / max(1, len(errors))
        value.backward()
        total += value.item()
    if loss in ("weights", "both"):
        total += _backward_of_weights(call, config, parameters, 1.0 if loss == "weights" else WEIGHTS_SHARE)
    return total


def _backward_of_weights(call: Call, config: MethodConfig, parameters: Mapping[str, Tensor], factor: float) -> float:
    """`backward` of the cross entropy of the weights times a factor, one block of keys at a time."""
    total, lse = 0.0, _log_sums(call)
    batch, num_heads, q_len = call.query.shape[:3]
    valid = valid_queries(call)
    num_rows = batch * q_len if valid is None else int(valid.sum())
    for start in range(0, call.key.shape[2], _BLOCK):
        end = min(start + _BLOCK, call.key.shape[2])
        weights = (_scores(call, start, end) - lse).exp()  # (B, H, Nq, block)
        if valid is not None:
            weights = weights * valid[:, None, :, None]
        identity = torch.eye(end - start, device=call.value.device, dtype=call.value.dtype)
        value = call.value.new_zeros(*call.value.shape[:2], call.key.shape[2], end - start)
        value[:, :, start:end] = identity
        out = call._replace(value=value).compute(config, parameters)
        entropy = -(weights * out.float().clamp(min=_LEAST).log()).sum() * factor / max(1, num_rows * num_heads)
        # The cast of parameters to another dtype is shared by all blocks.
        entropy.backward(retain_graph=True)
        total += entropy.item()
    return total


@torch.no_grad()
def _log_sums(call: Call) -> Tensor:
    """Log sum_j exp(score_ij) of every query: float32 (B, H, Nq, 1); 0 where a query has no key."""
    blocks = range(0, call.key.shape[2], _BLOCK)
    sums = [_scores(call, start, start + _BLOCK).logsumexp(-1, keepdim=True) for start in blocks]
    lse = torch.cat(sums, -1).logsumexp(-1, keepdim=True)
    return torch.where(lse.isfinite(), lse, 0.0)


@torch.no_grad()
def _scores(call: Call, start: int, end: int) -> Tensor:
    """The scores of all queries and of the keys from `start` to `end`: float32 (B, H, Nq, block), -inf if masked."""
    groups, kv_len = call.query.shape[1] // call.key.shape[1], call.key.shape[2]
    key = call.key[:, :, start:end].float().repeat_interleave(groups, 1)
    scores = call.query.float() @ key.mT * (call.query.shape[-1] ** -0.5 if call.scale is None else call.scale)
    if call.key_mask is not None:
        scores = scores.masked_fill(~call.key_mask[:, None, None, start:end], -torch.inf)
    if call.is_causal:
        query_position = torch.arange(kv_len - call.query.shape[2], kv_len, device=key.device)
        later = torch.arange(start, min(end, kv_len), device=key.device) > query_position[:, None]
        scores = scores.masked_fill(later, -torch.inf)
    return scores
