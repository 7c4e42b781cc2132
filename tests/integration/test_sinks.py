"""Attention sinks, as GPT-OSS has them: the methods that know their lse, caches and refusals.

test_transformers.py has layers that stay exact.
The promises compare the methods with their readable forms and, within the budget, with exact attention to one more key.
"""

import functools

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from each import refuses
from hf_efficient_attn.methods import methods_with
from instances import FIRST, WITH_SINKS, inputs, numbers, padding_mask
from tiny_models import SMALL, TEXT, decode, enlarged, generate, reloaded, tiny_batch
from tiny_models import output as logits

# Other layers of these models have a window.
pytestmark = pytest.mark.filterwarnings("ignore:.*stay exact")
EVERY = [(instance, is_causal) for instance in WITH_SINKS for is_causal in instance.forms]
EVERY += [(FIRST["nearfar"], False)]  # with more landmarks than near keys
each_form = pytest.mark.parametrize(("instance", "is_causal"), EVERY, ids=str)
CAUSAL = [instance.method for instance in WITH_SINKS if instance.info.causal]
EXACT = {name: {"columns": 64} if name == "auto" else {} for name in CAUSAL} | {"scatterbrain": {"block_size": 256}}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 8, **TEXT}
LAYERS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
RELATIVES = {"GptOss": EXPERTS, "GraniteSWA": {}, "GraniteMoeSWA": EXPERTS, "Flint": {}, "MiMoV2Flash": {}}


def model_with_sinks(name="GptOss"):
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"this version of Transformers has no {name}")
    torch.manual_seed(0)
    values = {**SIZES, **LAYERS, **RELATIVES[name], "num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{name}Config")(**values, **tokens, attn_implementation="eager")
    model = enlarged(transformers.AutoModelForCausalLM.from_config(config), 4.0)
    for parameter in sinks_of(model):
        torch.nn.init.uniform_(parameter, -1.0, 3.0)
    return model


def sinks_of(model):
    return [x for name, x in model.named_parameters() if name.endswith("sinks")]


@each_form
def test_a_sink_scales_the_output_by_the_sigmoid_of_the_lse_minus_the_sink(instance, is_causal):
    query, key, value = inputs(1, 3, 90, head_dim=6, dtype=torch.float64)
    key = key + 2.0  # methods that subtract the mean of the keys must add it to the lse again
    call = functools.partial(hea.attention, instance.config(), query, key, value, is_causal=is_causal)
    plain, (weak, strong) = call(), (call(sinks=numbers(3) + x) for x in (-1.0, 1.0))
    torch.testing.assert_close(call(sinks=torch.full((3,), -torch.inf, dtype=torch.float64)), plain)
    assert call(sinks=torch.full((3,), 1e5)).abs().max() == 0
    share = (weak * plain).sum(3, keepdim=True) / plain.square().sum(3, keepdim=True)
    lse = torch.logit(share) + (numbers(3) - 1.0)[:, None, None]
    torch.testing.assert_close(strong, plain * torch.sigmoid(lse - (numbers(3) + 1.0)[:, None, None]))
    if instance.method not in ("longformer", "scatterbrain"):  # which forget keys, or do not subtract their mean
        masked = torch.ones(90, 90, dtype=torch.bool).triu(1) & is_causal
        exact = (query @ key.mT * 6**-0.5).masked_fill(masked, -torch.inf).logsumexp(3, keepdim=True)
        assert (lse - exact).abs().mean() < 0.5 < (exact - 2 * 6**-0.5 * query.sum(3, keepdim=True) - lse).abs().mean()


@each_form
def test_gradients_of_sinks_agree_with_finite_differences(instance, is_causal):
    tensors, mask = inputs(2, 2, 60, dtype=torch.float64), padding_mask("left", 2, 60)
    call = functools.partial(hea.attention, instance.config(), *tensors, attention_mask=mask, is_causal=is_causal)
    assert torch.autograd.gradcheck(lambda sinks: call(sinks=sinks), (numbers(2).requires_grad_(),), fast_mode=True)


@each_form
def test_half_precision_keeps_the_lse_in_float32(instance, is_causal):
    """All keys are equal, so that no choice matters. In bfloat16 an lse of 104 would be off by up to .25."""
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        tensors = [torch.full((1, 2, 75, 4), x, dtype=dtype) for x in (5.0, 10.0, 1.0)]
        sinks = torch.tensor([103.0, 104.3])
        found.append(hea.attention(instance.config(), *tensors, is_causal=is_causal, sinks=sinks))
    torch.testing.assert_close(found[0].double(), found[1], rtol=0.01, atol=0.0)


MODELS = [*((name, "kdeformer") for name in RELATIVES), *(("GptOss", method) for method in CAUSAL)]


@pytest.mark.parametrize(("name", "method"), dict.fromkeys(MODELS))
def test_models_within_the_budget_equal_their_own_attention(name, method):
    model, found = model_with_sinks(name), []
    for convert in (lambda: model, lambda: hea.convert(model, method, **EXACT[method])):
        convert()
        for padding in ("none", "left"):
            inputs = tiny_batch("llama", padding=padding)
            keep = inputs.get("attention_mask", torch.ones(2, 70)).bool()
            out = model(**inputs).logits[keep]
            found.append((out.detach(), *torch.autograd.grad(out.logsumexp(-1).sum(), sinks_of(model))))
    assert len(found[0]) == 3 - (name == "MiMoV2Flash")  # whose other layers have no sinks
    for exact, ours in zip(found[:2], found[2:], strict=True):
        assert min(x.abs().max() for x in exact) > 1e-3
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", CAUSAL)
def test_caches_and_saved_models_keep_the_sinks(method, tmp_path):
    model, inputs = hea.convert(model_with_sinks(), method, **SMALL[method]), tiny_batch("llama", padding="left")
    ids, mask = inputs.values()
    new = generate(model, inputs, 8)
    assert torch.equal(generate(model, inputs, 8, cache_implementation="static", disable_compile=True), new)
    exact = hea.convert(model_with_sinks(), "longformer", window_size=99)  # as new tokens are decoded
    if hea.method_info(method).config_class.decodes_exactly:
        ours = decode(model, ids, (1,), mask=mask)
        torch.testing.assert_close(ours[mask.bool()], logits(exact, inputs)[mask.bool()], rtol=1e-4, atol=1e-4)
        for look_up in (False, True):
            within = decode(model, ids, range(20, 70), hea.NearFarCache(model.config, 80, look_up), mask)
            torch.testing.assert_close(within, decode(model, ids, range(20, 70), mask=mask), rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(reloaded(model, tmp_path), inputs), logits(model, inputs))
    assert hea.attention_error(exact, inputs).max() == 0 < hea.attention_error(model, inputs).max() < 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_and_dropout(reentrant):
    model, found = hea.convert(model_with_sinks(), "nearfar", **SMALL["nearfar"]).train(), []
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.2
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        torch.manual_seed(0)
        inputs = tiny_batch("llama", padding="left")
        model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
        found.append([x.grad.clone() for x in sinks_of(model)])
        model.zero_grad()
    assert min(x.abs().max() for x in found[0]) > 1e-4
    torch.testing.assert_close(found[1], found[0])


def test_graphs_and_transforms_have_the_gradients_of_sinks():
    tensors, sinks = inputs(2, 2, 60), torch.tensor([0.5, 2.0], requires_grad=True)

    def loss(sinks):
        out = hea.attention("nearfar", *tensors, is_causal=True, sinks=sinks, block_size=9, num_samples=9)
        return out.square().sum()

    expected = torch.autograd.grad(loss(sinks), sinks)[0]
    assert expected.abs().min() > 0.1
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(sinks), sinks)[0], expected)
    torch.testing.assert_close(torch.func.grad(loss)(sinks.detach()), expected)


def test_what_cannot_keep_sinks_is_refused():
    model, tensors = model_with_sinks(), inputs(1, 3, 20)
    assert methods_with("knows_lse") == sorted(instance.method for instance in WITH_SINKS)
    words = "linear: it does not know the sum of its weights.* Methods that do: auto, .*, wildcat$"
    refuses(words, hea.attention, "linear", *tensors, sinks=torch.zeros(3))
    refuses(r"sinks must be \(3,\)", hea.attention, "nearfar", *tensors, sinks=torch.zeros(2))
    both = {"sinks": torch.zeros(3), "distance_bias": torch.zeros(3, 5)}
    refuses("without a distance_bias", hea.attention, "longformer", *tensors, **both)
    refuses("sinks must be a tensor", hea.attention, "nearfar", *tensors, sinks=[0.0, 0.0, 0.0])
    words = "attention sinks .in GptOssAttention at layers.1.self_attn., which linear cannot.* use auto, .*'eager'$"
    refuses(words, hea.convert, model, "linear")
    suggested = refuses("wildcat has no causal form.*have one: auto", hea.convert, model, "wildcat").rpartition(": ")[2]
    assert model.config._attn_implementation == "eager"
    for name in suggested.split(", "):
        hea.convert(model, name)
