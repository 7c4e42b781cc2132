"""Something to be done as soon as a module was imported, without importing it now.

`transformers.modeling_utils` takes longer to import than everything else here together, and who imports this package to
read a help text does not need it.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds a module as all other finders would, and has its loader run the action after the module's own code."""

    def __init__(self) -> None:
        self.actions: dict[str, Callable[[], None]] = {}
        self.searching: set[str] = set()

    def find_spec(self, name, path=None, target=None):
        if name not in self.actions or name in self.searching:
            return None
        self.searching.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching.discard(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_act(module):
            run(module)
            self.actions[name]()

        spec.loader.exec_module = run_and_act
        return spec


_FINDER = _AfterImport()


def after_import(name: str, action: Callable[[], None]) -> None:
    """Call `action()` now if the module is imported already, else right after its import."""
    if name in sys.modules and name not in _FINDER.searching and _is_complete(name):
        action()
        return
    _FINDER.actions[name] = action
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def _is_complete(name: str) -> bool:
    """Whether the module's code has run to its end."""
    spec = getattr(sys.modules[name], "__spec__", None)
    return not getattr(spec, "_initializing", False)
