"""A switch of a model in training from one attention to another, with all that hangs on its parameters.

Shared parameters stay the very same objects, so that an optimizer keeps their state; parameter groups, data-parallel
wrappers and compiled graphs are brought up to date.
"""

import gc
import inspect
import sys
from collections.abc import Iterator, Sequence
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
from hf_efficient_attn.integration.models import (
    attention_modules,
    configs_of,
    drop_learned,
    prepare,
    restore,
    transformers_models,
)
from hf_efficient_attn.integration.settings import EXACT_IMPLEMENTATIONS, EfficientAttentionConfig
from hf_efficient_attn.methods import get_method
from hf_efficient_attn.training.schedule import Stage

logger = logging.get_logger(__name__)

# Names of parameters that Trainer does not decay; those of normalisation layers are known by their class beside.
_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and `torch.compile`: what Trainer calls its model."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod
        else:
            return model


def _roots(model: nn.Module) -> list[PreTrainedModel]:
    """The outermost Transformers models in it."""
    return transformers_models(unwrap(model))


def _part(model: nn.Module, stage: Stage) -> nn.Module:
    """What the stage switches: the model, or a submodule of it."""
    inner = unwrap(model)
    if stage.part is None:
        return inner
    try:
        return inner.get_submodule(stage.part)
    except AttributeError:
        names = ", ".join(name for name, _ in inner.named_children())
        raise UnsupportedAttentionError(
            f"{type(inner).__name__} has no submodule {stage.part!r} to be up-trained; it has {names}"
        ) from None


def _check_part(model: nn.Module, stage: Stage) -> None:
    """Refuse a part whose config rules more than the part."""
    inner, part = unwrap(model), _part(model, stage)
    if part is inner:
        return
    inside = {id(module) for module in part.modules()}
    own = {id(config) for root in _roots(part) for config in configs_of(root)}
    for module in inner.modules():
        if isinstance(module, PreTrainedModel) and id(module) not in inside and id(module.config) in own:
            raise UnsupportedAttentionError(
                f"{stage.part!r} of {type(inner).__name__} has its config in common with {type(module).__name__}, "
                "which would be switched too: a part needs a config of its own, as the encoder of an "
                "EncoderDecoderModel has"
            )


def stands_in(model: nn.Module, stage: Stage) -> bool:
    """Whether the model is in the stage already."""
    for root in _roots(_part(model, stage)):
        for config in configs_of(root):
            name, stored = method_of(config), config.efficient_attention
            settings = EfficientAttentionConfig(name) if name and stored is None else stored and stored.settings
            if name != (None if stage.settings is None else stage.attention):
                return False
            if name is not None and settings != stage.settings:
                return False
        if stage.settings is None and getattr(root.config, "_attn_implementation", None) not in (stage.attention, None):
            # Another exact implementation: "eager" where "sdpa" was asked for, or the other way round.
            return root.config._attn_implementation not in EXACT_IMPLEMENTATIONS
    return True


def put(model: nn.Module, stage: Stage) -> None:
    """Convert the model to the stage; parameters are those that any conversion starts from."""
    convert(_part(model, stage), stage.attention if stage.settings is None else stage.settings)


def learned_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What the attention methods of a model learn, each parameter once, by its name in the model."""
    inner = unwrap(model)
    ours = {id(p) for module in inner.modules() if isinstance(module, LearnedParameters) for p in module.parameters()}
    return {name: p for name, p in inner.named_parameters() if id(p) in ours}


def check(model: nn.Module, stages: Sequence[Stage]) -> None:
    """Try every stage on the model, which is then what it was before.

    Raises:
        UnsupportedAttentionError: a stage that the model cannot take, or whose parameters its wrappers cannot follow.
    """
    for stage in stages:
        _check_part(model, stage)
    layouts = layouts_of(model, stages)
    _check_peft(model, stages, layouts)
    if len({tuple(sorted(layout.items())) for layout in layouts}) > 1:
        refusal = _why_fixed(model)
        if refusal:
            raise UnsupportedAttentionError(
                f"{refusal}, and the stages {', '.join(stage.attention for stage in stages)} do not learn the same "
                "parameters: use stages that do, or train with DistributedDataParallel"
            )
        for wrapper in data_parallel_wrappers(unwrap(model)):
            if getattr(wrapper, "_comm_hooks", None):
                raise UnsupportedAttentionError(
                    "DistributedDataParallel has a communication hook, which is lost where a stage brings new "
                    "parameters: leave it out, or use stages that learn the same parameters"
                )


def layouts_of(model: nn.Module, stages: Sequence[Stage]) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes of what the model would learn beside its own parameters in each stage."""
    with _restored(model):
        found = []
        for stage in stages:
            put(model, stage)
            found.append(layout_of(model))
        return found


def layout_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what the model learns now beside its own parameters."""
    return {plain_name(name): tuple(p.shape) for name, p in learned_parameters(model).items()}


def plain_name(name: str) -> str:
    """A parameter's name without what PEFT's wrapper puts into it."""
    head, _, tail = name.rpartition(f"{NAME}.")
    return f"{head}{NAME}.{tail.rpartition('.')[2]}"


class _restored:  # noqa: N801 (used as a function)
    """Configs and learned modules as they were, whatever was put into the model in between."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self):
        self.roots = _roots(self.model)
        self.configs = [
            (config, config._attn_implementation, config.efficient_attention)
            for root in self.roots
            for config in configs_of(root)
        ]
        self.learned = {module: module._modules.get(NAME) for module, *_ in _attention(self.roots)}

    def __exit__(self, *exception) -> None:
        restore(self.configs)
        for module, there in self.learned.items():
            if there is None:
                module._modules.pop(NAME, None)
            else:
                setattr(module, NAME, there)
        for root in self.roots:
            drop_learned(root)
            prepare(root)


def _attention(roots: Sequence[PreTrainedModel]) -> Iterator[tuple]:
    for root in roots:
        yield from attention_modules(root)


def switch(model: nn.Module, optimizer, stage: Stage, step: int) -> dict[str, Any]:
    """Put a stage into a model in training; see `UptrainingSchedule.step`. All processes must call it together."""
    inner = unwrap(model)
    roots = _roots(inner)
    came_from = _roots(_part(inner, stage))[0].config._attn_implementation
    wrappers = data_parallel_wrappers(inner)
    before = dict(inner.named_parameters())
    held = {module: learned_of(module) for module, *_ in _attention(roots)}
    tensors = {module: {} if there is None else there.tensors() for module, there in held.items()}
    # What PEFT has put around learned parameters.
    covers = {module: module._modules.get(NAME) for module in held}
    covers = {module: cover for module, cover in covers.items() if cover is not None and cover is not held[module]}
    put(inner, stage)
    taken: set[int] = set()
    for module, *_ in _attention(roots):
        _carry(module, tensors.get(module, {}), taken)
    for module, cover in covers.items():
        _cover(module, cover)
    after = dict(inner.named_parameters())
    kept = {id(p) for p in before.values()} & {id(p) for p in after.values()}
    started = [name for name, p in after.items() if id(p) not in kept]
    dropped = [name for name, p in before.items() if id(p) not in kept]
    carried = [name for name, p in learned_parameters(inner).items() if id(p) in kept]
    if started or dropped:
        if optimizer is not None:
            _update_optimizer(inner, optimizer, before, after, started)
        for wrapper in wrappers:
            _rebuild(wrapper)
    if "torch._dynamo" in sys.modules:
        # What is compiled holds for the attention of before; the next step compiles anew.
        torch.compiler.reset()
    record = {
        "step": step,
        "from": came_from,
        "to": stage.attention,
        "carried": carried,
        "started": started,
        "dropped": dropped,
    }
    logger.info(
        f"step {step}: attention switched from {came_from} to {stage.attention}; learned parameters: {len(carried)} "
        f"carried over, {len(started)} new, {len(dropped)} dropped"
    )
    return record


@torch.no_grad()
def _carry(module: nn.Module, tensors: dict[str, torch.Tensor], taken: set[int]) -> None:
    """Parameters of the stage before go into what the new one learns, where name and shape are the same.

    What all layers shared goes on in the first of them, and the others, `taken` being what is in use, start from it.
    """
    there = learned_of(module)
    if there is None or there.holder is not there:
        return
    starts_from = get_method(there.method.method).starts_from
    for name, parameter in list(there.named_parameters(recurse=False)):
        old = tensors.get(name)
        if old is not None and old.shape == parameter.shape and id(old) not in taken:
            setattr(there, name, old)
            taken.add(id(old))
            continue
        old = tensors.get(starts_from.get(name, "")) if old is None else old
        if old is not None and old.shape == parameter.shape:
            parameter.copy_(old)


def _cover(module: nn.Module, cover: nn.Module) -> None:
    """Put PEFT's wrapper of learned parameters around the new ones; `check` saw that both have the same layout."""
    new = learned_of(module)
    if new is None or module._modules.get(NAME) is cover:
        return
    for name in cover.modules_to_save:
        old = cover.modules_to_save[name]
        copy = LearnedParameters(new.method, new.sizes)
        for key, parameter in old.named_parameters(recurse=False):
            setattr(copy, key, parameter)
        cover.modules_to_save[name] = copy
    cover.original_module.method = new.method
    setattr(module, NAME, cover)


def _check_peft(model: nn.Module, stages: Sequence[Stage], layouts: Sequence[dict]) -> None:
    """With PEFT nothing but adapters and `modules_to_save` is saved, so that other learned parameters would be lost."""
    inner = unwrap(model)
    if not hasattr(inner, "peft_config") or not any(layouts):
        return
    present = {plain_name(name) for name in learned_parameters(inner)}
    wrapped = any(
        hasattr(module, "modules_to_save") and isinstance(module.original_module, LearnedParameters)
        for module in inner.modules()
        if hasattr(module, "original_module")
    )
    if not wrapped or any(layout != layouts[0] for layout in layouts) or set(layouts[0]) != present:
        raise UnsupportedAttentionError(
            "a PEFT model saves its adapters alone, and the stages learn parameters of their own "
            f"({', '.join(stage.attention for stage, layout in zip(stages, layouts, strict=True) if layout)}): convert "
            "the model to the first stage before get_peft_model, give that modules_to_save=['learned_parameters'], "
            "and use stages that learn parameters of the same names and shapes, such as linformer and a FLuRKA; or "
            "use methods that learn none"
        )


def _why_fixed(model: nn.Module) -> str | None:
    """Why the set of the model's parameters cannot change in training; None if it can."""
    modules = list(model.modules())
    kinds = {type(module).__name__ for module in modules}
    if "FullyShardedDataParallel" in kinds or any(hasattr(module, "_get_fsdp_state") for module in modules):
        return "FSDP shards the parameters that there are at the start"
    if "DeepSpeedEngine" in kinds:
        return "DeepSpeed partitions the parameters that there are at the start"
    if any(isinstance(module, nn.DataParallel) for module in modules):
        return "DataParallel copies modules whose forward was replaced wrongly"
    return None


def _update_optimizer(inner: nn.Module, optimizer, before: dict, after: dict, started: list[str]) -> None:
    """Take dropped parameters out of the optimizer, and put new ones into the groups in which their like are.

    Each takes the place that it has among the model's parameters, as in an optimizer that is made anew for the model,
    which a saved state then fits.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    decays = set(get_parameter_names(inner, list(ALL_LAYERNORM_LAYERS), _NO_DECAY))
    groups = optimizer.param_groups
    group_of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
    names, place = {id(p): name for name, p in after.items()}, {id(p): i for i, p in enumerate(after.values())}
    gone = {id(p) for p in before.values()} - set(names)
    for group in groups:
        for parameter in group["params"]:
            if id(parameter) in gone:
                optimizer.state.pop(parameter, None)
        kept = [i for i, p in enumerate(group["params"]) if id(p) not in gone]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [group[key][i] for i in kept]
    for name in started:
        parameter = after[name]
        if not parameter.requires_grad:
            continue
        group = groups[_group_for(name, after, decays, group_of)]
        at = next(
            (i for i, p in enumerate(group["params"]) if place.get(id(p), -1) > place[id(parameter)]),
            len(group["params"]),
        )
        group["params"].insert(at, parameter)
        if "param_names" in group:
            group["param_names"].insert(at, name)


def _group_for(name: str, after: dict, decays: set, group_of: dict[int, int]) -> int:
    """The group of the nearest parameter that is decayed, or not, like this one.

    Nearest: in the same attention module, else in the module around it, and so on up to the model.
    """
    like = name in decays
    scope = name
    while scope:
        scope = scope.rpartition(".")[0]
        prefix = f"{scope}." if scope else ""
        for other, parameter in after.items():
            if other.startswith(prefix) and (other in decays) == like and id(parameter) in group_of:
                return group_of[id(parameter)]
    # Only parameters of the other kind are trained, as it may be with adapters.
    return next(iter(group_of.values()), 0)


def data_parallel_wrappers(inner: nn.Module) -> list[DistributedDataParallel]:
    """Every DistributedDataParallel around the model.

    Trainer's callbacks are given the model without its wrapper, to which nothing inside it leads.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    found = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]
    return [o for o in found if getattr(o, "module", None) is inner]


def _rebuild(wrapper: DistributedDataParallel) -> None:
    """Make a wrapper anew, in place, for the parameters that its module has now; the same for who holds it.

    A wrapper learns of parameters when it is made. Those that came later would get no sum of gradients, and for those
    that went it would wait for ever.
    """
    signature = inspect.signature(DistributedDataParallel.__init__).parameters
    names = ("device_ids", "output_device", "dim", "process_group", "find_unused_parameters", "gradient_as_bucket_view",
             "static_graph", "skip_all_reduce_unused_params", "batched_grad_copy", "mixed_precision")  # fmt: skip
    options = {name: getattr(wrapper, name) for name in names if name in signature and hasattr(wrapper, name)}
    if "forward_sync_buffers" in signature and hasattr(wrapper, "forward_sync_buffers"):
        options["forward_sync_buffers"] = wrapper.forward_sync_buffers
    else:
        options["broadcast_buffers"] = wrapper.broadcast_buffers
    if not getattr(wrapper, "bucket_bytes_cap_default", True):
        options["bucket_cap_mb"] = wrapper.bucket_bytes_cap / (1024 * 1024)
    module, training = wrapper.module, wrapper.training
    # The old reducer takes its hooks off the parameters when it goes.
    wrapper.__dict__.pop("logger", None)
    wrapper.__dict__.pop("reducer", None)
    DistributedDataParallel.__init__(wrapper, module, **options)
    wrapper.train(training)
