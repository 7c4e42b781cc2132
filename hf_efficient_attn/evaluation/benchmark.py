"""`hf-efficient-attn benchmark`: what methods gain and cost in one model, on one machine, on one's own data.

Every method stands beside exact attention in copies of the model that share its weights. Times are paired
(`measure.paired`); errors are those of single layers on the inputs of the exact model; agreement is that of the whole
model's outputs with those of exact attention, and needs no labels: the cosine of mean-pooled embeddings, the ratio of
perplexities, or how often the same class, or the same token under a mask, comes first.
"""

import math
import pathlib
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.capture import forward
from hf_efficient_attn.evaluation.comparison import AGREEMENT, make_variants, measure
from hf_efficient_attn.evaluation.data import ModelData, make_room, positions_of, task_of
from hf_efficient_attn.evaluation.timing import UNSTEADY, machine, use_threads
from hf_efficient_attn.integration.layers import ranges
from hf_efficient_attn.integration.models import transformers_models
from hf_efficient_attn.integration.settings import EXACT, EfficientAttentionConfig, as_settings
from hf_efficient_attn.io.reading import read_json
from hf_efficient_attn.io.writing import check_folder, replacing, write_results
from hf_efficient_attn.methods import MethodConfig, causal_methods, make_config

FORMAT = 1
NAMES = ("benchmark.json", "benchmark.png")
# Rows, pictures, on which agreement is measured.
TEXT_ROWS, IMAGE_ROWS = 4, 32
_SHORTEST, _LONGEST = 512, 16384
_SECONDS = 90.0  # as estimated, by which most runs end in a minute
# Faster by less may be chance.
_FASTER = 1.05


def benchmark_checkpoint(
    source: "str | pathlib.Path",
    methods: "Mapping[str, MethodConfig | EfficientAttentionConfig] | None" = None,
    lengths: Sequence[int] | None = None,
    *,
    data: "str | pathlib.Path | None" = None,
    batch: int = 1,
    rows: int | None = None,
    rounds: int = 3,
    threads: int | None = None,
    memory: bool = True,
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """Time, memory, error of the layers and agreement of a checkpoint's model by several methods.

    Args:
        source: folder or hub id of a checkpoint. A converted one is compared with exact attention.
        methods: label -> config. None for the method of a converted checkpoint; for another kdeformer, longformer and,
            where nothing is causal, nystromformer.
        lengths: tokens of a row; for image models the pictures of the nearest size are taken. None for lengths from 512
            tokens, or what the model takes, up to four times what it takes, as far as a minute goes.
        data: a text (.txt, .jsonl, gzipped too), or a folder or zip file of pictures. None for Python's help texts, or
            random numbers where a model has no tokenizer or takes pictures: then nothing is said of errors.
        batch: rows of a forward pass.
        rows: on which agreement is measured; None for 4 texts or 32 pictures.
        rounds: in which every method is timed, each time between two runs of exact attention.
        threads: of PyTorch; None for as many as there are.
        memory: whether to measure that too.
        allow_pickle: whether weights in a .bin file may be read.

    Returns:
        a dictionary that JSON can hold: "format", "source", "task", "machine", "data", "agreement", "measurements"
        ("seconds" of a forward pass, "speed_up" over exact attention as the median of the rounds, "speed_up_min",
        "speed_up_max", "peak_memory_mib" of a pass beside model and inputs, "layer_errors" in relative operator norm,
        means over heads and two rows, "error" their mean, "agreement"), "pays_from" (label -> smallest length from
        which on it is faster by a twentieth, or None), "notes" and "summary" (sentences).

    Raises:
        UnsupportedAttentionError: before anything is measured, for a source, a method, a length or data that will not
            do; a decoder and a method without causal form, with the names of those that have one.
    """
    from hf_efficient_attn.checkpoint import load_model, open_checkpoint

    _check_counts(lengths, batch=batch, rounds=rounds, rows=rows, threads=threads)
    checked = open_checkpoint(source, allow_pickle=allow_pickle)
    model = load_model(checked).eval()
    task = task_of(model)
    own = own_settings(model)
    wanted = _settings(methods, own, model)
    check_causal(model, wanted)
    is_image = model.main_input_name == "pixel_values"
    native = None if is_image else positions_of(model) or _SHORTEST
    longest = max(lengths) if lengths else min(4 * (native or 1), _LONGEST)
    notes = [] if is_image else [make_room(model, longest) if lengths else None]
    rows = rows or (IMAGE_ROWS if is_image else TEXT_ROWS)
    with use_threads(threads):
        file = None if data is None else pathlib.Path(data)
        found = ModelData(model, checked.folder, file, longest=longest, rows=max(rows, batch), shorter=lengths is None)
        if lengths is None:
            lengths = default_lengths(model, found, len(wanted), rounds, batch)
            notes.append(None if is_image else make_room(model, max(lengths)))
        lengths = list(dict.fromkeys(sorted(map(found.tokens_for, lengths))))
        variants = make_variants(model, wanted, own if methods is None else None, lengths[-1])
        passes = len(lengths) * len(wanted) * (rounds + 1)
        measurements = []
        with tqdm(total=passes, unit="pass", disable=None, leave=False) as bar, torch.no_grad():
            for length in lengths:
                bar.set_description(f"{length} tokens")
                measurements += measure(variants, found, length, batch, rounds, memory, bar)
        about = machine(model)
    if found.is_image:
        sides = ", ".join(f"{found.pixels_for(n)} x {found.pixels_for(n)} pixels for {n} tokens" for n in lengths)
        notes.append(f"Lengths are those of pictures: {sides}; the model was made for {found.native} x {found.native}.")
    result = {
        "format": FORMAT,
        "source": source_name(source),
        "task": task,
        "machine": about,
        "data": {"name": found.name, "rows": found.rows},
        "agreement": AGREEMENT[task],
        "measurements": measurements,
        "pays_from": {label: pays_from(measurements, label) for label in wanted},
        "notes": [note for note in [*notes, _of_data(found), _of_times(measurements)] if note],
    }
    return {**result, "summary": summarise(result)}


def _check_counts(lengths: Sequence[int] | None, **counts: int | None) -> None:
    if lengths is not None and not lengths:
        raise UnsupportedAttentionError("no lengths were given: leave them out for those that suit the model")
    for what, value in chain(counts.items(), (("a length", length) for length in lengths or ())):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UnsupportedAttentionError(f"{what}: {value!r} is not a positive integer")


def source_name(source: "str | pathlib.Path") -> str:
    """A hub id as it is, of a folder its last name: results are published, and a path tells who made them."""
    path = pathlib.Path(source)
    return path.resolve().name if path.is_dir() else str(source)


def own_settings(model: nn.Module) -> EfficientAttentionConfig | None:
    """The method that a converted checkpoint has; None for one that was not converted."""
    from hf_efficient_attn.integration.attention import settings_of
    from hf_efficient_attn.integration.configs import method_of

    config = transformers_models(model)[0].config
    name = method_of(config)
    return None if name is None else settings_of(config, EfficientAttentionConfig(name))


def is_decoder(model: nn.Module) -> bool:
    """Whether some of a model's attention is causal."""
    from hf_efficient_attn.integration.models import attention_modules

    return any(getattr(module, "is_causal", None) is True for module, *_ in attention_modules(model))


def check_causal(model: nn.Module, settings: Mapping[str, EfficientAttentionConfig]) -> None:
    """That a decoder's methods have a causal form; raises `UnsupportedAttentionError` with the names of those."""
    known = causal_methods()
    for name in (entry.config.method for one in settings.values() for entry in one.entries):
        if name not in known and is_decoder(model):
            raise UnsupportedAttentionError(
                f"{type(model).__name__} is a decoder and {name} has no causal form. Methods that have one: "
                f"{', '.join(known)}"
            )


def _settings(methods, own: EfficientAttentionConfig | None, model: nn.Module) -> dict[str, EfficientAttentionConfig]:
    if methods is not None:
        if not methods:
            raise UnsupportedAttentionError("no methods were given: leave them out for those that suit the model")
        return {label: as_settings(config) for label, config in methods.items()}
    if own is not None:
        names, layers = dict.fromkeys(entry.config.method for entry in own.entries), own.named_layers()
        return {" and ".join(names) + (f", layers {ranges(layers)}" if layers else ""): own}
    chosen = {"kdeformer": make_config("kdeformer"), "longformer": make_config("longformer")}
    if model.main_input_name == "pixel_values":
        # What a picture is, is read from its first token.
        del chosen["longformer"]
        chosen["longformer (global_tokens=1)"] = make_config("longformer", global_tokens=1)
    if not is_decoder(model):
        chosen["nystromformer"] = make_config("nystromformer")
    return {label: as_settings(config) for label, config in chosen.items()}


def default_lengths(model: nn.Module, data: ModelData, methods: int, rounds: int, batch: int) -> list[int]:
    """Doubling up to four times what the model takes, as far as a minute is thought to go; the first in any case."""
    if data.is_image:
        proposed = [data.tokens_for(factor * data.native_tokens) for factor in (1, 2, 4)]
    else:
        present = positions_of(model) or _SHORTEST
        proposed = [min(present, _SHORTEST)]
        while 2 * proposed[-1] <= 4 * present:
            proposed.append(2 * proposed[-1])
        # A short text bounds them too.
        proposed = [length for length in proposed if length <= data.longest] or [data.longest]
    inputs = data.inputs(proposed[0], 0, batch)
    with torch.no_grad():
        forward(model, inputs.values)
        start = time.perf_counter()
        forward(model, inputs.values)
    taken = time.perf_counter() - start
    passes = (rounds + 2) * (2 * methods + 1) + math.ceil(data.rows / batch) * (methods + 1)
    chosen, total = [], 0.0
    for length in dict.fromkeys(proposed):
        # Exact attention grows with the square of the length, and the rest of the model with the length.
        total += passes * taken * (length / proposed[0]) ** 1.5
        if chosen and total > _SECONDS:
            break
        chosen.append(length)
    return chosen


def pays_from(measurements: Sequence[Mapping[str, Any]], label: str) -> int | None:
    """The smallest measured length from which on a method is faster, by a twentieth at least; None if there is none."""
    own = sorted((row for row in measurements if row["attention"] == label), key=lambda row: row["length"])
    found = None
    for row in reversed(own):
        if row["speed_up"] < _FASTER:
            break
        found = row["length"]
    return found


def _of_data(data: ModelData) -> str:
    if not data.real:
        what = "random pixels" if data.is_image else "random token ids, since the model has no tokenizer beside it"
        return f"The data are generated: {what}. They say something of time and memory, and nothing of errors."
    if data.name == "pydoc_data.topics":
        return "No data were given: the texts are Python's own help (pydoc_data.topics)."
    return ""


def _of_times(measurements: Sequence[Mapping[str, Any]]) -> str:
    return UNSTEADY if any(row["speed_up_max"] > 1.5 * row["speed_up_min"] for row in measurements) else ""


def summarise(result: Mapping[str, Any]) -> list[str]:
    """At which length each method begins to pay, in sentences."""
    lengths = sorted({row["length"] for row in result["measurements"]})
    sentences = []
    for label, first in result["pays_from"].items():
        if first is None:
            upto = f"up to {lengths[-1]} tokens" if len(lengths) > 1 else f"at {lengths[0]} tokens"
            sentences.append(f"{label} does not pay {upto}: exact attention is as fast or faster there.")
            continue
        rows = [row for row in result["measurements"] if row["attention"] == label and row["length"] == lengths[-1]]
        where = "at all measured lengths" if first == lengths[0] else f"from {first} tokens on"
        sentences.append(
            f"{label} pays {where}: {rows[0]['speed_up']:.1f} times as fast as exact attention at {lengths[-1]}."
        )
    return sentences


def draw(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Speed-up and error against length, as a picture in any format that matplotlib writes."""
    from matplotlib.figure import Figure

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
    machine_ = result["machine"]
    figure.suptitle(f"{machine_['cpu']}, {machine_['threads']} threads, {machine_['dtype']}", fontsize="small")
    with replacing(path) as draft:
        figure.savefig(draft, dpi=150)


def check_place(
    source: "str | pathlib.Path", output: pathlib.Path | None, *, card: bool = False, force: bool = False
) -> pathlib.Path | None:
    """The folder for benchmark.json and benchmark.png, None where none was asked for; asked before the work.

    Raises:
        UnsupportedAttentionError: they are there already and `force` was not said, or cannot be written; with `card`,
            `source` is no folder of a converted checkpoint.
    """
    if card and output is not None:
        raise UnsupportedAttentionError("with --card the results go into SOURCE: leave --output out")
    if not card and output is None:
        return None
    place = pathlib.Path(source) if card else output
    if card:
        config = place / "config.json"
        values = read_json(config) if config.is_file() else {}
        if "efficient_attention" not in values:
            raise UnsupportedAttentionError(
                f"--card: {str(source)!r} is no folder of a converted checkpoint: make one by hf-efficient-attn convert"
            )
    check_folder(place, NAMES, force=force)
    return place


def write_benchmark(result: Mapping[str, Any], place: pathlib.Path, *, card: bool = False) -> list[pathlib.Path]:
    """Write benchmark.json and benchmark.png into a folder, and renew the model card there; what was written."""
    written = write_results(result, place, "benchmark", draw)
    if card:
        from hf_efficient_attn.hub.card import write_card

        written.append(pathlib.Path(write_card(place)))
    return written
