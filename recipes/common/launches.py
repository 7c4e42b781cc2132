"""Counts the kernels that a call launches on an accelerator, without an accelerator.

`count` runs a call on meta tensors, which have shapes but no data. The methods choose the form of other devices for
them. Every operator that computes something is one kernel:

- views, metadata and allocations without a value (`empty`) are none, and neither are operators on CPU tensors;
- the package's own operators are entered: what they call is counted. Those that are Triton kernels, or have "triton"
  in their name, are not;
- an operator of torch is one kernel, although a few of them (sort, cumsum, fused attention in the backward pass) launch
  two to four on a GPU. The count does not depend on a device or a version of its libraries.

The traffic is arithmetic as well: every kernel reads its arguments once and writes its results once. An argument that
is read through an index counts the elements that are read, and an expanded one its distinct elements. What a kernel
reads again because a cache is too small is not in it.

Where the size of a result depends on values (nonzero), the largest size is assumed.
"""

import collections
import contextlib
import math
import pathlib
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
from hf_efficient_attn.ops.accelerator import Backend, use_backend
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as fx_config
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_efficient_attn as hea
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods import MethodConfig, get_method

_PACKAGE = pathlib.Path(hea.__file__).parent
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
# Views whose schema does not say so.
_VIEWS = {"_unsafe_view", "lift_fresh", "lift", "_reshape_alias"}
# Operators that wait for the device, since their result or its shape is needed on the host.
_WAITING = {
    "_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "equal", "_unique", "_unique2",
    "unique_dim", "unique_consecutive", "bincount", "_linalg_check_errors",
}  # fmt: skip
_INDEXED_READS = {"gather", "index_select", "index", "embedding", "take"}
_INDEXED_WRITES = {"scatter_", "scatter_add_", "scatter_reduce_", "index_add_", "index_copy_", "index_put_"}
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_"}
# Operators of the package that are Triton kernels, and their number of kernels.
_TRITON = {"halve_round": 2}
_FACTORIES = ((torch, "tensor"), (torch, "as_tensor"), (torch, "asarray"), (Tensor, "new_tensor"))


class Kernel(NamedTuple):
    """A kind of kernel.

    Attributes:
        operator: name of the operator.
        line: the innermost line of the package that called it, or "autograd".
    """

    operator: str
    line: str


@dataclass
class Launches:
    """What a call does on an accelerator.

    Attributes:
        kernels: number of kernels.
        read: bytes that they read.
        written: bytes that they write.
        peak: largest number of bytes that tensors of the call hold at one time, the output included and the inputs
            excluded.
        synchronisations: operator -> how often it made the host wait for the device. Copies between devices count.
        host_to_device: number of copies from the host to the device.
        by_kernel: (operator, line) -> number of kernels.
    """

    kernels: int = 0
    read: int = 0
    written: int = 0
    peak: int = 0
    synchronisations: collections.Counter[str] = field(default_factory=collections.Counter)
    host_to_device: int = 0
    by_kernel: collections.Counter[Kernel] = field(default_factory=collections.Counter)

    @property
    def traffic(self) -> int:
        """Bytes read and written."""
        return self.read + self.written


def count(call: Callable[[], Any]) -> Launches:
    """Count what a call does. The call runs once, and its tensors are meta tensors.

    Raises:
        UnsupportedAttentionError: the call needs the values of a tensor, which a meta tensor does not have. On a device
            it synchronises there.
    """
    mode = _Counting()
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_meta_tensors())
        # Tensors made of Python numbers do not pass the dispatcher.
        for owner, name in _FACTORIES:
            stack.enter_context(mock.patch.object(owner, name, mode.watched(getattr(owner, name))))
        stack.enter_context(mode)
        call()
    return mode.found


def launches(
    config: MethodConfig,
    length: int,
    *,
    is_causal: bool = False,
    backward: bool = False,
    shape: tuple[int, int, int] = (1, 16, 64),
    form: Backend = "library",
) -> Launches:
    """Count one call of a method on `length` tokens in bfloat16.

    The call is counted when it runs for the second time, so that cached plans and random numbers count as they do in
    the second layer of a model. Learned parameters are given as in a model.

    Args:
        config: the method.
        length: queries and keys.
        is_causal: whether attention is causal.
        backward: a training step: the forward and the backward pass of a call whose inputs need a gradient.
        shape: (B, H, D).
        form: "library" for PyTorch's kernels, "triton" for our own where there is one.
    """
    batch, heads, head_dim = shape
    inputs = [
        torch.empty(batch, heads, length, head_dim, dtype=torch.bfloat16, device="meta", requires_grad=backward)
        for _ in range(3)
    ]
    parameters = meta_parameters(config, length, (heads, head_dim, head_dim), requires_grad=backward)

    def call() -> None:
        out = hea.attention(config, *inputs, is_causal=is_causal, parameters=parameters)
        if backward:
            wanted = [*inputs, *(parameters or {}).values()]
            torch.autograd.grad(out, wanted, torch.empty_like(out), allow_unused=True)

    with use_backend(form):
        with on_meta_tensors():
            call()
        return count(call)


def meta_parameters(
    config: MethodConfig, max_length: int, shape: tuple[int, int, int], *, requires_grad: bool = False
) -> dict[str, Tensor] | None:
    """The learned parameters of a method as meta tensors, by name; None if it has none. `shape` is (H, D, Dv)."""
    initial = get_method(config.method).initial_parameters
    if initial is None:
        return None
    num_heads, head_dim, value_dim = shape
    with FakeTensorMode():  # only the shapes
        made = initial(config, num_heads=num_heads, head_dim=head_dim, value_dim=value_dim, max_length=max_length)
    return {
        name: torch.empty(x.shape, dtype=x.dtype, device="meta", requires_grad=requires_grad)
        for name, x in made.items()
    }


@contextlib.contextmanager
def on_meta_tensors() -> Iterator[None]:
    """Let a call run on meta tensors: without autocast, which does not know them, and with a clear error."""
    is_enabled, autocast = torch.is_autocast_enabled, torch.autocast

    def is_autocast_enabled(device_type: str | None = None) -> bool:
        return device_type != "meta" and (is_enabled() if device_type is None else is_enabled(device_type))

    def context(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext() if device_type == "meta" else autocast(device_type, *args, **kwargs)

    with (
        mock.patch.object(torch, "is_autocast_enabled", is_autocast_enabled),
        mock.patch.object(torch, "autocast", context),
        fx_config.patch(meta_nonzero_assume_all_nonzero=True),
        _FusedAttention(),
    ):
        try:
            yield
        except RuntimeError as error:  # NotImplementedError is one, too
            if "meta" not in str(error).lower():
                raise
            problem = " ".join(str(error).split())[:120]
            raise UnsupportedAttentionError(
                f"the call needs values at {_place(error)}, which meta tensors do not have ({problem}), so that its "
                "kernels cannot be counted and a device is waited for; choose a method or hyperparameters without that"
            ) from error


class _FusedAttention(TorchFunctionMode):
    """Exact attention on meta tensors by a fused kernel, as on a GPU. PyTorch itself takes plain products for them."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention and args[0].is_meta:
            return _fused_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """The flash kernel in half precision without a mask, else the memory-efficient one."""
    if attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale)[0]


class _Counting(TorchDispatchMode):
    """Counts the operators that reach the dispatcher below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Launches()
        self.live = 0
        self.in_factory = False
        self.storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._opname
        if func.namespace == "hf_efficient_attn" and not _is_triton(name):
            return self._enter(func, args, kwargs)
        given = _tensors((args, kwargs))
        self._transfers(name, given, args, kwargs)
        for x in given:
            self._exclude(x)
        result = func(*args, **kwargs)
        made = _tensors(result)
        on_device = [x for x in (*made, *given) if x.device.type != "cpu"]
        if on_device and _computes(func, name, made):
            self._kernel(func, name, args, kwargs, made)
        for x in made:
            self._track(x)
        return result

    def _enter(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the implementation of an operator of the package on the meta tensors."""
        known = OPDEFS.get(f"{func.namespace}::{func._opname}")
        if known is None:
            raise UnsupportedAttentionError(
                f"the operator {func} is not defined by torch.library.custom_op: what it launches cannot be counted; "
                "define it so, or put 'triton' into its name if it is one kernel"
            )
        with self:
            return known._init_fn(*args, **kwargs)

    def _transfers(self, name: str, given: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count copies between devices and other operators that wait, before they fail because there is no data."""
        devices = {x.device.type for x in given if x.dim() or name in ("copy_", "_to_copy")}
        target = {torch.device(kwargs["device"]).type} if name == "_to_copy" and kwargs.get("device") else set()
        if len(devices | target) > 1:
            to_host = "cpu" in target or (name == "copy_" and args[0].device.type == "cpu")
            self.found.host_to_device += not to_host
            self.found.synchronisations["copy to the host" if to_host else "copy to the device"] += 1
        elif devices - {"cpu"} and (name in _WAITING or _selects_by_mask(name, args)):
            self.found.synchronisations[name] += 1

    def _kernel(
        self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], made: Sequence[Tensor]
    ) -> None:
        """Count one kernel and its traffic."""
        number = _TRITON.get(name, 1)
        self.found.kernels += number
        self.found.by_kernel[Kernel(name, _line(sys._getframe(2)))] += number
        results = sum(map(_bytes, made))
        if name in _INDEXED_WRITES:
            rest = sum(map(_bytes, _tensors((args[1:], kwargs))))
            self.found.read += rest
            self.found.written += _indexed_bytes(args)
            return
        read = written = 0
        for specified, value in _arguments(func, args, kwargs):
            for x in _tensors(value):
                is_written = specified.alias_info is not None and specified.alias_info.is_write
                if not (specified.kwarg_only and is_written) and not (is_written and name in _OVERWRITES):
                    is_indexed = name in _INDEXED_READS and specified is func._schema.arguments[0]
                    read += min(_bytes(x), results) if is_indexed else _bytes(x)
                written += is_written * _bytes(x)
        fresh = [x for x, r in zip(made, _returns(func, made), strict=True) if r.alias_info is None]
        self.found.read += read
        self.found.written += written + sum(map(_bytes, fresh))

    def _exclude(self, x: Tensor) -> None:
        """A storage that no operator of the call made is one of its inputs, and views of it take no memory."""
        storage = x.untyped_storage()
        known = self.storages.get(storage._cdata)
        if known is None or known() is None:
            self.storages[storage._cdata] = weakref.ref(storage)

    def _track(self, x: Tensor) -> None:
        """Follow the storage of a result until nothing refers to it."""
        if x.device.type == "cpu":
            return
        storage = x.untyped_storage()
        key = storage._cdata
        known = self.storages.get(key)
        if known is not None and known() is not None:
            return
        size = storage.nbytes()

        def freed(_: object) -> None:
            self.live -= size

        self.storages[key] = weakref.ref(storage, freed)
        self.live += size
        self.found.peak = max(self.found.peak, self.live)

    def watched(self, factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The factory, with a count of the copies from the host that its result needs."""
        first = int(factory is Tensor.new_tensor)  # where the data are among the arguments

        def make(*args: Any, **kwargs: Any) -> Tensor:
            # A function mode lets a method come here twice.
            is_outer, self.in_factory = not self.in_factory, True
            try:
                made = factory(*args, **kwargs)
            finally:
                self.in_factory = not is_outer
            # Data that are a tensor already pass the dispatcher, or are returned as they are.
            has_tensor = any(isinstance(x, Tensor) for x in (*args[first:], *kwargs.values()))
            if is_outer and made.device.type != "cpu" and not has_tensor:
                self.found.host_to_device += 1
                self.found.synchronisations["copy to the device"] += 1
                self.found.by_kernel[Kernel("copy of Python numbers", _line(sys._getframe(1)))] += 1
                self.found.kernels += 1
                self.found.written += _bytes(made)
            return made

        return make


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def _is_triton(name: str) -> bool:
    """Whether an operator of the package is a Triton kernel, which does not run on meta tensors."""
    return name in _TRITON or "triton" in name


def _computes(func: Any, name: str, made: Sequence[Tensor]) -> bool:
    """Whether an operator launches a kernel."""
    if name in _ALLOCATIONS or name in _VIEWS or func.is_view:
        return False
    schema = func._schema
    # What returns no tensor reads metadata, unless it waits for a value. Torch launches nothing for empty results.
    if not made and not schema.is_mutable:
        return name in _WAITING
    return not made or any(x.numel() for x in made)


def _selects_by_mask(name: str, args: Sequence[Any]) -> bool:
    """Whether an index is boolean, so that torch looks up where it is True."""
    if name not in ("index", "index_put_", "index_put", "_index_put_impl_"):
        return False
    masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
    # With a single number as value, torch fills instead.
    return bool(masks) and (name == "index" or args[2].numel() > 1)


def _arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The schema of every given argument, and its value."""
    for position, specified in enumerate(func._schema.arguments):
        if position < len(args):
            yield specified, args[position]
        elif specified.name in kwargs:
            yield specified, kwargs[specified.name]


def _returns(func: Any, made: Sequence[Tensor]) -> list[Any]:
    """The schema of every returned tensor. A returned list of tensors has one schema."""
    returns = func._schema.returns
    if len(returns) == len(made):
        return list(returns)
    tensors = [r for r in returns if isinstance(r.type, torch.TensorType)]
    return tensors if len(tensors) == len(made) else [returns[0]] * len(made)


def _bytes(x: Tensor) -> int:
    """Bytes of the distinct elements of a tensor: an expanded dimension has one."""
    return math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride or not n) * x.element_size()


def _indexed_bytes(args: Sequence[Any]) -> int:
    """Bytes that an operator like scatter_(x, dim, index, source) or index_put_(x, indices, values) writes to x."""
    return max((x.numel() for x in _tensors(args[1:])), default=0) * args[0].element_size()


def _place(error: BaseException) -> str:
    """The innermost line of the package in the traceback of an error."""
    lines = [
        f"{pathlib.Path(f.f_code.co_filename).relative_to(_PACKAGE)}:{number}"
        for f, number in traceback.walk_tb(error.__traceback__)
        if f.f_code.co_filename.startswith(str(_PACKAGE))
    ]
    return lines[-1] if lines else "a line outside the package"


def _line(frame: FrameType | None) -> str:
    """The innermost line of the package that calls a frame, as file:line."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(str(_PACKAGE)):
            return f"{pathlib.Path(path).relative_to(_PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"
