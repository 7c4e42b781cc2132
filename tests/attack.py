"""Attack the promises: random cases of all of them, on all methods, for a given time.

    python tests/attack.py --minutes 10
    python tests/attack.py --cases 100000 --seed 1
    python tests/attack.py --method kdeformer --promise padding

Every failure is reduced to a smaller one, is printed with the command that repeats it, and does not end the attack. The
exit status is 1 if a case failed, and 130 after Ctrl-C.
"""

import random
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import typer
from tqdm import tqdm

from attack_cases import PROMISES, ROWS, Case, draw_case
from hf_efficient_attn.cli import main_of, table
from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_name
from instances import Instance

# Reducing a failure stops after this many tries.
_TRIES = 80
# Of one promise and method so many failures are printed. The rest is counted.
_PRINTED = 5
# Values to which arguments are reduced, simplest first. Numbers are reduced towards 1 as well.
_SIMPLE = {"padding": ["none", "left"], "content": ["normal"], "dtype": ["float64", "float32"], "cuts": [[]]}

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass
class Result:
    """(promise, method) -> numbers of cases and of failures; and the reduced case and message of what was printed."""

    cases: Counter = field(default_factory=Counter)
    failures: Counter = field(default_factory=Counter)
    found: list[tuple[Case, str]] = field(default_factory=list)


def error_of(case: Case, row: Instance | None = None) -> str | None:
    """Run a case: None if the promise was kept, otherwise what was found, in one line."""
    try:
        case.run(row)
    except Exception as error:  # noqa: BLE001 - every error is a finding
        message = " ".join(str(error).split())
        return f"{type(error).__name__}: {message[:300]}"
    return None


def simpler(case: Case) -> Iterator[Case]:
    """Cases that differ from `case` in one value, which is simpler."""
    for part in ("hyperparameters", "arguments"):
        values = getattr(case, part)
        for name, value in values.items():
            if name in ("max_length", *PROMISES[case.promise].fixed):  # the tables are as long as the sequence
                continue
            others: list[Any] = list(_SIMPLE.get(name, []))
            others = others[: others.index(value)] if value in others else others
            if type(value) is int:
                others += sorted(v for v in {1, 2, value // 2, value - 1} if 0 < v < value)
            yield from (replace(case, **{part: {**values, name: v}}) for v in others)
            if part == "hyperparameters":
                yield replace(case, hyperparameters={k: v for k, v in values.items() if k != name})


def reduce(case: Case, message: str, row: Instance | None = None) -> tuple[Case, str]:
    """A simpler case that fails with the same error, and its message."""

    def kind(message: str) -> str:
        return re.sub(r"[^a-zA-Z:]", "", message)[:60]

    tries, others = 0, simpler(case)
    while tries < _TRIES and (other := next(others, None)) is not None:
        tries += 1
        found = error_of(other, row)
        # Another error may come from values that the method does not allow.
        if found is not None and kind(found) == kind(message):
            case, message, others = other, found, simpler(other)
    return case, message


def attack(
    rows: dict[str, Instance], names: Sequence[str], *, seed: int = 0, cases: int = 0, minutes: float = 0.0
) -> Result:
    """Run random cases until there are `cases` of them and the time is over, and print every failure.

    Args:
        rows: the methods, by name.
        names: of the promises.
        seed: of all cases. Case i is the same for every number of cases.
        cases: their least number.
        minutes: the least time.
    """
    result, end, index = Result(), time.monotonic() + 60 * minutes, 0
    with tqdm(unit="case", mininterval=1.0 if sys.stderr.isatty() else 60.0) as bar:
        while result.cases.total() < cases or time.monotonic() < end:
            case = draw_case(random.Random(f"{seed}:{index}"), rows, list(names))
            index += 1
            if case is None:
                continue
            message, key = error_of(case, rows[case.method]), (case.promise, case.method)
            result.cases[key] += 1
            bar.update()
            if message is not None:
                result.failures[key] += 1
                if result.failures[key] <= _PRINTED:
                    small, reason = reduce(case, message, rows[case.method])
                    result.found.append((small, reason))
                    command = f"python tests/attack.py --reproduce {shlex.quote(small.to_json())}"
                    tqdm.write(f"FAILED {case.promise} of {case.method}: {reason}\n  {command}", file=sys.stdout)
    return result


def summary(result: Result) -> str:
    """A table of cases and failures by promise, and their sums."""
    rows = []
    for name in PROMISES:
        cases, failures = (sum(n for (p, _), n in c.items() if p == name) for c in (result.cases, result.failures))
        rows += [(name, PROMISES[name].number, cases, failures)] if cases else []
    total = f"{result.cases.total()} cases, {result.failures.total()} failures"
    return f"{table(('promise', 'number', 'cases', 'failures'), rows)}\n\n{total}"


def _known(what: str, given: list[str], known: Sequence[str]) -> list[str]:
    names = [name for text in given for name in text.split(",")]
    for name in names:
        if name not in known:
            raise UnsupportedAttentionError(unknown_name(what, name, known))
    return names or list(known)


@app.command(help=__doc__)
def main(
    minutes: Annotated[float | None, typer.Option(min=0.0, help="How long the attack lasts; 10 by default.")] = None,
    cases: Annotated[int | None, typer.Option(min=1, help="Number of cases, instead of or besides a time.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same cases.")] = 0,
    method: Annotated[list[str], typer.Option(help="Only these methods, separated by commas.")] = [],  # noqa: B006
    promise: Annotated[list[str], typer.Option(help="Only these promises: " + ", ".join(PROMISES) + ".")] = [],  # noqa: B006
    reproduce: Annotated[str | None, typer.Option(metavar="CASE", help="Run one case that a failure printed.")] = None,
) -> int:
    if reproduce is not None:
        Case.from_json(reproduce).run()  # an error with its traceback
        typer.echo("the promise was kept")
        return 0
    rows = {name: ROWS[name] for name in _known("method", method, list(ROWS))}
    names = _known("promise", promise, list(PROMISES))
    if minutes is None:
        minutes = 10.0 if cases is None else 0.0
    result = attack(rows, names, seed=seed, cases=cases or 0, minutes=minutes)
    typer.echo(f"\n{summary(result)}")
    return int(result.failures.total() > 0)


if __name__ == "__main__":
    main_of(app, "attack")
