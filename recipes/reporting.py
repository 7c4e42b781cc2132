"""What a training leaves behind: metrics.json, the learning curve, and the main figures as a table."""

import dataclasses
import json
import math
import os
import pathlib
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import accelerate
import torch
import transformers
from torch import nn

import hf_efficient_attn as hea
from hf_efficient_attn.cli import table
from hf_efficient_attn.io.writing import replacing

METRICS, PICTURE = "metrics.json", "learning_curve.png"


def about_run(attention: Any, model: nn.Module, processes: int, device: torch.device) -> dict[str, Any]:
    """The part of a report that any loop can state: attention asked for and in force, model, machine, versions.

    Args:
        attention: the `AttentionArguments` of the command line, or another dataclass.
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
    """[{"step", "from", "to"}] of the switches in Trainer's log."""
    return [
        {"step": entry["step"], "from": entry.get("uptraining_from"), "to": entry["uptraining_stage"]}
        for entry in log_history
        if "uptraining_stage" in entry
    ]


def write_report(
    report: Mapping[str, Any], log_history: Sequence[Mapping[str, Any]], folder: str | os.PathLike, metric: str
) -> None:
    """`metrics.json` and `learning_curve.png` into `folder`, and the main figures as a table to stdout.

    No picture where nothing was trained.
    """
    folder = pathlib.Path(folder)
    with replacing(folder / METRICS) as draft:
        draft.write_text(json.dumps(_plain(report), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    written = [folder / METRICS]
    if any("loss" in entry for entry in log_history):
        written.append(folder / PICTURE)
        with replacing(written[-1]) as draft:
            learning_curve(log_history, metric).savefig(draft, dpi=120)
    skipped = ("_runtime", "_per_second", "total_flos", "epoch")
    figures = {k: v for k, v in report["metrics"].items() if not k.endswith(skipped)}
    beside = ("steps", "seconds_per_step", "peak_memory_mib")
    rows = [(key, _short(value)) for key, value in ({k: report[k] for k in beside if k in report} | figures).items()]
    rows += [(f"switch at step {s['step']}", f"{s['from']} to {s['to']}") for s in report.get("switches", ())]
    print(table(("", "value"), rows))
    print(f"written: {', '.join(map(str, written))}", flush=True)


def _plain(value: Any) -> Any:
    """What JSON can hold: numbers that are not finite become null, anything else that it does not know its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def learning_curve(log_history: Sequence[Mapping[str, Any]], metric: str):
    """Training loss and an evaluation figure against the step; a dashed line at every switch of attention.

    Args:
        log_history: entries {"step", "loss"}, {"step", metric} and {"step", "uptraining_stage"}, as Trainer logs them.
        metric: key of the evaluation figure; where no entry has it only the loss is drawn.

    Returns:
        a matplotlib Figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    lines = _line(axes, log_history, "loss", "training loss", "C0")
    axes.set(xlabel="step", ylabel="training loss")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    if any(metric in entry for entry in log_history):
        other = axes.twinx()
        lines += _line(other, log_history, metric, metric, "C1", marker="o")
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


def _line(axes, log_history, key: str, label: str, color: str, **style) -> list:
    points = [(entry["step"], entry[key]) for entry in log_history if key in entry and "step" in entry]
    return axes.plot(*zip(*points, strict=True), label=label, color=color, **style) if points else []
