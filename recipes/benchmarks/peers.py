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

import contextlib
import functools
import importlib.metadata
import importlib.util
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LongformerConfig, NystromformerConfig, ReformerConfig
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

import hf_efficient_attn as hea
from hf_efficient_attn.cli import main_of, parse_lengths, split_list
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.defaults import method_label
from hf_efficient_attn.evaluation.timing import Work, use_threads
from hf_efficient_attn.methods import MethodConfig, get_method
from recipes.common import commands
from recipes.common.memory import Case, make_inputs, paired, run_once

app = commands.new_app()

LENGTHS = (8192, 16384)
# Some peers need lengths that are a multiple of their windows or chunks.
MULTIPLE = 512
COLUMNS = {
    "tokens": "{length}", "form": "{form}", "method": "{method}", "peer": "{title}", "peer faster": "{peer_ratio:.1f}x",
    "ours faster": "{our_ratio:.1f}x", "ours / peer": "{ours_over_peer:.2f}",
}  # fmt: skip


class Inputs(NamedTuple):
    """Query, key and value (B, H, N, D), causality, and learned parameters of both sides (tables of projections)."""

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    learned: Mapping[str, Tensor]


# Adapters: each takes the config of our method and the inputs, and returns the call to time, with result (B, H, N, D).


class _Precomputed(nn.Module):
    """Replaces a projection and returns its precomputed result, as a copy if the result is modified in place."""

    def __init__(self, result: Tensor, copied: bool = False) -> None:
        super().__init__()
        self.result, self.buffer = result, torch.empty_like(result) if copied else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.result if self.buffer is None else self.buffer.copy_(self.result)


def _merged(x: Tensor) -> Tensor:
    """Merge the heads: (B, H, N, D) -> (B, N, H * D), the layout of a projection."""
    return x.transpose(1, 2).flatten(2)


def _split(x: Tensor, num_heads: int) -> Tensor:
    """Split the heads: a view (B, H, N, D) of (B, N, H * D)."""
    return x.unflatten(2, (num_heads, -1)).transpose(1, 2)


def linear(ours: MethodConfig, inputs: Inputs, bucket_size: int | None = None) -> Work:
    """Linear attention of linear-attention-transformer, whose causal form has buckets of `bucket_size` tokens."""
    from linear_attention_transformer.linear_attention_transformer import causal_linear_attn, linear_attn

    tensors = inputs[:3]
    if inputs.causal:
        return lambda: causal_linear_attn(*tensors, bucket_size=bucket_size)
    return lambda: linear_attn(*tensors)


def performer(ours: hea.PerformerConfig, inputs: Inputs) -> Work:
    """performer-pytorch."""
    from performer_pytorch.performer_pytorch import FastAttention

    with contextlib.redirect_stdout(io.StringIO()):  # it prints that there is no CUDA
        layer = FastAttention(inputs.query.shape[3], nb_features=ours.num_features, causal=inputs.causal)
    return lambda: layer(*inputs[:3])


def nystrom_attention(ours: hea.NystromformerConfig, inputs: Inputs) -> Work:
    """nystrom-attention."""
    from nystrom_attention.nystrom_attention import NystromAttention

    num_heads, head_dim = inputs.query.shape[1], inputs.query.shape[3]
    layer = NystromAttention(
        num_heads * head_dim, dim_head=head_dim, heads=num_heads, num_landmarks=ours.num_landmarks,
        pinv_iterations=ours.pinv_iterations, residual=False,
    ).eval()  # fmt: skip
    layer.to_qkv, layer.to_out = nn.Identity(), nn.Identity()
    projected = torch.cat([_merged(x) for x in inputs[:3]], 2)
    return lambda: _split(layer(projected), num_heads)


def nystromformer(ours: hea.NystromformerConfig, inputs: Inputs) -> Work:
    """NystromformerSelfAttention of Transformers."""
    _, num_heads, q_len, head_dim = inputs.query.shape
    config = NystromformerConfig(
        hidden_size=num_heads * head_dim, num_attention_heads=num_heads, num_landmarks=ours.num_landmarks,
        segment_means_seq_len=q_len,
    )  # fmt: skip
    layer = NystromformerSelfAttention(config).eval()
    layer.conv_kernel_size = None
    projected = [_merged(x) for x in inputs[:3]]
    layer.query, layer.key, layer.value = map(_Precomputed, projected)
    return lambda: _split(layer(projected[0])[0], num_heads)


def linformer(ours: hea.LinformerConfig, inputs: Inputs) -> Work:
    """linformer, with our tables."""
    from linformer.linformer import LinformerSelfAttention

    _, num_heads, q_len, head_dim = inputs.query.shape
    layer = LinformerSelfAttention(num_heads * head_dim, q_len, k=ours.projection_dim, heads=num_heads).eval()
    for name in ("key", "value"):
        table = inputs.learned[f"{name}_projection"].t().contiguous()
        setattr(layer, f"proj_{name[0]}", nn.Parameter(table, requires_grad=False))
    projected = [_merged(x) for x in inputs[:3]]
    layer.to_q, layer.to_k, layer.to_v = map(_Precomputed, projected)
    layer.to_out = nn.Identity()
    return lambda: _split(layer(projected[0]), num_heads)


def longformer(ours: hea.LongformerConfig, inputs: Inputs) -> Work:
    """LongformerSelfAttention of Transformers."""
    batch, num_heads, q_len, head_dim = inputs.query.shape
    config = LongformerConfig(
        hidden_size=num_heads * head_dim, num_attention_heads=num_heads, attention_window=[2 * ours.window_size]
    )
    layer = LongformerSelfAttention(config, 0).eval()
    # Its projections have the tokens in the first dimension.
    projected = [_merged(x) for x in inputs[:3]]
    tokens_first = [x.transpose(0, 1) for x in projected]
    layer.query = _Precomputed(tokens_first[0], copied=True)
    layer.key, layer.value = map(_Precomputed, tokens_first[1:])
    none = torch.zeros(batch, q_len, dtype=torch.bool)
    options = {"attention_mask": none.float(), "is_index_masked": none, "is_index_global_attn": none}
    return lambda: _split(layer(projected[0], **options, is_global_attn=False)[0], num_heads)


def local_attention(ours: hea.LongformerConfig, inputs: Inputs) -> Work:
    """local-attention."""
    from local_attention import LocalAttention

    layer = LocalAttention(
        ours.window_size, causal=inputs.causal, look_backward=1, exact_windowsize=True, use_rotary_pos_emb=False
    ).eval()
    return lambda: layer(*inputs[:3])


def flex_attention(ours: hea.LongformerConfig, inputs: Inputs) -> Work:
    """flex_attention of PyTorch, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    size, q_len = ours.window_size, inputs.query.shape[2]

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = (query - key).abs() <= size
        return near & (key <= query) if inputs.causal else near

    mask = create_block_mask(attends, None, None, q_len, q_len, device="cpu")
    compiled = torch.compile(flex_attention)
    return lambda: compiled(*inputs[:3], block_mask=mask)


def lsh_attention(ours: hea.ReformerConfig, inputs: Inputs) -> Work:
    """reformer-pytorch."""
    from reformer_pytorch.reformer_pytorch import LSHAttention

    layer = LSHAttention(bucket_size=ours.block_size, n_hashes=ours.num_hashes).eval()
    query, value = inputs.query.flatten(0, 1), inputs.value.flatten(0, 1)
    return lambda: layer(query, value)[0].unflatten(0, inputs.query.shape[:2])


def lsh_self_attention(ours: hea.ReformerConfig, inputs: Inputs) -> Work:
    """LSHSelfAttention of Transformers."""
    _, num_heads, q_len, head_dim = inputs.query.shape
    power = (2 * q_len // ours.block_size).bit_length() - 1
    # Two factors need fewer products. The module chooses them itself for long sequences.
    buckets = [2 ** (power // 2), 2 ** (power - power // 2)]
    config = ReformerConfig(
        hidden_size=num_heads * head_dim, num_attention_heads=num_heads, attention_head_size=head_dim,
        lsh_attn_chunk_length=ours.block_size, num_hashes=ours.num_hashes, num_buckets=buckets,
        lsh_attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    layer = LSHSelfAttention(config).eval()
    # The module normalises the keys, but does not scale the products: scale the queries instead.
    projected = [_merged(x) for x in (inputs.query * head_dim**-0.5, inputs.value)]
    layer.query_key, layer.value = map(_Precomputed, projected)
    return lambda: _split(layer(projected[0]).hidden_states, num_heads)


class Peer(NamedTuple):
    """Another implementation, and the method of ours that it is compared with."""

    package: str  # name of the package for pip. The module has underscores in place of the hyphens
    name: str  # name of the class or function
    ours: MethodConfig  # our method with the peer's parameters
    build: Callable[[Any, Inputs], Work]  # the adapter
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
_IN_64, _IN_1 = (functools.partial(linear, bucket_size=size) for size in (64, 1))
BOTH = (False, True)  # bidirectional and causal
PEERS = (
    Peer(_LINEAR, "linear_attn", _FEATURES, linear),
    Peer(_LINEAR, "causal_linear_attn (bucket_size=64)", _FEATURES, _IN_64, (True,)),
    Peer(_LINEAR, "causal_linear_attn (bucket_size=1)", _FEATURES, _IN_1, (True,)),
    Peer(*_PERFORMER, hea.PerformerConfig(num_features=64), performer, BOTH),
    Peer(*_PERFORMER, hea.PerformerConfig(num_features=256), performer, BOTH),
    Peer("nystrom-attention", "NystromAttention", _LANDMARKS, nystrom_attention),
    Peer("transformers", "NystromformerSelfAttention", _LANDMARKS, nystromformer),
    Peer("linformer", "LinformerSelfAttention", _TABLES, linformer),
    Peer("transformers", "LongformerSelfAttention", _WINDOW, longformer),
    Peer("local-attention", "LocalAttention", _WINDOW, local_attention, BOTH),
    Peer("torch", "flex_attention (compiled)", _WINDOW, flex_attention, BOTH),
    Peer("reformer-pytorch", "LSHAttention", _CHUNKS, lsh_attention),
    Peer("transformers", "LSHSelfAttention", _CHUNKS, lsh_self_attention),
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
        us, them = timed[row["method"]], timed.get((row["method"], row["peer"]))
        row |= {"peer_ratio": them and them.ratio, "our_ratio": us.ratio, "our_seconds": us.seconds}
        row |= {"ours_over_peer": them and us.ratio / them.ratio, "peer_seconds": them and them.seconds}
        row["unsteady"] = us.unsteady or bool(them and them.unsteady)
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
    csv: commands.Csv = None,
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
    note = f"Times faster than exact attention; {commands.rounds_note(sizes, rounds)}"
    commands.report(rows, COLUMNS, note, csv=csv)


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.peers")
