"""Up-training: schedules, switches during training, the callback, and stages that are distilled first.

test_uptraining_resume.py kills trainings.
"""

import copy
import json
import pickle
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainingArguments

import hf_efficient_attn as hea
from each import close, refuses
from helpers import trainings
from helpers.trainings import HEDGEHOG, PLAIN, batches, classifier, losses, samples, switches, trainer_of, values
from hf_efficient_attn.evaluation.capture import capture_attention, forward
from hf_efficient_attn.integration.learned import learned_of
from hf_efficient_attn.training import DistillationOptions, switch
from hf_efficient_attn.training.distillation import Distillation
from hf_efficient_attn.training.steps import learned_parameters
from hf_efficient_attn.training.switch import Stage, is_in_stage, switch_stage, training_batches
from tiny_models import METHODS, SMALL, tiny_batch, tiny_model

LINFORMER = {"projection_dim": 8, "share": "none"}
TWO = [("linformer", 0.25, LINFORMER), ("flurka_performer", 1.0, {"num_features": 16})]
# Stages that drop and add parameters.
THREE = [("linformer", 0.25, {"projection_dim": 8}), ("linear", 0.5), ("flurka_linear", 1.0, {"projection_dim": 8})]


def test_stages_and_their_hyperparameters():
    schedule = hea.UptrainingSchedule(TWO, 100)
    assert schedule.ends(100) == [25, 100]
    assert [schedule.index(step) for step in (0, 24, 25, 99, 100)] == [0, 0, 1, 1, 1]
    assert hea.UptrainingSchedule([("sdpa", 0.29), ("linear", 1.0)]).ends(100) == [29, 100]
    counted = hea.UptrainingSchedule([("sdpa", 10), ("linear", 15), ("performer", None)])
    assert counted.ends(40) == [10, 15, 40] and [counted.index(s) for s in (9, 10, 15, 1000)] == [0, 1, 2, 2]
    assert config_of(TWO) == hea.FlurkaPerformerConfig(**LINFORMER, num_features=16)
    config = config_of([("performer", 0.5, {"num_features": 32, "seed": 5}), ("flurka_performer", 1.0)])
    assert (config.num_features, config.seed) == (32, 5)


def config_of(stages):
    return hea.UptrainingSchedule(stages).stages[1].settings.entries[0].config


@pytest.mark.parametrize(
    ("sentence", "stages"),
    [
        ("at least one", []),
        ("is not a stage", "linformer:1.0"),
        *(
            ("cannot be", stages)
            for stages in [
                [("linformer", 0.25)],
                [("linformer", 0.25), ("linear", 0.9)],
                [("linformer", 0.5), ("linear", 0.25), ("sdpa", 1.0)],
                *([("linformer", end), ("linear", 1.0)] for end in (5, None, 0.0, float("nan"))),
                *([("linformer", end)] for end in (1.5, True)),
            ]
        ),
        ("unknown .* Did you mean 'linformer'.* import that file first", [("linfromer", 1.0)]),
        ("projection_dim", [("linformer", 1.0, {"projection_dims": 3})]),
        ("no layers or hyperparameters", [("sdpa", 1.0, {"seed": 3})]),
        *(("not a stage", [one]) for one in (("linformer",), {"attention": "linear"})),
        ("'linformer' would have none of the 10 steps", [("linformer", 0.01), ("linear", 1.0)]),
    ],
)
def test_wrong_stages_are_refused(sentence, stages):
    refuses(sentence, hea.UptrainingSchedule, stages, total_steps=10)


def test_schedules_from_strings_and_copies():
    stages = ["linformer,projection_dim=8,share=none:0.25", "flurka_performer,num_features=16:1.0"]
    given = hea.UptrainingSchedule.parse(stages)
    assert given.stages == hea.UptrainingSchedule(TWO).stages
    assert hea.UptrainingSchedule.parse("sdpa:200 kdeformer,near_field=window:end").ends(300) == [200, 300]
    for text in ("linformer", "linformer:x", ":0.5", "linformer,projection_dim:1.0"):
        refuses("write", hea.UptrainingSchedule.parse, [text])
    refuses("total_steps", given.index, 3)
    kdeformer = hea.KDEformerConfig(num_samples=8)
    schedule = hea.UptrainingSchedule([*TWO[:1], ("sdpa", 0.5), (kdeformer, 1.0, {"layers": [1]})])
    assert copy.deepcopy(schedule).stages == hea.UptrainingSchedule(schedule).stages == schedule.stages
    assert schedule.stages[2].settings.layers == (1,)
    given = hea.UptrainingSchedule.parse("sdpa:2 linformer,projection_dim=8,share=none,distill=6:3 flurka_linear:end")
    assert [one.distill for one in given.stages] == [0, 6, 0]
    assert stage(hea.LinearConfig(**HEDGEHOG), distill=3, layers=[1]).distill == 3


def test_presets_are_those_of_the_paper():
    """Gupta et al. 2023, appendices A.3 and A.4: shares of the steps, and only the encoder of a translation model."""
    for task, variant, shares in [
        ("nmt", "flurka_performer", [("linformer", 0.8), ("flurka_performer", 1.0)]),
        ("nmt", "flurka_linear", [("linear", 0.64), ("flurka_linear", 1.0)]),
        ("imagenet", "flurka_eva", [("linformer", 0.167), ("flurka_eva", 1.0)]),
        ("imagenet", "flurka_linear", [("linear", 0.333), ("flurka_linear", 1.0)]),
        ("glue", "flurka_performer", [("flurka_performer", 1.0)]),
    ]:
        assert [(s.attention, s.end) for s in hea.uptraining_preset(task, variant).stages] == shares
    assert config_of(hea.uptraining_preset("imagenet", projection_dim=16, num_features=8)).projection_dim == 16
    for task, variant, options in (("nmtt", "flurka_eva", {}), ("nmt", "linear", {}), ("nmt", "flurka_eva", {"x": 1})):
        refuses("unknown", hea.uptraining_preset, task, variant, **options)
    model = trainings.translator()
    hea.uptraining_preset("nmt", layers=["encoder"], projection_dim=8, total_steps=5).step(model, None, 0)
    assert learned_parameters(model) and all(name.startswith("encoder.") for name in learned_parameters(model))


def stage(attention: str, **hyperparameters) -> Stage:
    return hea.UptrainingSchedule([("eager", 0.5), (attention, 1.0, hyperparameters)]).stages[1]


@pytest.mark.parametrize(
    ("family", "share", "after", "count"),
    [
        *((family, "none", stage("flurka_performer", **LINFORMER), 4) for family in ("bert", "vit")),
        # Keys and values share a projection. The first keeps the parameter, and the others start from a copy.
        ("bert", "kv", stage("flurka_linear", **LINFORMER), 2),
        # Of another size: nothing is carried over.
        ("bert", "none", stage("flurka_linear", projection_dim=16), 0),
    ],
)
def test_learned_parameters_of_the_base_are_carried_over(family, share, after, count):
    model = hea.convert(tiny_model(family), "linformer", projection_dim=8, share=share)
    fresh = learned_parameters(hea.convert(tiny_model(family), after.settings))
    before = learned_parameters(model)
    with torch.no_grad():
        for projection in before.values():
            projection.uniform_()
    values = [projection.clone() for projection in before.values()]
    record, learned = switch_stage(model, None, after, 7), learned_parameters(model)
    kept = {name: p for name, p in learned.items() if any(p is old for old in before.values())}
    new = {name: p for name, p in learned.items() if name not in kept}
    assert (len(kept), list(kept), list(new)) == (count, record["carried"], record["started"])
    assert record["step"] == 7 and record["dropped"] == ([] if count else list(before))
    if count:
        assert all(torch.equal(p, value) for p, value in zip(kept.values(), values, strict=True))
        assert share == "none" or len(new) == count
        assert all(torch.equal(p, value) for p, value in zip(new.values(), values, strict=False))
    else:
        close(new, fresh, 0)


def test_optimizer_follows_a_switch(tmp_path):
    """Shared parameters keep their state, dropped ones disappear, and new ones are where a new optimizer has them."""
    model = classifier(**PLAIN)
    hea.convert(model, "linformer", projection_dim=8)
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, weight_decay=0.1, learning_rate=1e-2)
    optimizer = Trainer(model, arguments).create_optimizer()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    batch = one_batch()
    for _ in range(3):
        model(**batch).loss.backward()
        optimizer.step(), scheduler.step(), optimizer.zero_grad()
    query = model.bert.encoder.layer[0].attention.self.query.weight
    state, rate = {k: v.clone() for k, v in optimizer.state[query].items()}, scheduler.get_last_lr()
    for settings in (stage("linear"), stage("flurka_linear", projection_dim=8), stage("eva", **SMALL["eva"])):
        record = switch_stage(model, optimizer, settings, 3)
        names = {id(p): name for name, p in model.named_parameters()}
        optimizers = (optimizer, Trainer(model, arguments).create_optimizer())
        ours, theirs = ([[names[id(p)] for p in group["params"]] for group in o.param_groups] for o in optimizers)
        assert ours == theirs
        assert all(torch.equal(optimizer.state[query][k], v) for k, v in state.items())
        assert {id(p) for p in optimizer.state} <= set(names)
        learned = learned_parameters(model)
        assert set(record["started"]) == set(learned) and not any(p in optimizer.state for p in learned.values())
        assert scheduler.get_last_lr() == rate
        # Learned parameters have weight decay, as other matrices do.
        assert optimizer.param_groups[0]["weight_decay"] == 0.1 and learned.keys() <= set(ours[0])
    model(**batch).loss.backward()
    optimizer.step(), scheduler.step()


def one_batch() -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples(4)]) for name in ("input_ids", "labels")}


def test_custom_parameter_groups_and_frozen_parameters():
    """A new parameter joins the group of its attention module's weights. Frozen parameters are in no group."""
    model = classifier(**PLAIN)
    layers = model.bert.encoder.layer
    model.bert.embeddings.requires_grad_(False)
    groups = [{"params": list(layers[i].parameters()), "lr": 0.1 * (i + 1)} for i in (0, 1)]
    optimizer = torch.optim.AdamW([{"params": model.classifier.parameters(), "lr": 1.0}, *groups])
    switch_stage(model, optimizer, stage("linformer", projection_dim=8), 0)
    for i, group in enumerate(optimizer.param_groups[1:]):
        (projection,) = layers[i].attention.self.learned_parameters.parameters()
        assert sum(p is projection for p in group["params"]) == 1 and group["lr"] == pytest.approx(0.1 * (i + 1))
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2 + 2 * 17


def test_callback_switches_and_logs(tmp_path):
    trainer = trainer_of(tmp_path, TWO, weight_decay=0.1, save_steps=1)
    trainer.train()
    # The projections remain the same parameters, so their optimizer state continues.
    states = trainer.optimizer.optimizer.state
    assert len(learned_parameters(trainer.model)) == 4 and len(states) == len(list(trainer.model.parameters()))
    assert all(int(states[p]["step"]) == 8 for p in trainer.model.parameters())
    for step, method in ((1, "linformer"), (2, "linformer"), (3, "flurka_performer"), (8, "flurka_performer")):
        folder = tmp_path / f"checkpoint-{step}"
        assert json.loads((folder / "config.json").read_text())["attn_implementation"] == method
        history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        assert switches(history) == [(2, "linformer", "flurka_performer")] * (step > 2)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-8")
    close(dict(loaded.named_parameters()), dict(trainer.model.named_parameters()), 0)


OPTIONS = [{"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}, {"bf16": True}]
OPTIONS += [{"torch_compile": True, "torch_compile_backend": "eager"}]


@pytest.mark.parametrize(
    "options",
    [{"gradient_checkpointing": True}, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in OPTIONS)],
    ids=str,
)
def test_training_options(options, tmp_path):
    """Losses equal those without the option, up to rounding, also after a switch that drops and adds parameters."""

    def run(folder, **options):
        model = classifier(**PLAIN)
        # Trainer divides by the number of accumulated batches only if the model's loss does not.
        model.accepts_loss_kwargs = False
        trainer = trainer_of(folder, THREE, model, steps=4, adam_epsilon=1e-3, **options)
        trainer.train()
        assert [to for *_, to in switches(trainer.state.log_history)] == ["linear", "flurka_linear"]
        return torch.tensor(losses(trainer), dtype=torch.float64)

    tolerance = 2e-2 if "bf16" in options else 2e-4
    torch.testing.assert_close(run(tmp_path / "b", **options), run(tmp_path / "a"), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("sentence", "make_model", "stages"),
    [
        ("'performer' would have none", classifier, [("linear", 20), ("performer", None)]),
        ("no causal form", trainings.decoder, [("linear", 0.5), ("nystromformer", 1.0)]),
        ("no causal form", trainings.translator, hea.uptraining_preset("nmt", projection_dim=8)),
        ("PEFT saves only its adapters", trainings.lora, [("linformer", 2), ("linear", None)]),
    ],
)
def test_refusals_come_before_the_first_step(sentence, make_model, stages, tmp_path):
    refuses(sentence, lambda: trainer_of(tmp_path, stages, make_model()).train())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("has_optimizer", "step"), [(True, 0), (False, 0), (False, 7)])
def test_a_loop_without_trainer_refuses_a_later_stage_in_its_first_call(has_optimizer, step):
    """It may start with an optimizer, or resume at any step."""
    model, schedule = trainings.decoder(), hea.UptrainingSchedule([("linear", 20), ("nystromformer", None)])
    names = list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if has_optimizer else None
    refuses("no causal form", schedule.step, model, optimizer, step)
    assert model.config._attn_implementation == "sdpa" and list(model.state_dict()) == names


def test_fsdp_is_refused_for_stages_that_learn_other_parameters():
    args, callback = SimpleNamespace(fsdp="full_shard"), hea.UptrainingCallback([("linformer", 2), ("linear", None)])
    words = "do not learn the same parameters.*DistributedDataParallel"
    refuses(words, callback.on_init_end, args, None, None, model=classifier())


def test_weights_of_other_stages_are_refused(tmp_path):
    first, second = ("linformer", 2, {"projection_dim": 8}), ("flurka_performer", {"num_features": 8, "share": "none"})
    trainer_of(tmp_path, [first, (second[0], None, second[1])], steps=4, save_steps=3).train()
    resume = str(tmp_path / "checkpoint-3")
    for stages, message in [
        ([first, ("performer", None)], "learned_parameters.* none of the stages linformer, performer"),
        ([("linformer", 2, {"projection_dim": 86}), (second[0], None, second[1])], r"of shape \(8, 128\), which none"),
    ]:
        refuses(message, lambda: trainer_of(tmp_path, stages).train(resume_from_checkpoint=resume))  # noqa: B023
    # Later stages may end elsewhere, or be replaced.
    stages = [first, (second[0], 4, second[1]), ("flurka_linear", None, {"share": "none"})]
    trainer = trainer_of(tmp_path, stages, steps=6, callbacks=[seen := trainings.Attention()])
    trainer.train(resume_from_checkpoint=resume)
    assert seen.names == ["flurka_performer", "flurka_linear", "flurka_linear"]


def test_other_attention_than_at_the_checkpoint_is_refused(tmp_path):
    """Where the weights do not tell it: other hyperparameters and seeds, and another method in the first stage."""
    first, second = ("performer", 2, {"num_features": 8}), ("linear", None)
    trainer_of(tmp_path, [first, second], steps=4, save_steps=1).train()
    exact, drawn = ("sdpa", 2), ("performer", 2, {"num_features": 8, "seed": 1})
    windowed = ("linear", None, {"window_size": 8})
    for at, stages in [(1, [exact, second]), (1, [drawn, second]), (3, [first, windowed])]:
        resume = str(tmp_path / f"checkpoint-{at}")
        trainer = trainer_of(tmp_path, stages, steps=4)
        refuses(f"step {at} was trained with .*resume with the stages", trainer.train, resume_from_checkpoint=resume)
    trainer_of(tmp_path, [first, windowed], steps=4).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    trainer_of(tmp_path, None, hea.convert(classifier(), "kdeformer", num_samples=8), steps=4, save_steps=4).train()
    trainer = trainer_of(tmp_path, [("nearfar", 6), ("sdpa", None)])
    refuses("with .*'kdeformer', .*'nearfar'", trainer.train, resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


@pytest.mark.parametrize(
    ("stages", "model_init"),
    [(x, None) for x in (TWO, [("performer", 0.25), ("linear", 1.0)], [("sdpa", 0.25), ("linformer", 1.0)])]
    + [([TWO[0], ("linear", 1.0)], classifier)],
    ids=["learned", "weights of any stage", "other parameters", "a model that Trainer makes"],
)
def test_best_model_is_in_its_own_stage(stages, model_init, tmp_path):
    """The best step was not saved, and it is in a later stage than the best saved one."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "greater_is_better": True}
    trainer = trainer_of(tmp_path, stages, save_steps=2, metric_for_best_model="score", **options)
    trainer.model_init = model_init and (lambda trial: model_init())
    trainer.model.register_load_state_dict_pre_hook(lambda *given: None)  # PyTorch iterates over several

    def score(prediction) -> dict[str, float]:
        step = trainer.state.global_step
        return {"score": step if step <= 3 else -step}

    trainer.compute_metrics = score
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    saved = tmp_path / "checkpoint-2"
    assert trainer.state.best_model_checkpoint == str(saved) and trainer.state.best_global_step == 3
    assert trainer.model.config._attn_implementation == stages[0][0]
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "final" / file).read_bytes() == (saved / file).read_bytes()


def test_incomplete_checkpoints_are_renamed(tmp_path):
    """Each file that a kill may leave truncated is truncated; nothing is deleted."""

    def trainer(**options):
        return trainer_of(tmp_path, TWO, steps=4, **options)

    whole = trainer(save_steps=2)
    whole.train()
    path = tmp_path / "checkpoint-4"
    files = "trainer_state.json", "rng_state.pth", "model.safetensors", "optimizer.pt"
    for number, name in enumerate(files, start=1):
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[: len(content) // 2])
        trainer()
        renamed = tmp_path / f"incomplete-checkpoint-4-{number}"
        assert not path.exists() and (renamed / name).stat().st_size == len(content) // 2
        shutil.copytree(renamed, path)
        (path / name).write_bytes(content)
    (path / "trainer_state.json").unlink()
    again = trainer()
    again.train(resume_from_checkpoint=True)
    assert losses(again) == losses(whole) and (tmp_path / "incomplete-checkpoint-4-5").is_dir()
    # Without a complete checkpoint Trainer reports that.
    (tmp_path / "checkpoint-2" / "trainer_state.json").unlink()
    refuses("No valid checkpoint found", trainer().train, resume_from_checkpoint=True, error=ValueError)
    assert (tmp_path / "incomplete-checkpoint-2-1").is_dir()


DISTILLED = [("linformer", 3, LINFORMER), ("flurka_linear", None, {**HEDGEHOG, "distill": 10})]


def take_step(given=None, options=None):
    """A step before the switch of a custom training loop whose second stage is distilled."""
    schedule, model = hea.UptrainingSchedule(DISTILLED), classifier()
    schedule.step(model, None, 0)
    schedule.step(model, torch.optim.AdamW(model.parameters()), 1, given, options)


def train(given=None, options=None, data=None):
    """A training whose second stage is distilled, which must not begin."""
    model = classifier()
    model.register_forward_pre_hook(lambda *_: pytest.fail("a step was taken"))
    trainer_of("nowhere", None, model, callbacks=[hea.UptrainingCallback(DISTILLED, given, options)], data=data).train()


FIXED = [("linformer", 2, LINFORMER), ("flurka_performer", None, {"num_features": 8, "distill": 5})]
FINETUNING = DistillationOptions(finetuning=hea.training.FinetuningOptions(steps=1))


@pytest.mark.parametrize(
    ("sentence", "call"),
    [
        (r"first stage has distill=6.* hea\.distill", lambda: hea.UptrainingSchedule.parse("linformer,distill=6:end")),
        ("distill=5: linear learns nothing .* use feature_map='hedgehog'", lambda: stage("linear", distill=5)),
        ("distill=5: kdeformer has no learned parameters", lambda: stage("kdeformer", distill=5)),
        ("distill=5: 'sdpa' is exact attention", lambda: stage("sdpa", distill=5)),
        *((f"={x} must be 0 or more, an integer", lambda x=x: stage("linformer", distill=x)) for x in (-1, 0.5, True)),
        ("'flurka_performer' has distill=5.* the stage before", lambda: trainer_of("nowhere", FIXED)),
        ("to distill 'flurka_linear', .* in every call", take_step),
        ("no iterator", lambda: take_step(iter(batches()))),
        (r"leave out options\.finetuning", lambda: take_step(batches(), FINETUNING)),
        ("no iterator", lambda: train(iter(batches()))),
        ("a single batch", lambda: train(data=samples(4))),
    ],
)
def test_impossible_distillations_are_refused(sentence, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Trainer makes its output folder
    refuses(sentence, call)


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
    """Give learned parameters values that differ from the start values of a conversion."""
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
        record = switched(model, stage("flurka_linear", **{**HEDGEHOG, "projection_dim": 8, "distill": distill}), 5)
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
    with capture_attention(model, lambda call: None, teacher_of(model, monkeypatch)):
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
        model, schedule, records = classifier(first, **PLAIN), hea.UptrainingSchedule(DISTILLED), []
        schedule.step(model, None, first)
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
    refuses(sentence, switched, model, stage("linear", **HEDGEHOG, distill=3))
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


@pytest.mark.parametrize("own", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_the_callback_distills(own, tmp_path):
    """Distillation changes its parameters only; the training sees the same data and random states as without it."""

    def trained(folder, stages):
        given = {"distillation_batches": batches()} if own and stages is DISTILLED else {}
        model, seen = classifier(), []

        def note(model, args, kwargs):
            if model.training:
                seen.append((kwargs["input_ids"].tolist(), torch.get_rng_state().tolist()))

        model.register_forward_pre_hook(note, with_kwargs=True)
        trainer = trainer_of(folder, None, model, steps=5, callbacks=[hea.UptrainingCallback(stages, **given)])
        trainer.train()
        return trainer, seen

    plain, order = trained(tmp_path / "plain", [("linformer", 3, LINFORMER), ("flurka_linear", None, HEDGEHOG)])
    whole, again = trained(tmp_path / "whole", DISTILLED)
    assert again == order and len(order) == 5
    assert losses(whole) != losses(plain) and losses(whole)[:3] == losses(plain)[:3]
    for trainer in (whole, plain):
        assert switches(trainer.state.log_history) == [(3, "linformer", "flurka_linear")]
    assert distilled(whole) == [(3, "flurka_linear", 10)]


def test_a_trained_model_has_nothing_of_the_training(tmp_path):
    uncopied = (None for _ in ())
    trainer = trainer_of(tmp_path, DISTILLED, steps=4, data=[{**x, "unused": uncopied} for x in samples()])
    trainer.train()
    weights = hea.convert(pickle.loads(pickle.dumps(trainer.model)), "linformer", projection_dim=4).state_dict()
    hea.convert(trainer.model, "sdpa").load_state_dict(weights, strict=False)


def test_batches_of_a_training_set_that_has_no_index_and_of_others(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(samples())

    stages = [("sdpa", 1), ("linear", None, {**HEDGEHOG, "distill": 2})]
    trainer = trainer_of(tmp_path, stages, data=Stream())
    refuses(r"\(Stream\) can only be iterated.*distillation_batches=", trainer.train)
    trainer = trainer_of(tmp_path, None, callbacks=[hea.UptrainingCallback(stages, batches())], steps=2, data=Stream())
    trainer.train()
    assert distilled(trainer) == [(1, "linear", 2)]
    data, joined = list(range(22)), []
    for rank in range(2):
        found = list(training_batches(data, list, 4, rank, 2))
        assert [len(batch) for batch in found] == [4] * len(found)
        joined += found
    assert [0, 5, 10, 15] in joined and joined != sorted(joined)
    assert sorted(x for batch in joined for x in batch) == data[:20]
    loader = DataLoader(samples(), batch_size=4, shuffle=True)
    assert next(iter(training_batches(loader.dataset, loader.collate_fn, 4)))["input_ids"].shape == (4, 24)
