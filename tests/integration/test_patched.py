"""Models that compute their attention themselves, and whose modules get another class with a method.

`test_model_types` compares them with exact attention.
"""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import BloomConfig, BloomForCausalLM

import hf_efficient_attn as hea
from each import refuses
from helpers.model_types import case, mask_of, outputs
from hf_efficient_attn.integration import patched
from hf_efficient_attn.integration.model_kinds import kind_of
from hf_efficient_attn.standalone.export import kernel_implementation
from tiny_models import reloaded

NAMES = ("MPNet", "RoFormer", "MegatronBert", "RemBert", "Tapas", "Lilt", "Bloom")
SMALL = hea.LongformerConfig(window_size=3)


def model_of(name: str):
    """A tiny model with attention that depends on the tokens and on the bias, and inputs with padding."""
    torch.manual_seed(0)
    model_class, config, inputs = case(name, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    model = model_class(config).eval()
    for part, parameter in model.named_parameters():
        if "relative" in part or parameter.ndim > 1:
            nn.init.normal_(parameter, std=1.5 if "relative" in part else 0.3)
    return model, inputs


def difference(one: dict, other: dict, mask: torch.Tensor) -> float:
    return max(float((one[key] - other[key])[mask.bool()].abs().max()) for key in one if one[key].ndim == 3)


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def test_the_table_names_the_classes():
    found = {x for x in vars(patched).values() if isinstance(x, type) and x.__module__ == patched.__name__}
    kinds = [kind_of(kind) for kind in found if not kind.__name__.startswith("_")]
    assert all(kind.is_patched or kind.like_bert_in for kind in kinds)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_changes_and_comes_back(name):
    model, inputs = model_of(name)
    expected, before = outputs(model, inputs), classes(model)
    hea.convert(model, SMALL)
    assert classes(model) != before
    small = outputs(model, inputs)
    assert difference(small, expected, inputs["attention_mask"]) > 1e-2
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert difference(outputs(copied, inputs), small, inputs["attention_mask"]) == 0
    hea.convert(model, SMALL, layers=[1])
    assert difference(outputs(model, inputs), small, inputs["attention_mask"]) > 1e-3
    hea.convert(model, "eager")
    assert difference(outputs(model, inputs), expected, inputs["attention_mask"]) == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_small_window_equals_a_mask(name):
    """The reference is the model's own attention with a dense mask (B, 1, N, N) of the window."""
    model, inputs = model_of(name)
    position = torch.arange(40)
    distance = position - position[:, None]
    near = (distance.abs() <= 3) if name != "Bloom" else (distance <= 0) & (distance > -4)
    dense = torch.where(near & inputs["attention_mask"].bool()[:, None, None], 0.0, torch.finfo(torch.float32).min)
    kind = "BloomAttention" if name == "Bloom" else f"{name}SelfAttention"
    modules = [module for module in model.modules() if type(module).__name__ == kind]
    hooks = [module.register_forward_pre_hook(_with_mask(module, dense), with_kwargs=True) for module in modules]
    expected = outputs(model, inputs)
    for hook in hooks:
        hook.remove()
    assert difference(outputs(hea.convert(model, SMALL), inputs), expected, inputs["attention_mask"]) < 1e-4


def _with_mask(module: nn.Module, mask: torch.Tensor):
    """A hook that replaces the mask, the argument after the inputs, by another one."""
    index = 2 if "layout_query" in module._modules else 1

    def hook(module, args, kwargs):
        if "attention_mask" in kwargs:
            return args, {**kwargs, "attention_mask": mask}
        return (*args[:index], mask, *args[index + 1 :]), kwargs

    return hook


def test_a_refused_switch_and_a_measurement_leave_the_classes():
    model, inputs = model_of("MPNet")
    before, expected = classes(model), outputs(model, inputs)
    refuses(r"bias of relative .*linear cannot keep.*'eager'", hea.convert, model, "linear")
    assert classes(model) == before
    settings = hea.calibrate(model, [inputs], max_error=9.0, methods=["longformer"], budgets=[17])
    assert classes(model) == before and not any("config" in vars(m) for m in model.modules() if "Self" in str(type(m)))
    assert hea.attention_error(hea.convert(model, settings), inputs, num_rows=None).max() > 0.01
    hea.convert(model, "sdpa")  # which such models do not support
    assert model.config._attn_implementation == "eager"
    assert difference(outputs(model, inputs), expected, inputs["attention_mask"]) == 0


def test_the_bias_of_mpnet_is_trained_and_saved(tmp_path):
    model, inputs = model_of("MPNet")
    hea.convert(model, hea.NearFarConfig(block_size=8, num_samples=6, num_probes=12))
    model.train()(**inputs).last_hidden_state.square().sum().backward()
    assert model.encoder.relative_attention_bias.weight.grad.abs().max() > 0
    expected = outputs(model.eval(), inputs)
    again = reloaded(model, tmp_path)
    assert again.config._attn_implementation == "nearfar"
    assert difference(outputs(again, inputs), expected, inputs["attention_mask"]) == 0
    refuses("computes its attention itself", kernel_implementation, model, "org/nearfar")


def test_both_streams_of_lilt_learn_and_attend():
    model, inputs = model_of("Lilt")
    hea.convert(model, "flurka_linear", layers=[1])
    found, boxes = outputs(model, inputs), torch.randint(0, 30, (2, 40, 1)).expand(-1, -1, 4)
    assert difference(outputs(model, {**inputs, "bbox": boxes}), found, inputs["attention_mask"]) > 1e-2
    model.train()(**inputs).last_hidden_state.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if "layer.1.attention.self" in name}
    assert all(x is not None for x in gradients.values()) and any("learned" in name for name in gradients)


def test_decoders_keep_their_class():
    model, _ = model_of("RoFormer")
    decoder = type(model)(type(model.config)(**{**model.config.to_diff_dict(), "is_decoder": True}))
    refuses("does not compute its attention through", hea.convert, decoder, "longformer")


@pytest.mark.parametrize("side", ["left", "right"])
def test_bloom_generates_in_a_window(side):
    torch.manual_seed(0)
    config = BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=60, pad_token_id=1, eos_token_id=2)
    model = hea.convert(BloomForCausalLM(config).eval(), "longformer", window_size=6)
    ids = torch.randint(5, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    mask = mask_of(ids) if side == "right" else mask_of(ids).flip(1)
    options = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8}
    if side == "right":
        for name in (None, "static"):
            options |= {"input_ids": ids, "attention_mask": mask, "cache_implementation": name}
            refuses("pad all sequences on the same side", model.generate, **options)
        return
    for beams in (1, 3):
        found = model.generate(input_ids=ids, attention_mask=mask, num_beams=beams, **options)
        again = model.generate(input_ids=ids, attention_mask=mask, num_beams=beams, use_cache=False, **options)
        alone = model.generate(input_ids=ids[:1, 5:], num_beams=beams, **options)
        static = model.generate(
            input_ids=ids, attention_mask=mask, num_beams=beams, cache_implementation="static", **options
        )
        assert torch.equal(found, again) and torch.equal(found, static) and torch.equal(found[:1, 20:], alone[:, 15:])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_compiled(name):
    torch.compiler.reset()
    model, inputs = model_of(name)
    hea.convert(model, SMALL)
    expected = outputs(model, inputs)
    found = outputs(torch.compile(model, fullgraph=True, backend="aot_eager"), inputs)
    assert difference(found, expected, inputs["attention_mask"]) < 1e-4
