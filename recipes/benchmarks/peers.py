"""Implementations by others beside ours, in one run, at the same parameters and on the same inputs.

    python -m recipes.benchmarks.peers --plot peers.png
    python -m recipes.benchmarks.peers --check --length 8192 --bidirectional

Most of the time is that of exact attention at the longest length. The default is 8,192 and 16,384 tokens, and the
causal form at 8,192 of the peers that have one. Peers are packages of PyPI (extra `peers`; one that is not there is
listed with the command that installs it), modules of Transformers, and torch's own flex_attention, compiled. kdeformer,
hyperattention, scatterbrain, eva, the FLuRKAs and approx_kmv have no package that was found.

Speed is a ratio, as in `recipes.benchmarks.attention`: of exact attention of the same causality before and after each
call to that call, forward, batch 1, 8 heads of 64, float32. Only the attention is timed, from queries, keys and values
to the output of the heads: where a module projects its hidden states itself, its projections are replaced by modules
that hand over tensors made beforehand, in the layout that the projections would give them. Longformer's divides the
queries in place, so that it gets a copy at every call, within 2 % of its time.

Both sides take the same landmarks, features, projections, window, rounds and chunks. What differs:

- causal_linear_attn with bucket_size=64 lets no query see its own 64 tokens; with bucket_size=1 it computes what it
  should. linear_attn has softmax features in place of elu(x) + 1.
- LSHAttention counts a pair as often as rounds hold it, which is its default and the faster choice.

Error is |A - E| / |E| in the Frobenius norm, on up to 256 queries spread over all, where E is what both should compute:
exact attention, that of the window alone, that of queries to themselves as keys of length 1 without the own token
(reformer), or softmax over the projections (linformer), in float64. The linear ones approximate nothing, and have none.
Exact attention to random keys is all but flat: the mean of the values has an error of about .8, where the landmarks
end, and FastAttention too, since it adds 1e-4 to features of at most 1; without that, as ours and as in the paper, the
variance of the features shows. What methods are worth on real activations is told by `recipes.benchmarks.error`.
`--check` exits with status 1 where ours is slower than a peer.
"""

import contextlib
import importlib.metadata
import importlib.util
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor, nn
from torch.nn.functional import normalize
from tqdm import tqdm

import hf_efficient_attn as hea
from hf_efficient_attn.cli import label, main_of, parse_lengths, split_list, table
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.timing import UNSTEADY, Work, paired, use_threads
from hf_efficient_attn.methods import MethodConfig, get_method
from recipes.common.commands import (
    Check,
    Csv,
    Plot,
    Rounds,
    Seed,
    Threads,
    Verdict,
    bars,
    check_outputs,
    conclude,
    write,
)
from recipes.common.memory import make_inputs, run_once

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

LENGTHS = (8192, 16384)
# Some peers take whole windows, chunks and segments only.
MULTIPLE = 512
CHECKED = 256


class Inputs(NamedTuple):
    """Query, key and value (B, H, N, D), causality, and what both sides have learned (tables of projections)."""

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    learned: Mapping[str, Tensor]


class Peer(NamedTuple):
    """An implementation by others, and ours beside it.

    package, module: as pip and as Python know it.
    name: of the class or function.
    ours: our method at the peer's parameters.
    build: (ours, inputs) -> the call to time, which returns (B, H, N, D).
    target: what both should compute (see `expected`); None where that is not one thing.
    forms: bidirectional, causal.
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
        return f"{self.name} of {self.package}"


class _Given(nn.Module):
    """In place of a projection: hands over what it would have made, as a copy if that is written to."""

    def __init__(self, made: Tensor, copied: bool = False) -> None:
        super().__init__()
        self.made, self.space = made, torch.empty_like(made) if copied else None

    def forward(self, hidden: Tensor) -> Tensor:
        return self.made if self.space is None else self.space.copy_(self.made)


def _merged(x: Tensor) -> Tensor:
    """(B, H, N, D) -> (B, N, H * D), as a projection leaves it."""
    return x.transpose(1, 2).flatten(2)


def _of_heads(x: Tensor, like: Tensor) -> Tensor:
    """A view (B, H, N, D) of (B, N, H * D)."""
    return x.unflatten(2, (like.shape[1], -1)).transpose(1, 2)


def _linear(ours: MethodConfig, inputs: Inputs, bucket_size: int | None = None) -> Work:
    from linear_attention_transformer.linear_attention_transformer import causal_linear_attn, linear_attn

    row = inputs[:3]
    return (lambda: causal_linear_attn(*row, bucket_size=bucket_size)) if inputs.causal else (lambda: linear_attn(*row))


def _linear_chunks(ours: MethodConfig, inputs: Inputs) -> Work:
    return _linear(ours, inputs, 64)


def _linear_tokens(ours: MethodConfig, inputs: Inputs) -> Work:
    return _linear(ours, inputs, 1)


def _performer(ours: hea.PerformerConfig, inputs: Inputs) -> Work:
    from performer_pytorch.performer_pytorch import FastAttention

    with contextlib.redirect_stdout(io.StringIO()):  # it says that it has no CUDA
        layer = FastAttention(inputs.query.shape[3], nb_features=ours.num_features, causal=inputs.causal)
    return lambda: layer(*inputs[:3])


def _nystrom_attention(ours: hea.NystromformerConfig, inputs: Inputs) -> Work:
    from nystrom_attention.nystrom_attention import NystromAttention

    heads, width = inputs.query.shape[1], inputs.query.shape[3]
    layer = NystromAttention(
        heads * width,
        dim_head=width,
        heads=heads,
        num_landmarks=ours.num_landmarks,
        pinv_iterations=ours.pinv_iterations,
        residual=False,
    ).eval()
    layer.to_qkv, layer.to_out = nn.Identity(), nn.Identity()
    rows = torch.cat([_merged(x) for x in inputs[:3]], 2)
    return lambda: _of_heads(layer(rows), inputs.query)


def _nystromformer(ours: hea.NystromformerConfig, inputs: Inputs) -> Work:
    from transformers import NystromformerConfig
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    _, heads, length, width = inputs.query.shape
    config = NystromformerConfig(
        hidden_size=heads * width,
        num_attention_heads=heads,
        num_landmarks=ours.num_landmarks,
        segment_means_seq_len=length,
    )
    layer = NystromformerSelfAttention(config).eval()
    layer.conv_kernel_size = None
    rows = [_merged(x) for x in inputs[:3]]
    layer.query, layer.key, layer.value = map(_Given, rows)
    return lambda: _of_heads(layer(rows[0])[0], inputs.query)


def _linformer(ours: hea.LinformerConfig, inputs: Inputs) -> Work:
    from linformer.linformer import LinformerSelfAttention

    _, heads, length, width = inputs.query.shape
    layer = LinformerSelfAttention(heads * width, length, k=ours.projection_dim, heads=heads).eval()
    for name in ("key", "value"):
        table = inputs.learned[f"{name}_projection"].t().contiguous()
        setattr(layer, f"proj_{name[0]}", nn.Parameter(table, requires_grad=False))
    rows = [_merged(x) for x in inputs[:3]]
    layer.to_q, layer.to_k, layer.to_v = map(_Given, rows)
    layer.to_out = nn.Identity()
    return lambda: _of_heads(layer(rows[0]), inputs.query)


def _longformer(ours: hea.LongformerConfig, inputs: Inputs) -> Work:
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    batch, heads, length, width = inputs.query.shape
    config = LongformerConfig(
        hidden_size=heads * width, num_attention_heads=heads, attention_window=[2 * ours.window_size]
    )
    layer = LongformerSelfAttention(config, 0).eval()
    # Its projections see the tokens first.
    rows = [_merged(x) for x in inputs[:3]]
    tokens_first = [x.transpose(0, 1) for x in rows]
    layer.query = _Given(tokens_first[0], copied=True)
    layer.key, layer.value = map(_Given, tokens_first[1:])
    nowhere = torch.zeros(batch, length, dtype=torch.bool)
    options = {"attention_mask": nowhere.float(), "is_index_masked": nowhere, "is_index_global_attn": nowhere}
    return lambda: _of_heads(layer(rows[0], **options, is_global_attn=False)[0], inputs.query)


def _local_attention(ours: hea.LongformerConfig, inputs: Inputs) -> Work:
    from local_attention import LocalAttention

    layer = LocalAttention(
        ours.window_size, causal=inputs.causal, look_backward=1, exact_windowsize=True, use_rotary_pos_emb=False
    ).eval()
    return lambda: layer(*inputs[:3])


def _flex_attention(ours: hea.LongformerConfig, inputs: Inputs) -> Work:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    size, length = ours.window_size, inputs.query.shape[2]

    def seen(batch, head, query, key):
        near = (query - key).abs() <= size
        return near & (key <= query) if inputs.causal else near

    mask = create_block_mask(seen, None, None, length, length, device="cpu")
    compiled = torch.compile(flex_attention)
    return lambda: compiled(*inputs[:3], block_mask=mask)


def _lsh_attention(ours: hea.ReformerConfig, inputs: Inputs) -> Work:
    from reformer_pytorch.reformer_pytorch import LSHAttention

    layer = LSHAttention(bucket_size=ours.block_size, n_hashes=ours.num_hashes).eval()
    query, value = inputs.query.flatten(0, 1), inputs.value.flatten(0, 1)
    return lambda: layer(query, value)[0].unflatten(0, inputs.query.shape[:2])


def _lsh_self_attention(ours: hea.ReformerConfig, inputs: Inputs) -> Work:
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    _, heads, length, width = inputs.query.shape
    power = (2 * length // ours.block_size).bit_length() - 1
    config = ReformerConfig(
        hidden_size=heads * width,
        num_attention_heads=heads,
        attention_head_size=width,
        lsh_attn_chunk_length=ours.block_size,
        num_hashes=ours.num_hashes,
        # Two factors, as it sets them itself from some length on: fewer products.
        num_buckets=[2 ** (power // 2), 2 ** (power - power // 2)],
        lsh_attention_probs_dropout_prob=0.0,
    )
    layer = LSHSelfAttention(config).eval()
    # Its products have no scale of their own: keys of length 1, queries as they are.
    rows = [_merged(x) for x in (inputs.query * width**-0.5, inputs.value)]
    layer.query_key, layer.value = map(_Given, rows)
    return lambda: _of_heads(layer(rows[0]).hidden_states, inputs.query)


_LINEAR = ("linear-attention-transformer", "linear_attention_transformer")
_PERFORMER = ("performer-pytorch", "performer_pytorch", "FastAttention")
_LANDMARKS, _WINDOW = hea.NystromformerConfig(num_landmarks=64), hea.LongformerConfig(window_size=256)
_CHUNKS = hea.ReformerConfig(block_size=64, num_hashes=2, shared_query_key=True)
_TABLES = hea.LinformerConfig(projection_dim=256, share="none", init="gaussian")
BOTH = (False, True)

PEERS = (
    Peer(*_LINEAR, "linear_attn", hea.LinearConfig(), _linear, None),
    Peer(*_LINEAR, "causal_linear_attn (bucket_size=64)", hea.LinearConfig(), _linear_chunks, None, (True,)),
    Peer(*_LINEAR, "causal_linear_attn (bucket_size=1)", hea.LinearConfig(), _linear_tokens, None, (True,)),
    Peer(*_PERFORMER, hea.PerformerConfig(num_features=64), _performer, "exact", BOTH),
    Peer(*_PERFORMER, hea.PerformerConfig(num_features=256), _performer, "exact", BOTH),
    Peer("nystrom-attention", "nystrom_attention", "NystromAttention", _LANDMARKS, _nystrom_attention, "exact"),
    Peer("transformers", "transformers", "NystromformerSelfAttention", _LANDMARKS, _nystromformer, "exact"),
    Peer("linformer", "linformer", "LinformerSelfAttention", _TABLES, _linformer, "projected"),
    Peer("transformers", "transformers", "LongformerSelfAttention", _WINDOW, _longformer, "window"),
    Peer("local-attention", "local_attention", "LocalAttention", _WINDOW, _local_attention, "window", BOTH),
    Peer("torch", "torch", "flex_attention (compiled)", _WINDOW, _flex_attention, "window", BOTH),
    Peer("reformer-pytorch", "reformer_pytorch", "LSHAttention", _CHUNKS, _lsh_attention, "shared"),
    Peer("transformers", "transformers", "LSHSelfAttention", _CHUNKS, _lsh_self_attention, "shared"),
)


def learned_of(config: MethodConfig, query: Tensor) -> dict[str, Tensor]:
    """The tables that a method starts from, for inputs like `query` (B, H, N, D)."""
    make, (_, heads, length, width) = get_method(config.method).initial_parameters, query.shape
    return {} if make is None else make(config, num_heads=heads, head_dim=width, value_dim=width, max_length=length)


def expected(peer: Peer, inputs: Inputs, rows: Tensor) -> Tensor:
    """What peer and ours should both compute, at the queries `rows`: (B, H, R, D), float64.

    `peer.target` is "exact"; "window", of `window_size` to each side; "projected", of the tables' keys and values;
    "shared", of the queries as keys of length 1, without the own token.
    """
    query, key, value = (x.double() for x in inputs[:3])
    place, rows = torch.arange(key.shape[2]), rows[:, None]
    seen = torch.ones(len(rows), len(place), dtype=torch.bool)
    if peer.target == "window":
        seen = (place - rows).abs() <= peer.ours.window_size
    elif peer.target == "shared":
        key, seen = normalize(query, dim=-1), place != rows
    elif peer.target == "projected":
        key, value = (inputs.learned[f"{n}_projection"].double() @ x for n, x in (("key", key), ("value", value)))
        seen = torch.ones(len(rows), key.shape[2], dtype=torch.bool)
    if inputs.causal:
        seen = seen & (place <= rows)
    scores = query[:, :, rows[:, 0]] @ key.mT * query.shape[3] ** -0.5
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value


def relative_error(peer: Peer, inputs: Inputs, out: Tensor) -> float | None:
    """|A - E| / |E| at up to `CHECKED` queries; None where there is nothing that both should compute."""
    if peer.target is None:
        return None
    rows = torch.arange(0, out.shape[2], max(1, out.shape[2] // CHECKED))
    goal = expected(peer, inputs, rows)
    return ((out[:, :, rows] - goal).norm() / goal.norm()).item()


def lacking(peer: Peer) -> str | None:
    """Why a peer cannot be used here; None if it can, as far as that can be told without using it."""
    return None if importlib.util.find_spec(peer.module) else f"not installed: pip install {peer.package}"


def prepare(peer: Peer, inputs: Inputs) -> tuple[Work | None, Tensor | None, str]:
    """The call to time and its output, or why there is none."""
    why = lacking(peer)
    if why is None:
        try:
            call = peer.build(peer.ours, inputs)
            return call, call(), ""
        except (ImportError, RuntimeError) as error:  # another version, no compiler, too little memory
            why = f"failed: {' '.join(str(error).split())[:100]}"
    return None, None, why


@torch.no_grad()
def measure(peers: Sequence[Peer], case: Mapping[str, Any], rounds: int, bar=None) -> tuple[list[dict[str, Any]], bool]:
    """A row for every peer, with our method beside it, and whether the times were unsteady."""
    case = {**case, "backward": False}
    row = make_inputs(case)
    inputs, calls, outs, rows = {}, {}, {}, []
    for peer in peers:
        name = label(peer.ours)
        if name not in inputs:
            inputs[name] = Inputs(*row, case["causal"], learned_of(peer.ours, row[0]))
            calls[name] = _ours(peer.ours, inputs[name])
            outs[name] = calls[name]()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(case["seed"])
            call, out, why = prepare(peer, inputs[name])
        here = {"method": name, **{key: case[key] for key in ("length", "causal")}, "peer": peer.title}
        here |= {"version": importlib.metadata.version(peer.package) if call else None, "status": why}
        errors = [None if out is None else relative_error(peer, inputs[name], x) for x in (out, outs[name])]
        rows.append(here | dict(zip(("peer_error", "our_error"), errors, strict=True)))
        if call is not None:
            calls[(name, peer.title)] = call
    outs.clear()
    timed = paired(lambda: run_once(None, row, case), calls, rounds, bar)[1]
    for here in rows:
        ours, theirs = timed[here["method"]], timed.get((here["method"], here["peer"]))
        here |= {"peer_ratio": theirs and theirs.ratio, "our_ratio": ours.ratio}
        here |= {"ours_over_peer": theirs and ours.ratio / theirs.ratio}
        here |= {"peer_seconds": theirs and theirs.seconds, "our_seconds": ours.seconds}
    return rows, any(timing.unsteady for timing in timed.values())


def _ours(config: MethodConfig, inputs: Inputs) -> Work:
    return lambda: hea.attention(config, *inputs[:3], is_causal=inputs.causal, **inputs.learned)


def draw(rows: Sequence[Mapping[str, Any]]):
    """Bars of how many times faster than exact attention each peer and ours are: a panel for every setting."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["peer_ratio"]]
    settings = list(dict.fromkeys((row["length"], row["causal"]) for row in rows))
    figure = Figure(figsize=(9, 0.5 * len(rows) + 1.2 * len(settings) + 0.5), layout="constrained")
    counts = [sum((row["length"], row["causal"]) == setting for row in rows) for setting in settings]
    panels = figure.subplots(max(len(settings), 1), 1, squeeze=False, height_ratios=counts or None)[:, 0]
    for (length, causal), axes in zip(settings, panels, strict=False):
        here = [row for row in rows if (row["length"], row["causal"]) == (length, causal)]
        names = [f"{row['method']}\n{row['peer']}" for row in here]
        pairs = {"peer": [row["peer_ratio"] for row in here], "ours": [row["our_ratio"] for row in here]}
        bars(axes, names, pairs, f"{length} tokens{', causal' if causal else ''}")
        axes.set(xscale="log", xlabel="times faster than exact")
    return figure


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """That ours is no slower than each peer that was measured."""
    return [
        Verdict(
            f"{row['method']}, {row['length']}{', causal' if row['causal'] else ''}: ours / {row['peer']}",
            row["ours_over_peer"],
            1.0,
            True,
        )
        for row in rows
        if row["ours_over_peer"] is not None
    ]


def _format(row: Mapping[str, Any]) -> tuple[str, ...]:
    def cell(key: str, form: str) -> str:
        return "" if row[key] is None else form.format(row[key])

    return (
        row["length"],
        "causal" if row["causal"] else "",
        row["method"],
        f"{row['peer']} {row['version']}" if not row["status"] else f"{row['peer']}: {row['status']}",
        cell("peer_ratio", "{:.1f}x"),
        cell("our_ratio", "{:.1f}x"),
        cell("ours_over_peer", "{:.2f}"),
        cell("peer_error", "{:.3g}"),
        cell("our_error", "{:.3g}"),
    )


def choose(names: Sequence[str]) -> list[Peer]:
    """The peers whose package, method or own name was asked for; all where nothing was."""
    known = [{peer.package, peer.ours.method, peer.name.split()[0]} for peer in PEERS]
    for name in names:
        if not any(name in one for one in known):
            every = ", ".join(sorted(set().union(*known)))
            raise UnsupportedAttentionError(f"--peer {name!r} is not one of {every}")
    return [peer for peer, one in zip(PEERS, known, strict=True) if not names or one & set(names)]


def _settings(lengths: Sequence[int], causal: bool | None) -> list[tuple[int, bool]]:
    """By default every length, and the shortest in the causal form too."""
    if causal is not None:
        return [(length, causal) for length in lengths]
    return [*((length, False) for length in lengths), (min(lengths), True)]


@app.command(epilog="Example: python -m recipes.benchmarks.peers --length 4096 --peer longformer,torch --rounds 3")
def peers(
    length: Annotated[
        list[str],
        typer.Option(metavar="N", show_default=False, help="Tokens, repeated or with commas. [default: 8192,16384]"),
    ] = [],  # noqa: B006 (typer copies it)
    peer: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="A package, a module or a method of ours, repeated or with commas. [default: all]",
        ),
    ] = [],  # noqa: B006
    causal: Annotated[
        bool | None, typer.Option("--causal/--bidirectional", help="[default: both; causal at the shortest length]")
    ] = None,
    heads: Annotated[int, typer.Option(metavar="N", min=1)] = 8,
    width: Annotated[int, typer.Option(metavar="N", min=1, help="Of a head.")] = 64,
    threads: Threads = 2,
    rounds: Rounds = 5,
    seed: Seed = 0,
    check: Check = False,
    csv: Csv = None,
    plot: Plot = None,
) -> None:
    """Times and errors of implementations by others, beside ours, as multiples of torch's exact attention."""
    check_outputs(csv, plot)
    lengths, chosen = parse_lengths(length) or list(LENGTHS), choose(split_list(peer))
    for tokens in lengths:
        if tokens % MULTIPLE:
            raise UnsupportedAttentionError(f"--length {tokens}: some peers take multiples of {MULTIPLE} only")
    sizes = {"batch": 1, "heads": heads, "width": width, "dtype": "float32", "threads": threads, "seed": seed}
    settings = [(setting, [p for p in chosen if setting[1] in p.forms]) for setting in _settings(lengths, causal)]
    settings = [(setting, here) for setting, here in settings if here]
    if not settings:
        raise UnsupportedAttentionError("none of the chosen peers has a causal form")
    rows: list[dict[str, Any]] = []
    unsteady = False
    with use_threads(threads), tqdm(total=len(settings), disable=None, leave=False) as bar:
        for (tokens, is_causal), here in settings:
            bar.set_description(f"{tokens}{' causal' if is_causal else ''}")
            found, shaky = measure(here, {"length": tokens, "causal": is_causal, **sizes}, rounds)
            rows, unsteady = rows + found, unsteady or shaky
            bar.update()
    write(rows, csv, plot, draw)
    headers = (
        "tokens",
        "form",
        "method",
        "peer",
        "peer faster",
        "ours faster",
        "ours / peer",
        "peer error",
        "our error",
    )
    typer.echo(table(headers, [_format(row) for row in rows]))
    typer.echo(
        f"\nTimes faster than exact attention; {', '.join(f'{k} {v}' for k, v in sizes.items() if k != 'seed')}; "
        f"medians of {rounds} rounds; torch {torch.__version__}"
    )
    if unsteady:
        typer.echo(UNSTEADY)
    if check:
        conclude(verdicts(rows))


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.peers")
