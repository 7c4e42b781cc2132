"""The report of a training: metrics.json, the learning curve, and a table of the main figures."""

import dataclasses
import json
import math
import os
import pathlib
import platform
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import accelerate
import torch
import transformers
from torch import nn

import hf_efficient_attn as hea
from hf_efficient_attn.cli import table
from hf_efficient_attn.io.writing import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS, PICTURE = "metrics.json", "learning_curve.png"


def about_run(attention: Any, model: nn.Module, processes: int, device: torch.device) -> dict[str, Any]:
    """The part of a report that does not depend on the training loop: attention, model, machine and versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()}, CPU"
    config = getattr(model, "config", None)
    return {
        "attention": dataclasses.asdict(attention),
        "efficient_attention": getattr(config, "efficient_attention", None),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "processes": processes,
        "threads": torch.get_num_threads(),
        "device": name,
        "command": shlex.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": {module.__name__: module.__version__ for module in (torch, transformers, accelerate, hea)}
        | {"python": platform.python_version()},
    }


def switches_of(log_history: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The switches of attention in Trainer's log, as [{"step", "from", "to"}], with entries of a distillation."""
    return [
        {
            "step": entry["step"],
            "from": entry.get("uptraining_from"),
            "to": entry["uptraining_stage"],
            **{name: value for name, value in entry.items() if name.startswith("distillation_")},
        }
        for entry in log_history
        if "uptraining_stage" in entry
    ]


def write_report(
    report: Mapping[str, Any], log_history: Sequence[Mapping[str, Any]], folder: str | os.PathLike, metric: str
) -> None:
    """Write `metrics.json` and `learning_curve.png` to `folder`, and print a table of the main figures.

    Numbers that are not finite become null, and values of unknown types their text. Without training there is no
    learning curve.
    """
    text = json.dumps(report, default=lambda x: x.item() if getattr(x, "ndim", None) == 0 else str(x))
    stored = json.loads(text, parse_constant=lambda name: None)
    folder = pathlib.Path(folder)
    with replacing(folder / METRICS) as draft:
        draft.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
    written = [folder / METRICS]
    if any("loss" in entry for entry in log_history):
        written.append(folder / PICTURE)
        with replacing(written[-1]) as draft:
            learning_curve(log_history, metric).savefig(draft, dpi=120)
    skipped = ("_runtime", "_per_second", "total_flos", "epoch")
    figures = {k: v for k, v in report["metrics"].items() if not k.endswith(skipped)}
    first = ("steps", "seconds_per_step", "peak_memory_mib")
    shown = {k: report[k] for k in first if k in report} | figures
    rows = [(key, f"{value:.4g}" if isinstance(value, float) else str(value)) for key, value in shown.items()]
    rows += [(f"switch at step {s['step']}", f"{s['from']} to {s['to']}") for s in report.get("switches", ())]
    print(table(("", "value"), rows))
    print(f"written: {', '.join(map(str, written))}", flush=True)


def mean_and_range(values: Sequence[float], digits: int = 3) -> str:
    """The mean, and half the range if there are several values."""
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {(max(values) - min(values)) / 2:.{digits}f}"


def smoothed(values: Sequence[float]) -> list[float]:
    """Means over a centered window of about a tenth of the values; narrower at the ends, so that it stays centered."""
    half = max(1, len(values) // 20)
    widths = [min(half, i, len(values) - 1 - i) for i in range(len(values))]
    return [math.fsum(values[i - w : i + w + 1]) / (2 * w + 1) for i, w in enumerate(widths)]


def learning_curve(log_history: Sequence[Mapping[str, Any]], metric: str) -> "Figure":
    """Plot training loss, as logged and smoothed, and an evaluation metric against the step.

    The stages of an up-training are shaded and named in the legend. `log_history` has the entries {"step", "loss"},
    {"step", metric} and {"step", "uptraining_from", "uptraining_stage"}, as Trainer logs them. If no entry has the
    metric, only the loss is plotted.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    losses = [(entry["step"], entry["loss"]) for entry in log_history if "loss" in entry and "step" in entry]
    lines: list[Any] = []
    if losses:
        points, values = zip(*losses, strict=True)
        many = len(values) >= 10
        lines += axes.plot(points, values, color="C0", alpha=0.35 if many else 1.0, label="training loss")
        if many:
            lines += axes.plot(points, smoothed(values), color="C0", linewidth=2, label="training loss, smoothed")
    axes.set(xlabel="step", ylabel="training loss")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    points = [(entry["step"], entry[metric]) for entry in log_history if metric in entry and "step" in entry]
    if points:
        other = axes.twinx()
        lines += other.plot(*zip(*points, strict=True), color="C1", marker="o", label=metric)
        other.set_ylabel(metric)
    switches, steps = switches_of(log_history), [entry["step"] for entry in log_history if "step" in entry]
    edges = [0, *(switch["step"] for switch in switches), max(steps, default=0)]
    names = [switches[0]["from"] or "before", *(switch["to"] for switch in switches)] if switches else []
    for number, (name, first, last) in enumerate(zip(names, edges, edges[1:], strict=False)):
        lines.append(axes.axvspan(first, last, color=f"C{number + 2}", alpha=0.1, linewidth=0, label=str(name)))
        if number:
            axes.axvline(first, color="0.3", linestyle="--", linewidth=1)
    if lines:
        axes.legend(handles=lines, fontsize="small")
    return figure
