"""Conversion of a checkpoint folder into another folder.

Tensors are copied from file to file, bit for bit and in their own dtypes, without passing through a model. So tensors
that the model's class does not know are kept. A model is loaded only to find out which tensors change: the parameters
that a method learns, and a position table that is extended. The result is opened and loaded again before it replaces
the output folder.
"""

import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hf_efficient_attn.checkpoint import open_checkpoint
from hf_efficient_attn.checkpoint.files import refusing
from hf_efficient_attn.checkpoint.limits import set_limits
from hf_efficient_attn.checkpoint.loading import check_learned, load_with_report, quiet
from hf_efficient_attn.checkpoint.provenance import FILE, TRAINED, check_hub_id, provenance
from hf_efficient_attn.checkpoint.staging import check_output, staged
from hf_efficient_attn.conversion.convert import choice_of, convert
from hf_efficient_attn.conversion.positions import extend_positions
from hf_efficient_attn.conversion.report import describe, exact_lengths, loading_lines, notes_of, num_positions
from hf_efficient_attn.conversion.tensors import Changes, find_changes, write_weights
from hf_efficient_attn.errors import UnsupportedAttentionError, shown
from hf_efficient_attn.hub.card import write_card
from hf_efficient_attn.integration.layers import Layer, in_order
from hf_efficient_attn.integration.settings import EXACT, EfficientAttentionConfig, as_settings
from hf_efficient_attn.io.json import write_json
from hf_efficient_attn.standalone.checkpoint import kernel_implementation, make_standalone


def convert_checkpoint(
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
        layers), positions (the number of tokens that the model takes, or None), exact_up_to (for each method its
        layers, the hyperparameters that differ from the defaults, and the number of tokens up to which it is exact, 0
        for none), limits (each limit of text lengths that was changed: file, key, before, after),
        parameters {"kept": count, "new": names, "dropped": names}, files with their sizes in bytes, left_out (files
        that were not copied), notes, and load, the Python lines that load the result.

    Raises:
        UnsupportedAttentionError: The source, the method, a hyperparameter, a layer or the output cannot be used.
            Nothing has been written.
        OSError: A file could not be read or written. Nothing of the output remains.
    """
    conversion = Conversion(source, output, **options)
    conversion.switch(method, hyperparameters or {}, layers)
    return conversion.write()


class Conversion:
    """The conversion of one checkpoint, of which `convert_checkpoint` carries out all parts.

    Between `switch` and `write` the learned parameters of the model can be trained, and its own parameters too.

    Args:
        source: A folder or hub id, as for `open_checkpoint`.
        output: The folder to write. It must not exist, or be empty, unless `force` is given.
        max_length: Number of tokens that the result takes. A shorter position table is extended by repeating it
            (`extend_positions`), and the limits at which the tokenizer and sentence-transformers truncate are raised.
        base_model: Hub id that the card names as the origin, if the files of a local folder do not state it.
        kernel: Hub id of a repository that `export_kernel` wrote for the method. The result names it as its attention,
            so that it loads without this package.
        has_code: Write a file with the code of the attention, with which the result loads without this package by
            `trust_remote_code=True`. Methods with learned parameters are possible, too.
        force: Replace an existing output folder when everything is written.
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
        kernel: str | None = None,
        has_code: bool = False,
        force: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        self._source, self._output, self._max_length = os.fspath(source), os.fspath(output), max_length
        self.checked = open_checkpoint(source, allow_pickle=allow_pickle)
        self.place = check_output(output, self.checked.folder, force=force)
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
        """Extend the positions of the model to `max_length`, if that is given and they are fewer.

        `switch` does this, too. The attention must have no learned tables of the present length.

        Raises:
            UnsupportedAttentionError: The model has no position table, or a longer one; or the new one is too large.
        """
        model, length = self.model, self._max_length
        positions, is_rotary = num_positions(model), getattr(model.config, "rope_parameters", None) is not None
        if length is None or (is_rotary and positions is not None and length <= positions):  # these are computed
            return
        with refusing(f"--max-length {length}"):
            extend_positions(model, length)

    def switch(
        self,
        method: str | EfficientAttentionConfig,
        hyperparameters: Mapping[str, Any],
        layers: Sequence[Layer] | None,
    ) -> None:
        """Extend the positions and switch the model to a method; the arguments are those of `convert_checkpoint`."""
        model, stored = self.model, self.model.config.efficient_attention
        self._method = method if isinstance(method, str) else str(method.method)
        # The hyperparameters that the checkpoint's parameters were learned with.
        entries = as_settings(stored).entries if stored else ()
        present = [entry.config for entry in entries if entry.config.method == method]
        chosen = choice_of(present[0] if len(present) == 1 else method, layers, hyperparameters)
        with quiet(), refusing(f"{self._method} in a {type(model).__name__}", OSError, UnsupportedAttentionError):
            if self._max_length is not None and stored and not present:
                convert(model, EXACT)  # otherwise parameters that are dropped anyway would prevent the extension
            self.extend()
            if chosen is not None:
                check_learned(chosen, model.config, model.num_parameters())
            convert(model, chosen or method)
        if self._kernel is not None:
            kernel_implementation(model.config, self._kernel)  # refuse it before the work

    def write(self, *, add_files: Callable[[pathlib.Path], None] | None = None) -> dict[str, Any]:
        """Write the result, with the tensors of the source where the model has not changed them.

        Args:
            add_files: Adds files to the folder that it is given, before the model card is made from them.

        Returns:
            The report of `convert_checkpoint`.
        """
        checked, model, origin = self.checked, self.model, self._origin
        with staged(self.place) as draft:
            changes = find_changes(model, checked.weights, self._loaded.missing, draft)
            model.config.architectures = list(checked.config.get("architectures") or [type(model).__name__])
            with quiet(), refusing("config.json of the result", OSError):
                model.config.save_pretrained(draft)
            write_weights(draft, checked.weights, changes)
            for companion in checked.companions:
                (draft / companion).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(checked.folder / companion, draft / companion)
            limits = None if self._max_length is None else set_limits(draft, self._max_length)
            notes = [*self._loaded.notes, *notes_of(draft, num_positions(model), origin, limits)]
            write_json(draft / FILE, origin)
            _check_result(draft, changes, self._loaded.unused)
            make_standalone(draft, model.config, self._kernel, self._has_code)
            if add_files is not None:
                add_files(draft)
            write_card(draft, name=self.place.path.name)
            files = [path for path in sorted(draft.rglob("*")) if path.is_file()]
            sizes = [{"name": path.relative_to(draft).as_posix(), "bytes": path.stat().st_size} for path in files]
        groups = exact_lengths(model)
        notes += describe(groups, num_positions(model))
        removed = [key for key in checked.dropped_keys if not key.startswith("_")]
        if removed:
            notes.append(f"config.json: left out {', '.join(removed)}; code and files from elsewhere are not used")
        if self._loaded.unused:
            names = ", ".join(self._loaded.unused[:8])
            notes.append(f"tensors that a {type(model).__name__} does not use, copied unchanged: {names}")
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
            "parameters": {"kept": changes.kept, "new": sorted(changes.new), "dropped": changes.dropped},
            "files": sizes,
            "left_out": list(checked.left_out),
            "notes": notes,
            "load": loading_lines(
                model,
                self._output,
                embeds_sentences="modules.json" in checked.companions,
                kernel=self._kernel,
                has_code=self._has_code,
            ),
        }


def _check_result(draft: pathlib.Path, changes: Changes, unused: Sequence[str]) -> None:
    """Open and load the result, and check that the model uses all new tensors."""
    problem = (
        "the result does not load again, so this checkpoint cannot be converted file by file; convert the model in "
        "Python instead, with hea.convert and save_pretrained"
    )
    with refusing(problem, OSError):
        written = open_checkpoint(draft)
        tensors = written.weights.tensors
        lost = sorted({*load_with_report(written).unused} - {*unused} | (changes.new.keys() - tensors.keys()))
        if lost or len(tensors) != changes.kept + len(changes.new):
            raise UnsupportedAttentionError(f"the model does not find {shown(lost[0]) if lost else 'all tensors'}")
