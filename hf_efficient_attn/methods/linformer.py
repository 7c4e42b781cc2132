"""Linformer (Wang, Li, Khabsa, Fang, Ma 2020, arXiv 2006.04768): attention to learned projections of keys and values.

Eq. 7: out = softmax(Q (E K)^T / sqrt(D)) F V with E and F (P x M) for sequences of up to M tokens, the same for all
heads. `share` is the paper's parameter sharing (section 4): "none" its headwise sharing, one E and one F for all heads
of a layer; "kv" its key-value sharing, E = F; "layers" its layerwise sharing, one E = F for all layers and heads. Here
the keys are projected after W_K, which is the same product. An attention of its own: it never switches by length.

Departures from the paper, whose sequences all have M tokens:

- Those of `hf_efficient_attn.ops.projections` for padding and shorter input. With n = M all rows are the paper's.
- A projection with no weight at any token that is there (of E or of F) is left out of the softmax.
- Conversion starts from means of P segments rather than a Gaussian, so that a checkpoint that was not trained further
  attends to averages of keys and values; where a segment is not full, the average is that of its tokens. With M <= P
  every token is a segment of its own and the output is exact.

There is no causal form: a projection holds tokens of the future.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.registry import AttentionOptions, register_method
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.landmarks import attention_to_few_keys
from hf_efficient_attn.ops.partial import accumulation_dtype
from hf_efficient_attn.ops.projections import (
    NAMES,
    STARTS_FROM,
    contractions,
    naive_projection,
    projected_key_mask,
    projection_tables,
    start_tables,
)

# Streams of random numbers of the Gaussian tables.
_STREAMS = (41, 42)


@dataclass(frozen=True, kw_only=True)
class LinformerConfig(MethodConfig):
    """Hyperparameters of the Linformer."""

    method = "linformer"
    title = "Linformer"
    paper = "Wang, Li, Khabsa, Fang, Ma 2020"
    year = 2020
    causal = False
    rectangular = True
    learned_parameters = NAMES
    mixes_queries = False
    summary = "attention to learned projections of keys and values along the sequence"

    projection_dim: int = option(256, "Projections that each query attends to, P.", minimum=1, carried=True)
    max_length: int = option(
        0,
        "Tokens that the tables have columns for, M. 0: as many as there are when they are made.",
        minimum=0,
        carried=True,
    )
    share: str = option(
        "kv",
        "'kv': one table for keys and values. 'none': one for each. 'layers': one for keys and values of all layers of "
        "a model that have these hyperparameters.",
        choices=("kv", "none", "layers"),
        carried=True,
    )
    init: str = option(
        "means",
        "Where the tables start. 'means': averages of segments. 'gaussian': normal numbers of variance 1/P.",
        choices=("means", "gaussian"),
        carried=True,
    )
    seed: int = option(0, "Seed of the Gaussian tables; that of a call has no effect on them.", minimum=0)

    def with_budget(self, columns: int) -> "LinformerConfig":
        """As many projections as columns.

        That is the attention to them. To project keys and values takes as many multiplications again where there are as
        many queries as keys, without an exponential.
        """
        return replace(self, projection_dim=self.check_budget(columns))


def initial_parameters(
    config: LinformerConfig, *, num_heads: int, head_dim: int, value_dim: int, max_length: int
) -> dict[str, Tensor]:
    """`key_projection` (P, M) and, unless it is shared, `value_projection`."""
    streams = _STREAMS if config.share == "none" else _STREAMS[:1]
    return start_tables(config.projection_dim, config.max_length or max_length, config.init, config.seed, streams)


def _tables(config: LinformerConfig, columns: int, parameters: dict[str, Tensor]) -> list[Tensor]:
    """E and F (P, M); where they are shared, F is E unless it is given."""
    return projection_tables(config.method, config.projection_dim, columns, parameters)


def forward(config: LinformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Fast form; arguments as in `hf_efficient_attn.methods._shared.registry.register_method`."""
    mask, scale, dropout_p, parameters = options.key_mask, options.scale, options.dropout_p, options.parameters
    (batch, heads, columns), wide = key.shape[:3], accumulation_dtype(query.dtype)
    both = contractions(_tables(config, columns, parameters), mask, columns, wide)
    bias = mask_bias(projected_key_mask(both, batch), wide).repeat_interleave(heads, 0)
    keys, values = (rows.rows(x).flatten(0, 1) for rows, x in zip(both, (key, value), strict=True))
    options = {"scale": scale, "dropout_p": dropout_p, "dtype": value.dtype}
    return attention_to_few_keys(query.flatten(0, 1), keys, values, bias, **options).unflatten(0, (batch, heads))


def naive(config: LinformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: row by row with the tokens that are not there taken out."""
    mask, scale, parameters = options.key_mask, options.scale, options.parameters
    tables, outs = [x.double() for x in _tables(config, key.shape[2], parameters)], []
    for b in range(key.shape[0]):
        there = slice(None) if mask is None else mask[b]
        tokens = (x[b, :, there].double() for x in (key, value))
        (keys, first), (values, second) = (naive_projection(table, x) for table, x in zip(tables, tokens, strict=True))
        keys, values = (x[:, first & second] for x in (keys, values))
        outs.append((scale * query[b].double() @ keys.mT).softmax(-1) @ values)
    return torch.stack(outs).to(value.dtype)


register_method(
    LinformerConfig, forward=forward, naive=naive, initial_parameters=initial_parameters, starts_from=STARTS_FROM
)
