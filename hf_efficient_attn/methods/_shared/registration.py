"""How a method is registered: what it must consist of, and the checks."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping

from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError, shown
from hf_efficient_attn.methods._shared.config import ConfigT, MethodConfig
from hf_efficient_attn.methods._shared.registry import (
    AttentionForward,
    Method,
    MethodInfo,
    Recurrence,
    ShardedForm,
    add_method,
)

# Transformers interprets these parts of the name of an attention implementation.
_RESERVED = ("flash", "/", "sdpa", "flex_attention", "|")
_FACTS = ("method", "title", "paper", "year", "causal", "rectangular", "summary")
# Arguments of `attention` and keys of `config.efficient_attention`.
_TAKEN = (
    "method",
    "layers",
    "version",
    "attention_mask",
    "is_causal",
    "scale",
    "dropout_p",
    "parameters",
    "distance_bias",
)


def register_method(
    config_class: type[ConfigT],
    *,
    forward: AttentionForward[ConfigT],
    naive: AttentionForward[ConfigT],
    decode: AttentionForward[ConfigT] | None = None,
    initial_parameters: Callable[..., dict[str, Tensor]] | None = None,
    starts_from: Mapping[str, str] | None = None,
    recurrence: Recurrence[ConfigT] | None = None,
    forward_hidden_states: Callable[..., Tensor] | None = None,
    sharded: ShardedForm[ConfigT] | None = None,
    replace: bool = False,
) -> None:
    """Add a method, of this package or from a user's own file, under the name `config_class.method`.

    From then on the method is available in the functional form, in Transformers as an `attn_implementation` and in
    saved configs. Every command takes the file that registers it::

        hf-efficient-attn info first_keys --import my_method.py

    Args:
        config_class: a frozen, keyword-only dataclass that subclasses `MethodConfig`. It declares the hyperparameters,
            all with defaults, sets the facts about the method as class attributes, and defines `with_budget`.
        forward: the fast form. forward(config, query, key, value, options) returns the output (B, H, Nq, Dv) for query
            (B, H, Nq, D), key (B, H, Nk, D), value (B, H, Nk, Dv) and `AttentionOptions`. The inputs have been checked,
            keys and values have as many heads as the queries, and they are 0 wherever `options.key_mask` is False.
        naive: the readable form with dense (Nq, Nk) matrices. It has the same signature, and tests compare the two. A
            method that is dense itself may give the same function twice.
        decode: causal attention of the last few queries (B, H, Nq, D) to the keys of all positions, with the same
            signature. Without it, decoding one token costs as much as the whole sequence.
        initial_parameters: for a method with learned parameters, initial_parameters(config, *, num_heads, head_dim,
            value_dim, max_length) returns the values that a conversion starts from: float32 tensors of one layer by
            their names, for sequences of up to `max_length` tokens. It may also take `num_kv_heads`, the number of key
            heads.
        starts_from: for a learned parameter, the name of the parameter that it is initialised with when a model is
            switched from a method that has the latter but not the former.
        recurrence: the operations of a causal method that can decode from a state of constant size.
        forward_hidden_states: for a method that is cheaper to compute from hidden states than from keys and values,
            forward_hidden_states(config, query, hidden_states, projections, options) returns the same output up to
            rounding. `hidden_states` (B, N, W) is 0 wherever `options.key_mask` is False, and `projections` is a
            `HiddenProjections`.
        sharded: the form for a sequence that several processes share (`hea.sequence_parallel`).
        replace: replace a method that has the same name, for example when a notebook cell runs again.

    Raises:
        UnsupportedAttentionError: the name is taken or not allowed, a fact is missing, or the config class and the
            functions do not fit together.

    A complete example is in the guide "A method in your own file".
    """
    _check(config_class, forward, naive, initial_parameters, recurrence)
    info = MethodInfo(
        name=config_class.method,
        title=config_class.title,
        paper=config_class.paper,
        year=config_class.year,
        causal=config_class.causal,
        rectangular=config_class.rectangular,
        recurrent=recurrence is not None,
        learned_parameters=tuple(config_class.learned_parameters),
        config_class=config_class,
        summary=config_class.summary,
        paper_url=config_class.paper_url,
        near=config_class.near,
        far=config_class.far,
    )
    method = Method(
        info=info,
        default=config_class(),
        forward=forward,
        naive=naive,
        decode=decode,
        initial_parameters=None if initial_parameters is None else _sized(initial_parameters),
        starts_from=dict(starts_from or {}),
        recurrence=recurrence,
        forward_hidden_states=forward_hidden_states,
        sharded=sharded,
    )
    add_method(method, replace)


def _sized(initial_parameters: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    """The function with `num_kv_heads` as a further argument, by default the number of heads, even if it takes none."""
    takes = inspect.signature(initial_parameters).parameters
    counts = "num_kv_heads" in takes or any(x.kind is x.VAR_KEYWORD for x in takes.values())

    @functools.wraps(initial_parameters)
    def sized(
        config: MethodConfig, *, num_heads: int, num_kv_heads: int | None = None, **sizes: int
    ) -> dict[str, Tensor]:
        if counts:
            sizes["num_kv_heads"] = num_kv_heads or num_heads
        return initial_parameters(config, num_heads=num_heads, **sizes)

    return sized


def _check(
    config_class: type[MethodConfig],
    forward: object,
    naive: object,
    initial_parameters: object,
    recurrence: object,
) -> None:
    """Check what would otherwise fail only when the new method is used."""
    if not (isinstance(config_class, type) and issubclass(config_class, MethodConfig)):
        raise UnsupportedAttentionError(
            f"the first argument of register_method must be a subclass of MethodConfig; got {shown(config_class)}"
        )

    def refuse(problem: str) -> None:
        raise UnsupportedAttentionError(f"{config_class.__name__}: {problem}")

    missing = [fact for fact in _FACTS if not hasattr(config_class, fact) or getattr(config_class, fact) in ("", None)]
    if missing:
        refuse(f"the class attributes {', '.join(missing)} are missing; MethodConfig documents them")
    name = config_class.method
    for part in _RESERVED:
        if part in name:
            refuse(f"method={name!r} must not contain {part!r}, because Transformers gives it a special meaning")
    if not name.isidentifier() or name == "eager":
        refuse(f"method={name!r} must be a Python identifier other than 'eager'")
    if any(isinstance(value, dataclasses.Field) for value in vars(config_class).values()):
        refuse("decorate the class with @dataclass(frozen=True, kw_only=True)")
    for spec in dataclasses.fields(config_class):
        if spec.name in _TAKEN:
            refuse(f"{spec.name!r} cannot be the name of a hyperparameter, because it has another meaning in a call")
        if spec.default is dataclasses.MISSING:
            refuse(f"the hyperparameter {spec.name!r} needs a default; declare it with `option`")
    if "seed" not in config_class.hyperparameters():
        refuse("the hyperparameter 'seed' is missing; every method has it, even if nothing is drawn")
    if config_class.with_budget is MethodConfig.with_budget:
        refuse("define with_budget(self, columns)")
    for form in (forward, naive):
        if not callable(form):
            raise UnsupportedAttentionError(
                f"{config_class.__name__}: a method needs a forward and a naive form; naive=forward is allowed"
            )
        try:
            inspect.signature(form).bind(*("config", "query", "key", "value", "options"))
        except TypeError as error:
            refuse(f"{form!r} must accept (config, query, key, value, options): {error}")
    if bool(config_class.learned_parameters) != (initial_parameters is not None):
        refuse("learned_parameters and initial_parameters must be given together")
    if recurrence is not None and not config_class.causal:
        refuse("a method with a recurrence must be causal")
