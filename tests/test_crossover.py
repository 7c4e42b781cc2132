"""The length from which on a method is faster than exact attention: search, storage, look-up and command."""

import json
import pathlib
import warnings

import pytest
import torch

from hf_efficient_attn import cli
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation import crossover as measuring
from hf_efficient_attn.evaluation import crossover_file as files
from hf_efficient_attn.io import writing
from hf_efficient_attn.methods import crossover
from hf_efficient_attn.methods._shared.crossover import LARGE_DIM, NEVER, SMALL_DIM, Crossover

CPU = torch.device("cpu")
FOUND = {"float32": Crossover(1300, 700), "bfloat16 causal": Crossover(3000, 3000)}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> pathlib.Path:
    """A cache folder that does not exist yet; its file."""
    monkeypatch.setenv("HEA_CACHE", str(tmp_path / "cache"))
    files.forget()
    yield tmp_path / "cache" / "crossover.json"
    files.forget()


def look_up(method="kdeformer", total_dim=LARGE_DIM, dtype=torch.float32, is_causal=False):
    return crossover.crossover_length(method, total_dim, dtype=dtype, is_causal=is_causal, device=CPU)


# The search.


class Curve:
    """A ratio by a formula; each measurement is off by up to 2%."""

    def __init__(self, formula, seconds=lambda length: 0.0):
        self.formula, self.duration, self.seconds, self.lengths = formula, seconds, 0.0, []

    def __call__(self, length):
        self.lengths.append(length)
        self.seconds = self.duration(length)
        return self.formula(length) * (1.02 if len(self.lengths) % 2 else 0.98)


@pytest.mark.parametrize("crossing", [300, 777, 1024, 5000, 40000])
def test_a_crossing_is_found(crossing):
    curve = Curve(lambda n: n**2 / (0.6 * crossing * n + 0.4 * crossing**2))
    assert measuring.find_crossover(curve, 256) == pytest.approx(crossing, rel=0.06)
    assert len(curve.lengths) <= 7


def test_a_method_that_is_faster_everywhere_is_so_from_the_shortest_length():
    assert measuring.find_crossover(Curve(lambda n: 2.0), 700) == 700


def test_short_lengths_that_are_fast_do_not_hide_slow_ones_after_them():
    """For example because the method computes them exactly."""
    curve = Curve(lambda n: 1.1 if n < 1000 else n / 3000)
    assert measuring.find_crossover(curve, 256) == pytest.approx(3000, rel=0.05)


def test_a_method_that_becomes_fast_at_once():
    """For example because it leaves its near field out of long sequences."""
    curve = Curve(lambda n: 0.6 if n <= 4096 else n / 1600)
    assert measuring.find_crossover(curve, 256) == pytest.approx(4096, rel=0.06)


def test_a_length_that_would_take_long_to_measure_is_extrapolated():
    curve = Curve(lambda n: n / 50000, lambda n: n / 8000)
    assert measuring.find_crossover(curve, 256) == pytest.approx(50000, rel=0.05)
    assert max(curve.lengths) <= 8192
    assert measuring.find_crossover(Curve(lambda n: 1e-9), 256) == NEVER


def test_ratios_are_medians_of_pairs(monkeypatch):
    """The load of the machine, which slows some rounds down, has no influence."""
    load = iter([1, 1, 1, 1, 5, 5, 9, 9, 2, 2, 1, 4])
    seconds = {"exact": 0.003, "method": 0.001}
    calls = []

    def time_calls(work, number=1):
        calls.append((work, number))
        return seconds[work] * next(load)

    monkeypatch.setattr(measuring, "time_calls", time_calls)
    ratio, duration = measuring.paired_ratio("exact", "method")
    assert ratio == pytest.approx(3.0)
    assert duration == pytest.approx(0.004)
    assert [work for work, _ in calls] == ["exact", "method"] * 6
    assert [number for _, number in calls] == [1, 1] + [2, 4] * 5  # short calls are repeated
    load = iter([300, 100] + [1] * 2)
    calls.clear()
    measuring.paired_ratio("exact", "method")
    assert calls == [("exact", 1), ("method", 1)] * 2  # long ones are measured once


def test_both_are_measured_and_exact_attention_only_up_to_a_length(monkeypatch):
    ratio = measuring.Ratio(
        measuring.make_config("kdeformer", block_size=4, num_samples=4), 2, torch.float32, CPU, True
    )
    assert 0.0 < ratio(64) < torch.inf
    assert ratio.seconds > 0.0
    lengths = []
    sdpa = measuring.scaled_dot_product_attention
    monkeypatch.setattr(measuring, "_QUADRATIC", 32)
    monkeypatch.setattr(
        measuring, "scaled_dot_product_attention", lambda q, *x, **k: lengths.append(q.shape[2]) or sdpa(q, *x, **k)
    )
    monkeypatch.setattr(measuring, "paired_ratio", lambda first, second: (first() is None, 0.5))
    assert ratio(64) == 4.0
    assert lengths == [32]


def test_every_kind_of_call_is_measured(monkeypatch):
    class Fake(Curve):
        def __init__(self, config, num_heads, dtype, device, is_causal):
            length = (1000 if num_heads == 16 else 3000) * (2 if is_causal else 1) + (dtype == torch.bfloat16)
            super().__init__(lambda n: n / length)

    monkeypatch.setattr(measuring, "Ratio", Fake)
    found = measuring.measure_crossover("kdeformer", CPU)
    assert list(found) == ["float32", "float32 causal", "bfloat16", "bfloat16 causal"]
    assert list(measuring.measure_crossover("nystromformer", CPU)) == ["float32", "bfloat16"]
    for name, one in found.items():
        factor = 2 if name.endswith("causal") else 1
        assert one == pytest.approx((3000 * factor, 1000 * factor), rel=0.05)


def test_methods_without_a_crossover_are_refused():
    with pytest.raises(UnsupportedAttentionError, match="learned parameters"):
        measuring.measure_crossover("linformer", CPU)
    with pytest.raises(UnsupportedAttentionError, match="measured for nearfar: name nearfar"):
        measuring.measure_crossover("auto", CPU)
    assert measuring.default_method() == "nearfar"


# Calls of other sizes.


def test_sizes_between_and_beyond_the_measured_ones():
    one = Crossover(1300, 700)
    assert one.at(SMALL_DIM) == 1300
    assert one.at(LARGE_DIM) == 700
    lengths = [one.at(size) for size in (32, 64, 128, 300, 512, 1024, 4096, 10**6)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] > 500
    assert 1.5 * 700 < one.at(LARGE_DIM, relative_cost=2.0) < 2 * 700


def test_large_calls_that_pay_later_than_small_ones():
    one = Crossover(500, 700)
    assert [one.at(size) for size in (16, SMALL_DIM, LARGE_DIM, 10**6)] == [500, 500, 700, 700]
    assert 500 < one.at(300) < 700
    assert one.at(SMALL_DIM, relative_cost=2.0) == 1000


@pytest.mark.parametrize("one", [Crossover(500, 700), Crossover(90000, 700), Crossover(NEVER, NEVER), Crossover(1, 1)])
def test_lengths_that_are_only_noise(one):
    assert all(1 <= one.at(size) <= NEVER for size in (1, 64, 1024, 10**6))
    assert one.at(LARGE_DIM) == one.large
    assert one.at(SMALL_DIM) <= 3 * one.large


# Storage.


def test_built_in_lengths_serve_until_a_machine_is_measured(cache):
    built_in = crossover.built_in_table("cpu")
    for dtype, is_causal in (
        (torch.float32, False),
        (torch.float64, True),
        (torch.bfloat16, False),
        (torch.float16, True),
    ):
        row = ("float32" if dtype.itemsize > 2 else "bfloat16") + (" causal" if is_causal else "")
        assert look_up(dtype=dtype, is_causal=is_causal) == built_in[row].large
    assert not cache.parent.exists()  # nothing is measured or written
    assert set(crossover.built_in_table("cuda")) == set(built_in)


def test_measured_lengths_are_used(cache):
    before = look_up()
    files.store_crossover("kdeformer", CPU, FOUND)
    assert look_up() == 700 != before
    assert look_up(total_dim=SMALL_DIM) == 1300
    assert look_up(dtype=torch.float16, is_causal=True) == 3000
    assert look_up(is_causal=True) == crossover.built_in_table("cpu")["float32 causal"].large  # not in the file
    assert look_up("longformer") == before  # another method
    files.store_crossover("longformer", CPU, {"float32": Crossover(5, 5)})
    assert look_up("longformer") == 5
    assert look_up() == 700  # kept


def test_other_machines_have_lengths_of_their_own(cache, monkeypatch):
    files.store_crossover("kdeformer", CPU, FOUND)
    other = {"bfloat16": Crossover(9, 9)}
    with monkeypatch.context() as patch:
        patch.setattr(files, "processor_name", lambda: "another processor")
        files._device_name.cache_clear()
        assert look_up() == crossover.built_in_table("cpu")["float32"].large
        files.store_crossover("kdeformer", CPU, other)
    files._device_name.cache_clear()
    assert look_up() == 700
    assert len(json.loads(cache.read_text())["machines"]) == 2
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert look_up() == crossover.built_in_table("cpu")["float32"].large
    finally:
        torch.set_num_threads(threads)


def test_the_folder(monkeypatch, tmp_path):
    assert files.cache_file() == tmp_path / "cache" / "crossover.json"
    monkeypatch.delenv("HEA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert files.cache_file() == tmp_path / "xdg" / "hf_efficient_attn" / "crossover.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.cache_file() == tmp_path / ".cache" / "hf_efficient_attn" / "crossover.json"


def _file(rows):
    return json.dumps({"format": 1, "machines": {files.machine_name(CPU): {"kdeformer": rows}}}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff\x00", b"{", b"[]", b'{"format": 2, "machines": {}}', b'{"format": 1}', b'{"a": 1}' * 200000,
        b"[" * 100000, _file([]), _file({}), _file({"float32": 700}), _file({"float32": [700]}),
        _file({"float32": [700, "700"]}), _file({"float32": [700, 0]}), _file({"float32": [700, True]}),
        _file({"float99": [700, 700]}), _file({"float32": [700, 10**12]}),
        b" " * (1 << 20) + _file({"float32": [700, 700]}),
    ],
    ids=range(18),
)  # fmt: skip
def test_a_damaged_file_is_named_once_and_replaced(content, cache):
    cache.parent.mkdir()
    cache.write_bytes(content)
    with pytest.warns(
        UserWarning, match="crossover.json holds no lengths that can be used .* crossover --renew`"
    ) as found:
        assert look_up() == crossover.built_in_table("cpu")["float32"].large
        look_up()
    assert len(found) == 1
    files.store_crossover("kdeformer", CPU, FOUND)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert look_up() == 700


def test_a_folder_in_place_of_the_file(cache):
    cache.mkdir(parents=True)
    with pytest.warns(UserWarning, match="Is a directory"):
        look_up()
    with pytest.raises(OSError, match="crossover"):
        files.store_crossover("kdeformer", CPU, FOUND)


def test_a_failed_write_leaves_the_file_as_it_was(cache, monkeypatch):
    files.store_crossover("kdeformer", CPU, FOUND)
    before = cache.read_bytes()

    def fail(path, value):
        path.write_bytes(b"{")
        raise OSError("disk")

    monkeypatch.setattr(files, "write_json", fail)
    with pytest.raises(OSError, match="disk"):
        files.store_crossover("kdeformer", CPU, {"float32": Crossover(1, 1)})
    assert cache.read_bytes() == before
    assert list(cache.parent.iterdir()) == [cache]
    assert writing.replacing is files.replacing


# The command.


def run(*arguments):
    return cli.run(cli.app, ["crossover", "--method", "kdeformer", *arguments], "hf-efficient-attn")


@pytest.fixture
def measurements(monkeypatch):
    """The numbers of measurements that the command made; each finds other lengths."""
    made = []

    def measure(method, device, *, progress):
        made.append((method, device, progress, torch.get_num_threads()))
        return {"float32": Crossover(1000 + len(made), 500), "float32 causal": Crossover(NEVER, NEVER)}

    monkeypatch.setattr(measuring, "measure_crossover", measure)
    return made


def test_the_command_measures_once(cache, measurements, capsys):
    assert run() == 0
    first = capsys.readouterr().out
    assert "| float32 | bidirectional |        1001 |         500 |" in first
    assert "| float32 | causal        |    >1000000 |    >1000000 |" in first
    assert f"Measured now, and written to {cache}" in first
    assert run() == 0
    assert "1001" in (second := capsys.readouterr().out)
    assert f"read from {cache}" in second
    assert len(measurements) == 1
    assert run("--renew", "--threads", "3") == 0
    assert len(measurements) == 2
    assert measurements[1][3] == 3
    assert look_up() == 500  # of the usual number of threads


def test_the_command_as_json(cache, measurements, capsys):
    assert run("--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lengths"]["float32"] == {"small": 1001, "large": 500}
    assert found["file"] == str(cache)
    assert found["machine"] == files.machine_name(CPU)
    assert found["measured_now"]
    assert measurements[0][2] is False  # no bar


def test_the_command_refuses_before_it_measures(cache, measurements, capsys):
    assert cli.run(cli.app, ["crossover", "--method", "kdeformr"], "hf-efficient-attn") == 2
    assert "Did you mean 'kdeformer'?" in capsys.readouterr().err
    assert run("--device", "nowhere") == 2
    cache.parent.write_text("a file")
    assert run() == 1
    assert "error: " in capsys.readouterr().err
    assert not measurements
