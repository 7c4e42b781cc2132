"""What users and saved files depend on: public names with their arguments, commands with their options, and what a
converted checkpoint contains. It is recorded in surface.txt.

test_package.py checks that every line of the record is still true. New names and methods may be missing there. After a
change that is meant, `python tests/surface.py` records everything again; the changelog says what users have to change.
"""

import inspect
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from transformers import PreTrainedConfig
from typer.main import get_command

import hf_efficient_attn as hea
from hf_efficient_attn import cli, hub
from hf_efficient_attn.checkpoint.loading import quiet
from hf_efficient_attn.conversion.checkpoint import convert_saved_model
from hf_efficient_attn.models import biggan, t2t_vit
from hf_efficient_attn.ops import attend
from tiny_models import tiny_model

FILE = Path(__file__).with_suffix(".txt")
# Public modules, and the names in them that are public if they are not all that the module exports.
MODULES = {
    hea: "",
    hea.functional: "",
    hea.analysis: "",
    hea.kernel: "",
    hub: "plan_push push write_card PushPlan PushReport",
    biggan: "BigGANConfig BigGANModel truncated_noise class_indices",
    t2t_vit: "T2TViTConfig T2TViTForImageClassification T2TViTModel convert_checkpoint convert_state_dict",
    hea.methods: "option AttentionOptions Recurrence HiddenProjections ShardedForm",
    attend: "Partial merge attend",
}


def signature(call: Any) -> str:
    """The arguments of a function or class with their defaults, without annotations, whose text depends on Python."""
    if isinstance(call, type) and issubclass(call, Exception):
        return ""
    found = inspect.signature(call)
    # A config of a model has all arguments of Transformers' configs as well.
    is_config = isinstance(call, type) and issubclass(call, PreTrainedConfig)
    others = inspect.signature(PreTrainedConfig).parameters if is_config else ()
    parameters = [x.replace(annotation=x.empty) for name, x in found.parameters.items() if name not in others]
    return str(found.replace(parameters=parameters, return_annotation=found.empty))


def is_ours(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith("hf_efficient_attn")


def members(kind: type) -> Iterator[str]:
    """The public methods and properties of a class. A method's config has the ones of `MethodConfig`."""
    if issubclass(kind, hea.MethodConfig) and kind is not hea.MethodConfig:
        return
    found = {name: x for one in reversed(kind.__mro__) if is_ours(one) for name, x in vars(one).items()}
    for name, member in sorted(found.items()):
        function = inspect.unwrap(getattr(member, "__func__", member))
        if not name.startswith("_") and (inspect.isfunction(function) or isinstance(member, property)):
            yield name + (signature(function) if inspect.isfunction(function) else "")


def names() -> Iterator[str]:
    """Public functions, and classes with their public methods and properties."""
    for module, listed in MODULES.items():
        for name in listed.split() or sorted(getattr(module, "__all__", dir(module))):
            thing = getattr(module, name)
            path = f"{module.__name__}.{name}"
            if name.startswith("_") or not is_ours(thing):
                continue
            yield path + signature(thing)
            if isinstance(thing, type):
                yield from (f"{path}.{member}" for member in members(thing))


def commands() -> Iterator[str]:
    for name, command in sorted(get_command(cli.app).commands.items()):
        arguments = [x.opts[0] if x.opts[0].startswith("-") else str(x.name).upper() for x in command.params]
        yield f"hf-efficient-attn {name} " + " ".join(arguments)


def saved() -> Iterator[str]:
    """What `save_pretrained` writes of a BERT with each method, and the files of a converted checkpoint."""
    choices: dict[str, dict[str, Any]] = {name: {"method": name} for name in hea.available_methods()}
    choices |= {
        "learned linear": {"method": "linear", "feature_map": "hedgehog", "window_size": 64},
        "learned eva": {"method": "eva", "proposal": "learned"},
        "learned nystromformer": {"method": "nystromformer", "conv_kernel_size": 3},
        "two methods": {"layers": [{"layers": [0], "method": "longformer"}, {"layers": [1], "method": "eva"}]},
    }
    with tempfile.TemporaryDirectory() as folder, quiet():
        out, source = Path(folder, "out"), Path(folder, "source")
        for title, choice in choices.items():
            hea.convert(tiny_model("bert"), choice).save_pretrained(out)
            config = json.loads((out / "config.json").read_text(encoding="utf-8"))
            for key in ("attn_implementation", "efficient_attention"):
                yield f"{title}: {key}: {json.dumps(config[key])}"
            for name, x in load_file(out / "model.safetensors").items():
                if "encoder.layer.1" in name and "learned" in name:
                    yield f"{title}: {name} {tuple(x.shape)} {x.dtype}"
        tiny_model("bert").save_pretrained(source)
        done = convert_saved_model(source, Path(folder, "converted"), "linformer")
        yield "files: " + " ".join(sorted(file["name"] for file in done["files"]))
        origin = json.loads(Path(folder, "converted", "efficient_attention.json").read_text(encoding="utf-8"))
        yield "efficient_attention.json: " + " ".join(sorted(origin))


def surface() -> str:
    parts = {"Public names": names(), "Commands": commands(), "Saved files": saved()}
    return "\n\n".join("\n".join([f"# {title}", *lines]) for title, lines in parts.items()) + "\n"


if __name__ == "__main__":
    FILE.write_text(surface(), encoding="utf-8")
