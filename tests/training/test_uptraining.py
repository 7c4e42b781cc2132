"""Up-training: schedules, switches during training, and the callback. test_uptraining_resume.py tests resumption."""

import copy
import json
import shutil

import pytest
import torch
import transformers
from transformers import Trainer, TrainingArguments

import hf_efficient_attn as hea
from hf_efficient_attn.training.steps import learned_parameters
from hf_efficient_attn.training.switch import Stage, is_in_stage, switch_stage
from tiny_models import METHODS, SMALL, tiny_class, tiny_config, tiny_model

TWO = [("linformer", 0.25, {"projection_dim": 8, "share": "none"}), ("flurka_performer", 1.0, {"num_features": 16})]
PLAIN = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def classifier(seed: int = 0, **changes):
    torch.manual_seed(seed)
    return transformers.BertForSequenceClassification(tiny_config("bert", **changes))


def samples(count: int = 48, num_tokens: int = 24) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randint(5, 60, (num_tokens,), generator=generator),
            "attention_mask": [1] * num_tokens,
            "labels": i % 2,
        }
        for i in range(count)
    ]


def one_batch() -> dict[str, torch.Tensor]:
    four = samples(4)
    return {name: torch.stack([torch.as_tensor(sample[name]) for sample in four]) for name in ("input_ids", "labels")}


def trainer_of(folder, schedule, model=None, steps: int = 8, callbacks=(), data=None, **options) -> Trainer:
    usual = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no"}
    arguments = TrainingArguments(
        str(folder), max_steps=steps, report_to="none", use_cpu=True, disable_tqdm=True, seed=3, **{**usual, **options}
    )
    callbacks = [*([] if schedule is None else [hea.UptrainingCallback(schedule)]), *callbacks]
    model = classifier() if model is None else model
    return Trainer(model, arguments, train_dataset=data or samples(), callbacks=callbacks)


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def resumed(folder, schedule, make_model, at: int, steps: int, data=None) -> Trainer:
    """Train, and train again from checkpoint `at`; assert that both are equal. Return the uninterrupted training."""
    found = []
    for resume in (None, str(folder / f"checkpoint-{at}")):
        options = {"save_strategy": "steps", "save_steps": at}
        found.append(trainer_of(folder, schedule, make_model(), data=data, steps=steps, **options))
        found[-1].train(resume_from_checkpoint=resume)
    whole, again = found
    assert losses(again) == losses(whole)
    assert all(torch.equal(p, dict(whole.model.named_parameters())[n]) for n, p in again.model.named_parameters())
    return whole


def switches(trainer: Trainer) -> list[tuple[int, str, str]]:
    found = [entry for entry in trainer.state.log_history if "uptraining_stage" in entry]
    return [(entry["step"], entry["uptraining_from"], entry["uptraining_stage"]) for entry in found]


class Seen(transformers.TrainerCallback):
    """Records the model's attention and the steps of the optimizer's state at the beginning of each step."""

    def __init__(self) -> None:
        self.names, self.states = [], []

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.names.append(model.config._attn_implementation)
        names = {id(p): name for name, p in model.named_parameters()}
        self.states.append({names[id(p)]: int(value["step"]) for p, value in optimizer.optimizer.state.items()})


def test_stages_by_share_and_by_step():
    schedule = hea.UptrainingSchedule(TWO, 100)
    assert schedule.ends(100) == [25, 100]
    assert [schedule.index(step) for step in (0, 24, 25, 99, 100)] == [0, 0, 1, 1, 1]
    assert hea.UptrainingSchedule([("sdpa", 0.29), ("linear", 1.0)]).ends(100) == [29, 100]
    counted = hea.UptrainingSchedule([("sdpa", 10), ("linear", 15), ("performer", None)])
    assert counted.ends(40) == [10, 15, 40] and [counted.index(s) for s in (9, 10, 15, 1000)] == [0, 1, 2, 2]
    with pytest.raises(hea.UnsupportedAttentionError, match="total_steps"):
        hea.UptrainingSchedule(TWO).index(3)


def test_stages_inherit_hyperparameters():
    second = hea.UptrainingSchedule(TWO).stages[1]
    assert second.settings.entries[0].config == hea.FlurkaPerformerConfig(
        projection_dim=8, share="none", num_features=16
    )
    stages = [("performer", 0.5, {"num_features": 32, "seed": 5}), ("flurka_performer", 1.0)]
    config = hea.UptrainingSchedule(stages).stages[1].settings.entries[0].config
    assert (config.num_features, config.seed) == (32, 5)


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
    ],
)
def test_bad_schedules_are_refused(sentence, stages):
    with pytest.raises(hea.UnsupportedAttentionError, match=sentence):
        hea.UptrainingSchedule(stages)


def test_schedules_from_strings():
    given = hea.UptrainingSchedule.parse(
        ["linformer,projection_dim=8,share=none:0.25", "flurka_performer,num_features=16:1.0"]
    )
    assert given.stages == hea.UptrainingSchedule(TWO).stages
    assert hea.UptrainingSchedule.parse("sdpa:200 kdeformer,near_field=window:end").ends(300) == [200, 300]
    for text in ("linformer", "linformer:x", ":0.5", "linformer,projection_dim:1.0"):
        with pytest.raises(hea.UnsupportedAttentionError, match="write"):
            hea.UptrainingSchedule.parse([text])


def test_schedules_survive_copies():
    schedule = hea.UptrainingSchedule(
        [*TWO[:1], ("sdpa", 0.5), (hea.KDEformerConfig(num_samples=8), 1.0, {"layers": [1]})]
    )
    assert copy.deepcopy(schedule).stages == hea.UptrainingSchedule(schedule).stages == schedule.stages
    assert schedule.stages[2].settings.layers == (1,)


def test_presets_have_the_shares_of_the_paper():
    """Gupta et al. 2023, appendix A.4."""
    for task, variant, shares in [
        ("nmt", "flurka_performer", [("linformer", 0.8), ("flurka_performer", 1.0)]),
        ("nmt", "flurka_linear", [("linear", 0.64), ("flurka_linear", 1.0)]),
        ("imagenet", "flurka_eva", [("linformer", 0.167), ("flurka_eva", 1.0)]),
        ("imagenet", "flurka_linear", [("linear", 0.333), ("flurka_linear", 1.0)]),
        ("glue", "flurka_performer", [("flurka_performer", 1.0)]),
    ]:
        assert [(s.attention, s.end) for s in hea.uptraining_preset(task, variant).stages] == shares
    narrow = hea.uptraining_preset("imagenet", projection_dim=16, num_features=8)
    assert narrow.stages[1].settings.entries[0].config.projection_dim == 16
    for task, variant, options in (("nmtt", "flurka_eva", {}), ("nmt", "linear", {}), ("nmt", "flurka_eva", {"x": 1})):
        with pytest.raises(hea.UnsupportedAttentionError, match="unknown"):
            hea.uptraining_preset(task, variant, **options)


def stage(attention: str, **hyperparameters) -> Stage:
    return hea.UptrainingSchedule([("eager", 0.5), (attention, 1.0, hyperparameters)]).stages[1]


@pytest.mark.parametrize("family", ["bert", "vit"])
def test_learned_parameters_of_the_base_are_carried_over(family):
    model = tiny_model(family)
    hea.convert(model, "linformer", projection_dim=8, share="none")
    learned = learned_parameters(model)
    assert len(learned) == 4
    with torch.no_grad():
        for projection in learned.values():
            projection.uniform_()
    values = {name: projection.clone() for name, projection in learned.items()}
    record = switch_stage(model, None, stage("flurka_performer", projection_dim=8), 7)
    after = learned_parameters(model)
    assert sorted(record["carried"]) == sorted(after) == sorted(learned)
    assert not record["started"] and not record["dropped"] and record["step"] == 7
    assert all(after[name] is learned[name] and torch.equal(after[name], values[name]) for name in learned)


@pytest.mark.parametrize(
    ("share", "after"),
    [
        ("kv", stage("flurka_linear", projection_dim=8, share="none")),
        # Of another size: nothing is carried over.
        ("none", stage("flurka_linear", projection_dim=16)),
    ],
)
def test_a_shared_projection_becomes_several(share, after):
    """Keys and values share it. The first keeps the parameter, and the others start from a copy."""
    model = hea.convert(tiny_model("bert"), "linformer", projection_dim=8, share=share)
    fresh = learned_parameters(hea.convert(tiny_model("bert"), after.settings))
    before = list(learned_parameters(model).values())
    with torch.no_grad():
        for projection in before:
            projection.uniform_()
    record = switch_stage(model, None, after, 0)
    learned = learned_parameters(model)
    kept = [p for p in learned.values() if any(p is old for old in before)]
    new = {name: p for name, p in learned.items() if not any(p is old for old in before)}
    assert len(kept) == len(record["carried"]) and list(new) == record["started"]
    if share == "none":
        assert not kept and len(record["dropped"]) == 4
        assert all(torch.equal(p, fresh[name]) for name, p in new.items())
    else:
        assert len(kept) == len(before) == len(new) and not record["dropped"]
        assert all(torch.equal(p, old) for p, old in zip(new.values(), before, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_switch_from_exact_attention_to_any_method_and_back(method):
    model = tiny_model("bert")
    before = dict(model.named_parameters())
    first = stage(method, **SMALL[method])
    record = switch_stage(model, None, first, 0)
    assert record["from"] == "sdpa" and is_in_stage(model, first) and not is_in_stage(model, stage("sdpa"))
    switch_stage(model, None, stage("sdpa"), 1)
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)


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
        anew = Trainer(model, arguments).create_optimizer()
        names = {id(p): name for name, p in model.named_parameters()}
        ours, theirs = (
            [[names[id(p)] for p in group["params"]] for group in o.param_groups] for o in (optimizer, anew)
        )
        assert ours == theirs
        assert all(torch.equal(optimizer.state[query][k], v) for k, v in state.items())
        assert {id(p) for p in optimizer.state} <= set(names)
        learned = learned_parameters(model)
        assert set(record["started"]) == set(learned) and not any(p in optimizer.state for p in learned.values())
        assert scheduler.get_last_lr() == rate
        # Learned parameters have weight decay, as other matrices do.
        decayed = {id(p) for p in optimizer.param_groups[0]["params"]}
        assert optimizer.param_groups[0]["weight_decay"] == 0.1 and all(id(p) in decayed for p in learned.values())
    model(**batch).loss.backward()
    optimizer.step(), scheduler.step()


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
    seen = Seen()
    trainer = trainer_of(tmp_path, TWO, callbacks=[seen], weight_decay=0.1, save_strategy="steps", save_steps=1)
    trainer.train()
    assert seen.names == ["linformer"] * 2 + ["flurka_performer"] * 6
    assert switches(trainer) == [(2, "linformer", "flurka_performer")]
    learned = [name for name in seen.states[3] if "learned_parameters" in name]
    # The projections remain the same parameters, so their optimizer state continues.
    assert len(learned) == 4 and all(seen.states[5][name] == 5 for name in seen.states[5])
    for step, method in ((1, "linformer"), (2, "linformer"), (3, "flurka_performer"), (8, "flurka_performer")):
        folder = tmp_path / f"checkpoint-{step}"
        assert json.loads((folder / "config.json").read_text())["attn_implementation"] == method
        history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        assert sum("uptraining_stage" in entry for entry in history) == (step > 2)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-8")
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, dict(loaded.named_parameters())[name])


def test_one_stage_is_plain_training(tmp_path):
    model = hea.convert(classifier(), "linformer", projection_dim=8)
    stages, trainers = [("linformer", 1.0, {"projection_dim": 8})], []
    for folder, *given in (("a", None, model), ("b", stages)):
        trainers.append(trainer_of(tmp_path / folder, *given, steps=3))
        trainers[-1].train()
    assert losses(trainers[0]) == losses(trainers[1])


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True},
        pytest.param(
            {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}, marks=pytest.mark.exhaustive
        ),
        pytest.param({"bf16": True}, marks=pytest.mark.exhaustive),
        pytest.param({"torch_compile": True, "torch_compile_backend": "eager"}, marks=pytest.mark.exhaustive),
    ],
    ids=lambda options: next(iter(options)),
)
def test_training_options(options, tmp_path):
    """Losses equal those without the option, up to rounding, also after a switch that drops and adds parameters."""
    schedule = [
        ("linformer", 0.25, {"projection_dim": 8}),
        ("linear", 0.5),
        ("flurka_linear", 1.0, {"projection_dim": 8}),
    ]

    def run(folder, **options):
        model = classifier(**PLAIN)
        # Trainer divides by the number of accumulated batches only if the model's loss does not.
        model.accepts_loss_kwargs = False
        trainer = trainer_of(folder, schedule, model, steps=4, adam_epsilon=1e-3, **options)
        trainer.train()
        assert [to for *_, to in switches(trainer)] == ["linear", "flurka_linear"]
        return torch.tensor(losses(trainer), dtype=torch.float64)

    tolerance = 2e-2 if "bf16" in options else 2e-4
    torch.testing.assert_close(run(tmp_path / "b", **options), run(tmp_path / "a"), rtol=0, atol=tolerance)


def test_peft_lora(tmp_path):
    """Stages that learn nothing of their own. Others are refused, because PEFT would not save their parameters."""
    peft = pytest.importorskip("peft")

    def lora():
        return peft.get_peft_model(classifier(), peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))

    with pytest.raises(hea.UnsupportedAttentionError, match="PEFT saves only its adapters"):
        trainer_of(tmp_path, [("linformer", 2), ("linear", None)], lora())
    stages = [("longformer", 2, {"window_size": 8}), ("linear", None)]
    whole = resumed(tmp_path, stages, lora, at=3, steps=4)
    assert switches(whole) == [(2, "longformer", "linear")]


def test_weights_under_older_names_can_be_resumed(tmp_path):
    """Transformers saves ViT under its names from before version 5, which Trainer cannot load."""
    generator = torch.Generator().manual_seed(1)
    images = [{"pixel_values": torch.randn(3, 32, 32, generator=generator), "labels": i % 2} for i in range(16)]

    def vit():
        torch.manual_seed(0)
        return tiny_class("vit", head=True)(tiny_config("vit"))

    resumed(tmp_path, [("linformer", 3, {"projection_dim": 8}), ("linear", None)], vit, at=2, steps=4, data=images)


def translator():
    torch.manual_seed(0)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(tiny_config("bert"), tiny_config("bert"))
    config.decoder_start_token_id, config.pad_token_id = 2, 1
    return transformers.EncoderDecoderModel(config=config)


def test_encoder_of_a_translation_model(tmp_path):
    """The paper up-trains only the encoder (Gupta et al. 2023, appendix A.3). The decoder stays exact."""
    pairs = [{"input_ids": sample["input_ids"], "labels": sample["input_ids"].flip(0)} for sample in samples(24)]
    schedule = hea.uptraining_preset("nmt", layers=["encoder"], projection_dim=8, num_features=8)

    whole = resumed(tmp_path, schedule, translator, at=4, steps=5, data=pairs)
    assert switches(whole) == [(4, "linformer", "flurka_performer")]
    assert all(name.startswith("encoder.") for name in learned_parameters(whole.model))
    with pytest.raises(hea.UnsupportedAttentionError, match="no causal form"):
        hea.uptraining_preset("nmt", projection_dim=8, total_steps=5).step(translator(), None, 0)


def test_refusals_come_before_the_first_step(tmp_path):
    with pytest.raises(hea.UnsupportedAttentionError, match="'linformer' would have none"):
        hea.UptrainingSchedule([("linformer", 0.01), ("linear", 1.0)], total_steps=10)
    with pytest.raises(hea.UnsupportedAttentionError, match="'performer' would have none"):
        trainer_of(tmp_path, [("linear", 20), ("performer", None)]).train()
    decoder = tiny_class("gpt2", head=True)(tiny_config("gpt2"))
    with pytest.raises(hea.UnsupportedAttentionError, match="no causal form"):
        trainer_of(tmp_path, [("linear", 0.5), ("nystromformer", 1.0)], decoder)


def test_incomplete_checkpoints_are_renamed(tmp_path):
    """Each file that a kill may leave truncated is truncated; nothing is deleted."""
    options = {"steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = trainer_of(tmp_path, TWO, **options)
    whole.train()
    path = tmp_path / "checkpoint-4"
    for number, name in enumerate(("trainer_state.json", "rng_state.pth"), start=1):
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[: len(content) // 2])
        trainer_of(tmp_path, TWO, **options)
        renamed = tmp_path / f"incomplete-checkpoint-4-{number}"
        assert not path.exists() and (renamed / name).stat().st_size == len(content) // 2
        shutil.copytree(renamed, path)
        (path / name).write_bytes(content)
    (path / "trainer_state.json").unlink()
    again = trainer_of(tmp_path, TWO, **options)
    again.train(resume_from_checkpoint=True)
    assert losses(again) == losses(whole) and (tmp_path / "incomplete-checkpoint-4-3").is_dir()
