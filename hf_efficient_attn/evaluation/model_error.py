"""`hea.attention_error`: the error of every layer and head of a converted model, estimated on real inputs.

In each call of a method, the output of a few queries is compared with their exact output for the same queries, keys and
values, so that no attention is computed exactly as a whole.
"""

import statistics
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_efficient_attn.errors import UnsupportedAttentionError, check_positive
from hf_efficient_attn.evaluation.capture import Batch, Call, capture_attention, exact_attention_of, forward
from hf_efficient_attn.integration import attention, models, settings
from hf_efficient_attn.integration.layers import Layer
from hf_efficient_attn.ops.attend import attend, output_of, with_sinks
from hf_efficient_attn.ops.backends.devices import accumulation_dtype
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.exact import bias_between, mask_bias
from hf_efficient_attn.ops.index import take
from hf_efficient_attn.ops.row_error import RowError, Rows, row_error, sample_rows

# Rows that are computed at a time.
_ROWS = 128


@dataclass(frozen=True)
class LayerError:
    """The error of one attention module: |A - E| / |E| in the operator norm, with the exact output E.

    Attributes:
        layer: the layer, or None if the module has no number or name for itself.
        name: the module's name in its model.
        method: its method; "sdpa" if it computes exact attention.
        tokens: the largest number of valid keys of a sequence.
        estimate: float64 (B, H), the estimated error of each head on each sequence with a valid token, in all calls.
        bound: float64 (B, H), an upper bound of it.
    """

    layer: Layer | None
    name: str
    method: str
    tokens: int
    estimate: Tensor = field(repr=False)
    bound: Tensor = field(repr=False)

    @property
    def mean(self) -> float:
        """The mean of the estimates over sequences and heads."""
        return self.estimate.mean().item()

    @property
    def mean_bound(self) -> float:
        """The mean of the bounds over sequences and heads. The mean of the errors is below it in 99 % of layers."""
        return self.bound.mean().item()

    @property
    def worst_head(self) -> int:
        """The head with the largest bound."""
        return int(self.bound.amax(0).argmax())

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {name: x.tolist() if isinstance(x, Tensor) else x for name, x in vars(self).items()}


@dataclass(frozen=True)
class ModelError:
    """The errors of all attention modules of a model, as `hea.attention_error` returns them. `print` shows a table.

    Attributes:
        layers: one entry for each attention module, in order; two if only some of its calls stay exact.
        num_rows: queries of each head that were compared; None for all of them.
    """

    layers: tuple[LayerError, ...]
    num_rows: int | None

    def max(self) -> float:
        """The largest bound of a head, over all layers and sequences."""
        return max(one.bound.max().item() for one in self.layers)

    def mean(self) -> float:
        """The mean error of the layers that are not exact; 0 if all are."""
        errors = [one.mean for one in self.layers if one.method != settings.EXACT]
        return statistics.fmean(errors) if errors else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"num_rows": self.num_rows, "layers": [one.to_dict() for one in self.layers]}

    def __str__(self) -> str:
        lines = [("layer", "method", "tokens", "error", "bound", "worst head")]
        for one in self.layers:
            name = one.name if one.layer is None else str(one.layer)
            worst = f"{one.bound.max().item():.3f} ({one.worst_head})"
            lines.append((name, one.method, f"{one.tokens}", f"{one.mean:.3f}", f"{one.mean_bound:.3f}", worst))
        columns = zip("<<>>>>", zip(*lines, strict=True), strict=True)
        formats = [f"{{:{sign}{max(map(len, cells))}}}" for sign, cells in columns]
        return "\n".join("  ".join(formats).format(*line).rstrip() for line in lines)


def attention_error(model: nn.Module, batch: Batch, *, num_rows: int | None = 128, seed: int = 0) -> ModelError:
    """Estimate the error of every layer and head of a converted model on a batch.

    The error of a head is |A - E| / |E| in the operator norm, where A is its output and E that of exact attention for
    the same queries, keys and values. It is estimated from the exact output of `num_rows` queries, so that a call costs
    little more than a forward pass. The bound adds a margin for the queries that were not sampled: it holds for the
    mean over heads in at least 99 % of layers, and is typically 1.3 times the error with 128 rows, 1.5 times with 64.
    `hf_efficient_attn.ops.row_error` defines both.

    Unlike `hea.calibrate`, which measures what a method would cost in the exact model, this measures the model as it
    runs: the inputs of a layer contain the errors of earlier layers.

    Args:
        model: a model with a method of this package in some layers. It is unchanged afterwards, and so is the random
            state; the errors are those of eval mode.
        batch: a mapping of the model's arguments, or its main input. Queries at masked positions do not count.
        num_rows: queries of each head whose exact output is computed; None for all of them, which costs as much as
            exact attention. Then the bound equals the error.
        seed: which queries are sampled.

    Returns:
        ModelError. Layers that stay exact are in it with an error of 0.

    Raises:
        UnsupportedAttentionError: a model without a method of this package, `num_rows` below 1, a batch that the model
            cannot take, or one without a valid token.

    Example:
        >>> model = AutoModel.from_pretrained("bert-base-uncased", attn_implementation="kdeformer")
        >>> error = hea.attention_error(model, tokenizer(text, return_tensors="pt"))
        >>> print(error)  # one line for each layer
        >>> error.max()  # of the worst head
    """
    check_positive("num_rows", 1 if num_rows is None else num_rows)
    roots = models.transformers_models(model)
    methods = {one.module: one.chosen for root in roots for one in models.attention_modules(root)}
    if not any(methods.values()):
        raise UnsupportedAttentionError(
            f"{type(roots[0]).__name__} computes exact attention in every layer, so that there is no error: convert it "
            "first, with hea.convert(model, method)"
        )
    errors: dict[tuple[nn.Module, str], LayerError] = {}

    def compute(call: Call) -> Tensor:
        if (method := call.chosen(methods[call.module])) is None:
            return exact_attention_of(call)
        return call.compute(method, attention.required_tensors(call.module, method, call.name))

    def visit(call: Call) -> None:
        method, sequences = call.chosen(methods[call.module]), call.sequences
        if not sequences:
            return
        estimate = bound = torch.zeros(len(sequences), call.query.shape[1], dtype=torch.float64)
        if method is not None:
            # One sequence at a time, because the mask of causal rows is (H, p, Nk).
            rows = zip(*(_sequence_error(call, b, num_rows, seed) for b in sequences), strict=True)
            estimate, bound = (torch.stack(values).cpu().double() for values in rows)
        name = settings.EXACT if method is None else method.method
        tokens, former = call.tokens, errors.get((call.module, name))
        if former is not None:
            tokens = max(tokens, former.tokens)
            estimate, bound = torch.cat((former.estimate, estimate)), torch.cat((former.bound, bound))
        errors[call.module, name] = LayerError(call.layer, call.name, name, tokens, estimate, bound)

    with capture_attention(model, visit, compute, windows=True):
        forward(model, batch)
    if not errors:
        raise UnsupportedAttentionError(
            "the batch has no valid token in any attention layer, so that there is nothing to measure: check its "
            "attention_mask"
        )
    return ModelError(tuple(errors.values()), num_rows)


def _sequence_error(call: Call, b: int, num_rows: int | None, seed: int) -> RowError:
    """The error of each head on sequence b of the batch."""
    num_heads, q_len = call.query.shape[1:3]
    groups, key_mask = num_heads // call.key.shape[1], None
    query, key, value = (x[b].to(accumulation_dtype(x.dtype)) for x in (call.query, call.key, call.value))
    if call.key_mask is not None:
        key_mask = call.key_mask[b].expand(num_heads, -1)
        key, value = (x.masked_fill(~call.key_mask[b][:, None], 0.0) for x in (key, value))
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    query_mask = None if call.query_mask is None else key_mask
    draws = Draws(seed, query.device)
    rows = sample_rows(num_heads, q_len, num_rows or q_len, query_mask, num_heads=num_heads, draws=draws)
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    of_scores: dict[str, Any] = {"scale": scale, "table": call.distance_bias, "sinks": call.sinks}
    with torch.autocast(query.device.type, enabled=False):
        exact = exact_rows(query, key, value, rows, key_mask, is_causal=call.is_causal, **of_scores)
        return row_error(take(call.exact[b], rows.queries), exact, rows.valid, rows.population)


def exact_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Rows,
    key_mask: Tensor | None = None,
    *,
    is_causal: bool,
    scale: float,
    table: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The exact output (BH, p, Dv) of the sampled queries, softmax(scale * query[rows] key^T) value.

    query (BH, Nq, D), key (BH, Nk, D), value (BH, Nk, Dv), key_mask bool (BH, Nk); `table` (BH, 2R + 1) is a bias by
    distance, as in `distance_bias`, and `sinks` are (BH,). With `is_causal` the queries are the last Nq positions and
    attend to the keys up to their own position. The output is 0 for queries without a key.
    """
    keys, outs = torch.arange(key.shape[1], device=key.device).view(1, 1, -1), []  # (1, 1, Nk)
    valid = torch.ones_like(keys, dtype=torch.bool) if key_mask is None else key_mask[:, None]
    position = rows.queries + (key.shape[1] - query.shape[1] if is_causal else 0)
    for part, at in zip(take(query, rows.queries).split(_ROWS, 1), position[:, None].split(_ROWS, 2), strict=True):
        bias = mask_bias(valid & (keys <= at.mT) if is_causal else valid, query.dtype).unsqueeze(1)
        if table is not None:
            bias = bias + bias_between(table.to(bias.dtype), at, keys)
        found = attend(part[:, None], key[:, None], value[:, None], bias, scale=scale)
        outs.append(output_of(found, sinks is not None)[:, 0])
    out = torch.cat(outs, 1)
    return out if sinks is None else with_sinks(out[None], sinks)[0]
