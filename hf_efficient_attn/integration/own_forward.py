"""A forward that one module has of its own, in place of that of its class, and that copies of the module have too.

`copy.deepcopy` copies it with the module. `torch.nn.DataParallel` makes replicas whose attributes are those of the
original; a forward that is bound to the original would compute with its parameters. A module with a forward of its own
therefore also makes its replicas itself.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

# What `torch.nn.parallel.replicate` calls.
_REPLICATE = "_replicate_for_data_parallel"


def own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The forward that the instance has, which this module or other code has set; None if it has that of its class."""
    return vars(module).get("forward")


def computes(forward: object, function: Callable[..., Any]) -> bool:
    """Whether a forward is one that `bind` made of a function."""
    return isinstance(forward, functools.partial) and forward.func is function


def bind(module: nn.Module, function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """A forward for `give` that calls function(module, *args, ...)."""
    return functools.partial(function, module, *args)


def give(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give a module a forward of its own."""
    module.forward = forward
    setattr(module, _REPLICATE, functools.partial(_replicate, module))


def take(module: nn.Module) -> None:
    """Take the forward away that the module has of its own, if it has one."""
    for name in ("forward", _REPLICATE):
        vars(module).pop(name, None)


def _replicate(module: nn.Module) -> nn.Module:
    """A replica of a module, with a forward that is bound to the replica."""
    replica: nn.Module = getattr(type(module), _REPLICATE)(module)
    forward = own_forward(module)
    if isinstance(forward, functools.partial) and forward.args[:1] == (module,):
        give(replica, bind(replica, forward.func, *forward.args[1:]))
    return replica
