"""Sub-quadratic attention for Transformers.

After `import hf_efficient_attn`, Transformers knows every method of this package by its name, for example in
`AutoModel.from_pretrained(..., attn_implementation="kdeformer")`.

The public names are in `_api`, which this module imports at once. Only in the process of the command hf-efficient-attn
does it wait until the command has work to do, because PyTorch takes seconds to import and `--help` does not need it.
"""

import importlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from hf_efficient_attn.version import __version__ as __version__

if TYPE_CHECKING:
    from hf_efficient_attn import analysis as analysis
    from hf_efficient_attn._api import *  # noqa: F403
    from hf_efficient_attn.evaluation.calibration import calibrate as calibrate
    from hf_efficient_attn.evaluation.model_error import attention_error as attention_error
    from hf_efficient_attn.training.callback import UptrainingCallback as UptrainingCallback


def _is_command() -> bool:
    """Whether this process is `hf-efficient-attn` or `python -m hf_efficient_attn`.

    A process that the command starts is not: multiprocessing gives it the same `sys.argv`, but another command line.
    """
    argv = getattr(sys, "argv", None) or [""]
    program = next(iter(sys.orig_argv[-len(argv) :]), "")
    if argv[0] == "-m":  # Python replaces it by the path of `__main__.py` after it has imported this package
        return program == __name__
    return argv[0] == program and os.path.basename(program) in ("hf-efficient-attn", "hf-efficient-attn.exe")


def exit_at_once(number: int, frame: object) -> None:
    """End the command on Ctrl-C while it imports modules, which would print the traceback of an import."""
    os.write(2, b"\nerror: interrupted\n" if os.isatty(2) else b"error: interrupted\n")
    os._exit(130)


def _load() -> None:
    """Import `_api`, which registers everything, and make its names attributes of this package."""
    api = importlib.import_module(f"{__name__}._api")
    if hasattr(api, "__all__"):  # it is defined last: without it `_api` is still being imported
        globals().update({name: getattr(api, name) for name in api.__all__})
        globals()["__all__"] = ["__version__", *api.ON_FIRST_USE, *api.__all__, *api.config_classes()]


def __getattr__(name: str) -> Any:
    if "__all__" not in globals() and (name == "__all__" or not name.startswith("__")):
        _load()
    if "__all__" not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name] if name in globals() else sys.modules[f"{__name__}._api"].find(name)


def __dir__() -> list[str]:
    if "__all__" not in globals():
        _load()
    return sorted({*globals(), *globals()["__all__"], *sys.modules[f"{__name__}._api"].config_classes()})


if not _is_command():
    _load()
elif signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, exit_at_once)  # until the command works
