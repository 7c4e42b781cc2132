"""`hea.calibrate`, the capture of attention calls, the bound on errors of unseen sequences, and limits of time."""

import contextlib
import copy
import io
import itertools
import json
import math
import time
import types
import warnings
import weakref

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from each import refuses
from helpers.commands import _quick, interrupt  # noqa: F401
from helpers.encoder_decoders import inputs_of, tiny
from helpers.learned import shake
from hf_efficient_attn.evaluation import analyze, calibration, capture, choices, defaults, progress, timing
from hf_efficient_attn.evaluation.progress import Execution, Step, carry_out
from hf_efficient_attn.methods import make_config
from tiny_models import SMALL, output, reloaded, tiny_batch, tiny_model


def batches(family, count, *, start=0):
    return [tiny_batch(family, seed=start + i) for i in range(count)]


@pytest.mark.parametrize(
    ("family", "methods", "dtype"),
    [
        ("bert", ["kdeformer", "longformer"], torch.float32),
        ("gpt2", ["nearfar"], torch.bfloat16),
        pytest.param("bert", None, torch.float16, marks=pytest.mark.exhaustive),
    ],
)
def test_unseen_batches_stay_below_the_error(family, methods, dtype):
    model = tiny_model(family).to(dtype)
    config = hea.calibrate(model, iter(batches(family, 4)), max_error=0.6, methods=methods, budgets=[16, 48])
    errors = []

    def visit(call):
        if (chosen := config.for_layer(call.layer)) is not None:
            errors.append(call.errors(chosen).mean().item())

    with capture.capture_attention(model, visit):
        for batch in batches(family, 8, start=100):
            capture.forward(model, batch)
    assert sum(error <= 0.6 for error in errors) >= 0.95 * len(errors) > 0
    hea.convert(model, config)
    assert model.config.efficient_attention["layers"]
    assert torch.isfinite(output(model, batches(family, 1)[0])).all()


def test_of_equal_times_the_first_method_is_taken(timed_by_columns):
    """At the fastest budget, with the seed that is given."""
    model, data = tiny_model("bert"), batches("bert", 1)
    for methods in (["longformer", "kdeformer"], ["kdeformer", "longformer"]):
        config = hea.calibrate(model, data, max_error=100.0, methods=methods, budgets=[32, 16], seed=5)
        assert [one.config for one in config.entries] == [make_config(make_config(methods[0]).with_budget(16), seed=5)]
        assert config.named_layers() == [0, 1]


def test_the_measured_time_decides(monkeypatch):
    """Not the budget: here the smaller one takes longer, in one layer."""
    small, large = (hea.LongformerConfig().with_budget(columns) for columns in (16, 32))
    compute = capture.Call.compute

    def slowed(call, config, *rest):
        time.sleep(0.1 * ((call.layer, config) in ((0, small), (1, large))))
        return compute(call, config, *rest)

    monkeypatch.setattr(capture.Call, "compute", slowed)
    options = {"max_error": 100.0, "methods": ["longformer"], "budgets": [16, 32]}
    found = hea.calibrate(tiny_model("bert"), batches("bert", 1), **options)
    assert {layer: found.for_layer(layer) for layer in found.named_layers()}.items() <= {0: large, 1: small}.items()
    assert found.named_layers()


def test_candidates_are_budgets_variants_and_the_methods_as_they_are():
    summary = capture.summarize_attention(tiny_model("bert"), tiny_batch("bert"))._replace(max_kv_len=1500)

    def configs(*methods, **options):
        options = {"summary": summary, "budgets": None, **options}
        return [one.config for one in defaults.make_candidates(methods, **options)]

    nearfar = configs("nearfar")
    assert make_config("nearfar") in nearfar and len(set(nearfar)) == len(nearfar) == 3 * 6
    assert {(one.exact_length, one.near_share) for one in nearfar} == set(
        itertools.product((32, 64, 128, 256, 512, 1024), (0.0, 0.25, 1.0))
    )
    assert {one.near_share for one in configs(hea.NearFarConfig(near_share=0.4, block_size=7))} == {0.4}
    assert hea.NearFarConfig(near_share=0.4, block_size=7) in configs(hea.NearFarConfig(near_share=0.4, block_size=7))
    kdeformer = configs("kdeformer", seed=3)
    assert hea.KDEformerConfig(seed=3) in kdeformer and len(kdeformer) == 7
    assert configs("kdeformer", budgets=[64]) == [hea.KDEformerConfig().with_budget(64)]
    assert hea.KDEformerConfig(block_size=2000) not in configs(hea.KDEformerConfig(block_size=2000))  # exact
    causal = summary._replace(is_causal=True)
    shares = {one.config.near_share for one in defaults.make_candidates(["nearfar"], [64], causal)}
    assert shares == {0.0}  # the causal form has near keys in all heads


def test_the_fastest_is_measured_again_and_exact_attention_may_be_it():
    names = [calibration.Candidate(n, hea.LongformerConfig(window_size=n)) for n in (1, 2, 3)]
    first, second, third = (choices.Choice(one, one.config, 0.1, 0.1) for one in names)
    accepted = {0: [first, second, third], 1: [first], 2: [first, second]}
    each = dict(zip([*names, None], [1.2, 1.0, 9.0, 5.0], strict=True))
    seconds = {(layer, one): taken for layer in range(3) for one, taken in each.items()}
    seconds[2, None] = 0.5
    asked = []
    again = lambda some: asked.append(some) or {(0, names[0]): 1.0, (0, names[1]): 1.1}  # noqa: E731
    assert choices.choose_each(accepted, seconds, again) == {0: first, 1: first}
    assert asked == [{0: names[:2]}]
    assert choices.choose_each(accepted, seconds) == {0: second, 1: first}
    assert choices.choose_each({2: [first, second]}, seconds) == {2: second}  # which saves nothing: `calibrate` warns


@pytest.mark.parametrize("family", ["bert", pytest.param("gpt2", marks=pytest.mark.exhaustive)])
def test_auto_is_calibrated_for_calls_whose_data_may_not_decide(family, tmp_path, timed_by_columns):
    model = tiny_model(family)
    data = batches(family, 1)
    every = hea.NearFarConfig(near_share=0.0)  # in all heads, as where the data may not decide
    nearfar = hea.calibrate(model, data, max_error=0.5, methods=[every], budgets=[16, 48])
    config = hea.calibrate(model, data, max_error=0.5, methods=["auto"], budgets=[16, 48])
    assert config.named_layers() == [0, 1]
    # Auto has as many columns as nearfar where that is accepted, and its own crossover and bound.
    for layer in nearfar.named_layers():
        columns, own = nearfar.for_layer(layer).exact_length, config.for_layer(layer)
        assert own == make_config("auto", columns=columns, max_error=0.5)
    # A limit that the budget does not keep: exact in training and in the causal form, and by the data otherwise.
    strict = hea.calibrate(model, data, max_error=1e-6, methods=["auto"], budgets=[16])
    assert [entry.config for entry in strict.entries] == [make_config("auto", max_error=1e-6, static_form="exact")]
    back = reloaded(hea.convert(model, strict), tmp_path)
    assert back.config.efficient_attention == {"layers": [0, 1], **strict.to_dict()}
    assert back.config.efficient_attention["static_form"] == "exact"


@pytest.mark.parametrize(
    ("family", "ending"),
    [*((x, None) for x in ("bert", "gpt2", "vit", "flurka")), ("flurka", IndexError), ("bert", KeyboardInterrupt)],
)
def test_the_model_is_unchanged(family, ending, monkeypatch):
    """After a calibration, a failure in the second batch and an interruption; with learned parameters too."""
    is_learned, family = family == "flurka", "bert" if family == "flurka" else family
    model, data = tiny_model(family).train(), batches(family, 2)
    if is_learned:
        shake(hea.convert(model, "flurka_linear", projection_dim=8))
    next(module for module in model.modules() if not list(module.children())).eval()

    def facts():
        own = [(module.training, vars(module).get("forward")) for module in model.modules()]
        return own, model.config.to_dict(), model.config._attn_implementation, torch.get_rng_state().tolist()

    if ending is IndexError:
        data[1] = {"input_ids": torch.full((1, 70), 10**6)}
    elif ending is KeyboardInterrupt:
        monkeypatch.setattr(capture.Call, "errors", interrupt)
    state, before = copy.deepcopy(model.state_dict()), facts()
    with torch.enable_grad():
        with pytest.raises(ending) if ending else contextlib.nullcontext():
            hea.calibrate(model, data, max_error=5.0, methods=["kdeformer"], budgets=[16])
        assert torch.is_grad_enabled()
    assert facts() == before and capture._NAME not in transformers.AttentionInterface().valid_keys()
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize(("family", "padding"), [("bert", "none"), ("gpt2", "left"), ("llama", "right")])
def test_calls_equal_the_computation_of_the_model(family, padding):
    """The captured model is exact, and measured errors are those of the converted model, with its draws and masks."""
    model, batch = tiny_model(family), tiny_batch(family, padding=padding)
    exact, calls = output(model, batch), []
    with capture.capture_attention(model, calls.append):
        captured = capture.forward(model, batch)[0]
    valid = batch.get("attention_mask", torch.ones(2, 70)).bool()
    torch.testing.assert_close(captured[valid], exact[valid], atol=1e-4, rtol=1e-4)
    assert [call.layer for call in calls] == [0, 1]
    assert all(call.is_causal == (family in ("gpt2", "llama")) for call in calls)
    # test_model_error.py compares attention_error with the dense formula on the outputs of the attention function.
    config = hea.KDEformerConfig(block_size=4, num_samples=8, num_probes=4)
    running = hea.attention_error(hea.convert(model, config, layers=[1]), batch, num_rows=None)
    torch.testing.assert_close(calls[1].errors(config), running.layers[1].estimate, atol=1e-4, rtol=2e-3)
    assert running.max() > 0.01


def test_only_one_layer_is_in_memory_at_a_time(monkeypatch):
    """The tensors of a call are released before the next layer is computed."""
    errors, references = capture.Call.errors, []

    def check_and_measure(call, *rest):
        assert all(reference() is None for layer, reference in references if layer != call.layer)
        references.append((call.layer, weakref.ref(call.exact)))
        return errors(call, *rest)

    monkeypatch.setattr(capture.Call, "errors", check_and_measure)
    hea.calibrate(tiny_model("bert"), batches("bert", 2), max_error=5.0, methods=["longformer"], budgets=[8, 16])
    assert len(references) == 8


def test_sequences_without_valid_tokens_do_not_count():
    model, data = tiny_model("bert"), tiny_batch("bert", padding="right")
    data["attention_mask"][1] = 0
    candidate = calibration.Candidate(9, hea.LongformerConfig(window_size=4))
    study = calibration.Study([candidate], capture.summarize_attention(model, data))
    data["attention_mask"][0, 60:] = 0
    with capture.capture_attention(model, study.add):
        capture.forward(model, data)
    assert study.tokens == {0: 60, 1: 60}
    assert [set(errors) for errors in study.table.values()] == [{(0, 0)}, {(0, 0)}]


def test_the_longest_batch_is_that_with_most_tokens(monkeypatch):
    """Not that with most padding: its times decide, and the error of its output is logged."""
    short, long = ({**tiny_batch("bert", padding="right")} for _ in range(2))
    short["attention_mask"], measured = (torch.arange(70) < 20).expand(2, -1).long(), []
    monkeypatch.setattr(calibration, "measure_output_error", lambda model, batch, settings: measured.append(batch))
    for data in ([short, long], [long, short]):
        hea.calibrate(tiny_model("bert"), data, max_error=100.0, methods=["longformer"], budgets=[16])
    assert all(batch is long for batch in measured) and len(measured) == 2


def test_bound_and_spread_of_errors():
    for known in ([0.1, 0.2, 0.4], [0.1, 0.2]):  # their own deviation, if it is larger than that of all layers
        deviation = math.log(2) * math.sqrt({3: 1, 2: 0.5}[len(known)])
        limit = math.exp(sum(map(math.log, known)) / len(known) + 2 * deviation * math.sqrt(1 + 1 / len(known)))
        assert choices.bound({(0, i): x for i, x in enumerate(known)}, 0.1, 0.5) == pytest.approx(limit)
    flat = {(0, i): 0.1 for i in range(4)}
    assert choices.bound(flat, 0.0, 0.5) == pytest.approx(0.1)
    assert choices.bound(flat, 0.2, 0.5) == pytest.approx(0.1 * math.exp(2 * 0.2 * math.sqrt(1.25)))
    # No bound is below an error that was measured.
    assert choices.bound({(0, i): 1e-9 if i < 50 else 0.004 for i in range(51)}, 0.0, 0.01) >= 0.004
    assert choices.bound({(0, 0): math.nan}, 0.1, 0.5) == math.inf
    assert choices.bound({(0, 0): 0.0}, 0.1, 0.5) < 0.5
    # Few sequences that are alike do not promise too much.
    one = calibration.Candidate(8, hea.LongformerConfig(window_size=4))
    table = {(0, one): {(0, i): 0.1 + 1e-6 * i for i in range(2)}}
    assert choices.spread(table, one, 0.5, 0.25) == pytest.approx(0.25 / math.sqrt(2), rel=1e-3)
    table[0, one] |= {(1, i): 0.1 for i in range(98)}
    assert choices.spread(table, one, 0.5, 0.25) == pytest.approx(0.025, rel=1e-3)
    assert choices.spread({(0, one): {(0, 0): 0.1}}, one, 0.5, 0.125) == 0.125
    assumed = [choices.assumed_spread(tokens, is_text=True) for tokens in (1, 512, 2048, 8192)]
    assert assumed == pytest.approx([0.25, 0.25, 0.25 / math.sqrt(2), 0.125])
    assert choices.assumed_spread(8192, is_text=False) == 0.25


def choice(calibrated_length=70, method="longformer"):
    """A new one for each model, since it warns once."""
    return hea.EfficientAttentionConfig(method, SMALL[method], None, calibrated_length)


def warnings_of(model, *batches):
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for batch in batches:
            model(**batch)
    return [str(one.message) for one in caught if "calibrated" in str(one.message)]


@pytest.mark.parametrize("is_mix", [False, True])
def test_the_calibrated_length_is_stored(is_mix, tmp_path):
    """In every form of the choice, through cycles of saving and loading."""
    model, mix = tiny_model("bert"), [{"layers": [i], "method": x} for i, x in enumerate(["longformer", "kdeformer"])]
    config = hea.EfficientAttentionConfig(layers=mix, calibrated_length=70) if is_mix else choice()
    assert "calibrated_length=70" in repr(config)
    for values in (config.to_dict(), config.to_dict(defaults=False)):
        again = hea.EfficientAttentionConfig.from_dict(values)
        assert (again, again.calibrated_length) == (config, 70)
    assert "seed" not in json.dumps(config.to_dict(defaults=False)) and "seed" in json.dumps(config.to_dict())
    hea.convert(model, config.to_dict())
    for turn in range(2):
        model.save_pretrained(tmp_path / str(turn))
        written = json.loads((tmp_path / str(turn) / "config.json").read_text())["efficient_attention"]
        assert (written["calibrated_length"], written["version"]) == (70, 2)
        model = transformers.AutoModel.from_pretrained(tmp_path / str(turn))
        assert hea.EfficientAttentionConfig.from_dict(model.config.efficient_attention) == config
    # It belongs to what was calibrated, and may be absent.
    model = hea.convert(tiny_model("bert"), choice(), window_size=2)
    assert "calibrated_length" not in model.config.efficient_attention
    old = {"method": "longformer", "window_size": 3, "version": 1}
    config = hea.EfficientAttentionConfig.from_dict(old)
    assert config.calibrated_length is None
    assert config.to_dict().items() >= old.items() and "calibrated_length" not in config.to_dict()
    assert warnings_of(hea.convert(model, config), tiny_batch("bert")) == []


@pytest.mark.parametrize(
    ("family", "method"), [("bert", "longformer"), ("gpt2", "longformer"), ("bert", "flurka_linear")]
)
def test_one_warning_of_a_longer_sequence(family, method):
    """Padding does not make a sequence longer."""
    model = hea.convert(tiny_model(family), choice(method=method))
    short, longer, padded = (tiny_batch(family, length=length, padding="right") for length in (70, 90, 90))
    padded["attention_mask"][:, 70:] = 0
    assert warnings_of(model, short, padded) == []
    padded["attention_mask"][0, :80] = 1
    (message,) = warnings_of(model, padded, longer)
    assert "80 tokens" in message and "up to 70 tokens" in message and "hea.calibrate" in message
    assert warnings_of(model, longer) == []
    assert warnings_of(hea.convert(hea.convert(tiny_model(family), choice()), "sdpa"), longer) == []


@pytest.mark.exhaustive
def test_compiled_models_neither_warn_nor_break():
    """The length is no condition of a graph: there are as many graphs as without a calibrated length."""
    from torch._dynamo.testing import CompileCounter

    counters = [CompileCounter(), CompileCounter()]
    for counter, limit in zip(counters, (None, 70), strict=True):
        torch._dynamo.reset()
        model = hea.convert(tiny_model("bert", num_hidden_layers=1), choice(limit))
        compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
        assert warnings_of(compiled, *(tiny_batch("bert", length=length) for length in (66, 80))) == []
    assert counters[0].frame_count == counters[1].frame_count > 0
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("ratio", "low", "high", "message"),
    [
        (0.4, 0.3, 0.5, r"at 70 tokens .* saves nothing.* is 0\.4 times.*0\.3 to 0\.5 in 3 .*longer"),
        (1.7, 1.1, 1.8, r"is 1\.7 times as fast.*1\.1 to 1\.8"),  # within the spread of the rounds
        (1.7, 1.6, 1.8, None),
    ],
)
def test_calibrate_warns_if_nothing_is_saved(ratio, low, high, message, monkeypatch):
    measured = []
    speed = timing.Timing(1.0, ratio, low, high)
    monkeypatch.setattr(calibration, "measure_speed", lambda *given: measured.append(given) or speed)
    model, options = tiny_model("bert"), {"max_error": 5.0, "methods": ["longformer"], "budgets": [16]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.warns(UserWarning, match=message) if message else contextlib.nullcontext():
            config = hea.calibrate(model, batches("bert", 2), **options)
    assert measured[0][2] == config and config.calibrated_length == 70


def test_the_speed_is_that_of_the_chosen_layers(monkeypatch):
    called, compute = set(), capture.Call.compute
    spy = lambda call, config, *rest: called.add((call.layer, config)) or compute(call, config, *rest)  # noqa: E731
    monkeypatch.setattr(capture.Call, "compute", spy)
    second = hea.EfficientAttentionConfig("longformer", {"window_size": 3}, [1], 70)
    assert calibration.measure_speed(tiny_model("bert"), tiny_batch("bert"), second).ratio > 0
    assert called == {(1, hea.LongformerConfig(window_size=3))}


@pytest.mark.parametrize("family", ["bert", "gpt2", "vit"])
def test_the_error_of_the_output_is_that_of_the_converted_model(family):
    """Of the tokens that are not masked."""
    model, batch = tiny_model(family), tiny_batch(family, padding="right")
    name = "kdeformer" if family == "gpt2" else "nearfar"  # the causal nearfar is nearly exact in so short a text
    choice = hea.EfficientAttentionConfig(name, {"block_size": 4, "num_samples": 4}, [1], 70)
    found = calibration.measure_output_error(model, batch, choice)
    exact = output(model, batch)
    valid = batch.get("attention_mask", torch.ones(exact.shape[:2])).bool()
    error = (output(hea.convert(model, choice), batch) - exact)[valid].norm() / exact[valid].norm()
    assert 1e-6 < found == pytest.approx(error.item(), rel=1e-3)


BERT_BATCH = tiny_batch("bert")
MAMBA = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}


@pytest.mark.parametrize(
    ("family", "data", "options", "message"),
    [
        ("bert", [], {}, "there are no batches"),
        ("bert", BERT_BATCH, {}, "not a batch itself"),
        ("bert", [3], {}, "a batch is a mapping"),
        *(("bert", [BERT_BATCH], {"max_error": x}, f"max_error={x}") for x in (0, -0.1, math.nan, True)),
        ("bert", [BERT_BATCH], {"max_error": 1e-9}, "no method keeps max_error=1e-09 in any layer"),
        ("bert", [BERT_BATCH], {"methods": []}, "methods is empty"),
        ("bert", [BERT_BATCH], {"methods": ["linformer"]}, "learned parameters"),
        ("bert", [BERT_BATCH], {"methods": [hea.NystromformerConfig(conv_kernel_size=3)]}, "learned parameters"),
        *(("bert", [BERT_BATCH], {"budgets": x}, "must be a list of integers above 0") for x in ([0], 16, [True])),
        ("bert", [BERT_BATCH], {"budgets": [70, 100]}, "save nothing"),
        ("bert", [BERT_BATCH], {"budgets": [1], "methods": ["eva"]}, "2 or more"),
        ("mamba", [BERT_BATCH], {}, "MambaModel"),
        ("gpt2", [BERT_BATCH], {"methods": ["nystromformer"]}, "is a decoder.*Methods that have one: .*kdeformer"),
    ],
)  # fmt: skip
def test_refused(family, data, options, message):
    model = transformers.MambaModel(transformers.MambaConfig(**MAMBA)) if family == "mamba" else tiny_model(family)
    refuses(message, hea.calibrate, model, data, **{"max_error": 0.5, "budgets": [16], **options})


@pytest.mark.parametrize("family", ["bart", "whisper"])
def test_encoder_and_decoder_have_layers_of_their_own(family, timed_by_columns):
    """Layers of the decoder contain the cross attention. A method without a causal form gets the encoder only."""
    model = tiny(family)
    data = [{**inputs_of(family), "decoder_input_ids": tiny_batch("gpt2", length=40)["input_ids"]}]
    found = hea.calibrate(model, data, max_error=9.0, methods=["nystromformer"], budgets=[8])
    assert found.named_layers() == ["encoder.layers.0", "encoder.layers.1"]
    calls = []
    with capture.capture_attention(model, calls.append):
        capture.forward(model, data[0])
    cross = next(call for call in calls if call.query.shape[2] != call.key.shape[2])
    assert len(calls) == 6 and (cross.errors(hea.LongformerConfig(window_size=4)) == 0).all()
    both = hea.calibrate(model, data, max_error=9.0, methods=["longformer"], budgets=[8])
    assert both.named_layers() == [f"{stack}.layers.{i}" for stack in ("decoder", "encoder") for i in range(2)]
    result = analyze.analyze(model, data[0], methods=[hea.LongformerConfig()], budgets=[17], max_error=9.0)
    assert len(result["layers"]) == 6
    errors = hea.attention_error(hea.convert(model, found), data[0])
    assert [one.layer for one in errors.layers if one.method != "sdpa"] == found.named_layers()
    hea.convert(model, both)


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    return clock


@pytest.mark.parametrize(
    ("stages", "factor", "minutes", "done"),
    [
        ([[10, 20, 40, 1]], 1, None, [10, 20, 40, 1]),
        ([[10, 20, 40, 1]], 1, 1.0, [10, 20]),  # the last one would fit, but the third is more informative
        ([[10, 20, 25]], 2, 1.0, [10, 20]),  # the estimates are corrected by the steps that are done
        ([[10, 20, 25]], 0.5, 0.5, [10, 20, 25]),
        ([[100, 1]], 0.01, 0.001, [100]),  # the first one is always carried out
        # The first measurement of what is long does not fit, and those that are complete can still be refined.
        ([[1, 100, 1], [9, 99]], 1, 1.0, [1, 9]),
    ],
)
def test_stages_stop_before_the_limit(stages, factor, minutes, done, clock):
    plan = [Step(f"{cost}", cost, stage=stage) for stage, costs in enumerate(stages) for cost in costs]
    found = []
    for step in carry_out(plan, Execution(minutes, _start=0.0)):
        clock.now += factor * step.cost
        found.append(step.cost)
    assert found == done


def test_the_bar_is_in_proportion_to_the_estimates_and_removed(clock, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    steps = carry_out([Step("a", 10.0), Step("b", 30.0), Step("c", 60.0)], Execution(_start=0.0))
    for share in (0, 10, 40):
        clock.now += 10.0
        assert f"{next(steps).name}: {share:3}%" in terminal.getvalue().replace("\x1b", "").rpartition("\r")[2]
    steps.close()
    assert not terminal.getvalue().rpartition("\r")[2].strip()
