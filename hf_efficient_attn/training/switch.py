"""Switching a model from one attention to another during training, together with everything that uses its parameters.

Parameters that both attentions share remain the same objects, so that the optimizer keeps their state. Parameter
groups, data-parallel wrappers and compiled graphs are updated. A distillation depends only on the model, the batches
and the options, so that a resumed training repeats it exactly.
"""

import contextlib
import functools
import gc
import inspect
import operator
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os.path import commonprefix
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from hf_efficient_attn.conversion import convert
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.capture import Batch, Call, exact_attention_of
from hf_efficient_attn.integration.learned import NAME, learned_of
from hf_efficient_attn.integration.models import Snapshot, attention_modules, configs_of, transformers_models
from hf_efficient_attn.integration.settings import EfficientAttentionConfig, method_of, settings_of
from hf_efficient_attn.methods import MethodConfig, learns
from hf_efficient_attn.training.distillation import Distillation, DistillationOptions
from hf_efficient_attn.training.steps import WINDOW, batch_stream, check_count, learned_parameters, unwrap, world_size


class Stage(NamedTuple):
    """One attention and the point in training at which it ends."""

    attention: str  # the name of a method, or "sdpa" or another implementation of exact attention
    end: float | int | None  # the number of completed steps then, or their share of all; None for the end of training
    settings: EfficientAttentionConfig | None = None  # for `config.efficient_attention`; None for exact attention
    # Steps in which the new learned parameters imitate the attention before the switch to the stage; 0 for none.
    distill: int = 0


def is_in_stage(model: nn.Module, stage: Stage) -> bool:
    """Whether the model already is in the stage. All implementations of exact attention of Transformers are equal."""
    for root in transformers_models(unwrap(model)):
        for config in configs_of(root):
            name = method_of(config)
            settings = None if name is None else settings_of(config, name)
            # A part that cannot run the method of the whole model stays exact.
            if settings != stage.settings and (settings is not None or config is root.config):
                return False
    return True


def check_stages(model: nn.Module, stages: Sequence[Stage], *, is_fixed: bool = False) -> None:
    """Try every stage on the model and restore the model. With `is_fixed` the set of parameters cannot change.

    What the model cannot take, or its wrappers cannot follow, is refused.
    """
    methods = [entry.config for stage in stages if stage.settings is not None for entry in stage.settings.entries]
    is_peft = hasattr(unwrap(model), "peft_config")
    # A model with adapters refuses parameters, so that a stage which learns some cannot be tried on it.
    layouts = None if is_peft and any(map(learns, methods)) else stage_layouts(model, stages)
    kinds = {type(module).__name__ for module in model.modules()}
    is_fixed |= any(hasattr(module, "_get_fsdp_state") for module in model.modules())
    is_fixed |= is_peft or bool(kinds & {"FullyShardedDataParallel", "DeepSpeedEngine", "DataParallel"})
    if layouts is None or (
        is_fixed and any(x.distill or y != layouts[0] for x, y in zip(stages, layouts, strict=True))
    ):
        raise UnsupportedAttentionError(
            f"the stages {', '.join(stage.attention for stage in stages)} do not learn the same parameters, or one is "
            "distilled, but FSDP, DeepSpeed and DataParallel keep the parameters that exist at the start, and PEFT "
            "saves only its adapters: use stages that learn the same parameters, with PEFT none, without 'distill', or "
            "train all parameters with DistributedDataParallel"
        )
    for stage, now, before in zip(stages[1:], layouts[1:], layouts, strict=False):
        if stage.distill and now.items() <= before.items():
            raise UnsupportedAttentionError(
                f"the stage {stage.attention!r} has distill={stage.distill}, but all parameters that it learns are "
                "those of the stage before, which keep their values: leave out 'distill', or use learned features if "
                "the method has them"
            )


def check_distillation(
    stages: Sequence[Stage], batches: Iterable[Batch] | None, options: DistillationOptions | None
) -> None:
    """Refuse batches and options that stages with "distill" cannot be distilled with, as far as this can be told."""
    names = ", ".join(repr(stage.attention) for stage in stages)
    if batches is None or isinstance(batches, Iterator) or (options and options.finetuning):
        raise UnsupportedAttentionError(
            f"to distill {names}, layer by layer, needs batches that a resumed training can read again: give a list or "
            "a DataLoader, no iterator, in every call of schedule.step(model, optimizer, step, batches=...), and leave "
            "out options.finetuning"
        )
    check_count(operator.length_hint(batches, 2))


def stage_layouts(model: nn.Module, stages: Sequence[Stage]) -> list[dict[str, torch.Size]]:
    """Names and shapes of the parameters that attention methods would learn in each stage. The model is restored."""
    before, layouts = Snapshot(transformers_models(model)), []
    try:
        for stage in stages:
            convert(unwrap(model), stage.settings or stage.attention)
            layouts.append({name: p.shape for name, p in learned_parameters(model).items()})
    finally:
        before.restore()
    return layouts


def switch_stage(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    stage: Stage,
    step: int,
    batches: Iterable[Batch] | None = None,
    options: DistillationOptions | None = None,
) -> dict[str, Any]:
    """Switch a model to a stage during training, as `UptrainingSchedule.step` describes.

    In distributed training all processes must call it at the same step. A stage with "distill" is distilled if there
    are `batches`. If that fails, the model has its former attention. Returns the record of the switch.
    """
    inner = unwrap(model)
    roots = transformers_models(inner)
    name, before = roots[0].config._attn_implementation, dict(inner.named_parameters())
    former: _Attention = {}
    for one in (one for root in roots for one in attention_modules(root)):
        former[one.module] = one.chosen, learned.tensors() if (learned := learned_of(one.module)) else {}
    with Snapshot(roots):
        convert(inner, stage.settings or stage.attention)
        carried = [p for module, (_, old) in former.items() if (new := learned_of(module)) for p in new.take(old)]
        distilled = None
        if stage.distill and batches is not None:
            teacher = functools.partial(_compute_as, former)
            distilled = _distill(inner, stage, batches, options or DistillationOptions(), (teacher, carried))
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
            update_optimizer(before, inner, optimizer)
        if world_size() > 1:
            # Trainer passes the model without its wrapper to callbacks, and the model has no reference to it.
            for wrapper in [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]:
                if getattr(wrapper, "module", None) is inner:
                    _rebuild(wrapper)
    if "torch._dynamo" in sys.modules:
        # Compiled graphs contain the previous attention; the next step compiles again.
        torch.compiler.reset()
    return record


# Attention module -> its method, None if it is exact, and its learned parameters.
_Attention: TypeAlias = dict[nn.Module, tuple[MethodConfig | None, dict[str, Tensor]]]


def _compute_as(former: _Attention, call: Call) -> Tensor:
    """The output of a call as its module computed it before a switch."""
    method, parameters = former.get(call.module, (None, {}))
    if (method := call.chosen(method)) is None:
        return exact_attention_of(call)
    # Parameters that the model no longer has did not move with it to another device.
    return call.compute(method, {name: p.detach().to(call.query.device) for name, p in parameters.items()} or None)


def update_optimizer(before: Mapping[str, nn.Parameter], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Remove dropped parameters from the optimizer and add new ones to the groups of similar parameters.

    A new parameter comes after those that precede it in the model, so that a saved state fits a new optimizer, too.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
    after = dict(model.named_parameters())
    old, position = {id(p) for p in before.values()}, {id(p): i for i, p in enumerate(after.values())}
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    # Trainer gives matrices and learned parameters weight decay, but no biases and norms.
    trained = [name for name, p in after.items() if id(p) in group_of]
    alike = [name for name in trained if after[name].ndim > 1] or trained
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in position or id(p) not in old]
    for name, p in after.items():
        if p.requires_grad and id(p) not in old | group_of.keys():
            # The nearest one is in the attention module, or else in the smallest enclosing module that has any.
            parts = name.split(".")
            nearest = max(alike, key=lambda other: len(commonprefix([parts, other.split(".")])))  # noqa: RUF071 (lists)
            params = group_of[id(after[nearest])]["params"]
            preceding = [(at, i) for i, q in enumerate(params, 1) if (at := position.get(id(q), -1)) < position[id(p)]]
            params.insert(max(preceding, default=(0, 0))[1], p)
    names = {id(p): name for name, p in after.items()}
    for group in optimizer.param_groups:
        if "param_names" in group:
            group["param_names"] = [names.get(id(p), "") for p in group["params"]]
    for gone in [p for p in optimizer.state if id(p) in old - position.keys()]:
        del optimizer.state[gone]


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


def _distill(
    model: nn.Module,
    stage: Stage,
    batches: Iterable[Batch],
    options: DistillationOptions,
    former: tuple[Callable[[Call], Tensor], Sequence[Tensor]],
) -> dict[str, Any]:
    """Train learned parameters of a model that was just switched, in place, on the former attention.

    `former` computes that attention, and has the parameters that stay as they are.
    """
    # The generators from which data sets and collators draw depend on the seed only.
    with contextlib.ExitStack() as stack, torch.random.fork_rng(devices=[]):
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        random.seed(options.seed)
        np.random.seed(options.seed % 2**32)
        # Not `torch.manual_seed`, which would also seed the generators of accelerators.
        torch.default_generator.manual_seed(options.seed)
        stream = batch_stream(batches, options.seed, stage.distill)
        distillation = Distillation(model, stage.distill, "output", options, *former)
        distillation.title = f"distillation of {stage.attention}"
        losses = distillation.run(stream, options.on_step, show_progress=options.show_progress)
    count = min(WINDOW, max(1, len(losses) // 5))
    first, last = statistics.fmean(losses[:count]), statistics.fmean(losses[-count:])
    return {"steps": stage.distill, "first_loss": first, "last_loss": last}


def training_batches(
    dataset: Any, collate: Callable[[list[Any]], Batch], batch_size: int, process_index: int = 0, num_processes: int = 1
) -> Iterable[Batch]:
    """Batches of a training set, read by index, so that the loader of the training and its sampler are not disturbed.

    The samples of a batch are spread evenly over the data set, which may be sorted. One without an index is refused.
    """
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise UnsupportedAttentionError(
            f"a stage is to be distilled, but the training set ({type(dataset).__name__}) can only be iterated, which "
            "the training does: give other batches, with UptrainingCallback(schedule, distillation_batches=...)"
        )
    count = max(1, len(dataset) // batch_size)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()[process_index::num_processes]
    samples = [list(range(first, len(dataset) // count * count, count)) for first in order]
    return DataLoader(dataset, batch_sampler=samples, collate_fn=collate)


def before_loading(
    stages: Sequence[Stage], is_over: bool, module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *args: Any
) -> None:
    """Switch a model to the stage of the weights that are about to be loaded, if they tell which one it is."""
    use_new_names(module, state_dict, prefix)
    names = {name for name in module.state_dict() if f".{NAME}." not in name}
    shapes = {key.removeprefix(prefix): tuple(value.shape) for key, value in state_dict.items()}
    given = {name: shape for name, shape in shapes.items() if f".{NAME}." in name}
    own = {name: p.shape for name, p in learned_parameters(module).items()}
    if given == own or 2 * len(names & shapes.keys()) < len(names):
        # The weights fit already, or they are a part of a model, such as adapters, which does not tell the stage.
        return
    for stage, layout in zip(stages, stage_layouts(module, stages), strict=True):
        if layout == given:
            convert(module, stage.settings or stage.attention)
            return
    for name, shape in () if is_over else given.items():
        raise UnsupportedAttentionError(
            f"the weights contain {name} of shape {shape}, which none of the stages "
            f"{', '.join(stage.attention for stage in stages)} learns: resume with the stages and hyperparameters "
            "of the original training"
        )


def use_new_names(model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
    """Rename, in place, weights that `save_pretrained` stored under names of older Transformers versions (as for ViT).

    `from_pretrained` accepts both. Resumption in Trainer loads a file as it is, warns that all layers are missing, and
    continues with the current weights, unless this is a `load_state_dict` pre-hook of the model.
    """
    if not isinstance(model, PreTrainedModel):
        return
    names = model.state_dict().keys()
    renamings = [x for x in get_model_conversion_mapping(model) if isinstance(x, WeightRenaming)]
    new = {key: rename_source_key(key.removeprefix(prefix), renamings, [])[0] for key in state_dict}
    if len(names & set(new.values())) > len(names & {key.removeprefix(prefix) for key in state_dict}):
        for old, name in new.items():
            state_dict[prefix + name] = state_dict.pop(old)


def log_entries(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a switch as entries of a training's log, without its step."""
    names = {"uptraining_from": record["from"], "uptraining_stage": record["to"]}
    return names | {f"distillation_{name}": value for name, value in (record["distillation"] or {}).items()}
