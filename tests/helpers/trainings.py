"""Short trainings: models, data, a Trainer with the callback of a schedule, and what it logs."""

import pytest
import torch
import transformers
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_efficient_attn as hea
from tiny_models import tiny_batch, tiny_config

PLAIN = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def classifier(seed: int = 0, **changes) -> nn.Module:
    torch.manual_seed(seed)
    return transformers.BertForSequenceClassification(tiny_config("bert", **changes))


def decoder(**changes) -> nn.Module:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(tiny_config("gpt2", **changes))


def samples(count: int = 48, is_decoder: bool = False) -> list[dict[str, torch.Tensor]]:
    """Random texts, every third with padding. The class of a text follows from its first token."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(count):
        tokens, mask = torch.randint(5, 60, (24,), generator=generator), torch.ones(24, dtype=torch.int64)
        if i % 3 == 2:
            mask[17:] = 0
        labels = tokens.masked_fill(mask == 0, -100) if is_decoder else tokens[0] % 2
        found.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return found


def trainer_of(folder, schedule, model=None, steps: int = 8, callbacks=(), data=None, **options) -> Trainer:
    """A Trainer with the callback of a schedule; without it if there is no schedule."""
    usual = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1, "report_to": "none"}
    usual |= {"use_cpu": True, "disable_tqdm": True, "seed": 3, "max_steps": steps}
    usual |= {"save_strategy": "steps" if "save_steps" in options else "no"}
    model, data = classifier() if model is None else model, data or samples()
    optimizers = options.pop("make_optimizer", lambda model: None)(model), None
    arguments = TrainingArguments(str(folder), **{**usual, **options})
    callbacks = [*([] if schedule is None else [hea.UptrainingCallback(schedule)]), *callbacks]
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks, optimizers=optimizers)


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def switches(log: list[dict]) -> list[tuple[int, str, str]]:
    found = [entry for entry in log if "uptraining_stage" in entry]
    return [(entry["step"], entry["uptraining_from"], entry["uptraining_stage"]) for entry in found]


class Attention(TrainerCallback):
    """Records the attention of the model at the beginning of each step."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.names.append(model.config._attn_implementation)


def lora():
    """Only for stages that learn nothing: PEFT would not save their parameters."""
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(classifier(), peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))


def translator():
    torch.manual_seed(0)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(tiny_config("bert"), tiny_config("bert"))
    config.decoder_start_token_id, config.pad_token_id = 2, 1
    return transformers.EncoderDecoderModel(config=config)


HEDGEHOG = {"feature_map": "hedgehog", "num_features": 16}


def batches(family: str = "bert", count: int = 4, **options) -> list[dict]:
    return [tiny_batch(family, seed=seed, **options) for seed in range(count)]


def values(model, learned: bool | None = None) -> dict[str, torch.Tensor]:
    """Copies of parameters: what attention methods learn, the model's own, or all."""
    named = model.named_parameters()
    return {name: p.detach().clone() for name, p in named if learned in (None, "learned_parameters" in name)}
