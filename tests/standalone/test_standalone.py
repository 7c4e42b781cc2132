"""Kernel repositories and remote code: checkpoints that load without this package."""

import ast
import base64
import hashlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoModel, AutoModelForMaskedLM, CLIPConfig, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.utils.import_utils import is_kernels_available

import converted
import hf_efficient_attn as hea
from each import refuses
from helpers.commands import run_json
from helpers.model_types import case
from hf_efficient_attn.conversion.checkpoint import convert_saved_model
from hf_efficient_attn.standalone import export
from hf_efficient_attn.standalone.export import BACKENDS, MODULE, export_kernel, kernel_methods, remote_code
from hf_efficient_attn.standalone.function import kernel_function
from tiny_models import SMALL, output, tiny_batch, tiny_config, tiny_model

KERNELS = [method for method in kernel_methods() if method in SMALL]


def imported(name, file):
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(folder):
    """Import a build as the kernels library does, and make it known to Transformers -> (module, implementation)."""
    name = json.loads((folder / "metadata.json").read_text())["id"]
    module = imported(name, folder / "__init__.py")
    AttentionInterface.register(name, module.flash_attn_forward)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    return module, name


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """The build for CPUs of a method's repository, imported -> (module, implementation)."""
    made = {}

    def get(method):
        if method not in made:
            folder = tmp_path_factory.mktemp(method) / "ops"  # a name that modules have, too
            export_kernel(method, folder)
            made[method] = load(folder / "build" / "torch-cpu")
        return made[method]

    return get


def same_model(model, implementation):
    """A model with the same weights and config as `model`, which Transformers knows by another implementation."""
    other = type(model)(tiny_config(model.config.model_type)).eval()
    other.load_state_dict(model.state_dict())
    other.config.efficient_attention = dict(model.config.efficient_attention)
    other.set_attn_implementation(implementation)
    return other


@pytest.mark.parametrize("method", KERNELS)
def test_a_kernel_computes_what_the_package_does(method, repository):
    module, name = repository(method)
    assert module.__name__ == name and getattr(module, method).__module__.startswith(name)
    model = tiny_model("bert", method)
    for padding in ("none", "left"):
        inputs = tiny_batch("bert", padding=padding)
        assert torch.equal(output(same_model(model, name), inputs), output(model, inputs))


@pytest.mark.skipif(not is_kernels_available(), reason="pip install 'transformers[kernels]'")
def test_transformers_loads_a_kernel(tmp_path, monkeypatch):
    export_kernel("kdeformer", tmp_path / "kernel")
    monkeypatch.setenv("LOCAL_KERNELS", f"org/kernel={tmp_path / 'kernel'}")
    model, inputs = tiny_model("bert", "kdeformer"), tiny_batch("bert", padding="right")
    model.save_pretrained(tmp_path / "model")
    name = "org/kernel:kdeformer"
    other = AutoModel.from_pretrained(tmp_path / "model", attn_implementation=name, allow_all_kernels=True)
    assert other.config._attn_implementation == name and torch.equal(other(**inputs)[0], model(**inputs)[0])


@pytest.mark.parametrize("has_package", [True, False])
def test_a_saved_copy_names_its_kernel(has_package, repository, tmp_path, monkeypatch):
    module, _ = repository("nearfar")
    to_dict = PreTrainedConfig.to_dict
    monkeypatch.setattr(PreTrainedConfig, "to_dict", to_dict if has_package else inspect.unwrap(to_dict))
    if not has_package:
        monkeypatch.delattr(PreTrainedConfig, "efficient_attention")
    imported(module.__name__, module.__file__)  # as Transformers does when it loads the model
    config, name = tiny_config("bert"), "org/nearfar:nearfar"
    config.efficient_attention = {"method": "nearfar", "layers": [1], **SMALL["nearfar"]}
    for implementation, expected in [(name, name), ("sdpa", None), ("org/other:other", None)]:
        config._attn_implementation = implementation
        config.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        assert saved.get("attn_implementation") == expected
        assert saved["efficient_attention"]["layers"] == [1] if expected else True
    composite = CLIPConfig()
    composite._attn_implementation = {"text_config": name}
    assert json.loads(composite.to_json_string())["attn_implementation"] == {"text_config": name}


@pytest.mark.parametrize("method", ["nearfar", "longformer", "linear"])
def test_a_kernel_generates_the_same_text(method, repository):
    model = tiny_model("gpt2", method, head=True)
    other = same_model(model, repository(method)[1])
    inputs = tiny_batch("gpt2", length=60, padding="left")
    expected, text = (one.generate(**inputs, max_new_tokens=8, do_sample=False) for one in (model, other))
    assert torch.equal(text, expected)


def test_a_kernel_keeps_other_layers_exact_and_trains(repository):
    _, name = repository("nearfar")
    model = hea.convert(tiny_model("bert"), "nearfar", layers=[1], **SMALL["nearfar"])
    other, inputs = same_model(model, name), tiny_batch("bert", padding="right")
    out, expected = other(**inputs)[0], model(**inputs)[0]
    assert torch.equal(out, expected)
    weights = [one.encoder.layer[0].attention.self.query.weight for one in (model, other)]
    grads = [torch.autograd.grad(x.square().sum(), w)[0] for x, w in zip((expected, out), weights, strict=True)]
    torch.testing.assert_close(*grads)


def test_a_kernel_in_a_compiled_model(repository):
    model = same_model(tiny_model("bert", "nystromformer"), repository("nystromformer")[1])
    inputs, compiled = tiny_batch("bert"), torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(output(compiled, inputs), output(model, inputs))


def test_kernels_import_pytorch_only():
    allowed = {*sys.stdlib_module_names, "torch", "triton"}  # triton only in a function, for tensors on a GPU
    modules = ["standalone.function", *map(export.methods_of_package().get, KERNELS)]
    for path, text in export.modules_of(modules, without_imports=["integration"]).items():
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in names} <= {*allowed, "hf_efficient_attn"}, path
    assert "hf_efficient_attn import" not in "".join(export.kernel_files("kdeformer").values())


def test_layout_of_a_repository(tmp_path, capsys):
    folder = tmp_path / "far"
    done = run_json(capsys, "export-kernel", "wildcat", "--repo", "org/my_wildcat", "-o", folder)
    assert done["function"] == "org/my_wildcat:wildcat"
    build = pytest.importorskip("tomllib").loads((folder / "build.toml").read_text())
    assert build["general"] == {
        "name": "my-wildcat", "version": 1, "edition": 5, "license": "Apache-2.0", "backends": list(BACKENDS),
        "hub": {"repo-id": "org/my_wildcat"},
    } and build["torch-noarch"] == {}  # fmt: skip
    names = set()
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        metadata = json.loads((variant / "metadata.json").read_text())
        names.add(metadata["id"])
        assert metadata["name"] == "my-wildcat" and metadata["backend"] == {"type": backend}
        assert metadata["digest"]["files"] == {
            path.relative_to(variant).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
            for path in variant.rglob("*")
            if path.is_file() and path.name != "metadata.json"
        }
    assert len(names) == len(BACKENDS) and all(name.isidentifier() for name in names)
    assert (folder / "torch-ext" / "my_wildcat" / "_modules" / "methods" / "wildcat.py").is_file()
    assert 'attn_implementation="org/my_wildcat:wildcat"' in (folder / "README.md").read_text()
    # Early versions of the library import the inner folder.
    module = imported("my_wildcat", folder / "build" / "torch-cpu" / "my_wildcat" / "__init__.py")
    assert module.__all__ == ["attention", "flash_attn_forward", "wildcat"] and callable(module.wildcat)


def test_a_repository_is_not_named_after_another_method(tmp_path):
    refuses("says nearfar, and the repository gets kdeformer", export_kernel, "kdeformer", tmp_path / "nearfar-kernel")
    assert not any(tmp_path.iterdir())
    name = "org/linear-time.approx_kmv"  # one of them is enough
    assert export_kernel("approx_kmv", tmp_path / "out", repo_id=name)["function"] == f"{name}:approx_kmv"


@pytest.mark.parametrize("method", [m for m in hea.available_methods() if m not in kernel_methods()])
def test_methods_that_learn_have_no_kernel(method, tmp_path):
    message = rf"without learned parameters \(.*nearfar.*convert --method {method} --remote-code"
    refuses(message, export_kernel, method, tmp_path / "kernel")
    assert not (tmp_path / "kernel").exists()


def call(method="longformer", mask=None, config=None, layer_idx=0, num_empty=0, **kwargs):
    module = nn.Module()
    module.config, module.layer_idx, module.is_causal = SimpleNamespace(**(config or {})), layer_idx, True
    query = torch.randn(1, 2, 40, 8)
    key = nn.functional.pad(query, (0, 0, 0, num_empty))
    return kernel_function(method)(module, query, key, key, mask, **kwargs)[0]


def chosen(**values):
    return {"config": {"efficient_attention": values}}


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("nystromformer", {}, "no causal form"),
        ("longformer", {"mask": torch.ones(1, 1, 40, 40)}, r"shape \(1, 1, 40, 40\)"),
        ("longformer", {"sliding_window": 8}, "'sliding_window'"),
        ("longformer", {"softcap": 30.0}, "'softcap'"),
        ("longformer", {"output_attentions": True}, "'output_attentions'"),
        ("longformer", {"position_bias": torch.zeros(1, 2, 40, 40)}, "'position_bias'"),
        ("longformer", {"cu_seq_lens_q": torch.tensor([0, 20, 40])}, "'cu_seq_lens_q'"),
        ("longformer", {"position_ids": torch.arange(40)[None] % 20}, "packed sequences"),
        ("longformer", {"num_empty": 8}, "static cache"),  # of a model that hands no positions on
        ("longformer", {"config": {"is_encoder_decoder": True}}, "cross attention"),
        ("longformer", chosen(method="nearfar"), "chooses nearfar"),
        ("longformer", {**chosen(layers=[1]), "layer_idx": None}, "does not know which one"),
        ("longformer", chosen(layers=["encoder"]), "does not know which one"),
        ("linear", chosen(feature_map="hedgehog"), "query_map None"),
        ("longformer", chosen(window=3), "unknown key"),
    ],
)
def test_a_kernel_refuses_what_it_would_lose(method, arguments, message):
    refuses(message, call, method, **arguments)


def test_arguments_that_a_kernel_ignores():
    positions = torch.arange(40)[None]
    out = call(position_ids=positions, sliding_window=None, use_cache=True, labels=positions, softcap=None)
    assert out.shape == (1, 40, 2, 8)
    assert call(position_ids=positions % 20, mask=torch.ones(1, 40)).shape == out.shape  # left padding does this


# Without this package: neither on the path of the process, nor by the finder of an editable installation.
LOAD = """
import importlib.util, inspect, sys
root, *folders = sys.argv[1:]
sys.path[:] = [path for path in sys.path if path not in ("", root)]
sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", type(f).__module__)]
if importlib.util.find_spec("hf_efficient_attn") is not None:
    print("installed")
    sys.exit()
import torch
from transformers import AutoModelForMaskedLM
try:
    AutoModelForMaskedLM.from_pretrained(folders[0])
except ValueError as error:
    print(error)
for folder in folders:
    inputs, expected = torch.load(folder + "/expected.pt")
    model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules.")
    assert torch.equal(model(**inputs)[0], expected), folder
    model(**inputs)[0].square().sum().backward()
    learned = [p for name, p in model.named_parameters() if "learned_parameters" in name]
    assert learned and all(p.grad is not None for p in learned)
    assert inspect.getsource(sys.modules["hf_efficient_attn.errors"].clean)  # models.passes_sinks asks for it
    model.save_pretrained(folder + "-again")
    again = AutoModelForMaskedLM.from_pretrained(folder + "-again", trust_remote_code=True)
    assert torch.equal(again(**inputs)[0], expected), folder
"""


def test_remote_code_loads_without_the_package(tmp_path):
    folders = []
    for method, values in {"linear": {"feature_map": "hedgehog"}, "flurka_eva": SMALL["flurka_eva"]}.items():
        source, folder = tmp_path / f"{method}-source", tmp_path / method
        converted.make(source, head=True)
        convert_saved_model(source, folder, method, hyperparameters=values, has_code=True)
        inputs = tiny_batch("bert", padding="right")
        expected = output(AutoModelForMaskedLM.from_pretrained(folder).eval(), inputs)
        torch.save((inputs, expected), folder / "expected.pt")
        folders.append(str(folder))
    command = [sys.executable, "-c", LOAD, os.path.dirname(os.path.dirname(hea.__file__)), *folders]
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": ""}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    if ended.stdout == "installed\n":
        pytest.skip("this package is in the environment's site-packages, so that it cannot be hidden")
    assert 'attn_implementation="linear"' in ended.stdout  # refused without trust_remote_code


@pytest.mark.parametrize("name", ["Bert", "Dinov2"])  # files of DINOv2 have other names than its parameters
def test_remote_code_uses_the_installed_package(name, tmp_path, monkeypatch):
    """The file defines classes only, and their attention is this package's."""
    folder, (model_class, config, inputs) = tmp_path / "converted", case(name)
    model_class(config).save_pretrained(tmp_path / "source")
    done = convert_saved_model(tmp_path / "source", folder, "nearfar", hyperparameters=SMALL["nearfar"], has_code=True)
    assert "AutoModel" in done["load"] and "trust_remote_code=True" in done["load"]
    assert "trust_remote_code=True" in (folder / "README.md").read_text()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    finders, expected = [*sys.meta_path], output(AutoModel.from_pretrained(folder), inputs)
    for _ in range(2):
        model = AutoModel.from_pretrained(folder, trust_remote_code=True)
        assert type(model).__name__ == f"{name}Model" and sys.meta_path == finders
        assert torch.equal(output(model, inputs), expected)
        folder = tmp_path / "again"
        model.save_pretrained(folder)


def test_a_converted_checkpoint_names_its_kernel(tmp_path):
    converted.make(tmp_path / "source", head=True)
    folder, again = tmp_path / "converted", tmp_path / "again"
    values = {"hyperparameters": SMALL["nearfar"], "layers": [1]}
    done = convert_saved_model(tmp_path / "source", folder, "nearfar", kernel="org/nearfar", **values)
    config = json.loads((folder / "config.json").read_text())
    assert config["attn_implementation"] == "org/nearfar:nearfar"
    assert config["efficient_attention"]["layers"] == [1]
    assert done["load"].endswith("allow_all_kernels=True)") and "import hf_efficient_attn" not in done["load"]
    card = (folder / "README.md").read_text()
    assert "allow_all_kernels=True" in card and "huggingface.co/org/nearfar)" in card
    # With the package: by the method's name, and as a source of another conversion.
    assert AutoModel.from_pretrained(folder, attn_implementation="nearfar").config.efficient_attention["layers"] == [1]
    convert_saved_model(folder, again, "nearfar")
    assert json.loads((again / "config.json").read_text())["attn_implementation"] == "nearfar"


@pytest.mark.parametrize(
    ("method", "values", "message"),
    [
        ("sdpa", {}, "the attention is exact"),
        ("flurka_eva", {}, "it can have these methods only"),
        ("linear", {"hyperparameters": {"feature_map": "hedgehog"}}, "learned parameters"),
        ("nearfar", {"layers": ["encoder.layer.0"]}, "must be numbers"),
        ("nearfar", {"layers": [0]}, "modules do not say which layer they are"),
        ("nearfar", {"kernel": "not an id"}, "cannot be the id"),
        ("kdeformer", {"kernel": "org/My_nearfar-kernel"}, "says nearfar, and this model has kdeformer"),
    ],
)
def test_checkpoints_that_no_kernel_can_serve(method, values, message, tmp_path):
    family = "vit" if "do not say" in message else "bert"
    tiny_model(family).save_pretrained(tmp_path / "source")
    values = {"kernel": "org/name", **values}
    refuses(message, convert_saved_model, tmp_path / "source", tmp_path / "converted", method, **values)
    assert not (tmp_path / "converted").exists()


def test_remote_code_needs_a_model_of_transformers():
    refuses("leave out --remote-code", remote_code, hea.models.BigGANConfig())
    teacher = tiny_config("deit", "kdeformer", architectures=["DeiTForImageClassificationWithTeacher"])
    refuses("no auto class of Transformers loads DeiTForImageClassificationWithTeacher", remote_code, teacher)
    text, auto_map = remote_code(tiny_config("vit", "kdeformer"))
    assert auto_map["AutoModelForImageClassification"] == f"{MODULE}.ViTForImageClassification"
    assert max(map(len, text.splitlines())) < 300  # a line for each line of the modules
