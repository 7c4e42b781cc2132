"""What every training recipe promises: its report and files, the saved model, resumption, and two processes as one."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

import hf_efficient_attn as hea
from helpers.commands import losses
from tiny_recipes import COMMANDS, launch, options_of, refuses, same_weights, train, weights

STAGES = ("--stages", "linformer,projection_dim=4:2", "flurka_performer,num_features=8:end")
DISTILLED = ("--stages", "linformer,projection_dim=4:2", "flurka_linear,feature_map=t2r,num_features=4,distill=3:end")


@pytest.mark.parametrize(
    ("name", "method", "metric"),
    [
        ("glue", "kdeformer", "f1"),
        ("loop", "performer", "f1"),
        ("imagenet", "linear", "top1"),
        ("mlm", "nystromformer", "accuracy"),
        ("clm", "linear", "accuracy"),
        ("translation", "flurka_linear", "bleu"),
        ("lra-listops", "kdeformer", "validation_accuracy"),
        ("lra-text", "nystromformer", "accuracy"),
        ("lra-image", "linear", "accuracy"),
    ],
)
def test_a_run_is_reported_and_its_model_is_saved(name, method, metric, here, tmp_path, capsys):
    out = tmp_path / "out"
    report = train(name, here, out, "--attention", method)
    written, printed = json.loads((out / "metrics.json").read_text()), capsys.readouterr().out
    assert written["metrics"] == report["metrics"] and 0 <= written["metrics"][f"eval_{metric}"] <= 100
    assert f"eval_{metric}" in printed and f"written: {out / 'metrics.json'}" in printed
    assert (written["steps"], written["seed"], written["processes"]) == (6, 0, 1) and written["seconds_per_step"] > 0
    assert written["attention"]["attention"] == method and written["efficient_attention"]["method"] == method
    assert written["versions"]["hf_efficient_attn"] == hea.__version__ and written["switches"] == []
    assert (out / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "config.json").read_text())["efficient_attention"]["method"] == method
    if name in ("glue", "loop"):
        assert AutoConfig.from_pretrained(out).id2label == {0: "not_equivalent", 1: "equivalent"}
        assert AutoTokenizer.from_pretrained(out).pad_token == "[PAD]"
    if name == "translation":
        assert written["rows"] == {"train": 60, "eval": 6}
        assert set(written["baselines"]) == {"copy_bleu", "copy_chrf", "copy_exact_match"}
    layers = ["encoder"] if name == "translation" else None
    assert written["efficient_attention"].get("layers") == layers, "only the encoder is converted by default"
    if name != "loop":
        assert len(losses(out)) == 6 and written["peak_memory_mib"] > 100 and written["global_batch_size"] == 4
    if name in ("imagenet", "mlm", "clm", "translation"):
        # The saved model, which the option takes by both names, has the same metrics for any batch size.
        more = "--eval_only", "--per_device_eval_batch_size", 2
        again = train(name, here, tmp_path / "again", *more, model=f"--model_name_or_path {out}")
        assert again["steps"] == 0 and not (tmp_path / "again" / "model.safetensors").exists()
        for key in ("eval_loss", f"eval_{metric}"):
            assert again["metrics"][key] == pytest.approx(report["metrics"][key], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "stages", "step"),
    [
        ("glue", STAGES, 3),
        pytest.param("imagenet", ("--attention", "sdpa"), 1, marks=pytest.mark.exhaustive),
        pytest.param("imagenet", STAGES, 5, marks=pytest.mark.exhaustive),
        pytest.param("imagenet", DISTILLED, 1, marks=pytest.mark.exhaustive),
        pytest.param("clm", ("--attention", "linear"), 3, marks=pytest.mark.exhaustive),
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one(name, stages, step, here, tmp_path, capsys):
    """An epoch of the pictures has 4 steps, and one of the sentences has 5: resumed within the first or the second."""
    one, two = tmp_path / "one", tmp_path / "two"
    if name == "glue":
        stages = *stages, "--max_train_samples", 20, "--max_eval_samples", 9, "--learning_rate", 1e-2
    given = *stages, "--save_strategy", "steps", "--save_steps", 1, "--save_total_limit", 9, "--num_train_epochs", 2
    report = train(name, here, one, *given)
    first = capsys.readouterr().out
    shutil.copytree(one, two)
    (two / "model.safetensors").unlink()
    for later in range(step + 1, 7):
        shutil.rmtree(two / f"checkpoint-{later}")
    again = [*given, "--resume_from_checkpoint", "True"]
    assert (report["resumed_at"], train(name, here, two, *again)["resumed_at"]) == ([], [step])
    assert f"resumed from {two / f'checkpoint-{step}'}" in capsys.readouterr().err
    assert losses(two) == losses(one) and same_weights(one, two)
    if stages[0] == "--stages":
        last = stages[2].partition(",")[0]
        (switch,) = report["switches"]
        assert (switch["step"], switch["from"], switch["to"]) == (2, "linformer", last)
        assert f"| switch at step 2 | linformer to {last} |" in first
        assert AutoConfig.from_pretrained(one).efficient_attention["method"] == last
    if name == "glue":
        assert report["rows"] == {"train": 20, "validation": 9}
        # The last step has a checkpoint. Trainer would do a seventh step.
        refuses(r"is finished: it has done 6 steps and --max_steps is 6", train, name, here, two, *again)
        assert same_weights(one, two)
        (two / "checkpoint-6").rename(tmp_path / "last")
        other = ["--attention", "nearfar", *again[len(STAGES) :]]
        refuses("trained with the attention {'method': 'flurka_performer'", train, name, here, two, *other)
        (two / "checkpoint-5" / "optimizer.pt").unlink()
        refuses("no state of the optimizer", train, name, here, two, *again)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glue", "loop", "mlm"])
def test_two_processes_train_like_one(name, here, tmp_path):
    """A step has the same examples, half of them in each process.

    Dropout would depend on the shapes of the batches. The windows of text have different lengths and numbers of masked
    tokens.
    """
    more = ["--max_steps", 5, "--attention", "linear", "--model", here / "encoder_without_dropout"]
    if name == "mlm":
        more = [*more[:-2], "--config_overrides", "hidden_dropout_prob=0.0"]
        more += ["attention_probs_dropout_prob=0.0"]
    train(name, here, tmp_path / "one", *more, "--per_device_train_batch_size", 4)
    half = options_of(name, here, tmp_path / "two", *more, "--per_device_train_batch_size", 2)
    done = launch(f"recipes/{COMMANDS[name][0].__name__.removeprefix('recipes.')}.py", *half)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "two" / "metrics.json").read_text())["processes"] == 2
    assert (tmp_path / "two" / "learning_curve.png").is_file()
    torch.testing.assert_close(*(weights(tmp_path / out) for out in ("two", "one")), atol=1e-5, rtol=1e-4)
    if name != "loop":
        np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-4)
