"""Random cases of the promises: what Hypothesis draws for each of them, from the config of each method."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st

import hf_efficient_attn as hea
from instances import CONTENTS, Instance

PADDINGS = ("left", "right", "holes", "empty", "one", "all")
# Numbers for which rounding, which depends on the shape of a product, decides no hash, sample or rank. With equal keys
# minus their mean, for example, nothing but rounding is left, so these are for checks that compare bit by bit.
GENERIC = ("outlier", "aligned", "smooth", "scales", "tiny")
# Tables are made for a longest sequence, so these are at least as long as every sequence of a case. Otherwise the
# initial tables would depend on the length, and so would the output.
_MAX_LENGTHS = (150, 151, 600, 2400)
# The largest values that are drawn, for hyperparameters that cost time or are limited.
_LARGEST = {"num_hashes": 12, "pinv_iterations": 8, "error_percent": 200, "score_groups": 12}


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

    def heads(self, **fixed: Any) -> dict[str, Any]:
        """Heads, dimensions and seed, and numbers whose rounding matters to nothing."""
        num_kv_heads, head_dim = self.choice(1, 1, 2, 3), self.choice(1, 2, 3, 4, 5, 8, 9, 16)
        return {
            "num_heads": num_kv_heads * self.choice(1, 1, 2, 3),
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "value_dim": self.choice(head_dim, head_dim, 1, 5),
            "seed": self.seed(),
            "content": self.choice(*["normal"] * len(GENERIC), *GENERIC),
            **fixed,
        }

    def shape(self, q_len: int | None = None, **fixed: Any) -> dict[str, Any]:
        """The form, and arguments of `inputs` that it supports: as many keys as queries if `q_len` is given."""
        may_differ = q_len is None and self.instance.rectangular and not self.is_causal
        q_len = self.length() if q_len is None else q_len
        kv_len = self.length() if may_differ and self.choice(False, False, True) else q_len
        sizes = {"batch": self.choice(1, 1, 2, 3), "q_len": q_len, "kv_len": kv_len}
        return {"is_causal": self.is_causal, **sizes, **self.heads(), **fixed}

    def any_content(self) -> str:
        return self.choice("normal", "normal", *CONTENTS)

    def padding(self) -> str:
        return self.choice("none", *PADDINGS)

    def seed(self) -> int:
        return self.between(0, 9999)

    def dtype(self) -> torch.dtype:
        return self.choice(torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)

    def length_and_cut(self) -> dict[str, Any]:
        """A number of tokens, and the position of one of them."""
        length = self.length(2)
        return {"length": length, "cut": min(self.length(), length - 1)}


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
            values[spec.name] = st.integers(minimum, 8) | st.integers(minimum, _LARGEST.get(spec.name, 40))

    def is_valid(drawn: dict[str, Any]) -> bool:
        try:
            return bool(row.info.config_class(**drawn))
        except hea.UnsupportedAttentionError:  # a combination that is not allowed
            return False

    return st.fixed_dictionaries(values).filter(is_valid)


PROMISES: dict[str, "Promise"] = {}


def explained(check: Callable[..., None]) -> Callable[..., None]:
    """A check whose failure is a sentence: the method, the case, the promise, and what is wrong.

    An error in the method's own code breaks the promise as well, and stays the cause.
    """

    @functools.wraps(check)
    def run(instance: Instance, *given: Any, **named: Any) -> None:
        try:
            check(instance, *given, **named)
        except Exception as error:
            arguments = {**dict(zip(list(inspect.signature(check).parameters)[1:], given, strict=False)), **named}
            case = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
            promise = " ".join((check.__doc__ or "").partition("\n\n")[0].split())
            sentence = f"{instance} breaks the promise of {check.__name__}({case}): {promise} But "
            if not isinstance(error, AssertionError):
                raise AssertionError(f"{sentence}the call fails with {type(error).__name__}: {error}") from error
            error.args = (f"{sentence}{error}",)
            raise

    return run


@dataclass
class Promise:
    """Decorates a check, `check_NAME(instance, **arguments)` of `promises.py`, which raises if the promise is broken.

    Attributes:
        draw: draws the arguments of the check.
        share: how many cases are drawn, relative to other promises. What takes seconds is rare.
        applies: whether an instance makes this promise.
        at: arguments of cases at chosen lengths.
    """

    draw: Callable[[Draw], dict[str, Any]]
    share: float = 1.0
    applies: Callable[[Instance], bool] = lambda instance: True
    at: Sequence[dict[str, Any]] = ()

    def __call__(self, check: Callable[..., None]) -> Callable[..., None]:
        self.check = explained(check)
        PROMISES[check.__name__.removeprefix("check_")] = self
        return self.check


@st.composite
def cases(draw: st.DrawFn, name: str, row: Instance, is_causal: bool | None) -> tuple[Instance, dict[str, Any]]:
    """The arguments of the check of a promise: with any hyperparameters if `is_causal` is None."""
    if is_causal is None:
        row = draw(hyperparameters(row).map(row.vary).filter(PROMISES[name].applies))
    return row, PROMISES[name].draw(Draw(draw, row, is_causal))


def attack(name: str, row: Instance, examples: int, is_causal: bool | None = None, **options: Any) -> None:
    """Check a promise on random cases of an instance, or of its method with any hyperparameters if `is_causal` is None.

    Hypothesis reduces a failure and shows the arguments of the check, as code. An instance is also checked at those of
    the chosen lengths for which it has tables.
    """
    promise = PROMISES[name]
    for arguments in promise.at if is_causal is not None else ():
        if arguments["length"] <= row.hyperparameters.get("max_length", 2400):
            promise.check(row, **({} if "cut" in arguments else {"is_causal": is_causal}), **arguments)

    @hypothesis.settings(max_examples=examples, **options)
    @hypothesis.given(cases(name, row, is_causal))
    def run(case: tuple[Instance, dict[str, Any]]) -> None:
        instance, arguments = case
        promise.check(instance, **arguments)

    (run if is_causal is None else hypothesis.seed(f"{name}:{row}:{is_causal}")(run))()
