"""Compare other implementations with ours in one run, with the same parameters and inputs.

    python -m recipes.benchmarks.peers --plot peers.png
    python -m recipes.benchmarks.peers --check --length 8192 --bidirectional

The default lengths are 8,192 and 16,384 tokens, with the causal form at 8,192 for peers that have one. Peers are
packages from PyPI (extra `peers`; a missing one is listed with the command that installs it), modules of Transformers,
and torch's own flex_attention, compiled. No packages were found for kdeformer, hyperattention, scatterbrain, eva,
wildcat, thinformer, the FLuRKAs and approx_kmv; nearfar is from this package.

Speed is a ratio, as in `recipes.benchmarks.attention`: the time of exact attention of the same causality, before and
after each call, to the time of the call; forward, batch size 1, 8 heads of 64, float32. Only attention is timed, from
queries, keys and values to the output of the heads. Where a module projects its hidden states itself, its projections
are replaced by modules that return precomputed tensors in the layout of the projections. Longformer's module divides
the queries in place, so that it gets a copy in every call, within 2 % of its time.

Both sides have the same landmarks, features, projections, window, rounds and chunks. The differences are:

- In causal_linear_attn with bucket_size=64 a query does not attend to its own bucket of 64 tokens. With bucket_size=1
  it computes causal linear attention. linear_attn has softmax features instead of elu(x) + 1.
- LSHAttention counts a pair once for every round that contains it, which is its default and the faster choice.

The error is |A - E| / |E| in the Frobenius norm, on up to 256 evenly spaced queries, where E is what both should
compute in float64: exact attention; exact attention within the window; attention of the queries to themselves as keys
of length 1, without the own token (reformer); or softmax over the projected keys (linformer). The linear methods
approximate nothing and have no error. Exact attention to random keys is almost uniform: the mean of the values has an
error of about .8, which landmarks approach, and FastAttention too, since it adds 1e-4 to features of at most 1. Without
that, as in our method and in the paper, the variance of the features is visible. `recipes.benchmarks.error` shows the
errors on real activations.

Duration: mostly that of exact attention at the longest length. Expected: no method of ours is slower than a peer;
otherwise `--check` exits with status 1. docs/results.md has the table.
"""

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import typer
from torch import Tensor
from torch.nn.functional import normalize
from tqdm import tqdm

import hf_efficient_attn as hea
from hf_efficient_attn.cli import main_of, parse_lengths, split_list
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.defaults import method_label
from hf_efficient_attn.evaluation.timing import UNSTEADY, Work, paired, use_threads
from hf_efficient_attn.methods import MethodConfig, get_method
from recipes.benchmarks import peer_adapters as adapters
from recipes.benchmarks.peer_adapters import Inputs
from recipes.common import commands
from recipes.common.memory import Case, make_inputs, run_once

if TYPE_CHECKING:
    from matplotlib.figure import Figure

app = commands.new_app()

LENGTHS = (8192, 16384)
# Some peers need lengths that are a multiple of their windows or chunks.
MULTIPLE = 512
CHECKED = 256  # number of queries whose error is measured


class Peer(NamedTuple):
    """Another implementation, and the method of ours that it is compared with.

    Attributes:
        package: name of the package for pip.
        module: name of the package for Python.
        name: name of the class or function.
        ours: our method with the peer's parameters.
        build: takes `ours` and the inputs, and returns the call to time, whose result is (B, H, N, D).
        target: what both should compute (see `expected`); None if they compute different things.
        forms: causality of the measured forms.
    """

    package: str
    module: str
    name: str
    ours: MethodConfig
    build: Callable[[Any, Inputs], Work]
    target: str | None
    forms: tuple[bool, ...] = (False,)

    @property
    def title(self) -> str:
        """Name and package."""
        return f"{self.name} of {self.package}"


_LINEAR = ("linear-attention-transformer", "linear_attention_transformer")
_PERFORMER = ("performer-pytorch", "performer_pytorch", "FastAttention")
_LANDMARKS, _WINDOW = hea.NystromformerConfig(num_landmarks=64), hea.LongformerConfig(window_size=256)
_CHUNKS = hea.ReformerConfig(block_size=64, num_hashes=2, shared_query_key=True)
_TABLES = hea.LinformerConfig(projection_dim=256, share="none", init="gaussian")
_BUCKETS, _TOKENS = (functools.partial(adapters.linear, bucket_size=size) for size in (64, 1))
BOTH = (False, True)  # bidirectional and causal

PEERS = (
    Peer(*_LINEAR, "linear_attn", hea.LinearConfig(), adapters.linear, None),
    Peer(
        *_LINEAR,
        "causal_linear_attn (bucket_size=64)",
        hea.LinearConfig(),
        functools.partial(adapters.linear, bucket_size=64),
        None,
        (True,),
    ),
    Peer(
        *_LINEAR,
        "causal_linear_attn (bucket_size=1)",
        hea.LinearConfig(),
        functools.partial(adapters.linear, bucket_size=1),
        None,
        (True,),
    ),
    Peer(*_PERFORMER, hea.PerformerConfig(num_features=64), adapters.performer, "exact", BOTH),
    Peer(*_PERFORMER, hea.PerformerConfig(num_features=256), adapters.performer, "exact", BOTH),
    Peer("nystrom-attention", "nystrom_attention", "NystromAttention", _LANDMARKS, adapters.nystrom_attention, "exact"),
    Peer("transformers", "transformers", "NystromformerSelfAttention", _LANDMARKS, adapters.nystromformer, "exact"),
    Peer("linformer", "linformer", "LinformerSelfAttention", _TABLES, adapters.linformer, "projected"),
    Peer("transformers", "transformers", "LongformerSelfAttention", _WINDOW, adapters.longformer, "window"),
    Peer("local-attention", "local_attention", "LocalAttention", _WINDOW, adapters.local_attention, "window", BOTH),
    Peer("torch", "torch", "flex_attention (compiled)", _WINDOW, adapters.flex_attention, "window", BOTH),
    Peer("reformer-pytorch", "reformer_pytorch", "LSHAttention", _CHUNKS, adapters.lsh_attention, "shared"),
    Peer("transformers", "transformers", "LSHSelfAttention", _CHUNKS, adapters.lsh_self_attention, "shared"),
)


def learned_of(config: MethodConfig, query: Tensor) -> dict[str, Tensor]:
    """The initial learned parameters of a method, for inputs like `query` (B, H, N, D)."""
    make, (_, num_heads, q_len, dim) = get_method(config.method).initial_parameters, query.shape
    return {} if make is None else make(config, num_heads=num_heads, head_dim=dim, value_dim=dim, max_length=q_len)


def expected(peer: Peer, inputs: Inputs, positions: Tensor) -> Tensor:
    """What the peer and our method should both compute for the queries at `positions` (R,): (B, H, R, D), float64.

    `peer.target` is "exact"; "window" for attention within `window_size` on each side; "projected" for keys and values
    projected with the tables; or "shared" for the queries as keys of length 1, without the own token.
    """
    query, key, value = (x.double() for x in inputs[:3])
    position_k, position_q = torch.arange(key.shape[2]), positions[:, None]
    valid = torch.ones(len(positions), len(position_k), dtype=torch.bool)
    if peer.target == "window":
        valid = (position_k - position_q).abs() <= peer.ours.window_size
    elif peer.target == "shared":
        key, valid = normalize(query, dim=-1), position_k != position_q
    elif peer.target == "projected":
        key, value = (inputs.learned[f"{n}_projection"].double() @ x for n, x in (("key", key), ("value", value)))
        valid = torch.ones(len(positions), key.shape[2], dtype=torch.bool)
    if inputs.causal:
        valid = valid & (position_k <= position_q)
    scores = query[:, :, positions] @ key.mT * query.shape[3] ** -0.5
    return scores.masked_fill(~valid, -torch.inf).softmax(-1) @ value


def relative_error(peer: Peer, inputs: Inputs, out: Tensor) -> float | None:
    """|A - E| / |E| at up to `CHECKED` queries; None if the peer has no target."""
    if peer.target is None:
        return None
    positions = torch.arange(0, out.shape[2], max(1, out.shape[2] // CHECKED))
    target = expected(peer, inputs, positions)
    return ((out[:, :, positions] - target).norm() / target.norm()).item()


def missing(peer: Peer) -> str | None:
    """Says that a peer is not installed; None if it is."""
    return None if importlib.util.find_spec(peer.module) else f"not installed: pip install {peer.package}"


def prepare(peer: Peer, inputs: Inputs) -> tuple[Work | None, Tensor | None, str]:
    """The call to time and its output, or the reason why there is none."""
    why = missing(peer)
    if why is None:
        try:
            call = peer.build(peer.ours, inputs)
            return call, call(), ""
        except (ImportError, RuntimeError) as error:  # another version, no compiler, too little memory
            why = f"failed: {' '.join(str(error).split())[:100]}"
    return None, None, why


@torch.no_grad()
def measure(peers: Sequence[Peer], case: Case, rounds: int) -> tuple[list[dict[str, Any]], bool]:
    """Measure every peer and our method; return one row for every peer, and whether the times are unsteady."""
    tensors = make_inputs(case)
    inputs, calls, outs, rows = {}, {}, {}, []
    for peer in peers:
        name = method_label(peer.ours)
        if name not in inputs:
            inputs[name] = Inputs(*tensors, case.causal, learned_of(peer.ours, tensors[0]))
            calls[name] = _ours(peer.ours, inputs[name])
            outs[name] = calls[name]()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(case.seed)
            call, out, why = prepare(peer, inputs[name])
        row = {"method": name, "length": case.length, "causal": case.causal, "peer": peer.title}
        row |= {"version": importlib.metadata.version(peer.package) if call else None, "status": why}
        errors = [None if out is None else relative_error(peer, inputs[name], x) for x in (out, outs[name])]
        rows.append(row | dict(zip(("peer_error", "our_error"), errors, strict=True)))
        if call is not None:
            calls[(name, peer.title)] = call
    outs.clear()
    timed = paired(lambda: run_once(None, tensors, case), calls, rounds)[1]
    for row in rows:
        ours, theirs = timed[row["method"]], timed.get((row["method"], row["peer"]))
        row |= {"peer_ratio": theirs and theirs.ratio, "our_ratio": ours.ratio}
        row |= {"ours_over_peer": theirs and ours.ratio / theirs.ratio}
        row |= {"peer_seconds": theirs and theirs.seconds, "our_seconds": ours.seconds}
    return rows, any(timing.unsteady for timing in timed.values())


def _ours(config: MethodConfig, inputs: Inputs) -> Work:
    return lambda: hea.attention(config, *inputs[:3], is_causal=inputs.causal, **inputs.learned)


def draw(rows: Sequence[commands.Row]) -> "Figure":
    """Plot how many times faster than exact attention each peer and our method are, one panel for each setting."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["peer_ratio"]]
    settings = list(dict.fromkeys((row["length"], row["causal"]) for row in rows))
    figure = Figure(figsize=(9, 0.5 * len(rows) + 1.2 * len(settings) + 0.5), layout="constrained")
    counts = [sum((row["length"], row["causal"]) == setting for row in rows) for setting in settings]
    panels = figure.subplots(max(len(settings), 1), 1, squeeze=False, height_ratios=counts or None)[:, 0]
    for (length, causal), axes in zip(settings, panels, strict=False):
        selected = [row for row in rows if (row["length"], row["causal"]) == (length, causal)]
        names = [f"{row['method']}\n{row['peer']}" for row in selected]
        pairs = {"peer": [row["peer_ratio"] for row in selected], "ours": [row["our_ratio"] for row in selected]}
        commands.bars(axes, names, pairs, f"{length} tokens{', causal' if causal else ''}")
        axes.set(xscale="log", xlabel="times faster than exact")
    return figure


def choose(names: Sequence[str]) -> list[Peer]:
    """The peers with one of these packages, methods or names; all without names."""
    known = [{peer.package, peer.ours.method, peer.name.split()[0]} for peer in PEERS]
    for name in names:
        if not any(name in one for one in known):
            every = ", ".join(sorted(set().union(*known)))
            raise UnsupportedAttentionError(f"--peer {name!r} is not one of {every}")
    return [peer for peer, one in zip(PEERS, known, strict=True) if not names or one & set(names)]


def _settings(lengths: Sequence[int], causal: bool | None) -> list[tuple[int, bool]]:
    """The settings (length, causal): by default every length, and the shortest in the causal form too."""
    if causal is not None:
        return [(length, causal) for length in lengths]
    return [*((length, False) for length in lengths), (min(lengths), True)]


@app.command(epilog="Example: python -m recipes.benchmarks.peers --length 4096 --peer longformer,torch --rounds 3")
def peers(
    length: commands.numbers_option("Tokens", "8192,16384") = [],  # noqa: B006 (typer copies it)
    peer: commands.option(
        list[str], "A package, a module or a method of ours, repeated or separated by commas. [default: all]"
    ) = [],  # noqa: B006
    causal: commands.option(
        bool | None, "[default: both; causal at the shortest length]", "--causal/--bidirectional"
    ) = None,
    heads: commands.NumHeads = 8,
    width: commands.HeadDim = 64,
    threads: commands.Threads = 2,
    rounds: commands.Rounds = 5,
    seed: commands.Seed = 0,
    check: commands.Check = False,
    csv: commands.Csv = None,
    plot: commands.Plot = None,
) -> None:
    """Measure times and errors of other implementations and ours, relative to torch's exact attention."""
    commands.check_outputs(csv, plot)
    lengths, chosen = parse_lengths(length) or list(LENGTHS), choose(split_list(peer))
    for tokens in lengths:
        if tokens % MULTIPLE:
            raise UnsupportedAttentionError(f"--length {tokens}: some peers need multiples of {MULTIPLE}")
    sizes = Case(0, num_heads=heads, head_dim=width, threads=threads, seed=seed)
    settings = [(setting, [p for p in chosen if setting[1] in p.forms]) for setting in _settings(lengths, causal)]
    settings = [(setting, usable) for setting, usable in settings if usable]
    if not settings:
        raise UnsupportedAttentionError("none of the chosen peers has a causal form")
    rows: list[dict[str, Any]] = []
    unsteady = False
    with use_threads(threads), tqdm(total=len(settings), disable=None, leave=False) as bar:
        for (tokens, is_causal), usable in settings:
            bar.set_description(f"{tokens}{' causal' if is_causal else ''}")
            found, unsteady_now = measure(usable, sizes._replace(length=tokens, causal=is_causal), rounds)
            rows, unsteady = rows + found, unsteady or unsteady_now
            bar.update()
    commands.write(rows, csv, plot, draw)
    columns = {
        "tokens": "{length}", "form": "{form}", "method": "{method}", "peer": "{title}",
        "peer faster": "{peer_ratio:.1f}x", "ours faster": "{our_ratio:.1f}x", "ours / peer": "{ours_over_peer:.2f}",
        "peer error": "{peer_error:.3g}", "our error": "{our_error:.3g}",
    }  # fmt: skip
    for row in rows:
        row["form"] = " causal" if row["causal"] else ""
        row["title"] = f"{row['peer']}: {row['status']}" if row["status"] else f"{row['peer']} {row['version']}"
    commands.show(rows, columns)
    typer.echo(f"\nTimes faster than exact attention; {sizes}; medians of {rounds} rounds; torch {torch.__version__}")
    if unsteady:
        typer.echo(UNSTEADY)
    if check:
        # Our method must not be slower than any measured peer.
        own = [row for row in rows if row["ours_over_peer"] is not None]
        what = "{method}, {length}{form}: ours / {peer}"
        commands.conclude(commands.compared(own, what, "ours_over_peer", lambda row: 1.0))


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.peers")
