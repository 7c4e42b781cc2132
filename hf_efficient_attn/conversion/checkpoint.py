"""Conversion of a checkpoint folder into another folder.

Tensors are copied from file to file, bit for bit and in their own dtypes, without passing through a model. So tensors
that the model's class does not know are kept. A model is loaded only to find out which tensors change: the parameters
that a method learns, and a position table that is extended. The result is opened and loaded again before it replaces
the output folder.
"""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import and_, eq
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_efficient_attn.checkpoint import CheckedSource, open_checkpoint
from hf_efficient_attn.checkpoint.files import refusing, short, writing
from hf_efficient_attn.checkpoint.limits import ChangedLimit, sentence_limit, set_limits, task_lengths
from hf_efficient_attn.checkpoint.loading import load_with_report, quiet
from hf_efficient_attn.checkpoint.provenance import FILE, INSTALL, TRAINED, check_hub_id, provenance
from hf_efficient_attn.checkpoint.staging import check_output, staged
from hf_efficient_attn.checkpoint.weights import INDEX
from hf_efficient_attn.conversion.convert import convert
from hf_efficient_attn.conversion.exactness import describe, exact_lengths, num_positions, picture_sizes
from hf_efficient_attn.conversion.positions import extend_positions, position_tables
from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_method
from hf_efficient_attn.hub.card import write_card
from hf_efficient_attn.hub.context import own_files_of
from hf_efficient_attn.hub.install import check_install
from hf_efficient_attn.integration.attention import method_at
from hf_efficient_attn.integration.configs import method_of
from hf_efficient_attn.integration.layers import Layer, in_order
from hf_efficient_attn.integration.models import attention_modules
from hf_efficient_attn.integration.settings import EXACT, EXACT_IMPLEMENTATIONS, EfficientAttentionConfig
from hf_efficient_attn.io.json import write_json
from hf_efficient_attn.methods import MethodConfig, available_methods, get_method, make_config
from hf_efficient_attn.models import auto_class
from hf_efficient_attn.version import __version__

_LEARNED = "learned_parameters"


def convert_checkpoint(
    source: "str | os.PathLike[str]",
    output: "str | os.PathLike[str]",
    method: str | EfficientAttentionConfig,
    *,
    hyperparameters: Mapping[str, Any] | None = None,
    layers: Sequence[Layer] | None = None,
    max_length: int | None = None,
    base_model: str | None = None,
    force: bool = False,
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """Write a checkpoint that `from_pretrained` loads with a method of this package once the package is imported.

    The output has the tensors of the source, bit for bit, in as many files. Files of the tokenizer, the processor and
    sentence-transformers are copied, unchanged but for the limits that `max_length` raises, and a model card is
    written. The output folder appears only when everything is written.

    Args:
        source: A folder or hub id, as for `open_checkpoint`.
        output: The folder to write. It must not exist, or be empty, unless `force` is given.
        method: A name from `available_methods()`; "sdpa" for exact attention, which drops learned parameters; or the
            methods of all layers, for example the result of `hea.calibrate`.
        hyperparameters: Replace the defaults of the method, or those of a checkpoint that has the same method.
        layers: Indices of the layers to convert. All others become exact. None for all layers.
        max_length: Number of tokens that the result takes. A shorter position table is extended by repeating it
            (`extend_positions`), and the limits at which the tokenizer and sentence-transformers truncate are raised.
        base_model: Hub id that the card names as the origin, if the files of a local folder do not state it.
        force: Replace an existing output folder when everything is written.
        allow_pickle: As for `open_checkpoint`.

    Returns:
        A report of plain values: source, output, architecture, method, settings, layers (indices of the converted
        layers), positions (the number of tokens that the model takes, or None), exact_up_to (for each method its
        layers, the hyperparameters that differ from the defaults, and the number of tokens up to which it is exact, 0
        for none), pictures (None, or the sizes in pixels from which pictures are approximated; see
        `exactness.Pictures`), limits (each limit of text lengths that was changed: file, key, before, after),
        parameters {"kept": count, "new": names, "dropped": names}, files with their sizes in bytes, left_out {file:
        reason}, notes, and load, the Python lines that load the result.

    Raises:
        UnsupportedAttentionError: The source, the method, a hyperparameter, a layer or the output cannot be used.
            Nothing has been written.
        OSError: A file could not be read or written. Nothing of the output remains.
    """
    if isinstance(method, EfficientAttentionConfig):
        if hyperparameters or layers is not None:
            raise UnsupportedAttentionError(
                "an EfficientAttentionConfig already contains hyperparameters and layers: do not give them again"
            )
    else:
        _check_request(method, hyperparameters, layers)
    conversion = Conversion(
        source, output, max_length=max_length, base_model=base_model, force=force, allow_pickle=allow_pickle
    )
    conversion.switch(method, hyperparameters or {}, layers)
    return conversion.write()


class Conversion:
    """The conversion of one checkpoint, of which `convert_checkpoint` carries out all parts at once.

    Between `switch` and `write` the learned parameters of the model can be trained, and its own parameters too.

    Args:
        source: As the other arguments, see `convert_checkpoint`.
        output: The folder to write.
        max_length: Number of tokens that the result takes, or None.
        base_model: Hub id of the original model, or None.
        force: Whether an existing output folder is replaced.
        allow_pickle: As for `open_checkpoint`.

    Attributes:
        checked: The source.
        place: The output folder.
        model: The source's model, in eval mode.
    """

    def __init__(
        self,
        source: "str | os.PathLike[str]",
        output: "str | os.PathLike[str]",
        *,
        max_length: int | None = None,
        base_model: str | None = None,
        force: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        self._source, self._output, self._max_length = os.fspath(source), os.fspath(output), max_length
        self.checked = open_checkpoint(source, allow_pickle=allow_pickle)
        self.place = check_output(output, self.checked.folder, force=force)
        self.model, self._notes, self._unused = load_with_report(self.checked)
        origin = provenance(self.checked, __version__)
        if base_model is not None:
            origin |= {"base_model": check_hub_id(base_model), "base_name": base_model.rpartition("/")[2]}
        if origin[INSTALL] is not None:
            check_install(origin[INSTALL], f"{FILE}: {INSTALL}")
        if origin[TRAINED] is None and origin["max_length"] is None:
            origin[TRAINED] = num_positions(self.model)
        if max_length is not None:
            origin["max_length"] = max_length
        self._origin, self._before, self._method = origin, _named_tensors(self.model), EXACT
        self._is_extended = False

    def extend(self) -> None:
        """Extend the positions of a model with exact attention to `max_length`, if that is given, before `switch`."""
        self._is_extended = True
        with _errors_of("extended positions", self.model):
            if self._max_length is not None and not _has_room(self.model, self._max_length):
                _extend(self.model, self._max_length)

    def switch(
        self,
        method: str | EfficientAttentionConfig,
        hyperparameters: Mapping[str, Any],
        layers: Sequence[Layer] | None,
    ) -> None:
        """Extend the positions and switch the model to a method; the arguments are those of `convert_checkpoint`."""
        self._method = method if isinstance(method, str) else str(method.method)
        _switch(self.model, method, hyperparameters, layers, None if self._is_extended else self._max_length)

    def write(
        self, *, is_trained: bool = False, add_files: Callable[[pathlib.Path], None] | None = None
    ) -> dict[str, Any]:
        """Write the result.

        Args:
            is_trained: Whether the model's own parameters may have changed. Otherwise they are copied from the source.
            add_files: Adds files to the folder that it is given, before the model card is made from them.

        Returns:
            The report of `convert_checkpoint`.
        """
        checked, model, origin, place = self.checked, self.model, self._origin, self.place
        max_length, unused, notes = self._max_length, self._unused, list(self._notes)
        with staged(place) as staging:
            draft = staging.folder
            changes = _Changes(model, self._before, checked, draft, is_trained=is_trained)
            _write_config(draft, model, checked)
            _write_weights(draft, checked, changes)
            for companion in checked.companions:
                (draft / companion).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(checked.folder / companion, draft / companion)
            limits = [] if max_length is None else set_limits(draft, max_length)
            notes += _describe_positions(model, origin[TRAINED]) if max_length is not None else []
            notes += _describe_limits(draft, limits, model, max_length)
            write_json(draft / FILE, origin)
            _check_result(draft, changes, unused)
            if add_files is not None:
                add_files(draft)
            write_card(draft, name=place.path.name)
            files = [path for path in sorted(draft.rglob("*")) if path.is_file()]
            sizes = [{"name": path.relative_to(draft).as_posix(), "bytes": path.stat().st_size} for path in files]
        if staging.kept is not None:
            notes.append(f"what appeared in the output during the work is kept in {staging.kept}")
        groups, pictures = exact_lengths(model), picture_sizes(model)
        notes += describe(groups, pictures, num_positions(model))
        removed = [key for key in checked.dropped_keys if not key.startswith("_")]
        if removed:
            notes.append(f"config.json: left out {', '.join(removed)}; code and files from elsewhere are not used")
        notes += _describe_card(origin)
        if unused:
            notes.append(
                f"tensors that a {type(model).__name__} does not use, copied unchanged: {', '.join(unused[:8])}"
            )
        if changes.dropped and self._method not in EXACT_IMPLEMENTATIONS:
            notes.append(f"{len(changes.dropped)} learned parameters of another method or size are dropped")
        embeds_sentences = "modules.json" in checked.companions
        return {
            "source": self._source,
            "output": str(place.path),
            "architecture": type(model).__name__,
            "method": self._method,
            "settings": dict(model.config.efficient_attention or {}),
            "layers": _converted_layers(model),
            "positions": num_positions(model),
            "exact_up_to": [group._asdict() for group in groups],
            "pictures": None if pictures is None else pictures._asdict(),
            "limits": [limit._asdict() for limit in limits],
            "parameters": {"kept": changes.kept, "new": sorted(changes.new), "dropped": changes.dropped},
            "files": sizes,
            "left_out": dict(checked.left_out),
            "notes": notes,
            "load": _loading_lines(model, self._output, embeds_sentences=embeds_sentences),
        }


def _check_request(method: str, hyperparameters: Mapping[str, Any] | None, layers: Sequence[Layer] | None) -> None:
    """Refuse what is wrong whatever the source is, before any file is opened."""
    if method in EXACT_IMPLEMENTATIONS:
        if hyperparameters or layers is not None:
            raise UnsupportedAttentionError(
                f"{method} is exact attention in all layers and takes no hyperparameters or layers; to keep some "
                "layers exact name the others, with a method"
            )
    elif method not in available_methods():
        known = [*available_methods(), *EXACT_IMPLEMENTATIONS]
        raise UnsupportedAttentionError(unknown_method(method, known))
    else:
        make_config(method, **(hyperparameters or {}))


def _switch(
    model: PreTrainedModel,
    method: str | EfficientAttentionConfig,
    hyperparameters: Mapping[str, Any],
    layers: Sequence[Layer] | None,
    max_length: int | None,
) -> None:
    """Apply `extend_positions` and `convert`."""
    stored = model.config.efficient_attention
    name = method if isinstance(method, str) else method.method
    # The hyperparameters that the checkpoint's parameters were learned with.
    present = [entry.config for entry in stored.settings.entries if entry.config.method == method] if stored else []
    with _errors_of(str(name), model):
        if max_length is not None:
            if stored and not present:
                convert(model, EXACT)  # otherwise parameters that are dropped anyway would prevent the extension
            if not _has_room(model, max_length):
                _extend(model, max_length)
        if isinstance(method, EfficientAttentionConfig):
            for entry in method.entries:
                _check_size(model, entry.config)
            convert(model, method)
            return
        chosen = present[0] if len(present) == 1 else method
        if method not in EXACT_IMPLEMENTATIONS:
            _check_size(model, make_config(chosen, **hyperparameters))
        convert(model, chosen, layers=layers, **hyperparameters)


@contextlib.contextmanager
def _errors_of(what: str, model: PreTrainedModel) -> Iterator[None]:
    """Turn errors of other libraries, such as lack of memory, into refusals, and hide their warnings."""
    with quiet(), refusing(f"{what} in a {type(model).__name__}", OSError, UnsupportedAttentionError):
        yield


def _has_room(model: PreTrainedModel, max_length: int) -> bool:
    """Whether a model without a position table takes a number of tokens as it is: rotary positions are computed."""
    positions = getattr(model.config, "max_position_embeddings", None)
    is_rotary = getattr(model.config, "rope_parameters", None) is not None
    return is_rotary and isinstance(positions, int) and max_length <= positions


def _extend(model: PreTrainedModel, max_length: int) -> None:
    """Apply `extend_positions`, unless the table would be far larger than the model: the number is then a mistake."""
    try:
        tables, present = position_tables(model), sum(parameter.numel() for parameter in model.parameters())
        width = sum(table.embedding.embedding_dim for table in tables)
        limit = max(8 * present, 2**26) // width
        if max_length > limit:
            raise UnsupportedAttentionError(
                f"position tables of that length have {max_length * width:,} values, while the whole model has "
                f"{present:,} and was made for {num_positions(model):,} tokens; give at most {limit}"
            )
        extend_positions(model, max_length)
    except UnsupportedAttentionError as error:
        raise UnsupportedAttentionError(f"--max-length {max_length}: {error}") from error


def _check_size(model: PreTrainedModel, method: MethodConfig) -> None:
    """Refuse hyperparameters, probably mistyped, with which a layer would learn more values than the whole model has.

    The values are counted on the meta device, so no memory is used.
    """
    initial_parameters = get_method(method.method).initial_parameters
    max_length = getattr(model.config, "max_position_embeddings", None) or 1
    with torch.device("meta"):
        made = initial_parameters(method, num_heads=1, head_dim=1, value_dim=1, max_length=max_length)
    learned = sum(tensor.numel() for tensor in made.values())
    present = sum(parameter.numel() for parameter in model.parameters())
    if learned > max(2 * present, 2**24):
        raise UnsupportedAttentionError(
            f"{method.method}: with these hyperparameters each layer would learn {learned} values, while the whole "
            f"model has {present}"
        )


class _Changes:
    """Which tensors of the source are copied, dropped or added. All names are those used in files.

    Attributes:
        kept: Number of tensors that are copied.
        new: {name: tensor} of tensors that are not in the source or are changed.
        dropped: Names of the source's tensors that are not copied.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        before: Mapping[str, Tensor],
        checked: CheckedSource,
        scratch: pathlib.Path,
        *,
        is_trained: bool,
    ) -> None:
        shapes, prefix = checked.weights.shapes, model.base_model_prefix
        parameters = dict(model.named_parameters())
        changed = [name for name in parameters if before.get(name) is not parameters[name]]
        learned = [name for name in parameters if _LEARNED in name.split(".")]
        wanted = parameters if is_trained else dict.fromkeys(changed + learned)
        saved = _saved_names(model, list(wanted), scratch)
        names = {name: _stored_name(saved_name, shapes, prefix) for name, saved_name in saved.items()}
        self.new = {names[name]: parameters[name].detach() for name in changed}
        if is_trained:
            self._add_trained(model, names, checked)
        for name, buffer in model.named_buffers():
            # Old checkpoints contain position ids, which grow with the position table.
            stored = _stored_name(name, shapes, prefix)
            if stored in shapes and buffer.shape != before[name].shape:
                self.new[stored] = buffer
        kept_learned = {names[name] for name in learned}
        self.dropped = sorted(name for name in shapes if _LEARNED in name.split(".") and name not in kept_learned)
        self.kept = sum(name not in self.new and name not in self.dropped for name in shapes)

    def _add_trained(self, model: PreTrainedModel, names: Mapping[str, str], checked: CheckedSource) -> None:
        """Add the parameters whose values are not those of the source, in the dtype that they have there."""
        stored = dict(checked.weights.all_tensors())
        for name, parameter in model.named_parameters(remove_duplicate=False):
            # A parameter that is shared by two modules can be stored under both names.
            key = names[name] if name in names else _stored_name(name, checked.weights.shapes, model.base_model_prefix)
            if key in stored and key not in self.new:
                value = parameter.detach().to("cpu", stored[key].dtype)
                if not torch.equal(value, stored[key]):
                    self.new[key] = value.clone()


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, under each of their names, and all buffers."""
    return {**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False))}


def _saved_names(model: PreTrainedModel, names: Sequence[str], scratch: pathlib.Path) -> dict[str, str]:
    """The names under which Transformers saves parameters, found by saving a different number for each."""
    if not names:
        return {}
    numbered = {name: torch.full((1,), float(number), dtype=torch.float64) for number, name in enumerate(names)}
    folder = scratch / "names"
    with quiet(), refusing("names of the new tensors", OSError), writing(folder):
        model.save_pretrained(folder, state_dict=dict(numbered))
        found = {names[int(tensor)]: name for name, tensor in load_file(folder / "model.safetensors").items()}
    shutil.rmtree(folder)
    return {name: found[name] for name in names}


def _stored_name(name: str, shapes: Mapping[str, Any], prefix: str) -> str:
    """The name of a tensor in the source's files, which may have or lack the prefix of the base model."""
    forms = [name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")] if prefix else [name]
    for form in forms:
        if form in shapes:
            return form
    for form in forms:
        module = form.partition(f".{_LEARNED}.")[0] + "."
        if any(other.startswith(module) for other in shapes):
            return form
    return name


def _write_weights(draft: pathlib.Path, checked: CheckedSource, changes: _Changes) -> None:
    """Write the source's tensors to the same files. A new tensor is written to the file of its module's tensors."""
    weights = checked.weights
    homes = {name: _nearest_file(name, weights.files) for name in changes.new}
    weight_map: dict[str, str] = {}
    num_bytes = num_values = 0
    for path in tqdm(weights.files, unit="file", desc="writing", disable=None, leave=False):
        tensors = {name: value for name, value in weights.tensors(path).items() if name not in changes.dropped}
        tensors |= {name: changes.new[name].contiguous() for name, home in homes.items() if home == path}
        target = weights.output_name(path)
        with writing(draft / target):
            save_file(tensors, draft / target, metadata=weights.metadata(path))
        shutil.copymode(draft / "config.json", draft / target)  # save_file makes it readable for its owner only
        weight_map |= dict.fromkeys(tensors, target)
        num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        num_values += sum(tensor.numel() for tensor in tensors.values())
    if weights.sharded:
        metadata = {**weights.index_metadata, "total_size": num_bytes}
        if "total_parameters" in metadata:
            metadata["total_parameters"] = num_values
        write_json(draft / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})


def _nearest_file(name: str, files: Mapping[pathlib.Path, Mapping[str, Any]]) -> pathlib.Path:
    """The file with the tensor whose name begins with the most parts of the given name."""
    parts = name.split(".")

    def num_common(path: pathlib.Path) -> int:
        others = (other.split(".") for other in files[path])
        return max((sum(accumulate(map(eq, parts, other), and_)) for other in others), default=0)

    return max(files, key=num_common)


def _write_config(draft: pathlib.Path, model: PreTrainedModel, checked: CheckedSource) -> None:
    """Write `config.json` as `save_pretrained` does, with the architectures that the source names."""
    config = model.config
    config.architectures = list(checked.config.get("architectures") or [type(model).__name__])
    with quiet(), refusing("config.json of the result", OSError):
        config.save_pretrained(draft)


def _check_result(draft: pathlib.Path, changes: _Changes, unused: Sequence[str]) -> None:
    """Open and load the result, and check that the model uses all new tensors."""
    problem = (
        "the result does not load again, so this checkpoint cannot be converted file by file; convert the model in "
        "Python instead, with hea.convert and save_pretrained"
    )
    with refusing(problem, OSError):
        written = open_checkpoint(draft)
        shapes = written.weights.shapes
        lost = sorted(set(load_with_report(written).unused) - set(unused))
        lost += [name for name in changes.new if name not in shapes]
        if lost or len(shapes) != changes.kept + len(changes.new):
            raise UnsupportedAttentionError(f"the model does not find {short(lost[0]) if lost else 'all tensors'}")


def _converted_layers(model: PreTrainedModel) -> list[Layer]:
    """The layers that have a method, in order."""
    found = set()
    for module in attention_modules(model):
        name, location = method_of(module.config), module.location
        method = method_at(module.config, name, location)
        if method is not None and location.label is not None:
            found.add(location.label)
    return in_order(found)


def _describe_positions(model: PreTrainedModel, trained: int | None) -> list[str]:
    """A note about a position table that is longer than the one that was trained."""
    positions = num_positions(model)
    if trained is None or positions is None or positions <= trained:
        return []
    return [
        f"the table of {trained} positions is repeated {positions / trained:.3g} times, and the model was not trained "
        f"on texts of more than {trained} tokens: check its results on texts as long as yours, or fine-tune it on them"
    ]


def _describe_card(origin: Mapping[str, Any]) -> list[str]:
    """Notes about what the model card says or cannot say."""
    notes = []
    if origin["base_model"] is None:
        notes.append("the card does not name the original model: if it is on the hub, give --base-model ORG/NAME")
    if origin[INSTALL] is not None:
        notes.append(f"as in the source, the card tells its readers to 'pip install {origin[INSTALL]}'")
    return notes


def _describe_limits(
    draft: pathlib.Path, changed: Sequence[ChangedLimit], model: PreTrainedModel, max_length: int | None
) -> list[str]:
    """Notes about the numbers of tokens at which texts are truncated."""
    notes = [f"{x.file}: {x.key} {x.after} in place of {x.before}; the rest is unchanged" for x in changed]
    limit, positions = sentence_limit(draft), num_positions(model)
    if max_length is not None:
        lengths = [f"{x.key} {x.tokens} in {x.file}" for x in task_lengths(draft) if x.tokens < max_length]
        if lengths:
            notes.append(f"texts are still truncated where the task says so: {', '.join(lengths)} is unchanged")
    elif limit is not None and positions is not None and limit.tokens < positions:
        notes.append(
            f"texts are truncated at {limit.tokens} tokens ({limit.key} in {limit.file}), although the model takes "
            f"{positions}: --max-length {positions} raises that number"
        )
    return notes


def _loading_lines(model: PreTrainedModel, output: str, *, embeds_sentences: bool) -> str:
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
