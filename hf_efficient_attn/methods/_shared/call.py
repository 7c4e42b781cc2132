"""From a user's call to a method: checks, masks, grouped queries, precision.

A method sees none of this. Its `attend` (and its `naive`) has the signature

    attend(config, query, key, value, *, mask, is_causal, scale, dropout_p, seed) -> (B,H,Nq,Dv)

with query (B,H,Nq,D), key (B,H,Nk,D), value (B,H,Nk,Dv), floating; `mask` bool (B,Nk) or None, what it shuts out being
zero in key and value; Nq = Nk where causal; `seed` an integer or a scalar tensor. A method with learned parameters is
also given `parameters`, a dictionary of tensors.
"""

import dataclasses
import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_name
from hf_efficient_attn.methods._shared.base import MethodConfig, available_methods, get_method, make_config
from hf_efficient_attn.ops.random import draw_seed

# So many queries at the end of longer keys are a step of decoding; more are the chunk of a prompt.
_DECODE = 128


def attention(
    method_or_config: str | MethodConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | None = 0,
    parameters: dict[str, Tensor] | None = None,
    **hyperparameters,
) -> Tensor:
    """Attention by any method of this package.

    Args:
        method_or_config: a name from `available_methods()` or a method's config.
        query: (B, H, Nq, D).
        key: (B, Hkv, Nk, D); Hkv divides H (grouped queries: query head h reads key head h // (H // Hkv)).
        value: (B, Hkv, Nk, Dv).
        attention_mask: bool (B, Nk), True = attend. What stands in keys shut out, NaN included, has no influence.
        is_causal: query i sees the keys up to its own position. Where Nq < Nk the queries are the last Nq positions
            (as with a key-value cache); where Nq > Nk the first Nq - Nk queries see nothing.
        scale: factor of the scores; 1/sqrt(D) by default.
        dropout_p: probability of dropping an attention weight, drawn from the global generator.
        seed: of hashing, sampling and random features, added to the config's own; the same seed gives the same output
            and leaves the global random state alone. None draws one from the global generator (training).
        parameters: all learned parameters of the method by name, as a converted model holds them.
        **hyperparameters: replace those of the config; learned parameters too, as tensors by their names. Those
            that are not given have the values that conversion starts from.

    Returns:
        (B, H, Nq, Dv) in the type of `value`; rows with nothing to attend to are 0.

    Raises:
        UnsupportedAttentionError: unknown method or hyperparameter, shapes or types that do not fit, a mask that is not
            (B, Nk), a method without a causal form with `is_causal`, without a rectangular form with Nq != Nk.
    """
    return _call(get_attend, method_or_config, query, key, value, attention_mask, is_causal, scale, dropout_p, seed,
                 parameters, hyperparameters)  # fmt: skip


def naive_attention(method_or_config, query, key, value, *, attention_mask=None, is_causal=False, scale=None,
                    seed=0, parameters=None, **hyperparameters) -> Tensor:  # fmt: skip
    """The readable form of the same method: dense (Nq, Nk) matrices, for tests and for reading. Arguments as above."""
    return _call(get_naive, method_or_config, query, key, value, attention_mask, is_causal, scale, 0.0, seed,
                 parameters, hyperparameters)  # fmt: skip


def absorb(
    config: MethodConfig,
    state: tuple | None,
    key: Tensor,
    value: Tensor,
    *,
    attention_mask: Tensor | None = None,
    scale: float | None = None,
    seed: int | Tensor = 0,
) -> tuple:
    """The state of a recurrent method after further tokens; arguments as in `attention`, `state` None to begin."""
    key, value = _under_autocast(key, value)
    if attention_mask is not None:
        hidden = ~attention_mask[:, None, :, None]
        key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
    scale, seed = _defaults(config, key, scale, seed)
    with torch.autocast(key.device.type, enabled=False):
        return get_method(config.method).recurrence.absorb(
            config, state, key, value, mask=attention_mask, scale=scale, seed=seed
        )


def step(
    config: MethodConfig,
    state: tuple | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attention_mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor = 0,
) -> tuple[Tensor, tuple]:
    """Causal attention of new tokens to those that a state holds and to each other: (output, the state after them).

    The output is, up to rounding, the last rows of `attention` of all tokens together.

    Args:
        config: of a method with a recurrence.
        state: what `absorb` or an earlier step returned; None to begin.
        query: (B, H, N, D), key (B, Hkv, N, D) and value (B, Hkv, N, Dv) of the new tokens.
        attention_mask: bool (B, N), of the new tokens alone.
        seed: the same as in the calls that made the state; the config's own is added to it.

    Returns:
        (B, H, N, Dv) in the type of `value`, and a state of the same size as before.
    """
    query, key, value = _under_autocast(query, key, value)
    _check(config, query, key, value, attention_mask, True, scale, dropout_p, seed)
    new = absorb(config, state, key, value, attention_mask=attention_mask, scale=scale, seed=seed)
    if state is None:
        whole = {"attention_mask": attention_mask, "scale": scale, "dropout_p": dropout_p, "seed": seed}
        return attention(config, query, key, value, is_causal=True, **whole), new
    recurrence, (batch, heads, length, _) = get_method(config.method).recurrence, query.shape
    key_heads, dtype = key.shape[1], value.dtype
    scale, seed = _defaults(config, query, scale, seed)
    options = {"scale": scale, "dropout_p": dropout_p, "seed": seed}
    with torch.autocast(query.device.type, enabled=False):
        if length == 1:
            # One token sees all that there is, itself included; the query heads of a group are rows of one read.
            rows = query.reshape(batch, key_heads, heads // key_heads, -1)
            out = recurrence.read(config, new, rows, **options).reshape(batch, heads, 1, -1)
        else:
            if attention_mask is not None:
                hidden = ~attention_mask[:, None, :, None]
                key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
            if heads != key_heads:
                state = type(state)(*(x.repeat_interleave(heads // key_heads, 1) for x in state))
            out = recurrence.resume(
                config, state, query, *_grouped(query, key, value), mask=attention_mask, **options
            )  # fmt: skip
    return out.to(dtype), new


def _defaults(config: MethodConfig, x: Tensor, scale: float | None, seed: "int | Tensor") -> tuple:
    """The scale, 1/sqrt(D) if none is given for x (..., D), and the seed with the config's own."""
    return x.shape[-1] ** -0.5 if scale is None else float(scale), seed + getattr(config, "seed", 0)


def get_attend(name: str) -> Callable:
    return get_method(name).attend


def get_naive(name: str) -> Callable:
    return get_method(name).naive


def _call(
    form, method_or_config, query, key, value, mask, is_causal, scale, dropout_p, seed, complete, hyperparameters
) -> Tensor:
    learned = {k: v for k, v in hyperparameters.items() if isinstance(v, Tensor)}
    config = make_config(method_or_config, **{k: v for k, v in hyperparameters.items() if k not in learned})
    query, key, value = _under_autocast(query, key, value)
    _check(config, query, key, value, mask, is_causal, scale, dropout_p, seed)
    (batch, heads, length, width), columns = query.shape, key.shape[2]
    if query.numel() == 0:
        return value.new_zeros(batch, heads, length, value.shape[-1])
    scale, seed = _defaults(config, query, scale, draw_seed(query.device) if seed is None else seed)
    if mask is not None:
        hidden = ~mask[:, None, :, None]
        key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
    extra = _parameters(config, learned, query, key, value) if complete is None else {"parameters": complete}
    shift = columns - length if is_causal else 0
    decode = get_method(config.method).decode
    if decode is not None and shift > 0 and length <= _DECODE:
        with torch.autocast(query.device.type, enabled=False):
            return decode(config, query, *_grouped(query, key, value), mask=mask, scale=scale, dropout_p=dropout_p,
                          **extra)  # fmt: skip
    if shift < 0:  # the first queries stand before every key
        query = query[:, :, -shift:]
    elif shift > 0:  # the keys before the first query have queries too, of no interest
        query = torch.cat((query.new_zeros(batch, heads, shift, width), query), 2)
    options = {"is_causal": is_causal, "scale": scale, "dropout_p": dropout_p, "seed": seed, **extra}
    with torch.autocast(query.device.type, enabled=False):
        out = form(config.method)(config, query, *_grouped(query, key, value), mask=mask, **options)
    if shift < 0:
        return torch.cat((out.new_zeros(batch, heads, -shift, out.shape[-1]), out), 2)
    return out[:, :, shift:] if shift else out


def _parameters(config: MethodConfig, learned: dict[str, Tensor], query, key, value) -> dict:
    """{"parameters": ...} for a method that learns some: those given, for the others where conversion starts."""
    method = get_method(config.method)
    known = method.info.learned_parameters
    for name in learned:
        if name not in known:
            raise UnsupportedAttentionError(
                f"{config.method}: {unknown_name('learned parameter', name, known)}"
                if known
                else f"{config.method}: {name!r} is a tensor, and the method learns no parameters"
            )
    if method.parameters is None:
        return {}
    sizes = {"heads": query.shape[1], "width": query.shape[3], "value_width": value.shape[3]}
    missing = len(learned) < len(known)
    start = method.parameters(config, length=max(query.shape[2], key.shape[2]), **sizes) if missing else {}
    return {"parameters": {**{k: v.to(query.device) for k, v in start.items()}, **learned}}


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with as many heads as the queries."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def _under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, all tensors in its type, as torch does for its own attention."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device) or tensors[0].dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) for x in tensors)


def _check(config, query, key, value, mask, is_causal, scale, dropout_p, seed) -> None:
    """Everything that can be wrong with a call, before any work is done."""
    info = get_method(config.method).info
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"

    def refuse(sentence: str):
        raise UnsupportedAttentionError(f"{config.method}: {sentence}")

    if not query.ndim == key.ndim == value.ndim == 4:
        refuse(f"query, key and value are (batch, heads, length, width); got {shapes}")
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        refuse(f"these shapes do not fit together: {shapes}")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        refuse(f"{query.shape[1]} query heads cannot share {key.shape[1]} key heads: the second must divide the first")
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        refuse(f"query, key and value need one floating type; got {query.dtype}, {key.dtype}, {value.dtype}")
    if mask is not None:
        expected = (key.shape[0], key.shape[2])
        if mask.ndim == 4:
            refuse(
                "a 4-D attention mask is not supported: no (queries, keys) mask is ever built here. Give a bool mask "
                f"{expected} of the keys that are there (True = attend) and is_causal, or use attention 'sdpa'"
            )
        if tuple(mask.shape) != expected or mask.dtype != torch.bool:
            refuse(f"attention_mask must be bool {expected}, True = attend; got {mask.dtype} {tuple(mask.shape)}")
    if is_causal and not info.causal:
        refuse(f"it has no causal form. Methods that have one: {', '.join(causal_methods())}")
    if query.shape[2] != key.shape[2] and not info.rectangular and not is_causal:
        refuse(f"it needs as many queries as keys; got {query.shape[2]} and {key.shape[2]}")
    if not 0.0 <= dropout_p < 1.0:
        refuse(f"dropout_p={dropout_p!r} is not a probability below 1")
    if seed is not None and not isinstance(seed, (int, Tensor)):
        refuse(f"seed must be an integer or None, not {type(seed).__name__}")


def causal_methods() -> list[str]:
    """Names of the methods that have a causal form."""
    return [name for name in available_methods() if get_method(name).info.causal]


def rectangular_methods() -> list[str]:
    """Names of the methods that take more or fewer keys than queries."""
    return [name for name in available_methods() if get_method(name).info.rectangular]


def functional_form(name: str) -> Callable:
    """`functional.<name>_attention`: `attention` for one method, its hyperparameters spelt out in the signature."""
    info = get_method(name).info

    def call(query, key, value, *, attention_mask=None, is_causal=False, scale=None, dropout_p=0.0, seed=0, **options):
        options = {k: v for k, v in options.items() if v is not None or k not in info.learned_parameters}
        return attention(name, query, key, value, attention_mask=attention_mask, is_causal=is_causal, scale=scale,
                         dropout_p=dropout_p, seed=seed, **options)  # fmt: skip

    own = [f for f in dataclasses.fields(info.config_class) if f.name != "seed"]
    learned = [inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY, default=None) for k in info.learned_parameters]
    lines = "\n".join(f"    {f.name}: {f.metadata.get('help', '')} Default {f.default!r}." for f in own)
    call.__name__ = call.__qualname__ = f"{name}_attention"
    call.__doc__ = f"{info.title} ({info.paper}, {info.year}): {info.summary}\n\n{lines}\n\nThe rest as in `attention`."
    signature = inspect.signature(call)
    standard = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    extra = [inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default) for f in own]
    call.__signature__ = signature.replace(parameters=standard + extra + learned)
    return call
