"""Stages of up-training that are distilled first. test_uptraining_resume.py tests resumption of killed trainings."""

import copy
import random

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import DataLoader, IterableDataset

import hf_efficient_attn as hea
from hf_efficient_attn.evaluation.capture import capture_attention, forward
from hf_efficient_attn.integration.learned import learned_of
from hf_efficient_attn.training import DistillationOptions, switch
from hf_efficient_attn.training.distillation import Distillation
from hf_efficient_attn.training.steps import learned_parameters
from hf_efficient_attn.training.switch import is_in_stage, switch_stage, training_batches
from test_uptraining import PLAIN, classifier, losses, one_batch, samples, stage, switches, trainer_of
from tiny_models import METHODS, SMALL, tiny_batch, tiny_model

HEDGEHOG = {"feature_map": "hedgehog", "num_features": 16}
LINFORMER = {"projection_dim": 8, "share": "none"}
TWO = [("linformer", 3, LINFORMER), ("flurka_linear", None, {**HEDGEHOG, "distill": 10})]


def batches(count: int = 4) -> list[dict[str, torch.Tensor]]:
    return [tiny_batch("bert", seed=seed) for seed in range(count)]


def values(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_distillation_is_a_part_of_a_stage():
    given = hea.UptrainingSchedule.parse("sdpa:2 linformer,projection_dim=8,share=none,distill=6:3 flurka_linear:end")
    assert [one.distill for one in given.stages] == [0, 6, 0]
    config = hea.LinearConfig(**HEDGEHOG)
    assert stage(config, distill=3, layers=[1]).distill == 3
    with pytest.raises(hea.UnsupportedAttentionError, match=r"the first stage has distill=6.* hea\.distill"):
        hea.UptrainingSchedule.parse("linformer,distill=6:end")


@pytest.mark.parametrize(
    ("attention", "steps", "sentence"),
    [
        ("linear", 5, "distill=5: linear learns nothing .* use feature_map='hedgehog'"),
        ("kdeformer", 5, "distill=5: kdeformer has no learned parameters"),
        ("sdpa", 5, "distill=5: 'sdpa' is exact attention"),
        *(("linformer", steps, f"distill={steps}: give the number of steps") for steps in (-1, 0.5, True)),
    ],
)
def test_impossible_distillations_are_refused(attention, steps, sentence):
    with pytest.raises(hea.UnsupportedAttentionError, match=sentence):
        stage(attention, distill=steps)


def switched(model, target, step=0, given=None):
    """The record of a switch to a stage that is distilled."""
    return switch_stage(model, None, target, step, batches() if given is None else given)


def teacher_of(model, monkeypatch):
    """The former attention of a model, which is switched to another one."""
    teachers = []
    with monkeypatch.context() as patched:
        patched.setattr(switch, "_distill", lambda *given: teachers.append(given[4][0]))
        switched(model, stage("linear", **HEDGEHOG, distill=1))
    return teachers[0]


def output_error(model, former, batch, monkeypatch) -> float:
    """Mean relative squared error of the layers of a model to those of its former state, on the former inputs."""
    teacher, found = teacher_of(former, monkeypatch), []
    modules = dict(zip(former.modules(), model.modules(), strict=False))

    def visit(call):
        learned = learned_of(modules[call.module])
        out = call.compute(learned.method, learned.tensors())
        found.append(((out - call.exact).square().sum() / call.exact.square().sum()).item())

    with capture_attention(former, visit, teacher):
        forward(former, batch)
    return sum(found) / len(found)


@pytest.mark.parametrize("start", ["sdpa", "linformer"])
def test_the_error_to_the_former_attention_falls(start, monkeypatch):
    """From a linformer with tables that are not those of a conversion, flurka_linear learns its softmax."""
    errors = []
    for distill in (1, 40):
        model = tiny_model("bert")
        if start == "linformer":
            hea.convert(model, "linformer", **LINFORMER)
            with torch.no_grad():
                for table in learned_parameters(model).values():
                    table.mul_(torch.rand(table.shape, generator=torch.Generator().manual_seed(1)))
        former, own, kept = copy.deepcopy(model), values(model), dict(model.named_parameters())
        target = stage("flurka_linear", **{**HEDGEHOG, "projection_dim": 8, "distill": distill})
        record = switched(model, target, 5)
        errors.append(output_error(model, former, tiny_batch("bert", seed=9), monkeypatch))
        for name, value in own.items():
            if "learned_parameters" not in name:
                assert torch.equal(dict(model.named_parameters())[name], value)
        if start == "linformer":
            assert len(record["carried"]) == 4
            assert all(dict(model.named_parameters())[name] is kept[name] for name in record["carried"])
        assert all(p.grad is None for p in model.parameters())
    assert errors[1] < 0.8 * errors[0]
    assert record["distillation"]["steps"] == 40
    assert record["distillation"]["last_loss"] < record["distillation"]["first_loss"]


@pytest.mark.parametrize("method", METHODS)
def test_the_former_attention_is_that_of_the_model(method, monkeypatch):
    """With the former attention in place of its own, a model has the output that it had before the switch."""
    model, batch = tiny_model("bert"), tiny_batch("bert", padding="right")
    hea.convert(model, method, **SMALL[method])
    with torch.no_grad():
        for p in learned_parameters(model).values():
            p.add_(0.1 * torch.rand(p.shape, generator=torch.Generator().manual_seed(1)))
        before = model(**batch).last_hidden_state
    teacher = teacher_of(model, monkeypatch)
    with capture_attention(model, lambda call: None, teacher):
        after = forward(model, batch).last_hidden_state
    valid = batch["attention_mask"].bool()
    torch.testing.assert_close(after[valid], before[valid], rtol=1e-4, atol=1e-4)


def test_layers_that_do_not_change_are_not_trained():
    model = tiny_model("bert").double()
    hea.convert(model, "linformer", layers=[0], **LINFORMER)
    with torch.no_grad():
        for table in learned_parameters(model).values():
            table.mul_(torch.rand(table.shape, dtype=table.dtype))
    before = values(model)
    target = stage("linformer", **LINFORMER, distill=3)
    record = switched(model, target)
    assert len(record["carried"]) == len(record["started"]) == 2
    after = values(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    fresh = hea.convert(tiny_model("bert").double(), "linformer", **LINFORMER)
    assert all(not torch.equal(after[name], values(fresh)[name]) for name in record["started"])


def test_custom_training_loop():
    """The first stage is distilled when training begins, later ones at their switch; resumption repeats it."""

    def trained(model, optimizer, steps, first=0, **given):
        schedule = hea.UptrainingSchedule(TWO)
        records = []
        schedule.step(model, None, max(0, first - 1))
        optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(first, steps):
            records.append(schedule.step(model, optimizer, step, batches(), **given))
            model(**one_batch()).loss.backward()
            optimizer.step(), optimizer.zero_grad()
        return optimizer, records

    whole = classifier(**PLAIN)
    optimizer, records = trained(whole, None, 6)
    assert [record and (record["step"], record["to"], record["distillation"]["steps"]) for record in records] == [
        None, None, None, (3, "flurka_linear", 10), None, None]  # fmt: skip
    assert records[3]["from"] == "linformer" and len(records[3]["started"]) == len(records[3]["carried"]) == 4
    # The projections keep their optimizer state.
    assert all(int(optimizer.state[learned_parameters(whole)[name]]["step"]) == 6 for name in records[3]["carried"])
    for first in (1, 3):
        model = classifier(**PLAIN)
        saved, _ = trained(model, None, first)
        weights, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(saved.state_dict())
        again, schedule = classifier(1, **PLAIN), hea.UptrainingSchedule(TWO)
        schedule.step(again, None, first - 1)
        again.load_state_dict(weights)
        optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
        optimizer.load_state_dict(moments)
        _, later = trained(again, optimizer, 6, first)
        assert [x and x["distillation"] for x in later] == [x and x["distillation"] for x in records[first:]]
        assert all(torch.equal(p, values(whole)[name]) for name, p in again.named_parameters())
    slow = classifier(**PLAIN)
    _, other = trained(slow, None, 4, options=DistillationOptions(learning_rate=1e-4))
    assert other[3]["distillation"]["last_loss"] > records[3]["distillation"]["last_loss"]


def test_missing_batches_are_refused():
    schedule, model = hea.UptrainingSchedule(TWO), classifier()
    schedule.step(model, None, 0)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(hea.UnsupportedAttentionError, match="no batches to distill 'flurka_linear'"):
        schedule.step(model, optimizer, 1)
    with pytest.raises(hea.UnsupportedAttentionError, match="no iterator"):
        schedule.step(model, optimizer, 3, iter(batches()))
    options = DistillationOptions(finetuning=hea.training.FinetuningOptions(steps=1))
    with pytest.raises(hea.UnsupportedAttentionError, match=r"leave out options\.finetuning"):
        schedule.step(model, optimizer, 3, batches(), options)


@pytest.mark.parametrize("sentence", ["computes them exactly", "layer.1.* values that are not finite"])
def test_a_failed_distillation_leaves_the_former_attention(sentence, monkeypatch):
    model = classifier()
    if "finite" in sentence:
        with torch.no_grad():
            model.bert.encoder.layer[1].attention.self.value.weight.fill_(float("nan"))
    else:
        # As for sequences that a method computes exactly.
        monkeypatch.setattr(Distillation, "step", lambda *given: [])
    before = dict(model.named_parameters())
    with pytest.raises(hea.UnsupportedAttentionError, match=sentence):
        switched(model, stage("linear", **HEDGEHOG, distill=3))
    assert is_in_stage(model, stage("sdpa"))
    assert list(before) == [name for name, p in model.named_parameters() if p is before[name]]


def test_random_states_and_modes_stay():
    """Batches may draw from the global generators; they are the same in every run."""

    class Noisy(list):
        def __getitem__(self, index):
            seen.append((random.random(), np.random.rand(), torch.rand(1).item()))
            return super().__getitem__(index)

    seen: list[tuple] = []
    model = classifier().train()
    model.classifier.eval()
    for state in range(2):
        random.seed(state), np.random.seed(state), torch.manual_seed(state)
        expected = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
        switched(model, stage("linear", **HEDGEHOG, distill=3), given=Noisy(batches()))
        assert (random.getstate(), np.random.get_state()[1].tolist()) == expected[:2]
        assert torch.equal(torch.get_rng_state(), expected[2])
        assert model.training and not model.classifier.training
        switch_stage(model, None, stage("sdpa"), 0)
    assert seen[:3] == seen[3:] and len(seen) == 6


class Order(transformers.TrainerCallback):
    """Records the samples of each forward pass of the training, and the random state before it."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.samples, self.draws = [], []
        model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, model, args, kwargs):
        if model.training:
            self.samples.append(kwargs["input_ids"].tolist())
            self.draws.append(torch.get_rng_state().tolist())


def distilled(trainer) -> list[tuple]:
    return [
        (entry["step"], entry.get("uptraining_stage"), entry["distillation_steps"])
        for entry in trainer.state.log_history
        if "distillation_steps" in entry
    ]


@pytest.mark.parametrize(
    "own", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["training data", "own batches"]
)
def test_callback(own, tmp_path):
    """Only the distilled parameters differ from a run without it: data and random states are those of the training."""
    options = {"save_strategy": "steps", "save_steps": 2}

    def trained(folder, stages, resume=None, seed=0):
        given = {"distillation_batches": batches()} if own and stages is TWO else {}
        callback = hea.UptrainingCallback(stages, **given)
        trainer = trainer_of(folder, None, classifier(seed), steps=5, callbacks=[callback, order := Order()], **options)
        trainer.train(resume_from_checkpoint=resume and str(folder / resume))
        return trainer, order

    plain, order = trained(tmp_path / "plain", [("linformer", 3, LINFORMER), ("flurka_linear", None, HEDGEHOG)])
    whole, again = trained(tmp_path / "whole", TWO)
    assert again.samples == order.samples and again.draws == order.draws
    assert losses(whole) != losses(plain) and switches(whole) == switches(plain) == [(3, "linformer", "flurka_linear")]
    assert distilled(whole) == [(3, "flurka_linear", 10)]
    for resume in ("checkpoint-2", "checkpoint-4"):
        again, _ = trained(tmp_path / "whole", TWO, resume, seed=1)
        assert losses(again) == losses(whole) and distilled(again) == distilled(whole)
        assert all(torch.equal(p, values(whole.model)[name]) for name, p in again.model.named_parameters())


def test_training_options(tmp_path):
    """Also under autocast."""
    stages = [("linformer", 2, {"projection_dim": 8}), ("linear", None, {**HEDGEHOG, "distill": 30})]
    options = {"bf16": True, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    trainer = trainer_of(tmp_path, stages, steps=3, **options)
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "distillation_steps" in entry]
    assert entry["distillation_last_loss"] < entry["distillation_first_loss"]


def test_refusals_of_the_callback(tmp_path):
    fixed = [("linformer", 2, LINFORMER), ("flurka_performer", None, {"num_features": 8, "distill": 5})]
    with pytest.raises(hea.UnsupportedAttentionError, match=r"'flurka_performer' has distill=5.* the stage before"):
        trainer_of(tmp_path, fixed)

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(samples())

    stages = [("sdpa", 1), ("linear", None, {**HEDGEHOG, "distill": 2})]
    trainer = trainer_of(tmp_path, stages)
    trainer.train_dataset = Stream()
    with pytest.raises(hea.UnsupportedAttentionError, match=r"\(Stream\) can only be iterated.*distillation_batches="):
        trainer.train()
    trainer = trainer_of(tmp_path, None, callbacks=[hea.UptrainingCallback(stages, batches())], steps=2)
    trainer.train_dataset = Stream()
    trainer.train()
    assert distilled(trainer) == [(1, "linear", 2)]


def test_batches_of_a_training_set():
    data, joined = list(range(22)), []
    for rank in range(2):
        found = list(training_batches(data, list, 4, rank, 2))
        assert [len(batch) for batch in found] == [4] * len(found)
        joined += found
    assert [0, 5, 10, 15] in joined and joined != sorted(joined)
    assert sorted(x for batch in joined for x in batch) == data[:20]
    loader = DataLoader(samples(), batch_size=4, shuffle=True)
    assert next(iter(training_batches(loader.dataset, loader.collate_fn, 4)))["input_ids"].shape == (4, 24)
