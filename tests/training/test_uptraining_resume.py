"""Resumption of killed trainings with a schedule: the result equals that of an uninterrupted training bit for bit.

Trainings end at a given point, in steps of every stage and while a checkpoint is written, and start again with
`resume_from_checkpoint=True`. The tests compare the attention of every step, the log with losses, gradient norms,
learning rates and switches, the final weights, and the states of the optimizer and of the random number generators.
"""

import pytest
import torch
import transformers

import hf_efficient_attn as hea
import processes
from tiny_models import tiny_class, tiny_config
from uptraining_run import PLAIN, Case, classifier, decoder, samples, switches, train

FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


def lora():
    """Only for stages that learn nothing: PEFT would not save their parameters."""
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(classifier(), peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))


def vit():
    """Transformers saves it under its names from before version 5, which Trainer cannot load."""
    torch.manual_seed(0)
    return tiny_class("vit", head=True)(tiny_config("vit"))


def translator():
    torch.manual_seed(0)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(tiny_config("bert"), tiny_config("bert"))
    config.decoder_start_token_id, config.pad_token_id = 2, 1
    return transformers.EncoderDecoderModel(config=config)


IMAGES = [{"pixel_values": torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(i)), "labels": i % 2}
          for i in range(16)]  # fmt: skip
PAIRS = [{"input_ids": sample["input_ids"], "labels": sample["input_ids"].flip(0)} for sample in samples(24)]
LEARNED = ["linformer,projection_dim=8:0.4", "flurka_performer,num_features=8,share=none:1.0"]
DISTILLED = "flurka_linear,feature_map=hedgehog,num_features=8,share=none,distill=4:1.0"
CASES = {
    # The second stage keeps the learned parameters of the first and adds others.
    "learned": Case(classifier, hea.UptrainingSchedule.parse(LEARNED), [4, 10]),
    # The second stage is distilled, at a checkpoint.
    "distilled": Case(classifier, hea.UptrainingSchedule.parse([LEARNED[0], DISTILLED]), [4, 10]),
    # Weights do not tell the stage, the switch is between two checkpoints, and each step has two batches.
    "same": Case(
        decoder, [("performer", 5, {"num_features": 8}), ("linear", None)], [5, 10], samples(24, is_decoder=True),
        {"gradient_accumulation_steps": 2},
    ),
    # Whole epochs: within an epoch, Trainer does one step too many when it resumes from the last checkpoint.
    "to the end": Case(classifier, hea.UptrainingSchedule.parse(LEARNED), [2, 6]),
    "LoRA": Case(lora, [("longformer", 2, {"window_size": 8}), ("linear", None)], [2, 5]),
    "older names": Case(vit, [("linformer", 3, {"projection_dim": 8}), ("linear", None)], [3, 5], IMAGES),
    # The paper up-trains only the encoder (Gupta et al. 2023, appendix A.3). The decoder stays exact.
    "translation": Case(
        translator, hea.uptraining_preset("nmt", layers=["encoder"], projection_dim=8, num_features=8), [4, 5], PAIRS
    ),
    "first run alone": Case(
        classifier, [("sdpa", 2), ("linear", 3), ("linformer", None, {"projection_dim": 8})], [2, 3, 4], samples(24),
        {"first_run_alone": True},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The results of uninterrupted trainings."""
    found = {}

    def get(case):
        if case not in found:
            # No run is without the callback here.
            one = CASES[case]._replace(options=None) if case == "first run alone" else CASES[case]
            found[case] = train(tmp_path_factory.mktemp("whole"), one)
        return found[case]

    return get


@pytest.mark.parametrize(
    ("case", "kills", "at"),
    [
        # Around a switch at a checkpoint.
        ("learned", ["torn:model.safetensors@4", "begin@4", "torn:trainer_state.json@8"], 6),
        *(pytest.param("learned", [f"torn:{file}@8"], 6, marks=pytest.mark.exhaustive) for file in FILES),
        # A distillation is repeated if the checkpoint is from before it, and not repeated otherwise.
        ("distilled", ["begin@4"], 4),
        pytest.param("distilled", ["torn:model.safetensors@4"], 2, marks=pytest.mark.exhaustive),
        ("distilled", ["forward@7"], 6),
        ("same", ["substep@5"], 4),
        pytest.param("same", ["begin@6", "forward@9"], 8, marks=pytest.mark.exhaustive),
        ("to the end", ["saved@6"], 6),
        ("LoRA", ["begin@4"], 4),
        ("older names", ["forward@2"], 2),
        ("translation", ["begin@4"], 4),
        ("first run alone", ["forward@3"], 2),
    ],
)
def test_kill(case, kills, at, whole, tmp_path):
    attention, log, states = whole(case)
    found, *again = train(tmp_path, CASES[case], kills)
    assert attention == CASES[case].attention and found == attention[at:]
    assert switches(log) == [(i, attention[i - 1], attention[i]) for i in CASES[case].ends[:-1]]
    if not found:  # nothing draws random numbers after the last step
        again[1]["random"] = states["random"]
    assert again == [log, states]


def logged(log: list[dict], key: str) -> list[float]:
    return [entry[key] for entry in log if key in entry]


def plain() -> torch.nn.Module:
    return classifier(**PLAIN)


def plain_decoder() -> torch.nn.Module:
    return decoder(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "kill"), [("learned", "forward@5"), ("same", "substep@5"), ("distilled", "begin@4")])
def test_two_processes(name, kill, tmp_path):
    """Without dropout they equal one, up to rounding; and killed and resumed ones those that were not."""
    case = CASES[name]._replace(make_model=plain_decoder if name == "same" else plain)
    attention, one, _ = train(tmp_path / "one", case)
    # With the same global batch.
    case = case._replace(options={**(case.options or {}), "per_device_train_batch_size": 2, "ddp_backend": "gloo"})
    twice = processes.run(2, tmp_path, train, tmp_path / "two", case)
    resumed = processes.run(2, tmp_path, train, tmp_path / "again", case, [kill])
    for two, again in zip(twice, resumed, strict=True):
        assert two[0] == attention == case.attention and len(again[0]) == 6 and again[1:] == two[1:]
        # Processes distill on different batches.
        for key in ("loss", "grad_norm", "learning_rate") if name != "distilled" else ():
            torch.testing.assert_close(logged(two[1], key), logged(one, key), rtol=2e-5, atol=0)


@pytest.mark.slow
def test_fsdp2_on_two_processes(tmp_path):
    """Losses and switches are those of one process, also when resumed. Stages must learn the same parameters."""
    stages = [("sdpa", 2), ("linear", 5), ("longformer", None, {"window_size": 8})]
    case = Case(plain, stages, [2, 5, 10], samples(24), {"adam_epsilon": 1e-3, "save_total_limit": 9})
    one = train(tmp_path / "one", case)
    shards = {"version": 2, "fsdp_version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"]}
    fsdp = {"fsdp": "full_shard auto_wrap", "fsdp_config": shards, "per_device_train_batch_size": 2}
    case = case._replace(options={**case.options, **fsdp, "ddp_backend": "gloo"})
    two = processes.run(2, tmp_path, train, tmp_path / "two", case)[0]
    assert two[0] == one[0] and switches(two[1]) == switches(one[1])
    torch.testing.assert_close(logged(two[1], "loss"), logged(one[1], "loss"), rtol=0, atol=1e-4)
    resume = str(tmp_path / "two" / "checkpoint-4")
    again = processes.run(2, tmp_path, train, tmp_path / "two", case, (), resume)[0]
    assert again[0] == two[0][4:] and again[1] == two[1]
