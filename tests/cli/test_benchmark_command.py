"""`hf-efficient-attn benchmark` on tiny models."""

import collections
import dataclasses
import itertools
import json
import math
import pathlib

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from converted import save, tokenizer_for
from helpers.commands import NOTHING_COMPLETE, TEXT, command, interrupt, read, refused, run_json, shown, tree
from helpers.encoder_decoders import tiny
from helpers.learned import shake
from hf_efficient_attn.checkpoint import load_model, open_checkpoint
from hf_efficient_attn.evaluation import benchmark, capture, comparison, pictures, timing
from hf_efficient_attn.evaluation.comparison import Procedure
from hf_efficient_attn.evaluation.data import ModelData, task_of
from hf_efficient_attn.evaluation.progress import Execution
from hf_efficient_attn.io import reading
from hf_efficient_attn.methods import make_config
from hf_efficient_attn.models.t2t_vit import T2TViTConfig, T2TViTForImageClassification
from tiny_models import IMAGES, SIZES, SMALL, T2T_VIT, tiny_model

QUICK = Procedure(rounds=1, memory=False)
FAST = ("--rounds", 1, "--no-memory")
WINDOW = {"window": hea.LongformerConfig(window_size=3)}
SMALL_METHODS = "kdeformer:block_size=4:num_samples=8,longformer:window_size=4"
DISTILL = "--method linear --set feature_map=hedgehog --batch-size 2 --steps 2"
# What `benchmark` compares if no method is named; in decoders without the last.
COMPARED = ["auto", "kdeformer", "nearfar", "nystromformer"]


def open_model(folder):
    return load_model(open_checkpoint(folder)).eval()


def bench(*arguments, minutes=None, data=None, **procedure):
    """The result of a quick benchmark of a folder, with methods and lengths."""
    return benchmark.benchmark_checkpoint(
        *arguments, data=data, procedure=QUICK._replace(**procedure), execution=Execution(minutes=minutes)
    )


def save_converted(folder, source, method, **options):
    return save(folder, hea.convert(open_model(source), method, **options), "bert" if "bert" in source.name else "gpt2")


def has_note(result, *parts):
    return any(all(part in note for part in parts) for note in result["notes"])


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "task", "agreement", "more"),
    [
        ("bert", "masked-lm", "top1", ()),
        ("gpt2", "causal-lm", "perplexity_ratio", ()),
        ("vit", "embedding", "cosine", ("--dtype", "bfloat16", "--device", "cpu:0")),
        ("deit", "image-classification", "top1", ()),
    ],
)
def test_measurements_for_every_task(family, task, agreement, more, made, text, photographs, capsys):
    """Of the converted model: errors of layers and of the last hidden states are means over two of three inputs."""
    source, is_image = made(family, family != "vit"), family in IMAGES
    data = photographs if is_image else text
    result = run_json(capsys, "benchmark", source, "--methods", SMALL_METHODS, "--lengths", "40,80", "--rounds", 1,
                      "--rows", 3, "--data", data, *more)  # fmt: skip
    assert (result["format"], result["task"], result["agreement"]) == (1, task, agreement)
    assert result["source"] == f"{source.parent.name}/{source.name}"
    assert set(result["machine"]) == {"cpu", "threads", "device", "dtype", "torch", "transformers", "hf_efficient_attn"}
    assert result["machine"]["hf_efficient_attn"] == hea.__version__ and result["complete"]
    assert result["machine"]["dtype"] == (more[1] if more else "float32") and result["machine"]["device"][:3] == "cpu"
    assert result["data"] == {"name": data.name, "rows": 3}
    rows = result["measurements"]
    labels = ["sdpa", "kdeformer (block_size=4, num_samples=8)", "longformer (window_size=4)"]
    # A picture has a square number of patch tokens, and class tokens in addition.
    lengths = [40, 80] if not is_image else [36 + (family == "deit") + 1, 81 + (family == "deit") + 1]
    assert [(row["length"], row["attention"]) for row in rows] == [(n, label) for n in lengths for label in labels]
    assert list(result["pays_from"]) == labels[1:]
    perplexity = {row["length"]: row["perplexity"] for row in rows if row["method"] == "sdpa"}
    for row in rows:
        assert row["seconds"] > 0 and row["batch"] == 1
        assert (row["perplexity"] is not None) == task.endswith("-lm")
        for speed in ("first_token_seconds", "tokens_per_second"):
            assert (row[speed] or 0.0) > 0.0 if task == "causal-lm" else row[speed] is None
        if task == "causal-lm":
            assert row["agreement"] == pytest.approx(row["perplexity"] / perplexity[row["length"]], rel=1e-6)
        assert row["method"] == row["attention"].partition(" ")[0] and len(row["layer_errors"]) == 2
        assert row["error"] == pytest.approx(sum(row["layer_errors"]) / 2)
        if row["method"] == "sdpa":
            assert (row["speed_up"], row["error"], row["settings"], row["output_error"]) == (1.0, 0.0, {}, 0.0)
            assert row["agreement"] == pytest.approx(1.0)
        else:
            assert 0.01 < row["error"] < 2.0 and 0.0 <= row["agreement"] < 20.0
            assert row["settings"]["seed"] == 0
    assert is_image == has_note(result, "pixels")
    config, length = hea.LongformerConfig(window_size=4), lengths[1]
    exact, converted = (open_model(source).to(getattr(torch, result["machine"]["dtype"])) for _ in range(2))
    hea.convert(converted, config)
    inputs, errors = ModelData(exact, source, data, longest=80, rows=3).inputs(80, 0, 3), []
    with capture.capture_attention(exact, lambda call: errors.append(call.errors(config)[:2].mean().item())):
        capture.forward(exact, inputs.values)
    assert rows[-1]["layer_errors"] == pytest.approx(errors, rel=1e-4 if not more else 0.1)
    states = [one.base_model(**inputs.values).last_hidden_state[:2].double().flatten(1) for one in (exact, converted)]
    error = ((states[1] - states[0]).norm(dim=1) / states[0].norm(dim=1)).mean().item()
    assert rows[-1]["output_error"] == pytest.approx(error, rel=1e-4 if not more else 0.1)
    if family == "gpt2":
        ids = torch.tensor(tokenizer_for(family)(TEXT)["input_ids"])[: 3 * length].view(3, length)
        losses = [one(ids, labels=ids).loss.item() for one in (exact, converted)]
        assert rows[-1]["agreement"] == pytest.approx(math.exp(losses[1] - losses[0]), rel=1e-4)
        perplexities = [rows[-3]["perplexity"], rows[-1]["perplexity"]]
        assert perplexities == pytest.approx([math.exp(loss) for loss in losses], rel=1e-4)


def test_length_of_a_picture_is_that_of_its_longest_attention(tmp_path, capsys):
    """The first stage of T2T-ViT has a token for every second pixel, though patches have eight pixels."""
    T2TViTForImageClassification(T2TViTConfig(**T2T_VIT)).save_pretrained(tmp_path / "t2t")
    result = run_json(capsys, "benchmark", tmp_path / "t2t", "--lengths", "256,600", "--methods", "linear", *FAST)
    assert [row["length"] for row in result["measurements"]] == [256, 256, 576, 576]
    assert has_note(result, "48 x 48 pixels for 576 tokens")


@pytest.mark.parametrize("method", ["sdpa", "linear"])
def test_the_speed_of_generation(method, made, monkeypatch):
    """Medians over the rounds of greedy search; all inputs of the batch count."""
    model = transformers.GPT2LMHeadModel.from_pretrained(made("gpt2", True)).eval()
    hea.convert(model, method, **SMALL.get(method, {}))
    calls = []
    model.register_forward_hook(lambda module, args, kwargs, out: calls.append(kwargs["input_ids"]), with_kwargs=True)
    # For each of four generations, the first without a count: its start, the first token, and three more.
    steps = ([1.0] * 5, [0.0, 2.0, 1.0, 1.0, 2.0], [0.0, 1.0, 3.0, 3.0, 2.0], [0.0, 9.0, 1.0, 2.0, 2.0])
    times = itertools.accumulate(itertools.chain(*steps))
    monkeypatch.setattr(timing, "timer", lambda: next(times))
    found = timing.time_generation(model, torch.arange(5, 55)[None].repeat(3, 1), 4, 3)
    assert [ids.shape[1] for ids in calls] == [16, 1, 1, 1, *[50, 1, 1, 1] * 3]
    assert found == (2.0, 3 * 3 / 5.0)


def test_all_tokens_but_the_first_or_none_are_generated(made, text):
    for new in (0, 8):
        rows = bench(made("gpt2", True), WINDOW, [9], data=text, rows=1, new_tokens=new)["measurements"]
        assert [row["tokens_per_second"] is not None for row in rows] == [new > 0] * 2


def test_masked_tokens_are_predicted(made, text):
    model = transformers.BertForMaskedLM.from_pretrained(made("bert", True)).eval()
    inputs = ModelData(model, made("bert", True), text, longest=40, rows=2).inputs(40, 0, 2)
    moved = inputs.to(torch.device("meta"))
    assert {moved.masked.device.type, *(x.device.type for x in moved.values.values())} == {"meta"}
    ids, masked = inputs.values["input_ids"], inputs.masked
    assert torch.equal(ids == 4, masked) and masked.sum(1).tolist() == [5, 5]
    assert ids[:, [0, -1]].tolist() == [[2, 3], [2, 3]]
    plain = torch.tensor(tokenizer_for("bert")(TEXT, add_special_tokens=False)["input_ids"])
    labels = torch.full((2, 40), -100)
    labels[:, 1:-1] = torch.where(masked[:, 1:-1], plain[:80].view(2, 40)[:, :38], -100)
    with torch.no_grad():
        output = model(**inputs.values, labels=labels)
        guesses, losses, _ = comparison.answer_of("masked-lm", inputs, output, None)
    assert guesses.tolist() == output.logits[masked].argmax(-1).tolist()
    assert losses.shape == (10,) and losses.mean().item() == pytest.approx(output.loss.item(), rel=1e-5)
    other = torch.cat((guesses[:3] + 1, guesses[3:]))
    assert comparison.compare("masked-lm", other, guesses).tolist() == [0.0] * 3 + [1.0] * 7


def test_no_errors_on_random_inputs(made):
    result = bench(made("deit", True), WINDOW, [66])
    assert result["data"]["name"] == "generated" and has_note(result, "generated")
    for row in result["measurements"]:
        assert (row["error"], row["agreement"], row["layer_errors"]) == (None, None, [])
        assert row["seconds"] > 0


def test_the_first_token_of_pictures_is_global(made, photographs, capsys):
    """In `analyze` and `hea.calibrate` alike: classifiers of pictures read it."""
    source = made("deit", True)
    assert bench(source, None, [66], data=photographs, rows=1)["labels"] == COMPARED
    found = run_json(capsys, "analyze", source, "--data", photographs, "--length", 66, "--rows", 1, "--budgets", "16")
    labels = list(found["layers"][0]["errors"])
    assert "longformer (global_tokens=1)" in labels and "longformer" not in labels


def test_default_methods_and_lengths(made, text, tmp_path, monkeypatch):
    """The lengths go up to four times the positions, as far as the text and a minute allow."""

    def lengths_of(found):
        return {row["length"] for row in found["measurements"]}

    found = bench(made("bert"), data=text, rows=1)
    assert list(found["pays_from"]) == COMPARED and lengths_of(found) == {128, 256, 512}
    assert has_note(found, "128 positions")
    assert list(bench(made("gpt2", True), None, [20], data=text, rows=1)["pays_from"]) == COMPARED[:3]
    (tmp_path / "short.txt").write_text(" ".join(TEXT.split()[:200]))
    assert lengths_of(bench(made("bert"), WINDOW, data=tmp_path / "short.txt", rows=1)) == {128}
    monkeypatch.setattr(benchmark, "_DEFAULT_MINUTES", 1e-6)
    found = bench(made("bert"), WINDOW)
    assert lengths_of(found) == {128} and found["data"] == {"name": "pydoc_data.topics", "rows": 4}
    assert has_note(found, "Python's own documentation")
    assert has_note(found, "Not measured: window at 128 tokens, sdpa at 256 tokens", "window at 512 tokens")


def test_lengths_beyond_the_positions_of_the_model(made, text):
    before = (made("bert") / "config.json").read_bytes()
    assert has_note(bench(made("bert"), WINDOW, [300], data=text, rows=1), "128 positions", "up to 300")
    assert (made("bert") / "config.json").read_bytes() == before
    assert has_note(bench(made("llama", True), WINDOW, [150], data=text, rows=1), "rotary")


def _row(attention, speed_up, error, length=4096, spread=0.01):
    """A measurement whose rounds differ by `spread` to either side; 0 if there was a single one."""
    times = {"seconds": 1.0, "speed_up": speed_up, "speed_up_min": speed_up - spread, "speed_up_max": speed_up + spread}
    output_error = None if error == 0.2 else 0.5  # as if it could not be compared
    return {"attention": attention, "length": length, "error": error, "output_error": output_error, **times}


@pytest.mark.parametrize(
    ("rows", "recommended", "why"),
    [
        ([("sdpa", 1.0, 0.0), ("a", 4.0, 0.3), ("b", 2.0, 0.1), ("c", 3.0, 0.05), ("d", 1.0, 0.0)], "c",
         "Recommended at 4096 tokens: c, 3.0 times as fast as exact attention with an error of 0.050 in attention and "
         "of 0.500 in the output, the fastest with an error of at most 0.1."),
        ([("a", 4.0, 0.3), ("b", 2.0, 0.2), ("d", 1.0, 0.0)], "b", "none of them keeps 0.1"),
        ([("a", 1.15, 0.3), ("b", 0.5, 0.0)], "sdpa", "exact attention (sdpa)"),
        # A gain that is smaller than the spread of the rounds is none; a single round has that of a busy machine.
        *(([("a", gain, 0.01, 4096, spread), ("b", 0.9, 0.0)], recommended, "")
          for gain, spread, recommended in ((1.3, 0.2, "sdpa"), (1.3, 0.1, "a"), (1.3, 0.0, "sdpa"), (1.5, 0.0, "a"))),
        # Nothing to compare, no errors, and a last length that is not complete.
        ([], None, None),
        ([("sdpa", 1.0, 0.0), ("a", 2.0, 0.0)], None, None),
        ([("a", 2.0, None), ("b", 3.0, None)], None, None),
        ([("a", 2.0, 0.2), ("b", 3.0, 0.3), ("a", 9.0, 0.4, 8192)], "a", "at 4096 tokens: a"),
    ],
)  # fmt: skip
def test_recommendations(rows, recommended, why):
    rows = [_row(*row) for row in rows]
    found = benchmark.conclude(rows, "abcd")
    assert found["recommended"] == recommended
    assert found["recommendation"] is None if why is None else why in found["recommendation"]
    if why is not None and rows[-1]["speed_up"] < 1 and len(rows) == 2:
        assert found["pays_from"]["a"] == (None if recommended == "sdpa" else 4096)


@pytest.mark.parametrize(
    ("speeds", "expected", "where"),
    [
        ([(512, 0.5), (1024, 1.2), (2048, 3.0)], 1024, "from 1024 tokens on"),
        ([(2048, 3.0), (512, 2.0), (1024, 1.2)], 512, "at all measured lengths"),
        ([(512, 1.5), (1024, 0.9), (2048, 3.0)], 2048, "from 2048 tokens on"),
        ([(512, 1.5), (1024, 1.9), (2048, 1.15)], None,
         "does not pay off: it is 1.1 times as fast as exact attention at 2048 tokens"),
        ([(512, 1.0)], None,
         "m is not decided: it is 1.0 times as fast as exact attention at 512 tokens, and it was not measured at 2048"),
    ],
)  # fmt: skip
def test_pays_from(speeds, expected, where):
    rows = [_row("sdpa", 1.0, 0.0, 2048), *(_row("m", speed, 0.0, length) for length, speed in speeds)]
    found = benchmark.conclude(rows, ["m", "not measured"])
    assert found["pays_from"] == {"m": expected} and where in found["summary"][0]


@pytest.mark.parametrize("method", ["longformer", "flurka_performer"])
def test_a_converted_checkpoint_against_exact_attention(method, made, text, tmp_path):
    """With its own parameters, not those that a conversion starts from."""
    torch.manual_seed(0)
    model = shake(hea.convert(open_model(made("bert")), method, layers=[1], **SMALL[method]))  # as after training
    is_learned = any("learned_parameters" in name for name in model.state_dict())
    result = bench(save(tmp_path, model), None, [70], data=text)
    exact, own = result["measurements"]
    assert list(result["pays_from"]) == [f"{method}, layers 1"]
    assert (own["method"], own["settings"]["layers"]) == (method, [1])
    assert {**SMALL[method], **own["settings"]} == own["settings"]
    assert exact["error"] == own["layer_errors"][0] == 0.0 and own["layer_errors"][1] > 0.1
    assert own["agreement"] < exact["agreement"]
    fresh = {"fresh": hea.EfficientAttentionConfig(method, SMALL[method], [1])}
    other = bench(made("bert"), fresh, [70], data=text)["measurements"][1]
    assert (other["layer_errors"][1] == pytest.approx(own["layer_errors"][1], rel=1e-6)) != is_learned


def test_a_checkpoint_with_a_mix(made, text, tmp_path):
    mix = [{"layers": [0], "method": "linear"}, {"layers": [1], "method": "longformer", "window_size": 2}]
    found = bench(save_converted(tmp_path, made("bert"), {"layers": mix}), None, [60], data=text, rows=1)
    assert list(found["pays_from"]) == ["linear and longformer, layers 0-1"]
    assert [one["method"] for one in found["measurements"][1]["settings"]["layers"]] == ["linear", "longformer"]
    assert all(error > 0.01 for error in found["measurements"][1]["layer_errors"])


def test_copies_share_their_weights():
    model = tiny_model("bert")
    other = comparison.copy_with_shared_weights(model)
    assert {id(p) for p in model.parameters()} == {id(p) for p in other.parameters()}
    hea.convert(other, "linformer", projection_dim=4)
    assert model.config._attn_implementation == "sdpa" and "learned" not in repr(list(model.state_dict()))


def test_peak_memory():
    work = lambda: (torch.ones(4, 2**18) + 1.0).relu_().sum()  # noqa: E731 (4 MiB, twice)
    assert [timing.peak_of(work) // 2**20 for _ in range(2)] == [8, 8]


def test_table_and_files(made, text, figures, tmp_path, capsys):
    folder = tmp_path / "out"
    line = ["benchmark", made("bert"), "--methods", SMALL_METHODS, "--lengths", "20,30,60", "--rounds", 1,
            "--batch", 3, "--data", text, "--output", folder]  # fmt: skip
    out, err = shown(capsys, *line)
    assert err == ""
    for part in ("| tokens | attention", "longformer (window_size=4)", "3 inputs of words.txt", "pay",
                 "seconds: median of the forward passes of 3 inputs.", "\nRecommended at 60 tokens: "):  # fmt: skip
        assert part in out
    assert sorted(tree(folder)) == ["benchmark.json", "benchmark.png"]
    result = read(folder, "benchmark.json")
    # Of the default of four inputs whole batches: one.
    assert result["data"] == {"name": "words.txt", "rows": 3} and result["recommended"] in ("sdpa", *result["labels"])
    assert {row["batch"] for row in result["measurements"]} == {3}
    assert (folder / "benchmark.png").read_bytes()[:4] == b"\x89PNG"
    result["measurements"][-1]["error"] = 7.0  # one large error does not determine the scale
    pictures.draw_benchmark(result, tmp_path / "picture.png")
    for figure, last in zip(figures, ("", ": 7.0"), strict=True):
        assert figure.get_suptitle().startswith(f"{result['source']} on words.txt\n")
        for axes, better in zip(figure.axes, ("higher is better", "lower is better"), strict=True):
            assert better in axes.get_title(loc="left") and axes.get_xscale() == "log"
            names = [text.get_text() for text in axes.get_legend().texts]
            assert names[:2] == ["exact attention", result["labels"][0]]
            assert names[2:] == [result["labels"][1] + (last if axes is figure.axes[1] else "")]
            assert [text.get_text() for text in axes.get_xticklabels()] == ["20", "30", "60"]
    assert figure.axes[1].get_ylim() == (0, 1.5)
    rows = result["measurements"][:1]
    pictures.draw_benchmark({**result, "measurements": rows}, tmp_path / "exact.png")  # after an interruption
    one = [row for row in result["measurements"] if row["length"] == 60]
    many = [{**row, "attention": f"{row['attention']} {i}"} for row in result["measurements"] for i in range(5)]
    for rows, lengths in ((one, ["60"]), (many, ["30", "60"])):
        pictures.draw_benchmark({**result, "measurements": rows}, tmp_path / "frontier.png")
        assert [axes.get_title(loc="left").split()[0] for axes in figures[-1].axes] == lengths
        names = {text.get_text().split(":")[0] for text in figures[-1].axes[-1].get_legend().texts}
        assert names == {"exact attention", *(row["attention"] for row in rows if row["method"] != "sdpa")}
    assert "--force" in refused(capsys, *line)
    shown(capsys, *line, "--force")


def interrupt_after(monkeypatch, count):
    """Let the user press Ctrl-C in the measurement after `count` measurements."""
    kind = comparison.LengthComparison
    measure, done = kind.measure, iter(range(count))
    monkeypatch.setattr(kind, "measure", lambda *given: interrupt() if next(done, None) is None else measure(*given))


@pytest.mark.parametrize(("family", "title"), [("gpt2", "ratio"), ("bert", "top1")])
def test_the_card_of_a_converted_folder(family, title, made, text, tmp_path, monkeypatch, capsys):
    """It takes the perplexity that is printed. An interruption leaves it alone; it says what --minutes left out."""
    pytest.importorskip("matplotlib")
    folder = save_converted(tmp_path / "converted", made(family, True), "longformer", window_size=3)
    line = ("benchmark", folder, "--lengths", 40, *FAST, "--rows", 1, "--data", text, "--card")
    before = tree(folder)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 1)
        assert f"Interrupted: {folder} is unchanged" in shown(capsys, *line, status=130).out
    assert tree(folder) == before
    out, card = shown(capsys, *line).out, (folder / "README.md").read_text()
    assert f"Written: {folder / 'README.md'}" in out and "longformer" in card
    columns, _, *rows = ([x.strip() for x in line.split("|")[1:-1]] for line in out.splitlines() if line[:1] == "|")
    speeds = ["first tok", "tok/s"] if family == "gpt2" else []
    assert columns[columns.index("error") :] == ["error", "output", "perplexity", title, *speeds]
    measured = read(folder, "benchmark.json")["measurements"]
    for column, key, form in [("perplexity", "perplexity", ".5g"), ("tok/s", "tokens_per_second", ".1f")]:
        if column in columns:
            assert [row[columns.index(column)] for row in rows] == [format(row[key], form) for row in measured]
    assert "perplexity: the exponential of the mean loss of the " in out
    assert [("tokens per second after" in told) for told in (out, card)] == [bool(speeds)] * 2
    assert not speeds or all(f" {row['tokens_per_second']:.4g} |\n" in card for row in measured)
    shown(capsys, *line, "--minutes", "0.000001", "--force")
    assert read(folder, "benchmark.json")["source"] == "converted"
    assert "Not complete. Not measured: longformer at 40 tokens" in (folder / "README.md").read_text()


def test_after_an_interruption_what_is_complete_stays(made, text, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")

    def interrupted(count, *more):
        with monkeypatch.context() as patch:
            interrupt_after(patch, count)
            return shown(capsys, "benchmark", made("bert"), "--methods", SMALL_METHODS, "--lengths", "30,60",
                         "--rounds", 1, "--data", text, *more, status=130)  # fmt: skip

    out, err = interrupted(4, "--output", tmp_path / "out")
    assert err == "error: interrupted\n"
    rows = [line.split("|")[1:3] for line in out.splitlines() if line.startswith("| ")]
    labels = [(length.strip(), label.split()[0]) for length, label in rows[1:]]
    assert labels == [("30", "sdpa"), ("30", "kdeformer"), ("30", "longformer"), ("60", "sdpa")]
    header, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line[:2] == "| ")
    # A text model without a head has neither a perplexity nor a speed of generation.
    assert header == ["tokens", "attention", "seconds", "speed-up", "MiB", "error", "output", "cosine"]
    assert all(cell not in ("", "-") for line in lines for cell in line)
    assert "Not complete. Not measured: kdeformer (block_size=4, num_samples=8) at 60 tokens, longformer" in out
    result = read(tmp_path / "out", "benchmark.json")
    assert (result["complete"], len(result["measurements"]), len(result["left_out"])) == (False, 4, 2)
    assert len(result["pays_from"]) == 2 and has_note(result, "Not complete")  # so that a card says it
    result = json.loads(interrupted(2, "--json").out)
    assert list(result["pays_from"]) == ["kdeformer (block_size=4, num_samples=8)"]
    assert interrupted(0, "--output", tmp_path / "none").err == NOTHING_COMPLETE
    assert not (tmp_path / "none").exists()


def test_rows_as_they_finish_and_a_limit_of_time(made, text):
    told, options = [], {"data": text, "procedure": QUICK._replace(rows=1)}
    execution = Execution(minutes=60, on_begin=told.append, on_row=told.append)
    result = benchmark.benchmark_checkpoint(made("bert"), WINDOW, [30, 60], execution=execution, **options)
    assert told[0]["measurements"] == [] and told[0]["labels"] == ["window"]
    assert [row["is_first"] for row in told[1:]] == [True] * 4 + [False] * 4
    assert told[5:] == result["measurements"] and len(told) == 9
    assert result["complete"] is True and result["left_out"] == result["only_first"] == []
    limited = bench(made("bert"), WINDOW, [30, 60], data=text, minutes=1e-6)
    assert limited["left_out"] == ["window at 30 tokens", "sdpa at 60 tokens", "window at 60 tokens"]
    assert limited["complete"] is False and len(limited["measurements"]) == 1  # the first is always measured


def test_all_lengths_are_measured_once_before_any_is_measured_in_full(made, text, monkeypatch, capsys):
    """In the time that all measurements of the first length take, and more with more time."""
    measure, clock, seen = comparison.LengthComparison.measure, [0.0], []

    def slow(self, label):
        clock[0] += self._length / 30 * (1 if self._procedure.is_first else 10)
        seen.append((self._length, label, self._batches))
        return measure(self, label)

    monkeypatch.setattr(comparison.LengthComparison, "measure", slow)
    monkeypatch.setattr("hf_efficient_attn.evaluation.progress.time.monotonic", lambda: clock[0])
    options = {"data": text, "procedure": Procedure(rounds=10, memory=False)}
    execution = lambda minutes: Execution(minutes, _start=clock[0])  # noqa: E731
    labels = [(length, label) for length in (30, 60, 90) for label in ("sdpa", "window")]
    found = benchmark.benchmark_checkpoint(made("bert"), WINDOW, [30, 60, 90], execution=execution(14 / 60), **options)
    assert seen == [(*one, 1) for one in labels]  # on one batch each
    assert (found["left_out"], len(found["only_first"]), found["complete"]) == ([], 6, False)
    assert has_note(found, "Not complete. Measured once only: sdpa at 30 tokens, window at 30 tokens, sdpa at 60")
    found = benchmark.benchmark_checkpoint(made("bert"), WINDOW, [30, 60, 90], execution=execution(40 / 60), **options)
    assert seen[6:12] == seen[:6] and seen[12] == (30, "sdpa", 4) and 0 < len(found["only_first"]) < 6
    assert [(row["length"], row["attention"]) for row in found["measurements"]] == labels
    words = "--methods longformer:window_size=3 --lengths 30 --data"
    line = ("benchmark", made("bert"), *words.split(), text, *FAST)
    assert "the later one counts" in shown(capsys, *line, "--minutes", 60).out
    assert "the later one counts" not in shown(capsys, *line).out


def test_long_texts_are_also_embedded_in_pieces(made, text):
    """The pieces are as long as the model's positions before they are extended; together they are the whole text."""
    found = bench(made("bert"), WINDOW, [100, 300], data=text, rows=2)
    assert [row["attention"] for row in found["measurements"]] == [*["sdpa", "window"] * 2, "sdpa, chunks of 128"]
    row = found["measurements"][-1]
    assert (row["method"], row["length"], row["error"], row["output_error"]) == ("sdpa", 300, None, None)
    assert (found["chunk"], list(found["pays_from"]), found["labels"]) == (128, ["window"], ["window"])
    assert has_note(found, "split it")
    model, extended = open_model(made("bert")), hea.extend_positions(open_model(made("bert")), 300)
    ids = tokenizer_for("bert")(TEXT, add_special_tokens=False)["input_ids"]
    cosines = []
    for start in (0, 300):
        whole = torch.tensor([[2, *ids[start : start + 298], 3]])
        pieces = [[2, *ids[start + piece : start + piece + 126], 3] for piece in (0, 126, 172)]
        with torch.no_grad():
            exact = extended(whole).last_hidden_state.mean(1)[0]
            parts = torch.nn.functional.normalize(model(torch.tensor(pieces)).last_hidden_state.mean(1), dim=1)
        cosines.append(torch.cosine_similarity(exact, parts.mean(0), dim=0).item())
    assert row["agreement"] == pytest.approx(sum(cosines) / 2, abs=1e-5)


def test_fewer_pictures_come_from_the_whole_folder(made, photographs, tmp_path):
    """In which they are sorted by class."""
    assert [name for name, _ in reading.pictures_of(photographs)] == [f"{photographs}, class/{i}.png" for i in range(6)]
    image = pytest.importorskip("PIL.Image")
    for number in range(20):
        image.new("RGB", (8, 8), (10 * number, 0, 0)).save(tmp_path / f"{number:02}.png")
    found = bench(made("deit", True), WINDOW, [66], data=tmp_path, rows=8)
    assert found["data"]["rows"] == 8 and has_note(found, "32 x 32 pixels for 66 tokens")
    both = bench(made("deit", True), WINDOW, [66], data=[tmp_path, photographs], rows=99)
    assert both["data"] == {"name": f"{tmp_path.name} and 1 more", "rows": 26}
    data = ModelData(open_model(made("deit", True)), made("deit", True), tmp_path, longest=66, rows=8)
    assert [pathlib.Path(name).name for name, _ in data.pictures] == [f"{number:02}.png" for number in range(0, 16, 2)]


def test_grey_pictures_and_a_processor_that_does_not_resize(photographs, tmp_path):
    source = save(tmp_path, tiny_model("vit", num_channels=1), "vit")
    transformers.ViTImageProcessorPil(image_mean=[0.5], image_std=[0.5], do_resize=False).save_pretrained(source)
    data = ModelData(open_model(source), source, photographs, longest=50, rows=1)
    picture = reading.open_picture(*data.pictures[0]).convert("L").resize((28, 28), 2)
    expected = torch.tensor(list(picture.tobytes())).view(1, 1, 28, 28) / 127.5 - 1
    torch.testing.assert_close(data.inputs(50, 0, 1).values["pixel_values"], expected)


@pytest.mark.parametrize(("side", "patch", "tokens"), [(30, 4, 50), (35, 6, 26), (32, 8, 17)])
def test_pictures_whose_side_is_no_multiple_of_the_patch(side, patch, tokens):
    model = tiny_model("vit", image_size=side, patch_size=patch)
    data = ModelData(model, pathlib.Path(), None, longest=tokens, rows=1)
    assert (data.native_tokens, data.inputs(tokens, 0, 1).pixels) == (tokens, side)
    for length in (tokens, 4 * tokens - 3):
        found = data.inputs(length, 0, 1)
        assert model(**found.values).last_hidden_state.shape[1] == found.tokens == length


def test_a_tokenizer_without_a_vocabulary_file(text, tmp_path):
    transformers.ByT5Tokenizer().save_pretrained(tmp_path)
    data = ModelData(tiny_model("bert"), tmp_path, text, longest=20, rows=1)
    assert data.inputs(20, 0, 1).values["input_ids"].tolist() == [[byte + 3 for byte in TEXT[:19].encode()] + [1]]


@pytest.mark.parametrize(("name", "length"), [("ViTMAE", 17), ("Dinov2", 65), ("Yolos", 75), ("DINOv3ViT", 65)])
def test_encoders_of_pictures(name, length, photographs, tmp_path):
    """The first draws a mask, the others interpolate positions unasked; the last's `base_model` takes embeddings."""
    pytest.importorskip("matplotlib")
    size = [16, 16] if name == "Yolos" else 16
    config = getattr(transformers, f"{name}Config")(**SIZES, image_size=size, patch_size=4, num_detection_tokens=10)
    source = save(tmp_path / "source", getattr(transformers, f"{name}Model")(config), "vit")
    for line in (f"analyze {source} --budgets 4 --length {length}", f"distill {source} {DISTILL} -o {tmp_path}/out"):
        assert command(*line.split(), "--data", photographs) == 0
    row = bench(source, {"within": make_config("nearfar")}, [length], data=photographs, rows=2)["measurements"][1]
    assert [row[key] for key in ("length", "pixels", "error", "output_error")] == [length, 32, 0, 0]


def test_names_and_tasks(made):
    checked = open_checkpoint(made("bert"))
    assert checked.title == "/".join(made("bert").parts[-2:])
    assert dataclasses.replace(checked, hub_id="org/name").title == "org/name"
    assert [task_of(tiny_model(*key)) for key in [("bert",), ("vit",), ("roberta",)]] == ["embedding"] * 3
    assert task_of(tiny_model("distilbert", head=True)) == "masked-lm"
    assert task_of(tiny("bart")) == "text-to-text" and task_of(tiny("bart").model) == "embedding"


def test_number_of_passes(made, text, monkeypatch):
    """A pass is timed and gives an answer at once: the passes of exact attention do not grow with methods x rounds."""
    passes, run_model = collections.Counter(), comparison.run_model

    def count(task, model, inputs):
        passes[model.config._attn_implementation] += 1
        return run_model(task, model, inputs)

    monkeypatch.setattr(comparison, "run_model", count)
    monkeypatch.setattr(timing, "LONG_SECONDS", 0.0)  # all passes are long
    methods = {name: make_config(name, **SMALL[name]) for name in ("kdeformer", "longformer")}
    assert bench(made("bert"), methods, [100], data=text, rounds=3, rows=4)["data"]["rows"] == 4
    # One pass for each text, and of exact attention one after each method.
    assert passes == {"sdpa": 4 + 2, "kdeformer": 4, "longformer": 4}


def test_rounds_are_compared_with_exact_attention_before_and_after(made, text, monkeypatch):
    """Where passes are long, exact attention has one time before and one after: its change is part of the spread."""
    times = iter([2.0, 1.0, 1.0, 6.0])  # exact attention, two rounds of the window, exact attention
    monkeypatch.setattr(timing, "LONG_SECONDS", 0.0)
    monkeypatch.setattr(timing, "time_calls", lambda work, calls: (work(), next(times))[1])
    monkeypatch.setattr(timing, "peak_of", lambda work, device: (work(), 1)[1])
    exact, row = bench(made("bert"), WINDOW, [40], data=text, rounds=2, rows=1, memory=True)["measurements"]
    assert (exact["seconds"], row["seconds"]) == (2.0, 1.0)
    assert (row["speed_up_min"], row["speed_up"], row["speed_up_max"]) == (3.0, 4.0, 5.0)


def test_a_method_within_its_budget_is_exactly_as_fast_as_exact_attention(made, text):
    """It computes the same: what two clocks would say of it is noise."""
    methods = {"within": make_config("nearfar"), "beyond": make_config("longformer", window_size=3)}
    _, within, beyond = bench(made("bert"), methods, [64], data=text)["measurements"]
    assert [within[f"speed_up{part}"] for part in ("", "_min", "_max")] == [1.0] * 3 and within["output_error"] == 0
    assert beyond["speed_up"] != 1.0 and beyond["output_error"] > 0


def test_too_little_memory_is_one_line(made, text, monkeypatch, capsys):
    def allocate(*arguments):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr(comparison, "run_model", allocate)
    line = ("benchmark", made("bert"), "--methods", "longformer", "--lengths", 30, *FAST, "--data", text)
    advice = "the memory is not enough for this measurement: give shorter lengths or a smaller batch"
    assert shown(capsys, *line, status=1).err == f"error: {advice}\n"
    for error, given in ((MemoryError, torch.OutOfMemoryError("CUDA")), (RuntimeError, RuntimeError("shapes"))):
        with pytest.raises(error, match=r"give less|shapes"), timing.memory_errors("give less"):
            raise given
