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
import importlib.util
import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from hf_efficient_attn.errors import KnownFields, UnsupportedAttentionError, check_positive, unknown_name
from hf_efficient_attn.evaluation.capture import Batch, capture_attention, forward, valid_tokens
from hf_efficient_attn.ops.tracing import keeping_draws
from hf_efficient_attn.training.steps import LayerLoss, Training, learned_parameters

TARGETS = ("hidden_states", "logits")
# Outputs of Transformers' models that are tuples of hidden states.
_STATES = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")


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
        check_positive("steps", self.steps)
        if self.target not in TARGETS:
            raise UnsupportedAttentionError(unknown_name("target", self.target, TARGETS))
        for name in ("learning_rate", "attention_learning_rate"):
            check_positive(name, getattr(self, name), is_count=False)
        check_positive("lora_rank", 1 if self.lora_rank is None else self.lora_rank)


def make_teacher(model: nn.Module, options: FinetuningOptions, batch: Batch) -> nn.Module | None:
    """A copy of a model with exact attention, to be made before it is converted; None if adapters make it superfluous.

    What would stop the fine-tuning is refused: a model that does not return the target for a batch, adapters without
    peft, and without adapters parameters that are not float32, in which small updates would be lost.
    """
    with capture_attention(model, lambda call: None):
        outputs_of(model, batch, options.target)
    if options.lora_rank is not None:
        if importlib.util.find_spec("peft") is None:
            raise UnsupportedAttentionError("LoRA needs the package peft: install it, or leave lora_rank out")
        return None
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if dtypes - {torch.float32, torch.float64}:
        raise UnsupportedAttentionError(
            f"the model's parameters are {', '.join(sorted(map(str, dtypes)))}, in which most updates of fine-tuning "
            "are rounded away: load it with dtype=torch.float32 (and use torch.autocast for speed), or give lora_rank "
            "(--lora-rank N), which trains adapters in float32"
        )
    return copy.deepcopy(model).eval().requires_grad_(False)


class Finetuning(Training):
    """Trains a converted model on the outputs of its teacher (see `make_teacher`), in eval mode until `finish`."""

    title, key, max_norm = "fine-tuning", "outputs", 1.0

    def __init__(self, model: nn.Module, teacher: nn.Module | None, options: FinetuningOptions) -> None:
        self.model, self.teacher, self.target = model, teacher, options.target
        self._required = {p: p.requires_grad for p in model.parameters()}
        self._modes = {module: module.training for module in model.modules()}
        # PEFT's model with LoRA adapters in all linear layers of the model, whose modules it replaces.
        self._adapted: Any = None
        if (rank := options.lora_rank) is not None:
            from peft import LoraConfig, get_peft_model

            config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", bias="none")
            self._adapted = get_peft_model(cast("Any", model), config)
        learned = dict.fromkeys(learned_parameters(model).values())
        for p in learned:
            p.requires_grad_(True)
        others = [p for p in model.parameters() if p.requires_grad and p not in learned]
        rates = ((others, options.learning_rate), (learned, options.attention_learning_rate))
        optimizer = torch.optim.AdamW([{"params": x, "lr": rate} for x, rate in rates if x], weight_decay=0.0)
        warmup = max(1, round(0.1 * options.steps))
        half_turn = math.pi / max(1, options.steps - warmup)
        schedule = LambdaLR(
            optimizer, lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(half_turn * max(0, step - warmup)))
        )
        super().__init__([*others, *learned], optimizer, schedule, options.steps)
        model.eval()  # as the teacher, without dropout

    def _backward(self, batch: Batch) -> list[LayerLoss]:
        with torch.enable_grad():
            losses = self._losses(batch)
            torch.stack(list(losses.values())).mean().backward()
        return [LayerLoss(None, name, loss.item()) for name, loss in losses.items()]

    @torch.no_grad()
    def measure(self, batch: Batch) -> list[LayerLoss]:
        """The losses on a batch, without training."""
        return [LayerLoss(None, name, loss.item()) for name, loss in self._losses(batch).items()]

    def finish(self) -> None:
        """Merge adapters into the model, and restore which parameters require gradients and which modules train."""
        self._optimizer.zero_grad()
        if self._adapted is not None:
            self._adapted.merge_and_unload()
            self._adapted = None
        for p, required in self._required.items():
            p.requires_grad_(required)
        for module, training in self._modes.items():
            module.training = training

    def _losses(self, batch: Batch) -> dict[str, Tensor]:
        """The loss of every output."""
        # The model draws what the teacher has drawn, such as the mask of a ViTMAE.
        with torch.no_grad(), keeping_draws(next(self.model.parameters()).device), contextlib.ExitStack() as stack:
            if self._adapted is not None:
                stack.enter_context(self._adapted.disable_adapter())
                stack.enter_context(capture_attention(self.model, lambda call: None))
            wanted = outputs_of(self.model if self.teacher is None else self.teacher, batch, self.target)
        losses = {}
        for name, (output, of_decoder) in outputs_of(self.model, batch, self.target).items():
            valid = valid_tokens(batch, output, of_decoder=of_decoder)
            x, target = output.float(), wanted[name][0].float()
            if self.target == "logits":
                x, target = x.log_softmax(-1), target.log_softmax(-1)
                losses[name] = nn.functional.kl_div(x, target, reduction="none", log_target=True).sum(-1)[valid].mean()
            else:
                error, size = (x - target).square().sum(-1), target.square().sum(-1)
                losses[name] = error[valid].sum() / size[valid].sum()
        return losses


def outputs_of(model: nn.Module, batch: Batch, target: str) -> dict[str, tuple[Tensor, bool]]:
    """The hidden states of all layers without the embeddings, or the logits, by what messages call them.

    With each is whether the decoder beside an encoder returns it. A model that does not return them is refused.
    """
    if target == "logits":
        logits = getattr(output := forward(model, batch), "logits", None)
        if logits is None:
            raise UnsupportedAttentionError(
                f"{type(model).__name__} has no logits: use target='hidden_states', or load the checkpoint with its "
                "head, such as AutoModelForCausalLM"
            )
        return {"the logits": (logits, hasattr(output, "encoder_last_hidden_state"))}
    outputs = forward(model, batch, output_hidden_states=True)
    states = [(x, name == _STATES[-1]) for name in _STATES for x in (getattr(outputs, name, None) or ())[1:]]
    if not states:
        raise UnsupportedAttentionError(f"{type(model).__name__} returns no hidden states: use target='logits'")
    return {f"the hidden states after layer {number}": x for number, x in enumerate(states)}
