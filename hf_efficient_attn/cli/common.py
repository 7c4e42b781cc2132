"""What all commands share: the application, exit status, errors, tables, and what a command line says of methods."""

import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

import hf_efficient_attn as hea
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods import MethodConfig, make_config

app = typer.Typer(
    name="hf-efficient-attn", add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Sub-quadratic attention for Transformers: what there is, and what it gains and costs.",
    epilog="Example: hf-efficient-attn demo --method kdeformer --length 512,4096",
)  # fmt: skip

Settings = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Hyperparameter; method.key=value for one method.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def run(application: typer.Typer, arguments: Sequence[str] | None, name: str) -> int:
    """Run a typer application and return its exit status; what it refuses becomes one line on stderr."""
    try:
        status = application(args=arguments, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
        if status == 130:  # how typer hands over Ctrl-C; older ones raise Abort
            raise typer.Abort
        return status if isinstance(status, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", 130)
    except BrokenPipeError:
        # The reader has gone; Python would complain again when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except UnsupportedAttentionError as error:
        return _complain(str(error), 2)
    except OSError as error:
        return _complain(str(error), 1)
    except Exception as error:
        if not hasattr(error, "format_message"):  # what typer raises for a wrong command line
            raise
        return _complain(f"{error.format_message()} Try: {name} --help", 2)


def _complain(message: str, status: int) -> int:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    return status


def main_of(application: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> None:
    """The same for any typer application."""
    sys.exit(run(application, arguments, name))


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table with aligned columns."""
    lines = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["| " + " | ".join(f"{c:{w}}" for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]])


def label(config: MethodConfig) -> str:
    """The method's name, with the hyperparameters that are not at their defaults."""
    changed = [
        f"{spec.name}={getattr(config, spec.name)}"
        for spec in dataclasses.fields(config)
        if getattr(config, spec.name) != spec.default
    ]
    return config.method + (f" ({', '.join(changed)})" if changed else "")


def split_list(values: Iterable[str]) -> list[str]:
    """Repeated options and comma lists alike."""
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def parse_lengths(values: Iterable[str]) -> list[int]:
    """Positive integers out of repeated options and comma lists, in order, each once."""
    found = []
    for text in split_list(values):
        if not text.isdecimal() or int(text) < 1:
            raise UnsupportedAttentionError(f"{text!r} is not a number of tokens; give integers such as 512,4096")
        found.append(int(text))
    return list(dict.fromkeys(found))


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UnsupportedAttentionError(f"{text!r} sets nothing; write key=value")
    try:
        return key.strip(), json.loads(value)
    except json.JSONDecodeError:
        return key.strip(), value


def _fields(config: MethodConfig) -> list[str]:
    return [spec.name for spec in dataclasses.fields(config)]


def parse_methods(methods: Iterable[str], settings: Iterable[str] = ()) -> dict[str, MethodConfig]:
    """Label -> config, out of what the command line says.

    Args:
        methods: NAME or NAME:key=value:key=value, repeated or separated by commas.
        settings: method.key=value for one method, key=value for all that have the hyperparameter.

    Raises:
        UnsupportedAttentionError: a method or hyperparameter that does not exist, a setting that reaches no method.
    """
    configs = []
    for text in split_list(methods):
        name, *pairs = text.split(":")
        configs.append(make_config(name, **dict(map(_pair, pairs))))
    for setting in settings:
        key, value = _pair(setting)
        only, dot, key = key.rpartition(".")
        if dot:
            hea.method_info(only)
        reached = [c for c in configs if c.method == only or (not dot and key in _fields(c))]
        if not reached:
            chosen = ", ".join(dict.fromkeys(config.method for config in configs))
            raise UnsupportedAttentionError(f"--set {setting}: none of the chosen methods ({chosen}) has it")
        configs = [make_config(c, **{key: value}) if c in reached else c for c in configs]
    return {label(config): config for config in configs}


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
