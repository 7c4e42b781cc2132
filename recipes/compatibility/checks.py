"""What is checked of one model class with one method.

The model is saved, and loaded once with exact attention and once with the method, as a user does. The inputs of the
testers are shorter than the budgets of the methods, so that all methods but those that define their own attention
(`linear`, ...) compute exactly, and their outputs must equal those of exact attention. The others must be finite. For
all methods, no padding and no later token of a decoder may change an output that it does not change with exact
attention.
"""

import copy
import functools
import inspect
import pathlib
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, set_seed
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods import make_config
from recipes.compatibility.testers import Case

WORKS, REFUSED, DIFFERS, FAILS, UNTESTED = "works", "refused", "differs", "fails", "untested"
# Methods that compute sequences within their budget exactly.
EXACT_WITHIN_BUDGET = ("kdeformer", "nearfar", "longformer", "hyperattention", "nystromformer", "auto")
# Relative to the largest output. Exact attention of another implementation ("eager") is as far off.
TOLERANCE = 1e-4
_NEW_TOKENS = 4


class Finding(NamedTuple):
    """The result of the checks."""

    # `WORKS`; `REFUSED` in a sentence; `DIFFERS`, which is silently wrong; `FAILS` with another error; `UNTESTED`,
    # where the model fails with exact attention as well, or has no attention that can be switched.
    status: str
    reason: str  # the sentence, the error, or what differs
    checks: list[str]  # the names of the checks that were passed


class Change(NamedTuple):
    """A change of tokens that must have no influence on some outputs."""

    name: str  # "padding" or "future"
    inputs: dict[str, Any]  # with the changed tokens
    kept: Tensor | None  # the positions whose outputs must stay; None for all
    names: list[str]  # of the outputs that stay with exact attention


class _EndError(Exception):
    """Ends the checks of a method with a status and a reason."""


class Reference:
    """A model with exact attention and random weights, saved in a folder, which all methods are compared with."""

    def __init__(self, case: Case, folder: pathlib.Path) -> None:
        self.case, self.folder = case, folder
        set_seed(0)
        case.model_class(copy.deepcopy(case.config)).save_pretrained(folder)
        # By default, `sdpa` in all parts that support it, else `eager`.
        self.model = case.model_class.from_pretrained(folder, dtype=torch.float32).eval()
        self.inputs, self.valid = _padded(case.inputs, self.model)
        try:
            self.expected = outputs(self.model, self.inputs)
        except Exception:
            if self.valid is None:
                raise
            # The last tokens of the tester can be those of a picture, which padding must not hide.
            self.inputs, self.valid = dict(case.inputs), None
            self.expected = outputs(self.model, self.inputs)

    @functools.cached_property
    def changes(self) -> list[Change]:
        """Changes of tokens that exact attention ignores somewhere."""
        found = []
        for name, ids, kept in _changed(self.inputs, self.valid):
            inputs = {**self.inputs, "input_ids": ids}
            same = outputs(self.model, inputs)
            # The others change with exact attention as well: those of bidirectional models, and pooled ones.
            names = [key for key, x in self.expected.items() if _distance({key: same[key]}, {key: x}, kept) == 0]
            found += [Change(name, inputs, kept, names)] if names else []
        return found

    @functools.cached_property
    def generated(self) -> Tensor | None:
        """Generated tokens; None for models that do not generate or need more than the common options."""
        if self.case.generation is None:
            return None
        try:
            return _generate(self.model, self.case.generation)
        except Exception:  # noqa: BLE001 (whatever the model's own code raises)
            return None


def check(case: Case, *methods: str) -> list[Finding]:
    """Check a model class with methods at their default hyperparameters."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            reference = Reference(case, pathlib.Path(folder) / "exact")
        except Exception as error:  # noqa: BLE001
            return [Finding(UNTESTED, f"exact attention: {describe(error)}", []) for _ in methods]
        return [_check(reference, method) for method in methods]


def _check(reference: Reference, method: str) -> Finding:
    passed: list[str] = []
    try:
        passed.extend(_checks(reference, method))
    except _EndError as end:
        return Finding(*end.args, passed)
    except Exception as error:  # noqa: BLE001
        # Transformers turns some errors of loading into its own, with ours as the cause.
        for refusal in (error, error.__cause__ or error.__context__):
            if isinstance(refusal, UnsupportedAttentionError):
                return Finding(REFUSED, str(refusal), passed)
        return Finding(FAILS, describe(error), passed)
    return Finding(WORKS, "", passed)


def describe(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"[:300]


def _checks(reference: Reference, method: str) -> Iterator[str]:
    """Run the checks one after the other and yield the names of those that passed; raise _EndError if one did not."""
    case, inputs, valid, expected = reference.case, reference.inputs, reference.valid, reference.expected
    load = {"attn_implementation": method, "dtype": torch.float32}
    model = case.model_class.from_pretrained(reference.folder, **load).eval()
    found, calls, longest = _counted(method, model, inputs)
    # Pictures of some testers have more patches than the budget.
    is_exact = method in EXACT_WITHIN_BUDGET and longest <= make_config(method).exact_length
    if not calls:
        raise _EndError(
            UNTESTED, "the attention of this class is not called, or is not that of Transformers' interface"
        )
    if found.keys() != expected.keys():
        raise _EndError(DIFFERS, f"outputs {sorted(found)} instead of {sorted(expected)}")
    if is_exact:
        _compare("forward", found, expected, valid)
    elif not all(_select(tensor, valid).isfinite().all() for tensor in found.values()):
        raise _EndError(DIFFERS, "forward: not finite")
    yield "forward"

    for change in reference.changes:
        distance = _distance(outputs(model, change.inputs), {key: found[key] for key in change.names}, change.kept)
        if distance > TOLERANCE:
            what = f"{change.name}: outputs change by {distance:.2g} if tokens change that must have no influence"
            raise _EndError(DIFFERS, what)
        yield change.name

    folder = reference.folder.with_name(method)
    model.save_pretrained(folder)
    loaded, calls, _ = _counted(method, case.model_class.from_pretrained(folder).eval(), inputs)
    if not calls:
        raise _EndError(DIFFERS, "save and load: the loaded model does not use the method")
    _compare("save and load", loaded, found, valid, tolerance=1e-6)
    yield "save and load"

    wanted = reference.generated
    if wanted is None or case.generation is None:
        return
    if not is_exact:
        # Decoding from a state must agree with computing everything again.
        wanted = _generate(model, {**case.generation, "use_cache": False})
    if not torch.equal(_generate(model, case.generation), wanted):
        raise _EndError(DIFFERS, f"generate: other tokens than {'exact attention' if is_exact else 'without a cache'}")
    yield "generate"


def _generate(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    set_seed(0)
    out = model.generate(
        **copy.deepcopy(dict(inputs)), do_sample=False, num_beams=1, max_new_tokens=_NEW_TOKENS,
        min_new_tokens=_NEW_TOKENS,
    )  # fmt: skip
    return out if isinstance(out, Tensor) else out.sequences


def _counted(method: str, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[dict[str, Tensor], int, int]:
    """The outputs, the number of calls of the method's attention function, and the largest number of keys in them."""
    function, lengths = ALL_ATTENTION_FUNCTIONS[method], list[int]()

    @functools.wraps(function)  # with its attributes, by which models know what it takes
    def counting(*args: Any, **kwargs: Any) -> Any:
        lengths.append(args[2].shape[2])
        return function(*args, **kwargs)

    AttentionInterface.register(method, counting)
    try:
        found = outputs(model, inputs)
    finally:
        AttentionInterface.register(method, function)
    return found, len(lengths), max(lengths, default=0)


def outputs(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The floating-point tensors of a model's output, by the path to them, without caches."""
    set_seed(0)
    with torch.no_grad():
        result = model(**copy.deepcopy(dict(inputs)))
    return dict(_tensors(result, ""))


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield path, value
    elif isinstance(value, (Mapping, tuple, list)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            if "past_key_values" not in str(key) and "cache" not in str(key):
                yield from _tensors(item, f"{path}.{key}" if path else str(key))


def _padded(inputs: Mapping[str, Any], model: nn.Module) -> tuple[dict[str, Any], Tensor | None]:
    """The inputs with the last tokens of the first row as padding, and the mask; None if the model takes no padding."""
    inputs = dict(inputs)
    ids = inputs.get("input_ids", inputs.get(getattr(model, "main_input_name", "input_ids")))
    mask = inputs.get("attention_mask")
    if mask is None and isinstance(ids, Tensor) and "attention_mask" in inspect.signature(model.forward).parameters:
        mask = torch.ones(ids.shape, dtype=torch.long)
    if not isinstance(mask, Tensor) or mask.ndim != 2 or not isinstance(ids, Tensor) or mask.shape != ids.shape:
        return inputs, None
    mask = mask.clone()
    mask[0, -max(1, mask.shape[1] // 4) :] = 0
    return {**inputs, "attention_mask": mask}, mask.bool()


def _changed(inputs: Mapping[str, Any], valid: Tensor | None) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The name of each change of tokens, the changed tokens, and the positions whose outputs must stay."""
    ids, others = inputs.get("input_ids"), {"attention_mask", "token_type_ids", "position_ids"}
    others |= {"decoder_input_ids", "decoder_attention_mask"}
    counted = [
        key for key, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point() and key not in others
    ]
    if not isinstance(ids, Tensor) or counted:  # the tokens of pictures or sounds are counted
        return
    if valid is not None and not valid.all():
        yield "padding", torch.where(valid, ids, ids.roll(1, 1)), valid
    if ids.ndim == 2 and ids.shape[1] >= 3:
        changed = ids.clone()
        changed[:, -1] = ids[:, 0]
        kept = torch.ones(ids.shape, dtype=torch.bool) if valid is None else valid.clone()
        kept[:, -1] = False
        yield "future", changed, kept


def _select(tensor: Tensor, valid: Tensor | None) -> Tensor:
    """The outputs at valid positions, where an output belongs to positions."""
    if valid is not None and tensor.shape[:2] == valid.shape:
        return tensor[valid]
    return tensor


def _distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], valid: Tensor | None) -> float:
    """The largest difference, relative to the largest expected value of its tensor."""
    worst = 0.0
    for name, tensor in expected.items():
        if found[name].shape != tensor.shape:
            return float("inf")
        one, two = _select(found[name], valid).double(), _select(tensor, valid).double()
        # Masked scores of some models are -inf on both sides.
        difference = torch.where(one == two, 0.0, (one - two).abs())
        finite = two[two.isfinite()].abs()
        scale = max(float(finite.max()) if finite.numel() else 0.0, 1e-6)
        worst = max(worst, float((difference / scale).nan_to_num(float("inf")).max()) if difference.numel() else 0.0)
    return worst


def _compare(
    what: str,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    valid: Tensor | None,
    tolerance: float = TOLERANCE,
) -> None:
    distance = _distance(found, expected, valid)
    if distance > tolerance:
        raise _EndError(DIFFERS, f"{what}: outputs differ by {distance:.2g}")
