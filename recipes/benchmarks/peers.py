"""Compare other implementations with ours in one run, with the same parameters and inputs.

    python -m recipes.benchmarks.peers
    python -m recipes.benchmarks.peers --check --length 8192 --bidirectional

The default lengths are 8,192 and 16,384 tokens, with the causal form at 8,192 for peers that have one. Peers are
packages from PyPI (extra `peers`; a missing one is listed with the command that installs it), modules of Transformers,
and torch's own flex_attention, compiled.

Speed is a ratio, as in `recipes.benchmarks.attention`; forward, batch size 1, 8 heads of 64, float32. Only attention is
timed, from queries, keys and values to the output of the heads. Where a module projects its hidden states itself, its
projections are replaced by modules that return precomputed tensors in the layout of the projections. Longformer's
module divides the queries in place, so that it gets a copy in every call, within 2 % of its time.

Both sides have the same landmarks, features, projections, window, rounds and chunks. The differences: in
causal_linear_attn with bucket_size=64 a query does not attend to its own bucket of 64 tokens. linear_attn has softmax
features instead of elu(x) + 1. LSHAttention counts a pair once for every round that contains it.

The error is |A - E| / |E| in the Frobenius norm, on up to 256 evenly spaced queries, where E is what both should
compute in float64 (`expected`). The linear methods approximate nothing and have no error. Exact attention to random
keys is almost uniform: the mean of the values has an error of about .8, which landmarks approach, and FastAttention
too, since it adds 1e-4 to features of at most 1. `recipes.benchmarks.error` shows the errors on real activations.

Duration: mostly that of exact attention at the longest length. Expected: no method of ours is slower than a peer;
otherwise `--check` exits with status 1. docs/results.md has the table.
"""

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize
from tqdm import tqdm

import hf_efficient_attn as hea
from hf_efficient_attn.cli import main_of, parse_lengths, split_list
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.defaults import method_label
from hf_efficient_attn.evaluation.timing import Work, paired, use_threads
from hf_efficient_attn.methods import MethodConfig, get_method
from recipes.benchmarks import peer_adapters as adapters
from recipes.benchmarks.harness import Csv, report, rounds_note
from recipes.benchmarks.peer_adapters import Inputs
from recipes.common import commands
from recipes.common.memory import Case, make_inputs, run_once

app = commands.new_app()

LENGTHS = (8192, 16384)
# Some peers need lengths that are a multiple of their windows or chunks.
MULTIPLE = 512
CHECKED = 256  # number of queries whose error is measured
COLUMNS = {
    "tokens": "{length}", "form": "{form}", "method": "{method}", "peer": "{title}", "peer faster": "{peer_ratio:.1f}x",
    "ours faster": "{our_ratio:.1f}x", "ours / peer": "{ours_over_peer:.2f}", "peer error": "{peer_error:.3g}",
    "our error": "{our_error:.3g}",
}  # fmt: skip


class Peer(NamedTuple):
    """Another implementation, and the method of ours that it is compared with."""

    package: str  # name of the package for pip. The module has underscores in place of the hyphens
    name: str  # name of the class or function
    ours: MethodConfig  # our method with the peer's parameters
    # Takes `ours` and the inputs, and returns the call to time, whose result is (B, H, N, D).
    build: Callable[[Any, Inputs], Work]
    target: str | None  # what both should compute (see `expected`); None if they compute different things
    forms: tuple[bool, ...] = (False,)  # causality of the measured forms

    @property
    def title(self) -> str:
        """Name and package."""
        return f"{self.name} of {self.package}"


_LINEAR, _PERFORMER = "linear-attention-transformer", ("performer-pytorch", "FastAttention")
_FEATURES, _LANDMARKS = hea.LinearConfig(), hea.NystromformerConfig(num_landmarks=64)
_CHUNKS = hea.ReformerConfig(block_size=64, num_hashes=2, shared_query_key=True)
_WINDOW = hea.LongformerConfig(window_size=256)
_TABLES = hea.LinformerConfig(projection_dim=256, share="none", init="gaussian")
_IN_64, _IN_1 = (functools.partial(adapters.linear, bucket_size=size) for size in (64, 1))
BOTH = (False, True)  # bidirectional and causal
PEERS = (
    Peer(_LINEAR, "linear_attn", _FEATURES, adapters.linear, None),
    Peer(_LINEAR, "causal_linear_attn (bucket_size=64)", _FEATURES, _IN_64, None, (True,)),
    Peer(_LINEAR, "causal_linear_attn (bucket_size=1)", _FEATURES, _IN_1, None, (True,)),
    Peer(*_PERFORMER, hea.PerformerConfig(num_features=64), adapters.performer, "exact", BOTH),
    Peer(*_PERFORMER, hea.PerformerConfig(num_features=256), adapters.performer, "exact", BOTH),
    Peer("nystrom-attention", "NystromAttention", _LANDMARKS, adapters.nystrom_attention, "exact"),
    Peer("transformers", "NystromformerSelfAttention", _LANDMARKS, adapters.nystromformer, "exact"),
    Peer("linformer", "LinformerSelfAttention", _TABLES, adapters.linformer, "projected"),
    Peer("transformers", "LongformerSelfAttention", _WINDOW, adapters.longformer, "window"),
    Peer("local-attention", "LocalAttention", _WINDOW, adapters.local_attention, "window", BOTH),
    Peer("torch", "flex_attention (compiled)", _WINDOW, adapters.flex_attention, "window", BOTH),
    Peer("reformer-pytorch", "LSHAttention", _CHUNKS, adapters.lsh_attention, "shared"),
    Peer("transformers", "LSHSelfAttention", _CHUNKS, adapters.lsh_self_attention, "shared"),
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


def relative_error(peer: Peer, inputs: Inputs, out: Tensor | None) -> float | None:
    """|A - E| / |E| at up to `CHECKED` queries; None if there is no output or the peer has no target."""
    if out is None or peer.target is None:
        return None
    positions = torch.arange(0, out.shape[2], max(1, out.shape[2] // CHECKED))
    target = expected(peer, inputs, positions)
    return ((out[:, :, positions] - target).norm() / target.norm()).item()


def prepare(peer: Peer, inputs: Inputs) -> tuple[Work | None, Tensor | None, str]:
    """The call to time and its output, or the reason why there is none."""
    if importlib.util.find_spec(peer.package.replace("-", "_")) is None:
        return None, None, f"not installed: pip install {peer.package}"
    try:
        call = peer.build(peer.ours, inputs)
        return call, call(), ""
    except (ImportError, RuntimeError) as error:  # another version, no compiler, too little memory
        return None, None, f"failed: {' '.join(str(error).split())[:100]}"


def ours(config: MethodConfig, inputs: Inputs) -> Work:
    """The call of our method."""
    return lambda: hea.attention(config, *inputs[:3], is_causal=inputs.causal, **inputs.learned)


@torch.no_grad()
def measure(peers: Sequence[Peer], case: Case, rounds: int) -> list[dict[str, Any]]:
    """Measure every peer and our method; return one row for every peer."""
    tensors = make_inputs(case)
    inputs, calls, outs, rows = {}, {}, {}, []
    for peer in peers:
        name = method_label(peer.ours)
        if name not in inputs:
            inputs[name] = Inputs(*tensors, case.causal, learned_of(peer.ours, tensors[0]))
            calls[name] = ours(peer.ours, inputs[name])
            outs[name] = calls[name]()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(case.seed)
            call, out, why = prepare(peer, inputs[name])
        row = {"method": name, "length": case.length, "causal": case.causal, "peer": peer.title}
        row |= {"version": importlib.metadata.version(peer.package) if call else None, "status": why}
        row |= {"peer_error": relative_error(peer, inputs[name], out)}
        rows.append(row | {"our_error": relative_error(peer, inputs[name], outs[name])})
        if call is not None:
            calls[(name, peer.title)] = call
    outs.clear()
    timed = paired(lambda: run_once(None, tensors, case), calls, rounds)[1]
    for row in rows:
        own, theirs = timed[row["method"]], timed.get((row["method"], row["peer"]))
        row |= {"peer_ratio": theirs and theirs.ratio, "our_ratio": own.ratio}
        row |= {"ours_over_peer": theirs and own.ratio / theirs.ratio}
        row |= {"peer_seconds": theirs and theirs.seconds, "our_seconds": own.seconds}
        row |= {"unsteady": own.unsteady or bool(theirs and theirs.unsteady)}
    return rows


def verdicts(rows: Sequence[commands.Row]) -> list[commands.Verdict]:
    """Our method must not be slower than any measured peer."""
    measured = [row for row in rows if row["ours_over_peer"] is not None]
    return commands.compared(measured, "{method}, {length}{form}: ours / {peer}", "ours_over_peer", lambda row: 1.0)


def choose(names: Sequence[str]) -> list[Peer]:
    """The peers with one of these packages, methods or names; all without names."""
    known = [{peer.package, peer.ours.method, peer.name.split()[0]} for peer in PEERS]
    commands.check_known("--peer", names, sorted(set().union(*known)))
    return [peer for peer, one in zip(PEERS, known, strict=True) if not names or one & set(names)]


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
    check: commands.Check = False,
    csv: Csv = None,
) -> None:
    """Measure times and errors of other implementations and ours, relative to torch's exact attention."""
    lengths, chosen = parse_lengths(length) or list(LENGTHS), choose(split_list(peer))
    for tokens in lengths:
        if tokens % MULTIPLE:
            raise UnsupportedAttentionError(f"--length {tokens}: some peers need multiples of {MULTIPLE}")
    forms = [(n, bool(causal)) for n in lengths] + ([(min(lengths), True)] if causal is None else [])
    sizes = Case(0, num_heads=heads, head_dim=width, threads=threads)
    settings = [(n, c, [p for p in chosen if c in p.forms]) for n, c in forms]
    if not any(usable for *_, usable in settings):
        raise UnsupportedAttentionError("none of the chosen peers has a causal form")
    rows: list[dict[str, Any]] = []
    with use_threads(threads):
        for tokens, is_causal, usable in tqdm(settings, disable=None, leave=False):
            rows += measure(usable, sizes._replace(length=tokens, causal=is_causal), rounds) if usable else []
    for row in rows:
        row["form"] = " causal" if row["causal"] else ""
        row["title"] = f"{row['peer']}: {row['status']}" if row["status"] else f"{row['peer']} {row['version']}"
    note = f"Times faster than exact attention; {rounds_note(sizes, rounds)}"
    report(rows, COLUMNS, note, csv=csv, verdicts=verdicts if check else None)


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.peers")
