"""The command hf-efficient-attn: `methods`, `info NAME`, `demo`.

Exit status: 0 done, 1 failed while working (a file that could not be written), 2 asked for something that does not
exist, 130 interrupted. Errors are one line on stderr.
"""

import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import torch
import typer

import hf_efficient_attn as hea
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods.base import MethodConfig, MethodInfo, make_config

app = typer.Typer(
    name="hf-efficient-attn", add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Sub-quadratic attention for Transformers: what there is, and what it gains and costs.",
    epilog="Example: hf-efficient-attn demo --method kdeformer --length 512,4096",
)  # fmt: skip


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command; ends the process with its exit status."""
    main_of(app, "hf-efficient-attn", arguments)


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


def _describe(info: MethodInfo) -> dict[str, Any]:
    """A method as plain values that JSON can hold."""
    plain = {spec.name: getattr(info, spec.name) for spec in dataclasses.fields(info)}
    return plain | {"learned_parameters": list(info.learned_parameters), "config_class": info.config_class.__name__}


def _hyperparameters(info: MethodInfo) -> list[dict[str, Any]]:
    return [
        {
            "name": spec.name,
            "default": spec.default,
            **{k: spec.metadata.get(k) for k in ("help", "minimum", "choices")},
        }
        for spec in dataclasses.fields(info.config_class)
    ]


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(hea.__version__)
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


Settings = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Hyperparameter; method.key=value for one method.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command(epilog="Example: hf-efficient-attn methods --json")
def methods(as_json: Json = False) -> None:
    """List the methods; each name is also an attn_implementation."""
    infos = [hea.method_info(name) for name in hea.available_methods()]
    if as_json:
        return _print_json([_describe(info) for info in infos])
    rows = [
        (i.name, i.paper, i.year, "yes" if i.causal else "no", ", ".join(i.learned_parameters) or "none", i.summary)
        for i in infos
    ]
    typer.echo(table(("name", "paper", "year", "causal", "learned", "what it does"), rows))


@app.command(epilog="Example: hf-efficient-attn info kdeformer")
def info(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A method, as `methods` lists them.")],
    as_json: Json = False,
) -> None:
    """Describe one method: its paper, its hyperparameters, their defaults and choices."""
    about = hea.method_info(name)
    options = _hyperparameters(about)
    if as_json:
        return _print_json(_describe(about) | {"hyperparameters": options})
    forms = [("causal", about.causal), ("Nq != Nk", about.rectangular), ("recurrent", about.recurrent)]
    typer.echo(f"{about.title} ({about.paper})\n{about.summary}\n")
    typer.echo(f"forms: {', '.join(form for form, there in forms if there) or 'square, bidirectional only'}")
    typer.echo(f"learned parameters: {', '.join(about.learned_parameters) or 'none'}")
    typer.echo(f"config: hf_efficient_attn.{about.config_class.__name__}\n")
    for entry in options:
        limits = [f"default {entry['default']!r}"]
        if entry["minimum"] is not None:
            limits.append(f"at least {entry['minimum']}")
        if entry["choices"]:
            limits.append(f"one of {', '.join(entry['choices'])}")
        typer.echo(f"  {entry['name']} ({'; '.join(limits)})\n      {entry['help'] or ''}".rstrip())


@app.command(
    epilog="Example: hf-efficient-attn demo --method kdeformer --method kdeformer:near_field=window --length 1024,8192 "
    "--plot demo.png"
)
def demo(
    method: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="NAME or NAME:key=value; repeated or with commas. [default: kdeformer,longformer]",
        ),
    ] = ["kdeformer", "longformer"],  # noqa: B006 (typer copies it)
    length: Annotated[
        list[str],
        typer.Option(
            metavar="N",
            show_default=False,
            help="Tokens of a document, 512 to 16384; repeated or with commas. [default: 512,2048,8192]",
        ),
    ] = ["512,2048,8192"],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    plot: Annotated[
        pathlib.Path | None, typer.Option(metavar="FILE", help="Draw time and error against length.")
    ] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", min=1, help="Threads of PyTorch.")] = None,
    as_json: Json = False,
) -> None:
    """Exact attention against the methods, on a pretrained MiniLM and Python's own help texts; needs no network."""
    from hf_efficient_attn.demo import EXACT, check_picture, draw, run_demo

    configs, lengths = parse_methods(method, setting), parse_lengths(length)
    if not configs or not lengths:
        raise UnsupportedAttentionError("the demo needs at least one --method and one --length")
    if plot is not None:
        check_picture(plot)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        result = run_demo(configs, lengths)
    finally:
        torch.set_num_threads(before)
    if plot is not None:
        draw(result, plot)
    if as_json:
        return _print_json(result)
    forms = {"seconds": "{:.3f}", "speed_up": "{:.2f}x", "error": "{:.3f}", "cosine": "{:.4f}"}
    rows = [
        (entry["tokens"], entry["method"], *(form.format(entry[key]) for key, form in forms.items()))
        for entry in result["measurements"]
    ]
    typer.echo(table(("tokens", "attention", "seconds", "speed-up", "error", "cosine"), rows))
    typer.echo(
        "\nseconds: median forward pass of the model. error: |H - H_exact| / |H_exact| of the last hidden states\n"
        "(Frobenius norm). cosine: of the mean-pooled embeddings. Means over the documents of a length.\n"
    )
    entry = result["search"][0]
    typer.echo(f"Search: {entry['questions']} questions among {entry['topics']} topics, against the lists of {EXACT}")
    rows = [
        (e["method"], e["tokens"], f"{e['same_first']} of {e['questions']}", f"{e['shared_five']:.2f} of 5")
        for e in result["search"]
    ]
    typer.echo(table(("attention", "tokens up to", "same first topic", "shared among the first five"), rows))
    typer.echo("\n" + "\n".join(result["summary"]))
    typer.echo(
        "MiniLM was trained on 512 positions; beyond them its table repeats, untrained. The reference is exact\n"
        "attention at the same length: the figures say how well a method stands in for it, not how good a long\n"
        "embedding is."
    )
    if plot is not None:
        typer.echo(f"Drawn: {plot}")
