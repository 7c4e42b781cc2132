"""`hf-efficient-attn methods` and `info NAME`."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_efficient_attn.cli.common import Json, command, complete_methods, print_json, table

if TYPE_CHECKING:
    from hf_efficient_attn.methods import MethodInfo


def _describe(info: "MethodInfo") -> dict[str, Any]:
    """The facts about a method as plain values for JSON."""
    plain = {spec.name: getattr(info, spec.name) for spec in dataclasses.fields(info)}
    return plain | {"learned_parameters": list(info.learned_parameters), "config_class": info.config_class.__name__}


def _hyperparameters(info: "MethodInfo") -> list[dict[str, Any]]:
    """The hyperparameters of a method as plain values for JSON."""
    return [
        {
            "name": spec.name,
            "default": spec.default,
            **{key: spec.metadata.get(key) for key in ("help", "minimum", "choices")},
        }
        for spec in dataclasses.fields(info.config_class)
    ]


@command("methods --json")
def methods(as_json: Json = False) -> None:
    """List the methods; each name is also an attn_implementation."""
    from hf_efficient_attn.methods import available_methods, method_info

    infos = [method_info(name) for name in available_methods()]
    if as_json:
        return print_json([_describe(info) for info in infos])
    rows = [
        (i.name, i.paper, i.year, "yes" if i.causal else "no", ", ".join(i.learned_parameters) or "none", i.summary)
        for i in infos
    ]
    typer.echo(table(("name", "paper", "year", "causal", "learned", "what it computes"), rows))


@command("info kdeformer")
def info(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A method, as listed by `methods`.", autocompletion=complete_methods)
    ],
    as_json: Json = False,
) -> None:
    """Describe a method: its paper, and its hyperparameters with their defaults and choices."""
    from hf_efficient_attn.methods import method_info

    about = method_info(name)
    options = _hyperparameters(about)
    if as_json:
        return print_json(_describe(about) | {"hyperparameters": options})
    forms = [("causal", about.causal), ("Nq != Nk", about.rectangular), ("recurrent", about.recurrent)]
    typer.echo(f"{about.title} ({about.paper})\n{about.summary}\n")
    typer.echo(f"forms: {', '.join(form for form, exists in forms if exists) or 'square, bidirectional only'}")
    typer.echo(f"learned parameters: {', '.join(about.learned_parameters) or 'none'}")
    typer.echo(f"config: hf_efficient_attn.{about.config_class.__name__}\n")
    for entry in options:
        limits = [f"default {entry['default']!r}"]
        if entry["minimum"] is not None:
            limits.append(f"at least {entry['minimum']}")
        if entry["choices"]:
            limits.append(f"one of {', '.join(entry['choices'])}")
        typer.echo(f"  {entry['name']} ({'; '.join(limits)})\n      {entry['help'] or ''}".rstrip())
