"""Attack the promises: random cases of all of them, on all methods, for a given time.

    python tests/attack.py --minutes 10
    python tests/attack.py --cases 100000 --seed 1 --json result.json
    python tests/attack.py --method kdeformer --promise padding

Every failure is reduced to a smaller one, is printed with the command that repeats it, and does not end the attack. At
the end there is a table of the cases and failures by promise and method. The exit status is 1 if a case failed, and 130
after Ctrl-C, which ends the attack with the table so far.
"""

import json
import random
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
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
_SIMPLE = {
    "padding": ["none", "left"],
    "content": ["normal"],
    "dtype": ["float64", "float32"],
    "seed": [0],
    "cuts": [[]],
}

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass
class Result:
    """What an attack has found so far.

    Attributes:
        cases: (promise, method) -> number of cases.
        failures: (promise, method) -> number of failures.
        found: the reduced case and the message of every failure that was printed.
        seconds: (promise, method) -> time.
    """

    cases: Counter = field(default_factory=Counter)
    failures: Counter = field(default_factory=Counter)
    found: list[tuple[Case, str]] = field(default_factory=list)
    seconds: Counter = field(default_factory=Counter)

    def to_dict(self) -> dict[str, Any]:
        return {
            "cases": self.cases.total(),
            "failures": self.failures.total(),
            "by_promise_and_method": [
                {
                    "promise": p,
                    "method": m,
                    "cases": n,
                    "failures": self.failures[p, m],
                    "seconds": round(self.seconds[p, m], 2),
                }
                for (p, m), n in sorted(self.cases.items())
            ],
            "found": [{"case": vars(case), "message": message} for case, message in self.found],
        }


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
            if value in others:
                others = others[: others.index(value)]
            if type(value) is int and name != "seed":
                others += sorted(v for v in {1, 2, value // 2, value - 1} if 0 < v < value)
            if value is True:
                others += [False]
            yield from (replace(case, **{part: {**values, name: v}}) for v in others if v != value)
    yield from (
        replace(case, hyperparameters={k: v for k, v in case.hyperparameters.items() if k != name})
        for name in case.hyperparameters
        if name != "max_length"
    )


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


def reproduction(case: Case) -> str:
    return f"python tests/attack.py --reproduce {shlex.quote(case.to_json())}"


def attack(
    rows: dict[str, Instance],
    names: Sequence[str],
    *,
    seed: int = 0,
    cases: int | None = None,
    minutes: float | None = None,
    result: Result | None = None,
) -> Result:
    """Run random cases until there are `cases` of them or the time is over, and print every failure.

    Args:
        rows: the methods, by name.
        names: of the promises.
        seed: of all cases. Case i is the same for every number of cases.
        cases: their number; None for no limit.
        minutes: the time; None for no limit.
        result: is filled, so that it is complete if the attack is interrupted.
    """
    result = Result() if result is None else result
    start, index = time.monotonic(), 0
    unit = "case" if cases is not None else "s"
    total = cases if cases is not None else round(60 * (minutes or 0))
    with tqdm(total=total, unit=unit, mininterval=1.0 if sys.stderr.isatty() else 60.0) as bar:
        while cases is None or result.cases.total() < cases:
            elapsed = time.monotonic() - start
            if minutes is not None and elapsed >= 60 * minutes:
                break
            case = draw_case(random.Random(f"{seed}:{index}"), rows, list(names))
            index += 1
            if case is None:
                continue
            began, key = time.monotonic(), (case.promise, case.method)
            message = error_of(case, rows[case.method])
            result.cases[key] += 1
            result.seconds[key] += time.monotonic() - began
            if message is not None:
                result.failures[key] += 1
                if result.failures[key] <= _PRINTED:
                    small, reason = reduce(case, message, rows[case.method])
                    result.found.append((small, reason))
                    tqdm.write(
                        f"FAILED {case.promise} of {case.method}: {reason}\n  {reproduction(small)}", file=sys.stdout
                    )
                    sys.stdout.flush()
            bar.set_postfix(failures=result.failures.total(), refresh=False)
            bar.update(1 if cases is not None else min(int(elapsed), total) - bar.n)
    return result


def summary(result: Result) -> str:
    """Cases by promise and by method; where there are failures, their number comes first."""
    methods = [m for m in ROWS if any(m == method for _, method in result.cases)]

    def cell(keys: list[tuple[str, str]]) -> str:
        failures, cases = (sum(counter[key] for key in keys) for counter in (result.failures, result.cases))
        return f"{failures} of {cases}" if failures else str(cases)

    promises = [p for p in PROMISES if any(p == promise for promise, _ in result.cases)]
    by_promise = [(p, PROMISES[p].number, cell([(p, m) for m in methods])) for p in promises]
    by_method = [(m, cell([(p, m) for p in promises])) for m in methods]
    count = f"{result.cases.total()} cases, {result.failures.total()} failures in {sum(result.seconds.values()):.0f} s"
    return "\n\n".join(
        (table(("promise", "number", "cases"), by_promise), table(("method", "cases"), by_method), count)
    )


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
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the result to a file.")
    ] = None,
) -> int:
    if reproduce is not None:
        Case.from_json(reproduce).run()  # an error with its traceback
        typer.echo("the promise was kept")
        return 0
    rows = {name: ROWS[name] for name in _known("method", method, list(ROWS))}
    names = _known("promise", promise, list(PROMISES))
    minutes = 10.0 if minutes is None and cases is None else minutes
    result, status = Result(), 0
    try:
        attack(rows, names, seed=seed, cases=cases, minutes=minutes, result=result)
    except KeyboardInterrupt:
        status = 130
    typer.echo(f"\n{summary(result)}")
    if json_file is not None:
        json_file.write_text(json.dumps(result.to_dict(), indent=1))
    return status or int(result.failures.total() > 0)


if __name__ == "__main__":
    main_of(app, "attack")
