"""Switching a model from one attention to another during training, together with everything that uses its parameters.

Parameters that both attentions share remain the same objects, so that the optimizer keeps their state. Parameter
groups, data-parallel wrappers and compiled graphs are updated.
"""

import gc
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import ALL_LAYERNORM_LAYERS
from transformers.trainer_pt_utils import get_parameter_names
from transformers.utils import logging

from hf_efficient_attn.conversion import convert
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.configs import method_of
from hf_efficient_attn.integration.learned import NAME, LearnedParameters, learned_of
from hf_efficient_attn.integration.models import configs_of, snapshot, transformers_models
from hf_efficient_attn.integration.settings import EXACT_IMPLEMENTATIONS, EfficientAttentionConfig
from hf_efficient_attn.methods import get_method
from hf_efficient_attn.training.stage import Stage
from hf_efficient_attn.training.stage_distillation import FormerAttention, StageDistillation, attention_of
from hf_efficient_attn.training.wrappers import learned_parameters, unwrap

logger = logging.get_logger(__name__)

# Names and shapes of learned parameters.
Layout = dict[str, tuple[int, ...]]

# Patterns of names of parameters without weight decay, as in Trainer. Normalization layers are excluded by class.
_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def _roots(model: nn.Module) -> list[PreTrainedModel]:
    """The outermost Transformers models inside the model."""
    return transformers_models(unwrap(model))


def _target(model: nn.Module, stage: Stage) -> nn.Module:
    """What the stage switches: the model or a submodule of it."""
    inner = unwrap(model)
    if stage.part is None:
        return inner
    try:
        return inner.get_submodule(stage.part)
    except AttributeError:
        names = ", ".join(name for name, _ in inner.named_children())
        raise UnsupportedAttentionError(
            f"{type(inner).__name__} has no submodule {stage.part!r} to up-train; it has {names}"
        ) from None


def _check_target(model: nn.Module, stage: Stage) -> None:
    """Refuse a part whose config also controls other parts of the model."""
    inner, part = unwrap(model), _target(model, stage)
    if part is inner:
        return
    inside = {id(module) for module in part.modules()}
    own = {id(config) for root in _roots(part) for config in configs_of(root)}
    for module in inner.modules():
        if isinstance(module, PreTrainedModel) and id(module) not in inside and id(module.config) in own:
            raise UnsupportedAttentionError(
                f"{stage.part!r} of {type(inner).__name__} shares its config with {type(module).__name__}, which would "
                "be switched too: the part needs its own config, like the encoder of an EncoderDecoderModel"
            )


def is_in_stage(model: nn.Module, stage: Stage) -> bool:
    """Whether the model already is in the stage."""
    for root in _roots(_target(model, stage)):
        for config in configs_of(root):
            name, stored = method_of(config), config.efficient_attention
            settings = EfficientAttentionConfig(name) if name and stored is None else stored and stored.settings
            if name != (None if stage.settings is None else stage.attention):
                return False
            if name is not None and settings != stage.settings:
                return False
        if stage.settings is None and getattr(root.config, "_attn_implementation", None) not in (stage.attention, None):
            # "eager" and "sdpa" are interchangeable: both are exact.
            return root.config._attn_implementation not in EXACT_IMPLEMENTATIONS
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
    for stage in stages:
        _check_target(model, stage)
    layouts = stage_layouts(model, stages)
    _check_peft(model, stages, layouts)
    refusal = refusal or _why_parameters_are_fixed(model)
    if refusal and any(stage.distill for stage in stages):
        raise UnsupportedAttentionError(
            f"{refusal}, so that no stage can be distilled: use stages without 'distill', or train with "
            "DistributedDataParallel"
        )
    for stage, now, before in zip(stages[1:], layouts[1:], layouts, strict=False):
        if stage.distill and now.items() <= before.items():
            raise UnsupportedAttentionError(
                f"the stage {stage.attention!r} has distill={stage.distill}, but all parameters that it learns are "
                "those of the stage before, which keep their values: leave out 'distill', or use learned features if "
                "the method has them"
            )
    if len({tuple(sorted(layout.items())) for layout in layouts}) > 1:
        if refusal:
            raise UnsupportedAttentionError(
                f"{refusal}, but the stages {', '.join(stage.attention for stage in stages)} do not learn the same "
                "parameters: use stages that do, or train with DistributedDataParallel"
            )
        for wrapper in data_parallel_wrappers(unwrap(model)):
            if getattr(wrapper, "_comm_hooks", None):
                raise UnsupportedAttentionError(
                    "DistributedDataParallel has a communication hook, which is lost when a stage adds parameters: "
                    "remove the hook, or use stages that learn the same parameters"
                )


def stage_layouts(model: nn.Module, stages: Sequence[Stage]) -> list[Layout]:
    """Names and shapes of the parameters that attention methods would learn in each stage. The model is restored."""
    before, found = snapshot(_roots(model)), []
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
) -> dict[str, Any]:
    """Switch a model to a stage during training, as `UptrainingSchedule.step` describes.

    In distributed training all processes must call it at the same step. The stage is distilled if `distillation` is
    given and the stage asks for it. If the distillation fails, the model has its former attention.
    """
    inner = unwrap(model)
    former, state = former_attention(inner, stage), snapshot(_roots(inner))
    wrappers = data_parallel_wrappers(inner)
    before = dict(inner.named_parameters())
    # What is around learned parameters, perhaps PEFT's wrapper.
    held = {module: module._modules.get(NAME) for module in former.layers}
    apply_stage(inner, stage)
    in_use: set[int] = set()
    fixed: list[nn.Parameter] = []
    for module, (_, tensors) in former.layers.items():
        fixed += _carry_over(module, tensors, in_use)
    distilled = None
    if distillation is not None and stage.distill:
        try:
            distilled = distillation.run(inner, stage, former, fixed)
        except BaseException:
            state.restore()
            raise
    for module, peft_wrapper in held.items():
        if peft_wrapper is not None and not isinstance(peft_wrapper, LearnedParameters):
            _wrap_again(module, peft_wrapper)
    after = dict(inner.named_parameters())
    kept = {id(p) for p in before.values()} & {id(p) for p in after.values()}
    started = [name for name, p in after.items() if id(p) not in kept]
    dropped = [name for name, p in before.items() if id(p) not in kept]
    carried = [name for name, p in learned_parameters(inner).items() if id(p) in kept]
    if started or dropped:
        if optimizer is not None:
            _update_optimizer(inner, optimizer, before, after)
        for wrapper in wrappers:
            _rebuild(wrapper)
    if "torch._dynamo" in sys.modules:
        # Compiled graphs contain the previous attention; the next step compiles again.
        torch.compiler.reset()
    record = {"step": step, "from": former.name, "to": stage.attention, "carried": carried, "started": started}
    logger.info(
        f"step {step}: attention switched from {former.name} to {stage.attention}; learned parameters: {len(carried)} "
        f"carried over, {len(started)} new, {len(dropped)} dropped{_described(distilled)}"
    )
    return {**record, "dropped": dropped, "distillation": distilled}


def former_attention(model: nn.Module, stage: Stage) -> FormerAttention:
    """The attention of a model before it is switched to a stage."""
    return attention_of(unwrap(model), _target(model, stage))


def distill_first_stage(
    model: nn.Module, stage: Stage, former: FormerAttention, distillation: StageDistillation
) -> dict[str, Any]:
    """Distill the first stage of a model that was switched to it before; the record is as that of `switch_stage`."""
    inner = unwrap(model)
    learned = learned_parameters(inner)
    old = {id(p) for _, parameters in former.layers.values() for p in parameters.values()}
    carried = {name: p for name, p in learned.items() if id(p) in old}
    distilled = distillation.run(inner, stage, former, carried.values())
    logger.info(f"step 0: the first attention is {stage.attention}{_described(distilled)}")
    started = [name for name in learned if name not in carried]
    record = {"step": 0, "from": former.name, "to": stage.attention, "carried": list(carried), "started": started}
    return {**record, "dropped": [], "distillation": distilled}


def _described(distilled: Mapping[str, Any] | None) -> str:
    if distilled is None:
        return ""
    losses = f"{distilled['first_loss']:.3g} to {distilled['last_loss']:.3g}"
    return f"; distilled in {distilled['steps']} steps, loss {losses}"


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
    """Put PEFT's wrapper around the new learned parameters; `check_stages` has verified that the layouts are equal."""
    new = learned_of(module)
    if new is None or module._modules.get(NAME) is wrapper:
        return
    for name in wrapper.modules_to_save:
        old = wrapper.modules_to_save[name]
        copy = LearnedParameters(new.method, new.sizes)
        for key, parameter in old.named_parameters(recurse=False):
            setattr(copy, key, parameter)
        wrapper.modules_to_save[name] = copy
    wrapper.original_module.method = new.method
    setattr(module, NAME, wrapper)


def _check_peft(model: nn.Module, stages: Sequence[Stage], layouts: Sequence[Layout]) -> None:
    """Refuse learned parameters that PEFT would not save: it saves only adapters and `modules_to_save`."""
    inner = unwrap(model)
    if not hasattr(inner, "peft_config") or not any(layouts):
        return
    present = {plain_name(name) for name in learned_parameters(inner)}
    originals = [getattr(module, "original_module", None) for module in inner.modules()]
    is_wrapped = any(isinstance(original, LearnedParameters) for original in originals)
    if not is_wrapped or any(layout != layouts[0] for layout in layouts) or set(layouts[0]) != present:
        names = [stage.attention for stage, layout in zip(stages, layouts, strict=True) if layout]
        raise UnsupportedAttentionError(
            f"a PEFT model saves only its adapters, but some stages learn other parameters ({', '.join(names)}): "
            "convert the model to the first stage before get_peft_model, use modules_to_save=['learned_parameters'] "
            "there, and use stages that learn parameters of the same names and shapes, such as linformer and a FLuRKA "
            "variant; or use methods that learn none"
        )


def _why_parameters_are_fixed(model: nn.Module) -> str | None:
    """Why the set of parameters cannot change during training; None if it can."""
    modules = list(model.modules())
    kinds = {type(module).__name__ for module in modules}
    if "FullyShardedDataParallel" in kinds or any(hasattr(module, "_get_fsdp_state") for module in modules):
        return "FSDP shards the parameters that exist at the start"
    if "DeepSpeedEngine" in kinds:
        return "DeepSpeed partitions the parameters that exist at the start"
    if any(isinstance(module, nn.DataParallel) for module in modules):
        return "a change of the parameters is not tested with DataParallel"
    return None


def _update_optimizer(
    inner: nn.Module,
    optimizer: torch.optim.Optimizer,
    before: Mapping[str, nn.Parameter],
    after: Mapping[str, nn.Parameter],
) -> None:
    """Remove dropped parameters from the optimizer and add new ones to the groups of similar parameters.

    Each group keeps the order of the model's parameters. A new optimizer for the model would have the same order, so a
    saved optimizer state fits both.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
    decays = set(get_parameter_names(inner, list(ALL_LAYERNORM_LAYERS), _NO_DECAY))
    groups = optimizer.param_groups
    group_of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
    position = {id(p): i for i, p in enumerate(after.values())}
    old = {id(p) for p in before.values()}
    gone = old - set(position)
    for group in groups:
        kept = [i for i, p in enumerate(group["params"]) if id(p) not in gone]
        for parameter in group["params"]:
            if id(parameter) in gone:
                optimizer.state.pop(parameter, None)
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [group[key][i] for i in kept]
    for name, parameter in after.items():
        if id(parameter) in old or not parameter.requires_grad:
            continue
        group = groups[_group_for(name, after, decays, group_of)]
        later = (i for i, p in enumerate(group["params"]) if position.get(id(p), -1) > position[id(parameter)])
        index = next(later, len(group["params"]))
        for key, value in (("params", parameter), ("param_names", name)):
            if key in group:
                group[key].insert(index, value)


def _group_for(name: str, after: Mapping[str, nn.Parameter], decays: set[str], group_of: Mapping[int, int]) -> int:
    """The index of the parameter group for a new parameter: that of the nearest one with the same weight decay.

    The search starts in the attention module and continues in each enclosing module.
    """
    alike = [x for x, p in after.items() if (x in decays) == (name in decays) and id(p) in group_of]
    scope = name
    while scope:
        scope = scope.rpartition(".")[0]
        nearest = next((other for other in alike if other.startswith(f"{scope}." if scope else "")), None)
        if nearest is not None:
            return group_of[id(after[nearest])]
    # Only parameters with the other weight decay are trained, which is possible with adapters.
    return next(iter(group_of.values()), 0)


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
    if not getattr(wrapper, "bucket_bytes_cap_default", True):
        options["bucket_cap_mb"] = wrapper.bucket_bytes_cap / (1024 * 1024)
    module, training = wrapper.module, wrapper.training
    # The old reducer removes its hooks from the parameters when it is deleted.
    wrapper.__dict__.pop("logger", None)
    wrapper.__dict__.pop("reducer", None)
    DistributedDataParallel.__init__(wrapper, module, **options)
    wrapper.train(training)
