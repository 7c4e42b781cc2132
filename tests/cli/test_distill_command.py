"""`hf-efficient-attn distill` on tiny models: results, continuation bit for bit, interruption, and refusals."""

import json
import shutil
import signal

import pytest
import torch
import transformers
from huggingface_hub import ModelCard

import hf_efficient_attn as hea
from each import refuses
from helpers.commands import command, read, refused, run_json, same, save, shown, tensors
from hf_efficient_attn.evaluation.data import ModelData
from hf_efficient_attn.hub import write_card
from hf_efficient_attn.training import distill_checkpoint, distillation
from hf_efficient_attn.training.data import TrainingData
from hf_efficient_attn.training.distillation import Distillation
from hf_efficient_attn.training.finetuning import Finetuning
from tiny_models import tiny_class, tiny_model

HEDGEHOG = ("--method", "linear", "--set", "feature_map=hedgehog", "--set", "num_features=16")
SMALL = ("--length", 40, "--batch-size", 2, "--steps", 6, "--save-steps", 3)
SECOND = ("--finetune-steps", 5)
ADAPTERS = (*SECOND, "--lora-rank", 2, "--finetune-learning-rate", 1e-3)

pytest.importorskip("matplotlib")


@pytest.fixture
def base(made, text):
    """The arguments of a short distillation, without the output."""
    return ["distill", made("bert"), "--data", text, *HEDGEHOG, *SMALL]


def stop_after(monkeypatch, number, kind=Distillation, times=1):
    """Press Ctrl-C in the step with a number."""
    step, count = kind.step, iter(range(1, 10**6))

    def interrupted(self, batch):
        for _ in range(times if next(count) == number else 0):
            signal.raise_signal(signal.SIGINT)
        return step(self, batch)

    monkeypatch.setattr(kind, "step", interrupted)
    return lambda: monkeypatch.setattr(kind, "step", step)


@pytest.fixture(autouse=True)
def _handles_interrupts():
    """A shell that starts the tests in the background ignores Ctrl-C, which they inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_result_is_that_of_the_library(base, made, text, figures, tmp_path, capsys):
    done = run_json(capsys, *base, "-o", tmp_path / "out")
    found = done["distillation"]
    assert read(tmp_path / "out", "distillation.json") == found
    assert (tmp_path / "out" / "distillation.png").read_bytes().startswith(b"\x89PNG")
    assert [(row["stage"], row["step"]) for row in found["history"]] == [("layers", 3), ("layers", 6)]
    assert found["history"][-1]["held_out"] == pytest.approx(found["error_after"])
    assert all(entry["after"] < entry["before"] for entry in found["layers"])
    assert [entry["layer"] for entry in found["layers"]] == [0, 1]
    assert found["complete"] and found["steps_done"] == 6 and found["resumed_at"] is None
    assert done["parameters"]["dropped"] == [] and len(done["parameters"]["new"]) == 4

    model = transformers.BertModel.from_pretrained(made("bert")).eval()
    data = TrainingData(model, made("bert"), text, 40, 2, 6)
    hea.distill(model, "linear", [data.batch(i) for i in data.train], steps=6, feature_map="hedgehog", num_features=16)
    written = transformers.BertModel.from_pretrained(tmp_path / "out").eval()
    assert written.config.efficient_attention["feature_map"] == "hedgehog"
    assert same(dict(written.state_dict()), dict(model.state_dict()))
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_inputs(made, text):
    """Held-out inputs are not learned from, a stream can skip batches, and no token is masked."""
    source = made("bert", True)
    model = transformers.BertForMaskedLM.from_pretrained(source).eval()
    data = TrainingData(model, source, text, 30, 2, 100)
    numbers = [*data.train, *data.held_out]
    assert len(set(numbers)) == len(numbers) == 50 and len(data.held_out) == 2
    skipped, whole = (data.stream(seed=3, skip=skip) for skip in (5, 0))
    assert torch.equal(next(skipped)["input_ids"], [next(whole) for _ in range(6)][5]["input_ids"])
    data = TrainingData(model, source, text, 40, 2, 4)
    assert len(data.train) == 4
    masked = ModelData(model, source, text, longest=40, rows=2).inputs(40, 0, 2)
    ids = data.batch(0)["input_ids"]
    assert (masked.values["input_ids"] == 4).any() and not (ids == 4).any()
    assert torch.equal(ids[masked.masked], masked.targets)


@pytest.mark.parametrize("family", ["deit", "gpt2"])
def test_pictures_and_decoders(family, made, text, photographs, tmp_path, capsys):
    data, size = (photographs, ["--batch-size", 2, "--steps", 6]) if family == "deit" else (text, SMALL)
    line = ["distill", made(family, True), "--data", data, *HEDGEHOG, *size, "-o", tmp_path / "out"]
    found = run_json(capsys, *line)["distillation"]
    assert found["error_after"] < found["error_before"]
    assert found["tokens"] == (66 if family == "deit" else 40)
    assert found["data"] == {"name": data.name, "rows": 4 if family == "deit" else 12, "held_out": 2}
    tiny_class(family, True).from_pretrained(tmp_path / "out")


def test_what_is_printed_and_the_card(base, tmp_path, capsys):
    out = shown(capsys, *base, *ADAPTERS, "-o", tmp_path / "out").out
    assert "linear (feature_map=hedgehog, num_features=16): 6 steps of 2 x 40 tokens of words.txt" in out
    assert "then 5 of fine-tuning" in out and "Inputs: 22 to learn from, 2 held out" in out
    assert "| layers  |      3 |" in out and "| outputs |      5 |" in out
    assert "| layer | error before | error after |" in out and "Fine-tuning: the loss on held-out inputs was" in out
    assert "To load it:" in out and "tensors: " in out
    found = read(tmp_path / "out", "distillation.json")
    card = (tmp_path / "out" / "README.md").read_text()
    assert write_card(tmp_path / "out").read_text() == card
    ModelCard(card)
    for entry in found["layers"]:
        assert f"| {entry['layer']} | {entry['before']:.4f} | {entry['after']:.4f} |" in card
    assert f"| mean | {found['error_before']:.4f} | {found['error_after']:.4f} |" in card
    assert "in 6 steps of 2 inputs of 40 tokens of words.txt" in card and "the loss `output`" in card
    assert "LoRA adapters of rank 2" in card and f"{found['outputs']['after']:.4g} after it" in card
    assert "](distillation.png)" in card and "need training" not in card
    assert "It changed the weights, and added new parameters" in card
    # A later conversion describes itself only.
    assert command("convert", tmp_path / "out", "--method", "longformer", "-o", tmp_path / "other") == 0
    assert not (tmp_path / "other" / "distillation.json").exists()
    assert "Distillation" not in (tmp_path / "other" / "README.md").read_text()
    for key in ("tokens", "layers", "plan", "error_before"):
        (tmp_path / "out" / "distillation.json").write_text(json.dumps(found | {key: "many"}))
        refuses(r"no card can be made of .*distillation\.json", write_card, tmp_path / "out")


def test_second_stage(text, tmp_path, capsys):
    """With adapters in half precision. After two steps of the first stage something remains to be learned."""
    source = save(tmp_path / "source", tiny_model("bert", head=True).bfloat16())
    options = [*HEDGEHOG, *SMALL, "--steps", 2, "--finetune-target", "logits", *ADAPTERS]
    done = run_json(capsys, "distill", source, "--data", text, *options, "-o", tmp_path / "out")
    outputs = done["distillation"]["outputs"]
    assert outputs["after"] < outputs["before"]
    before, after = tensors(source), tensors(tmp_path / "out")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("dense.weight" in name for name in changed)
    assert {x.dtype for x in after.values()} == {x.dtype for x in before.values()}
    assert set(done["parameters"]["new"]) == changed | {name for name in after if name not in before}
    model, report = transformers.BertForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(model.cls.predictions.decoder.weight, model.bert.embeddings.word_embeddings.weight)


@pytest.mark.parametrize(
    ("options", "number", "kind"), [((), 4, Distillation), (ADAPTERS, 2, Finetuning)], ids=["layers", "lora"]
)
def test_a_continued_command_equals_an_uninterrupted_one(options, number, kind, base, tmp_path, capsys, monkeypatch):
    """Ctrl-C ends the first call, a limit of time the second after one step, and the third ends the training."""
    assert command(*base, *options, "-o", tmp_path / "whole") == 0
    again, parts = stop_after(monkeypatch, number, kind), [*base, *options, "-o", tmp_path / "parts"]
    total, done = 11 if options else 6, number + (6 if kind is Finetuning else 0)
    err = shown(capsys, *parts, "--minutes", 60, status=130).err
    assert f"Stopped after {done} of {total} steps. The state" in err and "the same command continues" in err
    again()
    out, err = shown(capsys, *parts, "--minutes", 1e-9, status=130)
    assert f"Continues after step {done}." in out
    assert f"Stopped after {done + 1} of {total} steps, at the end of --minutes. The state is in" in err
    assert not (tmp_path / "parts").exists() and (tmp_path / "parts.partial" / "state.pt").is_file()
    # The last step needs no further call.
    assert command(*parts, "--minutes", 1e-9 if done + 2 == total else 60) == 0
    assert same(tensors(tmp_path / "parts"), tensors(tmp_path / "whole"))
    results = [read(tmp_path / name, "distillation.json") for name in ("whole", "parts")]
    assert results[1].pop("resumed_at") == done + 1 and results[0].pop("resumed_at") is None
    assert results[0] == results[1]
    # Without fine-tuning the state stays, for more steps.
    assert (tmp_path / "parts.partial").exists() == (options == ())


def test_a_finished_training_takes_more_steps(base, text, tmp_path, capsys):
    data = shutil.copy(text, tmp_path / "words.txt")
    at, base[base.index(text)] = base.index("--steps") + 1, data
    parts = [*base, "-o", tmp_path / "out"]
    longer = [*parts[:at], 60, *parts[at + 1 :]]
    first = run_json(capsys, *parts)["distillation"]
    assert "--force" in refused(capsys, *longer)
    out = shown(capsys, *longer, "--minutes", 1e-9, "--force", status=130).out
    assert "Continues after step 6." in out
    out = shown(capsys, *longer, "--force").out
    assert f"More --steps and --force continue this training. If you do not need that, delete {tmp_path}" in out
    done = read(tmp_path / "out", "distillation.json")
    assert done["steps_done"] == 60 and done["history"][:2] == first["history"]
    assert done["data"]["held_out"] == first["data"]["held_out"] and done["data"]["rows"] > first["data"]["rows"]
    assert done["error_before"] == first["error_before"] and done["error_after"] < 0.9 * first["error_after"]
    # It is no hindrance to another training, and other data are still refused.
    assert command(*parts, "--force", "--seed", 1) == 0
    assert read(tmp_path / "out", "distillation.json")["resumed_at"] is None
    data.write_text(text.read_text().replace("w7 ", "w8 "))
    err = refused(capsys, *longer, "--force")
    assert "other data" in err and "--seed 1" in err and "--steps 6" not in err


@pytest.mark.parametrize("family", ["vit", "bert"])
def test_data_of_a_longer_training(family, made, tmp_path):
    """Inputs keep their numbers, and none that is held out is learned from."""
    for number in range(60):
        if family == "vit":
            pytest.importorskip("PIL").Image.new("RGB", (32, 32)).save(tmp_path / f"{number}.png")
        else:
            (tmp_path / f"{number}.txt").write_text(f"w{number % 9} w5 " * (number + 1))
    model, length = transformers.AutoModel.from_pretrained(made(family)), {"bert": 16}.get(family)
    short = TrainingData(model, made(family), tmp_path, length, 2, 4)
    longer = TrainingData(model, made(family), tmp_path, length, 2, 20, short.held_out)
    assert longer.rows > short.rows
    assert longer.digest(short.rows) == short.digest(short.rows) != longer.digest(longer.rows)
    assert short.train == [*range(4)] and not {*longer.train} & {*short.held_out} and len(longer.train) == 20


def test_the_present_state_can_be_written(base, tmp_path, capsys, monkeypatch):
    again, given = stop_after(monkeypatch, 4, Finetuning), [*base, *SECOND, "-o", tmp_path / "out"]
    assert command(*given) == 130
    again()
    result = run_json(capsys, *given, "--write-now")["distillation"]
    assert not result["complete"] and result["steps_done"] == 10
    assert result["error_after"] < result["error_before"]
    assert "The training was stopped before its end" in (tmp_path / "out" / "README.md").read_text()
    # It can still be continued.
    assert command(*given) == 2
    assert command(*given, "--force") == 0
    assert read(tmp_path / "out", "distillation.json")["complete"]


def test_ctrl_c_twice_ends_at_once(base, tmp_path, capsys, monkeypatch):
    stop_after(monkeypatch, 5, times=2)
    err = shown(capsys, *base, "-o", tmp_path / "out", status=130).err
    assert "Stopped after 3 of 6 steps" in err  # the state of the last row


def test_another_request_is_refused(base, made, text, tmp_path, capsys, monkeypatch):
    again = stop_after(monkeypatch, 4)
    assert command(*base, "-o", tmp_path / "out") == 130
    again()
    state = (tmp_path / "out.partial" / "state.pt").read_bytes()
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().replace("w7 ", "w8 "))
    different = transformers.BertModel.from_pretrained(made("bert"))
    different.embeddings.word_embeddings.weight.data[7] += 1
    for position, value, message in (
        (base.index("--steps") + 1, 5, "--steps 6:"),
        (base.index("num_features=16"), "num_features=8", "other settings"),
        (base.index("--data") + 1, other, "other data"),
        (1, save(tmp_path / "source", different), "other source"),
    ):
        err = refused(capsys, *base[:position], value, *base[position + 1 :], "-o", tmp_path / "out")
        assert message in err and "--restart discards it" in err
    for wrong in (("--data", tmp_path / "missing.txt"), ("--set", "feature_map=elu", "--set", "window_size=0")):
        refused(capsys, *base, *wrong, "--restart", "-o", tmp_path / "out")
    assert (tmp_path / "out.partial" / "state.pt").read_bytes() == state
    monkeypatch.setattr(distill_checkpoint, "FORMAT_OF_STATE", 99)
    assert "other version" in refused(capsys, *base, "-o", tmp_path / "out")
    monkeypatch.undo()
    assert command(*base, "--seed", 1, "-o", tmp_path / "out") == 2
    assert command(*base, "--seed", 1, "--restart", "-o", tmp_path / "out") == 0


def test_a_damaged_state_is_refused(base, tmp_path, capsys):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "state.pt").write_bytes(b"nothing")
    assert "cannot be read: --restart discards it" in refused(capsys, *base, "-o", tmp_path / "out")
    (tmp_path / "out.partial" / "mine.txt").write_text("mine")
    assert command(*base, *SECOND, "--restart", "-o", tmp_path / "out") == 0
    assert [path.name for path in (tmp_path / "out.partial").iterdir()] == ["mine.txt"]


def test_divergence(base, tmp_path, capsys, monkeypatch):
    real, calls = distillation.backward, iter(range(1000))
    monkeypatch.setattr(
        distillation, "backward", lambda *given, **loss: float("nan") if next(calls) == 8 else real(*given, **loss)
    )
    err = shown(capsys, *base, "-o", tmp_path / "out", status=2).err
    assert "is not finite in step 5 of the distillation: use a smaller learning rate" in err
    assert "give --learning-rate and --restart" in err and "--write-now makes a checkpoint of" in err
    assert command(*base, "--write-now", "-o", tmp_path / "out") == 0
    assert read(tmp_path / "out", "distillation.json")["steps_done"] == 3


def test_longer_texts_than_the_model_takes(made, text, tmp_path, capsys):
    given = ["distill", made("bert"), "--data", text, *HEDGEHOG, "--batch-size", 1, "--steps", 1, "--length", 200]
    done = run_json(capsys, *given, "--max-length", 256, "-o", tmp_path / "out")
    assert done["positions"] == 256 and done["distillation"]["tokens"] == 200


def test_layers_and_weights_loss_of_a_source_that_is_then_converted(base, tmp_path, capsys):
    found = run_json(capsys, *base, "--layers", "1", "--loss", "weights", "-o", tmp_path / "out")
    assert [entry["layer"] for entry in found["distillation"]["layers"]] == found["layers"] == [1]
    err = refused(capsys, "distill", tmp_path / "out", *base[2:], "-o", tmp_path / "other")
    assert "is converted to linear already, and only exact attention can teach" in err and "--method sdpa" in err
