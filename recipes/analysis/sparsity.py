"""Is a Gaussian kernel matrix made of attention sparse? The experiments of the sparsity paper on real activations.

    python -m recipes.analysis.sparsity --data DATA --plot sparsity.png                 (MiniLM, about 3 minutes)
    python -m recipes.analysis.sparsity --data DATA --unit article                      (sequences of up to 512 tokens)
    python -m recipes.analysis.sparsity --data DATA --model gpt2 --texts 40             (a GPT-2)

The paper is "Improved Algorithms for Kernel Matrix-Vector Multiplication under Sparsity Assumptions" (2024). For every
layer and head: the greatest ratio of tail to head over all prefixes of 50 tokens and more and all texts (its Figures 1
and 3, on BERT base, RoBERTa and GPT-1: below 4.6, 5.39 and 5.15), the medians over the texts of the ratios of the n-th
largest entry to the 2n-th and to the (n+1)-th (Figure 2: about 20 or less, and about 1), and how the ratio goes with
the length of the prefix (Figure 4). The paper takes all of SQuAD; here it is the 240 paragraphs of XQuAD's English
part, which come from SQuAD's development set. DATA holds `squad/xquad.en.json.gz` and, for GPT-2,
`models/gpt2-books`; by default it is $HEA_DATA or ../shared/data. MiniLM comes from PyPI.

To expect: on MiniLM the greatest ratio is 90, 42 of the 72 heads are above 4.6, and the greatest ratio of all
heads grows with the prefix, 11 at 50 tokens and 87 at 500 (means over the texts): the assumption does not hold for this
model. The medians are 1.1 to 3.4 but for one head (49), and 1.00 to 1.04.
"""

import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
import typer
from tqdm import tqdm

from hf_efficient_attn.cli import main_of, table
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.metrics import head_to_tail, order_statistics_ratio
from hf_efficient_attn.io.writing import replacing
from recipes.analysis.inputs import load_text_model, squad_texts, text_activations
from recipes.benchmarks.error import Activation, Data, data_folder
from recipes.benchmarks.report import Csv, Plot, check_outputs, write_csv

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

# The greatest ratio that the paper finds on BERT base.
PAPER_RATIO = 4.6
# Lengths of prefixes at which the course of the ratio is shown, as in the paper's Figure 4.
_STEP = 50


class Findings(NamedTuple):
    """rows: one for every layer and head. course: one for every length of prefix shown. texts: how many were used."""

    rows: list[dict[str, Any]]
    course: list[dict[str, Any]]
    texts: int


def measure(texts: Iterable[list[Activation] | None], first: int) -> Findings:
    """The three experiments on the activations of each text; None is a text that is too short.

    Args:
        first: length of the shortest prefix.
    """
    greatest: dict[tuple[int, int], tuple[float, int, int]] = {}
    medians: dict[tuple[int, int], list[tuple[float, float]]] = {}
    course: dict[int, list[float]] = {}
    used = 0
    for number, layers in enumerate(texts):
        if layers is None:
            continue
        used += 1
        scale = layers[0].scale
        query, key = (torch.cat([getattr(one, name) for one in layers]) for name in ("query", "key"))
        ratios = head_to_tail(query, key, scale=scale, first=first)
        orders = order_statistics_ratio(query, key, scale=scale)
        top, at = ratios.max(2)
        for layer in range(query.shape[0]):
            for head in range(query.shape[1]):
                place = layer, head
                found = (top[layer, head].item(), first + int(at[layer, head]), number)
                greatest[place] = max(greatest.get(place, found), found)
                medians.setdefault(place, []).append(tuple(x[layer, head].item() for x in orders))
        for length in range(first, first + ratios.shape[2]):
            if length % _STEP == 0 or length == first:
                course.setdefault(length, []).append(ratios[:, :, length - first].max().item())
    if not used:
        raise UnsupportedAttentionError(f"no text has {first} tokens; give a smaller --first, or --unit article")
    rows = []
    for (layer, head), (ratio, length, number) in sorted(greatest.items()):
        pairs = medians[layer, head]
        rows.append(
            {
                "layer": layer,
                "head": head,
                "max_ratio": ratio,
                "at_length": length,
                "of_text": number,
                "median_n_to_2n": statistics.median(pair[0] for pair in pairs),
                "median_n_to_next": statistics.median(pair[1] for pair in pairs),
            }
        )
    lengths = [
        {
            "length": length,
            "mean": statistics.fmean(values),
            "deviation": statistics.stdev(values) if len(values) > 1 else 0.0,
            "max": max(values),
            "texts": len(values),
        }
        for length, values in sorted(course.items())
    ]
    return Findings(rows, lengths, used)


def _grid(rows: Sequence[Mapping[str, Any]], key: str) -> list[list[float]]:
    """Heads across, layers down."""
    layers = sorted({row["layer"] for row in rows})
    return [[row[key] for row in rows if row["layer"] == layer] for layer in layers]


def draw(findings: Findings, path: pathlib.Path, title: str) -> None:
    """Three maps of layers and heads, and the course of the ratio with the length of the prefix."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    panels = figure.subplots(2, 2).flat
    names = {
        "max_ratio": "greatest ratio of tail to head",
        "median_n_to_2n": "median of n-th / 2n-th largest",
        "median_n_to_next": "median of n-th / (n+1)-th largest",
    }
    for axes, (key, name) in zip(panels, names.items(), strict=False):
        values = torch.tensor(_grid(findings.rows, key), dtype=torch.float64)
        shown = values.where(values.isfinite(), torch.nan)
        norm = LogNorm() if key == "median_n_to_2n" and (shown[shown.isfinite()] > 0).all() else None
        picture = axes.imshow(shown.numpy(), norm=norm, aspect="auto", cmap="viridis")
        figure.colorbar(picture, ax=axes)
        axes.set(xlabel="head", ylabel="layer", title=name)
        axes.set_xticks(range(values.shape[1]))
        axes.set_yticks(range(values.shape[0]))
        for layer, line in enumerate(values.tolist()):
            for head, value in enumerate(line):
                color = "black" if value > 0 and picture.norm(value) > 0.6 else "white"
                axes.text(head, layer, f"{value:.3g}", ha="center", va="center", color=color, fontsize=6)
    axes = figure.axes[3]
    lengths = [row["length"] for row in findings.course]
    axes.errorbar(
        lengths,
        [row["mean"] for row in findings.course],
        [row["deviation"] for row in findings.course],
        marker="o",
        label="mean over texts",
    )
    axes.plot(lengths, [row["max"] for row in findings.course], "k:", label="greatest")
    axes.axhline(PAPER_RATIO, color="C3", label=f"the paper's {PAPER_RATIO:g} on BERT base")
    axes.set(xlabel="tokens of the prefix", ylabel="greatest ratio of all heads", title="ratio against length", ylim=0)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize="medium")
    with replacing(path) as draft:
        figure.savefig(draft, dpi=150)


def _show(rows: Sequence[Mapping[str, Any]], key: str, name: str) -> None:
    cells = [(layer, *(f"{value:.3g}" for value in line)) for layer, line in enumerate(_grid(rows, key))]
    typer.echo(f"\n{name}:\n")
    typer.echo(table(("layer", *(f"head {head}" for head in range(len(cells[0]) - 1))), cells))


@app.command(epilog="Example: python -m recipes.analysis.sparsity --data data --texts 20 --plot sparsity.png")
def sparsity(
    model: Annotated[str, typer.Option(metavar="MODEL", help="minilm or gpt2.")] = "minilm",
    data: Data = None,
    unit: Annotated[
        str, typer.Option(metavar="UNIT", help="paragraph, or article: its paragraphs joined.")
    ] = "paragraph",
    texts: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="So many texts, evenly spread. [default: all]")
    ] = None,
    length: Annotated[int, typer.Option(metavar="N", min=2, max=512, help="Tokens of a text, at most.")] = 512,
    first: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens of the shortest prefix.")] = 50,
    threads: Annotated[int | None, typer.Option(metavar="N", min=1)] = None,
    csv: Csv = None,
    plot: Plot = None,
) -> None:
    """Ratios of tail to head of the kernel matrices of a model's attention, for every layer and head."""
    if model not in ("minilm", "gpt2"):
        raise UnsupportedAttentionError(f"--model {model!r} is not one of minilm, gpt2")
    if unit not in ("paragraph", "article"):
        raise UnsupportedAttentionError(f"--unit {unit!r} is not one of paragraph, article")
    check_outputs(csv, plot)
    folder = data_folder(data)
    chosen = squad_texts(folder, unit)
    if texts is not None:
        chosen = chosen[:: max(1, len(chosen) // texts)][:texts]
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        loaded, tokenizer, longest = load_text_model(model, folder)
        found = text_activations(loaded, tokenizer, min(length, longest), chosen, max(first, 2))
        findings = measure(tqdm(found, total=len(chosen), unit="text", disable=None, leave=False), first)
    finally:
        torch.set_num_threads(before)
    rows, course, used = findings
    title = (
        f"{model}: {used} texts ({unit}s of SQuAD) of {first} to {min(length, longest)} tokens; {len(chosen) - used} "
        "shorter ones left out"
    )
    if csv is not None:
        write_csv(csv, rows)
    if plot is not None:
        draw(findings, plot, title)
    typer.echo(title)
    _show(rows, "max_ratio", "Greatest ratio of tail to head, over all prefixes and texts")
    _show(rows, "median_n_to_2n", "Median over texts: n-th largest entry / 2n-th")
    _show(rows, "median_n_to_next", "Median over texts: n-th largest entry / (n+1)-th")
    typer.echo("\nGreatest ratio of all layers and heads, by the length of the prefix:\n")
    cells = [(c["length"], f"{c['mean']:.3g} ± {c['deviation']:.2g}", f"{c['max']:.3g}", c["texts"]) for c in course]
    typer.echo(table(("tokens", "mean over texts", "greatest", "texts"), cells))
    worst = max(rows, key=lambda row: row["max_ratio"])
    above = sum(row["max_ratio"] > PAPER_RATIO for row in rows)
    typer.echo(
        f"\nThe greatest ratio is {worst['max_ratio']:.3g} (layer {worst['layer']}, head {worst['head']}, a prefix of "
        f"{worst['at_length']} tokens of text {worst['of_text']}); {above} of {len(rows)} heads are above the paper's "
        f"{PAPER_RATIO:g}."
    )


if __name__ == "__main__":
    main_of(app, "python -m recipes.analysis.sparsity")
