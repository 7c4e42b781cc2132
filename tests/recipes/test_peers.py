"""Other implementations next to ours, and FLuRKA next to its parents."""

import functools
import sys

import pytest
import torch

import hf_efficient_attn as hea
from instances import inputs, relative_error
from recipe_commands import run
from recipes.benchmarks import flurka, peers

# Other implementations.


def peer_of(package, ours, **changes):
    """The first peer of a package for a method of ours, with other hyperparameters."""
    found = next(p for p in peers.PEERS if p.package == package and p.ours.method == ours)
    return found._replace(ours=hea.method_info(ours).config_class(**changes)) if changes else found


def random_inputs(causal=False, config=None):
    tensors = inputs(batch=2, num_heads=3, q_len=64, head_dim=8)
    return peers.Inputs(*tensors, causal, {} if config is None else peers.learned_of(config, tensors[0]))


TABLES = {"projection_dim": 12, "share": "none", "init": "gaussian"}


@pytest.mark.parametrize(
    ("package", "method", "hyperparameters", "causal"),
    [
        ("nystrom-attention", "nystromformer", {"num_landmarks": 8}, False),
        ("transformers", "nystromformer", {"num_landmarks": 8}, False),
        ("linformer", "linformer", TABLES, False),
        ("transformers", "longformer", {"window_size": 8}, False),
        ("local-attention", "longformer", {"window_size": 16}, False),
        ("local-attention", "longformer", {"window_size": 16}, True),
        ("torch", "longformer", {"window_size": 16}, False),
        ("torch", "longformer", {"window_size": 16}, True),
    ],
)
@torch.no_grad()
def test_peers_compute_the_same_as_ours(package, method, hyperparameters, causal, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    peer = peer_of(package, method, **hyperparameters)
    given = random_inputs(causal, peer.ours)
    call = peer.build(peer.ours, given)
    out, expected = call(), peers.ours(peer.ours, given)()
    assert torch.equal(call(), out), "nothing is changed in place"
    # The pseudo-inverses are iterations with other beginnings.
    assert relative_error(out, expected) < (0.01 if method == "nystromformer" else 1e-5)
    assert relative_error(torch.roll(out, 1, 2), expected) > 0.5


@pytest.mark.parametrize("package", ["reformer-pytorch", "transformers"])
@torch.no_grad()
def test_shared_queries_of_peers_equal_ours(package):
    """With two chunks that attend to each other, every token attends to all but itself, as in one of twice the size."""
    given = random_inputs()
    peer = peer_of(package, "reformer", block_size=32, num_hashes=1, shared_query_key=True)
    whole = hea.ReformerConfig(block_size=64, num_hashes=1, shared_query_key=True)
    out = peer.build(peer.ours, given)()
    assert relative_error(out, peers.ours(whole, given)()) < 1e-5
    assert relative_error(out, peers.ours(whole, given._replace(query=given.key))()) > 0.1


@pytest.mark.parametrize("causal", [False, True])
def test_adapters_of_feature_maps(causal):
    """FastAttention is called directly. With bucket_size=1, a token attends to itself and all earlier ones."""
    given, performer = random_inputs(causal=causal), peer_of("performer-pytorch", "performer", num_features=40)
    call = performer.build(performer.ours, given)
    out = call()
    assert out.shape == given.query.shape
    assert torch.equal(out, call())  # the features are drawn only once
    linear = next(p for p in peers.PEERS if p.ours.method == "linear" and causal in p.forms and "64" not in p.name)
    phi_q, phi_k = given.query.softmax(-1), given.key.exp()
    if causal:
        weights = (phi_q @ phi_k.mT).tril()
        expected = weights @ given.value / weights.sum(-1, keepdim=True)
    else:
        expected = phi_q @ (given.key.softmax(-2).mT @ given.value) * 8**-0.5
    torch.testing.assert_close(linear.build(linear.ours, given)(), expected, rtol=1e-3, atol=1e-4)


def test_a_peer_that_is_missing_or_fails_is_listed(table, monkeypatch):
    for name in ("nystrom_attention", "linformer"):
        monkeypatch.setitem(sys.modules, name, None)
    small = "--length 512 --rounds 1 --threads 1 --heads 2 --width 8"
    rows, out = table(peers, small, "--bidirectional --peer nystromformer,linformer")
    assert all(f"not installed: pip install {name}" in out for name in ("nystrom-attention", "linformer"))
    missing, installed, also_missing = rows
    assert missing["peer_ratio"] == also_missing["peer_ratio"] == missing["version"] == "" != installed["version"]
    ratios = [float(installed[key]) for key in ("our_ratio", "peer_ratio", "ours_over_peer")]
    assert min(ratios) > 0 and ratios[0] / ratios[1] == pytest.approx(ratios[2]) and float(missing["our_ratio"]) > 0

    def broken(function):
        raise RuntimeError("no C++ compiler\nhere")

    monkeypatch.setattr(torch, "compile", broken)
    assert "failed: no C++ compiler here" in table(peers, small, "--causal --peer torch")[1]


@pytest.mark.exhaustive
def test_every_peer_is_measured(table, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    rows, _ = table(peers, "--length 512 --rounds 1 --threads 1 --heads 2 --width 8")
    expected = [(peer.title, str(causal)) for causal in (False, True) for peer in peers.PEERS if causal in peer.forms]
    assert [(row["peer"], row["causal"]) for row in rows] == expected
    assert all(row["status"] == "" != row["version"] for row in rows)


# FLuRKA and its parents.

TINY = flurka.Shape(512, 96, 4, 40)


def test_layers_have_the_requested_shape():
    for kernel in flurka.KERNELS:
        for method in (f"flurka_{kernel}", "linformer"):
            config = flurka.method_config(method, TINY)
            assert (config.projection_dim, config.max_length) == (TINY.projection_dim, TINY.length)
            tables = dict(flurka.layer(method, TINY).learned_parameters.named_parameters())
            assert {tuple(table.shape) for table in tables.values()} == {(TINY.projection_dim, TINY.length)}
        # Hidden states are contracted before the projections.
        assert "forward" in vars(flurka.layer(f"flurka_{kernel}", TINY))
    assert flurka.method_config("performer", TINY).num_features == TINY.head_dim
    weights = [flurka.layer(method, TINY, seed=3).key.weight for method in ("sdpa", "linformer", "flurka_linear")]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


def test_flurka_command_writes_what_it_measures(table, monkeypatch):
    shapes = {"low": flurka.Shape(300, 32, 4, 12), "high": flurka.Shape(200, 32, 2, 40)}
    monkeypatch.setattr(flurka, "SHAPES", shapes)
    rows, out = table(flurka, "--kernel linear --rounds 1 --threads 1")
    claims = {"low": ("True", "True", ""), "high": ("False", "True", "")}
    assert [row["role"] for row in rows] == ["kernel", "low-rank", "exact"] * 2
    assert [row["claimed"] for row in rows] == [claim for shape in shapes for claim in claims[shape]]
    assert [row["shape"] for row in rows] == ["low"] * 3 + ["high"] * 3
    for row in rows:
        assert 0 < float(row["faster_min"]) <= float(row["faster"]) <= float(row["faster_max"])
    assert "low: N 300, W 32, H 4, P 12" in out


def test_claims_and_goals_of_flurka(monkeypatch, capsys):
    claims = [tuple(flurka.SHAPES[name].claims().values()) for name in ("figure-3", "figure-4-top", "figure-4-bottom")]
    assert claims == [(True, True), (False, True), (True, False)], "fewer operations than the kernel, than the low-rank"
    monkeypatch.setattr(flurka, "SHAPES", {"low": flurka.Shape(300, 32, 4, 12)})
    monkeypatch.setattr(flurka, "PAPER", ("low",))
    monkeypatch.setattr(flurka, "GOALS", {"kernel": 1e9, "low-rank": 1e-9})
    assert run(flurka, "--kernel linear --no-exact --check --rounds 1 --threads 1") == 1
    assert capsys.readouterr().out.count("| NO ") == 1
    row = {"shape": "low", "method": "flurka_linear", "than": "linear", "role": "kernel", "faster": 1.3}
    monkeypatch.setattr(flurka, "GOALS", {"kernel": 1.3})
    assert [v.reached for v in flurka.verdicts([row | {"claimed": True}])] == [True]
    assert [v.reached for v in flurka.verdicts([row | {"claimed": True, "faster": 1.29}])] == [False]
    assert flurka.verdicts([row | {"claimed": False}, row | {"claimed": True, "shape": "bert"}]) == []
