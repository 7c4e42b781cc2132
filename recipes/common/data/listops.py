"""Generates ListOps (Nangia and Bowman 2018) by the rules of the Long Range Arena (Tay et al., ICLR 2021).

An expression is a digit, or an operator applied to two to ten expressions: [MIN, [MAX, [MED (median, rounded down) or
[SM (sum modulo 10), closed by "]". Above the deepest level an expression is an operator with probability 1/4; at the
deepest level it is a digit. Expressions are kept if they have more than `min_length` and fewer than `max_length`
tokens, and are new.
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
    """The rules of generated expressions. The defaults are the benchmark's.

    Attributes:
        min_length: expressions have more tokens than this.
        max_length: expressions have fewer tokens than this.
        max_depth: largest depth of nested operators and digits.
        max_args: largest number of arguments of an operator.
        operator_share: probability of an operator above the deepest level.

    Raises:
        ValueError: no expression has such a length.
    """

    min_length: int = 500
    max_length: int = 2000
    max_depth: int = 10
    max_args: int = 10
    operator_share: float = 0.25

    def __post_init__(self) -> None:
        if self.max_args < 2 or self.max_depth < 1 or not 0 < self.operator_share < 1:
            raise ValueError("ListOps: give 2 arguments or more, a depth of 1 or more, and a share between 0 and 1")
        if self.max_length - self.min_length < 2 or self.max_length < 2:
            raise ValueError(
                f"ListOps: no expression has more than {self.min_length} and fewer than {self.max_length} tokens"
            )
        longest, nodes = 0, 1
        for _ in range(self.max_depth - 1):
            longest, nodes = longest + 2 * nodes, nodes * self.max_args
        if longest + nodes <= self.min_length:
            raise ValueError(
                f"ListOps: with {self.max_args} arguments and a depth of {self.max_depth} no expression has more than "
                f"{self.min_length} tokens"
            )


def draw(generator: random.Random, rules: Rules) -> list[str] | None:
    """Draw the tokens of one expression; return None as soon as it gets too long.

    Only `generator.random()` is used, since its numbers are the same in all versions of Python.
    """
    uniform = generator.random
    tokens: list[str] = []
    pending = [0]  # arguments that each enclosing operator still needs; the first entry is the whole expression
    needed = 1  # tokens that must still follow
    left = 1  # arguments that the innermost operator still needs
    while True:
        if left == 0:
            if not pending[1:]:
                return tokens
            tokens.append(END)
            needed -= 1
            left = pending.pop()
            continue
        left -= 1
        if len(pending) < rules.max_depth and uniform() < rules.operator_share:
            count = 2 + int(uniform() * (rules.max_args - 1))
            tokens.append(OPERATORS[int(uniform() * len(OPERATORS))])
            needed += count
            pending.append(left)
            left = count
            if len(tokens) + needed >= rules.max_length:
                return None
        else:
            tokens.append(DIGITS[int(uniform() * 10)])
            needed -= 1


def evaluate(tokens: Sequence[str]) -> int:
    """Evaluate an expression; the value is 0 to 9.

    Raises:
        ValueError: the tokens are not an expression.
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
    """The value of an operator applied to digits."""
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
    """An endless sequence of different expressions."""
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
    """Write basic_test.tsv and basic_train.tsv in the benchmark's layout, unless they exist, and return their folder.

    The evaluation set is drawn first, so that it does not depend on the size of the training set.

    Args:
        folder: parent of the folder, whose name contains the arguments.
        train: number of expressions to train on.
        evaluation: number of expressions to evaluate on.
        rules: the rules.
        seed: seed of the expressions.
    """
    numbers = (rules.min_length, rules.max_length, rules.max_depth, rules.max_args, seed, train, evaluation)
    # "v1" is the version of this generator. Change it whenever the expressions change.
    target = folder / f"listops-{'-'.join(map(str, numbers))}-v1"
    if (target / "basic_train.tsv").is_file() and (target / "basic_test.tsv").is_file():
        return target
    target.mkdir(parents=True, exist_ok=True)
    drawn = expressions(rules, seed)
    with tqdm(total=train + evaluation, desc="ListOps", unit=" expressions", disable=None, leave=False) as bar:
        for name, count in (("basic_test.tsv", evaluation), ("basic_train.tsv", train)):
            draft = target / f"{name}.{os.getpid()}"
            with draft.open("w", encoding="utf-8") as file:
                file.write(f"{HEADER}\n")
                for _ in range(count):
                    tokens = next(drawn)
                    file.write(f"{' '.join(tokens)}\t{evaluate(tokens)}\n")
                    bar.update()
            draft.replace(target / name)
    return target


def read(lines: Sequence[str], where: str) -> Iterator[tuple[list[str], int]]:
    """Tokens and value of each line, EXPRESSION TAB VALUE, of a .tsv file of the benchmark. Parentheses are dropped.

    Raises:
        ValueError: a line has another form. The message gives its number.
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
