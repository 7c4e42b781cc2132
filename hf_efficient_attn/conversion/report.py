"""The notes in the report of a conversion, and the lines that load the result."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from hf_efficient_attn.checkpoint.limits import sentence_limit
from hf_efficient_attn.checkpoint.provenance import INSTALL, TRAINED
from hf_efficient_attn.hub.context import own_files_of
from hf_efficient_attn.models import auto_class


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
    classes = {type(entry.config) for entry in stored.settings.entries} if stored else set()
    lines += [file.line for file in own_files_of(classes)]
    name = own_class or type(model).__name__
    library, call = "transformers", f"{name}.from_pretrained"
    if embeds_sentences:
        library, name, call = "sentence_transformers", "SentenceTransformer", "SentenceTransformer"
    return "\n".join([*lines, f"from {library} import {name}", f"model = {call}({output!r})"])
