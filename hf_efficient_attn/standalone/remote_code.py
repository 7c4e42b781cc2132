"""The file with which a converted checkpoint loads by `trust_remote_code=True`, without this package.

The file contains the methods and the integration of this package, as texts, and imports them if the package is not
installed. It also has a class for each task of the model's type, which `auto_map` in config.json
names. Transformers copies the file when such a model is saved, so fine-tuned copies load in the same way.
"""

import hashlib
import importlib.resources
from typing import Any

import jinja2
from transformers import PreTrainedConfig

from hf_efficient_attn.checkpoint.loading import auto_classes
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.settings import as_settings
from hf_efficient_attn.standalone.kernel import method_module, methods_of_package, modules_of
from hf_efficient_attn.version import __version__

# The name of the file.
MODULE = "modeling_efficient_attention"


def remote_code(config: PreTrainedConfig) -> tuple[str, dict[str, str]]:
    """The text of the file for a model's config, and the `auto_map` that refers to it.

    A model for which Transformers has no auto class, and methods that are not of this package, are refused.
    """
    stored, classes = config.efficient_attention, {name: cls.__name__ for name, cls in auto_classes(config).items()}
    methods = sorted({entry.config.method for entry in as_settings(stored).entries}) if stored else []
    others = [name for name in methods if name not in methods_of_package()]
    if others or not classes or not type(config).__module__.startswith("transformers."):
        problem = f"{', '.join(others)} is a method of your own" if others else "Transformers has no such model"
        raise UnsupportedAttentionError(
            f"a {type(config).__name__} cannot load by trust_remote_code, because {problem}: leave out --remote-code"
        )
    # All methods: a process can load several checkpoints, and the first one's copies serve all.
    texts = modules_of(["integration", "version", *map(method_module, methods_of_package())])
    values: dict[str, Any] = {
        "methods": methods,
        "all_methods": methods_of_package(),
        "version": __version__,
        "revision": hashlib.sha256("".join(texts.values()).encode()).hexdigest()[:8],
        "sources": {path: [repr(line) for line in text.splitlines(keepends=True)] for path, text in texts.items()},
        "classes": sorted({model: auto for auto, model in classes.items()}.items()),
    }
    template = importlib.resources.files(__package__).joinpath("remote_code.py.jinja").read_text(encoding="utf-8")
    text = jinja2.Template(template, keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True).render(values)
    return text, {name: f"{MODULE}.{model}" for name, model in classes.items()}
