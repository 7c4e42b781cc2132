"""Programs that measure and train with hf_efficient_attn; run from a checkout, not installed with the package.

Importing this package makes a missing package end a program in one line, which names the extra `train`, and not in a
traceback.
"""

import sys
from types import TracebackType

_otherwise = sys.excepthook


def name_the_extra(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Report an exception that ends the program. If a module of another package is missing, exit with status 2."""
    cause: BaseException | None = error
    while cause is not None:  # Transformers wraps the error of a module that it imports
        name = (getattr(cause, "name", None) or "").partition(".")[0]
        if isinstance(cause, ModuleNotFoundError) and name not in ("", "recipes", "hf_efficient_attn"):
            advice = "in the checkout, pip install -e '.[train]' installs all that the recipes need"
            print(f"error: the package {name} is missing: {advice}", file=sys.stderr)
            sys.exit(2)
        cause = cause.__cause__
    _otherwise(kind, error, traceback)


sys.excepthook = name_the_extra
