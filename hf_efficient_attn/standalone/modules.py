"""The modules of this package that a method needs, as texts for repositories that work without the package."""

import ast
import importlib.resources
from collections.abc import Collection, Iterable

from hf_efficient_attn.methods import available_methods, get_method

_PACKAGE = "hf_efficient_attn"


def methods_of_package() -> list[str]:
    """All methods but those that a user's own file has registered."""
    return [name for name in available_methods() if _module_of(name).startswith(f"{_PACKAGE}.methods.")]


def method_module(method: str) -> str:
    """The module of a method of this package, such as "methods.nearfar"."""
    return _module_of(method).removeprefix(f"{_PACKAGE}.")


def modules_of(names: Iterable[str], *, without_imports: Collection[str] = ()) -> dict[str, str]:
    """The texts of modules, of the packages that contain them, and of all modules of this package that they import.

    Args:
        names: Modules relative to this package, such as "methods.nearfar". The package itself is left out.
        without_imports: Packages of which only the docstring is kept.

    Returns:
        The texts by their paths relative to the package, in alphabetical order.
    """
    root, texts, waiting = importlib.resources.files(_PACKAGE), dict[str, str](), [*names]
    while waiting:
        name = waiting.pop()
        paths = [
            path for end in (".py", "/__init__.py") if root.joinpath(path := name.replace(".", "/") + end).is_file()
        ]
        if not paths or paths[0] in texts:  # a name in a module and no module itself, or known already
            continue
        text = root.joinpath(paths[0]).read_text(encoding="utf-8")
        tree = ast.parse(text)
        if "." in name:
            waiting.append(name.rpartition(".")[0])
        if name in without_imports:
            texts[paths[0]] = f'"""{(ast.get_docstring(tree) or "").splitlines()[0]}"""\n'
            continue
        texts[paths[0]] = text
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == _PACKAGE:
                module = str(node.module)[len(_PACKAGE) + 1 :]
                waiting += [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
    return dict(sorted(texts.items()))


def _module_of(method: str) -> str:
    return get_method(method).info.config_class.__module__
