"""Test whether the Gaussian kernel matrices of real attention are sparse: the experiments of the sparsity paper.

    python -m recipes.analysis.sparsity --data DATA --plot sparsity.png                 (MiniLM)
    python -m recipes.analysis.sparsity --data DATA --unit article                      (sequences of up to 512 tokens)
    python -m recipes.analysis.sparsity --data DATA --model gpt2 --texts 40             (a GPT-2)

The paper is "Improved Algorithms for Kernel Matrix-Vector Multiplication under Sparsity Assumptions" (2024). For every
layer and head this measures the greatest ratio of tail to head over all texts and all prefixes of 50 tokens or more
(its Figures 1 and 3, on BERT base, RoBERTa and GPT-1: below 4.6, 5.39 and 5.15); the medians over the texts of the
ratios of the n-th largest entry to the 2n-th and to the (n+1)-th (Figure 2: about 20 or less, and about 1); and the
ratio for growing prefixes (Figure 4). The paper uses all of SQuAD; here it is the 240 paragraphs of XQuAD's English
part, which come from SQuAD's development set. DATA holds `squad/xquad.en.json.gz` and, for GPT-2, `models/gpt2-books`.
The default is $HEA_DATA or ../shared/data. MiniLM comes from PyPI.

Duration: about 3 minutes for the first command. Expected: on MiniLM the greatest ratio is 90, and 42 of the 72 heads
are above 4.6. The greatest ratio over all heads grows with the prefix, from 11 at 50 tokens to 87 at 500 (means over
the texts): the assumption does not hold for this model. The medians are 1.1 to 3.4, except for one head (49), and 1.00
to 1.04.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import typer
from tqdm import tqdm

from hf_efficient_attn.analysis import head_to_tail, order_statistics_ratio
from hf_efficient_attn.cli import main_of, table
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.timing import use_threads
from recipes.common.commands import (
    AnyThreads,
    Csv,
    Data,
    Plot,
    Row,
    check_known,
    check_outputs,
    data_folder,
    new_app,
    option,
    write,
)
from recipes.common.inputs import Activation, capture, squad_texts, text_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

app = new_app()

# The greatest ratio of the paper on BERT base.
PAPER_RATIO = 4.6
# The ratio is shown for prefixes of multiples of this length, as in the paper's Figure 4.
_STEP = 50


class Findings(NamedTuple):
    """Results of the experiments.

    Attributes:
        rows: one for every layer and head.
        course: one for every length of a prefix.
        texts: number of texts.
    """

    rows: list[dict[str, Any]]
    course: list[dict[str, Any]]
    texts: int


def measure(texts: Iterable[list[Activation] | None], first: int) -> Findings:
    """Run the three experiments.

    Args:
        texts: activations of all layers on each text; None for a text that is too short.
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
        largest, at = ratios.max(2)
        for layer in range(query.shape[0]):
            for head in range(query.shape[1]):
                found = (largest[layer, head].item(), first + int(at[layer, head]), number)
                greatest[layer, head] = max(greatest.get((layer, head), found), found)
                medians.setdefault((layer, head), []).append(tuple(x[layer, head].item() for x in orders))
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


def _grid(rows: Sequence[Row], key: str) -> list[list[float]]:
    """Heads across, layers down."""
    layers = sorted({row["layer"] for row in rows})
    return [[row[key] for row in rows if row["layer"] == layer] for layer in layers]


def draw(findings: Findings, title: str) -> "Figure":
    """Plot three maps of layers and heads, and the ratio against the length of the prefix."""
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
        finite = values.where(values.isfinite(), torch.nan)
        norm = LogNorm() if key == "median_n_to_2n" and (finite[finite.isfinite()] > 0).all() else None
        picture = axes.imshow(finite.numpy(), norm=norm, aspect="auto", cmap="viridis")
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
    return figure


def _show(rows: Sequence[Row], key: str, name: str) -> None:
    cells = [(layer, *(f"{value:.3g}" for value in line)) for layer, line in enumerate(_grid(rows, key))]
    typer.echo(f"\n{name}:\n")
    typer.echo(table(("layer", *(f"head {head}" for head in range(len(cells[0]) - 1))), cells))


@app.command(epilog="Example: python -m recipes.analysis.sparsity --data data --texts 20 --plot sparsity.png")
def sparsity(
    model: option(str, "minilm or gpt2.", metavar="MODEL") = "minilm",
    data: Data = None,
    unit: option(str, "paragraph, or article for all of its paragraphs joined.", metavar="UNIT") = "paragraph",
    texts: option(int | None, "Number of texts, evenly spaced. [default: all]", min=1) = None,
    length: option(int, "Largest number of tokens of a text.", min=2, max=512) = 512,
    first: option(int, "Tokens of the shortest prefix.", min=2) = 50,
    threads: AnyThreads = None,
    csv: Csv = None,
    plot: Plot = None,
) -> None:
    """Measure the ratios of tail to head of the kernel matrices of a model's attention, for every layer and head."""
    check_known("--model", [model], ("minilm", "gpt2"))
    check_known("--unit", [unit], ("paragraph", "article"))
    check_outputs(csv, plot)
    folder = data_folder(data)
    chosen = squad_texts(folder, unit)
    if texts is not None:
        chosen = chosen[:: max(1, len(chosen) // texts)][:texts]
    with use_threads(threads):
        loaded, tokenizer = text_model(model, folder)
        tokens = (tokenizer(text, truncation=True, max_length=length, return_tensors="pt") for text in chosen)
        found = (capture(loaded, ids) if ids["input_ids"].shape[1] >= first else None for ids in tokens)
        findings = measure(tqdm(found, total=len(chosen), unit="text", disable=None, leave=False), first)
    rows, course, used = findings
    title = (
        f"{model}: {used} texts ({unit}s of SQuAD) of {first} to {length} tokens; {len(chosen) - used} "
        "shorter ones omitted"
    )
    write(rows, csv, plot, lambda _: draw(findings, title))
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
