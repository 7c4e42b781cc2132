"""A sample of Transformers' model types with tiny configurations: what works with each method, and what is refused.

docs/compatibility.md lists all model types.
"""

import pytest
import torch
from transformers import set_seed

from helpers.model_types import DECODER, HEADS, PAIR, REFUSALS, SAMPLE, TEXT, WORKS_AFTER_ALL, case, outputs
from hf_efficient_attn.errors import UnsupportedAttentionError
from tiny_models import reloaded


def distance(found, expected, kept=None):
    """The largest difference at positions that are kept, relative to the largest expected value of its tensor."""
    both = ((found[key], expected[key]) for key in expected)
    pairs = ([x[kept] if kept is not None and x.shape[:2] == kept.shape else x for x in pair] for pair in both)
    return max((float((one - two).abs().max() / two.abs().max().clamp(min=1e-6)) for one, two in pairs), default=0.0)


def without_influence(exact, inputs, expected):
    """Inputs with changed tokens, and the outputs and positions that do not change by them with exact attention."""
    ids, valid = inputs["input_ids"], inputs["attention_mask"].bool()
    last = torch.arange(ids.shape[1]) == ids.shape[1] - 1
    changes = {"padding": (ids.where(valid, ids.roll(1, 1)), valid)}
    changes["future"] = (ids.where(~last, ids[:, :1]), valid & ~last)
    for name, (changed, kept) in changes.items():
        changed = {**inputs, "input_ids": changed}
        found = outputs(exact, changed)
        same = [key for key, x in expected.items() if distance(found, {key: x}, kept) == 0]
        if same:
            yield name, changed, same, kept


@pytest.mark.filterwarnings("ignore:.*cross attention stays exact")
@pytest.mark.parametrize("method", ["kdeformer", "nearfar", "linear", "longformer"])
@pytest.mark.parametrize("name", SAMPLE)
def test_model_types(name, method, tmp_path, calls):
    """All methods but linear are within their budgets, and equal exact attention. For all, padding and future have no
    influence, a saved model uses the method again, and a cache generates what no cache generates."""
    kind, (model_class, config, inputs) = SAMPLE[name], case(name)
    set_seed(0)
    model_class(config).save_pretrained(tmp_path / "exact")
    if name in REFUSALS and (name, method) not in WORKS_AFTER_ALL:
        with pytest.raises(Exception, match=REFUSALS[name]) as refused:
            outputs(model_class.from_pretrained(tmp_path / "exact", attn_implementation=method), inputs)
        # Transformers turns some errors of loading into its own, with ours as the cause.
        chain = (refused.value, refused.value.__cause__, refused.value.__context__)
        assert any(isinstance(error, UnsupportedAttentionError) for error in chain)
        return
    exact = model_class.from_pretrained(tmp_path / "exact").eval()
    model = model_class.from_pretrained(tmp_path / "exact", attn_implementation=method).eval()
    valid = inputs["attention_mask"].bool() if "attention_mask" in inputs else None
    expected = outputs(exact, inputs)
    assert not calls
    found = outputs(model, inputs)
    uses_state = method == "linear" and kind == DECODER  # whose cache computes the attention
    assert (calls or uses_state) and found.keys() == expected.keys()
    if method == "linear":
        assert all(x.isfinite().all() for x in found.values()) and distance(found, expected, valid) > 1e-5
    else:
        assert distance(found, expected, valid) <= 1e-4

    checked = set()
    for what, changed, same, kept in without_influence(exact, inputs, expected) if "input_ids" in inputs else ():
        assert distance(outputs(model, changed), {key: found[key] for key in same}, kept) <= 1e-4, what
        checked.add(what)
    assert ("padding" in checked) == (kind in (TEXT, DECODER, PAIR))
    assert ("future" in checked) >= (kind == DECODER)

    loaded = reloaded(model, tmp_path / "saved")
    calls.clear()
    assert distance(outputs(loaded, inputs), found, valid) <= 1e-6
    assert calls or uses_state
    if kind in HEADS:
        prompt = {key: x for key, x in inputs.items() if not key.startswith("decoder") and key != "attention_mask"}
        options = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4}
        one, more = (model, {"use_cache": False}) if method == "linear" else (exact, {})
        assert torch.equal(model.generate(**prompt, **options), one.generate(**prompt, **options, **more))
