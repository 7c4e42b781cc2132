"""Guards: sizes of package and files, where it asks for devices and compilation, and imports of tests."""

import ast
import re
from pathlib import Path

import pytest

import hf_efficient_attn as hea

ROOT = Path(hea.__file__).parent
# Guards against copies. The aim for the package is 30,000 lines. The kernels for GPUs are above it, until what they
# replace is cut.
GUARDS = {".": 32_150, "../recipes": 10_000, "../tests": 25_000}
# What reads the kind of a device, and which files may.
DEVICE = re.compile(r"\bbackend\(|\bdevice\.type\b|\.is_cuda\b")
# Not a question: autocast and the state of random numbers take the name of the device.
NAME_ONLY = re.compile(r"autocast(_enabled)?\([^)\n]*\bdevice\.type\b|device_type=[\w.]*device\.type\b")
# What makes numbers of the default dtype unless it gets one.
MAKES_NUMBERS = {"zeros", "ones", "eye", "rand", "randn", "linspace", "logspace"}
# crossover.py chooses lengths; call.py and projections.py switch autocast off for a device
# that they name first.
MAY_ASK = {"attend.py", "slices.py", "crossover.py", "call.py", "projections.py"}


def texts(*folders: str) -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for name in folders for path in (ROOT / name).rglob("*.py")}


def count(text: str) -> int:
    return len(text.splitlines())


@pytest.mark.parametrize("folder", GUARDS)
def test_lines_of_a_folder(folder):
    assert sum(map(count, texts(folder).values())) <= GUARDS[folder]


def test_lines_of_a_file():
    long = {}
    for path, text in texts(".").items():
        if count(text) > (200 if path.parent.name == "methods" else 400):
            long[path.name] = count(text)
    assert not long, "a file of methods/ has at most 200 lines, other files at most 400"


def test_a_device_chooses_slices_kernels_and_lengths_only():
    above = {path: text for path, text in texts("ops", "methods").items() if path.parent.name != "backends"}
    assert {path.name for path, text in above.items() if DEVICE.search(NAME_ONLY.sub("", text))} <= MAY_ASK


def test_one_module_asks_whether_a_call_is_compiled():
    assert [path.name for path, text in texts(".").items() if "is_compiling(" in text] == ["tracing.py"]


def test_gradients_are_those_of_autograd():
    assert "".join(texts("ops", "methods").values()).count("autograd.Function)") <= 5
    assert "".join(texts(".").values()).count("custom_op(") <= 3


def test_new_tensors_name_their_dtype():
    """Otherwise they depend on `torch.set_default_dtype`. Parameters of a model may: Transformers loads by it."""
    unnamed = []
    for path, text in texts(".").items():
        for call in ast.walk(ast.parse(text)) if "models" not in path.parts else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func).removeprefix("torch.") in MAKES_NUMBERS:
                unnamed += [f"{path.name}:{call.lineno}"] * all(word.arg != "dtype" for word in call.keywords)
    assert not unnamed


def test_new_tensors_name_their_device():
    """Otherwise they are on the CPU, where no test without an accelerator notices it."""
    makes = MAKES_NUMBERS | {"full", "arange", "empty", "tensor", "randint", "randperm"}
    # Tables and parameters that a model starts from, which it moves, and what is no operand.
    exempt = {"projections.py", "slices.py", "tracing.py"}
    unnamed = []
    for path, text in texts("ops", "methods").items():
        tree = ast.parse(text)
        start = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef) and x.name == "initial_parameters"]
        moved = {id(x) for function in start for x in ast.walk(function)}
        for call in ast.walk(tree) if path.name not in exempt else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func) in {f"torch.{name}" for name in makes}:
                is_number = ast.unparse(call.func) == "torch.tensor" and isinstance(call.args[0], ast.Name)
                named = any(word.arg in ("device", "out") for word in call.keywords)
                unnamed += [f"{path.name}:{call.lineno}"] * (not named and not is_number and id(call) not in moved)
    assert not unnamed


def test_a_test_file_imports_no_other():
    """What several of them need is in `tests/helpers`."""
    found = set()
    for path, text in texts("../tests").items():
        for node in ast.walk(ast.parse(text)):
            names = [name.name for name in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            modules = [node.module or "", *names] if isinstance(node, ast.ImportFrom) else names
            found |= {f"{path.name}: {name}" for name in modules if name.rpartition(".")[2].startswith("test_")}
    assert not found, "move what they share to a module of tests/helpers"
