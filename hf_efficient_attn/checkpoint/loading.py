"""Building the model of a checked checkpoint, by Transformers' own class and from the checked tensors only."""

import contextlib
import dataclasses
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from hf_efficient_attn.checkpoint.source import CheckedSource, find_weights
from hf_efficient_attn.errors import UnsupportedAttentionError, did_you_mean, refusing, shown
from hf_efficient_attn.integration.configs import parts_of
from hf_efficient_attn.integration.settings import EfficientAttentionConfig, as_settings
from hf_efficient_attn.methods import parameter_shapes

# A model may have more parameters and buffers than its checkpoint has tensors, for example tied parameters, a pooler
# or computed tables: 8 times as many tensors, 4 times as many values, and beyond that `_EXTRA` values. A tensor counts
# as `_TENSOR` values besides its own.
_TENSOR, _EXTRA = 2**14, 2**26


class LoadedModel(NamedTuple):
    """A model, notes for the user, and the names of tensors that only the checkpoint or only the model has."""

    model: PreTrainedModel
    notes: list[str]
    unused: list[str]
    missing: list[str]


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    """Hide the progress bar that Transformers draws for every model that it loads."""
    with contextlib.ExitStack() as stack:
        if logging.is_progress_bar_enabled():
            stack.callback(logging.enable_progress_bar)
        logging.disable_progress_bar()
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the progress bar, the warnings and the reports of Transformers; the caller reports what matters."""
    with no_progress_bar(), warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        stack.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity(logging.CRITICAL)
        yield


def load_model(checked: CheckedSource) -> PreTrainedModel:
    """Load the model of a checkpoint, in eval mode on the CPU, with the attention that its config names.

    The class is the one that `config.architectures` names, with its head, or that of AutoModel if the config names
    none. The dtype is that of most values in the checkpoint. The parameters are views of the files, private to this
    process, until they are changed. A class that Transformers does not have, and tensors that are missing or do not
    have the shapes that the config describes, are refused.
    """
    return load_with_report(checked).model


def load_with_report(checked: CheckedSource) -> LoadedModel:
    """Load the model of a checkpoint as `load_model` does, with a report for the user."""
    name = shown(checked.hub_id or checked.folder.name)
    with quiet(), refusing(f"{name}: no model can be built from its config"):
        cls, config, notes = _model_class(checked)
        # The model gets views of its own, whose training does not change those of `checked`.
        weights = find_weights(checked.folder, checked.inside, allow_pickle=True)
        tensors = dataclasses.replace(checked, weights=weights).tensors
        counts = Counter[torch.dtype]()
        for tensor in tensors.values():
            if tensor.is_floating_point() and tensor.element_size() > 1:
                counts[tensor.dtype] += tensor.numel()
        for part in (config, *parts_of(config).values()):
            if part.efficient_attention:
                check_learned(as_settings(part.efficient_attention), part, sum(x.numel() for x in tensors.values()))
        with _limited_size(tensors):
            load: Any = cls.from_pretrained  # with output_loading_info the result is a pair
            options = {"ignore_mismatched_sizes": True, "output_loading_info": True}
            dtype = counts.most_common(1)[0][0] if counts else torch.float32
            model, report = load(None, config=config, state_dict=tensors, dtype=dtype, **options)
        if "generation_config.json" in checked.companions and model.can_generate():
            model.generation_config = GenerationConfig.from_pretrained(checked.folder, local_files_only=True)
    for key, present, expected in sorted(report["mismatched_keys"], key=str):
        raise UnsupportedAttentionError(
            f"{name}: tensor {shown(key)} is of size {list(present)} where config.json asks for {list(expected)}"
        )
    missing = sorted(report["missing_keys"])
    # Models saved without a pooler get a random one every time they are loaded, which is harmless.
    lacking = [key for key in missing if "pooler" not in key.split(".")]
    if lacking:
        raise UnsupportedAttentionError(f"{name} lacks tensor {shown(lacking[0])}, which a {cls.__name__} needs")
    if missing:
        notes.append(
            f"the checkpoint has no pooler: Transformers starts it at random each time it loads a {cls.__name__}"
        )
    return LoadedModel(model.eval(), notes, sorted(report["unexpected_keys"]), missing)


def check_learned(chosen: EfficientAttentionConfig, config: object, present: int) -> None:
    """Refuse hyperparameters with which a layer would learn more values than the whole model has, which are `present`.

    They are mistyped, or those of a hostile checkpoint. The values are counted on the meta device, without memory.
    """
    length = getattr(config, "max_position_embeddings", None) or 1
    for method in {entry.config for entry in chosen.entries}:
        with torch.device("meta"):
            learned = sum(shape.numel() for shape in parameter_shapes(method, max_length=length).values())
        if learned > max(2 * present, 2**24):
            raise UnsupportedAttentionError(
                f"{method.method}: with these hyperparameters each layer would learn {learned} values, while the whole "
                f"model has {present}"
            )


def auto_classes(config: PreTrainedConfig) -> dict[str, type[PreTrainedModel]]:
    """The model class of each class such as `AutoModelForCausalLM` for a config."""
    found = {}
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None)
        if name.startswith("Auto") and mapping is not None and type(config) in mapping:
            classes = mapping[type(config)]
            found[name] = classes[0] if isinstance(classes, (tuple, list)) else classes
    return found


def _model_class(checked: CheckedSource) -> tuple[type[PreTrainedModel], PreTrainedConfig, list[str]]:
    """The class that `config.architectures` names, its config, and notes for the user."""
    kind, names = checked.config["model_type"], checked.config.get("architectures") or []
    if kind not in CONFIG_MAPPING:
        raise UnsupportedAttentionError(
            f"Transformers has no model of type {shown(kind)}.{did_you_mean(kind[:60], CONFIG_MAPPING)} Code that "
            "comes with a checkpoint is never run"
        )
    config = CONFIG_MAPPING[kind].from_dict(dict(checked.config))
    # Also those that programs have registered, and that Transformers itself does not contain.
    classes = auto_classes(config)
    if not names and "AutoModel" in classes:
        base = classes["AutoModel"]
        return base, config, [f"config.json names no architectures: loaded as a {base.__name__}, as AutoModel does"]
    registered = {cls.__name__: cls for cls in classes.values()}
    for name in names:
        cls = getattr(transformers, name, None) or registered.get(name)
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel) and isinstance(config, cls.config_class or ()):
            return cls, config, []
    raise UnsupportedAttentionError(
        f"Transformers has no model class {shown(names[0] if names else None)} for a {type(config).__name__}; code "
        "that comes with a checkpoint is never run"
    )


@contextlib.contextmanager
def _limited_size(tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuse models that are far larger than their checkpoint, while they are built on the meta device."""
    present = sum(tensor.numel() for tensor in tensors.values())
    left = _EXTRA + 8 * _TENSOR * len(tensors) + 4 * present

    def count(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal left
        if tensor is not None:
            # The numbers of tensors on other devices do not count: the checkpoint has provided them.
            left -= _TENSOR + (tensor.numel() if tensor.device.type == "meta" else 0)
        if left < 0:
            raise UnsupportedAttentionError(
                f"config.json describes a model far larger than the checkpoint, which holds {present} values in "
                f"{len(tensors)} tensors"
            )

    register = nn.modules.module
    parameters = register.register_module_parameter_registration_hook(count)
    with parameters, register.register_module_buffer_registration_hook(count):
        yield
