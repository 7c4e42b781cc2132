"""`hf-efficient-attn convert`."""

import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_efficient_attn.cli import common
from hf_efficient_attn.errors import UnsupportedAttentionError

if TYPE_CHECKING:
    from hf_efficient_attn.integration.settings import EfficientAttentionConfig

_method = "A method, as listed by `methods`, or sdpa for exact attention."
_config = (
    "Instead of --method: JSON with the methods of the layers, analysis.json of `analyze`, or config.json of a "
    "converted checkpoint."
)
_max_length = (
    "Let the result take N tokens: repeat a shorter position table, and raise the limits of the tokenizer and of "
    "sentence-transformers."
)
_kernel = (
    "Let the result load without this package: by a repository of Hugging Face's kernels library, which "
    "`export-kernel` has written for the method."
)
_remote_code = (
    "Let the result load without this package, by trust_remote_code=True: add a file with the code of the attention."
)


@common.command(
    "convert sentence-transformers/all-MiniLM-L6-v2 --method nystromformer "
    "--set num_landmarks=64 --layers 0-3,5 -o minilm-nystromformer"
)
def convert(
    source: common.Source,
    output: common.Output,
    method: Annotated[str | None, common.names_option(_method)] = None,
    config: Annotated[pathlib.Path | None, typer.Option(metavar="FILE", help=_config)] = None,
    setting: common.MethodSettings = [],  # noqa: B006 (typer copies it)
    layers: common.Layers = None,
    max_length: Annotated[int | None, typer.Option(metavar="N", min=1, help=_max_length)] = None,
    base_model: common.BaseModel = None,
    kernel: Annotated[str | None, typer.Option(metavar="ORG/NAME", help=_kernel)] = None,
    remote_code: Annotated[bool, typer.Option("--remote-code", help=_remote_code)] = False,
    force: common.ForceFolder = False,
    allow_pickle: common.AllowPickle = False,
    as_json: common.Json = False,
) -> None:
    """Write a checkpoint with another attention: safetensors, tokenizer and model card, ready to load and publish.

    Exit status: 0 done, 1 an error of reading, writing or the network, 2 refused, 130 interrupted. The output folder is
    either complete or does not appear. What others put there during the work is never lost.
    """
    from hf_efficient_attn.conversion.checkpoint import convert_saved_model
    from hf_efficient_attn.integration.layers import parse_layers

    if (method is None) == (config is None) or (config is not None and (setting or layers)):
        raise UnsupportedAttentionError(
            "give either --method NAME, or --config FILE, which determines the method of every layer: then leave out "
            "--set and --layers"
        )
    chosen, hyperparameters = parse_method(method or "", setting) if config is None else (_read_settings(config), None)
    chosen_layers = None if layers is None else parse_layers(layers)
    done = convert_saved_model(
        source, output, chosen, hyperparameters=hyperparameters, layers=chosen_layers, max_length=max_length,
        base_model=base_model, kernel=kernel, has_code=remote_code, force=force, allow_pickle=allow_pickle,
    )  # fmt: skip
    if as_json:
        return common.print_json(done)
    typer.echo("\n".join(describe_conversion(done)))


def _read_settings(path: pathlib.Path) -> "EfficientAttentionConfig":
    """The settings in a file: those of `efficient_attention`, a model's config, or the result of `analyze`."""
    from hf_efficient_attn.integration.settings import EfficientAttentionConfig
    from hf_efficient_attn.io.json import read_json_object

    values = read_json_object(path)
    values = values.get("calibrated", values)
    if values is None:
        raise UnsupportedAttentionError(f"--config {path}: no method kept the limit: run `analyze` with a larger one")
    if not isinstance(values, dict) or "model_type" not in values:
        return EfficientAttentionConfig.from_dict(values)
    method, stored = values.get("attn_implementation"), values.get("efficient_attention")
    if stored is None or isinstance(method, dict):
        problem = "no method" if stored is None else "methods for parts of a model, which convert cannot take"
        raise UnsupportedAttentionError(
            f"--config {path}: this config of a model names {problem}: give config.json of a converted checkpoint "
            "without parts, analysis.json of `analyze`, or JSON with the methods of the layers"
        )
    return EfficientAttentionConfig.from_dict(stored, method and str(method).rpartition(":")[2])


def parse_method(method: str, setting: list[str]) -> "tuple[str | EfficientAttentionConfig, dict[str, Any] | None]":
    """The method's name and the hyperparameters on the command line, None if there are none for exact attention."""
    from hf_efficient_attn.integration.settings import EXACT_IMPLEMENTATIONS

    if method in EXACT_IMPLEMENTATIONS:
        return method, dict(map(common.parse_pair, setting)) or None
    configs = list(common.parse_methods([method], setting).values())
    if len(configs) != 1:
        raise UnsupportedAttentionError(f"--method {method!r}: give one method, or sdpa for exact attention")
    # A checkpoint of the same method keeps its other hyperparameters.
    named = {text.partition("=")[0].rpartition(".")[2].strip() for text in [*method.split(":")[1:], *setting]}
    return configs[0].method, {key: value for key, value in configs[0].to_dict().items() if key in named}


def describe_conversion(done: dict[str, Any]) -> list[str]:
    """Lines that describe a conversion."""
    lines = [f"{done['architecture']} of {done['source']} -> {done['output']}"]
    for group in done["exact_up_to"]:
        changed = ", ".join(f"{key}={value}" for key, value in group["settings"].items())
        lines.append(f"attention: {group['method']}{f' ({changed})' if changed else ''}")
        lines.append(f"layers: {', '.join(map(str, group['layers']))}")
    lines += [] if done["exact_up_to"] else [f"attention: {done['method']}"]
    if "calibrated_length" in done["settings"]:
        lines.append(f"calibrated: on inputs of up to {done['settings']['calibrated_length']} tokens")
    if done["positions"]:
        lines.append(f"positions: {done['positions']}")
    kept, new, dropped = (done["parameters"][kind] for kind in ("kept", "new", "dropped"))
    lines.append(f"tensors: {kept} kept bit for bit, {len(new)} new or changed, {len(dropped)} dropped")
    lines += ["", common.table(("file", "bytes"), [(entry["name"], f"{entry['bytes']:,}") for entry in done["files"]])]
    lines += [f"left out: {name}" for name in done["left_out"]]
    lines += [f"note: {note}" for note in done["notes"]]
    return [*lines, "", "To load it:", *("    " + line for line in done["load"].splitlines())]
