"""`hf-efficient-attn benchmark`: what methods gain and cost in a model, on the user's machine and data.

Every method is compared with exact attention in copies of the model that share its weights. Times are paired
(`timing.paired`). Errors are those of single layers on their inputs in the exact model. Agreement compares the outputs
of the whole model with those of exact attention and needs no labels: the cosine of mean-pooled embeddings, the ratio of
perplexities, or the share of inputs for which the same class, or the same token at a masked position, is most likely.
"""

import math
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_efficient_attn.checkpoint import load_model, open_checkpoint
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.capture import forward
from hf_efficient_attn.evaluation.comparison import AGREEMENT, DEFAULT_PROCEDURE, Procedure, make_variants, measure
from hf_efficient_attn.evaluation.data import DOCUMENTATION, ModelData, allow_length, max_positions, task_of
from hf_efficient_attn.evaluation.defaults import default_methods, method_label
from hf_efficient_attn.evaluation.timing import UNSTEADY, machine
from hf_efficient_attn.hub.card import write_card
from hf_efficient_attn.integration.configs import method_of, settings_of
from hf_efficient_attn.integration.layers import ranges
from hf_efficient_attn.integration.models import attention_modules
from hf_efficient_attn.integration.refusals import check_methods
from hf_efficient_attn.integration.settings import EXACT, EfficientAttentionConfig, as_settings
from hf_efficient_attn.io.json import read_json_object
from hf_efficient_attn.io.writing import check_folder, replacing, write_results
from hf_efficient_attn.methods import MethodConfig, make_config

FORMAT = 1
FILES = ("benchmark.json", "benchmark.png")
# Default numbers of texts and of pictures on which agreement is measured.
TEXT_ROWS, IMAGE_ROWS = 4, 32
_SHORTEST, _LONGEST = 512, 16384
# Estimated duration that limits the default lengths. The estimate is high: most runs then take less than a minute.
_SECONDS = 90.0
# Smaller speed-ups may be due to chance.
_MIN_SPEED_UP = 1.05


def benchmark_checkpoint(
    source: "str | pathlib.Path",
    methods: "Mapping[str, MethodConfig | EfficientAttentionConfig] | None" = None,
    lengths: Sequence[int] | None = None,
    *,
    data: "str | pathlib.Path | None" = None,
    rows: int | None = None,
    procedure: Procedure = DEFAULT_PROCEDURE,
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """Measure time, memory, errors of layers and agreement of a checkpoint's model with several methods.

    Args:
        source: folder or hub id of a checkpoint.
        methods: label -> method. None for the method of a converted checkpoint, or else for the default methods
            (`MethodConfig.default_rank`) that support the model.
        lengths: numbers of tokens; pictures are resized to the nearest possible number. None for lengths from 512
            tokens, or the model's maximum if it is smaller, up to four times the maximum, as far as about a minute
            allows.
        data: a text (.txt, .jsonl, or gzipped), or a folder or zip file of pictures. None for Python's documentation,
            or for random numbers if the model has no tokenizer or takes pictures; then no errors are measured.
        rows: number of inputs for the agreement; None for 4 texts or 32 pictures.
        procedure: how the methods are measured.
        allow_pickle: whether weights in a .bin file may be read.

    Returns:
        a dictionary for JSON: "format", "source", "task", "machine", "data", "agreement" (which measure), "notes" and
        "summary" (sentences), "pays_from" (label -> the smallest length from which on the method is faster by 5% or
        more, or None), and "measurements", one for each length and method:

        - "seconds": of a forward pass, median of the rounds.
        - "speed_up", "speed_up_min", "speed_up_max": over exact attention, median and extremes of the rounds.
        - "peak_memory_mib": of a forward pass, without model and inputs.
        - "layer_errors": relative operator norm in each layer, averaged over heads and two inputs; "error" is the mean.
        - "agreement": with the outputs of exact attention.

    Raises:
        UnsupportedAttentionError: before anything is measured, for a source, a method, a length or data that cannot be
            used, and for a method without causal form if the model is a decoder.
    """
    checked = open_checkpoint(source, allow_pickle=allow_pickle)
    model = load_model(checked).eval()
    task = task_of(model)
    own = own_settings(model)
    settings = _settings(methods, own, model)
    check_methods(
        (entry.config for one in settings.values() for entry in one.entries),
        is_decoder(model),
        model=f"the {type(model).__name__}",
        allow_learned=True,
    )
    is_image = model.main_input_name == "pixel_values"
    longest = max(lengths) if lengths else _LONGEST if is_image else min(4 * _native_length(model), _LONGEST)
    notes = [allow_length(model, longest) if lengths and not is_image else None]
    inputs = ModelData(
        model,
        checked.folder,
        None if data is None else pathlib.Path(data),
        longest=longest,
        rows=max(rows or (IMAGE_ROWS if is_image else TEXT_ROWS), procedure.batch),
        shorter=lengths is None,
    )
    if lengths is None:
        lengths = default_lengths(model, inputs, len(settings), procedure)
        notes.append(None if is_image else allow_length(model, max(lengths)))
    lengths = list(dict.fromkeys(sorted(map(inputs.tokens_for, lengths))))
    variants = make_variants(model, settings, own if methods is None else None, lengths[-1])
    measurements = []
    total = len(lengths) * len(settings) * (procedure.rounds + 1)
    with tqdm(total=total, unit="pass", disable=None, leave=False) as bar, torch.no_grad():
        for length in lengths:
            bar.set_description(f"{length} tokens")
            measurements += measure(variants, inputs, length, procedure, bar)
    notes += [_note_on_pictures(inputs, lengths), _note_on_data(inputs)]
    if any(row["speed_up_max"] > 1.5 * row["speed_up_min"] for row in measurements):
        notes.append(UNSTEADY)
    result = {
        "format": FORMAT,
        "source": checked.name,
        "task": task,
        "machine": machine(model),
        "data": {"name": inputs.name, "rows": inputs.rows},
        "agreement": AGREEMENT[task],
        "measurements": measurements,
        "pays_from": {label: pays_from(measurements, label) for label in settings},
        "notes": [note for note in notes if note],
    }
    return {**result, "summary": summarise(result)}


def _native_length(model: PreTrainedModel) -> int:
    return max_positions(model) or _SHORTEST


def own_settings(model: PreTrainedModel) -> EfficientAttentionConfig | None:
    """The method of a converted checkpoint; None for one that is not converted."""
    name = method_of(model.config)
    return None if name is None else settings_of(model.config, name)


def is_decoder(model: PreTrainedModel) -> bool:
    """Whether some of a model's attention is causal."""
    return any(getattr(module, "is_causal", None) is True for module, *_ in attention_modules(model))


def _settings(
    methods: "Mapping[str, MethodConfig | EfficientAttentionConfig] | None",
    own: EfficientAttentionConfig | None,
    model: PreTrainedModel,
) -> dict[str, EfficientAttentionConfig]:
    if methods is not None:
        return {label: as_settings(config) for label, config in methods.items()}
    if own is not None:
        names, layers = dict.fromkeys(entry.config.method for entry in own.entries), own.named_layers()
        return {" and ".join(names) + (f", layers {ranges(layers)}" if layers else ""): own}
    configs = [make_config(name) for name in default_methods(is_causal=is_decoder(model))]
    if model.main_input_name == "pixel_values":
        # Classifiers of pictures read the first token, which has to attend to all others.
        configs = [make_config(one, global_tokens=1) if hasattr(one, "global_tokens") else one for one in configs]
    return {method_label(config): as_settings(config) for config in configs}


def default_lengths(model: PreTrainedModel, data: ModelData, num_methods: int, procedure: Procedure) -> list[int]:
    """Lengths that double up to four times the model's maximum, as far as about a minute allows, but at least one."""
    if data.is_image:
        proposed = [data.tokens_for(factor * data.native_tokens) for factor in (1, 2, 4)]
    else:
        native = _native_length(model)
        proposed = [min(native, _SHORTEST)]
        while 2 * proposed[-1] <= 4 * native:
            proposed.append(2 * proposed[-1])
        # A short text limits the lengths too.
        proposed = [length for length in proposed if length <= data.longest] or [data.longest]
    inputs = data.inputs(proposed[0], 0, procedure.batch)
    with torch.no_grad():
        forward(model, inputs.values)
        start = time.perf_counter()
        forward(model, inputs.values)
    seconds = time.perf_counter() - start
    passes = (procedure.rounds + 2) * (2 * num_methods + 1) + math.ceil(data.rows / procedure.batch) * (num_methods + 1)
    chosen: list[int] = []
    total = 0.0
    for length in dict.fromkeys(proposed):
        # Exact attention grows quadratically with the length, and the rest of the model linearly.
        total += passes * seconds * (length / proposed[0]) ** 1.5
        if chosen and total > _SECONDS:
            break
        chosen.append(length)
    return chosen


def pays_from(measurements: Sequence[Mapping[str, Any]], label: str) -> int | None:
    """The smallest measured length from which on a method is faster by 5% or more; None if there is none."""
    own = sorted((row for row in measurements if row["attention"] == label), key=lambda row: row["length"])
    first = None
    for row in reversed(own):
        if row["speed_up"] < _MIN_SPEED_UP:
            break
        first = row["length"]
    return first


def _note_on_pictures(data: ModelData, lengths: Sequence[int]) -> str | None:
    if not data.is_image:
        return None
    sizes = ", ".join(f"{data.pixels_for(n)} x {data.pixels_for(n)} pixels for {n} tokens" for n in lengths)
    return f"Pictures are resized: {sizes}. The model was trained with {data.native} x {data.native} pixels."


def _note_on_data(data: ModelData) -> str | None:
    if not data.is_real:
        kind = "pixels" if data.is_image else "token ids, since the checkpoint contains no tokenizer"
        return f"The data are generated: random {kind}. Time and memory are measured, but no errors."
    if data.name == DOCUMENTATION:
        return "No data are given: the texts are Python's own documentation (pydoc_data.topics)."
    return None


def summarise(result: Mapping[str, Any]) -> list[str]:
    """Sentences that say from which length on each method pays off."""
    lengths = sorted({row["length"] for row in result["measurements"]})
    sentences = []
    for label, first in result["pays_from"].items():
        if first is None:
            where = f"up to {lengths[-1]} tokens" if len(lengths) > 1 else f"at {lengths[0]} tokens"
            sentences.append(f"{label} does not pay off {where}: exact attention is as fast or faster.")
            continue
        rows = [row for row in result["measurements"] if row["attention"] == label and row["length"] == lengths[-1]]
        where = "at all measured lengths" if first == lengths[0] else f"from {first} tokens on"
        sentences.append(
            f"{label} pays off {where}: it is {rows[0]['speed_up']:.1f} times as fast as exact attention at "
            f"{lengths[-1]} tokens."
        )
    return sentences


def draw(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw speed-up and error against length, in a format that matplotlib determines from the file name."""
    from matplotlib.figure import Figure  # an optional dependency

    rows = [row for row in result["measurements"] if row["method"] != EXACT]
    panels = [("speed_up", "times as fast as exact attention", "Speed")]
    if any(row["error"] is not None for row in rows):
        panels.append(("error", "relative error of a layer (operator norm)", "Error, mean over layers"))
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    ticks = sorted({row["length"] for row in rows})
    for axes, (key, what, title) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for number, label in enumerate(dict.fromkeys(row["attention"] for row in rows)):
            own = [row for row in rows if row["attention"] == label]
            points = ([row[name] for row in own] for name in ("length", key))
            axes.plot(*points, marker="o", color=f"C{number}", label=label)
        axes.set(xscale="log", xlabel="tokens", ylabel=what, title=title)
        axes.set_ylim(bottom=0)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        if key == "speed_up":
            axes.axhline(1.0, color="0.3", linewidth=1)
    about = result["machine"]
    figure.suptitle(f"{about['cpu']}, {about['threads']} threads, {about['dtype']}", fontsize="small")
    with replacing(path) as draft:
        figure.savefig(draft, dpi=150)


def output_folder(
    source: "str | pathlib.Path", output: pathlib.Path | None, *, card: bool = False, force: bool = False
) -> pathlib.Path | None:
    """The folder for benchmark.json and benchmark.png, checked before the measurements; None if none is requested.

    Args:
        source: the checkpoint.
        output: the folder that the user names.
        card: whether to write into `source` and update its model card.
        force: whether to overwrite existing files.

    Raises:
        UnsupportedAttentionError: the files cannot be written, or they exist and `force` is False; with `card`, an
            `output` is given or `source` is not the folder of a converted checkpoint.
    """
    if card:
        if output is not None:
            raise UnsupportedAttentionError("with --card the results are written into SOURCE: leave --output out")
        output = pathlib.Path(source)
        config = output / "config.json"
        if not config.is_file() or "efficient_attention" not in read_json_object(config):
            raise UnsupportedAttentionError(
                f"--card: {str(source)!r} is not the folder of a converted checkpoint: make one with hf-efficient-attn "
                "convert"
            )
    if output is not None:
        check_folder(output, FILES, force=force)
    return output


def write_benchmark(result: Mapping[str, Any], folder: pathlib.Path, *, card: bool = False) -> list[pathlib.Path]:
    """Write benchmark.json and benchmark.png into a folder, and with `card` update the model card there.

    Returns:
        the paths of the files.
    """
    written = write_results(result, folder, "benchmark", draw)
    return [*written, write_card(folder)] if card else written
