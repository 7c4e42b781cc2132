"""Generates ListOps (Nangia and Bowman 2018) by the rules of the Long Range Arena (Tay et al., ICLR 2021).

An expression is a digit, or an operator applied to two to ten expressions: [MIN, [MAX, [MED (median, rounded down) or
[SM (sum modulo 10), closed by "]". Above the deepest level an expression is an operator with probability 1/4; at the
deepest level it is a digit. Expressions are kept if they have more than `min_length` and fewer than `max_length`
tokens, and are new.
"""

import pathlib
import random
import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tqdm import tqdm

from hf_efficient_attn.io.writing import replacing

DIGITS = tuple("0123456789")
OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
END = "]"
TOKENS = (*DIGITS, *OPERATORS, END)
HEADER = "Source\tTarget"
OPERATOR_SHARE = 0.25


class Rules(NamedTuple):
    """The rules of generated expressions: bounds of their tokens, which are excluded, their depth and arguments.

    The defaults are the benchmark's. The depth counts nested operators and the digits in them.
    """

    min_length: int = 500
    max_length: int = 2000
    max_depth: int = 10
    max_args: int = 10

    def check(self) -> None:
        """Raise ValueError if no expression has such a length."""
        if self.max_args < 2 or self.max_depth < 1:
            raise ValueError("ListOps: give 2 arguments or more, and a depth of 1 or more")
        longest = 1
        for _ in range(self.max_depth - 1):
            longest = 2 + self.max_args * longest
        if self.max_length - self.min_length < 2 or self.max_length < 2 or longest <= self.min_length:
            raise ValueError(
                f"ListOps: no expression of depth {self.max_depth} with {self.max_args} arguments has more than "
                f"{self.min_length} and fewer than {self.max_length} tokens"
            )


class _TooLongError(Exception):
    pass


def draw(generator: random.Random, rules: Rules) -> tuple[list[str], int] | None:
    """Draw one expression: its tokens and its value, 0 to 9; None as soon as it gets too long.

    Only `generator.random()` is used, since its numbers are the same in all versions of Python.
    """
    uniform = generator.random
    length = 1  # tokens that the expression has at least

    def expression(depth: int) -> tuple[list[str], int]:
        nonlocal length
        if depth == rules.max_depth or uniform() >= OPERATOR_SHARE:
            digit = int(uniform() * 10)
            return [DIGITS[digit]], digit
        count = 2 + int(uniform() * (rules.max_args - 1))
        operator = list(OPERATORS)[int(uniform() * len(OPERATORS))]
        length += count + 1
        if length >= rules.max_length:
            raise _TooLongError
        arguments = [expression(depth + 1) for _ in range(count)]
        tokens = [operator, *(token for inner, _ in arguments for token in inner), END]
        return tokens, OPERATORS[operator]([value for _, value in arguments])

    try:
        return expression(1)
    except _TooLongError:
        return None


def expressions(rules: Rules, seed: int) -> Iterator[tuple[str, int]]:
    """An endless sequence of different expressions, as text, with their values."""
    generator, seen = random.Random(seed), set()
    while True:
        drawn = draw(generator, rules)
        if drawn is not None and len(drawn[0]) > rules.min_length and (text := " ".join(drawn[0])) not in seen:
            seen.add(text)
            yield text, drawn[1]


def generate(folder: pathlib.Path, *, train: int, evaluation: int, rules: Rules, seed: int = 0) -> pathlib.Path:
    """Write basic_test.tsv and basic_train.tsv in the benchmark's layout, unless they exist, and return their folder.

    The evaluation set is drawn first, so that it does not depend on the size of the training set. The name of the
    folder contains the arguments.
    """
    # "v1" is the version of this generator. Change it whenever the expressions change.
    target = folder / f"listops-{'-'.join(map(str, (*rules, seed, train, evaluation)))}-v1"
    if (target / "basic_train.tsv").is_file() and (target / "basic_test.tsv").is_file():
        return target
    target.mkdir(parents=True, exist_ok=True)
    drawn = expressions(rules, seed)
    with tqdm(total=train + evaluation, desc="ListOps", unit=" expressions", disable=None, leave=False) as bar:
        for name, count in (("basic_test.tsv", evaluation), ("basic_train.tsv", train)):
            with replacing(target / name) as draft, draft.open("w", encoding="utf-8") as file:
                file.write(f"{HEADER}\n")
                for _ in range(count):
                    text, value = next(drawn)
                    file.write(f"{text}\t{value}\n")
                    bar.update()
    return target
