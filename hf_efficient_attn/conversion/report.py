"""What the report of a conversion says: from where on the model differs from exact attention, notes, how to load it."""

import inspect
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from hf_efficient_attn.checkpoint.limits import sentence_limit
from hf_efficient_attn.checkpoint.loading import quiet
from hf_efficient_attn.checkpoint.provenance import INSTALL, TRAINED
from hf_efficient_attn.hub.context import own_files_of
from hf_efficient_attn.integration.attention import method_at
from hf_efficient_attn.integration.configs import method_of
from hf_efficient_attn.integration.layers import Layer, in_order, ranges
from hf_efficient_attn.integration.models import attention_modules
from hf_efficient_attn.integration.positions import find_tables
from hf_efficient_attn.integration.settings import as_settings, changed_hyperparameters
from hf_efficient_attn.methods import MethodConfig
from hf_efficient_attn.models import auto_class

_ARGUMENT = "interpolate_pos_encoding"


class ExactUpTo(NamedTuple):
    """The layers that use one method, its hyperparameters that differ from the defaults, and its limit.

    That is the number of tokens up to which these layers compute exact attention; 0 if they never do.
    """

    layers: list[Layer]
    method: str
    settings: dict[str, Any]
    tokens: int


class Pictures(NamedTuple):
    """What a conversion means for square pictures.

    Attributes:
        size: the height in pixels of the pictures that the model was trained on.
        tokens: the largest number of tokens of such a picture in a layer with a method.
        differs_from: the smallest height at which the output differs from exact attention.
        argument: the argument of the model that larger pictures need; None if it has none.
    """

    size: int
    tokens: int
    differs_from: int
    argument: str | None


def num_positions(model: PreTrainedModel) -> int | None:
    """The number of tokens that a text model takes, as its position table or its config says; None if neither does."""
    tables = [table.num_positions for table in find_tables(model, model.config)]
    return min(tables) if tables else getattr(model.config, "max_position_embeddings", None)


def exact_lengths(model: PreTrainedModel) -> list[ExactUpTo]:
    """The methods of a converted model with their layers, in the order of the layers."""
    methods, found = _methods(model), dict[MethodConfig, list[Layer]]()
    for layer in in_order(methods):
        found.setdefault(methods[layer], []).append(layer)
    return [
        ExactUpTo(layers, method.method, changed_hyperparameters(method), method.exact_length)
        for method, layers in found.items()
    ]


def picture_sizes(model: PreTrainedModel) -> Pictures | None:
    """What the conversion means for pictures; None if the model takes other inputs or its sizes are unknown.

    The numbers of tokens are measured by a forward pass. That of a layer is a square of patches and a few more.
    """
    size, patch = getattr(model.config, "image_size", None), getattr(model.config, "patch_size", None)
    if isinstance(size, (list, tuple)):
        size = size[0] if len(set(size)) == 1 else None
    exact = {layer: method.exact_length for layer, method in _methods(model).items()}
    if model.main_input_name != "pixel_values" or not isinstance(size, int) or size < 1 or not exact:
        return None
    step = patch if isinstance(patch, int) and patch > 0 else 1
    argument = _ARGUMENT if _ARGUMENT in inspect.signature(model.forward).parameters else None
    tokens = _tokens_in_picture(model, size)
    if not exact.keys() <= tokens.keys():
        return None
    starts = []
    for layer, limit in exact.items():
        side = math.isqrt(tokens[layer])
        others = tokens[layer] - side**2
        # The first side whose square, with the other tokens, is above the limit, in pixels.
        pixels = size if tokens[layer] > limit else (math.isqrt(limit - others) + 1) * size / side
        starts.append(size + math.ceil((pixels - size) / step) * step)
    return Pictures(size, max(tokens[layer] for layer in exact), min(starts), argument)


def _tokens_in_picture(model: PreTrainedModel, size: int) -> dict[Layer, int]:
    """The number of tokens in every layer for a square picture; empty if the model does not take it."""
    found: dict[Layer, int] = {}

    def record(label: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = kwargs.get("hidden_states", args[0] if args else None)
        if isinstance(states, Tensor) and states.ndim == 3:
            found[label] = states.shape[1]

    hooks = [
        part.module.register_forward_pre_hook(
            lambda _, args, kwargs, label=part.location.label: record(label, args, kwargs), with_kwargs=True
        )
        for part in attention_modules(model)
        if part.location.label is not None
    ]
    pixels = torch.zeros(1, getattr(model.config, "num_channels", 3), size, size, dtype=model.dtype)
    try:
        with torch.no_grad(), quiet():
            model(pixel_values=pixels.to(model.device))
    except Exception:  # noqa: BLE001 (a model may refuse a size by any error)
        return {}
    finally:
        for hook in hooks:
            hook.remove()
    return found


def describe(groups: Sequence[ExactUpTo], pictures: Pictures | None, positions: int | None) -> list[str]:
    """Sentences about the length from which a model differs from exact attention; `positions` as `num_positions`."""
    sentences = []
    unit = "" if pictures is None else " of a picture"
    for tokens in dict.fromkeys(group.tokens for group in groups):
        same = [group for group in groups if group.tokens == tokens]
        names = ", ".join(dict.fromkeys(group.method for group in same))
        if len(same) < len(groups):
            names += f" (layers {ranges([layer for group in same for layer in group.layers])})"
        if tokens:
            sentences.append(f"{names}: up to {tokens} tokens{unit} are computed exactly, more are approximated")
        else:
            sentences.append(f"{names}: differs from exact attention at every length")
    if groups and pictures is None and positions and positions <= min(group.tokens for group in groups):
        sentences.append(
            f"the model takes {positions} tokens, so its output does not change: the method takes effect with longer "
            "inputs (--max-length) or smaller hyperparameters only"
        )
    if pictures is None:
        return sentences
    size, start = pictures.size, pictures.differs_from
    effect = f"computed exactly; differs from exact attention from {start} px on"
    if start == size:
        effect = "differs from exact attention at this and every larger size"
    sentences.append(f"{pictures.tokens} tokens at {size} px: {effect}")
    if pictures.argument is not None:
        sentences.append(f"pictures of other sizes than {size} px: model(pixel_values, {pictures.argument}=True)")
    return sentences


def _methods(model: PreTrainedModel) -> dict[Layer, MethodConfig]:
    """The method of every layer that has one."""
    found: dict[Layer, MethodConfig] = {}
    for module in attention_modules(model):
        name, location = method_of(module.config), module.location
        method = method_at(module.config, name, location)
        if method is not None and location.label is not None:
            found.setdefault(location.label, method)
    return found


def notes_of(
    draft: pathlib.Path, positions: int | None, origin: Mapping[str, Any], changed: Sequence[Mapping[str, Any]] | None
) -> list[str]:
    """Notes about the number of tokens that a result takes, and about what its card cannot say.

    The result is in the folder `draft`, and its model takes `positions` tokens, or an unknown number. `origin` are the
    contents of `efficient_attention.json`. `changed` is what `set_limits` returned, None if no length was asked for.
    """
    trained, limit = origin[TRAINED], sentence_limit(draft)
    notes = [
        f"{x['file']}: {x['key']} {x['after']} in place of {x['before']}; the rest is unchanged" for x in changed or ()
    ]
    if limit is not None and positions is not None and limit.tokens < positions:
        notes.append(
            f"texts are truncated at {limit.tokens} tokens ({limit.key} in {limit.file}), although the model takes "
            f"{positions}: --max-length {positions} raises that number"
        )
    if changed is not None and trained is not None and positions is not None and positions > trained:
        notes.append(
            f"the table of {trained} positions is repeated {positions / trained:.3g} times, and the model was not "
            f"trained on texts of more than {trained} tokens: check its results on texts as long as yours, or "
            "fine-tune it on them"
        )
    if origin["base_model"] is None:
        notes.append("the card does not name the original model: if it is on the hub, give --base-model ORG/NAME")
    if origin[INSTALL] is not None:
        notes.append(f"as in the source, the card tells its readers to 'pip install {origin[INSTALL]}'")
    return notes


def loading_lines(model: PreTrainedModel, output: str, *, embeds_sentences: bool) -> str:
    """The Python lines that load the result, with sentence-transformers if the files are those of such a model."""
    own_class = auto_class(type(model).__name__)
    stored = model.config.efficient_attention
    lines = ["import hf_efficient_attn"] if own_class or stored else []
    classes = {type(entry.config) for entry in as_settings(stored).entries} if stored else set()
    lines += [file.line for file in own_files_of(classes)]
    name = own_class or type(model).__name__
    library, call = "transformers", f"{name}.from_pretrained"
    if embeds_sentences:
        library, name, call = "sentence_transformers", "SentenceTransformer", "SentenceTransformer"
    return "\n".join([*lines, f"from {library} import {name}", f"model = {call}({output!r})"])
