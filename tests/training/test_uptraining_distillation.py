"""Stages of up-training that are distilled first. test_uptraining_resume.py tests resumption of killed trainings."""

import copy
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import hf_efficient_attn as hea
from each import close
from hf_efficient_attn.evaluation.capture import capture_attention, forward
from hf_efficient_attn.integration.learned import learned_of
from hf_efficient_attn.training import DistillationOptions, switch
from hf_efficient_attn.training.distillation import Distillation
from hf_efficient_attn.training.steps import learned_parameters
from hf_efficient_attn.training.switch import is_in_stage, switch_stage, training_batches
from test_distillation import HEDGEHOG, batches, values
from test_uptraining import LINFORMER, one_batch, stage
from tiny_models import METHODS, SMALL, tiny_batch, tiny_model
from uptraining_run import PLAIN, classifier, losses, samples, switches, trainer_of

TWO = [("linformer", 3, LINFORMER), ("flurka_linear", None, {**HEDGEHOG, "distill": 10})]


def test_distillation_is_a_part_of_a_stage():
    given = hea.UptrainingSchedule.parse("sdpa:2 linformer,projection_dim=8,share=none,distill=6:3 flurka_linear:end")
    assert [one.distill for one in given.stages] == [0, 6, 0]
    assert stage(hea.LinearConfig(**HEDGEHOG), distill=3, layers=[1]).distill == 3


def take_step(step, given=None, options=None):
    """A step of a custom training loop whose second stage is distilled."""
    schedule, model = hea.UptrainingSchedule(TWO), classifier()
    schedule.step(model, None, 0)
    schedule.step(model, torch.optim.AdamW(model.parameters()), step, given, options)


FIXED = [("linformer", 2, LINFORMER), ("flurka_performer", None, {"num_features": 8, "distill": 5})]
FINETUNING = DistillationOptions(finetuning=hea.training.FinetuningOptions(steps=1))


@pytest.mark.parametrize(
    ("sentence", "call"),
    [
        (
            r"the first stage has distill=6.* hea\.distill",
            lambda: hea.UptrainingSchedule.parse("linformer,distill=6:end"),
        ),
        ("distill=5: linear learns nothing .* use feature_map='hedgehog'", lambda: stage("linear", distill=5)),
        ("distill=5: kdeformer has no learned parameters", lambda: stage("kdeformer", distill=5)),
        ("distill=5: 'sdpa' is exact attention", lambda: stage("sdpa", distill=5)),
        *(
            (f"distill={steps}: give the number of steps", lambda steps=steps: stage("linformer", distill=steps))
            for steps in (-1, 0.5, True)
        ),
        ("'flurka_performer' has distill=5.* the stage before", lambda: trainer_of("nowhere", FIXED)),
        ("no batches to distill 'flurka_linear'", lambda: take_step(1)),
        ("no iterator", lambda: take_step(3, iter(batches()))),
        (r"leave out options\.finetuning", lambda: take_step(3, batches(), FINETUNING)),
    ],
)
def test_impossible_distillations_are_refused(sentence, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Trainer makes its output folder
    with pytest.raises(hea.UnsupportedAttentionError, match=sentence):
        call()


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


@torch.no_grad()
def shake(model):
    """Give learned parameters values that are not those of a conversion."""
    for p in learned_parameters(model).values():
        p.mul_(torch.rand(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(1)))
    return model


@pytest.mark.parametrize("start", ["sdpa", "linformer"])
def test_the_error_to_the_former_attention_falls(start, monkeypatch):
    """From a linformer flurka_linear learns its softmax."""
    errors = []
    for distill in (1, 40):
        model = tiny_model("bert")
        if start == "linformer":
            shake(hea.convert(model, "linformer", **LINFORMER))
        former, before, kept = copy.deepcopy(model), values(model, False), dict(model.named_parameters())
        target = stage("flurka_linear", **{**HEDGEHOG, "projection_dim": 8, "distill": distill})
        record = switched(model, target, 5)
        errors.append(output_error(model, former, tiny_batch("bert", seed=9), monkeypatch))
        close(values(model, False), before, 0)
        assert len(record["carried"]) == (4 if start == "linformer" else 0)
        assert all(dict(model.named_parameters())[name] is kept[name] for name in record["carried"])
        assert all(p.grad is None for p in model.parameters())
    assert errors[1] < 0.8 * errors[0]
    assert record["distillation"]["steps"] == 40
    assert record["distillation"]["last_loss"] < record["distillation"]["first_loss"]


@pytest.mark.parametrize("method", METHODS)
def test_switch_from_any_method_and_back(method, monkeypatch):
    """With the former attention in place of its own, a model has the output that it had before the switch."""
    model, batch, first = tiny_model("bert"), tiny_batch("bert", padding="right"), stage(method, **SMALL[method])
    own = dict(model.named_parameters())
    assert switch_stage(model, None, first, 0)["from"] == "sdpa"
    assert is_in_stage(model, first) and not is_in_stage(model, stage("sdpa"))
    shake(model)
    before = forward(model, batch).last_hidden_state
    teacher = teacher_of(model, monkeypatch)
    with capture_attention(model, lambda call: None, teacher):
        after = forward(model, batch).last_hidden_state
    valid = batch["attention_mask"].bool()
    close(after[valid], before[valid], 1e-4)
    switch_stage(model, None, stage("sdpa"), 1)
    back = dict(model.named_parameters())
    assert list(back) == list(own) and all(back[name] is p for name, p in own.items())


def test_layers_that_do_not_change_are_not_trained():
    model = shake(hea.convert(tiny_model("bert").double(), "linformer", layers=[0], **LINFORMER))
    before, fresh = values(model), values(hea.convert(tiny_model("bert").double(), "linformer", **LINFORMER))
    record, after = switched(model, stage("linformer", **LINFORMER, distill=3)), values(model)
    assert len(record["carried"]) == len(record["started"]) == 2
    close({name: after[name] for name in before}, before, 0)
    assert all(not torch.equal(after[name], fresh[name]) for name in record["started"])


def test_custom_training_loop():
    """The first stage is distilled when training begins, later ones at their switch; resumption repeats it."""

    def trained(steps, saved=None, **given):
        """Train up to `steps`, from the step and the states that an interrupted training saved, if any."""
        first, *states = saved or (0,)
        model, schedule, records = classifier(first, **PLAIN), hea.UptrainingSchedule(TWO), []
        schedule.step(model, None, max(0, first - 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for target, state in zip((model, optimizer), states, strict=False):
            target.load_state_dict(state)
        for step in range(first, steps):
            records.append(schedule.step(model, optimizer, step, batches(), **given))
            model(**one_batch()).loss.backward()
            optimizer.step(), optimizer.zero_grad()
        return model, optimizer, records

    whole, optimizer, records = trained(6)
    assert [record and (record["step"], record["to"], record["distillation"]["steps"]) for record in records] == [
        None, None, None, (3, "flurka_linear", 10), None, None]  # fmt: skip
    assert records[3]["from"] == "linformer" and len(records[3]["started"]) == len(records[3]["carried"]) == 4
    # The projections keep their optimizer state.
    assert all(int(optimizer.state[learned_parameters(whole)[name]]["step"]) == 6 for name in records[3]["carried"])
    for first in (1, 3):
        model, optimizer, _ = trained(first)
        again, _, later = trained(6, (first, model.state_dict(), optimizer.state_dict()))
        assert [x and x["distillation"] for x in later] == [x and x["distillation"] for x in records[first:]]
        close(values(again), values(whole), 0)
    *_, other = trained(4, options=DistillationOptions(learning_rate=1e-4))
    assert other[3]["distillation"]["last_loss"] > records[3]["distillation"]["last_loss"]


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


def distilled(trainer) -> list[tuple]:
    log = [entry for entry in trainer.state.log_history if "distillation_steps" in entry]
    return [(entry["step"], entry["uptraining_stage"], entry["distillation_steps"]) for entry in log]


@pytest.mark.parametrize(
    "own", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["training data", "own batches"]
)
def test_callback(own, tmp_path):
    """Only the distilled parameters differ from a run without it: data and random states are those of the training."""

    def trained(folder, stages):
        given = {"distillation_batches": batches()} if own and stages is TWO else {}
        model, seen = classifier(), []

        def note(model, args, kwargs):
            if model.training:
                seen.append((kwargs["input_ids"].tolist(), torch.get_rng_state().tolist()))

        model.register_forward_pre_hook(note, with_kwargs=True)
        callback = hea.UptrainingCallback(stages, **given)
        trainer = trainer_of(folder, None, model, steps=5, callbacks=[callback])
        trainer.train()
        return trainer, seen

    plain, order = trained(tmp_path / "plain", [("linformer", 3, LINFORMER), ("flurka_linear", None, HEDGEHOG)])
    whole, again = trained(tmp_path / "whole", TWO)
    assert again == order and len(order) == 5
    assert losses(whole) != losses(plain) and losses(whole)[:3] == losses(plain)[:3]
    for trainer in (whole, plain):
        assert switches(trainer.state.log_history) == [(3, "linformer", "flurka_linear")]
    assert distilled(whole) == [(3, "flurka_linear", 10)]


def test_training_options(tmp_path):
    """Also under autocast."""
    stages = [("linformer", 2, {"projection_dim": 8}), ("linear", None, {**HEDGEHOG, "distill": 30})]
    options = {"bf16": True, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    trainer = trainer_of(tmp_path, stages, steps=3, **options)
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "distillation_steps" in entry]
    assert entry["distillation_last_loss"] < entry["distillation_first_loss"]


def test_a_training_set_that_can_only_be_iterated_needs_other_batches(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(samples())

    stages = [("sdpa", 1), ("linear", None, {**HEDGEHOG, "distill": 2})]
    trainer = trainer_of(tmp_path, stages, data=Stream())
    with pytest.raises(hea.UnsupportedAttentionError, match=r"\(Stream\) can only be iterated.*distillation_batches="):
        trainer.train()
    callback = hea.UptrainingCallback(stages, batches())
    trainer = trainer_of(tmp_path, None, callbacks=[callback], steps=2, data=Stream())
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
