"""Settings of Sphinx for this documentation.

    pip install -e ".[docs]"
    sphinx-build -W --keep-going -b html docs docs/_build/html
    sphinx-build -W --keep-going -b doctest -D nb_execution_mode=off docs docs/_build/doctest

The first build executes the notebooks. Neither needs the network. Both write the pages about methods and commands, and
the lists of refusals, again from the code (`_ext/reference.py`).
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from hf_efficient_attn.version import __version__

project = "hf_efficient_attn"
author = "The developers of hf_efficient_attn"
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "reference",
]
exclude_patterns = ["_build", "_ext", "**.ipynb_checkpoints"]

# Pages are written in MyST Markdown. `## Some title` can be linked to as `page.md#some-title`.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# A notebook that fails, fails the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = -1
nb_merge_streams = True
nb_output_stderr = "remove"  # progress bars; an error stops the build

# Single backticks in docstrings are code.
default_role = "code"
smartquotes = False

# Docstrings follow Google's style; types are in the signatures.
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

# Every page starts with an empty namespace, except for what all examples use.
doctest_global_setup = """
import warnings

import torch
import transformers

import hf_efficient_attn as hea

torch.manual_seed(0)
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
"""
doctest_test_doctest_blocks = ""

html_theme = "furo"
html_title = f"hf_efficient_attn {release}"
html_static_path = []
html_show_sphinx = False
html_copy_source = False
