"""Conversion of a checkpoint folder into another folder.

Tensors are copied from file to file, bit for bit and in their own dtypes, without passing through a model. So tensors
that the model's class does not know are kept. A model is loaded only to find out which tensors change: the parameters
that a method learns, and a position table that is extended. The result is loaded again before it replaces the output.
"""

import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hf_efficient_attn.checkpoint import open_checkpoint
from hf_efficient_attn.checkpoint.files import Output
from hf_efficient_attn.checkpoint.limits import sentence_limit, set_limits
from hf_efficient_attn.checkpoint.loading import check_learned, load_with_report, quiet
from hf_efficient_attn.checkpoint.source import FILE, INDEX, PICKLED, SINGLE, TRAINED, Weights, check_hub_id, provenance
from hf_efficient_attn.conversion.convert import convert, extend_positions, is_rotary, num_positions, requested_settings
from hf_efficient_attn.errors import UnsupportedAttentionError, refusing, shown
from hf_efficient_attn.hub.card import Facts, write_card
from hf_efficient_attn.integration.configs import parts_of
from hf_efficient_attn.integration.layers import Layer, in_order, ranges
from hf_efficient_attn.integration.learned import NAME as LEARNED
from hf_efficient_attn.integration.models import attention_modules
from hf_efficient_attn.integration.settings import EXACT, EfficientAttentionConfig, as_settings, changed_hyperparameters
from hf_efficient_attn.io.json import read_json_object, write_json
from hf_efficient_attn.methods import MethodConfig
from hf_efficient_attn.models import auto_class
from hf_efficient_attn.standalone.export import MODULE, kernel_implementation, remote_code


def convert_saved_model(
    source: "str | os.PathLike[str]",
    output: "str | os.PathLike[str]",
    method: str | EfficientAttentionConfig,
    *,
    hyperparameters: Mapping[str, Any] | None = None,
    layers: Sequence[Layer] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Write a checkpoint that `from_pretrained` loads with a method of this package once the package is imported.

    The output has the tensors of the source, bit for bit, in as many files. Files of the tokenizer, the processor and
    sentence-transformers are copied, unchanged but for the limits that `max_length` raises, and a model card is
    written. The output folder appears only when everything is written.

    Args:
        source: As for `Conversion`.
        output: As for `Conversion`.
        method: A name from `available_methods()`; "sdpa" for exact attention, which drops learned parameters; or the
            methods of all layers, for example the result of `hea.calibrate`.
        hyperparameters: Replace the defaults of the method, or those of a checkpoint that has the same method.
        layers: Indices of the layers to convert. All others become exact. None for all layers.
        **options: Those of `Conversion`.

    Returns:
        A report of plain values: source, output, architecture, method, settings, layers (indices of the converted
        layers), positions (the number of tokens that the model takes, or None), exact_up_to (see `exact_lengths`),
        limits (see `set_limits`), parameters {"kept": count, "new": names, "dropped": names}, files with their sizes in
        bytes, left_out (files that were not copied), notes, and load, the Python lines that load the result.

    Raises:
        UnsupportedAttentionError: The source, the method, a hyperparameter, a layer or the output cannot be used.
            Nothing has been written.
        OSError: A file could not be read or written. Nothing of the output remains.
    """
    conversion = Conversion(source, output, **options)
    conversion.switch(method, hyperparameters or {}, layers)
    return conversion.write()


class Conversion:
    """The conversion of one checkpoint, of which `convert_saved_model` carries out all parts.

    Between `switch` and `write` the learned parameters of the model can be trained, and its own parameters too.
    Attributes are `checked`, the source, `place`, the output folder, and `model`, the source's model in eval mode.

    Args:
        source: A folder or hub id, as for `open_checkpoint`, like `allow_pickle`.
        output: The folder to write. It must not exist, or be empty, unless `force` is given.
        max_length: Number of tokens that the result takes. A shorter position table is extended by repeating it
            (`extend_positions`), and the limits at which the tokenizer and sentence-transformers truncate are raised.
        base_model: Hub id that the card names as the origin, if the files of a local folder do not state it.
        kernel: Hub id of a repository that `export_kernel` wrote for the method. The result names it as its attention,
            so that it loads without this package.
        has_code: Write a file with the code of the attention, with which the result loads without this package by
            `trust_remote_code=True`. Methods with learned parameters are possible, too.
        force: Replace an existing output folder when everything is written.
    """

    def __init__(
        self,
        source: "str | os.PathLike[str]",
        output: "str | os.PathLike[str]",
        *,
        max_length: int | None = None,
        base_model: str | None = None,
        kernel: str | None = None,
        has_code: bool = False,
        force: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        if kernel is not None and has_code:
            raise UnsupportedAttentionError(
                "--kernel and --remote-code are two ways of loading without this package: give one of them"
            )
        self._source, self._output, self._max_length = os.fspath(source), os.fspath(output), max_length
        self.checked = open_checkpoint(source, allow_pickle=allow_pickle)
        self.place = Output(output, self.checked.folder, force=force)
        loaded = self._loaded = load_with_report(self.checked)
        self.model = loaded.model
        self._origin = origin = provenance(self.checked)
        if base_model is not None:
            check_hub_id(base_model, "--base-model")
            origin["base_model"] = base_model
        if origin[TRAINED] is None and origin["max_length"] is None:
            origin[TRAINED] = num_positions(self.model)
        origin["max_length"] = max_length or origin["max_length"]
        self._method, self._kernel, self._has_code = EXACT, kernel, has_code

    def extend(self) -> None:
        """Extend the positions of the model to `max_length`, if that is given and they are fewer, as `switch` does."""
        model = self.model
        length = self._max_length
        positions = num_positions(model)
        if length is None or (is_rotary(model.config) and positions is not None and length <= positions):
            return  # rotary positions are computed
        with refusing(f"--max-length {length}"):
            extend_positions(model, length)

    def switch(
        self, method: str | EfficientAttentionConfig, hyperparameters: Mapping[str, Any], layers: Sequence[Layer] | None
    ) -> None:
        """Extend the positions and switch the model to a method; the arguments are those of `convert_saved_model`."""
        model, stored = self.model, self.model.config.efficient_attention
        self._method = method if isinstance(method, str) else str(method.method)
        # The hyperparameters that the checkpoint's parameters were learned with.
        entries = as_settings(stored).entries if stored else ()
        present = [entry.config for entry in entries if entry.config.method == method]
        chosen = requested_settings(present[0] if len(present) == 1 else method, layers, hyperparameters)
        with quiet(), refusing(f"{self._method} in a {type(model).__name__}", OSError, UnsupportedAttentionError):
            if self._max_length is not None and stored and not present:
                convert(model, EXACT)  # otherwise parameters that are dropped anyway would prevent the extension
            self.extend()
            if chosen is not None:
                check_learned(chosen, model.config, model.num_parameters())
            convert(model, chosen or method)
        if self._kernel is not None:
            kernel_implementation(model, self._kernel)  # refuse it before the work
        if self._has_code:
            remote_code(model.config)

    def write(self, *, add_files: Callable[[pathlib.Path], object] | None = None) -> dict[str, Any]:
        """Write the result, with the tensors of the source where the model has not changed them.

        `add_files` adds files to the folder, before the card is made. Returns the report of `convert_saved_model`.
        """
        checked, model = self.checked, self.model
        groups = exact_lengths(model)
        with self.place.staged() as draft:
            new, dropped = find_changes(model, checked.tensors, self._loaded.missing)
            names = (checked.tensors.keys() | new.keys()) - dropped
            self._write_model(draft, new, names)
            limits = None if self._max_length is None else set_limits(draft, self._max_length)
            notes = self._notes(draft, groups, limits)
            write_json(draft / FILE, self._origin)
            self._check_that_it_loads(draft, names)
            self._name_code(draft)
            if add_files is not None:
                add_files(draft)
            write_card(draft, name=self.place.path.name)
            load = loading_lines(Facts(draft, may_be_exact=True), self._output)
            files = [path for path in sorted(draft.rglob("*")) if path.is_file()]
            sizes = [{"name": path.relative_to(draft).as_posix(), "bytes": path.stat().st_size} for path in files]
        return {
            "source": self._source,
            "output": str(self.place.path),
            "architecture": type(model).__name__,
            "method": self._method,
            "settings": dict(model.config.efficient_attention or {}),
            "layers": in_order(layer for group in groups for layer in group["layers"]),
            "positions": num_positions(model),
            "exact_up_to": groups,
            "limits": limits or [],
            "parameters": {"kept": len(names - new.keys()), "new": sorted(new), "dropped": sorted(dropped)},
            "files": sizes,
            "left_out": list(checked.left_out),
            "notes": notes,
            "load": load,
        }

    def _write_model(self, draft: pathlib.Path, new: Mapping[str, Tensor], names: set[str]) -> None:
        """Write the config and the tensors `names` of the model, and copy the other files of the source."""
        checked, config = self.checked, self.model.config
        config.architectures = list(checked.config.get("architectures") or [type(self.model).__name__])
        with quiet(), refusing("config.json of the result", OSError):
            # The config of the model has the dtype of the tensors. The result keeps the dtype of the source's config.
            declared = type(config).from_dict(dict(checked.config))
            config.dtype = declared.dtype
            for name, part in parts_of(config).items():
                part.dtype = parts_of(declared)[name].dtype
            config.save_pretrained(draft)
            # Configs of older checkpoints contain settings of generation, which `config` does not keep.
            if self.model.can_generate() and "generation_config.json" not in checked.companions:
                settings = GenerationConfig.from_pretrained(checked.folder, "config.json", _from_model_config=True)
                settings.to_json_file(draft / "generation_config.json")  # save_pretrained refuses unused settings
        write_weights(draft, checked.weights, new, names)
        for companion in checked.companions:
            (draft / companion).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checked.folder / companion, draft / companion)

    def _check_that_it_loads(self, draft: pathlib.Path, names: set[str]) -> None:
        """Refuse a result of which a model does not find or use all tensors `names`."""
        problem = (
            "the result does not load again, so this checkpoint cannot be converted file by file; convert the "
            "model in Python instead, with hea.convert and save_pretrained"
        )
        with refusing(problem, OSError):  # also if the model does not use all new tensors
            written = open_checkpoint(draft)
            unused = {*load_with_report(written).unused} - {*self._loaded.unused}
            for lost in sorted(unused | (names ^ written.tensors.keys())):
                raise UnsupportedAttentionError(f"the model does not find {shown(lost)}")

    def _name_code(self, draft: pathlib.Path) -> None:
        """Name a kernel repository in config.json, or remote code, and write that, if this is asked for."""
        config = read_json_object(draft / "config.json")
        if self._kernel is not None:
            config["attn_implementation"] = kernel_implementation(self.model, self._kernel)
        if self._has_code:
            code, config["auto_map"] = remote_code(self.model.config)
            (draft / f"{MODULE}.py").write_text(code, encoding="utf-8", newline="\n")
        write_json(draft / "config.json", config)

    def _notes(
        self, draft: pathlib.Path, groups: Sequence[Mapping[str, Any]], changed: Sequence[Mapping[str, Any]] | None
    ) -> list[str]:
        """Notes about the source, the number of tokens that the result takes, and what its card cannot say.

        `groups` are those of `exact_lengths`, and `changed` is the result of `set_limits`, None without `max_length`.
        """
        checked, loaded, trained = self.checked, self._loaded, self._origin[TRAINED]
        limit, positions = sentence_limit(draft), num_positions(self.model)
        changes = "{file}: {key} {after} in place of {before}; the rest is unchanged"
        notes = [*loaded.notes, *(changes.format_map(one) for one in changed or ())]
        if limit is not None and positions is not None and limit["before"] < positions:
            notes.append(
                f"texts are truncated at {limit['before']} tokens ({limit['key']} in {limit['file']}), although the "
                f"model takes {positions}: --max-length {positions} raises that number"
            )
        if changed is not None and trained is not None and positions is not None and positions > trained:
            notes.append(
                f"the table of {trained} positions is repeated {positions / trained:.3g} times, and the model was not "
                f"trained on texts of more than {trained} tokens: check its results on texts as long as yours, or "
                "fine-tune it on them"
            )
        if self._origin["base_model"] is None:
            notes.append("the card does not name the original model: if it is on the hub, give --base-model ORG/NAME")
        notes += describe(groups, positions)
        if checked.dropped_keys:
            keys = ", ".join(checked.dropped_keys)
            notes.append(f"config.json: left out {keys}; code and files from elsewhere are not used")
        if loaded.unused:
            names = ", ".join(loaded.unused[:8])
            notes.append(f"tensors that a {type(self.model).__name__} does not use, copied unchanged: {names}")
        return notes


def exact_lengths(model: PreTrainedModel) -> list[dict[str, Any]]:
    """The methods of a converted model, in the order of the layers.

    For each method "layers", "method", "settings" (the hyperparameters that differ from the defaults) and "tokens": the
    number of tokens up to which these layers compute exact attention, 0 if they never do.
    """
    layers: dict[MethodConfig, list[Layer]] = {}
    for found in attention_modules(model):
        if found.chosen is not None and found.location.label is not None:
            layers.setdefault(found.chosen, []).append(found.location.label)
    return [
        {
            "layers": in_order(labels),
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
        what = "differs from exact attention at every length: measure it (hea.attention_error) or train it"
        if group["tokens"]:
            what = f"up to {group['tokens']} tokens are computed exactly, more are approximated"
        sentences.append(f"{group['method']}{where}: {what}")
    if groups and positions and positions <= min(group["tokens"] for group in groups):
        sentences.append(
            f"the model takes {positions} tokens, so its output does not change: the method takes effect with longer "
            "inputs (--max-length) or smaller hyperparameters only"
        )
    return sentences


def loading_lines(facts: Facts, output: str) -> str:
    """The Python lines that load the result, with sentence-transformers if the files are those of such a model."""
    architecture, embeds_sentences = facts.architecture or "", facts.has("modules.json")
    option, lines, library = "", list[str](), "transformers"
    if facts.code is not None:
        option = ", trust_remote_code=True"
    elif facts.kernel is not None:
        option = ', model_kwargs={"allow_all_kernels": True}' if embeds_sentences else ", allow_all_kernels=True"
    elif facts.methods or auto_class(architecture):
        lines = ["import hf_efficient_attn", *(file.line for file in facts.own_files)]
    name = facts.code or auto_class(architecture) or architecture
    call = f"{name}.from_pretrained"
    if embeds_sentences:
        library, name, call = "sentence_transformers", "SentenceTransformer", "SentenceTransformer"
    return "\n".join([*lines, f"from {library} import {name}", f"model = {call}({output!r}{option})"])


def find_changes(
    model: PreTrainedModel, stored: Mapping[str, Tensor], missing: Sequence[str]
) -> tuple[dict[str, Tensor], set[str]]:
    """Compare a converted model with the tensors of its source, which lack the parameters `missing`.

    Returns the tensors that are new or changed, by their names in files, and the names of those that are not copied.
    """
    prefix, new, present = model.base_model_prefix, dict[str, Tensor](), set[str]()
    unsaved = {*missing, *(model._keys_to_ignore_on_save or ())}
    saved = {name: x.detach() for name, x in model.named_parameters() if name not in unsaved}
    # A parameter that is shared by two modules can be stored under both names. Old checkpoints contain position ids.
    others = {name: x.detach() for name, x in model.named_parameters(remove_duplicate=False) if name not in saved}
    for is_saved, tensors in ((False, others | dict(model.named_buffers())), (True, saved)):
        for name, tensor in revert_weight_conversion(model, tensors).items():  # to the names in files
            key, value = _stored_name(name, stored, prefix), tensor.cpu()
            if key not in stored and is_saved:
                new[key] = value
            elif key in stored and not torch.equal(stored[key].to(value.dtype), value):
                new[key] = _changed(stored[key], value, num_positions(model) or 0)
            present.add(key)
    return new, {name for name in stored if LEARNED in name.split(".") and name not in present}


def _changed(source: Tensor, value: Tensor, positions: int) -> Tensor:
    """A changed tensor in memory of its own, in the source's dtype and without rounding where it has not changed."""
    offset, length = len(value) - positions, len(source)
    if value.ndim == 2 and value.shape[1] == source.shape[1] and 0 <= offset < length < len(value):
        row = torch.arange(len(value))  # an extended table repeats the source's rows for `positions`
        source = source[torch.where(row < length, row, offset + (row - offset) % (length - offset))]
    changed = value.to(source.dtype, copy=True)
    return changed if source.shape != value.shape else torch.where(source.to(value.dtype) == value, source, changed)


def _stored_name(name: str, stored: Mapping[str, Any], prefix: str) -> str:
    """The name of a tensor in the source's files, which may have or lack the prefix of the base model."""
    for form in [name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")] if prefix else [name]:
        module = form.partition(f".{LEARNED}.")[0] + "."
        if form in stored or any(other.startswith(module) for other in stored):
            return form
    return name


def write_weights(draft: pathlib.Path, weights: Weights, new: Mapping[str, Tensor], names: set[str]) -> None:
    """Write the tensors `names`, in their values in `new` or the source, to the source's files; others to the last."""
    weight_map: dict[str, str] = {}
    sizes = {"total_parameters": 0, "total_size": 0}
    last, added = [*weights][-1], names.difference(*(stored for stored, _ in weights.values()))
    for path, (stored, metadata) in tqdm(weights.items(), unit="file", desc="writing", disable=None, leave=False):
        chosen = stored.keys() & names | (added if path == last else set())
        tensors = {name: (new[name] if name in new else stored[name]).contiguous() for name in chosen}
        target = SINGLE if path.name == PICKLED else path.name
        save_file(tensors, draft / target, metadata={**metadata, "format": "pt"})  # Transformers requires the format
        shutil.copymode(draft / "config.json", draft / target)  # save_file makes it readable for its owner only
        weight_map |= dict.fromkeys(tensors, target)
        sizes["total_parameters"] += sum(tensor.numel() for tensor in tensors.values())
        sizes["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
    if last.name not in (SINGLE, PICKLED):
        write_json(draft / INDEX, {"metadata": sizes, "weight_map": dict(sorted(weight_map.items()))})
