"""The methods: the arguments of a call, configs, registration, functional forms, numbers by hand."""

import ast
import dataclasses
import inspect
import json
import re

import numpy as np
import pytest
import torch

import hf_efficient_attn as hea
from broken_methods import BrokenConfig, broken, form_of
from each import close, differs, each_form, each_instance, each_method, refuses
from hf_efficient_attn import methods
from hf_efficient_attn.methods import get_method, make_config
from instances import FIRST, HEADS, INSTANCES, KV_HEADS, forms, inputs, padding_mask, parameters_of, relative_error

# The arguments of a call.


@each_form
def test_the_scale_is_a_factor_of_the_queries(instance, is_causal):
    query, key, value = inputs(q_len=90, head_dim=4, dtype=torch.float64)
    default, ours = (instance(query, key, value, is_causal=is_causal, scale=scale) for scale in (None, 1.5))
    close(instance(query, key, value, is_causal=is_causal, scale=0.5), default)
    factors = (3.0**0.5, 3.0**0.5) if instance.splits_scale else (3.0, 1.0)
    close(instance(factors[0] * query, factors[1] * key, value, is_causal=is_causal), ours)
    assert differs(ours, default)


@each_form
def test_dropout_keeps_the_mean_and_draws_from_the_global_generator(instance, is_causal):
    tensors, mask = inputs(q_len=60, head_dim=4), padding_mask("left", 1, 60)
    without = instance(*tensors, mask, is_causal=is_causal)
    outs = []
    for _ in range(2):
        torch.manual_seed(0)
        outs.append(instance(*tensors, mask, is_causal=is_causal, dropout_p=0.2))
    assert torch.equal(*outs) and differs(outs[0], without, 0.05)
    # Every sequence of a batch has a dropout of its own.
    count, limit = (50, 0.17) if instance.data_dependent else (200, 0.085)  # which compute one head at a time
    many = [x.expand(count, *x.shape[1:]) for x in tensors]
    mean = instance(*many, mask.expand(count, -1), is_causal=is_causal, dropout_p=0.2).mean(0, keepdim=True)
    assert not differs(mean, without, limit)
    leaves = [x.requires_grad_() for x in tensors]
    grads = torch.autograd.grad(instance(*leaves, mask, is_causal=is_causal, dropout_p=0.5).sum(), leaves)
    assert all(grad.isfinite().all() and grad.abs().sum() > 0 for grad in grads)


@pytest.mark.parametrize("method", ["approx_kmv", "eva", "hyperattention", "kdeformer", "thinformer", "wildcat"])
def test_equal_heads_have_random_numbers_of_their_own(method):
    out = FIRST[method](*(x.expand(-1, 2, -1, -1) for x in inputs(num_heads=1, q_len=300)))
    assert differs(out[:, 0], out[:, 1])


@pytest.mark.parametrize("instance", [i for i, is_causal in forms() if is_causal], ids=str)
def test_more_or_fewer_causal_queries_than_keys(instance):
    """The first of more queries attend to nothing. Many last queries are the last chunk of a prompt."""
    query, key, value = tensors = inputs(q_len=400, dtype=torch.float64)
    out = instance(query[:, :, :90], key[:, :, :70], value[:, :, :70], is_causal=True)
    assert not out[:, :, :20].any()
    assert torch.equal(out[:, :, 20:], instance(query[:, :, 20:90], key[:, :, :70], value[:, :, :70], is_causal=True))
    if instance.exact_steps:  # the samples depend on the given queries, so only the size of the error is the same
        whole, exact = (form(*tensors, is_causal=True)[:, :, 200:] for form in (instance, hea.analysis.exact_output))
        ours = instance(query[:, :, 200:], key, value, is_causal=True)
        assert relative_error(ours, exact) < 1.5 * relative_error(whole, exact)


@each_form
def test_every_tensor_has_a_gradient(instance, is_causal):
    """Also in short and empty sequences and without a valid token: engines wait for the gradients of all parameters."""
    config, cases = instance.config(), [(2, 1, 1, "none"), (2, 5, 5, "right"), (2, 60, 60, "all"), (0, 7, 7, "none")]
    if is_causal or instance.rectangular:
        cases += [(2, 5, 0, "none"), (2, 1, 40, "none")]
    for batch, q_len, kv_len, padding in cases:
        learned = parameters_of(config, inputs(q_len=70)[2])
        leaves = (*inputs(batch, HEADS, q_len, 8, kv_len=kv_len, num_kv_heads=KV_HEADS), *learned.values())
        leaves = [x.clone().requires_grad_() for x in leaves]
        options = {"parameters": dict(zip(learned, leaves[3:], strict=True)), "is_causal": is_causal}
        out = hea.attention(config, *leaves[:3], attention_mask=padding_mask(padding, batch, kv_len), **options)
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.square().sum(), leaves)), (q_len, padding)


@each_form
def test_empty_inputs_and_inference_mode(instance, is_causal):
    for batch, length in ((0, 50), (1, 0)):
        assert instance(*inputs(batch, q_len=length), is_causal=is_causal).shape == (batch, 2, length, 8)
    with torch.inference_mode():
        out = instance(*inputs(q_len=90), is_causal=is_causal, seed=9471)
    # What is kept of that call can be trained with.
    leaves = [x.requires_grad_() for x in inputs(q_len=90)]
    again = instance(*leaves, is_causal=is_causal, seed=9471)
    assert all(x.isfinite().all() for x in torch.autograd.grad(again.square().sum(), leaves))
    if instance.method != "auto":  # which computes other columns where a gradient is wanted
        torch.testing.assert_close(out, again.detach())


@each_instance
def test_config_round_trip(instance):
    config = instance.config()
    values = json.loads(json.dumps(config.to_dict()))
    assert values["method"] == instance.method
    assert instance.info.config_class.from_dict(values) == config
    assert instance.info.config_class.from_dict({"method": instance.method}) == instance.info.config_class()
    assert make_config(config) is config
    assert make_config(instance.method, **instance.hyperparameters) == config
    assert make_config(config, seed=5) == dataclasses.replace(config, seed=5)
    assert hash(config) == hash(dataclasses.replace(config))
    assert with_field("size", methods.option(3, "Help."))(size=[[1, [2]]]).size == ((1, (2,)),)


@each_method
def test_config_fields(instance):
    """Every hyperparameter has a help text, a valid default and a check of its values. Configs are immutable."""
    config = instance.config()
    for spec in dataclasses.fields(config):
        minimum, choices = spec.metadata["minimum"], spec.metadata["choices"]
        assert len(spec.metadata["help"]) > 10 and spec.metadata["help"].endswith(".")
        refuses(None, setattr, config, spec.name, spec.default, error=dataclasses.FrozenInstanceError)
        if minimum is not None:
            right, fraction = ([np.float64(minimum)], torch.nan) if isinstance(spec.default, float) else ([], 1.5)
            wrong = (minimum - 1, 2**31, fraction, "3", None, True)
        elif isinstance(spec.default, bool):
            right, wrong = [not spec.default], (0, 1, "true", None)
        else:
            right, wrong = [*choices, np.str_(choices[0])], ("x" + spec.default, 3, None, [], True)
        made = {x: instance.config(**{spec.name: x}) for x in right}
        assert all(getattr(c, spec.name) == x and ast.literal_eval(c.text) == c.to_dict() for x, c in made.items())
        known = "Known: " if choices is not None else ""
        for value in wrong:
            refuses(rf"{instance.method}: {spec.name}=.*{known}", instance.config, **{spec.name: value})


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda: hea.LongformerConfig(global_tokens=3).with_budget(3), "budget of 3 .* integer of 4 or more"),
        (lambda: hea.KDEformerConfig.from_dict({"method": "linear"}), "KDEformerConfig cannot be made.*'linear'"),
        (lambda: hea.LongformerConfig.from_dict({"windowsize": 3}), "'windowsize'.*Did you mean 'window_size'"),
        *((lambda x=x: x(num_hashes=63), "at most 62") for x in (hea.KDEformerConfig, hea.ScatterbrainConfig)),
        *(
            (lambda x=x: x().with_budget(1), "budget of 1 columns .* an integer of 2 or more")
            for x in (hea.ReformerConfig, hea.ScatterbrainConfig, hea.EvaConfig, hea.FlurkaPerformerConfig)
        ),
        (lambda: hea.FlurkaEvaConfig().with_budget(2), "an integer of 3 or more"),
        (lambda: hea.NystromformerConfig(conv_kernel_size=4), "conv_kernel_size=4 is even"),
        (lambda: hea.LinearConfig(feature_map="hedghog"), "Did you mean 'hedgehog'"),
        (lambda: hea.KDEformerConfig(64), "takes hyperparameters by name"),
        (lambda: make_config(type("Own", (hea.KDEformerConfig,), {})()), "Own is not its config class: give KDEform"),
    ],
)
def test_wrong_configs(work, message):
    refuses(message, work)


@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_the_cost_of_a_query_is_the_budget(instance):
    """And nothing changes but what the method names."""
    config = instance.config(seed=7)
    named = {name for name, _ in config.budget} | set(re.findall(r"`(\w+)`", type(config).with_budget.__doc__))
    for columns in (4, 10, 64, 1000):
        sized = config.with_budget(columns)
        changed = {name for name in config.hyperparameters() if getattr(sized, name) != getattr(config, name)}
        assert changed <= named, "name in backticks, in the docstring of with_budget, what it changes"
        if instance.method != "reformer":  # whose cost is a product: see test_papers.py
            assert changed <= set(instance.cost)
            total = sum(unit * getattr(sized, name, 0) for name, unit in instance.cost.items())
            if instance.method != "linear":  # whose cost is constant
                assert columns - 2 <= total <= columns, "does `cost` of the instance name all that with_budget sets?"


def test_the_budget_of_the_defaults_gives_them_but_for_what_the_methods_name():
    """Near keys in all heads, which cost what the budget says, and the better share of samples."""
    differ = {}
    for name in hea.available_methods():
        config = hea.method_info(name).config_class()
        units = FIRST[name].cost | {"columns": name == "auto"}
        cost = sum(unit * getattr(config, x) for x, unit in units.items() if unit and hasattr(config, x))
        # The window of longformer is beside the token itself, and the cost of the Reformer is a product.
        cost = {"longformer": cost + 1, "reformer": config.exact_length}.get(name, cost)
        sized = config.with_budget(cost or 1)
        differ[name] = {x for x in config.hyperparameters() if getattr(sized, x) != getattr(config, x)}
    sampled = {"block_size", "num_samples"}
    # With the budget that the defaults cost, `with_budget` returns the defaults, but for these.
    assert {name: x for name, x in differ.items() if x} == {
        "nearfar": {"near_share"}, "kdeformer": sampled, "hyperattention": sampled, "approx_kmv": {"num_samples"},
    }  # fmt: skip


# The registry and `hea.register_method`. `test_own_files.py` tests a method in a file of its own.

FACTS = {"method": "mine", "title": "Mine", "paper": "none", "year": 2026, "summary": "exact attention"}
FACTS |= {"causal": False, "rectangular": True}
dense_forward = form_of("correct")


def with_field(name: str, default=None):
    field = (name, int) if default is None else (name, int, default)
    base = type("Base", (BrokenConfig,), FACTS)
    return dataclasses.make_dataclass("Mine", [field], bases=(base,), frozen=True, kw_only=True)


# (message, facts of a class or what is no such class, functions)
INCOMPLETE = [
    *(("special meaning", {"method": x}, {}) for x in ("my_flash", "a/b", "sdpa2", "flex_attention_x", "a|b")),
    *(("must be a Python identifier", {"method": x}, {}) for x in ("my-method", "two words", "eager", 3)),
    *((f"the class attributes {fact} are missing", {fact: ""}, {}) for fact in FACTS),
    ("needs a forward and a naive form", {}, {"naive": None}),
    ("must be given together", {"learned_parameters": ("weight",)}, {}),
    ("must be given together", {}, {"initial_parameters": lambda config, **sizes: {}}),
    ("a recurrence must be causal", {}, {"recurrence": methods.Recurrence(print, print, print)}),
    ("decorate the class", {"size": methods.option(3, "A size.")}, {}),
    (r"must accept \(config, query, key, value, options\)", {}, {"forward": lambda query, key: query}),
    ("define with_budget", {"with_budget": methods.MethodConfig.with_budget}, {}),
    *(("must be a subclass of MethodConfig", x, {}) for x in (FACTS, FACTS["method"], int, BrokenConfig())),
    ("'size' needs a default", with_field("size"), {}),
    *((f"'{name}' cannot be the name of a hyperparameter", with_field(name, methods.option(3, "Help.")), {})
      for name in ("scale", "is_causal", "layers", "query", "method_or_config", "text", "cost", "with_budget")),
    *((f"'{name}' cannot be the name of a hyperp", {"learned_parameters": (name,)}, {})
      for name in ("scale", "seed", "names", "half", "class")),
    *(("must be a tuple of names", {"learned_parameters": x}, {}) for x in ("gain", ["gain"], (3,), ("a b",))),
    *(("pairs .name, weight", {"budget": x}, {}) for x in ((("size", 1),), (("compute_dtype", 1),), ("seed", 1))),
    ("must call super", {"__post_init__": lambda self: None}, {}),
    *((r"size=.* must be None, True, False, a finite", with_field("size", methods.option(x, "Help.")), {})
      for x in (float("inf"), frozenset(), torch.float32, ((torch.ones(2),),))),
]  # fmt: skip


@pytest.mark.parametrize(("message", "given", "functions"), INCOMPLETE)
def test_incomplete_registrations_are_refused(message, given, functions):
    before = hea.available_methods()
    given = type("Mine", (BrokenConfig,), FACTS | given) if isinstance(given, dict) and given != FACTS else given
    refuses(message, hea.register_method, given, **{"forward": dense_forward, "naive": dense_forward, **functions})
    assert hea.available_methods() == before


def test_a_registered_method_is_available_at_once_and_can_be_replaced():
    def zeros(config, query, key, value, options):
        return torch.zeros_like(query[..., :1]) * value[:, :, :1]

    names, tensors = [], inputs(q_len=20)
    with broken("correct") as instance:
        config_class = instance.info.config_class
        refuses("registered already.*replace=True", hea.register_method, config_class, forward=zeros, naive=zeros)
        out = instance(*tensors)
        assert out.abs().sum() > 0 and torch.equal(hea.functional.correct_attention(*tensors), out)
        assert hea.Config is config_class and "Config" in dir(hea)
        with broken("ignores_causality"):  # which has a class of the same name
            assert hea.Config is config_class
        methods.on_register(names.append)
        assert set(names) == set(hea.available_methods())
        other = type("Other", (config_class,), {"title": "Another title"})
        assert "Another title" not in hea.functional.correct_attention.__doc__
        hea.register_method(other, forward=zeros, naive=zeros, replace=True)
        assert names[-1] == "correct" and hea.available_methods().count("correct") == 1
        assert hea.attention("correct", *tensors).abs().sum() == 0
        assert "Another title" in hea.functional.correct_attention.__doc__
        hea.register_method(other, forward=lambda config, query, *_: query.mT, naive=zeros, replace=True)
        refuses(r"a tensor of shape \(1, 2, 8, 20\): return .*\(1, 2, 20, 8\)", hea.attention, "correct", *tensors)
    assert "correct" not in hea.available_methods()


@each_instance
def test_the_functional_form_equals_attention(instance):
    form = getattr(hea.functional, f"{instance.method}_attention")
    tensors = inputs(batch=2, q_len=90)
    mask = padding_mask("left", 2, 90)
    options = {"is_causal": instance.info.causal, "scale": 0.4, "seed": 3}
    ours = form(*tensors, attention_mask=mask, **options, **instance.hyperparameters)
    assert torch.equal(ours, instance(*tensors, mask, **options))


@each_method
def test_the_functional_form_has_the_hyperparameters_in_its_signature(instance):
    form, config = getattr(hea.functional, f"{instance.method}_attention"), instance.config()
    parameters = inspect.signature(form).parameters
    common = {"attention_mask": None, "is_causal": False, "scale": None, "dropout_p": 0.0, "seed": 0}
    own = {f.name: f.default for f in dataclasses.fields(config) if f.name != "seed"}
    options = {**common, **own, **dict.fromkeys(instance.info.learned_parameters)}
    assert list(parameters) == ["query", "key", "value", *options]
    assert {name: parameters[name].default for name in options} == options
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in options)
    assert all(f.metadata["help"] in form.__doc__ for f in dataclasses.fields(config) if f.name != "seed")
    assert form.__name__ == f"{instance.method}_attention" and form.__name__ in dir(hea.functional)


@pytest.mark.parametrize(
    "name",
    [x for x in hea.available_methods() if hea.method_info(x).rectangular and not get_method(x).default.mixes_queries],
)
def test_a_query_has_no_influence_on_others_if_the_method_does_not_mix_queries(name):
    query, key, value = inputs(q_len=40, kv_len=90, head_dim=16)
    out = hea.attention(name, query, key, value)
    query[:, :, 10:] = 5.0
    assert torch.equal(out[:, :, :10], hea.attention(name, query, key, value)[:, :, :10])
