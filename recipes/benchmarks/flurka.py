"""Compare FLuRKA with both of its parents, as whole attention layers of a BERT from hidden states to the heads' output.

    python -m recipes.benchmarks.flurka --rounds 3
    python -m recipes.benchmarks.flurka --shape bert,figure-3 --kernel linear

The parents are the method of the kernel (linear, performer, eva) and the linformer with the same P. The timed layer is
the BertSelfAttention of a model with random weights that is made with `attn_implementation`; forward, batch size 1,
float32. The paper's low-rank parent contracts before the projections, too. Ours is an attention function that gets keys
and values of all N tokens, so that FLuRKA gains more on it.

Duration: mostly that of exact attention. Expected: at the shapes of the figures, where a claim says faster at all, at
least 1.3 times faster than the kernel parent and 1.8 times faster than the low-rank parent.

With N tokens, hidden size W = H heads of dimension D, and P contracted vectors, the paper claims that FLuRKA needs
fewer operations than both parents if N > P (H + 2) > W > P > D (Claim 1), than the low-rank parent if N - 1 > P > D
(Claim 2), and than the kernel parent if N > P (H + 2) and W > P (Claim 3). These conditions are not necessary ones.

The shapes named after figures are the last points of the paper's figures, which were measured on an A100. All sizes are
divided by the same number, which leaves the ratios of the counts unchanged: figure-3 (N 55,500, W 2,600, H 8, P 1,500)
by 3.39, figure-4-top (N 20,000, D 128, H 4, P 16,000, where the paper's last point P = N violates Claim 2) by 4, and
figure-4-bottom (N 20,000, W 20,000, H 4, P 1,000) by 7.8.
"""

import itertools
from typing import Any, NamedTuple

import torch
import typer
from torch import nn
from tqdm import tqdm
from transformers import AutoModel, BertConfig

import hf_efficient_attn as hea
from hf_efficient_attn.cli import main_of, split_list
from hf_efficient_attn.evaluation.timing import use_threads
from hf_efficient_attn.methods import MethodConfig, make_config
from recipes.common import commands
from recipes.common.memory import EXACT, paired

app = commands.new_app()

PREFIX, LOW_RANK = "flurka_", "linformer"
KERNELS = [name.removeprefix(PREFIX) for name in hea.available_methods() if name.startswith(PREFIX)]
COLUMNS = {
    "shape": "{shape}", "FLuRKA": "{method}", "than": "{than}", "claimed": "{yes}", "ms": "{ms:.1f}",
    "ms of it": "{ms_than:.1f}", "faster": "{faster:.2f}x", "min..max": "{faster_min:.2f}..{faster_max:.2f}",
}  # fmt: skip


class Shape(NamedTuple):
    """Tokens N, hidden size W, heads H and contracted vectors P; there are as many features as dimensions of a head."""

    length: int
    hidden_size: int
    num_heads: int
    projection_dim: int

    @property
    def head_dim(self) -> int:
        """Dimension of a head, D."""
        return self.hidden_size // self.num_heads

    def claims(self) -> dict[str, bool]:
        """Whether the paper claims fewer operations than each parent (Claims 3 and 2)."""
        n, w, h, p = self
        return {"kernel": n > p * (h + 2) and w > p, "low-rank": n - 1 > p > self.head_dim}


SHAPES = {
    "figure-3": Shape(16384, 768, 8, 443),
    "figure-4-top": Shape(5000, 128, 4, 4000),
    "figure-4-bottom": Shape(2560, 2560, 4, 128),
    "bert": Shape(8192, 768, 12, 256),
    "bert-512": Shape(512, 768, 12, 256),
    "minilm-512": Shape(8192, 384, 12, 512),
}


def layer(method: str, shape: Shape, seed: int = 0) -> nn.Module:
    """The attention module of a BERT with one layer and random weights; `method` is "sdpa" for exact attention."""
    config = BertConfig(
        hidden_size=shape.hidden_size, num_attention_heads=shape.num_heads, num_hidden_layers=1, intermediate_size=8,
        vocab_size=8, max_position_embeddings=8,
    )  # fmt: skip
    if method != EXACT:
        config.efficient_attention = method_config(method, shape).to_dict()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModel.from_config(config, attn_implementation=method)
    return model.eval().encoder.layer[0].attention.self


def method_config(method: str, shape: Shape) -> MethodConfig:
    """The config of a method with the sizes of the shape."""
    sizes = {"projection_dim": shape.projection_dim, "max_length": shape.length, "num_features": shape.head_dim}
    known = hea.method_info(method).config_class.hyperparameters()
    return make_config(method, **{name: size for name, size in sizes.items() if name in known})


@torch.no_grad()
def measure(name: str, kernel: str, rounds: int) -> list[dict[str, Any]]:
    """Time a FLuRKA next to its parents and exact attention; return one row for each of the others."""
    shape, method = SHAPES[name], PREFIX + kernel
    # Standard normal hidden states (1, N, W), like those after a LayerNorm.
    inputs = torch.randn(1, shape.length, shape.hidden_size, generator=torch.Generator().manual_seed(0))
    parents = {kernel: "kernel", LOW_RANK: "low-rank", EXACT: "exact"}
    layers = {one: layer(one, shape) for one in (method, *parents)}
    calls = {one: lambda module=module: module(inputs)[0] for one, module in layers.items()}
    ours, timed = paired(calls.pop(method), calls, rounds)
    rows = []
    for parent, role in parents.items():
        timing, claimed = timed[parent], shape.claims().get(role)
        # FLuRKA is the reference of the pairs, so that the ratios are inverted.
        rows.append({
            "shape": name, **shape._asdict(), "method": method, "than": parent, "role": role, "claimed": claimed,
            "yes": {True: "yes", False: "no"}.get(claimed), "seconds": ours.seconds, "seconds_than": timing.seconds,
            "unsteady": timing.unsteady, "faster": 1 / timing.ratio, "faster_min": 1 / timing.ratio_max,
            "faster_max": 1 / timing.ratio_min,
        })  # fmt: skip
    return rows


@app.command(epilog="Example: python -m recipes.benchmarks.flurka --shape bert,figure-3 --kernel linear")
def flurka(
    shape: commands.option(list[str], f"{', '.join(SHAPES)}; repeated. [default: all]") = [],  # noqa: B006 (typer copies it)
    kernel: commands.option(list[str], "Kernels, repeated or separated by commas. [default: all]") = [],  # noqa: B006
    threads: commands.Threads = 2,
    rounds: commands.Rounds = 5,
    csv: commands.Csv = None,
) -> None:
    """Measure times of FLuRKA layers, their parents and exact attention."""
    names, kernels = split_list(shape) or list(SHAPES), split_list(kernel) or KERNELS
    commands.check_known("--shape", names, SHAPES)
    commands.check_known("--kernel", kernels, KERNELS)
    rows: list[dict[str, Any]] = []
    with use_threads(threads):
        for name, one in tqdm([*itertools.product(names, kernels)], disable=None, leave=False):
            rows += measure(name, one, rounds)
    for name in names:
        sizes = zip("NWHP", SHAPES[name], strict=True)
        typer.echo(f"{name}: " + ", ".join(f"{letter} {size}" for letter, size in sizes))
    commands.report(rows, COLUMNS, commands.rounds_note(f"threads {threads}", rounds), csv=csv)


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.flurka")
