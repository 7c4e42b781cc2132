"""Converted checkpoints that load without this package: by a kernel repository, or by remote code."""

import pathlib

from transformers import PreTrainedConfig

from hf_efficient_attn.checkpoint.provenance import check_hub_id
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.settings import as_settings
from hf_efficient_attn.io.json import read_json_object, write_json
from hf_efficient_attn.methods import learns
from hf_efficient_attn.standalone.kernel import kernel_methods
from hf_efficient_attn.standalone.remote_code import MODULE, remote_code


def kernel_implementation(config: PreTrainedConfig, repo_id: str) -> str:
    """The `attn_implementation` that names the method of a model's config in a kernel repository.

    Raises:
        UnsupportedAttentionError: A kernel repository cannot compute the attention of this model.
    """
    check_hub_id(repo_id, "--kernel")
    stored = config.efficient_attention
    entries = as_settings(stored).entries if stored else ()
    methods = sorted({entry.config.method for entry in entries})
    problems = {
        "the attention is exact": not entries,
        f"a kernel repository has one method, and this model has {', '.join(methods)}": len(methods) > 1,
        f"it can have these methods only: {', '.join(kernel_methods())}": not {*methods} <= {*kernel_methods()},
        "the attention has learned parameters": any(learns(entry.config) for entry in entries),
        "'layers' must be numbers": any(isinstance(layer, str) for entry in entries for layer in entry.layers or ()),
        "the model has cross attention": config.is_encoder_decoder or getattr(config, "add_cross_attention", False),
        "the model has several parts": bool(config.sub_configs),
    }
    for problem, applies in problems.items():
        if applies:
            raise UnsupportedAttentionError(f"--kernel {repo_id}: {problem}: use --remote-code, or leave --kernel out")
    return f"{repo_id}:{methods[0]}"


def make_standalone(folder: pathlib.Path, config: PreTrainedConfig, kernel: str | None, has_code: bool) -> None:
    """Let a checkpoint folder name a kernel repository as its attention, or contain the code of its attention."""
    values = read_json_object(folder / "config.json")
    if kernel is not None:
        values["attn_implementation"] = kernel_implementation(config, kernel)
    if has_code:
        text, values["auto_map"] = remote_code(config)
        (folder / f"{MODULE}.py").write_text(text, encoding="utf-8", newline="\n")
    write_json(folder / "config.json", values)
