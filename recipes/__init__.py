"""Programs that measure and train with hf_efficient_attn; run from a checkout, not installed with the package.

Importing this package makes a missing module of the extra `train` end a program in one line and not in a traceback.
"""

import sys
from types import TracebackType

# The modules of the extra by the packages that contain them.
TRAIN = {
    "accelerate": "accelerate",
    "datasets": "datasets",
    "evaluate": "evaluate",
    "matplotlib": "matplotlib",
    "peft": "peft",
    "PIL": "pillow",
    "sacrebleu": "sacrebleu",
    "scipy": "scipy",
    "sklearn": "scikit-learn",
}

_otherwise = sys.excepthook


def name_the_extra(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Report an exception that ends the program. If a module of the extra is missing, exit with status 2."""
    cause: BaseException | None = error
    while cause is not None:  # Transformers wraps the error of a module that it imports
        name = (getattr(cause, "name", None) or "").partition(".")[0]
        if isinstance(cause, ModuleNotFoundError) and name in TRAIN:
            advice = "in the checkout, pip install -e '.[train]' installs all that the recipes need"
            print(f"error: the package {TRAIN[name]} is missing: {advice}", file=sys.stderr)
            sys.exit(2)
        cause = cause.__cause__
    _otherwise(kind, error, traceback)


sys.excepthook = name_the_extra
