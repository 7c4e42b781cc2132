"""Random cases of the promises: what is drawn for each, from the config of each method. `attack.py` runs them.

A case is a promise, a method, hyperparameters and the arguments of the promise's check, all as JSON values.
"""

import dataclasses
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import hf_efficient_attn as hea
import promises
from instances import CONTENTS, INSTANCES, Instance
from tiny_models import DECODERS, ENCODERS

ROWS = {instance.method: instance for instance in reversed(INSTANCES)}

PADDINGS = ("left", "right", "holes", "empty", "one", "all")
# Numbers for which rounding, which depends on the shape of a product, decides no hash, sample or rank. With equal keys
# minus their mean, for example, nothing but rounding is left, so these are for checks that compare bit by bit.
GENERIC = ("outlier", "aligned", "smooth", "scales", "tiny")
# Tables are made for a longest sequence, so these are at least as long as every sequence of a case. Otherwise the
# initial tables would depend on the length, and so would the output.
_MAX_LENGTHS = (150, 151, 600, 2400)
# The largest values that are drawn, for hyperparameters that cost time or are limited.
_LARGEST = {"num_hashes": 12, "pinv_iterations": 8, "error_percent": 200, "num_probes": 40, "score_groups": 12}


@dataclass(frozen=True)
class Case:
    """One check of one promise of a method, as JSON values; see the top of this file."""

    promise: str
    method: str
    hyperparameters: dict[str, Any]
    arguments: dict[str, Any]

    @classmethod
    def from_json(cls, text: str) -> "Case":
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    def run(self, row: Instance | None = None) -> None:
        """Run the check. `row` describes a method that has no row in `instances.py`."""
        self.check((row or ROWS[self.method]).vary(self.hyperparameters))

    def check(self, instance: Instance) -> None:
        """Run the check on an instance that has the hyperparameters."""
        arguments = dict(self.arguments)
        if "dtype" in arguments:
            arguments["dtype"] = getattr(torch, arguments["dtype"])
        PROMISES[self.promise].check(instance, **arguments)


class Draw:
    """Draws the parts of a case for one instance."""

    def __init__(self, rng: random.Random, instance: Instance, is_causal: bool | None = None) -> None:
        self.rng, self.instance = rng, instance
        self.is_causal = rng.choice(instance.forms) if is_causal is None else is_causal

    def choice(self, *values: Any) -> Any:
        return self.rng.choice(values)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def length(self, smallest: int = 1, largest: int = 150) -> int:
        """A number of tokens, often next to a multiple of a hyperparameter, where blocks and budgets end."""
        sizes = [v for v in vars(self.instance.config()).values() if type(v) is int and 0 < v < 60]
        sizes += [self.instance.budget] if self.instance.budget else []
        kind = self.rng.random()
        if kind < 0.4 and sizes:  # at the end of a block or of the budget
            length = self.rng.choice(sizes) * self.choice(1, 1, 2, 3, 4) + self.choice(-1, 0, 1)
        elif kind < 0.75:
            length = self.rng.randint(1, 30)
        else:
            length = self.rng.randint(1, largest)
        return min(max(length, smallest), largest)

    def heads(self) -> dict[str, Any]:
        """Heads, dimensions and seed, and numbers whose rounding matters to nothing."""
        num_kv_heads, head_dim = self.choice(1, 1, 2, 3), self.choice(1, 2, 3, 4, 5, 8, 9, 16)
        return {
            "num_heads": num_kv_heads * self.choice(1, 1, 2, 3),
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "value_dim": self.choice(head_dim, head_dim, 1, 5),
            "seed": self.seed(),
            "content": "normal" if self.chance(0.5) else self.choice(*GENERIC),
        }

    def shape(self, **fixed: Any) -> dict[str, Any]:
        """Arguments of `inputs` that the instance supports."""
        q_len = self.length()
        rectangular = self.instance.rectangular and not self.is_causal
        rectangular = rectangular and self.chance(0.3)
        kv_len = self.length() if rectangular else q_len
        return {"batch": self.choice(1, 1, 2, 3), "q_len": q_len, "kv_len": kv_len, **self.heads(), **fixed}

    def any_content(self) -> str:
        return "normal" if self.chance(0.2) else self.choice(*CONTENTS)

    def padding(self) -> str:
        return self.choice("none", *PADDINGS)

    def seed(self) -> int:
        return self.rng.randrange(10_000)

    def dtype(self) -> str:
        return self.choice("float32", "float32", "float64", "bfloat16", "float16")

    def form(self) -> dict[str, Any]:
        return {"is_causal": self.is_causal}


def draw_hyperparameters(rng: random.Random, row: Instance) -> dict[str, Any]:
    """Valid values of a method's hyperparameters, from what its config declares about each of them."""
    while True:
        values: dict[str, Any] = {}
        for spec in dataclasses.fields(row.info.config_class):
            minimum, choices = spec.metadata.get("minimum"), spec.metadata.get("choices")
            if spec.name == "compute_dtype":  # the checks expect the accuracy of the inputs' dtype
                continue
            if spec.name == "max_length":
                values[spec.name] = rng.choice(_MAX_LENGTHS)
            elif rng.random() < 0.1:
                continue
            elif isinstance(spec.default, bool):
                values[spec.name] = rng.random() < 0.3
            elif choices is not None:
                values[spec.name] = rng.choice(choices)
            elif spec.name == "seed":
                values[spec.name] = rng.choice((0, rng.randrange(2**31)))
            elif isinstance(spec.default, float):
                values[spec.name] = rng.choice((float(minimum or 0), rng.random(), 10.0 * rng.random()))
            elif minimum is not None:
                largest = _LARGEST.get(spec.name, 40)
                value = rng.choice((minimum, rng.randint(1, 8), rng.randint(1, 8), rng.randint(1, 40)))
                values[spec.name] = max(minimum, min(value, largest))
        try:
            row.info.config_class(**values)
        except hea.UnsupportedAttentionError:  # a combination that is not allowed
            continue
        return values


class Promise(NamedTuple):
    """How random cases of a promise are made.

    Attributes:
        number: of the promise, as the headings of promises.py count them.
        check: from `promises.py`.
        draw: draws the arguments of the check.
        share: how often the promise is drawn, relative to others. What takes seconds is rare.
        applies: whether the instance makes this promise.
        fixed: arguments that are not reduced, because the check means nothing for smaller ones.
    """

    number: int
    check: Callable[..., None]
    draw: Callable[[Draw], dict[str, Any]]
    share: float = 1.0
    applies: Callable[[Instance], bool] = lambda instance: True
    fixed: tuple[str, ...] = ()


def _length_and_cut(d: Draw) -> dict[str, Any]:
    length = d.length(2)
    return {"length": length, "cut": min(d.length(), length - 1)}


def _exact(d: Draw) -> dict[str, Any]:
    length = d.choice(1, d.instance.budget, d.rng.randint(1, d.instance.budget))
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
    cuts = {d.rng.randint(0, length) for _ in range(d.choice(1, 2, 5, 20))}
    cuts = range(length) if length < 30 and d.chance(0.3) else sorted(cuts)
    return {"cuts": list(cuts), "padding": d.padding(), "q_len": length, **d.heads()}


def _finite(d: Draw) -> dict[str, Any]:
    dtype, logit = d.choice("float32", "bfloat16", "float16"), d.choice(0.0, 1.0, 30.0, 100.0, 1e3, 1e4)
    sizes = {"length": d.length(), "head_dim": d.choice(1, 4, 16, 64), "seed": d.seed()}
    return {**d.form(), "dtype": dtype, "logit": logit, "autocast": dtype != "float32" and d.chance(0.5), **sizes}


def _gradients(d: Draw) -> dict[str, Any]:
    length = d.length(5, 20)
    sizes = {"length": length, "value_dim": d.choice(1, 2, 3), "seed": d.seed()}
    return {**d.form(), **sizes, "fast_mode": length > 8 or d.chance(0.7)}


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
    return {**_seeds(d), "padding": d.choice(*PADDINGS), "dtype": d.choice("float32", "float64")}


def _padding(d: Draw) -> dict[str, Any]:
    around = {name: d.choice(0, 1, d.length(1, 40)) for name in ("before", "after")}
    return {**d.form(), **d.heads(), "length": d.length(1, 70), **around}


def _sums(d: Draw) -> dict[str, Any]:
    shape = {"q_len": d.length(), "seed": d.seed(), "num_heads": 1, "spread": 0.05}
    return {**d.form(), "dtype": d.choice("bfloat16", "float16"), **shape}


def _transaction(d: Draw) -> dict[str, Any]:
    mistake = d.choice(None, None, "unknown hyperparameter", "missing layer")
    what = {"family": d.choice(*ENCODERS, *DECODERS), "layers": d.choice(None, [0], [1], [0, 1])}
    return {**what, "mistake": mistake, "length": d.rng.randint(2, 90)}


def _has_long_tables(instance: Instance) -> bool:
    return instance.hyperparameters.get("max_length", 2400) >= 2400


def _promise(number: int, name: str, draw: Callable[[Draw], dict[str, Any]], **more: Any) -> tuple[str, Promise]:
    return name, Promise(number, getattr(promises, f"check_{name}"), draw, **more)


_CAUSAL = {"applies": lambda instance: instance.info.causal}
PROMISES: dict[str, Promise] = dict([
    _promise(1, "shapes", lambda d: {"padding": d.padding(), **_seeds(d)}, share=2.0),
    _promise(1, "exact", _exact, applies=lambda i: i.budget > 0),
    _promise(1, "arguments", lambda d: {**d.form(), "padding": d.padding(), **d.shape()}),
    _promise(2, "masked_keys", _masked_keys, share=2.0),
    _promise(2, "masked_gradients", lambda d: {**d.form(), **d.shape(batch=d.choice(1, 2))}),
    _promise(2, "empty_queries", lambda d: {**d.form(), "length": d.length(2), **d.heads(), "content": "normal"}),
    _promise(2, "padding", _padding, share=2.0),
    _promise(
        2, "holes", lambda d: {**d.form(), "length": d.length(), **d.heads()}, applies=lambda i: not i.reads_positions
    ),
    _promise(
        3, "future", lambda d: {**_length_and_cut(d), "padding": d.padding(), **d.heads(), "content": d.any_content()},
        share=3.0, **_CAUSAL,
    ),
    _promise(
        3, "length", lambda d: {**_length_and_cut(d), **d.heads()},
        share=2.0, applies=lambda i: i.info.causal and not i.switches,
    ),
    _promise(3, "last_queries", _last_queries, **_CAUSAL),
    _promise(3, "state", _state, share=3.0, applies=lambda i: i.info.recurrent),
    _promise(4, "batch", lambda d: {**d.form(), "padding": d.padding(), **d.shape(batch=d.choice(2, 3, 4))}, share=2.0),
    _promise(5, "seeds", _seeds),
    _promise(5, "global_seed", _seeds),
    _promise(6, "finite", _finite, fixed=("dtype",)),
    _promise(6, "sums", _sums, applies=lambda i: i.averages, fixed=("dtype",)),
    _promise(7, "gradients", _gradients, share=0.2),
    _promise(
        7, "naive",
        lambda d: {**d.form(), "padding": d.padding(), "scale": d.choice(None, None, 0.0, -0.5, 1.7), **d.shape()},
        share=2.0,
    ),
    _promise(7, "naive_gradients", _naive_gradients),
    _promise(8, "whole_budget", _budget, applies=lambda i: i.limit in ("exact", "bounded")),
    _promise(
        9, "compiles",
        lambda d: {**d.form(), "padding": d.choice("none", "left", "holes"), **d.shape(content="normal")}, share=0.004,
    ),
    _promise(10, "refused", lambda d: {"what": d.choice(*promises.REFUSED), "q_len": d.length(2), "seed": d.seed()}),
    _promise(
        11, "largest_tensor",
        lambda d: {**d.form(), "length": d.rng.randint(400, 600), "num_heads": 1, "content": d.any_content()},
        share=0.1, applies=_has_long_tables, fixed=("length",),
    ),
    _promise(12, "transaction", _transaction, share=0.2, applies=lambda i: i.method in ROWS),
])  # fmt: skip


def draw_case(rng: random.Random, rows: dict[str, Instance], names: list[str]) -> Case | None:
    """A random case of one of the methods and one of the promises `names`; None if the draw has no such promise."""
    row = rows[rng.choice(list(rows))]
    hyperparameters = draw_hyperparameters(rng, row)
    instance = row.vary(hyperparameters)
    applying = [name for name in names if PROMISES[name].applies(instance)]
    if not applying:
        return None
    (name,) = rng.choices(applying, [PROMISES[name].share for name in applying])
    return Case(name, row.method, hyperparameters, PROMISES[name].draw(Draw(rng, instance)))
