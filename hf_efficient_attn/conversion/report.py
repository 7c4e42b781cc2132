"""What the report of a conversion says: from where on the model differs from exact attention, notes, how to load it."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from hf_efficient_attn.checkpoint.limits import sentence_limit
from hf_efficient_attn.checkpoint.provenance import TRAINED
from hf_efficient_attn.hub.facts import own_files_of
from hf_efficient_attn.integration.attention import method_at
from hf_efficient_attn.integration.configs import method_of
from hf_efficient_attn.integration.layers import Layer, in_order, ranges
from hf_efficient_attn.integration.models import attention_modules
from hf_efficient_attn.integration.positions import find_tables
from hf_efficient_attn.integration.settings import as_settings, changed_hyperparameters
from hf_efficient_attn.methods import MethodConfig
from hf_efficient_attn.models import auto_class
from hf_efficient_attn.standalone.remote_code import auto_classes


def num_positions(model: PreTrainedModel) -> int | None:
    """The number of tokens that a text model takes, as its position table or its config says; None if neither does."""
    tables = [table.num_positions for table in find_tables(model, model.config)]
    return min(tables) if tables else getattr(model.config, "max_position_embeddings", None)


def exact_lengths(model: PreTrainedModel) -> list[dict[str, Any]]:
    """The methods of a converted model, in the order of the layers.

    Returns:
        For each method "layers", "method", "settings" (the hyperparameters that differ from the defaults) and "tokens":
        the number of tokens up to which these layers compute exact attention, 0 if they never do.
    """
    methods: dict[Layer, MethodConfig] = {}
    for module in attention_modules(model):
        method = method_at(module.config, method_of(module.config), module.location)
        if method is not None and module.location.label is not None:
            methods.setdefault(module.location.label, method)
    layers: dict[MethodConfig, list[Layer]] = {}
    for layer in in_order(methods):
        layers.setdefault(methods[layer], []).append(layer)
    return [
        {
            "layers": labels,
            "method": method.method,
            "settings": changed_hyperparameters(method),
            "tokens": method.exact_length,
        }
        for method, labels in layers.items()
    ]


def describe(groups: Sequence[Mapping[str, Any]], positions: int | None) -> list[str]:
    """Sentences about the length from which a model differs from exact attention; `positions` as `num_positions`."""
    sentences = []
    for group in groups:
        where = f" (layers {ranges(group['layers'])})" if len(groups) > 1 else ""
        what = "differs from exact attention at every length"
        if group["tokens"]:
            what = f"up to {group['tokens']} tokens are computed exactly, more are approximated"
        sentences.append(f"{group['method']}{where}: {what}")
    if groups and positions and positions <= min(group["tokens"] for group in groups):
        sentences.append(
            f"the model takes {positions} tokens, so its output does not change: the method takes effect with longer "
            "inputs (--max-length) or smaller hyperparameters only"
        )
    return sentences


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
    return notes


def loading_lines(
    model: PreTrainedModel, output: str, *, embeds_sentences: bool, kernel: str | None = None, has_code: bool = False
) -> str:
    """The Python lines that load the result, with sentence-transformers if the files are those of such a model."""
    architecture, stored, option = type(model).__name__, model.config.efficient_attention, ""
    name, lines = auto_class(architecture) or architecture, list[str]()
    if has_code:
        autos = [auto for auto, found in auto_classes(model.config).items() if found == architecture]
        name, option = next(reversed(autos), name), ", trust_remote_code=True"
    elif kernel is not None:
        option = ', model_kwargs={"allow_all_kernels": True}' if embeds_sentences else ", allow_all_kernels=True"
    elif stored or auto_class(architecture):
        classes = {type(entry.config) for entry in as_settings(stored).entries} if stored else set()
        lines = ["import hf_efficient_attn", *(file.line for file in own_files_of(classes))]
    library, call = "transformers", f"{name}.from_pretrained"
    if embeds_sentences:
        library, name, call = "sentence_transformers", "SentenceTransformer", "SentenceTransformer"
    return "\n".join([*lines, f"from {library} import {name}", f"model = {call}({output!r}{option})"])
