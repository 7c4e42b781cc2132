"""Compare FLuRKA with both of its parents, as whole attention layers of a BERT from hidden states to the heads' output.

    python -m recipes.benchmarks.flurka --plot flurka.png
    python -m recipes.benchmarks.flurka --check

Gupta et al. 2023 contract the hidden states to P vectors before they project them to keys and values, and attend to
these with a kernel. The parents here are the method of the kernel (linear, performer, eva) and the linformer with the
same P. The timed layer is what a user gets: the BertSelfAttention of a model with random weights that is made with
`attn_implementation`; forward, batch size 1, float32.

Duration: mostly that of exact attention, which `--no-exact` leaves out. Expected with `--check`: at the shapes of the
figures, where a claim says faster at all, at least 1.3 times faster than the kernel parent and 1.8 times faster than
the low-rank parent; otherwise it exits with status 1.

Multiplications of the matrix products, for N tokens, hidden size W = H heads of dimension D, P contracted vectors and F
features:

    exact             3 N W^2 + 2 N^2 W
    linear            3 N W^2 + 2 N W D
    performer         3 N W^2 + 4 N W F
    linformer         3 N W^2 + 4 N P W
    flurka_linear     N W^2 + 2 P W^2 + 2 N P W + (N + P) W D
    flurka_performer  N W^2 + 2 P W^2 + 2 N P W + 2 (N + P) W F

These are the projections, the contraction, and the products with the contracted vectors or features. They omit the
sums of weights (up to 9 N H F) and the small products for the biases of contracted vectors. Those of eva are not
counted. The paper (Eq. 6-8) also counts an operation for every exponential and feature and has F = D:

    kernel            3 N W^2 + 2 N W + 2 N W D
    low-rank          N W^2 + 2 P W^2 + 4 N P W + N H P
    FLuRKA            N W^2 + 2 P W^2 + 2 N P W + N W + P W + (N + P) W D

The paper's low-rank parent contracts before the projections, too. Ours is an attention function that gets keys and
values, as in the Linformer's Eq. 7 with E after W_K. It projects all N tokens, 2 N W^2 instead of the paper's 2 P W^2,
so that FLuRKA gains more on it than the paper's count says.

The paper claims that FLuRKA needs fewer operations under these conditions:

    Claim 1  N > P (H + 2) > W > P > D    than both parents
    Claim 2  N - 1 > P > D                than the low-rank parent
    Claim 3  N > P (H + 2), W > P         than the kernel parent

Claims 1 and 3 hold for long sequences, large hidden sizes and small P. The conditions are sufficient, not necessary. By
Eq. 7 and 8 FLuRKA beats the kernel parent up to about P = W + D / 2 as N grows (`bert-512` violates Claim 3 and still
needs fewer operations), and loses beyond (`minilm-512`, `figure-4-top`: large P, small hidden size). By Eq. 6 and 8 the
low-rank parent wins if P is below about D / 2 (`figure-4-bottom`, large heads). The gain depends on the shape: by count
it is at most (3 W + 2 D) / (W + 2 P + D) over the kernel parent. More features than D shift all of this; the default is
F = D, the paper's assumption (`--features`).

The shapes named after figures are the last points of the paper's figures, which were measured on an A100. Here all
sizes are divided by the same number, which leaves the ratios of the counts unchanged. The shapes named after models
have the sizes of the models.

    figure-3         N 55,500, W 2,600, H 8, P 1,500, divided by 3.39
    figure-4-top     N 20,000, D 128, H 4, P 16,000, divided by 4 (the paper's last point, P = N, violates Claim 2)
    figure-4-bottom  N 20,000, W 20,000, H 4, P 1,000, divided by 7.8
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import typer
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModel, BertConfig

import hf_efficient_attn as hea
from hf_efficient_attn.cli import main_of, split_list
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.timing import UNSTEADY, paired, use_threads
from hf_efficient_attn.methods import MethodConfig, make_config
from recipes.common import commands
from recipes.common.memory import EXACT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

app = commands.new_app()

PREFIX, LOW_RANK = "flurka_", "linformer"
# Goals in times faster than each parent, at the paper's shapes where it claims fewer operations.
GOALS = {"kernel": 1.3, "low-rank": 1.8}


class Shape(NamedTuple):
    """Tokens N, hidden size W, heads H, contracted vectors P and features F."""

    length: int
    hidden_size: int
    num_heads: int
    projection_dim: int
    features: int

    @property
    def head_dim(self) -> int:
        """Dimension of a head, D."""
        return self.hidden_size // self.num_heads

    def claims(self) -> dict[str, bool]:
        """Whether the paper claims fewer operations than the kernel parent (Claim 3) and the low-rank parent (Claim 2).

        Claim 1 implies both.
        """
        return {
            "kernel": self.length > self.projection_dim * (self.num_heads + 2)
            and self.hidden_size > self.projection_dim,
            "low-rank": self.length - 1 > self.projection_dim > self.head_dim,
        }


def _shape(length: int, hidden_size: int, num_heads: int, projection_dim: int) -> Shape:
    """A shape with as many features as dimensions of a head."""
    return Shape(length, hidden_size, num_heads, projection_dim, hidden_size // num_heads)


SHAPES = {
    "figure-3": _shape(16384, 768, 8, 443),
    "figure-4-top": _shape(5000, 128, 4, 4000),
    "figure-4-bottom": _shape(2560, 2560, 4, 128),
    "bert": _shape(8192, 768, 12, 256),
    "bert-512": _shape(512, 768, 12, 256),
    "minilm-512": _shape(8192, 384, 12, 512),
}
PAPER = tuple(name for name in SHAPES if name.startswith("figure"))


def counted(method: str, shape: Shape) -> int | None:
    """Multiplications of our matrix products, as described above; None for methods that are not counted."""
    n, w, p, d, f = shape.length, shape.hidden_size, shape.projection_dim, shape.head_dim, shape.features
    contracted = n * w * w + 2 * p * w * w + 2 * n * p * w
    counts = {
        EXACT: 3 * n * w * w + 2 * n * n * w,
        "linear": 3 * n * w * w + 2 * n * w * d,
        "performer": 3 * n * w * w + 4 * n * w * f,
        LOW_RANK: 3 * n * w * w + 4 * n * p * w,
        "flurka_linear": contracted + (n + p) * w * d,
        "flurka_performer": contracted + 2 * (n + p) * w * f,
    }
    return counts.get(method)


def of_paper(shape: Shape) -> dict[str, int]:
    """Operations by the paper's Eq. 6-8."""
    n, w, p, d = shape.length, shape.hidden_size, shape.projection_dim, shape.head_dim
    contracted = n * w * w + 2 * p * w * w + 2 * n * p * w
    return {
        "kernel": 3 * n * w * w + 2 * n * w + 2 * n * w * d,
        "low-rank": contracted + 2 * n * p * w + n * shape.num_heads * p,
        "flurka": contracted + (n + p) * w + (n + p) * w * d,
    }


def kernels() -> list[str]:
    """The kernels of the FLuRKA methods."""
    return [name.removeprefix(PREFIX) for name in hea.available_methods() if name.startswith(PREFIX)]


def layer(method: str, shape: Shape, seed: int = 0) -> nn.Module:
    """The attention module of a BERT with one layer and random weights; `method` is "sdpa" for exact attention."""
    config = BertConfig(
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_hidden_layers=1,
        intermediate_size=8,
        vocab_size=8,
        max_position_embeddings=8,
    )
    if method != EXACT:
        config.efficient_attention = method_config(method, shape).to_dict()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModel.from_config(config, attn_implementation=method)
    return model.eval().encoder.layer[0].attention.self


def method_config(method: str, shape: Shape) -> MethodConfig:
    """The config of a method with the sizes of the shape."""
    known = hea.method_info(method).config_class.hyperparameters()
    sizes = {"projection_dim": shape.projection_dim, "max_length": shape.length, "num_features": shape.features}
    return make_config(method, **{name: size for name, size in sizes.items() if name in known})


def hidden_states(shape: Shape, seed: int) -> Tensor:
    """Standard normal hidden states (1, N, W), like those after a LayerNorm."""
    return torch.randn(1, shape.length, shape.hidden_size, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def measure(
    name: str, shape: Shape, kernel: str, rounds: int, seed: int, exact: bool, bar: tqdm | None = None
) -> tuple[list[dict[str, Any]], bool]:
    """Time a FLuRKA next to its parents and, with `exact`, exact attention.

    Returns:
        One row for each of the others, and whether the times are unsteady.
    """
    method, inputs = PREFIX + kernel, hidden_states(shape, seed)
    parents = {kernel: "kernel", LOW_RANK: "low-rank"} | ({EXACT: "exact"} if exact else {})
    layers = {one: layer(one, shape, seed) for one in (method, *parents)}
    calls = {one: lambda module=module: module(inputs)[0] for one, module in layers.items()}
    ours, timed = paired(calls.pop(method), calls, rounds, bar)
    own, paper, claims, rows = counted(method, shape), of_paper(shape), shape.claims(), []
    for parent, role in parents.items():
        count, timing = counted(parent, shape), timed[parent]
        row = {"shape": name, **shape._asdict(), "method": method, "than": parent, "role": role}
        row |= {"claimed": claims.get(role), "multiplications": own, "multiplications_than": count}
        row |= {"by_count": count / own if count and own else None}
        row |= {"by_paper": paper[role] / paper["flurka"] if role in paper else None}
        # FLuRKA is the reference of the pairs, so that the ratios are inverted.
        row |= {"seconds": ours.seconds, "seconds_than": timing.seconds}
        row |= {"faster": 1 / timing.ratio, "faster_min": 1 / timing.ratio_max, "faster_max": 1 / timing.ratio_min}
        rows.append(row)
    return rows, any(timing.unsteady for timing in timed.values())


def verdicts(rows: Sequence[commands.Row]) -> list[commands.Verdict]:
    """The measurements at the paper's shapes for which it claims fewer operations."""
    claimed = [row for row in rows if row["claimed"] and row["shape"] in PAPER]
    what = "{shape}, {method}: times faster than {than}"
    return commands.compared(claimed, what, "faster", lambda row: GOALS[row["role"]])


def draw(rows: Sequence[commands.Row]) -> "Figure":
    """Plot bars of how many times faster FLuRKA is, by count and in time, a panel for every role."""
    from matplotlib.figure import Figure

    roles = list(dict.fromkeys(row["role"] for row in rows))
    most = max(sum(row["role"] == role for row in rows) for role in roles)
    figure = Figure(figsize=(5 * len(roles), 0.4 * most + 1.5), layout="constrained")
    for role, axes in zip(roles, figure.subplots(1, len(roles), squeeze=False)[0], strict=True):
        selected = [row for row in rows if row["role"] == role]
        names = [f"{row['shape']}\n{row['method']}" for row in selected]
        pairs = {"by count": [row["by_count"] for row in selected], "in time": [row["faster"] for row in selected]}
        commands.bars(axes, names, pairs, f"times faster than {'exact' if role == 'exact' else f'the {role} parent'}")
    return figure


def parse_shapes(values: Sequence[str], features: int | None) -> dict[str, Shape]:
    """Parse names of `SHAPES` or N:W:H:P."""
    found = {}
    for text in split_list(values) or list(SHAPES):
        sizes = text.split(":")
        if text in SHAPES:
            shape = SHAPES[text]
        elif len(sizes) == 4 and all(size.isdecimal() and int(size) > 0 for size in sizes):
            shape = _shape(*map(int, sizes))
        else:
            raise UnsupportedAttentionError(f"--shape {text!r} is neither one of {', '.join(SHAPES)} nor N:W:H:P")
        if shape.hidden_size % shape.num_heads:
            raise UnsupportedAttentionError(
                f"--shape {text!r}: {shape.num_heads} heads do not divide {shape.hidden_size}"
            )
        found[text] = shape if features is None else shape._replace(features=features)
    return found


@app.command(epilog="Example: python -m recipes.benchmarks.flurka --shape bert,4096:768:12:128 --kernel linear")
def flurka(
    shape: commands.option(list[str], f"{', '.join(SHAPES)}, or N:W:H:P; repeated. [default: all]") = [],  # noqa: B006 (typer copies it)
    kernel: commands.option(list[str], "Kernels, repeated or separated by commas. [default: all]") = [],  # noqa: B006
    features: commands.option(
        int | None, "Features of the performer. [default: the dimension of a head]", min=1
    ) = None,
    exact: commands.option(bool, "Time exact attention too.", "--exact/--no-exact") = True,
    threads: commands.Threads = 2,
    rounds: commands.Rounds = 5,
    seed: commands.Seed = 0,
    check: commands.Check = False,
    csv: commands.Csv = None,
    plot: commands.Plot = None,
) -> None:
    """Count multiplications and measure times of FLuRKA layers, their parents and exact attention."""
    commands.check_outputs(csv, plot)
    shapes, names, known = parse_shapes(shape, features), split_list(kernel) or kernels(), kernels()
    commands.check_known("--kernel", names, known)
    rows: list[dict[str, Any]] = []
    unsteady, steps = False, len(shapes) * len(names) * rounds * (2 + exact)
    with use_threads(threads), tqdm(total=steps, unit="pair", disable=None, leave=False) as bar:
        for title, sizes in shapes.items():
            for name in names:
                bar.set_description(f"{title} {name}")
                found, unsteady_now = measure(title, sizes, name, rounds, seed, exact, bar)
                rows, unsteady = rows + found, unsteady or unsteady_now
    commands.write(rows, csv, plot, draw)
    for title, sizes in shapes.items():
        typer.echo(f"{title}: " + ", ".join(f"{letter} {size}" for letter, size in zip("NWHPF", sizes, strict=True)))
    columns = {
        "shape": "{shape}", "FLuRKA": "{method}", "than": "{than}", "claimed": "{yes}", "10^9": "{giga:.1f}",
        "10^9 of it": "{giga_than:.1f}", "paper's count": "{by_paper:.2f}x", "our count": "{by_count:.2f}x",
        "ms": "{ms:.1f}", "ms of it": "{ms_than:.1f}", "faster": "{faster:.2f}x",
        "min..max": "{faster_min:.2f}..{faster_max:.2f}",
    }  # fmt: skip
    typer.echo()
    words = {None: None, True: "yes", False: "no"}
    units = (("multiplications", "giga", 1e-9), ("seconds", "ms", 1e3))
    for row in rows:
        row["yes"] = words[row["claimed"]]
        for key, unit, factor in units:
            for of in ("", "_than"):
                row[unit + of] = None if row[key + of] is None else factor * row[key + of]
    commands.show(rows, columns)
    typer.echo(
        "\n10^9: multiplications of a layer. Counts: how many times the operations of FLuRKA the other needs, by Eq. "
        "6-8 of the paper and by the multiplications of this code.\n"
        f"threads {threads}; medians of {rounds} rounds; torch {torch.__version__}"
    )
    if unsteady:
        typer.echo(UNSTEADY)
    if check:
        commands.conclude(verdicts(rows))


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.flurka")
