"""What all commands share: the application, exit status, errors, tables, common options, and parsing of methods."""

import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.defaults import default_methods, method_label
from hf_efficient_attn.methods import MethodConfig, make_config, method_info

app = typer.Typer(
    name="hf-efficient-attn", add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Sub-quadratic attention for Transformers: the methods, what they gain, and what they cost.",
    epilog="Example: hf-efficient-attn demo --method kdeformer --length 512,4096",
)  # fmt: skip

# What the help texts say about --methods.
DEFAULT_METHODS = (
    f"{', '.join(default_methods())}; for decoders those of them with a causal form: "
    f"{', '.join(default_methods(is_causal=True))}"
)

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="Folder or hub id of a checkpoint.")]
Settings = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="A hyperparameter; method.key=value sets it for one method only."),
]
Threads = Annotated[int | None, typer.Option(metavar="N", min=1, help="Number of threads of PyTorch.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Read pytorch_model.bin (weights only) if there are no safetensors.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def run(application: typer.Typer, arguments: Sequence[str] | None, name: str) -> int:
    """Run a typer application and return its exit status; an expected error becomes one line on stderr."""
    try:
        status = application(args=arguments, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
        if status == 130:  # Ctrl-C; older versions of typer raise Abort
            raise typer.Abort
        return status if isinstance(status, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", 130)
    except BrokenPipeError:
        # The reader of the pipe has stopped. Without this Python reports the error again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except UnsupportedAttentionError as error:
        return _complain(str(error), 2)
    except OSError as error:
        return _complain(str(error), 1)
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's exceptions for an invalid command line have it
            raise
        return _complain(f"{error.format_message()} Try: {name} --help", 2)


def _complain(message: str, status: int) -> int:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    return status


def main_of(application: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> None:
    """Run a typer application and end the process with its exit status."""
    sys.exit(run(application, arguments, name))


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table with aligned columns."""
    lines = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["| " + " | ".join(f"{c:{w}}" for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]])


def split_list(values: Iterable[str]) -> list[str]:
    """The values of an option that can be repeated and can contain comma-separated lists."""
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def parse_lengths(values: Iterable[str]) -> list[int]:
    """Parse positive integers from repeated options and comma-separated lists, without duplicates."""
    lengths = []
    for text in split_list(values):
        if not text.isdecimal() or int(text) < 1:
            raise UnsupportedAttentionError(f"{text!r} is not a number of tokens; give integers such as 512,4096")
        lengths.append(int(text))
    return list(dict.fromkeys(lengths))


def _parse_pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UnsupportedAttentionError(f"{text!r} sets no hyperparameter; write key=value")
    try:
        return key.strip(), json.loads(value)
    except json.JSONDecodeError:
        return key.strip(), value


def parse_methods(methods: Iterable[str], settings: Iterable[str] = ()) -> dict[str, MethodConfig]:
    """Parse methods and hyperparameters from the command line.

    Args:
        methods: NAME or NAME:key=value:key=value, repeated or separated by commas.
        settings: method.key=value for one method, key=value for all methods that have the hyperparameter.

    Returns:
        label -> config.

    Raises:
        UnsupportedAttentionError: an unknown method or hyperparameter, or a setting that applies to no method.
    """
    configs = []
    for text in split_list(methods):
        name, *pairs = text.split(":")
        configs.append(make_config(name, **dict(map(_parse_pair, pairs))))
    for setting in settings:
        key, value = _parse_pair(setting)
        only, dot, key = key.rpartition(".")
        if dot:
            method_info(only)  # refuses unknown names
        matches = [
            config.method == only if dot else key in {spec.name for spec in dataclasses.fields(config)}
            for config in configs
        ]
        if not any(matches):
            chosen = ", ".join(dict.fromkeys(config.method for config in configs))
            raise UnsupportedAttentionError(f"--set {setting}: none of the chosen methods ({chosen}) has it")
        configs = [
            make_config(config, **{key: value}) if is_match else config
            for config, is_match in zip(configs, matches, strict=True)
        ]
    return {method_label(config): config for config in configs}


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2))
