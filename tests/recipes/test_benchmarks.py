"""The benchmarks of speed at small sizes: measurements, output files, the run on one accelerator, peers, a roofline."""

import contextlib
import functools
import json
import sys
import types

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

import hf_efficient_attn as hea
from helpers.commands import run
from hf_efficient_attn import cli
from hf_efficient_attn.evaluation import timing
from hf_efficient_attn.methods import make_config, method_info
from instances import inputs, relative_error
from recipes.benchmarks import attention, flurka, gpu, peers, roofline, step
from recipes.common import gpu_model, memory
from recipes.common.gpu_model import H100

CASE = memory.Case(256, num_heads=1, head_dim=16, threads=1)


@pytest.fixture
def measured(monkeypatch):
    """Replaces the measurement by seconds of each method, and records the cases and configs."""
    calls, seconds = [], {}

    def measure(configs, case, *_):
        calls.append((case, {label: config.to_dict() for label, config in configs.items()}))
        taken = {label: seconds.get(label, 0.01) for label in ("sdpa", *configs)}
        return {label: timing.Timing(s, 1.0 / s, 1.0 / s, 1.0 / s) for label, s in taken.items()}

    monkeypatch.setattr(attention, "measure", measure)
    return calls, seconds


def test_backward_reaches_every_input_and_does_not_accumulate():
    case = CASE._replace(backward=True)
    for config in (None, hea.LinearConfig()):
        inputs = memory.make_inputs(case)
        memory.run_once(config, inputs, case)
        once = [x.grad.clone() for x in inputs]
        memory.run_once(config, inputs, case)
        assert all(torch.equal(x.grad, first) for x, first in zip(inputs, once, strict=True))
        assert all(first.abs().sum() > 0 for first in once)


# --- other devices: meta tensors replace those of an accelerator here ---


@pytest.fixture
def no_generator(monkeypatch):
    """PyTorch has no random generator for meta tensors."""
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


def test_short_sequences_in_half_precision(measured, table):
    calls, _ = measured
    rows, _ = table(attention, "--short --no-memory --method longformer,linear --dtype bfloat16 --causal")
    assert [(case.length, case.batch) for case, _ in calls] == [(512, 1), (512, 8), (1024, 1), (1024, 8)]
    assert all(case.causal and case.dtype == "bfloat16" and not case.backward for case, _ in calls)
    windows = [configs["longformer"]["window_size"] for _, configs in calls]
    assert windows == [hea.LongformerConfig().with_budget(n).window_size for n in (64, 64, 128, 128)]
    assert [row["budget"] for row in rows[::3]] == ["64", "64", "128", "128"]


def test_speed_command_writes_what_it_measures(table):
    sizes = "--heads 2 --width 8 --rounds 3 --threads 1 --no-memory --causal --backward"
    rows, out = table(attention, "--length 64,128 --method linear,performer:num_features=8,linformer", sizes)
    expected = [(n, name) for n in ("64", "128") for name in ("sdpa", "linear", "performer (num_features=8)")]
    assert [(row["length"], row["method"]) for row in rows] == expected  # linformer has no causal form
    for row in rows:
        seconds, low, middle, high = (float(row[key]) for key in ("seconds", "ratio_min", "ratio", "ratio_max"))
        assert seconds > 0 and 0 < low <= middle <= high and (row["causal"], row["backward"]) == ("True", "True")
    assert all(row["num_heads"] == "2" and row["head_dim"] == "8" and row["extra_memory"] == "" for row in rows)
    assert len([line for line in out.splitlines() if line.startswith("|")]) == 2 + len(rows)


def test_extra_memory_is_what_a_method_allocates():
    case = CASE._replace(length=1024, head_dim=64)
    small = memory.extra_memory(hea.LinearConfig(), case)
    # At least the features of 1024 queries, 1024 x 4096 numbers, and three inputs of 1024 x 64.
    assert 0 < small < 10 < 4096 / (3 * 64) < memory.extra_memory(hea.PerformerConfig(num_features=4096), case)


def test_times_of_auto_relative_to_exact_attention(measured, capsys):
    calls, seconds = measured
    seconds |= {"sdpa": 1.0, "nearfar": 0.5, "auto": 1.04, "auto (max_error=0)": 0.51}
    assert run(attention, "--auto --dtype bfloat16 --length 40") == 0
    assert [(case.causal, case.source) for case, _ in calls] == [(False, "bert"), (True, "gpt2"), (False, "minilm")]
    assert all(list(configs) == list(seconds)[1:] for _, configs in calls)
    assert "| minilm | 40 | auto | 1.04e+03 | 1.04" in " ".join(capsys.readouterr().out.split())


def test_the_speed_is_measured_on_real_inputs(data):
    case = memory.Case(64, num_heads=12, head_dim=32, source="minilm")
    layers = attention.minilm_layers(case, data)
    assert len(layers) == 3 and layers[0][0].shape == (1, 12, 64, 32)
    with torch.no_grad():
        found = attention.measure(cli.parse_methods(attention.AUTO), case, 1, data=data)
    assert list(found) == ["sdpa", "nearfar", "auto", "auto (max_error=0)"]
    assert all(timing.seconds > 0 for timing in found.values())


def test_methods_in_onnxruntime(table):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    rows, out = table(attention, "--onnx --method linear --length 64 --heads 2 --rounds 1")
    assert [row["method"] for row in rows] == ["sdpa", "linear"] and "| 64     | 1    | fwd  | linear    |" in out


def test_a_training_step_is_measured(table, monkeypatch):
    before = step.make_model(hea.LinearConfig(), 32)
    assert before.config._attn_implementation == "linear" and before.training
    sizes = {"vocab_size": step.VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    small = BertForMaskedLM(BertConfig(**sizes, intermediate_size=32))
    monkeypatch.setattr(step, "make_model", lambda config, length: small)
    rows, out = table(step, "--length 32 --method linear --rounds 1")
    assert "| 32     | sdpa" in out and "| 32     | linear" in out
    # At least the parameters' gradients and the two states of AdamW.
    numel = sum(p.numel() for p in small.parameters())
    assert all(float(row["memory_mib"]) * 2**20 > 3 * 4 * numel for row in rows)


def test_one_run_of_the_gpu_benchmark(tmp_path, capsys, monkeypatch):
    # Any build of PyTorch, on a machine without an accelerator.
    built_for = torch.device("cuda")
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None if check_available else built_for
    )
    folder, order, times = tmp_path / "out", [], gpu.times
    monkeypatch.setattr(gpu, "times", lambda *given: order.append((given[1].length, given[2])) or times(*given))
    monkeypatch.setattr(gpu, "constants", lambda device: {"op": 1e-6})
    monkeypatch.setattr(gpu, "_PROFILED", ("linformer",))
    words = "--dtype float32 --heads 2 --minutes 5 --method longformer,linformer --length 32,64 -o"
    assert run(gpu, words, folder) == 0
    # All lengths come first, then the causal form.
    assert order == [(length, rounds) for rounds in (1, 3) for length in (32, 32, 64, 64) * 2]
    result = json.loads((folder / "gpu.json").read_text())
    kept = result["promises"]
    assert all(all(checks.values()) for checks in kept.values())
    assert kept["longformer"].keys() - kept["linformer"].keys() == {"the future never leaks"}
    assert 0 < result["errors"]["longformer"] < result["errors"]["linformer"]
    assert result["constants"] == {"op": 1e-6} and result["profiles"]["linformer"]["length"] == 64
    assert result["profiles"]["linformer"]["operations"]
    assert {row["attention"] for row in result["times"] if row["causal"]} == {"exact, default", "longformer"}
    rows = [(row["attention"], row["length"], row["backward"]) for row in result["times"] if not row["causal"]]
    names = ["exact, default", "longformer", "linformer"]
    assert rows == [(name, n, backward) for n in (32, 64) for backward in (False, True) for name in names]
    assert all(row["seconds"] > 0 and row["rounds"] == 3 for row in result["times"])
    assert all(row["ratios"].keys() == {"default"} for row in result["times"])
    printed = capsys.readouterr().out
    assert (folder / "gpu.md").read_text() in printed and "All promises are kept by 2 methods." in printed
    assert run(gpu, words, folder) == 2  # nothing is replaced without --force


def test_broken_promises_are_found(monkeypatch):
    real = gpu.hea.attention

    def leaking(config, query, key, value, *, attention_mask=None, is_causal=False):
        return real(config, query, key, value, is_causal=False)

    monkeypatch.setattr(gpu.hea, "attention", leaking)
    kept = gpu.promises(make_config("longformer", window_size=16), torch.device("cpu"))
    assert not kept["padding never leaks"] and not kept["the future never leaks"]


def test_exact_kernels_of_an_accelerator(monkeypatch):
    """On MPS exact attention is never called with too many scores."""
    called = []
    monkeypatch.setattr(gpu, "runs", lambda call, label: False)
    monkeypatch.setattr(gpu, "make_inputs", lambda case: ())
    monkeypatch.setattr(gpu, "exact_kernels", lambda device: called.append(device.type) or ["default"])
    for length in (8192, 16384):
        gpu.times({}, memory.Case(length, num_heads=16, device="mps"), 1)
    assert called == ["mps"]


# --- other implementations next to ours ---


def peer_of(package, ours, **changes):
    """The first peer of a package for a method of ours, with other hyperparameters."""
    found = next(p for p in peers.PEERS if p.package == package and p.ours.method == ours)
    return found._replace(ours=hea.method_info(ours).config_class(**changes)) if changes else found


def random_inputs(causal=False, config=None):
    tensors = inputs(batch=2, num_heads=3, q_len=64, head_dim=8)
    return peers.Inputs(*tensors, causal, {} if config is None else peers.learned_of(config, tensors[0]))


@pytest.mark.parametrize(
    ("package", "method", "hyperparameters", "causal"),
    [
        ("nystrom-attention", "nystromformer", {"num_landmarks": 8}, False),
        ("transformers", "nystromformer", {"num_landmarks": 8}, False),
        ("linformer", "linformer", {"projection_dim": 12, "share": "none", "init": "gaussian"}, False),
        ("transformers", "longformer", {"window_size": 8}, False),
        *((name, "longformer", {"window_size": 16}, x) for name in ("local-attention", "torch") for x in peers.BOTH),
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


# --- FLuRKA next to its parents ---

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


# --- the model of the time on a GPU ---


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", [name for name in hea.available_methods() if name not in ("auto", "flurka_eva")])
def test_every_method_runs_on_the_branches_of_a_gpu(method, causal, backward, dtype):
    if causal and not method_info(method).causal:
        pytest.skip("has no causal form")
    call = roofline.make_call(make_config(method), 3000, dtype, causal=causal, backward=backward)
    row, recorder = roofline.predict(call, H100)
    assert row["launches"] == len(recorder.operations) >= 1
    # At least the inputs are read and the output is written.
    assert row["gigabytes"] * 1e9 >= 4 * 16 * 3000 * 64 * (4 if dtype == "float32" else 2)
    # Such a call can be captured in a CUDA graph.
    assert causal or method == "approx_kmv" or row["syncs"] == 0
    assert row["ms"] > 0 and (row["bound"] != "host" or row["ms"] > 900 * (H100.call + row["launches"] * H100.op))


def test_exact_attention_takes_the_time_that_was_measured():
    for length, measured in {16384: 2.25, 65536: 37.1, 131072: 147.0}.items():
        forms = ({"causal": x, "backward": y} for x, y in ((False, False), (True, False), (False, True)))
        calls = (roofline.make_call(None, length, "bfloat16", **form) for form in forms)
        ms, causal_ms, training_ms = (roofline.predict(call, H100)[0]["ms"] for call in calls)
        assert abs(ms / measured - 1.0) < 0.05
        assert abs(causal_ms / ms - 0.5) < 0.1 and 3.0 < training_ms / ms < 5.0


def test_the_time_is_that_of_two_clocks():
    small, large = (torch.empty(n, device="meta") for n in (8, 1 << 28))
    machine = H100._replace(call=0.0, view=0.0)

    def seconds(call):
        return gpu_model.simulate(call, machine)[0]

    traffic = 2 * large.nbytes / machine.bandwidth
    assert seconds(lambda: [small + 1.0 for _ in range(50)]) == pytest.approx(50 * machine.op)
    assert seconds(lambda: large + 1.0) == pytest.approx(traffic)
    # The device works while the host issues the next operations, but not while the host waits for a number.
    found = seconds(lambda: [large + 1.0, *(small + 1.0 for _ in range(9))])
    assert found == pytest.approx(traffic + 9 * machine.kernel)
    waits = [large + 1.0, small]
    assert seconds(lambda: [large + 1.0, waits[1][0].item()]) == pytest.approx(traffic + machine.sync + machine.op)


def test_the_command_writes_what_it_predicts(tmp_path, capsys):
    file = tmp_path / "gpu.json"
    assert run(roofline, "--methods linear,linformer --lengths 512,4096 --host fast --top 2 --json", file) == 0
    rows = json.loads(file.read_text())
    found = [(row["method"], row["causal"], row["tokens"]) for row in rows]
    forms = [("linear", False), ("linear", True), ("linformer", False)]
    assert found == [(*form, tokens) for form in forms for tokens in (512, 4096)]
    assert all(row["ratio"] == row["flash_ms"] / row["ms"] and row["bound"] for row in rows)
    printed = capsys.readouterr()
    assert "times faster" in printed.out and "not measured" in printed.out
    assert run(roofline, "--methods linformer --causal") == 2
