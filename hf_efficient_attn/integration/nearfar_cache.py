"""`NearFarCache`: a cache for decoding with methods that otherwise attend to all cached keys exactly.

The attention of a layer is the exact merge of its keys and its landmarks (`ops.nearfar.growing`). When it holds as many
of both as its budget, the older keys join the landmarks of their batch row. What happens to a row depends on its own
valid tokens only, and is the same for tokens that come one at a time or together. With look-ups a layer keeps all keys
instead, and the hierarchy that tells a token which of them to read (`ops.nearfar.kept`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import Cache, DynamicCache, DynamicLayer, PreTrainedConfig

from hf_efficient_attn.errors import UnsupportedAttentionError, check_positive, shown
from hf_efficient_attn.integration.cache import MethodLayer, StateLayer, Tokens
from hf_efficient_attn.integration.settings import method_of, settings_of
from hf_efficient_attn.methods import MethodConfig, attention, methods_with
from hf_efficient_attn.ops.attend import Partial, attend, merge, output_of, with_sinks
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.index import inverse, take, valid_first
from hf_efficient_attn.ops.nearfar.chunks import split_columns
from hf_efficient_attn.ops.nearfar.growing import GrowingCoreset, add_keys, coreset_partial, empty_coreset
from hf_efficient_attn.ops.nearfar.kept import Kept, add_tokens, nothing_kept
from hf_efficient_attn.ops.tracing import refuse_in_graphs

# The smallest budget: one newest key, two more before they are merged, and five landmarks.
_SMALLEST = 8


class _Layer(MethodLayer):
    """A layer of `NearFarCache` for a method.

    The tokens of the first call are computed by the method. A subclass adds them by `_add_first`, and computes the
    attention of later ones by `_add_later`.
    """

    _add_first: Callable[[Tensor, Tokens], None]
    _add_later: Callable[[Tensor, Tokens, dict[str, Any]], Tensor]
    supports_early_init = False

    def __init__(self, method: MethodConfig, columns: int) -> None:
        super().__init__(method)
        self.columns, self.scale = columns, 0.0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take the keys and values (B, H_kv, N, .) of N new tokens, and return them for the attention function."""
        refuse_in_graphs(
            "NearFarCache does not work in a compiled model, because its sizes depend on the padding: leave "
            "torch.compile or the cache out"
        )
        if self.valid is None:  # on the CPU
            self.valid = torch.zeros(len(key_states), dtype=torch.int64)
        return self._take(key_states), value_states

    def _attention(self, query: Tensor, tokens: Tokens, options: dict[str, Any]) -> Tensor:
        key, value, mask = tokens
        query, key = query.to(value.dtype), key.to(value.dtype)
        if mask is not None:
            key, value = (x.masked_fill(~mask[:, None, :, None], 0.0) for x in (key, value))
        self.scale = query.shape[3] ** -0.5 if options["scale"] is None else options["scale"]
        if self.seen > key.shape[2]:
            return self._add_later(query, (key, value, mask), options)
        out = attention(self.method, query, key, value, attention_mask=mask, is_causal=True, **options)
        self._add_first(query, (key, value, mask))
        return out

    def numel(self) -> int:
        """How many numbers the layer holds, besides those that count tokens."""
        held = [getattr(self, name) for name in self._content if name not in ("counts", "valid")]
        return sum(x.numel() for x in tree_leaves(held) if x is not None)


class NearFarLayer(_Layer):
    """A layer with at most `columns` keys and landmarks together."""

    keys: Any  # (B, H_kv, L, D), the kept keys; L is at most `columns`, except within a call
    values: Any  # (B, H_kv, L, Dv)
    position: Any  # int64 (B, L), the position of each kept key in the sequence; -1 where a row keeps fewer
    counts: Any  # int64 (B,), number of kept keys of each row, on the CPU, as `valid`, that of its valid tokens
    coreset: GrowingCoreset | None  # landmarks (B, H_kv, m, .) of the older keys
    _content = ("keys", "values", "position", "coreset", "counts", "valid")
    _holds = "landmarks"

    def __init__(self, method: MethodConfig, columns: int, seed: int = 0) -> None:
        super().__init__(method, columns)
        self.seed = seed
        # Half of the budget for landmarks and an eighth for neighbors had larger errors with GPT-2.
        self.num_newest = columns // 8
        self.num_landmarks = columns - self.num_newest - columns // 4

    @property
    def merged(self) -> Tensor:
        """Number of keys of each row that the landmarks represent, int64 (B,)."""
        return torch.as_tensor(self.valid - self.counts)

    def _add_first(self, query: Tensor, tokens: Tokens) -> None:
        self.keys, self.values = (x[:, :, :0] for x in tokens[:2])
        self.position = torch.zeros(len(query), 0, dtype=torch.int64, device=query.device)
        self.counts = self.valid
        self._append(tokens, 0)
        self._merge_rows(self.counts > self.columns)

    def _add_later(self, query: Tensor, tokens: Tokens, options: dict[str, Any]) -> Tensor:
        key, value, mask = tokens
        number = key.shape[2]
        earlier = self.seen - number
        outs, start = [], 0
        while start < number:  # as many tokens at a time as fit before a row has to merge
            self._merge_rows(self.counts >= self._rooms())
            left = self._rooms() - self.counts
            fitting = int(left.min())
            if mask is not None:
                used = mask[:, start:].cumsum(1)
                fitting = int((used <= left.to(used.device)[:, None]).sum(1).min())
            piece = slice(start, start + fitting)
            new_mask = None if mask is None else mask[:, piece]
            self._append((key[:, :, piece], value[:, :, piece], new_mask), earlier + start)
            outs.append(self._attend(query[:, :, piece], earlier + start, options))
            start += fitting
        return torch.cat(outs, 2)

    def _rooms(self) -> Tensor:
        """How many keys each row may keep, (B,)."""
        return self.columns - self.num_landmarks * (self.merged > 0)

    def _append(self, new: Tokens, first: int) -> None:
        """Keep the keys of tokens from position `first` on."""
        key, value, mask = new
        added: Any = key.shape[2]
        position = torch.arange(first, first + added, device=self.keys.device).expand(len(self.counts), -1)
        if mask is not None:
            position, added = position.masked_fill(~mask, -1), mask.sum(1).cpu()
        self.keys, self.values = torch.cat((self.keys, key), 2), torch.cat((self.values, value), 2)
        self.position = torch.cat((self.position, position), 1)
        self.counts, self.valid = self.counts + added, self.valid + added
        if self.keys.shape[2] > self.columns and self.counts.max() <= self.columns:
            self._drop_empty()

    def _attend(self, query: Tensor, first: int, options: dict[str, Any]) -> Tensor:
        """Attention of queries (B, H, N, D), from position `first` on, to kept keys and landmarks."""
        (batch, num_heads, q_len, _), num_kv_heads = query.shape, self.keys.shape[1]
        # The query heads of a group are passed as if they were several queries of one head.
        groups = num_heads // num_kv_heads
        flat = query.reshape(batch * num_kv_heads, groups * q_len, -1)
        row = torch.arange(first, first + q_len, device=self.keys.device)[:, None]
        pairs = (self.position[:, None] >= 0) & (self.position[:, None] <= row)
        bias = mask_bias(pairs.repeat(1, groups, 1).repeat_interleave(num_kv_heads, 0), query.dtype)
        blocks = (x[:, None] for x in (flat, self.keys.flatten(0, 1), self.values.flatten(0, 1), bias))
        found = attend(*blocks, scale=self.scale, dropout_p=options["dropout_p"])
        found, sinks = Partial(found.out[:, 0], found.lse[:, 0]), options.get("sinks")
        if self.coreset is not None:
            far = coreset_partial(flat, GrowingCoreset(*(x.flatten(0, 1) for x in self.coreset)), scale=self.scale)
            found = merge(far, Partial(found.out.to(far.out.dtype), found.lse))
        out = output_of(found, sinks is not None).reshape(batch, num_heads, q_len, -1)
        return (out if sinks is None else with_sinks(out, sinks)).to(self.values.dtype)

    def _merge_rows(self, full: Tensor) -> None:
        """In each full row, of bool (B,), merge all kept keys except the newest into the landmarks."""
        if not full.any():
            return
        if self.coreset is None:
            self.coreset = empty_coreset(self.keys, self.values, self.num_landmarks)
        index = full.nonzero()[:, 0].to(self.keys.device)
        position = self.position[index]
        newest = position.topk(self.num_newest, dim=1).values[:, -1:]
        old = (position >= 0) & (position < newest)
        # The oldest keys come first in every row, so that what is computed does not depend on the padding.
        order = torch.where(old, position, self.seen).argsort(dim=1)[:, : int(old.sum(1).max())]
        rows, num_kv_heads = len(index), self.keys.shape[1]
        order_of_heads, mask = (x.repeat_interleave(num_kv_heads, 0) for x in (order, old.gather(1, order)))
        key, value = (take(x[index].flatten(0, 1), order_of_heads) for x in (self.keys, self.values))
        own = GrowingCoreset(*(x[index].flatten(0, 1) for x in self.coreset))
        own = add_keys(own, key, value, mask, scale=self.scale, draws=Draws(self.seed, key.device), batch=rows)
        pairs = zip(self.coreset, (x.unflatten(0, (rows, num_kv_heads)) for x in own), strict=True)
        self.coreset = GrowingCoreset(*(x.index_copy(0, index, new) for x, new in pairs))
        self.position = self.position.index_copy(0, index, position.masked_fill(old, -1))
        self.counts = torch.where(full, self.num_newest, self.counts)
        self._drop_empty()

    def _drop_empty(self) -> None:
        """Keep as many columns as the fullest row needs, in the order of positions."""
        order = self.position.argsort(dim=1)[:, self.position.shape[1] - int(self.counts.max()) :]
        self.position = self.position.gather(1, order)
        self.keys, self.values = (_reordered(x, order) for x in (self.keys, self.values))


class LookUpLayer(_Layer):
    """A layer with all keys, of which a token reads those that the causal form of nearfar chooses."""

    kept: Kept | None
    _content = ("kept", "valid")
    _holds = "clusters of keys"

    def _add_first(self, query: Tensor, tokens: Tokens) -> None:
        self._add(query, tokens, 0.0, attends=False)

    def _add_later(self, query: Tensor, tokens: Tokens, options: dict[str, Any]) -> Tensor:
        out, mask, sinks = self._add(query, tokens, options["dropout_p"], attends=True), tokens[2], options.get("sinks")
        if mask is not None:
            out = _reordered(out, inverse(valid_first(mask))).masked_fill(~mask[:, None, :, None], 0.0)
        return (out[..., :-1] if sinks is None else with_sinks(out, sinks)).to(query.dtype)

    def _add(self, query: Tensor, tokens: Tokens, dropout_p: float, *, attends: bool) -> Tensor:
        """Add tokens, and return outputs and their lse, those of valid tokens first."""
        key, value, mask = tokens
        added = torch.full_like(self.valid, query.shape[2])
        if mask is not None:
            query = query.masked_fill(~mask[:, None, :, None], 0.0)
            query, key, value = (_reordered(x, valid_first(mask)) for x in (query, key, value))
            added = mask.sum(1).cpu()
        sizes = split_columns(self.columns, self.scale, dropout_p)
        if self.kept is None:
            self.kept = nothing_kept(query, key, value, sizes)
        numbers = self.valid.tolist(), added.tolist()
        with torch.autocast(query.device.type, enabled=False):
            self.kept, out = add_tokens(self.kept, (query, key, value), *numbers, sizes, attends=attends)
        self.valid = self.valid + added
        return out


def _reordered(x: Tensor, order: Tensor) -> Tensor:
    """Return the tokens of x (B, H, N, .) in an order (B, N)."""
    return take(x.flatten(0, 1), order.repeat_interleave(x.shape[1], 0)).unflatten(0, x.shape[:2])


class NearFarCache(Cache):
    """A cache for decoding in bounded memory: each layer keeps its newest keys, and landmarks for all older ones.

    Use it with a model whose method attends to all cached keys exactly, such as "nearfar" and "auto"::

        cache = hea.NearFarCache(model.config, columns=256)
        model.generate(**inputs, cache=cache)  # past_key_values=cache before Transformers 5.24

    Up to `columns` tokens decoding is exact. Beyond that, memory and time per token do not grow: at most `columns` keys
    and landmarks are kept, of which five eighths are landmarks, and the newest eighth of the keys at least. A landmark
    holds a key and two rows of weights in float32, where a key holds a key and a value. The prompt itself, if it comes
    in the first call, is computed as without this cache.

    Landmarks forget single keys: a model that copies from far back needs a budget about as large as the distance, or
    look-ups. With `look_up` a layer keeps all keys, so that memory grows as with `DynamicCache`. What is bounded is
    what a token reads: a window of `columns` keys, landmarks, and the keys of up to 47 clusters that its query chooses,
    as in the causal form of nearfar. The landmarks and the largest clusters grow with the square root of the length.
    The guide to language models has sizes and times.

    Layers that stay exact, or that the config chooses by name, keep the keys that `DynamicCache` keeps. Beam search and
    left padding work. A cache belongs to one sequence: call `reset()`, or make a new one, before the next.

    Sources: a memory of recent tokens and a compressed one of older tokens, Rae et al. 2020 ("Compressive
    Transformers", where the compression is learned); merging coresets, Har-Peled and Mazumdar 2004; landmarks, Chen,
    Epperly, Tropp and Webber 2025.

    Args:
        config: the model's config, whose method decides for every layer.
        columns: the largest number of keys and landmarks of a layer, or with `look_up` the largest window, at least 8.
        look_up: whether to keep all keys and read those that a token needs.

    Raises:
        UnsupportedAttentionError: the config's attention is not of this package, or a layer's method does not attend to
            all cached keys exactly; the cache has landmarks for no layer; `columns` is too small.
    """

    def __init__(self, config: PreTrainedConfig, columns: int = 256, look_up: bool = False) -> None:
        check_positive("NearFarCache: columns", columns, least=_SMALLEST)
        if not isinstance(config, PreTrainedConfig):
            raise UnsupportedAttentionError(
                f"NearFarCache takes the config of a model, not {shown(config)}: model.config"
            )
        config = config.get_text_config(decoder=True)
        name, usable = method_of(config), methods_with("decodes_exactly")
        if name is None:
            raise UnsupportedAttentionError(
                f"NearFarCache: the model computes {config._attn_implementation!r}, which cannot use landmarks: switch "
                f"it first, for example with hea.convert(model, {usable[0]!r}). Methods: {', '.join(usable)}"
            )
        settings, layers = settings_of(config, name), DynamicCache(config=config).layers
        for index, layer in enumerate(layers):
            method = settings.for_layer(index)
            if method is None or type(layer) not in (DynamicLayer, StateLayer):
                continue
            if not method.decodes_exactly:
                raise UnsupportedAttentionError(
                    f"NearFarCache: layer {index} decodes by {method.method}, which does not attend to all cached "
                    f"keys: leave the cache out. Methods that do: {', '.join(usable)}"
                )
            layers[index] = LookUpLayer(method, columns) if look_up else NearFarLayer(method, columns, seed=index)
        if not any(isinstance(layer, _Layer) for layer in layers):
            raise UnsupportedAttentionError(
                "NearFarCache would have no effect: leave the cache out. It has no landmarks for layers that hold more "
                "than keys (FalconH1, Zamba2), nor for those that stay exact or that the config chooses by name"
            )
        super().__init__(layers=layers)

    def numel(self) -> int:
        """How many numbers the layers hold that do not stay exact."""
        return sum(layer.numel() for layer in self.layers if isinstance(layer, _Layer))
