"""ListOps (Nangia and Bowman 2018) by the rules of the Long Range Arena (Tay et al., ICLR 2021).

An expression is a digit, or an operator over two to ten expressions: [MIN, [MAX, [MED (median, rounded down) and [SM
(sum modulo 10), closed by "]". Down to the deepest level each place is an operator with probability 1/4; at the deepest
it is a digit. Of the expressions drawn so, those count that are longer than `min_length` and shorter than `max_length`
tokens, each once.
"""

import os
import pathlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tqdm import tqdm

DIGITS = tuple("0123456789")
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
END = "]"
TOKENS = (*DIGITS, *OPERATORS, END)
HEADER = "Source\tTarget"


@dataclass(frozen=True)
class Rules:
    """What is drawn; the defaults are the benchmark's.

    Attributes:
        min_length, max_length: tokens of an expression, both exclusive.
        max_depth: of operators and digits below one another.
        max_args: of an operator.
        operator_share: probability that a place above the deepest level holds an operator.

    Raises:
        ValueError: no expression can be that long.
    """

    min_length: int = 500
    max_length: int = 2000
    max_depth: int = 10
    max_args: int = 10
    operator_share: float = 0.25

    def __post_init__(self) -> None:
        if self.max_args < 2 or self.max_depth < 1 or not 0 < self.operator_share < 1:
            raise ValueError("ListOps: give 2 arguments, a depth of 1 and a share between 0 and 1, or more")
        if self.max_length - self.min_length < 2 or self.max_length < 2:
            raise ValueError(
                f"ListOps: no expression is longer than {self.min_length} and shorter than {self.max_length} tokens"
            )
        longest, nodes = 0, 1
        for _ in range(self.max_depth - 1):
            longest, nodes = longest + 2 * nodes, nodes * self.max_args
        if longest + nodes <= self.min_length:
            raise ValueError(
                f"ListOps: with {self.max_args} arguments and a depth of {self.max_depth} no expression is longer than "
                f"{self.min_length} tokens"
            )


def draw(generator: random.Random, rules: Rules) -> list[str] | None:
    """The tokens of one expression; None as soon as it is known to be too long.

    Only `generator.random()` is used, whose numbers are the same in all versions of Python.
    """
    uniform = generator.random
    tokens: list[str] = []
    waiting = [0]  # how many arguments each open operator still takes, the whole expression first
    needed = 1  # tokens that must still come
    left = 1
    while True:
        if left == 0:
            if not waiting[1:]:
                return tokens
            tokens.append(END)
            needed -= 1
            left = waiting.pop()
            continue
        left -= 1
        if len(waiting) < rules.max_depth and uniform() < rules.operator_share:
            count = 2 + int(uniform() * (rules.max_args - 1))
            tokens.append(OPERATORS[int(uniform() * len(OPERATORS))])
            needed += count
            waiting.append(left)
            left = count
            if len(tokens) + needed >= rules.max_length:
                return None
        else:
            tokens.append(DIGITS[int(uniform() * 10)])
            needed -= 1


def evaluate(tokens: Sequence[str]) -> int:
    """The value, 0 to 9, of an expression.

    Raises:
        ValueError: it is none.
    """
    operators: list[str] = []
    levels: list[list[int]] = [[]]
    for token in tokens:
        if token in OPERATORS:
            operators.append(token)
            levels.append([])
        elif token == END:
            if not operators or not levels[-1]:
                raise ValueError("not a ListOps expression: an operator without arguments, or ']' without an operator")
            value = _apply(operators.pop(), levels.pop())
            levels[-1].append(value)
        elif token in DIGITS:
            levels[-1].append(int(token))
        else:
            raise ValueError(f"not a ListOps expression: {token!r}")
    if operators or len(levels[0]) != 1:
        raise ValueError("not a ListOps expression: an operator that is not closed, or more than one value")
    return levels[0][0]


def _apply(operator: str, values: list[int]) -> int:
    if operator == "[MIN":
        return min(values)
    if operator == "[MAX":
        return max(values)
    if operator == "[SM":
        return sum(values) % 10
    values = sorted(values)
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) // 2


def expressions(rules: Rules, seed: int) -> Iterator[list[str]]:
    """Expressions without end, each once."""
    generator, seen = random.Random(seed), set()
    while True:
        tokens = draw(generator, rules)
        if tokens is None or len(tokens) <= rules.min_length:
            continue
        text = " ".join(tokens)
        if text not in seen:
            seen.add(text)
            yield tokens


def generate(folder: pathlib.Path, *, train: int, evaluation: int, rules: Rules, seed: int = 0) -> pathlib.Path:
    """A folder below `folder` with basic_test.tsv and basic_train.tsv in the benchmark's layout, written once.

    The expressions to evaluate on are drawn first: they are the same however many there are to train on.
    """
    numbers = (rules.min_length, rules.max_length, rules.max_depth, rules.max_args, seed, train, evaluation)
    # The last number is that of this generator: another draws other expressions.
    place = folder / f"listops-{'-'.join(map(str, numbers))}-v1"
    if (place / "basic_train.tsv").is_file() and (place / "basic_test.tsv").is_file():
        return place
    place.mkdir(parents=True, exist_ok=True)
    drawn = expressions(rules, seed)
    with tqdm(total=train + evaluation, desc="ListOps", unit=" expressions", disable=None, leave=False) as bar:
        for name, count in (("basic_test.tsv", evaluation), ("basic_train.tsv", train)):
            draft = place / f"{name}.{os.getpid()}"
            with draft.open("w", encoding="utf-8") as file:
                file.write(f"{HEADER}\n")
                for _ in range(count):
                    tokens = next(drawn)
                    file.write(f"{' '.join(tokens)}\t{evaluate(tokens)}\n")
                    bar.update()
            draft.replace(place / name)
    return place


def read(lines: Sequence[str], where: str) -> Iterator[tuple[list[str], int]]:
    """(tokens, value) of the lines of a .tsv file of the benchmark: expression TAB value, parentheses dropped.

    Raises:
        ValueError: a line that is not of this form; the message has its number.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and line.strip() == HEADER):
            continue
        source, tab, target = line.rstrip("\r\n").rpartition("\t")
        tokens = [token for token in source.split() if token not in ("(", ")")]
        unknown = next((token for token in tokens if token not in TOKENS), None)
        if not tab or not tokens or unknown is not None or target.strip() not in DIGITS:
            what = f"unknown token {unknown!r}" if unknown is not None else "expected EXPRESSION TAB DIGIT"
            raise ValueError(f"{where}, line {number}: {what}")
        yield tokens, int(target)
