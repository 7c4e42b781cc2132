"""Switching a model from one attention to another during training, together with everything that uses its parameters.

Parameters that both attentions share remain the same objects, so that the optimizer keeps their state. Parameter
groups, data-parallel wrappers and compiled graphs are updated.
"""

import gc
import inspect
import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from hf_efficient_attn.conversion import convert
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.configs import method_of, settings_of
from hf_efficient_attn.integration.learned import NAME, LearnedParameters, learned_of
from hf_efficient_attn.integration.models import configs_of, snapshot, transformers_models
from hf_efficient_attn.integration.settings import EXACT_IMPLEMENTATIONS
from hf_efficient_attn.methods import get_method
from hf_efficient_attn.training.stage import Stage
from hf_efficient_attn.training.stage_distillation import FormerAttention, StageDistillation
from hf_efficient_attn.training.steps import learned_parameters, unwrap

logger = logging.get_logger(__name__)

# Names and shapes of learned parameters.
Layout = dict[str, tuple[int, ...]]


def _target(model: nn.Module, stage: Stage) -> nn.Module:
    """What the stage switches: the model or a submodule of it, whose config must not control other parts."""
    inner = unwrap(model)
    if stage.part is None:
        return inner
    parts: dict[str, nn.Module] = dict(inner.named_modules())
    if stage.part not in parts:
        names = ", ".join(name for name, _ in inner.named_children())
        raise UnsupportedAttentionError(
            f"{type(inner).__name__} has no submodule {stage.part!r} to up-train; it has {names}"
        )
    part = parts[stage.part]
    inside = set(part.modules())
    configs = {id(config) for root in transformers_models(part) for config in configs_of(root)}
    for module in parts.values():
        if isinstance(module, PreTrainedModel) and module not in inside and id(module.config) in configs:
            raise UnsupportedAttentionError(
                f"{stage.part!r} of {type(inner).__name__} shares its config with {type(module).__name__}, which would "
                "be switched too: the part needs its own config, like the encoder of an EncoderDecoderModel"
            )
    return part


def is_in_stage(model: nn.Module, stage: Stage) -> bool:
    """Whether the model already is in the stage."""
    for root in transformers_models(_target(model, stage)):
        present = root.config._attn_implementation
        # Other implementations of Transformers, such as flash attention, are exact attention too.
        if stage.settings is None and present in EXACT_IMPLEMENTATIONS and present != stage.attention:
            return False
        for config in configs_of(root):
            name = method_of(config)
            if (name and settings_of(config, name)) != stage.settings:
                return False
    return True


def apply_stage(model: nn.Module, stage: Stage) -> None:
    """Convert the model to the stage; new learned parameters have their initial values."""
    convert(_target(model, stage), stage.attention if stage.settings is None else stage.settings)


def check_stages(model: nn.Module, stages: Sequence[Stage], refusal: str | None = None) -> None:
    """Try every stage on the model and restore the model.

    `refusal` is why the set of parameters cannot change during training, if that is known already.

    Raises:
        UnsupportedAttentionError: the model cannot take a stage, or its wrappers cannot follow a change of parameters.
    """
    layouts = stage_layouts(model, stages)
    _check_peft(model, stages, layouts)
    refusal = refusal or _why_parameters_are_fixed(model)
    if refusal and any(stage.distill or layout != layouts[0] for stage, layout in zip(stages, layouts, strict=True)):
        raise UnsupportedAttentionError(
            f"{refusal}, but the stages {', '.join(stage.attention for stage in stages)} do not learn the same "
            "parameters, or one is distilled first: use stages that learn the same, without 'distill', or train with "
            "DistributedDataParallel"
        )
    for stage, now, before in zip(stages[1:], layouts[1:], layouts, strict=False):
        if stage.distill and now.items() <= before.items():
            raise UnsupportedAttentionError(
                f"the stage {stage.attention!r} has distill={stage.distill}, but all parameters that it learns are "
                "those of the stage before, which keep their values: leave out 'distill', or use learned features if "
                "the method has them"
            )


def _check_peft(model: nn.Module, stages: Sequence[Stage], layouts: Sequence[Layout]) -> None:
    """Refuse learned parameters that PEFT would not save: it saves only adapters and `modules_to_save`."""
    inner = unwrap(model)
    if not hasattr(inner, "peft_config") or not any(layouts):
        return
    is_wrapped = any(isinstance(getattr(x, "original_module", None), LearnedParameters) for x in inner.modules())
    if not is_wrapped or any(layout != learned_layout(model) for layout in layouts):
        names = [stage.attention for stage, layout in zip(stages, layouts, strict=True) if layout]
        raise UnsupportedAttentionError(
            f"a PEFT model saves only its adapters, but some stages learn other parameters ({', '.join(names)}): "
            "convert the model to the first stage before get_peft_model, use modules_to_save=['learned_parameters'] "
            "there, and use stages that learn parameters of the same names and shapes, such as linformer and a FLuRKA "
            "variant; or use methods that learn none"
        )


def _why_parameters_are_fixed(model: nn.Module) -> str | None:
    """Why the set of parameters cannot change during training; None if it can."""
    kinds = {type(module).__name__ for module in model.modules()}
    is_sharded = any(hasattr(module, "_get_fsdp_state") for module in model.modules())
    if is_sharded or kinds & {"FullyShardedDataParallel", "DeepSpeedEngine", "DataParallel"}:
        return "FSDP, DeepSpeed and DataParallel keep the parameters that exist at the start"
    return None


def stage_layouts(model: nn.Module, stages: Sequence[Stage]) -> list[Layout]:
    """Names and shapes of the parameters that attention methods would learn in each stage. The model is restored."""
    before, found = snapshot(transformers_models(model)), []
    try:
        for stage in stages:
            apply_stage(model, stage)
            found.append(learned_layout(model))
        return found
    finally:
        before.restore()


def learned_layout(model: nn.Module) -> Layout:
    """Names and shapes of the parameters that attention methods learn now."""
    return {plain_name(name): tuple(p.shape) for name, p in learned_parameters(model).items()}


def plain_name(name: str) -> str:
    """A parameter's name without the components that PEFT's wrapper adds."""
    head, _, tail = name.rpartition(f"{NAME}.")
    return f"{head}{NAME}.{tail.rpartition('.')[2]}"


def switch_stage(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    stage: Stage,
    step: int,
    distillation: StageDistillation | None = None,
) -> tuple[dict[str, Any], FormerAttention]:
    """Switch a model to a stage during training, as `UptrainingSchedule.step` describes.

    In distributed training all processes must call it at the same step. The stage is distilled if `distillation` is
    given and the stage asks for it. If the distillation fails, the model has its former attention.

    Returns:
        The record of the switch, and the former attention.
    """
    inner = unwrap(model)
    former, state = FormerAttention(inner), snapshot(transformers_models(inner))
    name = transformers_models(_target(model, stage))[0].config._attn_implementation
    wrappers, before = data_parallel_wrappers(inner), dict(inner.named_parameters())
    # What is around learned parameters, perhaps PEFT's wrapper.
    held = {module: module._modules.get(NAME) for module in former.layers}
    apply_stage(inner, stage)
    in_use: set[int] = set()
    for module, (_, tensors) in former.layers.items():
        former.fixed += _carry_over(module, tensors, in_use)
    distilled = None
    if distillation is not None and stage.distill:
        try:
            distilled = distillation.run(inner, stage, former)
        except BaseException:
            state.restore()
            raise
    for module, wrapper in held.items():
        if hasattr(wrapper, "modules_to_save"):
            _wrap_again(module, wrapper)
    after = dict(inner.named_parameters())
    kept = {id(p) for p in before.values()} & {id(p) for p in after.values()}
    record: dict[str, Any] = {
        "step": step,
        "from": str(name),
        "to": stage.attention,
        "carried": [name for name, p in learned_parameters(inner).items() if id(p) in kept],
        "started": [name for name, p in after.items() if id(p) not in kept],
        "dropped": [name for name, p in before.items() if id(p) not in kept],
        "distillation": distilled,
    }
    if record["started"] or record["dropped"]:
        if optimizer is not None:
            _update_optimizer(inner, optimizer, before, after)
        for wrapper in wrappers:
            _rebuild(wrapper)
    if "torch._dynamo" in sys.modules:
        # Compiled graphs contain the previous attention; the next step compiles again.
        torch.compiler.reset()
    logger.info(f"step {step}: attention switched from {name} to {stage.attention}")
    return record, former


@torch.no_grad()
def _carry_over(module: nn.Module, tensors: Mapping[str, torch.Tensor], in_use: set[int]) -> list[nn.Parameter]:
    """Reuse the parameters of a module in the previous stage whose name and shape fit the new one.

    A parameter that all layers shared is reused in the first layer, which adds its id to `in_use`; the other layers
    start from a copy of it.

    Returns:
        The parameters that were reused or have a copy of the values of one.
    """
    learned = learned_of(module)
    if learned is None:
        return []
    found = []
    starts_from = get_method(learned.method.method).starts_from
    for name, parameter in list(learned.named_parameters(recurse=False)):
        old = tensors.get(name, tensors.get(starts_from.get(name, "")))
        if old is None or old.shape != parameter.shape:
            continue
        if name in tensors and id(old) not in in_use:
            setattr(learned, name, old)
            in_use.add(id(old))
        else:
            parameter.copy_(old)
        found.append(getattr(learned, name))
    return found


def _wrap_again(module: nn.Module, wrapper: Any) -> None:
    """Put PEFT's wrapper around learned parameters again; `check_stages` has verified that the layouts are equal."""
    new = learned_of(module)
    if new is None or module._modules.get(NAME) is wrapper:
        return
    for learned in wrapper.modules():
        if isinstance(learned, LearnedParameters):
            learned.method, learned.sizes = new.method, new.sizes
    setattr(module, NAME, wrapper)


def _update_optimizer(
    inner: nn.Module,
    optimizer: torch.optim.Optimizer,
    before: Mapping[str, nn.Parameter],
    after: Mapping[str, nn.Parameter],
) -> None:
    """Remove dropped parameters from the optimizer and add new ones to the groups of similar parameters.

    Each group gets the order of the model's parameters. A new optimizer for the model would have the same order, so a
    saved optimizer state fits both.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
    old, position = {id(p) for p in before.values()}, {id(p): i for i, p in enumerate(after.values())}
    group_of: dict[int, dict[str, Any]] = {}
    names: dict[int, str] = {}
    for group in optimizer.param_groups:
        group_of |= {id(p): group for p in group["params"]}
        names |= dict(zip(map(id, group["params"]), group.get("param_names", ()), strict=False))
    # Trainer gives matrices and learned parameters weight decay, but no biases and norms.
    trained = [name for name, p in after.items() if id(p) in group_of]
    alike = [name for name in trained if after[name].ndim > 1] or trained
    for name, p in after.items():
        if id(p) not in old and p.requires_grad:
            # The nearest one is in the attention module, or else in the smallest enclosing module that has any.
            nearest = max(alike, key=lambda other: _num_shared(name, other))
            group_of[id(after[nearest])]["params"].append(p)
            names[id(p)] = name
    for group in optimizer.param_groups:
        kept = [p for p in group["params"] if id(p) in position or id(p) not in old]
        group["params"] = sorted(kept, key=lambda p: position.get(id(p), len(position)))
        if "param_names" in group:
            group["param_names"] = [names[id(p)] for p in group["params"]]
    for gone in [p for p in optimizer.state if id(p) in old - position.keys()]:
        del optimizer.state[gone]


def _num_shared(name: str, other: str) -> int:
    """How many of the first parts of two names of parameters are the same."""
    pairs = zip(name.split("."), other.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def data_parallel_wrappers(inner: nn.Module) -> list[DistributedDataParallel]:
    """Every DistributedDataParallel that wraps the model.

    Trainer passes the model to callbacks without its wrapper, and the model has no reference to the wrapper.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    found = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]
    return [o for o in found if getattr(o, "module", None) is inner]


def _rebuild(wrapper: DistributedDataParallel) -> None:
    """Initialize a wrapper again, in place, for the current parameters of its module.

    A wrapper registers the parameters at its construction. It would not reduce the gradients of parameters that were
    added later, and it would wait forever for those of removed parameters.
    """
    # Without the mesh, from which the wrapper has made its process group already.
    names = set(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self", "module", "device_mesh"}
    if "forward_sync_buffers" in names:  # the newer name of the other
        names.remove("broadcast_buffers")
    options = {name: getattr(wrapper, name) for name in names if hasattr(wrapper, name)}
    module, training, hooks = wrapper.module, wrapper.training, list(wrapper._comm_hooks)
    # The old reducer removes its hooks from the parameters when it is deleted.
    wrapper.__dict__.pop("logger", None)
    wrapper.__dict__.pop("reducer", None)
    DistributedDataParallel.__init__(wrapper, module, **options)
    wrapper.train(training)
    for hook, state in hooks:
        wrapper.register_comm_hook(state, hook)
