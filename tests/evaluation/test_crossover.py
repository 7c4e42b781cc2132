"""The length from which on a method is faster than exact attention: search, storage, look-up and command."""

import json
import pathlib
import types

import pytest
import torch

from each import refuses
from helpers.commands import refused, run_json, shown
from hf_efficient_attn.evaluation import crossover as measuring
from hf_efficient_attn.evaluation.timing import use_threads
from hf_efficient_attn.methods import crossover
from hf_efficient_attn.methods._shared.crossover import LARGE_DIM, NEVER, SMALL_DIM, Crossover

CPU = torch.device("cpu")
FOUND = {"float32": Crossover(1300, 700), "bfloat16 causal": Crossover(3000, 3000)}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> pathlib.Path:
    """A cache folder that does not exist yet; its file."""
    monkeypatch.setenv("HEA_CACHE", str(tmp_path / "cache"))
    measuring.register()
    yield tmp_path / "cache" / "crossover.json"
    measuring.register()


def look_up(method="kdeformer", total_dim=LARGE_DIM, dtype=torch.float32, is_causal=False):
    return crossover.crossover_length(method, total_dim, dtype=dtype, is_causal=is_causal, device=CPU)


def grows(crossing):
    return lambda n: n**2 / (0.6 * crossing * n + 0.4 * crossing**2)


@pytest.mark.parametrize(
    ("formula", "shortest", "expected"),
    [
        *((grows(crossing), 256, crossing) for crossing in (300, 777, 1024, 5000, 40000)),
        (lambda n: 2.0, 700, 700),  # faster everywhere
        (lambda n: 1.1 if n < 1000 else n / 3000, 256, 3000),  # short sequences are computed exactly, and fast
        (lambda n: 0.6 if n <= 4096 else n / 1600, 256, 4096),  # fast at once, for example without the near field
        (lambda n: 1e-9, 256, NEVER),
    ],
)
def test_a_crossing_is_found(formula, shortest, expected):
    lengths = []

    def measure(length):  # each ratio is off by up to 2%
        lengths.append(length)
        return formula(length) * (1.02 if len(lengths) % 2 else 0.98), 0.0

    assert measuring.find_crossover(measure, shortest) == pytest.approx(expected, rel=0.06)
    assert len(lengths) <= 7


def test_a_length_that_would_take_long_to_measure_is_extrapolated():
    lengths = []
    measure = lambda n: (lengths.append(n) or n / 50000, n / 8000)  # noqa: E731
    assert measuring.find_crossover(measure, 256) == pytest.approx(50000, rel=0.05)
    assert max(lengths) <= 8192


def test_both_are_measured_and_exact_attention_only_up_to_a_length(monkeypatch):
    config = measuring.make_config("kdeformer", block_size=4, num_samples=4)
    options = {"config": config, "num_heads": 2, "dtype": torch.float32, "device": CPU, "is_causal": True}
    monkeypatch.setattr(measuring, "_MIN_SECONDS", 1e-3)
    ratio, seconds = measuring.measure_ratio(64, **options)
    assert 0.0 < ratio < 100.0 and 0.0 < seconds < 1.0
    lengths, sdpa = set(), measuring.scaled_dot_product_attention
    monkeypatch.setattr(measuring, "_QUADRATIC", 32)
    monkeypatch.setattr(
        measuring, "scaled_dot_product_attention", lambda q, *x, **k: lengths.add(q.shape[2]) or sdpa(q, *x, **k)
    )
    half_a_second = lambda timer, min_run_time: timer.timeit(1) and types.SimpleNamespace(median=0.5)  # noqa: E731
    monkeypatch.setattr("torch.utils.benchmark.Timer.blocked_autorange", half_a_second)
    assert measuring.measure_ratio(64, **options) == (4.0, 0.5)
    assert lengths == {32}


def test_every_kind_of_call_is_measured(monkeypatch):
    def measure(length, *, num_heads, dtype, is_causal, **rest):
        return length / ((1000 if num_heads == 16 else 3000) * (2 if is_causal else 1)), 0.0

    monkeypatch.setattr(measuring, "measure_ratio", measure)
    found = measuring.measure_crossover("kdeformer", CPU)
    assert list(found) == ["float32", "float32 causal", "bfloat16", "bfloat16 causal"]
    assert list(measuring.measure_crossover("nystromformer", CPU)) == ["float32", "bfloat16"]
    for name, one in found.items():
        factor = 2 if name.endswith("causal") else 1
        assert one == pytest.approx((3000 * factor, 1000 * factor), rel=0.05)


def test_sizes_between_and_beyond_the_measured_ones():
    one = Crossover(1300, 700)
    assert (one.at(SMALL_DIM), one.at(LARGE_DIM)) == one
    lengths = [one.at(size) for size in (32, 64, 128, 300, 512, 1024, 4096, 10**6)]
    assert lengths == sorted(lengths, reverse=True) and lengths[-1] > 500
    assert 1.5 * 700 < one.at(LARGE_DIM, relative_cost=2.0) < 2 * 700
    one = Crossover(500, 700)  # large calls pay later than small ones
    assert [one.at(size) for size in (16, SMALL_DIM, LARGE_DIM, 10**6)] == [500, 500, 700, 700]
    assert 500 < one.at(300) < 700
    assert one.at(SMALL_DIM, relative_cost=2.0) == 1000
    for noise in (one, Crossover(90000, 700), Crossover(NEVER, NEVER), Crossover(1, 1)):
        assert all(1 <= noise.at(size) <= NEVER for size in (1, 64, 1024, 10**6))
        assert noise.at(LARGE_DIM) == noise.large and noise.at(SMALL_DIM) <= 3 * noise.large


def test_built_in_lengths_serve_until_a_machine_is_measured(cache):
    built_in = crossover.built_in_table("cpu")
    for dtype, row in ((torch.float32, "float32"), (torch.float64, "float32"), (torch.float16, "bfloat16")):
        assert look_up(dtype=dtype) == built_in[row].large
        assert look_up(dtype=dtype, is_causal=True) == built_in[f"{row} causal"].large
    assert not cache.parent.exists()  # nothing is measured or written
    assert set(crossover.built_in_table("cuda")) == set(built_in)


def length_of(method, num_heads=16, head_dim=64, is_causal=False, device=CPU, **hyperparameters):
    config = measuring.make_config(method, **hyperparameters)
    return crossover.crossover_of(
        config, num_heads, head_dim, dtype=torch.float32, is_causal=is_causal, device=torch.device(device)
    )


def test_built_in_lengths_depend_on_method_hyperparameters_and_head_dim():
    nearfar, kdeformer = length_of("nearfar"), length_of("kdeformer")
    assert nearfar == length_of("auto") == crossover.built_in_table("cpu")["float32"].large
    order = ["linear", "longformer", "kdeformer", "thinformer", "nearfar", "approx_kmv"]
    assert sorted(order, key=length_of) == order and length_of("approx_kmv") > 2 * nearfar > 3 * kdeformer
    assert length_of("kdeformer", near_field="window") == pytest.approx(0.8 * kdeformer, rel=0.01)
    assert length_of("kdeformer", block_size=768) == pytest.approx(2 * kdeformer, rel=0.01)
    assert length_of("kdeformer", block_size=16) == kdeformer  # its small operations take as long
    assert length_of("linear", feature_map="hedgehog") == length_of("linear")
    assert length_of("kdeformer", head_dim=128, num_heads=8) == kdeformer
    assert 1.2 * kdeformer < length_of("kdeformer", head_dim=32, num_heads=32) < 1.5 * kdeformer
    assert length_of("kdeformer", is_causal=True) < 0.7 * length_of("nearfar", is_causal=True)
    # The costs are those of processors.
    assert length_of("kdeformer", device="xpu") == crossover.built_in_table("xpu")["float32"].large
    assert length_of("approx_kmv", device="xpu") > 2 * length_of("kdeformer", device="xpu")


def test_a_picture_of_768_pixels_is_long_enough():
    """README's case: 2,305 tokens, 3 heads of 64."""
    assert length_of("kdeformer", num_heads=3) < 2305 < length_of("nearfar", num_heads=3)


def test_measured_lengths_are_those_of_the_default_hyperparameters(cache):
    measuring.store_crossover("kdeformer", CPU, {"float32": Crossover(1000, 1000)})
    assert length_of("kdeformer") == 1000 and length_of("kdeformer", near_field="window") == 800
    assert length_of("kdeformer", block_size=768) == 2000
    measuring.store_crossover("nearfar", CPU, {"float32": Crossover(3000, 3000)})
    assert length_of("nearfar") == length_of("auto") == 3000


def test_measured_lengths_are_used(cache, monkeypatch):
    """The measured lengths depend on the method, the kind of call, and the machine."""
    before = look_up()
    measuring.store_crossover("kdeformer", CPU, FOUND)
    assert look_up() == 700 != before
    assert look_up(total_dim=SMALL_DIM) == 1300 and look_up(dtype=torch.float16, is_causal=True) == 3000
    assert look_up(is_causal=True) == crossover.built_in_table("cpu")["float32 causal"].large  # not in the file
    assert look_up("longformer") == before
    measuring.store_crossover("longformer", CPU, {"float32": Crossover(5, 5)})
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "processor_name", lambda: "another processor")
        measuring.register()
        assert look_up() == before
        measuring.store_crossover("kdeformer", CPU, {"bfloat16": Crossover(9, 9)})
    measuring.register()
    assert (look_up(), look_up("longformer")) == (700, 5)
    assert len(json.loads(cache.read_text())["machines"]) == 2
    with use_threads(torch.get_num_threads() + 1):
        assert look_up() == before


def test_the_folder(monkeypatch, tmp_path):
    assert measuring.cache_file() == tmp_path / "cache" / "crossover.json"
    monkeypatch.delenv("HEA_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("xdg", ".cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg") if folder == "xdg" else "")
        assert measuring.cache_file() == tmp_path / folder / "hf_efficient_attn" / "crossover.json"


def _file(rows):
    return json.dumps({"format": 1, "machines": {measuring.machine_name(CPU): {"kdeformer": rows}}}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff\x00", b"[]", b'{"format": 2, "machines": {}}', b'{"format": 1}', b"[" * 100000, _file([]),
        _file({}), _file({"float32": 700}), _file({"float32": [700]}), _file({"float32": [700, True]}),
        _file({"float32": [700, 0]}), _file({"float99": [700, 700]}), _file({"float32": [700, 10**12]}),
    ],
    ids=range(14),
)  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_a_damaged_file_is_named_once_and_replaced(content, cache):
    cache.parent.mkdir()
    cache.write_bytes(content)
    message = "crossover.json holds no lengths that can be used .* crossover --renew`"
    with pytest.warns(UserWarning, match=message) as found:
        assert look_up() == crossover.built_in_table("cpu")["float32"].large
        look_up()
    assert len(found) == 1
    measuring.store_crossover("kdeformer", CPU, FOUND)
    assert look_up() == 700


def test_a_folder_in_place_of_the_file(cache):
    cache.mkdir(parents=True)
    with pytest.warns(UserWarning, match="Is a directory"):
        look_up()
    refuses("crossover", measuring.store_crossover, "kdeformer", CPU, FOUND, error=OSError)


COMMAND = ("crossover", "--method", "kdeformer")


@pytest.fixture
def measurements(monkeypatch):
    """The numbers of measurements that the command made; each finds other lengths."""
    made = []

    def measure(method, device):
        made.append((method, device, torch.get_num_threads()))
        return {"float32": Crossover(1000 + len(made), 500), "float32 causal": Crossover(NEVER, NEVER)}

    monkeypatch.setattr(measuring, "measure_crossover", measure)
    return made


def test_the_command_measures_once(cache, measurements, capsys):
    first, second = (" ".join(shown(capsys, *COMMAND).out.split()) for _ in range(2))
    assert "| float32 | 1001 | 500 |" in first and "| float32 causal | >1000000 | >1000000 |" in first
    assert f"Measured now, and written to {cache}" in first
    assert "1001" in second and f"read from {cache}" in second
    assert run_json(capsys, *COMMAND) == {
        "method": "kdeformer", "machine": measuring.machine_name(CPU), "file": str(cache), "measured_now": False,
        "lengths": {"float32": {"small": 1001, "large": 500}, "float32 causal": {"small": NEVER, "large": NEVER}},
    }  # fmt: skip
    assert len(measurements) == 1
    shown(capsys, *COMMAND, "--renew", "--threads", 3)
    assert [threads for *_, threads in measurements[1:]] == [3]
    assert look_up() == 500  # of the usual number of threads


def test_the_command_says_up_to_which_length_auto_is_exact(cache, monkeypatch, capsys):
    """Longer than the crossover, above all with small heads, and by the defaults of `auto`."""
    lengths = {"float32": (2942, 2942), "bfloat16": (3000, 2500), "float32 causal": (7000, 6000)}
    rows = {name: Crossover(*pair) for name, pair in lengths.items()}
    monkeypatch.setattr(measuring, "measure_crossover", lambda method, device: rows)
    found = run_json(capsys, "crossover")["auto_exact_up_to"]
    assert list(found) == list(rows)
    for name, lengths in found.items():
        assert rows[name].large < lengths["64"] < lengths["32"]
    assert 3300 < found["float32"]["64"] < 3500 and 3550 < found["float32"]["32"] < 3750
    crossover.use_measured(lambda method, device: None)  # as in a new process
    out = " ".join(shown(capsys, "crossover").out.split())
    assert f"| float32 | 2942 | 2942 | {found['float32']['64']} | {found['float32']['32']} |" in out
    assert "auto with its default hyperparameters is exact in longer sequences, too" in out
    assert measuring.make_config("auto").exact_up_to(16, 64, torch.float32, True, CPU) == found["float32 causal"]["64"]
    assert "auto with" not in shown(capsys, *COMMAND).out


def test_the_command_refuses_before_it_measures(cache, measurements, capsys):
    cache.parent.write_text("a file")
    refused(capsys, *COMMAND, status=1)
    assert not measurements
