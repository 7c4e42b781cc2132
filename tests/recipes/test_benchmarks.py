"""The benchmarks of speed and error at small sizes: measurements, goals, and output files."""

import contextlib
import csv
import functools
import gzip
import json
import types

import pytest
import torch
from transformers import BertConfig, BertModel
from typer.testing import CliRunner

import hf_efficient_attn as hea
from hf_efficient_attn import cli
from hf_efficient_attn.evaluation import timing
from hf_efficient_attn.evaluation.model_error import LayerError, ModelError
from recipes.benchmarks import attention, error, error_bound, step, tradeoff
from recipes.common import inputs as real_inputs
from recipes.common import memory

CASE = memory.Case(256, num_heads=1, head_dim=16, threads=1)


def run(recipe, *arguments):
    return cli.run(recipe.app, list(map(str, arguments)), recipe.__name__.rpartition(".")[2])


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def taking(seconds, reference=1.0):
    return timing.Timing(seconds, reference, reference / seconds, reference / seconds, reference / seconds)


@pytest.mark.parametrize(
    ("recipe", "arguments", "message"),
    [
        (attention, ["--check", "--heads", "2"], "goals hold for"),
        (attention, ["--dtype", "int8"], "int8"),
        (attention, ["--dtype", "float16", "--check"], "no goals for float16"),
        (attention, ["--short", "--length", "512"], "leave out --length"),
        (attention, ["--short", "--check", "--dtype", "bfloat16"], "goals hold for"),
        (attention, ["--short", "--auto"], "exclude each other"),
        (attention, ["--device", "moon"], "--device moon"),
        (attention, ["--method", "linera"], "'linear'"),
        (attention, ["--csv", "no/such/folder/file.csv"], "its folder must exist"),
        (attention, ["--length", "0"], "not a number of tokens"),
        (attention, ["--compiled", "--method", "linformer", "--causal"], "causal form"),
        (error, ["--model", "gpt5"], "minilm, deit, random"),
        (error, ["--causal", "--check"], "goals hold for"),
        (error, ["--data", "no/such/folder"], "HEA_DATA"),
        (error, ["--data", "no/such/folder", "--model", "deit"], "HEA_DATA"),
        (error, ["--method", "longformer:global_tokens=200"], "budget of 128"),
        (error, ["--defaults", "--budget", "8"], "leave out --budget, --check"),
        (error_bound, ["--auto", "--source", "gpt2"], "not one of books, xquad, photographs"),
        (error_bound, ["--auto", "--budget", "64"], "leave out --rows, --budget and --method"),
        (step, ["--check"], "--model minilm"),
    ],
)
def test_refusals_before_measuring(recipe, arguments, message, capsys):
    assert run(recipe, *arguments) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1


# --- speed ---


@pytest.mark.parametrize(("causal", "backward"), [(False, True), (True, False)])
def test_measure_pairs_every_method_with_exact_attention(causal, backward):
    configs = cli.parse_methods(["linear,longformer:window_size=16"])
    rows = attention.measure(configs, CASE._replace(causal=causal, backward=backward), rounds=3)
    assert list(rows) == ["sdpa", "linear", "longformer (window_size=16)"]
    assert rows["sdpa"].ratio == 1.0
    assert all(row.seconds > 0 and 0 < row.ratio_min <= row.ratio <= row.ratio_max for row in rows.values())


def test_backward_reaches_every_input_and_does_not_accumulate():
    case = CASE._replace(backward=True)
    for config in (None, hea.LinearConfig()):
        inputs = memory.make_inputs(case)
        memory.run_once(config, inputs, case)
        once = [x.grad.clone() for x in inputs]
        memory.run_once(config, inputs, case)
        assert all(torch.equal(x.grad, first) for x, first in zip(inputs, once, strict=True))
        assert all(first.abs().sum() > 0 for first in once)


def test_ratio_is_the_median_of_pairs():
    found = timing.summary([(1.0, 2.0), (1.0, 8.0), (2.0, 6.0)])
    assert found == timing.Timing(seconds=1.0, reference_seconds=6.0, ratio=3.0, ratio_min=2.0, ratio_max=8.0)
    assert found.unsteady and not timing.summary([(1.0, 2.0), (1.0, 2.5), (2.0, 5.0)]).unsteady


@pytest.mark.parametrize(
    ("method", "length", "ratio", "changes", "reached"),
    [
        ("kdeformer", 8192, 10.0, {}, [True]),
        ("kdeformer", 8192, 9.9, {}, [False]),
        ("kdeformer", 8192, 4.0, {"backward": True}, [True]),
        ("linear", 8192, 11.0, {"causal": True}, [False]),
        ("performer (num_features=64)", 8192, 30.0, {}, [True]),
        ("hyperattention", 16384, 14.0, {"extra_memory": 2.6}, [True, False]),
        ("reformer", 16384, 12.0, {"extra_memory": 9.0}, [True]),
        ("sdpa", 16384, 1.0, {"extra_memory": 9.0}, []),
        ("kdeformer", 4096, 0.1, {"extra_memory": 9.0}, []),
        ("kdeformer", 8192, 5.0, {"dtype": "bfloat16"}, [True]),
        ("linear", 8192, 12.0, {"dtype": "bfloat16", "backward": True}, [False]),
        ("kdeformer", 16384, 3.9, {"dtype": "bfloat16", "device": "cuda:0"}, [False]),
        ("linear", 131072, 199.0, {"dtype": "bfloat16", "device": "cuda"}, [True]),
        ("longformer", 1024, 2.4, {"budget": 128, "batch": 8}, [False]),
        ("longformer", 512, 1.1, {"budget": 64}, [True]),
        ("longformer", 1024, 1.1, {"batch": 8}, []),
    ],
)
def test_goals_by_length_pass_dtype_device_and_budget(method, length, ratio, changes, reached):
    row = {**memory.Case(length)._asdict(), "method": method, "ratio": ratio, "extra_memory": None, **changes}
    assert [verdict.reached for verdict in attention.verdicts([row])] == reached


def test_check_measures_every_setting_that_has_a_goal():
    def settings(*arguments):
        return [(case.length, case.causal, case.backward) for case in attention.settings(*arguments)]

    usual, half = memory.Case(0), memory.Case(0, dtype="bfloat16")
    known = set(attention.SPEED_GOALS) | {(*key, False) for key in attention.MEMORY_GOALS}
    assert set(settings([], None, None, True, usual)) == known
    assert settings([], True, None, True, usual) == [(8192, True, False)]
    assert settings([4096], None, True, False, usual) == [(4096, False, True)]
    gpu = half._replace(num_heads=16, device="cuda")
    assert set(settings([], None, None, True, half)) == set(attention.HALF_GOALS)
    assert set(settings([], None, None, True, gpu)) == set(attention.GPU_GOALS)
    everything = settings([], None, None, False, gpu)
    assert everything[:2] == [(8192, False, False), (8192, False, True)] and everything[-1] == (2**20, False, True)


@pytest.fixture
def no_generator(monkeypatch):
    """Meta tensors replace those of an accelerator here, and PyTorch has no random generator for them."""
    monkeypatch.setattr(torch, "Generator", lambda device: types.SimpleNamespace(manual_seed=lambda seed: None))


def test_inputs_and_memory_are_those_of_the_device(no_generator, monkeypatch):
    case = CASE._replace(device="meta", dtype="bfloat16", backward=True)
    inputs = memory.make_inputs(case)
    assert {(x.device.type, x.dtype, x.requires_grad) for x in inputs} == {("meta", torch.bfloat16, True)}
    assert sum(x.nbytes for x in inputs) == case.input_bytes
    memory.run_once(None, inputs, case)
    assert inputs[0].grad.device.type == "meta"
    assert "device meta" in str(case) and "threads 1" in str(CASE)
    monkeypatch.setattr(memory, "peak_of", lambda work, device: (work(), 7 * case.input_bytes)[1])
    assert memory.extra_memory(None, case) == 7


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


def test_short_sequences_and_goals_in_half_precision(monkeypatch, tmp_path, capsys):
    found = []

    def measure(configs, case, *_):
        found.append((case, {label: config.to_dict() for label, config in configs.items()}))
        return dict.fromkeys(configs, taking(1.0, 100.0))

    monkeypatch.setattr(attention, "measure", measure)
    path = tmp_path / "short.csv"
    arguments = ["--short", "--no-memory", "--method", "longformer,linear", "--dtype", "bfloat16", "--causal"]
    assert run(attention, *arguments, "--csv", path) == 0
    assert [(case.length, case.batch) for case, _ in found] == [(512, 1), (512, 8), (1024, 1), (1024, 8)]
    assert all(case.causal and case.dtype == "bfloat16" and not case.backward for case, _ in found)
    windows = [configs["longformer"]["window_size"] for _, configs in found]
    assert windows == [hea.LongformerConfig().with_budget(n).window_size for n in (64, 64, 128, 128)]
    assert [row["budget"] for row in read_csv(path)[::2]] == ["64", "64", "128", "128"]
    found.clear()
    assert run(attention, "--check", "--dtype", "bfloat16", "--no-memory") == 0
    assert {(case.length, case.causal, case.backward) for case, _ in found} == set(attention.HALF_GOALS)
    assert {case.dtype for case, _ in found} == {"bfloat16"} and "at least 25" in capsys.readouterr().out


def test_speed_command_writes_what_it_measures(tmp_path, capsys, monkeypatch):
    table = tmp_path / "speed.csv"
    arguments = ["--length", "64,128", "--method", "linear,performer:num_features=8", "--heads", "2", "--width", "8"]
    assert run(attention, *arguments, "--rounds", "2", "--threads", "1", "--no-memory", "--csv", table) == 0
    out, err = capsys.readouterr()
    rows = read_csv(table)
    expected = [(n, name) for n in ("64", "128") for name in ("sdpa", "linear", "performer (num_features=8)")]
    assert [(row["length"], row["method"]) for row in rows] == expected
    assert all(row["num_heads"] == "2" and row["head_dim"] == "8" and row["extra_memory"] == "" for row in rows)
    assert len([line for line in out.splitlines() if line.startswith("|")]) == 2 + len(rows) and err == ""
    monkeypatch.setattr(attention, "MEMORY_GOALS", {})
    for goal, status in ((1e9, 1), (1e-9, 0)):
        monkeypatch.setattr(attention, "SPEED_GOALS", {(64, False, False): {"linear": goal}})
        assert run(attention, "--check", "--no-memory", "--method", "linear", "--rounds", "1") == status
        assert ("| NO " in capsys.readouterr().out) == bool(status)


def test_extra_memory_is_what_a_method_allocates():
    case = CASE._replace(length=1024, head_dim=64)
    small = memory.extra_memory(hea.LinearConfig(), case)
    # At least the features of 1024 queries, 1024 x 4096 numbers, and three inputs of 1024 x 64.
    large = memory.extra_memory(hea.PerformerConfig(num_features=4096), case)
    assert 0 < small < 10 < 4096 / (3 * 64) < large


@pytest.mark.parametrize(("auto", "unbounded", "status"), [(1.04, 0.51, 0), (1.06, 0.5, 1), (1.0, 0.54, 1)])
def test_auto_may_be_slower_by_a_twentieth(auto, unbounded, status, monkeypatch, capsys):
    """Than exact attention, and without a bound than nearfar, which takes half of its time here."""
    cases = []

    def measure(configs, case, *_):
        cases.append((case.causal, case.source))
        times = {"sdpa": 1.0, "nearfar": 0.5, "auto": auto, attention.UNBOUNDED: unbounded}
        assert list(configs) == list(times)[1:]
        return {name: taking(time) for name, time in times.items()}

    monkeypatch.setattr(attention, "measure", measure)
    assert run(attention, "--auto", "--dtype", "bfloat16", "--length", "40", "--check") == status
    assert cases == [(False, "bert"), (True, "gpt2"), (False, "minilm")]
    assert f"| minilm | 40 | auto | {1000 * auto:.3g} | {auto:.2f}" in " ".join(capsys.readouterr().out.split())


def test_the_speed_is_measured_on_real_inputs(data):
    case = memory.Case(64, num_heads=12, head_dim=32, source="minilm")
    layers = attention.minilm_layers(case, data)
    assert len(layers) == 3 and layers[0][0].shape == (1, 12, 64, 32)
    with torch.no_grad():
        found = attention.measure(cli.parse_methods(attention.AUTO), case, 1, data=data)
    assert list(found) == ["sdpa", "nearfar", "auto", attention.UNBOUNDED]
    assert all(timing.seconds > 0 for timing in found.values())


def test_compiled_methods_are_compared_with_eager_mode(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    options = ["--compiled", "--length", "64", "--method", "linear,linformer", "--rounds", "1", "--threads", "1"]
    monkeypatch.setattr(attention, "COMPILED_GOAL", 0.0)
    assert run(attention, *options, "--backward", "--check", "--csv", tmp_path / "a.csv") == 0
    rows = read_csv(tmp_path / "a.csv")
    assert [row["method"] for row in rows] == ["linear", "linformer"] and float(rows[0]["compile_seconds"]) > 0
    monkeypatch.setattr(attention, "COMPILED_GOAL", 1e6)
    capsys.readouterr()
    assert run(attention, *options, "--causal", "--check") == 1
    assert "linformer" not in capsys.readouterr().out


def test_a_training_step_is_measured_and_compared_with_its_goals(monkeypatch, tmp_path):
    before = step.make_model(hea.LinearConfig(), 32)
    assert before.config._attn_implementation == "linear" and before.training
    call = ["--length", "32", "--method", "linear", "--rounds", "1", "--csv", str(tmp_path / "a.csv")]
    done = CliRunner().invoke(step.app, call)
    assert done.exit_code == 0 and "| sdpa" in done.output and "| linear" in done.output, done.output
    # At least the parameters' gradients and the two states of AdamW.
    numel = sum(p.numel() for p in before.parameters())
    assert all(float(row["memory_mib"]) * 2**20 > 3 * 4 * numel for row in read_csv(tmp_path / "a.csv"))
    taken = {"linear": 1.0, "longformer": 2.0}
    monkeypatch.setattr(step, "make_step", lambda *_: None)
    monkeypatch.setattr(step, "paired", lambda _, calls, *__: (taking(2.0), {k: taking(taken[k], 2.0) for k in calls}))
    monkeypatch.setattr(step, "STEP_GOALS", {64: dict.fromkeys(taken, 1.5)})
    options = ["--model", "minilm", "--no-memory", "--check"]
    assert run(step, *options, "--method", "linear") == 0
    assert run(step, *options) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", [None, hea.LinearConfig()])
def test_a_step_of_minilm(method, minilm):
    do_step = step.make_step(method, 64, step.Model.minilm)
    do_step(), do_step()


# --- error ---


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
    assert all(row["error"] > 0.01 for row in (window, sampled)) and all(row["error"] < 1e-5 for row in whole)
    assert window["error"] == pytest.approx((window["layer_0"] + window["layer_1"]) / 2)


@pytest.fixture
def book(tmp_path, minilm):
    """A data folder with one book."""
    folder = tmp_path / "text" / "books"
    folder.mkdir(parents=True)
    words = "It was the best of times, it was the worst of times, it was the age of wisdom and of foolishness. " * 600
    with gzip.open(folder / "book.txt.gz", "wt", encoding="utf-8") as file:
        file.write(words)
    return tmp_path


def test_error_command_on_minilm(book, capsys, monkeypatch):
    monkeypatch.setattr(error, "GOALS", {("minilm", 512): (128, {"longformer": 0.0})})
    arguments = ["--data", book, "--method", "longformer", "--budget", "64,128", "--seeds", "1", "--threads", "1"]
    assert run(error, *arguments, "--csv", book / "error.csv", "--check") == 1
    out = capsys.readouterr().out
    better, worse = sorted(read_csv(book / "error.csv"), key=lambda row: float(row["error"]))
    assert (better["budget"], worse["budget"]) == ("128", "64")
    assert "minilm: 512 tokens, 6 layers, 12 heads of 32, 1 inputs" in out
    assert "| attention  | 64" in out and "± deviation" in out and "| NO " in out


def test_longer_text_is_concatenated_windows(book):
    short, longer = real_inputs.minilm_activations(book, 1), real_inputs.minilm_activations(book, 1, length=700)
    assert [one.query.shape[2] for one in longer] == [700] * 6
    # The last token of the short text is [SEP].
    assert torch.allclose(longer[0].key[:, :, :511], short[0].key[:, :, :511], atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_mean_error_is_zero_for_uniform_attention(causal):
    one = real_inputs.Activation(0, torch.zeros(1, 2, 30, 4), torch.randn(1, 2, 30, 4), torch.randn(1, 2, 30, 5), None)
    assert real_inputs.mean_error([one], real_inputs.exact_outputs([one], causal), causal) < 1e-6
    other = one._replace(query=torch.randn(1, 2, 30, 4) * 5)
    assert real_inputs.mean_error([other], real_inputs.exact_outputs([other], causal), causal) > 0.3


def test_errors_of_default_hyperparameters(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(error, "minilm_activations", lambda *_, length: tiny_activations()[0])
    arguments = ["--method", "longformer:window_size=3,longformer", "--seeds", "1", "--csv", tmp_path / "errors.csv"]
    assert run(error, *arguments, "--defaults") == 0
    assert "| attention " in (out := capsys.readouterr().out) and "| default |" in out and "budgets" not in out
    narrow, usual = read_csv(tmp_path / "errors.csv")
    # The default window is wider than the 48 tokens.
    assert float(narrow["error"]) > 0.01 > float(usual["error"])


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
    # The causal form has a single near field.
    for causal, counts in (([], [1, 2, 1]), (["--causal"], [1, 1, 0])):
        assert run(error, "--budget", "8", "--seeds", "1", *causal) == 0
        out = capsys.readouterr().out
        assert [out.count(f"\n| {name} ") for name in ("linear", "kdeformer", "nystromformer")] == counts
        assert ("mean of the values so far" in out) == bool(causal)


# --- auto's bound ---


def test_heads_of_auto_above_the_bound_are_counted(monkeypatch, tmp_path, capsys):
    """A model of one layer with four heads: one exact, two within the bound of .1, one above it."""
    errors = torch.tensor([[1e-6, 0.04, 0.1, 0.2]], dtype=torch.float64)
    layer = LayerError(0, "layer", "auto", 60, errors, errors)
    monkeypatch.setattr(error_bound, "open_source", lambda *_: (torch.nn.Identity(), lambda tokens: iter([{}])))
    monkeypatch.setattr(hea, "convert", lambda model, config: model)
    monkeypatch.setattr(hea, "attention_error", lambda model, batch, *, num_rows: ModelError((layer,), num_rows))
    monkeypatch.setattr(error_bound, "cost_of", lambda tokens, head_dim: (0.01, 0.01))
    arguments = ["--auto", "--data", tmp_path, "--source", "books", "--tokens", "60", "--check"]
    assert run(error_bound, *arguments, "--csv", tmp_path / "heads.csv") == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "| books | 60 | 4 | 75 % | 1 | 33.33 % |" in out and "2.0 %" in out
    (row,) = read_csv(tmp_path / "heads.csv")
    assert (row["heads"], row["approximated"], row["missed"]) == ("4", "3", "1")
    errors[0, 3] = 0.1
    assert run(error_bound, *arguments) == 0


def test_the_cost_of_auto_is_measured():
    assert all(0.0 < cost < 10.0 for cost in error_bound.cost_of(1024, 32))


# --- error against speed ---


def test_exact_attention_in_bfloat16_and_padded_heads():
    """It is that of PyTorch up to the rounding of bfloat16, which has eight bits, and is computed in chunks."""
    generator = torch.Generator().manual_seed(0)
    given = real_inputs.Activation(0, *(torch.randn(1, 2, 300, 32, generator=generator) for _ in range(3)), 0.2)
    assert given.query.shape[2] > tradeoff._CHUNK_QUERIES
    exact = hea.analysis.exact_output(*given[1:4], scale=given.scale)
    out = tradeoff.exact_bfloat16(*given[1:])
    assert out.dtype == torch.float32 and out.shape == exact.shape
    off = hea.analysis.relative_error(out, exact).operator
    assert off.min() > 1e-5 and off.max() < 0.01
    wide = tradeoff.padded(given, 48)
    out = torch.nn.functional.scaled_dot_product_attention(*wide[1:4], scale=wide.scale)
    torch.testing.assert_close(out[..., :32].double(), exact, rtol=1e-4, atol=1e-5)
    assert out.shape[3] == 48 and not out[..., 32:].any()


def test_the_frontier_and_the_points_of_methods():
    rows = [
        {"method": name, "ratio": ratio, "error": error}
        for name, ratio, error in (("a", 2, 0.1), ("b", 4, 0.3), ("c", 3, 0.3), ("d", 8, 0.5), ("e", 2, 0.2))
    ]
    assert [row["method"] for row in tradeoff.frontier(rows)] == ["d", "b", "a"]
    configs = {name: hea.method_info(name).config_class() for name in ("auto", "nearfar", "linear")}
    found = [(one.method, one.setting) for one in tradeoff.points(configs, (64, 128))]
    bounds = (("auto", f"bound {bound:g}") for bound in tradeoff.MAX_ERRORS)
    # linear has no budget
    assert found == [("exact, bfloat16", ""), *bounds, ("nearfar", "64"), ("nearfar", "128"), ("linear", "")]


def test_tradeoff_measures_writes_and_draws_again(book, tmp_path, capsys):
    picture = tmp_path / "tradeoff.png"
    few = ["--data", book, "--tokens", 512, "--threads", 1, "--rounds", 1, "--output", picture]
    assert run(tradeoff, *few, "--method", "longformer", "--budget", "64,256") == 0
    rows = json.loads(picture.with_suffix(".json").read_text())["rows"]
    assert [(row["method"], row["setting"]) for row in rows] == [
        ("exact, bfloat16", ""), ("longformer", "64"), ("longformer", "256")
    ]  # fmt: skip
    assert rows[0]["error"] < 0.05 < rows[2]["error"] < rows[1]["error"] and all(row["seconds"] > 0 for row in rows)
    printed = capsys.readouterr().out
    assert "on the frontier" in printed and "512 tokens" in printed
    picture.unlink()
    assert run(tradeoff, "--redraw", "--output", picture) == 0
    assert picture.stat().st_size > 10_000 and capsys.readouterr().out == printed
