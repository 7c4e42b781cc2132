"""What users see of a checkout, to compare two of them: names, help texts, configs, files and exit codes.

    python tests/surface.py > after.json                      # of this checkout
    git worktree add ../before TAG && cp tests/surface.py ../before/tests
    (cd ../before && python tests/surface.py > ../before.json)
    python tests/surface.py --compare ../before.json after.json

The comparison prints a unified diff for each entry that differs, and exits with 1 if there is one.
"""

import argparse
import difflib
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
MODULES = ("", ".analysis", ".kernel", ".training", ".hub", ".models", ".models.biggan", ".models.t2t_vit")
COMMANDS = ("convert", "benchmark", "analyze", "distill", "push", "methods", "info", "crossover", "demo")
# Command lines that must be refused, and one that succeeds.
CALLS = (
    "", "--version", "nothing", "methods --json", "info nearfar", "info auto", "info nothing", "convert",
    "convert missing nearfar out", "convert . nearfar out", "benchmark missing", "benchmark missing --method nothing",
    "analyze missing", "push missing a/b", "distill missing hedgehog out", "crossover --device nothing",
    "demo --method nothing",
)  # fmt: skip


def run(*arguments: str) -> str:
    """The exit code and the text of a Python process, without paths, times and versions."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "TERM": "dumb", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)
    text = re.sub(r"/\S*/", "", done.stdout + done.stderr)
    return f"exit code {done.returncode}\n{text}"


def names() -> dict[str, str]:
    """Signatures and fields of all public names."""
    entries = {}
    for suffix in MODULES:
        module = importlib.import_module(f"hf_efficient_attn{suffix}")
        for name in getattr(module, "__all__", [x for x in dir(module) if not x.startswith("_")]):
            value = getattr(module, name)
            try:
                text = str(inspect.signature(value))
            except (TypeError, ValueError):
                text = "" if inspect.ismodule(value) else repr(value)
            entries[f"hf_efficient_attn{suffix}.{name}"] = re.sub(r"0x[0-9a-f]+|/\S*/", "", text)
    return entries


def files() -> dict[str, str]:
    """The files that `save_pretrained` and `push` write for every method, and the config in them."""
    import torch

    import hf_efficient_attn as hea
    from tiny_models import SMALL, tiny_model

    entries = {}
    for method in hea.available_methods():
        family = "gpt2" if hea.method_info(method).causal else "bert"
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            hea.convert(tiny_model(family), method, **SMALL[method]).save_pretrained(folder)
            config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
            names = sorted(path.name for path in Path(folder).iterdir())
        entries[f"saved {family} {method}"] = json.dumps([names, config], indent=1, sort_keys=True)
    return entries


def surface() -> dict[str, str]:
    command = ("-m", "hf_efficient_attn")
    entries = {**names(), **files()}
    entries |= {f"{name} --help": run(*command, name, "--help") for name in COMMANDS}
    entries |= {f"hf-efficient-attn {call}": run(*command, *call.split()) for call in CALLS}
    for path in sorted((ROOT / "recipes").rglob("*.py")):
        if "__main__" in path.read_text(encoding="utf-8") or path.name == "__main__.py":
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
            entries[f"{module} --help"] = run("-m", module, "--help")
    return entries


def compare(before: dict[str, str], after: dict[str, str]) -> bool:
    differs = False
    for name in sorted({*before, *after}):
        old, new = (x.get(name, "(missing)").splitlines() for x in (before, after))
        if old != new:
            differs = True
            print("\n".join(difflib.unified_diff(old, new, f"before: {name}", f"after: {name}", lineterm="", n=0)))
    return differs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    compared = parser.parse_args().compare
    if compared:
        return compare(*(json.loads(path.read_text(encoding="utf-8")) for path in compared))
    print(json.dumps(surface(), indent=1, sort_keys=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
