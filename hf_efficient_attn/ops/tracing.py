"""Calls that are traced into a graph, and calls inside transforms of `torch.func`.

A graph is one of `torch.compile`, `torch.export` or the exporter to ONNX.

The methods branch on values, write in place and use operators whose gradients are written by hand, so no transform can
look inside them. A transform sees a whole call as one `torch.autograd.Function` instead, which computes the call again
for its gradient. The gradient is such a function as well, so that `vmap` of `grad` works. Gradients of gradients and
forward-mode derivatives are refused.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.ops.backends.devices import float64_device

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Result = TypeVar("_Result")
_EXACT = (
    "use exact attention: attn_implementation='eager', or PyTorch's own (after hea.restore_sdpa if it was replaced) in "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
)


def is_compiling() -> bool:
    """Whether this call is traced into a graph.

    `torch.compiler.is_compiling` is a state of the whole process: while one thread compiles, it also holds for ordinary
    calls of other threads. These compute with plain tensors.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    return torch.compiler.is_compiling() and type(torch.empty(0)) is not Tensor


def in_graph() -> bool:
    """Whether this call is recorded into a graph with calls of methods as operators, which excludes graphs for ONNX."""
    return is_compiling() and not exporting_to_onnx()


def replaced_in_graphs(replacement: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Decorate a function so that graphs contain another function with the same arguments in its place."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return replacement(*args, **kwargs) if is_compiling() else function(*args, **kwargs)

        return cast(_Function, call)

    return decorate


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing. With `replaced_in_graphs`, a graph leaves out a check of values or a warning."""


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is of PyTorch's own class and not nested, or represents such a tensor in a graph."""
    if type(x) in (Tensor, torch.nn.Parameter):
        return not x.is_nested
    return is_compiling() and not is_traceable_wrapper_subclass(x)


@replaced_in_graphs(lambda x: False)
def has_values(x: Tensor) -> bool:
    """Whether the values of a tensor can be read: not in graphs, those of CUDA included, and transforms."""
    is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return not is_captured and not in_transform(x)


def refuse_in_graphs(sentence: str) -> None:
    """Raise `UnsupportedAttentionError` with the sentence in a call that is traced into a graph."""
    if is_compiling():
        raise UnsupportedAttentionError(sentence)


def exporting_to_onnx() -> bool:
    """Whether this call is traced by `torch.onnx.export`.

    The graph must then consist of PyTorch's standard operators, and must not depend on the lengths of the example: the
    exporter drops the guards with which `torch.export` and `torch.compile` check the lengths of later calls.
    """
    is_exporting = is_compiling() and torch.compiler.is_exporting()
    return bool(is_exporting or torch.jit.is_tracing()) and in_onnx_export()


def in_onnx_export() -> bool:
    """Whether `torch.onnx.export` runs. `integration` marks the result as a constant for Dynamo."""
    return bool(torch.onnx.is_in_onnx_export())


def unrecorded(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Call a function of plain values. A graph for ONNX contains its result only, not the operators that compute it.

    It contains the operators if a value is a length that the graph does not fix.
    """
    is_fixed = not any(isinstance(x, torch.SymInt) for x in pytree.tree_leaves(arguments))
    if exporting_to_onnx() and is_fixed and not torch.compiler.is_dynamo_compiling():
        # Tracers record operators by the one kind of modes, and by the other that gradients are switched on or off.
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return function(*arguments)
    return function(*arguments)


def draw_seed(device: torch.device) -> Tensor:
    """Draw a seed from the global generator of `device`, as training does: an int64 scalar tensor.

    It is on the device that makes random numbers, so that nothing waits for it.
    """
    return torch.randint(2**31 - 1, (), device=float64_device(device))


@contextlib.contextmanager
def with_draws_of(seed: Tensor | int | None, device: torch.device) -> Iterator[None]:
    """Make the global generators draw from the seed within this context. Afterwards they go on as before.

    Nothing happens if the seed is None.
    """
    with contextlib.nullcontext() if seed is None else keeping_draws(device):
        if seed is not None:
            torch.manual_seed(int(seed))
        yield


def keeping_draws(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """A context after which the global generators go on as before it."""
    # Tensors on an accelerator know its number. The CPU has none, and `fork_rng` always keeps its state.
    return torch.random.fork_rng([] if device.index is None else [device], device_type=device.type)


class _Part(NamedTuple):
    """The function of tensors that one `_Call` computes."""

    function: Callable[..., Any]  # takes tensors, and returns a tensor or a tuple of tensors
    name: str  # the method's name, for messages
    by_rows: bool  # whether the first dimension of all arguments and results is the batch, whose rows are independent
    draws: bool  # whether it draws from the global generator
    is_gradient: bool = False  # whether it is the gradient of another part


@replaced_in_graphs(lambda *_: False)
def in_transform(*arguments: object) -> bool:
    """Whether a tensor among the arguments belongs to a transform of `torch.func` that is being computed."""
    is_active = torch._C._functorch.peek_interpreter_stack() is not None
    return is_active and any(_is_wrapped(x) for x in pytree.tree_leaves(arguments))


def _is_wrapped(x: object) -> bool:
    return isinstance(x, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x)


def unwrapped(x: Tensor) -> Tensor:
    """Unwrap a tensor from all transforms of `torch.func`, for checks. Each `vmap` adds a dimension."""
    while _is_wrapped(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def call_in_transform(
    function: Callable[..., Tensor], arguments: Sequence[Any], name: str, *, by_rows: bool, draws: bool
) -> Tensor:
    """Compute a function of `arguments`, which may be nested, so that `grad`, `vjp` and `vmap` of it are right.

    `_Part` describes the other parameters. Forward mode, a gradient of a gradient, and `vmap` of a call that draws are
    refused.
    """
    leaves, structure = pytree.tree_flatten(tuple(arguments))
    index = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]

    def of_tensors(*tensors: Tensor) -> Tensor:
        filled = list(leaves)
        for i, x in zip(index, tensors, strict=True):
            filled[i] = x
        given = pytree.tree_unflatten(filled, structure)
        with with_draws_of(seed, tensors[0].device):  # the gradient draws the same again
            return function(*given)

    with torch._C._DisableFuncTorch():  # `vmap` forbids to draw, and to read a number back
        seed = int(draw_seed(leaves[index[0]].device)) if draws else None
    return cast(Tensor, _apply(_Part(of_tensors, name, by_rows, draws), *(leaves[i] for i in index)))


@replaced_in_graphs(lambda out, name: out)
def refuse_second_gradient(out: Tensor, name: str) -> Tensor:
    """Make the gradient of a method's output refuse to be differentiated, because the result would be wrong."""

    def refuse(grad: Tensor) -> None:
        if torch.is_grad_enabled():  # the case in a backward pass with create_graph=True only
            _refuse_twice(name)

    if out.requires_grad:
        out.register_hook(refuse)
    return out


def _refuse_twice(name: str) -> NoReturn:
    raise UnsupportedAttentionError(
        f"{name}: the gradient of a gradient (create_graph=True, torch.func.hessian) is not computed, because "
        f"gradients are written by hand here: {_EXACT}"
    )


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(part: _Part, *tensors: Tensor) -> Any:
        return _apply(part, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.part, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        part = ctx.part
        tensors = ctx.saved_tensors
        if part.is_gradient:
            _refuse_twice(part.name)
        found = iter(_apply(_gradient_of(part), *grads, *tensors))
        return None, *(next(found) if x.is_floating_point() else None for x in tensors)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise UnsupportedAttentionError(
            f"{ctx.part.name}: forward-mode derivatives (torch.func.jvp, jacfwd, hessian) are not computed: use "
            f"torch.func.vjp or jacrev, or {_EXACT}"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], part: _Part, *tensors: Tensor) -> tuple[Any, Any]:
        if part.draws:
            raise UnsupportedAttentionError(
                f"{part.name}: torch.func.vmap of attention with dropout is not computed: call model.eval(), or set "
                "the probability of attention dropout to 0"
            )
        size = info.batch_size
        dims = in_dims[1:]
        if part.by_rows:
            rows = [
                (x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
                for x, dim in zip(tensors, dims, strict=True)
            ]
            out = pytree.tree_map(lambda x: x.unflatten(0, (size, -1)), _apply(part, *rows))
        else:
            each = [
                _apply(part, *(x if dim is None else x.select(dim, i) for x, dim in zip(tensors, dims, strict=True)))
                for i in range(size)
            ]
            out = pytree.tree_map(lambda *parts: torch.stack(parts), *each)
        return out, pytree.tree_map(lambda x: 0, out)


def _apply(part: _Part, *tensors: Tensor) -> Any:
    # Outside of all transforms autograd may record what they compute.
    is_recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if is_recorded or in_transform(*tensors):
        return _Call.apply(part, *tensors)  # type: ignore[no-untyped-call]
    with torch.no_grad():  # `torch.func` forbids checkpoints here, and nothing needs a gradient
        return part.function(*tensors)


def _gradient_of(part: _Part) -> _Part:
    """Make a part that takes the gradient of the output and all tensors, and returns the gradients of the tensors."""

    def gradients(grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
        wanted = [x for x in leaves if x.requires_grad]
        # `torch.func` forbids hooks of saved tensors, such as checkpoints, in what it differentiates itself.
        forbidden = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        torch._C._autograd._saved_tensors_hooks_enable()
        try:
            with torch.enable_grad():
                out = part.function(*leaves)
                return torch.autograd.grad(out, wanted, grad, allow_unused=True, materialize_grads=True)
        finally:
            if forbidden is not None:
                torch._C._autograd._saved_tensors_hooks_disable(forbidden)

    return _Part(gradients, part.name, part.by_rows, part.draws, is_gradient=True)


# The results of kernels in the function of `keeping_results` that a thread computes: a list in the first call of the
# function, an iterator in later calls.
_kept = threading.local()


def keeping_results(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a function that is called again for its gradient, so that `attend` keeps the results of kernels.

    Nothing is kept where hooks decide what autograd saves, as in gradient checkpointing.
    """
    results: list[tuple[Tensor, ...]] = []
    if is_compiling() or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return function

    def call(*arguments: Any) -> Tensor:
        before = getattr(_kept, "results", None)
        _kept.results = iter(tuple(results)) if results else results
        try:
            return function(*arguments)
        finally:
            _kept.results = before

    return call


def kept_results(kernel: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return the results of a kernel, or the results that an earlier call kept."""
    results = getattr(_kept, "results", None)
    if results is None:
        return kernel()
    if not isinstance(results, list):
        return tuple(x.detach() for x in next(results))
    found = kernel()
    results.append(tuple(x.detach() for x in found))  # without the graph, of which the list is a part
    return found
