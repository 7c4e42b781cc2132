"""Random cases of the promises: what Hypothesis draws for each of them, from the config of each method."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import hypothesis
import torch
from hypothesis import strategies as st

import hf_efficient_attn as hea
import promises
from instances import CONTENTS, FIRST, Instance

PADDINGS = ("left", "right", "holes", "empty", "one", "all")
# Numbers for which rounding, which depends on the shape of a product, decides no hash, sample or rank. With equal keys
# minus their mean, for example, nothing but rounding is left, so these are for checks that compare bit by bit.
GENERIC = ("outlier", "aligned", "smooth", "scales", "tiny")
# Tables are made for a longest sequence, so these are at least as long as every sequence of a case. Otherwise the
# initial tables would depend on the length, and so would the output.
_MAX_LENGTHS = (150, 151, 600, 2400)
# The largest values that are drawn, for hyperparameters that cost time or are limited.
_LARGEST = {"num_hashes": 12, "pinv_iterations": 8, "error_percent": 200, "score_groups": 12}


def check(promise: str, instance: Instance, arguments: dict[str, Any]) -> None:
    """Run the check of a promise in `promises.py`."""
    getattr(promises, f"check_{promise}")(instance, **arguments)


@dataclass(frozen=True)
class Case:
    """One check of one promise of a method. Its text is the code that repeats it."""

    promise: str
    method: str
    hyperparameters: dict[str, Any]
    arguments: dict[str, Any]

    def check(self, row: Instance | None = None) -> None:
        """Run the check. `row` describes a method that has no row in `instances.py`."""
        instance = (row or FIRST[self.method]).vary(self.hyperparameters)
        check(self.promise, instance, self.arguments)


class Draw:
    """Draws the parts of a case for one instance. Hypothesis reduces a failure towards the first of the values."""

    def __init__(self, draw: st.DrawFn, instance: Instance, is_causal: bool | None = None) -> None:
        self.draw, self.instance = draw, instance
        self.is_causal = self.choice(*instance.forms) if is_causal is None else is_causal

    def choice(self, *values: Any) -> Any:
        return self.draw(st.sampled_from(values))

    def between(self, smallest: int, largest: int) -> int:
        return self.draw(st.integers(smallest, largest))

    def length(self, smallest: int = 1, largest: int = 150) -> int:
        """A number of tokens, often next to a multiple of a hyperparameter, where blocks and budgets end."""
        sizes = [v for v in vars(self.instance.config()).values() if type(v) is int and 0 < v < 60]
        sizes += [self.instance.budget] if self.instance.budget else []
        ends = [n * size + d for size in sizes for n in (1, 1, 2, 3, 4) for d in (-1, 0, 1)]
        ends = [n for n in ends if smallest <= n <= largest] or [smallest]
        return self.draw(
            st.integers(smallest, min(30, largest)) | st.sampled_from(ends) | st.integers(smallest, largest)
        )

    def heads(self) -> dict[str, Any]:
        """Heads, dimensions and seed, and numbers whose rounding matters to nothing."""
        num_kv_heads, head_dim = self.choice(1, 1, 2, 3), self.choice(1, 2, 3, 4, 5, 8, 9, 16)
        return {
            "num_heads": num_kv_heads * self.choice(1, 1, 2, 3),
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "value_dim": self.choice(head_dim, head_dim, 1, 5),
            "seed": self.seed(),
            "content": self.choice(*["normal"] * len(GENERIC), *GENERIC),
        }

    def shape(self, **fixed: Any) -> dict[str, Any]:
        """Arguments of `inputs` that the instance supports."""
        q_len = self.length()
        rectangular = self.instance.rectangular and not self.is_causal and self.choice(False, False, True)
        kv_len = self.length() if rectangular else q_len
        return {"batch": self.choice(1, 1, 2, 3), "q_len": q_len, "kv_len": kv_len, **self.heads(), **fixed}

    def any_content(self) -> str:
        return self.choice("normal", "normal", *CONTENTS)

    def padding(self) -> str:
        return self.choice("none", *PADDINGS)

    def seed(self) -> int:
        return self.between(0, 9999)

    def dtype(self) -> torch.dtype:
        return self.choice(torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)

    def form(self) -> dict[str, Any]:
        return {"is_causal": self.is_causal}


def hyperparameters(row: Instance) -> st.SearchStrategy[dict[str, Any]]:
    """Valid values of a method's hyperparameters, from what its config declares about each of them."""
    values: dict[str, st.SearchStrategy[Any]] = {}
    for spec in dataclasses.fields(row.info.config_class):
        minimum, choices = spec.metadata.get("minimum"), spec.metadata.get("choices")
        if spec.name == "compute_dtype":  # the checks expect the accuracy of the inputs' dtype
            continue
        if spec.name == "max_length":
            values[spec.name] = st.sampled_from(_MAX_LENGTHS)
        elif isinstance(spec.default, bool):
            values[spec.name] = st.booleans()
        elif choices is not None:
            values[spec.name] = st.sampled_from(choices)
        elif spec.name == "seed":
            values[spec.name] = st.integers(0, 2**31 - 1)
        elif isinstance(spec.default, float):
            values[spec.name] = st.sampled_from(
                [x for x in (0.0, 0.04, 0.3, 0.6, 1.0, 3.0, 10.0) if x >= (minimum or 0)]
            )
        elif minimum is not None:
            largest = _LARGEST.get(spec.name, 40)
            values[spec.name] = st.integers(minimum, 8) | st.integers(minimum, largest)

    def is_valid(drawn: dict[str, Any]) -> bool:
        try:
            return bool(row.info.config_class(**drawn))
        except hea.UnsupportedAttentionError:  # a combination that is not allowed
            return False

    return st.fixed_dictionaries(values).filter(is_valid)


class Promise(NamedTuple):
    """How random cases of a promise are made.

    Attributes:
        draw: draws the arguments of the check.
        share: how many cases are drawn, relative to other promises. What takes seconds is rare.
        applies: whether the instance makes this promise.
    """

    draw: Callable[[Draw], dict[str, Any]]
    share: float = 1.0
    applies: Callable[[Instance], bool] = lambda instance: True


def _length_and_cut(d: Draw) -> dict[str, Any]:
    length = d.length(2)
    return {"length": length, "cut": min(d.length(), length - 1)}


def _exact(d: Draw) -> dict[str, Any]:
    length = d.choice(1, d.instance.budget, d.between(1, d.instance.budget))
    rest = d.shape(content=d.any_content(), q_len=length, kv_len=length)
    return {**d.form(), "length": length, "padding": d.padding(), **rest}


def _last_queries(d: Draw) -> dict[str, Any]:
    length = d.length(2)
    # More than 128 new queries are not decoded, but computed like a whole sequence.
    most = min(length - 1, 128) if d.instance.exact_steps else length - 1
    last = min(d.choice(1, 1, 2, d.length()), most)
    return {"last": last, "padding": d.padding(), **d.heads(), "batch": d.choice(1, 2), "q_len": length}


def _state(d: Draw) -> dict[str, Any]:
    length = d.length()
    every = length < 30 and d.choice(False, False, True)
    cuts = range(length) if every else sorted(d.draw(st.sets(st.integers(0, length), max_size=20)))
    return {"cuts": list(cuts), "padding": d.padding(), "q_len": length, **d.heads()}


def _finite(d: Draw) -> dict[str, Any]:
    dtype = d.choice(torch.float32, torch.bfloat16, torch.float16)
    sizes = {"length": d.length(), "head_dim": d.choice(1, 4, 16, 64), "seed": d.seed()}
    autocast = dtype != torch.float32 and d.choice(False, True)
    return {
        **d.form(),
        "dtype": dtype,
        "logit": d.choice(0.0, 1.0, 30.0, 100.0, 1e3, 1e4),
        "autocast": autocast,
        **sizes,
    }


def _gradients(d: Draw) -> dict[str, Any]:
    length = d.length(5, 20)
    sizes = {"length": length, "value_dim": d.choice(1, 2, 3), "seed": d.seed()}
    return {**d.form(), **sizes, "fast_mode": length > 8 or d.choice(True, True, False)}


def _naive_gradients(d: Draw) -> dict[str, Any]:
    # In the readable form queries without a key have no gradient, and in a window such are queries far in the padding.
    padding = "none" if d.instance.reads_positions else d.choice("none", "right")
    return {**d.form(), "padding": padding, **d.shape(batch=d.choice(1, 2))}


def _budget(d: Draw) -> dict[str, Any]:
    heads = {key: value for key, value in d.heads().items() if key not in ("num_heads", "num_kv_heads")}
    # The global tokens are a part of the budget.
    smallest = d.instance.hyperparameters.get("global_tokens", 0) // 2 + 1
    return {**d.form(), "length": d.length(smallest), **heads}


def _seeds(d: Draw) -> dict[str, Any]:
    return {**d.form(), **d.shape(dtype=d.dtype(), content=d.any_content())}


def _masked_keys(d: Draw) -> dict[str, Any]:
    return {**_seeds(d), "padding": d.choice(*PADDINGS), "dtype": d.choice(torch.float32, torch.float64)}


def _padding(d: Draw) -> dict[str, Any]:
    kinds = ("left", "right") if d.instance.reads_positions else ("left", "right", "holes", "empty", "one")
    shape = {**d.form(), **d.heads(), "batch": d.choice(1, 2)}
    return {**shape, "length": d.length(1, d.choice(70, 150)), "padding": d.choice(*kinds)}


def _sums(d: Draw) -> dict[str, Any]:
    shape = {"q_len": d.length(), "seed": d.seed(), "num_heads": 1, "spread": 0.05}
    return {**d.form(), "dtype": d.choice(torch.bfloat16, torch.float16), **shape}


def _has_long_tables(instance: Instance) -> bool:
    return instance.hyperparameters.get("max_length", 2400) >= 2400


def _is_causal(instance: Instance) -> bool:
    return instance.info.causal


PROMISES = {
    "shapes": Promise(lambda d: {"padding": d.padding(), **_seeds(d)}),
    "exact": Promise(_exact, applies=lambda i: i.budget > 0),
    "arguments": Promise(lambda d: {**d.form(), "padding": d.padding(), **d.shape()}),
    "masked_keys": Promise(_masked_keys, share=2.0),
    "masked_gradients": Promise(lambda d: {**d.form(), **d.shape(batch=d.choice(1, 2))}),
    "empty_queries": Promise(lambda d: {**d.form(), "length": d.length(2), **d.heads(), "content": "normal"}),
    "padding": Promise(_padding, share=2.0),
    "future": Promise(
        lambda d: {**_length_and_cut(d), "padding": d.padding(), **d.heads(), "content": d.any_content()},
        share=2.0,
        applies=_is_causal,
    ),
    "length": Promise(
        lambda d: {**_length_and_cut(d), **d.heads()}, applies=lambda i: _is_causal(i) and not i.switches
    ),
    "last_queries": Promise(_last_queries, applies=_is_causal),
    "state": Promise(_state, share=2.0, applies=lambda i: i.info.recurrent),
    "batch": Promise(lambda d: {**d.form(), "padding": d.padding(), **d.shape(batch=d.choice(2, 3, 4))}),
    "seeds": Promise(_seeds),
    "finite": Promise(_finite),
    "sums": Promise(_sums, applies=lambda i: i.averages),
    "gradients": Promise(_gradients, share=0.4),
    "naive": Promise(
        lambda d: {**d.form(), "padding": d.padding(), "scale": d.choice(None, None, 0.0, -0.5, 1.7), **d.shape()},
        share=2.0,
    ),
    "naive_gradients": Promise(_naive_gradients),
    "whole_budget": Promise(_budget, applies=lambda i: i.limit in ("exact", "bounded")),
    "refused": Promise(lambda d: {"what": d.choice(*promises.REFUSED), "q_len": d.length(2), "seed": d.seed()}),
    "largest_tensor": Promise(
        lambda d: {**d.form(), "length": d.between(400, 600), "num_heads": 1, "content": d.any_content()},
        share=0.05,
        applies=_has_long_tables,
    ),
}


@st.composite
def drawn_arguments(draw: st.DrawFn, name: str, instance: Instance, is_causal: bool | None = None) -> dict[str, Any]:
    """Arguments of the check of a promise, for one instance."""
    return PROMISES[name].draw(Draw(draw, instance, is_causal))


@st.composite
def cases(draw: st.DrawFn, name: str, row: Instance) -> Case:
    """Cases of a promise with any hyperparameters of a method."""
    drawn = draw(hyperparameters(row).filter(lambda values: PROMISES[name].applies(row.vary(values))))
    return Case(name, row.method, drawn, draw(drawn_arguments(name, row.vary(drawn))))


def attack(name: str, row: Instance, examples: int, **options: Any) -> None:
    """Check a promise of a method on random cases. Hypothesis reduces a failure and shows the case."""

    @hypothesis.settings(max_examples=examples, **options)
    @hypothesis.given(cases(name, row))
    def run(case: Case) -> None:
        case.check(row)

    run()
