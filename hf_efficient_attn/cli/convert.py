"""`hf-efficient-attn convert`."""

import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_efficient_attn.cli.common import (
    AllowPickle,
    Json,
    Source,
    command,
    complete_methods,
    parse_layers,
    parse_methods,
    print_json,
    table,
)
from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_method

if TYPE_CHECKING:
    from hf_efficient_attn.integration.settings import EfficientAttentionConfig


@command(
    "convert sentence-transformers/all-MiniLM-L6-v2 --method nystromformer "
    "--set num_landmarks=64 --layers 0-3,5 -o minilm-nystromformer"
)
def convert(
    source: Source,
    output: Annotated[pathlib.Path, typer.Option("--output", "-o", metavar="FOLDER", help="A new folder.")],
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A method, as listed by `methods`, or sdpa for exact attention.",
            autocompletion=complete_methods,
        ),
    ] = None,
    config: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help="Instead of --method: JSON with the methods of the layers, or analysis.json of `analyze`.",
        ),
    ] = None,
    setting: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="A hyperparameter of the method; repeatable.")
    ] = [],  # noqa: B006 (typer copies it)
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="0-5,8",
            help="Layers to convert, by number or name ('encoder'); the others stay exact. [default: all]",
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Let the result take N tokens: repeat a shorter position table, and raise the limits of the tokenizer "
            "and of sentence-transformers.",
        ),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(metavar="ORG/NAME", help="Hub id of the original model for the card, if SOURCE is a folder."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output folder if it exists.")] = False,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint with another attention: safetensors, tokenizer and model card, ready to load and publish.

    Exit status: 0 done, 1 an error of reading, writing or the network, 2 refused, 130 interrupted. The output folder is
    either complete or does not appear. What others put there during the work is never lost.
    """
    from hf_efficient_attn.conversion.checkpoint import convert_checkpoint

    if config is None:
        if method is None:
            raise UnsupportedAttentionError("give --method NAME, or --config FILE in its place")
        chosen, hyperparameters = parse_method(method, setting)
    else:
        if method is not None or setting or layers:
            raise UnsupportedAttentionError(
                "--config determines the method of every layer: leave out --method, --set and --layers"
            )
        chosen, hyperparameters = _read_settings(config), None
    chosen_layers = None if layers is None else parse_layers(layers)
    done = convert_checkpoint(
        source, output, chosen, hyperparameters=hyperparameters, layers=chosen_layers, max_length=max_length,
        base_model=base_model, force=force, allow_pickle=allow_pickle,
    )  # fmt: skip
    if as_json:
        return print_json(done)
    typer.echo("\n".join(describe_conversion(done)))


def _read_settings(path: pathlib.Path) -> "EfficientAttentionConfig":
    """The settings in a file: those of `efficient_attention`, or the result of `analyze`."""
    from hf_efficient_attn.integration.settings import EfficientAttentionConfig
    from hf_efficient_attn.io.json import read_json_object

    values = read_json_object(path)
    values = values.get("calibrated", values)
    if values is None:
        raise UnsupportedAttentionError(f"--config {path}: no method kept the limit: run `analyze` with a larger one")
    if not isinstance(values, dict):
        raise UnsupportedAttentionError(f"--config {path}: 'calibrated' must be an object, as `analyze` writes it")
    return EfficientAttentionConfig.from_dict(values)


def parse_method(method: str, setting: list[str]) -> "tuple[str | EfficientAttentionConfig, dict[str, Any] | None]":
    """The method's name and the hyperparameters on the command line, None for exact attention."""
    from hf_efficient_attn.integration.settings import EXACT_IMPLEMENTATIONS
    from hf_efficient_attn.methods import available_methods

    if method in EXACT_IMPLEMENTATIONS:
        if setting:
            raise UnsupportedAttentionError(
                f"--set {setting[0]}: {method} is exact attention and has no hyperparameters"
            )
        return method, None
    if method.partition(":")[0] not in available_methods():
        known = [*available_methods(), *EXACT_IMPLEMENTATIONS]
        raise UnsupportedAttentionError(unknown_method(method, known))
    configs = list(parse_methods([method], setting).values())
    if len(configs) > 1:
        raise UnsupportedAttentionError(f"--method {method}: give one method")
    # A checkpoint of the same method keeps its other hyperparameters.
    named = {text.partition("=")[0].rpartition(".")[2].strip() for text in [*method.split(":")[1:], *setting]}
    return configs[0].method, {key: value for key, value in configs[0].to_dict().items() if key in named}


def describe_conversion(done: dict[str, Any]) -> list[str]:
    """Lines that describe a conversion."""
    lines = [f"{done['architecture']} of {done['source']} -> {done['output']}"]
    labels, groups = dict[Any, str](), done["exact_up_to"]
    for group in groups:
        changed = ", ".join(f"{key}={value}" for key, value in group["settings"].items())
        label = group["method"] + (f" ({changed})" if changed else "")
        exact = f", exact up to {group['tokens']} tokens" if group["tokens"] and len(groups) > 1 else ""
        labels |= dict.fromkeys(group["layers"], label + exact)
    if len(groups) > 1:
        lines += ["layers:", *(f"  {layer}: {labels[layer]}" for layer in done["layers"])]
    else:
        lines.append(f"attention: {next(iter(labels.values()), done['method'])}")
        lines += [f"layers: {', '.join(map(str, done['layers']))}"] if done["layers"] else []
    if "calibrated_length" in done["settings"]:
        lines.append(f"calibrated: on inputs of up to {done['settings']['calibrated_length']} tokens")
    if done["positions"]:
        lines.append(f"positions: {done['positions']}")
    kept, new, dropped = (done["parameters"][kind] for kind in ("kept", "new", "dropped"))
    lines.append(f"tensors: {kept} kept bit for bit, {len(new)} new or changed, {len(dropped)} dropped")
    for kind, names in (("new", new), ("dropped", dropped)):
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        lines += [f"  {kind}: {', '.join(names[:3])}{more}"] if names else []
    lines += ["", table(("file", "bytes"), [(entry["name"], f"{entry['bytes']:,}") for entry in done["files"]])]
    lines += [f"left out: {name}" for name in done["left_out"]]
    lines += [f"note: {note}" for note in done["notes"]]
    return [*lines, "", "To load it:", *("    " + line for line in done["load"].splitlines())]
