"""The report of a training: metrics.json, the learning curve, and a table of the main figures."""

import dataclasses
import json
import math
import os
import pathlib
import platform
import shlex
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
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

METRICS, PICTURE = "metrics.json", "learning_curve.png"


def about_run(attention: Any, model: nn.Module, processes: int, device: torch.device) -> dict[str, Any]:
    """The part of a report that does not depend on the training loop: attention, model, machine and versions.

    Args:
        attention: the `AttentionArguments` of the command line, or another dataclass.
        model: the model.
        processes: number of processes.
        device: device of this process.
    """
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
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "accelerate": accelerate.__version__,
            "hf_efficient_attn": hea.__version__,
        },
    }


def switches_of(log_history: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The switches of attention in Trainer's log, as [{"step", "from", "to"}]."""
    return [
        {"step": entry["step"], "from": entry.get("uptraining_from"), "to": entry["uptraining_stage"]}
        for entry in log_history
        if "uptraining_stage" in entry
    ]


def write_report(
    report: Mapping[str, Any], log_history: Sequence[Mapping[str, Any]], folder: str | os.PathLike, metric: str
) -> None:
    """Write `metrics.json` and `learning_curve.png` to `folder`, and print a table of the main figures.

    Without training there is no learning curve.
    """
    folder = pathlib.Path(folder)
    with replacing(folder / METRICS) as draft:
        draft.write_text(json.dumps(_as_json(report), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    written = [folder / METRICS]
    if any("loss" in entry for entry in log_history):
        written.append(folder / PICTURE)
        with replacing(written[-1]) as draft:
            learning_curve(log_history, metric).savefig(draft, dpi=120)
    skipped = ("_runtime", "_per_second", "total_flos", "epoch")
    figures = {k: v for k, v in report["metrics"].items() if not k.endswith(skipped)}
    first = ("steps", "seconds_per_step", "peak_memory_mib")
    rows = [(key, _short(value)) for key, value in ({k: report[k] for k in first if k in report} | figures).items()]
    rows += [(f"switch at step {s['step']}", f"{s['from']} to {s['to']}") for s in report.get("switches", ())]
    print(table(("", "value"), rows))
    print(f"written: {', '.join(map(str, written))}", flush=True)


def _as_json(value: Any) -> Any:
    """Convert a value to types that JSON has. Numbers that are not finite become null, unknown types their text."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(entry) for entry in value]
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def learning_curve(log_history: Sequence[Mapping[str, Any]], metric: str) -> "Figure":
    """Plot training loss and an evaluation metric against the step, with a dashed line at every switch of attention.

    Args:
        log_history: entries {"step", "loss"}, {"step", metric} and {"step", "uptraining_stage"}, as Trainer logs them.
        metric: key of the evaluation metric. If no entry has it, only the loss is plotted.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    lines = _line(axes, log_history, "loss", label="training loss", color="C0")
    axes.set(xlabel="step", ylabel="training loss")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    if any(metric in entry for entry in log_history):
        other = axes.twinx()
        lines += _line(other, log_history, metric, label=metric, color="C1", marker="o")
        other.set_ylabel(metric)
    for switch in switches_of(log_history):
        axes.axvline(switch["step"], color="0.3", linestyle="--", linewidth=1)
        axes.annotate(
            str(switch["to"]), (switch["step"], 1.0), xycoords=("data", "axes fraction"), xytext=(3, -3),
            textcoords="offset points", rotation=90, va="top", fontsize="x-small",
        )  # fmt: skip
    if lines:
        axes.legend(handles=lines, fontsize="small")
    return figure


def _line(axes: "Axes", log_history: Sequence[Mapping[str, Any]], key: str, **style: Any) -> "list[Line2D]":
    points = [(entry["step"], entry[key]) for entry in log_history if key in entry and "step" in entry]
    return axes.plot(*zip(*points, strict=True), **style) if points else []
