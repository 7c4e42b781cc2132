"""`hf-efficient-attn analyze` on tiny models, and its choice on known errors."""

import json
import shlex

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from each import refuses
from helpers.commands import command, interrupt, read, run_json, save, shown
from helpers.encoder_decoders import t5, tiny
from hf_efficient_attn import analysis
from hf_efficient_attn.evaluation import analyze, calibration, capture, choices, pictures, timing
from hf_efficient_attn.evaluation.data import ModelData
from hf_efficient_attn.evaluation.progress import Execution, Interrupted
from hf_efficient_attn.methods import make_config
from tiny_models import tiny_batch, tiny_model

WINDOW = {"methods": [hea.LongformerConfig()], "budgets": [8], "max_error": 9.0}
QUICK = ("--methods", "longformer", "--budgets", "16", "--rows", 1, "--max-error", "9")


def test_analysis_of_every_head(made, text, capsys):
    source = made("bert", True)  # a masked language model, of whose inputs no token is masked
    result = run_json(capsys, "analyze", source, "--data", text, "--length", 60, "--rows", 2, "--budgets", "8,16",
                      "--methods", "longformer,nystromformer")  # fmt: skip
    model = transformers.BertModel.from_pretrained(source).eval()
    found = ModelData(model, source, text, longest=60, rows=2)
    calls = []
    with capture.capture_attention(model, calls.append):
        capture.forward(model, found.inputs(60, 0, 2).values)
    assert [entry["layer"] for entry in result["layers"]] == [0, 1]
    assert result["complete"] and result["left_out"] == []
    for entry, call in zip(result["layers"], calls, strict=True):
        rank = analysis.stable_rank(analysis.softmax_matrix(call.query, call.key, scale=call.scale))[0]
        assert entry["stable_rank"] == pytest.approx(rank.tolist(), rel=1e-4)
        ratio = analysis.head_to_tail(call.query, call.key, scale=call.scale)[0, :, -1]
        assert entry["head_to_tail"] == pytest.approx(ratio.tolist(), rel=1e-4)
        for label, budget in (("longformer", 8), ("nystromformer", 16)):
            expected = call.errors(make_config(label).with_budget(budget)).mean(0).tolist()
            assert entry["errors"][label][str(budget)] == pytest.approx(expected, rel=1e-4)


def test_several_files_and_folders(made, text, tmp_path, capsys):
    """Each input is of another text."""
    for name in ("w8", "w9"):
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 300)
    given = ("--data", text, "--data", tmp_path, "--length", 40, "--rows", 3, *QUICK[:4], "--max-error", "9")
    assert run_json(capsys, "analyze", made("bert"), *given)["data"] == {"name": "words.txt and 1 more", "rows": 3}
    model = transformers.BertModel.from_pretrained(made("bert"))
    found = ModelData(model, made("bert"), [text, tmp_path], longest=40, rows=3).inputs(40, 0, 3)
    alike = [row.unique().tolist() for row in found.values["input_ids"][:, 1:-1] if len(row.unique()) == 1]
    assert sorted(alike) == [[8], [9]]


def test_padding_does_not_count_in_an_analysis():
    model = tiny_model("bert")
    ids = torch.arange(5, 45)[None]
    padded = {"input_ids": torch.cat((ids, torch.full((1, 10), 7)), 1), "attention_mask": torch.ones(1, 50).long()}
    padded["attention_mask"][:, 40:] = 0
    short, long = (analyze.analyze(model, batch, **WINDOW) for batch in ({"input_ids": ids}, padded))
    for one, other in zip(short["layers"], long["layers"], strict=True):
        for key in ("stable_rank", "head_to_tail"):
            assert one[key] == pytest.approx(other[key], rel=1e-4)
        assert one["errors"]["longformer"]["8"] == pytest.approx(other["errors"]["longformer"]["8"], rel=1e-3)
    assert short["calibrated"]["calibrated_length"] == long["calibrated"]["calibrated_length"] == 40


def test_the_stable_rank_of_biased_scores_is_unknown():
    layers = analyze.analyze(t5().get_encoder(), {"input_ids": torch.arange(5, 45)[None]}, **WINDOW)["layers"]
    assert [entry["stable_rank"] for entry in layers] == [None] * len(layers) and all(x["head_to_tail"] for x in layers)


@pytest.fixture
def flat(made, text, tmp_path):
    """Arguments for a model whose second layer computes the mean of all values, which landmarks represent exactly."""
    model = transformers.BertModel.from_pretrained(made("bert"))
    with torch.no_grad():
        model.encoder.layer[1].attention.self.query.weight.zero_()
        model.encoder.layer[1].attention.self.query.bias.zero_()
    folder = save(tmp_path / "a model", model)
    return ["analyze", folder, "--data", text, "--length", 60, "--rows", 2, "--budgets", "4,8"]


def test_the_command_applies_the_recommendation(flat, tmp_path, capsys, timed_by_columns):
    """One method for the layers that keep the limit, with its error, and a quoted command that can be run."""
    result = run_json(capsys, *flat, "--methods", "longformer,nystromformer", "--max-error", "0.1")
    best = result["recommended"]
    (one,) = best["layers"]
    chosen = {"layer": 1, "method": "nystromformer", "columns": 4, "settings": {"num_landmarks": 2}}
    assert chosen.items() <= one.items() and one["error"] < 1e-3 and best["exact_layers"] == [0]
    assert best["speed_up"] > 0 and 0 <= best["output_error"] < 0.1
    settings = {"num_landmarks": 2, "layers": [1], "calibrated_length": 60, "version": 2}
    assert result["calibrated"] == {"method": "nystromformer", **settings}
    written, _, words = result["command"].partition(" > calibrated.json && ")
    assert shlex.split(written)[:2] == ["printf", "%s"] and json.loads(shlex.split(written)[2]) == result["calibrated"]
    assert shlex.split(words) == ["hf-efficient-attn", "convert", str(flat[1]), "--config", "calibrated.json",
                                  "-o", "a model-efficient"]  # fmt: skip


def test_the_command_names_the_file_that_was_written(flat, tmp_path, figures, capsys, monkeypatch, timed_by_columns):
    """Somebody else's analysis.json appears while the model is measured. The file stores the calibrated length."""
    inside, work = tmp_path / "in side", analyze.analyze_checkpoint

    def meanwhile(*arguments, **options):
        inside.mkdir()
        (inside / "analysis.json").write_text("theirs")
        return work(*arguments, **options)

    monkeypatch.setattr(analyze, "analyze_checkpoint", meanwhile)
    result = run_json(capsys, *flat, "--methods", "nystromformer", "--output", inside)
    words, mine = shlex.split(result["command"]), inside / "analysis-1.json"
    assert words[words.index("--config") + 1] == str(mine)
    assert json.loads(mine.read_text()) == result and result["machine"]["dtype"] == "float32"
    assert (inside / "analysis.json").read_text() == "theirs"
    assert command(*words[1:-1], tmp_path / "out") == 0
    settings = transformers.AutoModel.from_pretrained(tmp_path / "out").config.efficient_attention
    assert settings["calibrated_length"] == 60
    assert settings["num_landmarks"] == 2 and settings["pinv"] == "iterative", "a model's config is complete"
    settings = hea.EfficientAttentionConfig.from_dict(settings)
    assert settings.for_layer(1) == hea.NystromformerConfig(num_landmarks=2) and settings.for_layer(0) is None


def test_one_choice_saves_the_most():
    errors = {("longformer", 9): (0.05, 0.5, 0.5), ("kdeformer", 16): (0.05, 0.06, 0.5)}  # of the layers
    candidates = [calibration.Candidate(columns, make_config(label).with_budget(columns)) for label, columns in errors]
    rows = zip(candidates, errors.values(), strict=True)
    table = {(layer, one): {(0, 0): x, (0, 1): x} for one, layers in rows for layer, x in enumerate(layers)}

    def columns(chosen):
        return {layer: one.candidate.columns for layer, one in chosen.items()}

    def taken(exact):
        return {(layer, one): one.columns if one else exact for layer in range(3) for one in (*candidates, None)}

    accepted = choices.accept(table, candidates, 0.1, 0.25)
    assert columns(choices.choose_one(accepted, taken(100))) == {0: 16, 1: 16}
    # If exact attention takes 18, two layers with 16 columns save 4, and one with 9 columns saves 9.
    assert columns(choices.choose_one(accepted, taken(18))) == {0: 9}
    assert columns(choices.choose_each(accepted, taken(100))) == {0: 9, 1: 16}
    assert choices.choose_one(choices.accept(table, candidates, 0.01, 0.25), taken(100)) == {}
    # What takes about as long is measured again, with exact attention in the layers that it leaves exact.
    asked = []
    again = lambda some: asked.append(some) or {(0, candidates[0]): 99.0}  # noqa: E731
    assert columns(choices.choose_one(accepted, taken(18), again)) == {0: 16, 1: 16}
    assert asked == [{0: [None, *candidates], 1: [None, candidates[1]]}]


def test_both_recommendations_keep_one_limit(made, text, capsys):
    arguments = ["analyze", made("bert"), "--data", text, "--length", 60, "--rows", 2, "--budgets", "16,32"]
    options = ("--max-error", "--calibrate")
    one, each = (run_json(capsys, *arguments, option, "0.6")["recommended"] for option in options)
    for found in (one, each):
        assert found["layers"] and all(entry["error"] <= entry["bound"] <= 0.6 for entry in found["layers"])
    assert len({(entry["method"], entry["columns"]) for entry in one["layers"]}) == 1
    assert set(one["exact_layers"]) >= set(each["exact_layers"])


def test_default_length(made, tmp_path, capsys, photographs, monkeypatch):
    """2,048 tokens, or the whole text; pictures are resized."""
    words = tmp_path / "short.txt"
    words.write_text(" ".join(f"w{i * i % 50}" for i in range(98)))
    short = run_json(capsys, "analyze", made("bert"), "--data", words, *QUICK)
    assert short["tokens"] == 100 and "has only 100 tokens" in short["notes"][0]
    assert short["max_length"] is None and "--max-length" not in short["command"]
    monkeypatch.setattr(analyze, "DEFAULT_LENGTH", 256)
    words.write_text(" ".join(f"w{i * i % 50}" for i in range(500)))
    long = run_json(capsys, "analyze", made("bert"), "--data", words, *QUICK)
    assert long["tokens"] == long["calibrated"]["calibrated_length"] == long["max_length"] == 256
    assert "has 128 positions" in long["notes"][0] and "--max-length 256" in long["command"]
    pictures = run_json(capsys, "analyze", made("deit", True), "--data", photographs, *QUICK)
    assert pictures["pixels"] == 64 and pictures["tokens"] == 16**2 + 2
    assert "64 x 64 pixels" in pictures["notes"][0]


def test_properties_of_the_first_input_if_it_is_short(monkeypatch):
    model, batch = tiny_model("bert"), tiny_batch("bert", batch=3)
    three, one = (analyze.analyze(model, {"input_ids": batch["input_ids"][:n]}, **WINDOW) for n in (3, 1))
    for entry, other in zip(three["layers"], one["layers"], strict=True):
        assert entry["stable_rank"] == pytest.approx(other["stable_rank"], rel=1e-4)
        assert entry["errors"]["longformer"]["8"] != pytest.approx(other["errors"]["longformer"]["8"], rel=1e-4)
    monkeypatch.setattr(analyze, "_MAX_LENGTH", 60)
    long = analyze.analyze(model, batch, **WINDOW)
    assert [entry["stable_rank"] for entry in long["layers"]] == [None, None]
    assert all(entry["errors"]["longformer"]["8"] for entry in long["layers"])


def test_rows_as_they_finish_and_a_limit_of_time():
    events, given = [], (tiny_model("bert"), tiny_batch("bert"))
    options = {**WINDOW, "budgets": [8, 70, 99]}  # 70 tokens cost as much exactly
    callbacks = [lambda row: events.append(row["layer"]), lambda about: events.append(about["tokens"])]
    assert analyze.analyze(*given, **options, execution=Execution(None, *callbacks))["budgets"] == [8]
    assert events == [70, 0, 1]
    found = analyze.analyze(*given, **WINDOW, execution=Execution(1e-9))
    assert [entry["layer"] for entry in found["layers"]] == [0] and found["left_out"] == [1]
    assert found["recommended"]["exact_layers"] == [1]


def test_all_layers_are_measured_a_little_before_any_is_measured_in_full(monkeypatch):
    """Every method at one budget on one input; then everything on one input, and on the others."""
    add, clock, seen = calibration.Study.add, [0.0], []

    def slow(study, call, some, first):
        clock[0] += len(some) * len(call.query)
        seen.append((call.layer, first, len(call.query), len(some)))
        return add(study, call, some, first)

    monkeypatch.setattr(calibration.Study, "add", slow)
    monkeypatch.setattr("hf_efficient_attn.evaluation.progress.time.monotonic", lambda: clock[0])
    given = tiny_model("bert"), tiny_batch("bert", batch=3)
    options = {**WINDOW, "methods": [*map(make_config, ("longformer", "kdeformer"))], "budgets": [8, 16, 32]}
    rows = []

    def run(seconds):
        seen.clear()
        rows.clear()
        return analyze.analyze(*given, **options, execution=Execution(seconds / 60, rows.append, _start=clock[0]))

    found = run(4.1)
    assert seen == [(0, 0, 1, 2), (1, 0, 1, 2)]
    assert (found["complete"], found["left_out"], found["partial"]) == (False, [], [0, 1])
    assert rows == found["layers"] and all(entry["stable_rank"] is None for entry in rows)
    for entry in rows:
        assert {key: heads is not None for key, heads in entry["errors"]["kdeformer"].items()} == {
            "8": False, "16": True, "32": False,
        }  # fmt: skip
    assert {one["columns"] for one in found["recommended"]["layers"]} == {16}
    found = run(10_000)
    assert seen == [(layer, *rest) for rest in ((0, 1, 2), (0, 1, 4), (1, 2, 6)) for layer in (0, 1)]
    assert (found["complete"], found["left_out"], found["partial"]) == (True, [], [])
    whole = analyze.analyze(*given, **options, execution=Execution())
    assert seen[6:] == [(layer, 0, 3, 6) for layer in (0, 1)]
    for one, other in zip(found["layers"], whole["layers"], strict=True):
        assert one["stable_rank"] == pytest.approx(other["stable_rank"])
        for label, sizes in other["errors"].items():
            for key, heads in sizes.items():
                assert one["errors"][label][key] == pytest.approx(heads, rel=1e-3)


def test_the_command_says_what_was_measured_in_part(made, text, tmp_path, figures, capsys):
    """And draws it."""
    pytest.importorskip("matplotlib")
    line = ["analyze", made("bert"), "--data", text, "--length", 60, *QUICK, "--budgets", "8,16", "--output", tmp_path]
    out = " ".join(shown(capsys, *line, "--minutes", 1e-9).out.split())
    assert "Layers that were not measured and stay exact: 1. Layers that were measured in part: 0. Give" in out
    assert "| - 0." in out
    assert read(tmp_path, "analysis.json")["partial"] == [0]


def test_an_interruption_keeps_the_complete_layers(made, text, tmp_path, capsys, monkeypatch):
    """All of them, if it comes during the last measurement."""
    errors = capture.Call.errors

    def interrupted_in(owner, name, function):
        model = tiny_model("bert").train()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, function)
            with pytest.raises(Interrupted) as raised:
                analyze.analyze(model, tiny_batch("bert"), **WINDOW)
        assert model.training and model.config._attn_implementation == "sdpa"
        return raised.value.result

    def in_layer_1(call, *rest):
        return interrupt() if call.layer == 1 else errors(call, *rest)

    result = interrupted_in(calibration, "measure_speed", interrupt)
    assert (result["complete"], result["left_out"]) == (True, [])
    assert result["calibrated"] is not None and result["recommended"]["speed_up"] is None
    result = interrupted_in(capture.Call, "errors", in_layer_1)
    assert [entry["layer"] for entry in result["layers"]] == [0]
    assert (result["complete"], result["left_out"]) == (False, [1])
    assert [entry["layer"] for entry in result["recommended"]["layers"]] == [0]
    assert result["recommended"]["exact_layers"] == [1]
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(capture.Call, "errors", in_layer_1)
    line = ["analyze", made("bert"), "--data", text, "--length", 60, *QUICK, "--output", tmp_path / "out"]
    out, err = shown(capsys, *line, status=130)
    assert err == "error: interrupted\n" and "| 0     |" in out and "| 1     |" not in out
    assert "Layers that were not measured and stay exact: 1." in out
    written = read(tmp_path / "out", "analysis.json")
    assert not written["complete"] and written["source"]


def test_the_report(flat, capsys, timed_by_columns):
    out, err = shown(capsys, *flat, "--methods", "nystromformer,longformer", "--max-error", "0.1")
    assert err == ""
    model, about, *_ = out.splitlines()
    assert model == f"{flat[1].parent.name}/a model, words.txt, 2 texts of 60 tokens"
    assert about.endswith(", cpu, float32")
    assert "| layer | stable rank | tail/head |" in out and "    0: exact\n" in out
    assert "Recommendation for errors below .10 on unseen inputs of up to 60 tokens:\n    1: nystromformer, 4 c" in out
    assert "\nExpected: mean error " in out and "mean error .00 " not in out and "Measured here: attention is " in out
    saves = "this saves nothing" not in out
    assert f"To apply it{'' if saves else ' all the same'}:\n    printf " in out
    out = " ".join(shown(capsys, *flat, "--methods", "longformer", "--calibrate", "1e-7").out.split())
    assert "No method keeps an error of 1e-07 in any layer. Allow a larger error" in out
    assert "hf-efficient-attn convert" not in out
    out = shown(capsys, *flat, "--methods", "nystromformer", "--max-error", "9").out
    assert ": exact\n" not in out  # both layers are converted


def test_a_method_that_fails_does_not_own_the_colours(flat, figures, tmp_path, capsys):
    from matplotlib.colors import LogNorm

    result = run_json(capsys, *flat, "--methods", "longformer,nystromformer", "--output", tmp_path)
    errors = [entry["errors"]["longformer"] for entry in result["layers"]]
    largest = max(max(heads) for entry in result["layers"] for e in entry["errors"].values() for heads in e.values())
    errors[1]["8"][0] = 7.0
    for entry in result["layers"]:
        entry["head_to_tail"] = None
    pictures.draw_analysis(result, tmp_path / "a.png")
    for figure, end in zip(figures, (largest, 1.0), strict=True):
        assert figure._suptitle.get_text() == pictures.title_of(result)
        images = {axes.get_title(): axes.images[0] for axes in figure.axes if axes.images and axes.get_title()}
        assert isinstance(images["stable rank of the attention matrix"].norm, LogNorm)
        assert ("tail / head" in images) == (end == largest)
        maps = [image for title, image in images.items() if "columns" in title]
        assert len(maps) == 4 and {(image.norm.vmin, image.norm.vmax) for image in maps} == {(0.0, end)}
        assert {image.colorbar.extend for image in maps} == {"max" if end == 1.0 else "neither"}


# Encoder-decoders, with `benchmark` and `convert`.


@pytest.mark.parametrize("make", [lambda: tiny("bart"), t5], ids=["bart", "t5"])
def test_the_commands_take_both_stacks(make, text, tmp_path, capsys):
    """`benchmark` measures the encoder, and `analyze` names the layers of both stacks in a config for `convert`."""
    folder, out, file = save(tmp_path / "model", make(), "gpt2"), tmp_path / "out", tmp_path / "analysis.json"
    methods = "longformer:window_size=4" + (",nystromformer:num_landmarks=4" if make is not t5 else "")
    line = ("benchmark", folder, "--methods", methods, "--lengths", "40,80", "--rounds", 1, "--no-memory")
    found = run_json(capsys, *line, "--data", text)
    assert found["task"] == "text-to-text" and found["agreement"] == "top1"
    assert any("The methods are in the encoder" in note for note in found["notes"])
    rows = [row for row in found["measurements"] if row["attention"] != "sdpa"]
    assert len(rows) == 2 * (1 if make is t5 else 2)
    for row in rows:
        assert row["settings"]["layers"] == ["encoder"] and len(row["layer_errors"]) == 2
        assert min(row["layer_errors"]) > 0 and 0 <= row["agreement"] <= 1
    line = ("analyze", folder, "--data", text, "--length", 100, "--rows", 2, "--methods", "longformer")
    found = run_json(capsys, *line, "--budgets", "17,33", "--max-error", 9.0)
    names = [entry["name"] for entry in found["layers"]]
    assert len(set(names)) == 6 and sum(name.startswith("encoder.") for name in names) == 2
    assert {entry["layer"].split(".")[0] for entry in found["layers"]} == {"encoder", "decoder"}
    settings = hea.EfficientAttentionConfig.from_dict(found["calibrated"])
    assert {str(layer).split(".")[0] for layer in settings.named_layers()} <= {"encoder", "decoder"}
    hea.convert(make(), settings)
    file.write_text(json.dumps(found))
    shown(capsys, "convert", folder, "--config", file, "-o", out)
    line = ("convert", folder, "--method", "longformer", "--layers", "encoder", "-o", out, "--force")
    assert f"layers: {', '.join(entry['layer'] for entry in found['layers'][:2])}\n" in shown(capsys, *line).out
    assert read(out)["efficient_attention"]["layers"] == ["encoder"]


def test_the_logits_of_a_decoder_take_little_memory(monkeypatch):
    """Less than logits of all positions of the encoder is free, and more than all that a layer of it makes."""
    monkeypatch.setattr(timing, "free_memory", lambda device: 100 << 20)
    model = tiny("bart", vocab_size=100_000)
    timing.check_memory(model, 1500)
    refuses("GiB of memory", timing.check_memory, model, 1500, 10_000)
