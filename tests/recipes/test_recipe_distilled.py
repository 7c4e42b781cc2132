"""recipes.benchmarks.distilled and recipes.experiments.arms, with tiny models that show what is trained."""

import json
import re

import pytest
import torch
from transformers import BertForSequenceClassification

import hf_efficient_attn as hea
from hf_efficient_attn.methods import make_config
from hf_efficient_attn.training import FinetuningOptions
from hf_efficient_attn.training.steps import learned_parameters
from recipe_commands import run
from recipes.benchmarks import distilled
from recipes.experiments import arms
from tiny_models import output, tiny_batch, tiny_config, tiny_model

FINETUNING = FinetuningOptions(steps=4, learning_rate=1e-4, attention_learning_rate=1e-3)
LINEAR = make_config("linear", feature_map="hedgehog", num_features=16)


def test_a_method_is_measured_before_and_after(monkeypatch, capsys):
    """On a tiny BERT; the figure is the error of its hidden states."""
    inputs = tiny_batch("bert", seed=1)
    wanted = output(tiny_model("bert"), inputs)

    def evaluate(model) -> float:
        return ((output(model, inputs) - wanted).norm() / wanted.norm()).item()

    batches = [tiny_batch("bert", seed=seed) for seed in (2, 3, 4)]
    task = distilled.Task("error", lambda: tiny_model("bert"), lambda: batches, evaluate)
    figures = distilled.distilled_figures(task, make_config(LINEAR, window_size=8), 20, FINETUNING)
    assert list(figures) == ["switched", "distilled", "fine-tuned", "without its window"]
    assert figures["distilled"] < figures["switched"] and figures["fine-tuned"] < figures["without its window"]
    assert figures["fine-tuned"] != figures["distilled"]
    monkeypatch.setitem(distilled.TASKS, "states", lambda data, count: task)
    methods = "linear:num_features=16:window_size=8,nystromformer:num_landmarks=4"
    assert run(distilled, "states --steps 20 --finetune-steps 4 --learning-rate 1e-4 --method", methods) == 0
    out = capsys.readouterr().out
    assert " | ".join(f"{figures[name]:.3f}" for name in ("switched", "distilled")) in re.sub(" +", " ", out)
    assert re.search(r"\| nystromformer[^|]*\| 0.000 +\| \d.\d+ +\| \d.\d+ +\| \d.\d+ +\| +\|", out)


def test_every_method_has_something_to_learn():
    configs = distilled.configs_of(["linear", "linear:feature_map=t2r", "nystromformer", "linformer"])
    assert all(learned_parameters(hea.convert(tiny_model("bert"), config)) for config in configs.values())
    assert [c.to_dict().get("feature_map") for c in configs.values()] == ["hedgehog", "t2r", None, None]


def setup_of(labels) -> arms.Setup:
    """A tiny BERT with a classifier; its figure is the first logit."""
    batches = [{**tiny_batch("bert", seed=seed), "labels": torch.tensor(labels)} for seed in range(3)]

    def evaluate(model) -> dict[str, float]:
        evaluate.model = model
        return {"logit": output(model, tiny_batch("bert", seed=9)).flatten()[0].item()}

    torch.manual_seed(0)
    model = BertForSequenceClassification(tiny_config("bert")).eval()
    return arms.Setup(model, batches, evaluate, 1e-3)


def trained(arm: str, labels=(0, 1)) -> dict[str, torch.Tensor]:
    """The parameters after an arm."""
    setup, steps = setup_of(labels), dict.fromkeys(("task", "map", "distillation", "fine-tuning"), 4)
    arms.run_arm(arm, setup, steps, 0)
    return {name: p.detach() for name, p in setup.evaluate.model.named_parameters()}


def test_what_each_arm_trains():
    before = trained("nothing")
    learned = {name for name in before if "learned_parameters" in name}
    assert len(learned) == len(learned_parameters(hea.convert(tiny_model("bert"), arms.METHOD)))

    def changed(arm: str) -> set[str]:
        return {name for name, p in trained(arm).items() if not torch.equal(p, before[name])}

    assert changed("map by the task") == learned
    for arm in ("task", "both"):
        assert learned < changed(arm) and any("classifier" in name for name in changed(arm))
    found = changed("distillation")
    assert learned < found and not any("classifier" in name for name in found)


@pytest.mark.parametrize("arm", [arm for arm in arms.ARMS if arm != "nothing"])
def test_labels_are_used_by_the_arms_that_train_on_the_task(arm):
    first, other = trained(arm, (0, 1)), trained(arm, (1, 0))
    assert all(torch.equal(p, other[name]) for name, p in first.items()) == (arm == "distillation")


def test_table_of_arms(tmp_path, capsys):
    for seed, value in ((0, 0.5), (1, 0.7)):
        figures = {arm: {"accuracy": value} for arm in ("exact", *arms.ARMS)}
        found = {"task": "mrpc", "seed": seed, "cost_in_task_steps": 100, "figures": figures}
        (tmp_path / f"mrpc-{seed}.json").write_text(json.dumps(found | {"seconds_per_step": {"task": 1.5}}))
    assert run(arms, "show", tmp_path) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert [line.split("|")[1].strip() for line in lines if "0.600 ± 0.100" in line] == ["exact", *arms.ARMS]
    assert "as much as 100 steps" in shown and "task 1.50" in shown
