"""Compare other implementations with ours in one run, with the same parameters and inputs.

    python -m recipes.benchmarks.peers
    python -m recipes.benchmarks.peers --length 8192 --bidirectional

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

Duration: mostly that of exact attention at the longest length. Expected: no method of ours is slower than a peer.
docs/results.md has the table.
"""

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
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
COLUMNS = {
    "tokens": "{length}", "form": "{form}", "method": "{method}", "peer": "{title}", "peer faster": "{peer_ratio:.1f}x",
    "ours faster": "{our_ratio:.1f}x", "ours / peer": "{ours_over_peer:.2f}",
}  # fmt: skip


class Peer(NamedTuple):
    """Another implementation, and the method of ours that it is compared with."""

    package: str  # name of the package for pip. The module has underscores in place of the hyphens
    name: str  # name of the class or function
    ours: MethodConfig  # our method with the peer's parameters
    # Takes `ours` and the inputs, and returns the call to time, whose result is (B, H, N, D).
    build: Callable[[Any, Inputs], Work]
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
    Peer(_LINEAR, "linear_attn", _FEATURES, adapters.linear),
    Peer(_LINEAR, "causal_linear_attn (bucket_size=64)", _FEATURES, _IN_64, (True,)),
    Peer(_LINEAR, "causal_linear_attn (bucket_size=1)", _FEATURES, _IN_1, (True,)),
    Peer(*_PERFORMER, hea.PerformerConfig(num_features=64), adapters.performer, BOTH),
    Peer(*_PERFORMER, hea.PerformerConfig(num_features=256), adapters.performer, BOTH),
    Peer("nystrom-attention", "NystromAttention", _LANDMARKS, adapters.nystrom_attention),
    Peer("transformers", "NystromformerSelfAttention", _LANDMARKS, adapters.nystromformer),
    Peer("linformer", "LinformerSelfAttention", _TABLES, adapters.linformer),
    Peer("transformers", "LongformerSelfAttention", _WINDOW, adapters.longformer),
    Peer("local-attention", "LocalAttention", _WINDOW, adapters.local_attention, BOTH),
    Peer("torch", "flex_attention (compiled)", _WINDOW, adapters.flex_attention, BOTH),
    Peer("reformer-pytorch", "LSHAttention", _CHUNKS, adapters.lsh_attention),
    Peer("transformers", "LSHSelfAttention", _CHUNKS, adapters.lsh_self_attention),
)


def learned_of(config: MethodConfig, query: Tensor) -> dict[str, Tensor]:
    """The initial learned parameters of a method, for inputs like `query` (B, H, N, D)."""
    make, (_, num_heads, q_len, dim) = get_method(config.method).initial_parameters, query.shape
    return {} if make is None else make(config, num_heads=num_heads, head_dim=dim, value_dim=dim, max_length=q_len)


def prepare(peer: Peer, inputs: Inputs) -> tuple[Work | None, str]:
    """The call to time, or None and the reason why there is none."""
    if importlib.util.find_spec(peer.package.replace("-", "_")) is None:
        return None, f"not installed: pip install {peer.package}"
    try:
        call = peer.build(peer.ours, inputs)
        call()
        return call, ""
    except (ImportError, RuntimeError) as error:  # another version, no compiler, too little memory
        return None, f"failed: {' '.join(str(error).split())[:100]}"


def ours(config: MethodConfig, inputs: Inputs) -> Work:
    """The call of our method."""
    return lambda: hea.attention(config, *inputs[:3], is_causal=inputs.causal, **inputs.learned)


@torch.no_grad()
def measure(peers: Sequence[Peer], case: Case, rounds: int) -> list[dict[str, Any]]:
    """Measure every peer and our method; return one row for every peer."""
    tensors = make_inputs(case)
    calls, rows = {}, []
    for peer in peers:
        name = method_label(peer.ours)
        inputs = Inputs(*tensors, case.causal, learned_of(peer.ours, tensors[0]))
        calls[name] = ours(peer.ours, inputs)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(case.seed)
            call, why = prepare(peer, inputs)
        row = {"method": name, "length": case.length, "causal": case.causal, "peer": peer.title, "status": why}
        rows.append(row | {"version": importlib.metadata.version(peer.package) if call else None})
        if call is not None:
            calls[(name, peer.title)] = call
    timed = paired(lambda: run_once(None, tensors, case), calls, rounds)[1]
    for row in rows:
        own, theirs = timed[row["method"]], timed.get((row["method"], row["peer"]))
        row |= {"peer_ratio": theirs and theirs.ratio, "our_ratio": own.ratio}
        row |= {"ours_over_peer": theirs and own.ratio / theirs.ratio}
        row |= {"peer_seconds": theirs and theirs.seconds, "our_seconds": own.seconds}
        row |= {"unsteady": own.unsteady or bool(theirs and theirs.unsteady)}
    return rows


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
    csv: Csv = None,
) -> None:
    """Measure times of other implementations and ours, relative to torch's exact attention."""
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
    report(rows, COLUMNS, note, csv=csv)


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.peers")
