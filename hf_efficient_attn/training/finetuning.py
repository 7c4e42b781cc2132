"""Fine-tuning of a converted model on the outputs of the model that it was: the second stage of `hea.distill`.

The losses, without labels:

- "hidden_states": |h - t|^2 / |t|^2 for the hidden states h of a layer and those t of the teacher, summed over the
  tokens that are not padding, averaged over the layers;
- "logits": the Kullback-Leibler divergence of the model's distribution from the teacher's, averaged over the tokens
  that are not padding (or over the inputs of a classifier).

LoLCATs (Zhang et al., ICLR 2025, section 3.2) fine-tunes with LoRA and the loss of the task; both losses here are
those of knowledge distillation, so that unlabelled inputs suffice.
"""

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_efficient_attn.errors import KnownFields, UnsupportedAttentionError, shown, unknown_name
from hf_efficient_attn.evaluation.capture import Batch, capture_attention, forward
from hf_efficient_attn.integration.models import transformers_models
from hf_efficient_attn.training.attention_loss import WINDOW, DivergedError
from hf_efficient_attn.training.wrappers import learned_parameters

TARGETS = ("hidden_states", "logits")
# Outputs of Transformers' models that are tuples of hidden states.
_STATES = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")
# Share of the steps in which the learning rate rises.
_WARMUP = 0.1
_MAX_NORM = 1.0


def check_rate(name: str, value: object) -> None:
    """Refuse a learning rate that is not a number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise UnsupportedAttentionError(f"{name}={shown(value)} must be a number above 0")


@dataclass(frozen=True, kw_only=True)
class FinetuningOptions(KnownFields):
    """The second stage of `hea.distill`: the whole converted model, or LoRA adapters, imitates the exact model.

    Attributes:
        steps: the number of steps.
        target: "hidden_states" of all layers, or "logits" of a classifier or language model.
        learning_rate: of AdamW for the model's own parameters or the adapters; with warmup, then a cosine.
        attention_learning_rate: the same for the learned parameters of attention.
        lora_rank: rank of LoRA adapters on all linear layers, which are merged into the model at the end; None to train
            all parameters. With adapters no copy of the model is needed as the teacher.
    """

    steps: int
    target: str = "hidden_states"
    learning_rate: float = 5e-5
    attention_learning_rate: float = 1e-3
    lora_rank: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise UnsupportedAttentionError(f"steps={self.steps!r} of the fine-tuning must be an integer of 1 or more")
        if self.target not in TARGETS:
            raise UnsupportedAttentionError(unknown_name("target", self.target, TARGETS))
        for name in ("learning_rate", "attention_learning_rate"):
            check_rate(name, getattr(self, name))
        rank = self.lora_rank
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
            raise UnsupportedAttentionError(f"lora_rank={self.lora_rank!r} must be 1 or more, or None")


def make_teacher(model: nn.Module, options: FinetuningOptions) -> nn.Module | None:
    """A copy of a model with exact attention, to be made before it is converted; None if adapters make it superfluous.

    Raises:
        UnsupportedAttentionError: the model's parameters are not float32, in which small updates would be lost.
    """
    if options.lora_rank is not None:
        return None
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if dtypes - {torch.float32, torch.float64}:
        raise UnsupportedAttentionError(
            f"the model's parameters are {', '.join(sorted(map(str, dtypes)))}, in which most updates of fine-tuning "
            "are rounded away: load it with dtype=torch.float32 (and use torch.autocast for speed), or give lora_rank"
        )
    return copy.deepcopy(model).eval().requires_grad_(False)


class Finetuning:
    """Trains a converted model on the outputs of its teacher, one batch at a time. The model stays in eval mode.

    Args:
        model: the converted model.
        teacher: the result of `make_teacher`.
        options: see `FinetuningOptions`.
        reduce: as in `DistillationOptions`.

    Attributes:
        step_number: the number of steps so far.
    """

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module | None,
        options: FinetuningOptions,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.model, self.teacher, self.options, self._reduce = model, teacher, options, reduce
        self.step_number = 0
        self._required = {p: p.requires_grad for p in model.parameters()}
        self._adapted = None if teacher is not None else _adapted(model, options.lora_rank or 1)
        of_attention = list(learned_parameters(model).values())
        for p in of_attention:
            p.requires_grad_(True)
        ids = {id(p) for p in of_attention}
        others = [p for p in model.parameters() if p.requires_grad and id(p) not in ids]
        groups = [
            {"params": others, "lr": options.learning_rate},
            {"params": of_attention, "lr": options.attention_learning_rate},
        ]
        self._optimizer = torch.optim.AdamW([g for g in groups if g["params"]], weight_decay=0.0)
        # Imported here, because it imports optional packages.
        from transformers.optimization import get_cosine_schedule_with_warmup

        num_warmup = max(1, round(_WARMUP * options.steps))
        self._schedule = get_cosine_schedule_with_warmup(self._optimizer, num_warmup, options.steps)
        # The sum of the losses of the present window of steps; the smallest sum, and the parameters at its end.
        self._window = 0.0
        self._best = float("inf"), [p.detach().clone() for p in self._trained]

    @property
    def _trained(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def step(self, batch: Batch) -> float:
        """Train on one batch.

        Returns:
            The loss before the step.

        Raises:
            DivergedError: the loss is not finite. The model then has the best parameters so far.
        """
        with torch.no_grad():
            targets = self._teach(batch)
        with torch.enable_grad():
            losses = self._losses(self._outputs(self.model, batch), targets, batch)
            loss = losses.mean()
        # All processes stop in the same step, and choose the same best parameters.
        means = losses.detach() if self._reduce is None else self._reduce(losses.detach().clone())
        if not means.isfinite().all():
            self._stop(means)
        self._optimizer.zero_grad()
        loss.backward()
        for p in self._trained:
            if self._reduce is not None:
                p.grad = self._reduce(torch.zeros_like(p) if p.grad is None else p.grad)
        torch.nn.utils.clip_grad_norm_(self._trained, _MAX_NORM)
        self._optimizer.step()
        self._schedule.step()
        self.step_number += 1
        self._window += means.mean().item()
        if self.step_number % WINDOW == 0:
            if self._window < self._best[0]:
                self._best = self._window, [p.detach().clone() for p in self._trained]
            self._window = 0.0
        return loss.item()

    @torch.no_grad()
    def measure(self, batch: Batch) -> float:
        """The loss on a batch, without training."""
        targets = self._teach(batch)
        return self._losses(self._outputs(self.model, batch), targets, batch).mean().item()

    @torch.no_grad()
    def _stop(self, losses: Tensor) -> None:
        """Give the model its best parameters and raise."""
        for p, best in zip(self._trained, self._best[1], strict=True):
            p.copy_(best)
        self.finish()
        where = "the logits"
        if self.options.target == "hidden_states":
            where = f"the hidden states after layer {int((~losses.isfinite()).byte().argmax())}"
        raise DivergedError(
            f"the loss of {where} is not finite in step {self.step_number + 1} of the fine-tuning",
            self.options.learning_rate,
        )

    @torch.no_grad()
    def abandon(self) -> None:
        """Restore the parameters that the model had before the fine-tuning, except learned parameters of attention."""
        if self._adapted is not None:
            self._adapted.unload()
            self._adapted = None
        elif self.teacher is not None:
            own = dict(self.model.named_parameters())
            for name, p in self.teacher.named_parameters():
                own[name].copy_(p)
        self.finish()

    def finish(self) -> None:
        """Merge adapters into the model, and restore which parameters require gradients."""
        if self._adapted is not None:
            self._adapted.merge_and_unload()
            self._adapted = None
        for p, required in self._required.items():
            p.requires_grad_(required)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to continue bit for bit."""
        return {
            "step": self.step_number,
            "trained": [p.detach().clone() for p in self._trained],
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "window": self._window,
            "best": self._best,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict` of the same model with the same options."""
        with torch.no_grad():
            for p, saved in zip(self._trained, state["trained"], strict=True):
                p.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self._window, self._best = state["window"], tuple(state["best"])
        self.step_number = state["step"]

    def _teach(self, batch: Batch) -> list[Tensor]:
        """The targets: what `_outputs` returns for the teacher."""
        if self.teacher is not None:
            return self._outputs(self.teacher, batch)
        assert self._adapted is not None
        with self._adapted.disable_adapter(), capture_attention(self.model, lambda call: None):
            return self._outputs(self.model, batch)

    def _outputs(self, model: nn.Module, batch: Batch) -> list[Tensor]:
        return outputs_of(model, batch, self.options.target)

    def _losses(self, found: list[Tensor], wanted: list[Tensor], batch: Batch) -> Tensor:
        """The loss of every layer, or of the logits."""
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        losses = []
        for x, target in zip(found, wanted, strict=True):
            valid = mask.to(x.device).bool() if mask is not None and mask.shape == x.shape[:2] else None
            if self.options.target == "logits":
                divergence = torch.nn.functional.kl_div(
                    x.float().log_softmax(-1), target.float().log_softmax(-1), reduction="none", log_target=True
                ).sum(-1)
                losses.append((divergence if valid is None else divergence[valid]).mean())
            else:
                error, size = (x - target).float().square().sum(-1), target.float().square().sum(-1)
                if valid is not None:
                    error, size = error[valid], size[valid]
                losses.append(error.sum() / size.sum())
        return torch.stack(losses)


def outputs_of(model: nn.Module, batch: Batch, target: str) -> list[Tensor]:
    """The hidden states of all layers without the embeddings, or the logits.

    Raises:
        UnsupportedAttentionError: the model does not return them.
    """
    if isinstance(batch, Tensor):
        batch = {transformers_models(model)[0].main_input_name: batch}
    if target == "logits":
        logits = getattr(forward(model, batch), "logits", None)
        if logits is None:
            raise UnsupportedAttentionError(
                f"{type(model).__name__} has no logits: use target='hidden_states', or load the checkpoint with its "
                "head, such as AutoModelForCausalLM"
            )
        return [logits]
    outputs = forward(model, {**batch, "output_hidden_states": True})
    states = [x for name in _STATES for x in (getattr(outputs, name, None) or ())[1:]]
    if not states:
        raise UnsupportedAttentionError(
            f"{type(model).__name__} returns no hidden states: use target='logits', or no fine-tuning"
        )
    return states


def _adapted(model: nn.Module, rank: int) -> Any:
    """PEFT's model with LoRA adapters in all linear layers of a model, whose modules it replaces."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedAttentionError(
            f"LoRA needs a Transformers model, not {type(model).__name__}: leave lora_rank out to train all parameters"
        )
    with contextlib.suppress(ImportError):
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            target_modules="all-linear",
            bias="none",
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        )
        return get_peft_model(model, config)
    raise UnsupportedAttentionError("LoRA needs the package peft: install it, or leave lora_rank out")
