"""The hyperparameters and facts that a method declares, the arguments that its forms get, and refusals of calls."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Generic, NamedTuple, NoReturn, TypeAlias, TypeVar

from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError, as_dict, shown, unknown_name
from hf_efficient_attn.ops.shards import Seed

ConfigT = TypeVar("ConfigT", bound="MethodConfig")

# The largest integer that can be used as a size and as a seed on every device.
_LARGEST = 2**31 - 1


def option(
    default: Any,
    help: str,
    *,
    minimum: int | None = None,
    maximum: int | None = None,
    choices: tuple[str, ...] | None = None,
    carried: bool = False,
) -> Any:
    """Declare a hyperparameter, that is, a field of a method's config.

    Args:
        default: the default value.
        help: one or two sentences for the command line and for the documentation of the functional form.
        minimum: the smallest allowed integer, or number if the default is a float. None: any value is allowed.
        maximum: the largest allowed number, if there is a minimum. None: 2**31 - 1.
        choices: the allowed strings. None: any value is allowed.
        carried: True if the hyperparameter determines the shape or the values of learned or random parameters. Training
            that moves a model from one method to another keeps the value of such a hyperparameter.
    """
    limits = {"minimum": minimum, "maximum": _LARGEST if maximum is None else maximum, "choices": choices}
    return field(default=default, metadata={"help": help, **limits, "carried": carried})


def _plain(value: Any) -> Any:
    """The value without a type of its own, such as numpy's float and an enum, and lists, as in JSON, as tuples."""
    value = value.value if isinstance(value, Enum) else value
    if isinstance(value, (list, tuple)):
        return tuple(_plain(x) for x in value)
    kind = next((x for x in (bool, int, float, str) if isinstance(value, x)), None)
    return value if kind in (None, type(value)) else kind(value)


def _is_plain(value: object) -> bool:
    """Whether JSON and Python code can hold what `_plain` returned."""
    if isinstance(value, tuple):
        return all(_is_plain(x) for x in value)
    return value is None or isinstance(value, (int, str)) or (isinstance(value, float) and abs(value) < math.inf)


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """Hyperparameters of one method. An instance is immutable, and its values are checked when it is made.

    A method subclasses this class as a frozen, keyword-only dataclass. It declares each hyperparameter with `option`,
    always including `seed`, and defines `budget` or `with_budget`. It sets the attributes below, without an annotation,
    in the class body.

    Attributes:
        text: `to_dict()` as Python code.
        compute_dtype: a hyperparameter of all methods; "bfloat16" has an effect where it is multiplied fast.
        method: the name of the method, which is also its `attn_implementation` in Transformers.
        title: the name as it is written in the text of documents.
        paper: authors, venue and year of the paper.
        year: the year in which the paper appeared.
        causal: True if the method has a causal form.
        rectangular: True if the number of keys may differ from the number of queries.
        learned_parameters: the names of the parameters that the method learns.
        mixes_queries: True if, in the bidirectional form, the output of one query depends on other queries, for example
            because they are sorted or averaged together. In the cross attention of a decoder this would leak later
            tokens to earlier ones, so such a method is not used there.
        trains_on_weights: False if learned parameters can make attention weights negative or change their sum. Then
            `hea.distill` refuses losses that compare weights.
        budget: names of hyperparameters that have a minimum, and the weights by which `with_budget` divides its columns
            over them. The last hyperparameter gets what rounding leaves.
        exact_budget: the hyperparameters whose sum is `exact_length`, unless the method defines that itself.
        decodes_exactly: True if decoding attends to all cached keys exactly. `hea.NearFarCache` can then take the place
            of these keys.
        knows_lse: True if the forms return the lse of each query, the log of the sum of its weights, where
            `AttentionOptions.sinks` ask for it. Then models with attention sinks can use the method.
        adds_causal_bias: True if the causal form can add a bias by distance, as `adds_distance_bias` says of the other.
        exportable: True if `torch.onnx.export` gives a graph that is right for any length and mask. Others are refused.
        default_rank: the position of the method among the default methods, fastest first. None: no default method.
        default_for: the uses of a default method: "compare", the command `benchmark`; "demo", the command `demo`; and
            "calibrate", the command `analyze` and `hea.calibrate`.
        default_variants: the hyperparameters of each variant of the method that the commands compare by default.
        cost: the time of a call with many tokens on a processor, relative to nearfar, both with default
            hyperparameters. Until a machine is measured, the length from which on a method is taken to be faster than
            exact attention is in proportion to it. Rather too high than too low, so that a vain attempt costs little.
        switches_to: for a method that is exact up to a length and beyond it computes another method, the name of the
            other method, whose crossover determines the length. Empty: the method does not switch.
        summary: what the method computes, in one line.
        paper_url: where the paper can be read. Empty: nowhere.
        near: which pairs of queries and keys are computed exactly, in a few words for tables. Empty: not stated.
        far: what stands for all other pairs, in a few words for tables. Empty: not stated.

    Raises:
        UnsupportedAttentionError: a value has the wrong type or is not allowed.
    """

    compute_dtype: str = option(
        "auto",
        "Dtype in which float32 inputs are computed: 'auto' is float32, and 'bfloat16' is faster and less accurate. It "
        "has no effect on inputs of another dtype and on processors without bfloat16 products.",
        choices=("auto", "bfloat16"),
    )
    text: ClassVar[str]  # each instance has its own; as a ClassVar it is not a field
    method: ClassVar[str] = ""
    title: ClassVar[str]
    paper: ClassVar[str]
    year: ClassVar[int]
    causal: ClassVar[bool]
    rectangular: ClassVar[bool]
    learned_parameters: ClassVar[tuple[str, ...]] = ()
    mixes_queries: ClassVar[bool] = True
    trains_on_weights: ClassVar[bool] = True
    budget: ClassVar[tuple[tuple[str, int], ...]] = ()
    exact_budget: ClassVar[tuple[str, ...]] = ()
    decodes_exactly: ClassVar[bool] = False
    knows_lse: ClassVar[bool] = False
    adds_causal_bias: ClassVar[bool] = False
    exportable: ClassVar[bool] = False
    default_rank: ClassVar[int | None] = None
    default_for: ClassVar[tuple[str, ...]] = ("compare", "calibrate")
    default_variants: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    cost: ClassVar[float] = 1.0
    switches_to: ClassVar[str] = ""
    summary: ClassVar[str]
    paper_url: ClassVar[str] = ""
    near: ClassVar[str] = ""
    far: ClassVar[str] = ""

    def __new__(cls: type[ConfigT], *args: object, **hyperparameters: object) -> ConfigT:
        """Refuse unknown hyperparameters as `from_dict` does, where Python raises a TypeError."""
        known = cls.hyperparameters()
        if args:
            names = ", ".join(f"{name}=..." for name in known)
            refuse(f"{cls.__name__} takes hyperparameters by name, not {shown(args[0])} alone: {names}", cls)
        for name in hyperparameters:
            if name not in known:
                refuse(unknown_name("hyperparameter", name, known), cls)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = _plain(getattr(self, spec.name))
            object.__setattr__(self, spec.name, value)
            minimum, maximum, choices = (spec.metadata.get(x) for x in ("minimum", "maximum", "choices"))
            setting = f"{spec.name}={value!r}"
            if choices is not None and (not isinstance(value, str) or value not in choices):
                refuse(f"{setting} is not an allowed value: {unknown_name(spec.name, value, choices)}", self)
            if isinstance(spec.default, bool) and not isinstance(value, bool):
                refuse(f"{setting} must be True or False", self)
            if minimum is None or maximum is None:
                if not _is_plain(value):
                    refuse(f"{setting} must be None, True, False, a finite number, a string or a list of these", self)
                continue
            kind, types = ("a number", (int, float)) if isinstance(spec.default, float) else ("an integer", (int,))
            if isinstance(value, bool) or not isinstance(value, types):
                refuse(f"{setting} must be {kind}, not {type(value).__name__}", self)
            if not minimum <= value <= maximum:
                refuse(f"{setting} must be at least {minimum} and at most {maximum}", self)
        # A graph cannot make text of a number that differs between calls, but text itself is a constant of it.
        object.__setattr__(self, "text", repr(self.to_dict()))

    @classmethod
    def hyperparameters(cls) -> tuple[str, ...]:
        """Return the names of all hyperparameters."""
        # torch.compile cannot trace `dataclasses.fields` of a class. The fields of the base class are the facts above.
        own = (name for name in cls.__dataclass_fields__ if name not in MethodConfig.__dataclass_fields__)
        return (*own, "compute_dtype")

    def to_dict(self) -> dict[str, Any]:
        """Return the method's name and all hyperparameters, as values that JSON can represent.

        Without `compute_dtype`, if it has its default.
        """
        values = {name: getattr(self, name) for name in self.hyperparameters()}
        if self.compute_dtype == "auto":
            del values["compute_dtype"]
        return {"method": self.method, **{k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}}

    @classmethod
    def from_dict(cls: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
        """Inverse of `to_dict`. Hyperparameters that are missing get their defaults.

        Raises:
            UnsupportedAttentionError: the method has no such hyperparameter, or the dictionary is another method's.
        """
        values = as_dict(values, f"the argument of {cls.__name__}.from_dict")
        method = values.pop("method", cls.method)
        if method != cls.method:
            refuse(f"{cls.__name__} cannot be made from the dictionary of another method, {method!r}", cls)
        return cls(**values)

    @property
    def exact_length(self) -> int:
        """The number of keys up to which the output is exact attention; 0 if the method differs at every length."""
        return sum(getattr(self, name) for name in self.exact_budget)

    @property
    def relative_cost(self) -> float:
        """`cost` with these hyperparameters: more in proportion to a larger budget, and the same for a smaller one."""
        default = type(self)().exact_length
        return self.cost * max(1.0, self.exact_length / default if default else 1.0)

    @property
    def needs_square(self) -> bool:
        """Whether it needs as many queries as keys. Some hyperparameters of a `rectangular` method do."""
        return not self.rectangular

    @property
    def adds_distance_bias(self) -> bool:
        """Whether it can add a bias to the scores that depends on the distance of key and query, as T5 has it.

        A method can if it computes the scores of all its pairs, or knows where the keys of its far field are.
        """
        return False

    def check_causal(self) -> None:
        """Refuse hyperparameters that have no effect in the causal form, for a decoder. A method has its own checks."""

    def with_budget(self: ConfigT, columns: int) -> ConfigT:
        """Return a copy of which every head costs, per query, as much as `columns` exact keys.

        Only hyperparameters that this cost depends on change: those in `budget`, or those that the method's own form of
        this function names. The default config may divide the same cost in another way, or spend it in some heads only.

        Raises:
            UnsupportedAttentionError: `columns` is not a positive integer, or it is too small for the method.
        """
        minima = {name: self.__dataclass_fields__[name].metadata["minimum"] for name, _ in self.budget}
        self.check_budget(columns, max(1, sum(minima.values())))
        total = sum(weight for _, weight in self.budget)
        (*others, (last, _)) = self.budget
        parts = {name: max(minima[name], columns * weight // total) for name, weight in others}
        return dataclasses.replace(self, **parts, **{last: columns - sum(parts.values())})

    def variants(self) -> tuple[Mapping[str, Any], ...]:
        """The hyperparameters, besides a budget, that `hea.calibrate` tries in the bidirectional form."""
        return ({},)

    def to_measure(self: ConfigT) -> ConfigT:
        """The config whose error `hea.calibrate` measures, in which no data of a call decides about the method."""
        return self

    def calibrated(self: ConfigT, max_error: float, accepted: bool) -> ConfigT | None:
        """Return the config of a layer that `hea.calibrate` stores, or None for exact attention.

        Args:
            max_error: the limit of the error.
            accepted: whether the error of `to_measure` keeps it.
        """
        return self if accepted else None

    @classmethod
    def check_budget(cls, columns: int, minimum: int = 1) -> int:
        """Return `columns` if it is an integer that is at least `minimum`, and raise an error otherwise."""
        if isinstance(columns, bool) or not isinstance(columns, int) or columns < minimum:
            refuse(f"a budget of {columns!r} columns is not possible; give an integer of {minimum} or more", cls)
        return columns


class AttentionOptions(NamedTuple):
    """The arguments of a call to a method besides query, key and value.

    Attributes:
        key_mask: bool (B, Nk), True for the keys to attend to; None if there is no padding. In a call to a method, key
            and value are 0 wherever the mask is False.
        is_causal: query i attends to the keys 0 to i only; Nq = Nk.
        scale: the factor of the scores q . k.
        dropout_p: the probability with which an attention weight is dropped. 0 outside of training.
        seed: the seed of everything that is drawn, for `hf_efficient_attn.ops.draws`: an integer or a scalar tensor,
            and a `HeadSeed` if the call has some heads of a layer. It includes the config's own seed.
        parameters: the learned parameters by name; empty for a method that learns none. Parameters of heads belong to
            the heads of the call.
        distance_bias: (H, 2R + 1), the bias of the scores of each head for the distances -R to R of the key from the
            query. Larger distances have the bias for -R or R. None for no bias. Only methods whose config says
            `adds_distance_bias` get one.
        sinks: (H,), attention sinks: the score of one more key of each head, whose value is 0; or None. Only methods
            whose config says `knows_lse` get them. A form does not use their values: it returns the lse of each query
            as one more column of its output, (B, H, Nq, Dv + 1), in float32, or float64 for float64 inputs.
        first_query: the first query whose output is used. A causal form may leave out the outputs of those before it.
        with_lse: whether there are sinks, so that the forms return the lse as well.
    """

    key_mask: Tensor | None
    is_causal: bool
    scale: float
    dropout_p: float
    seed: Seed
    parameters: Mapping[str, Tensor]
    distance_bias: Tensor | None = None
    sinks: Tensor | None = None
    first_query: int = 0
    with_lse: bool = False


class HiddenProjections(NamedTuple):
    """The affine maps of a layer from hidden states (B, N, W) to keys and to values, each (B, N, H * D)."""

    to_key: Callable[[Tensor], Tensor]
    to_value: Callable[[Tensor], Tensor]


# See `register_method`.
AttentionForward: TypeAlias = Callable[[ConfigT, Tensor, Tensor, Tensor, AttentionOptions], Tensor]
State: TypeAlias = tuple[Tensor, ...]  # see `Recurrence`


@dataclass(frozen=True)
class Recurrence(Generic[ConfigT]):
    """The operations of a causal method that can represent all past keys and values by a state of constant size.

    A state is a named tuple of tensors (B, H_kv, ...), float32, or float64 if the input is float64. All calls on one
    state, and the call on the whole sequence that they reproduce, must use the same scale and the same seed.

    Attributes:
        update: update(config, state, key, value, options) returns the state after the tokens of key (B, H_kv, N, D) and
            value (B, H_kv, N, Dv). `state` is None before the first tokens.
        query: query(config, state, query, options) returns the attention of query (B, H, N, D) to all tokens of the
            state, (B, H, N, Dv). Here the state has H heads.
        forward: forward(config, query, key, value, options, initial_state) returns (B, H, N, Dv). Query i attends to
            all tokens of the initial state and to the keys 0 to i. Here the state has H heads.
    """

    update: Callable[..., State]
    query: Callable[..., Tensor]
    forward: Callable[..., Tensor]


@dataclass(frozen=True)
class ShardedForm(Generic[ConfigT]):
    """Attention of a sequence whose tokens are divided over processes, which exchange only summaries of the keys.

    The output and the gradients equal those of `forward` on the whole sequence, up to rounding. Without this form, each
    process computes all tokens of some heads, and the tokens are sent there and back.

    Attributes:
        forward: forward(config, query, key, value, options, shards) returns the output (B, H, n, Dv) for the query
            (B, H, n, D) of the n tokens of this process, whose keys (B, H_kv, n, D) and values (B, H_kv, n, Dv) are not
            repeated. `options.key_mask` is the mask of these tokens, and `shards` (`hf_efficient_attn.ops.shards`)
            has their positions. All processes must call the same collectives.
        applies: applies(config, length, is_causal) says whether the form computes sequences of so many tokens in all
            processes together with these hyperparameters.
    """

    forward: Callable[..., Tensor]
    applies: Callable[[ConfigT, int, bool], bool]


# The arguments of `attention` besides tensors and hyperparameters, and what other packages call them.
ARGUMENTS = ("attention_mask", "is_causal", "scale", "dropout_p", "parameters", "distance_bias", "heads", "sinks")
MASK_ADVICE = "use attention_mask, bool (B, Nk), True = attend, and is_causal"
# What to do instead of arguments of attention in PyTorch and Transformers, and of `hea.convert`, and their names.
_INSTEAD = {
    MASK_ADVICE: ("attn_mask", "mask", "key_mask", "padding_mask"),
    f"{MASK_ADVICE}; key_padding_mask is True for padding, so give its opposite": ("key_padding_mask",),
    "use is_causal": ("causal",),
    "use scale": ("scaling", "softmax_scale"),
    "use dropout_p": ("dropout", "attention_dropout"),
    "leave it out, because key and value may always have fewer heads than the query": ("enable_gqa",),
    "leave it out, because no matrix of weights is computed": ("output_attentions", "need_weights"),
    "use distance_bias, which depends on the distance alone, not on the pair": ("attn_bias", "position_bias"),
    "the naive form has no dropout": ("dropout_p",),
    "it belongs to hea.convert, because this call is one layer": ("layers",),
}


def check_names(config: MethodConfig, hyperparameters: Mapping[str, Any]) -> None:
    """Refuse keyword arguments of a call that are neither hyperparameters nor learned parameters, which are tensors."""
    known = (*config.hyperparameters(), *config.learned_parameters)
    for name, value in hyperparameters.items():
        if name not in known:
            for advice, names in _INSTEAD.items():
                if name in names:
                    refuse(f"{name!r} is no argument here: {advice}", config)
            refuse(unknown_name("hyperparameter", name, (*known, *ARGUMENTS)), config)
        if name in config.learned_parameters and not isinstance(value, Tensor):
            refuse(no_tensor(name, value), config)


def no_tensor(name: str, value: object) -> str:
    """Return the message for an argument that must be a tensor."""
    return f"{name} must be a tensor, not a {type(value).__name__}: give torch.as_tensor({name})"


def refuse(problem: str, config: MethodConfig | type[MethodConfig]) -> NoReturn:
    """Refuse a call of a method, or a config of it."""
    raise UnsupportedAttentionError(f"{config.method}: {problem}")
