"""A model out of a checked checkpoint, by its own class, from the tensors that were checked and nothing else."""

import contextlib
import difflib
import math
import warnings
from collections import Counter
from collections.abc import Iterator

import torch
from transformers.utils import logging

from hf_efficient_attn.checkpoint.source import CheckedSource
from hf_efficient_attn.checkpoint.values import refusing, short
from hf_efficient_attn.checkpoint.weights import Weights, all_tensors
from hf_efficient_attn.errors import UnsupportedAttentionError

# A model may hold more than its checkpoint: tied parameters, a pooler, tables computed when it is made.
_MORE_PARAMETERS, _MORE_NUMBERS = 8, 4
_PARAMETERS, _NUMBERS = 4096, 2**26


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    """Hide the progress bar that Transformers draws for every model that it loads."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the progress bar, the warnings and the reports of Transformers; the caller reports what matters."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with no_progress_bar(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)


def load_model(checked: CheckedSource):
    """The model of a checkpoint, in eval mode on the CPU, with the attention that its config names.

    It is of the class that `config.architectures` names, so that heads are kept; of AutoModel's class where it names
    none. Its type is that of most numbers in the checkpoint.

    Args:
        checked: what `open_checkpoint` returned.

    Returns:
        a `PreTrainedModel`. Its parameters are views of the files, private to this process, until they are changed.

    Raises:
        UnsupportedAttentionError: no such class in Transformers, or tensors that are missing or of other shapes than
            the config says.
    """
    return load_with_report(checked)[0]


def load_with_report(checked: CheckedSource, tensors: dict[str, torch.Tensor] | None = None):
    """The same -> (model, notes for the user, names of the checkpoint's tensors that the model does not use)."""
    with quiet(), refusing(f"{short(checked.name)} describes no model that can be built"):
        config = _make_config(checked)
        cls, notes = model_class(checked, config)
        state = dict(all_tensors(checked.weights)) if tensors is None else tensors
        with _limits(checked.weights):
            model, report = cls.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=main_dtype(state),
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    _check_report(checked, cls, report, notes)
    _load_generation_config(checked, model)
    return model.eval(), notes, sorted(report["unexpected_keys"])


def _make_config(checked: CheckedSource):
    from transformers import CONFIG_MAPPING

    kind = checked.config["model_type"]
    if kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(kind[:60], list(CONFIG_MAPPING), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnsupportedAttentionError(
            f"Transformers has no model of type {short(kind)}.{hint} Code that comes with a "
            "checkpoint is never run here"
        )
    return CONFIG_MAPPING[kind].from_dict(dict(checked.config))


def model_class(checked: CheckedSource, config) -> tuple[type, list[str]]:
    """The class that `config.architectures` names -> (class, notes)."""
    import transformers
    from transformers import AutoModel

    names = checked.config.get("architectures") or []
    for name in names:
        cls = getattr(transformers, name, None) or _registered(name, config)
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            if not isinstance(config, cls.config_class or ()):
                raise UnsupportedAttentionError(
                    f"config.json is of a {type(config).__name__}, which a {name} does not take"
                )
            return cls, []
    if names:
        raise UnsupportedAttentionError(
            f"Transformers has no model class {short(names[0])}; code that comes with a checkpoint is never run here"
        )
    if type(config) not in AutoModel._model_mapping:
        raise UnsupportedAttentionError(
            f"config.json names no architectures, and AutoModel knows no class for a {type(config).__name__}"
        )
    cls = AutoModel._model_mapping[type(config)]
    cls = cls[0] if isinstance(cls, tuple) else cls
    return cls, [f"config.json names no architectures: taken as a {cls.__name__}, as AutoModel does"]


def _registered(name: str, config) -> type | None:
    """A class that was registered for the config with one of Transformers' AutoModels."""
    from transformers.models.auto import modeling_auto

    for auto in vars(modeling_auto).values():
        extra = getattr(getattr(auto, "_model_mapping", None), "_extra_content", {})
        found = extra.get(type(config))
        for cls in found if isinstance(found, (tuple, list)) else [found]:
            if cls is not None and cls.__name__ == name:
                return cls
    return None


def main_dtype(tensors: dict[str, torch.Tensor]) -> torch.dtype:
    """The floating type of most numbers; float32 where there is none."""
    numbers: Counter[torch.dtype] = Counter()
    for tensor in tensors.values():
        if tensor.is_floating_point() and tensor.element_size() > 1:
            numbers[tensor.dtype] += tensor.numel()
    return numbers.most_common(1)[0][0] if numbers else torch.float32


@contextlib.contextmanager
def _limits(weights: Weights) -> Iterator[None]:
    """Refuse, while a model is built (on the meta device), what is far larger than its checkpoint."""
    modules = torch.nn.modules.module
    parameters = _PARAMETERS + _MORE_PARAMETERS * len(weights.shapes)
    numbers = _NUMBERS + _MORE_NUMBERS * weights.numbers
    seen = Counter()

    def count(module, name, tensor):
        if tensor is None:
            return
        seen["parameters"] += 1
        # What is loaded replaces what was made, and is no larger than the checkpoint.
        seen["numbers"] += math.prod(tensor.shape) if tensor.device.type == "meta" else 0
        if seen["parameters"] > parameters or seen["numbers"] > numbers:
            raise UnsupportedAttentionError(
                f"config.json describes a model far larger than the {weights.numbers} numbers in "
                f"{len(weights.shapes)} tensors that the checkpoint holds"
            )

    hooks = [modules.register_module_parameter_registration_hook(count)]
    hooks.append(modules.register_module_buffer_registration_hook(count))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_report(checked: CheckedSource, cls: type, report: dict, notes: list[str]) -> None:
    mismatched = sorted(report["mismatched_keys"], key=str)
    if mismatched:
        name, found, wanted = mismatched[0]
        raise UnsupportedAttentionError(
            f"{short(checked.name)}: tensor {short(name)} is {_shape(found)} where config.json asks for "
            f"{_shape(wanted)}{_others(mismatched)}"
        )
    missing = sorted(report["missing_keys"])
    # A pooler that was left out when the model was made is made anew on every load, here as anywhere.
    poolers = [name for name in missing if "pooler" in name.split(".")]
    if len(poolers) < len(missing):
        lacking = [name for name in missing if name not in poolers]
        raise UnsupportedAttentionError(
            f"{short(checked.name)}: the checkpoint lacks tensor {short(lacking[0])}{_others(lacking)}, without which "
            f"it is no {cls.__name__}"
        )
    if poolers:
        notes.append(
            f"the checkpoint has no pooler: Transformers starts it at random on every load of a {cls.__name__}"
        )


def _shape(sizes) -> str:
    return " x ".join(map(str, sizes)) or "a single number"


def _others(names: list) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _load_generation_config(checked: CheckedSource, model) -> None:
    """How the model generates, from its own file, which no tensors come with."""
    if "generation_config.json" not in checked.companions or not model.can_generate():
        return
    from transformers import GenerationConfig

    with quiet(), refusing("generation_config.json"):
        model.generation_config = GenerationConfig.from_pretrained(checked.folder, local_files_only=True)
