"""`hf-efficient-attn convert`."""

import json
import pathlib
from typing import Annotated, Any

import typer

import hf_efficient_attn as hea
from hf_efficient_attn.cli.common import Json, app, parse_methods, print_json, table
from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_name
from hf_efficient_attn.integration.layers import parse_layers
from hf_efficient_attn.integration.settings import EXACT_IMPLEMENTATIONS, EfficientAttentionConfig


@app.command(
    epilog="Example: hf-efficient-attn convert sentence-transformers/all-MiniLM-L6-v2 --method nystromformer "
    "--set num_landmarks=64 --layers 0-3,5 -o minilm-nystromformer"
)
def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A folder with a checkpoint, or a hub id.")],
    output: Annotated[pathlib.Path, typer.Option("--output", "-o", metavar="FOLDER", help="A new folder.")],
    method: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A method, as `methods` lists them; sdpa goes back to exact attention."),
    ] = None,
    config: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help="Instead of --method: JSON of what stands in which layer, or analysis.json of `analyze --calibrate`.",
        ),
    ] = None,
    setting: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Hyperparameter of the method; repeated.")
    ] = [],  # noqa: B006 (typer copies it)
    layers: Annotated[
        str | None, typer.Option(metavar="0-5,8", help="Layers to convert; the others stay exact. [default: all]")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens that the position table is extended to, by tiling.")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="Hub id of the original, for the card of a local folder.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output folder if it is there.")] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read pytorch_model.bin (weights only) if nothing else is there.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint with another attention: safetensors, tokenizer and card, ready to be loaded and published.

    Exit status: 0 done, 1 reading, writing or the network failed, 2 refused, 130 interrupted. The output folder appears
    when all is done, or not at all.
    """
    from hf_efficient_attn.conversion.checkpoint import convert_checkpoint

    if (method is None) == (config is None):
        raise UnsupportedAttentionError("give --method NAME, or --config FILE in its place")
    if config is not None:
        if setting or layers:
            raise UnsupportedAttentionError("--config says what stands in which layer: leave out --set and --layers")
        chosen, hyperparameters = _read_settings(config), None
    else:
        chosen, hyperparameters = _chosen(method, setting)
    done = convert_checkpoint(
        source,
        output,
        chosen,
        hyperparameters=hyperparameters,
        layers=None if layers is None else parse_layers(layers),
        max_length=max_length,
        base_model=base_model,
        force=force,
        allow_pickle=allow_pickle,
    )
    if as_json:
        return print_json(done)
    typer.echo("\n".join(_lines(done)))


def _read_settings(path: pathlib.Path) -> EfficientAttentionConfig:
    """What `--config` names."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedAttentionError(f"--config {path}: no JSON ({error})") from error
    if isinstance(said, dict) and "calibrated" in said:
        said = said["calibrated"]
    if said is None:
        raise UnsupportedAttentionError(f"--config {path}: nothing was calibrated: run `analyze` with --calibrate")
    if not isinstance(said, dict):
        raise UnsupportedAttentionError(f"--config {path}: an object is needed, such as `analyze --calibrate` prints")
    return EfficientAttentionConfig.from_dict(said)


def _chosen(method: str, setting: list[str]) -> tuple[str, dict[str, Any] | None]:
    """The method's name and hyperparameters; exact attention has none."""
    if method in EXACT_IMPLEMENTATIONS:
        if setting:
            raise UnsupportedAttentionError(
                f"--set {setting[0]}: {method} is exact attention and has no hyperparameters"
            )
        return method, None
    if method.partition(":")[0] not in hea.available_methods():
        known = [*hea.available_methods(), *EXACT_IMPLEMENTATIONS]
        raise UnsupportedAttentionError(unknown_name("attention method", method, known))
    configs = list(parse_methods([method], setting).values())
    if len(configs) > 1:
        raise UnsupportedAttentionError(f"--method {method}: a checkpoint is converted to one method")
    # Only what was said: a checkpoint of the same method keeps the rest of its own.
    said = {text.partition("=")[0].rpartition(".")[2].strip() for text in [*method.split(":")[1:], *setting]}
    return configs[0].method, {key: value for key, value in configs[0].to_dict().items() if key in said}


def _lines(done: dict[str, Any]) -> list[str]:
    """What was done, for people."""
    lines = [f"{done['architecture']} of {done['source']} -> {done['output']}"]
    mix = done["settings"].get("layers")
    if mix and isinstance(mix[0], dict):
        lines += [f"layers {', '.join(map(str, entry['layers']))}: {_said(entry)}" for entry in mix]
    else:
        lines.append(f"attention: {_said({'method': done['method'], **done['settings']})}")
        if done["layers"]:
            lines.append(f"layers: {', '.join(map(str, done['layers']))}")
    if done["positions"]:
        lines.append(f"positions: {done['positions']}")
    parameters = done["parameters"]
    lines.append(
        f"tensors: {parameters['kept']} kept bit for bit, {len(parameters['new'])} new or changed, "
        f"{len(parameters['dropped'])} dropped"
    )
    for what in ("new", "dropped"):
        names = parameters[what]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"  {what}: {', '.join(names[:3])}{more}")
    lines += ["", table(("file", "bytes"), [(entry["name"], f"{entry['bytes']:,}") for entry in done["files"]])]
    lines += [f"left out: {name} ({why})" for name, why in done["left_out"].items()]
    lines += [f"note: {note}" for note in done["notes"]]
    return [*lines, "", "To load it:", *("    " + line for line in done["load"].splitlines())]


def _said(settings: dict[str, Any]) -> str:
    """A method with its hyperparameters."""
    own = {key: value for key, value in settings.items() if key not in ("method", "version", "layers")}
    return settings["method"] + (f" ({', '.join(f'{key}={value}' for key, value in own.items())})" if own else "")
