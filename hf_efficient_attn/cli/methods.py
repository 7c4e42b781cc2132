"""`hf-efficient-attn methods` and `info NAME`."""

import dataclasses
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_efficient_attn.cli.common import Json, bold, command, complete_methods, print_json

if TYPE_CHECKING:
    from hf_efficient_attn.methods import MethodInfo

_LEGEND = (
    "Each name is also an attn_implementation. A star marks the default methods, from which the commands take those "
    "that they compare if none is named; in decoders only those with a causal form. "
    "learns: the method has parameters that need training; "
    "option: only with some hyperparameters. `hf-efficient-attn info NAME` describes a method and its hyperparameters."
)
# A budget in columns that is the default of no method.
_EXAMPLE = 64
_name = "A method, as listed by `methods`."


def _describe(info: "MethodInfo") -> dict[str, Any]:
    """The facts about a method as plain values for JSON."""
    plain = {spec.name: getattr(info, spec.name) for spec in dataclasses.fields(info)}
    config = info.config_class
    others = {"config_class": config.__name__, "module": config.__module__, "decoding": info.decoding}
    return plain | {"learned_parameters": list(info.learned_parameters)} | others


def _wrap(text: str, indent: str = "", hanging: str | None = None) -> str:
    """Break a text into lines of at most 80 characters; `hanging` is the indent from the second line on."""
    rest = indent if hanging is None else hanging
    return textwrap.fill(text, 80, initial_indent=indent, subsequent_indent=rest, break_on_hyphens=False)


@command("methods --json", needs_models=False)
def methods(as_json: Json = False) -> None:
    """List the methods; each name is also an attn_implementation."""
    from hf_efficient_attn.evaluation.defaults import default_methods
    from hf_efficient_attn.methods import available_methods, learns, method_info

    infos, defaults = [method_info(name) for name in available_methods()], default_methods()
    if as_json:
        return print_json([_describe(info) for info in infos])
    width = max(len(info.name) for info in infos)
    typer.echo(bold(f"  {'name':{width}}  causal  learns  what it computes"))
    for info in infos:
        star, causal = "*" if info.name in defaults else " ", "yes" if info.causal else "no"
        learned = "yes" if learns(info.config_class()) else "option" if info.learned_parameters else "no"
        line = f"{star} {info.name:{width}}  {causal:6}  {learned:6}  "
        typer.echo(_wrap(info.summary, line, " " * len(line)))
    typer.echo("\n" + _wrap(_LEGEND))


@command("info nearfar", needs_models=False)
def info(
    name: Annotated[str, typer.Argument(metavar="NAME", help=_name, autocompletion=complete_methods)],
    as_json: Json = False,
) -> None:
    """Describe a method: its paper, and its hyperparameters with their defaults and choices."""
    from hf_efficient_attn.methods import method_info

    about = method_info(name)
    options: list[dict[str, Any]] = [
        {"name": x.name, "default": x.default, **{key: x.metadata.get(key) for key in ("help", "minimum", "choices")}}
        for x in dataclasses.fields(about.config_class)
    ]
    if as_json:
        return print_json(_describe(about) | {"hyperparameters": options})
    typer.echo(bold(about.title))
    for fact, value in _describe(about).items():
        text = ", ".join(value) if isinstance(value, list) else {True: "yes", False: "no"}.get(value, value)
        if text:
            typer.echo(_wrap(f"{fact.replace('_', ' ')}: {text}", hanging="    "))
    default, sized = about.config_class(), about.config_class().with_budget(_EXAMPLE)
    changed = {x: getattr(sized, x) for x in default.hyperparameters() if getattr(sized, x) != getattr(default, x)}
    values = ", ".join(f"{name}={value!r}" for name, value in changed.items()) or "the defaults"
    typer.echo(_wrap(f"with_budget({_EXAMPLE}), the cost of {_EXAMPLE} keys in every head: {values}", hanging="    "))
    typer.echo(f"\n{bold('Hyperparameters')}")
    for entry in options:
        limits = [f"default {entry['default']!r}"]
        limits += [] if entry["minimum"] is None else [f"at least {entry['minimum']}"]
        limits += [f"one of {', '.join(entry['choices'])}"] if entry["choices"] else []
        typer.echo(_wrap(f"{entry['name']} ({'; '.join(limits)})", "  "))
        if entry["help"]:
            typer.echo(_wrap(entry["help"], " " * 6))
