"""Models that load without this package: by a repository of Hugging Face's `kernels` library, or by remote code.

A kernel repository has one method, which Transformers loads by itself. It contains copies of this package's own
modules: `standalone.function`, the method, and what they import. Imports become relative, and nothing but PyTorch is
needed. The layout is the one that the library documents (https://huggingface.co/docs/kernels): `build/<variant>` for
each backend, with equal modules, and `torch-ext` with `build.toml` for those who build the repository themselves.

With the file of `remote_code` a converted checkpoint loads by `trust_remote_code=True`. The file contains the methods
and the integration of this package, as texts, and imports them if the package is not installed. It also has a class for
each task of the model's type, which `auto_map` in config.json names. Transformers copies the file when such a model is
saved, so fine-tuned copies load in the same way.
"""

import ast
import base64
import hashlib
import importlib.resources
import json
import os
import pathlib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jinja2
from transformers import PreTrainedConfig, PreTrainedModel

from hf_efficient_attn.checkpoint.files import Output
from hf_efficient_attn.checkpoint.loading import auto_classes
from hf_efficient_attn.checkpoint.source import check_hub_id
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.distance_bias import has_distance_bias
from hf_efficient_attn.integration.models import attention_modules, has_sinks, is_patched, uses_interface
from hf_efficient_attn.integration.settings import as_settings
from hf_efficient_attn.io.json import write_json
from hf_efficient_attn.methods import available_methods, get_method, learns
from hf_efficient_attn.version import __version__

BACKENDS = ("cpu", "cuda", "metal", "rocm", "xpu")
# The name of the file with remote code.
MODULE = "modeling_efficient_attention"
_PACKAGE, _ENTRY = "hf_efficient_attn", "standalone.function"
_IMPORT = re.compile(r"^( *)from hf_efficient_attn\.([\w.]+) import ", re.M)


def export_kernel(
    method: str, output: "str | os.PathLike[str]", *, repo_id: str | None = None, force: bool = False
) -> dict[str, Any]:
    """Write a repository for Hugging Face's `kernels` library, from which Transformers loads a method by itself.

    A model uses it by `attn_implementation="ORG/NAME:METHOD"`, given to `from_pretrained` or in config.json (`convert
    --kernel`). The function takes its hyperparameters from `config.efficient_attention`, by default the defaults.

    Args:
        method: A method of this package without learned parameters.
        output: The folder to write. It must not exist, or be empty, unless `force` is given.
        repo_id: Hub id of the repository for its card and build.toml; by default ORG and the name of the folder.
        force: Replace an existing output folder when everything is written.

    Returns:
        A report of plain values: method, output, function (the `attn_implementation`) and backends.

    Raises:
        UnsupportedAttentionError: The method learns parameters or is not of this package, or the output is refused.
        OSError: A file could not be written. Nothing of the output remains.
    """
    info = get_method(method).info
    if method not in kernel_methods():
        other = "a checkpoint of your own method needs this package and the file of the method"
        if method in methods_of_package():
            other = f"convert --method {method} --remote-code writes a checkpoint that loads without this package, too"
        raise UnsupportedAttentionError(
            f"{method}: a kernel repository takes methods of this package without learned parameters "
            f"({', '.join(kernel_methods())}): {other}"
        )
    place = Output(output, pathlib.Path(__file__).parents[1], force=force)
    repo_id = repo_id or f"ORG/{place.path.name}"
    check_hub_id(repo_id, "the kernel repository")
    if others := _other_methods(repo_id, method):
        raise UnsupportedAttentionError(
            f"the name {repo_id} says {others}, and the repository gets {method}: give another name (--repo ORG/NAME)"
        )
    name = repo_id.rpartition("/")[2].lower().replace("_", "-").replace(".", "-")
    files, module = kernel_files(method), name.replace("-", "_")
    compatible = _rendered("kernel_compatible.py.jinja", {})
    values = {"info": info, "name": name, "repo_id": repo_id, "version": __version__, "backends": json.dumps(BACKENDS)}
    with place.staged() as draft:
        _write(draft / "torch-ext" / module, files)
        for backend in BACKENDS:
            folder, built = draft / "build" / f"torch-{backend}", files | {f"{module}/__init__.py": compatible}
            _write(folder, built)
            write_json(folder / "metadata.json", _metadata(name, backend, built))
        _write(draft, {file: _rendered(f"kernel_{file}.jinja", values) for file in ("build.toml", "README.md")})
    return {"method": method, "output": str(place.path), "function": f"{repo_id}:{method}", "backends": list(BACKENDS)}


def kernel_implementation(model: PreTrainedModel, repo_id: str) -> str:
    """The `attn_implementation` that names the method of a model in a kernel repository.

    A model whose attention a kernel repository cannot compute is refused, and a repository named after another method.
    """
    check_hub_id(repo_id, "--kernel")
    config: Any = model.config
    stored = config.efficient_attention
    entries = as_settings(stored).entries if stored else ()
    methods = sorted({entry.config.method for entry in entries})
    layers = [layer for entry in entries for layer in entry.layers or ()]
    through = [found for found in attention_modules(model) if uses_interface(type(found.module))]
    # `standalone.function` reads the number there. ViT's modules have none, for example.
    are_numbered = all(getattr(x.module, "layer_idx", None) == x.location.layer for x in through)
    problems = {
        "the attention is exact": not entries,
        f"a kernel repository has one method, and this model has {', '.join(methods)}": len(methods) > 1,
        f"it can have these methods only: {', '.join(kernel_methods())}": not {*methods} <= {*kernel_methods()},
        "the attention has learned parameters": any(learns(entry.config) for entry in entries),
        "'layers' must be numbers": any(isinstance(layer, str) for layer in layers),
        "its attention modules do not say which layer they are, which 'layers' needs": layers and not are_numbered,
        "the model has cross attention": config.is_encoder_decoder or getattr(config, "add_cross_attention", False),
        "the model has several parts": bool(config.sub_configs),
        "the model computes its attention itself": any(map(is_patched, model.modules())),
        "the model has attention sinks": any(map(has_sinks, model.modules())),
        "the model adds a bias by distance": any(has_distance_bias(type(module)) for module in model.modules()),
    }
    for problem, applies in problems.items():
        if applies:
            raise UnsupportedAttentionError(f"--kernel {repo_id}: {problem}: use --remote-code, or leave --kernel out")
    if others := _other_methods(repo_id, methods[0]):
        raise UnsupportedAttentionError(
            f"--kernel {repo_id}: the name of the repository says {others}, and this model has {methods[0]}: give one "
            f"that 'export-kernel {methods[0]}' has written, under a name that does not say otherwise"
        )
    return f"{repo_id}:{methods[0]}"


def _other_methods(repo_id: str, method: str) -> str:
    """The methods that the words in a repository's name say that it has, if `method` is not among them; or ""."""
    words = f"-{re.sub('[_.]', '-', repo_id.rpartition('/')[2].lower())}-"
    named = [name for name in available_methods() if f"-{name.replace('_', '-')}-" in words]
    return "" if method in named else " and ".join(named)


def kernel_methods() -> list[str]:
    """The methods of this package that learn nothing with their default hyperparameters."""
    return [name for name in methods_of_package() if not learns(get_method(name).default)]


def methods_of_package() -> dict[str, str]:
    """All methods but those that a user's own file has registered, with their modules, such as "methods.nearfar"."""
    modules = {name: get_method(name).info.config_class.__module__ for name in available_methods()}
    own = f"{_PACKAGE}.methods."
    return {name: module.removeprefix(f"{_PACKAGE}.") for name, module in modules.items() if module.startswith(own)}


def modules_of(names: Iterable[str], *, without_imports: Collection[str] = ()) -> dict[str, str]:
    """The texts of modules, of the packages that contain them, and of all modules of this package that they import.

    `names` are relative to this package, such as "methods.nearfar"; the package itself is left out. Of the packages
    `without_imports` only the docstring is kept. Returns the texts by their paths in the package, in alphabetical
    order.
    """
    root, texts, waiting = importlib.resources.files(_PACKAGE), dict[str, str](), [*names]
    while waiting:
        name = waiting.pop()
        forms = (name.replace(".", "/") + end for end in (".py", "/__init__.py"))
        paths = [path for path in forms if root.joinpath(path).is_file()]
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


def kernel_files(method: str) -> dict[str, str]:
    """The texts of a repository's modules, by their paths in the folder of a backend."""
    info = get_method(method).info
    modules = methods_of_package()
    used = [modules[name] for name in (method, info.config_class.switches_to) if name]
    # In a folder of their own, so that no repository can have the name of one of them.
    files = {
        "__init__.py": _rendered("kernel_init.py.jinja", {"info": info, "version": __version__}),
        "_modules/__init__.py": f'"""Modules of hf_efficient_attn {__version__}."""\n',
    }
    for path, text in modules_of([_ENTRY, *used], without_imports=["integration"]).items():
        dots = "." * (path.count("/") + 1)
        files[f"_modules/{path}"] = _IMPORT.sub(rf"\1from {dots}\2 import ", text)
    return dict(sorted(files.items()))


def _metadata(name: str, backend: str, files: Mapping[str, str]) -> dict[str, Any]:
    """The contents of metadata.json of a backend. The id differs between backends and between contents."""
    digests = {path: hashlib.sha256(text.encode()).digest() for path, text in sorted(files.items())}
    revision = hashlib.sha256(b"".join(digests.values())).hexdigest()[:7]
    return {
        "id": f"_{name.replace('-', '_')}_{backend}_{revision}",
        "name": name,
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {
            "algorithm": "sha256",
            "files": {path: base64.b64encode(digest).decode() for path, digest in digests.items()},
        },
    }


def _rendered(template: str, values: Mapping[str, Any]) -> str:
    loader = jinja2.PackageLoader("hf_efficient_attn.standalone", "")
    environment = jinja2.Environment(loader=loader, keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template(template).render(values)


def _write(folder: pathlib.Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")


def remote_code(config: PreTrainedConfig) -> tuple[str, dict[str, str]]:
    """The text of the file for a model's config, and the `auto_map` that refers to it.

    A class of models for which Transformers has no auto class, and methods that are not of this package, are refused.
    """
    stored, classes = config.efficient_attention, {name: cls.__name__ for name, cls in auto_classes(config).items()}
    methods = sorted({entry.config.method for entry in as_settings(stored).entries}) if stored else []
    others = [name for name in methods if name not in methods_of_package()]
    lost = [name for name in config.architectures or () if name not in classes.values()]
    if others or lost or not classes or not type(config).__module__.startswith("transformers."):
        own = f"{', '.join(others)} is a method of your own"
        problem = own if others else f"no auto class of Transformers loads {', '.join(lost) or 'it'}"
        raise UnsupportedAttentionError(
            f"a {type(config).__name__} cannot load by trust_remote_code, because {problem}: leave out --remote-code"
        )
    # All methods: a process can load several checkpoints, and the first one's copies serve all.
    texts = modules_of(["integration", "version", *methods_of_package().values()])
    values: dict[str, Any] = {
        "methods": methods,
        "all_methods": [*methods_of_package()],
        "version": __version__,
        "revision": hashlib.sha256("".join(texts.values()).encode()).hexdigest()[:8],
        "sources": {path: [repr(line) for line in text.splitlines(keepends=True)] for path, text in texts.items()},
        "classes": sorted({model: auto for auto, model in classes.items()}.items()),
    }
    return _rendered("remote_code.py.jinja", values), {name: f"{MODULE}.{model}" for name, model in classes.items()}
