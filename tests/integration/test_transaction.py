"""Switching is one transaction: it succeeds, or every model, config and parameter is as it was before."""

import copy
import inspect
import itertools
import linecache
import pathlib
import sys
import warnings

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from each import refuses
from helpers.encoder_decoders import composite
from hf_efficient_attn.integration.models import Snapshot, configs_of
from tiny_models import SMALL, output, tiny_batch, tiny_config, tiny_model

PACKAGE = pathlib.Path(hea.__file__).parent
# Where a failure is provoked: everything that decides and changes something.
FOLDERS = (str(PACKAGE / "integration"), str(PACKAGE / "conversion"))

LINFORMER = {"method": "linformer", "projection_dim": 8}
EVA = {"method": "eva", "window_size": 8, "num_landmarks": 8, "proposal": "learned"}
CHOICES = {
    "exact": "sdpa",
    "eager": "eager",
    "kdeformer": {"method": "kdeformer", **SMALL["kdeformer"]},
    "linformer": LINFORMER,
    "separate": {**LINFORMER, "share": "none"},
    "eva": EVA,
    "flurka": {"method": "flurka_linear", "projection_dim": 8},
    "nystromformer": {"method": "nystromformer", "num_landmarks": 8, "conv_kernel_size": 3},
    "mix": {"method": "linformer", "layers": [{"layers": [0], **LINFORMER}, {"layers": [1], **EVA}]},
    "part": {**LINFORMER, "layers": [1]},
}


def convert(choice: str):
    return lambda model: hea.convert(model, copy.deepcopy(CHOICES[choice]))


def by_name(name):
    return lambda model: model.set_attn_implementation(name)


class State:
    """Everything that a switch could change in a model, to be compared with a later one."""

    def __init__(self, model) -> None:
        self.model = model
        self.modules = {name: self.attributes(module) for name, module in model.named_modules()}
        self.configs = [(id(config), dict(vars(config)), config.to_dict()) for config in configs_of(model)]
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **model.state_dict()}
        self.tensors = [(name, x.data_ptr(), x.requires_grad) for name, x in tensors.items()]
        self.values = [x.clone() for x in tensors.values()]

    @staticmethod
    def attributes(module) -> list:
        """Names, order and identity of the attributes, and of the entries of dictionaries among them."""
        plain = [(name, x if isinstance(x, (bool, int, float, str)) else id(x)) for name, x in vars(module).items()]
        dictionaries = [value for value in vars(module).values() if isinstance(value, dict)]
        return [id(module), *plain, [[(key, id(x)) for key, x in content.items()] for content in dictionaries]]

    def check(self) -> None:
        now = State(self.model)
        assert list(self.modules) == list(now.modules)
        for name, attributes in self.modules.items():
            assert attributes == now.modules[name], name
        assert self.configs == now.configs
        assert self.tensors == now.tensors
        assert all(torch.equal(x, y) for x, y in zip(self.values, now.values, strict=True))


class FailAt:
    """Raises `error` when a function of `FOLDERS` is called for the k-th time (from 0), or at its k-th line."""

    def __init__(self, k: int, error: BaseException, lines: bool = False) -> None:
        self.left, self.error, self.lines = k, error, lines

    def __enter__(self):
        self.raised = False
        self.previous = sys.gettrace()
        sys.settrace(self.look)  # for calls of Python functions only, unlike `sys.setprofile`
        return self

    def __exit__(self, *exception) -> None:
        sys.settrace(self.previous)
        # An error at the end of a `with` block, where no real one occurs, skips `__exit__`. A device context that is
        # never left would break graphs of torch.compile in later tests.
        while torch._C._len_torch_function_stack():
            torch.overrides._pop_mode()

    def look(self, frame, event, arg):
        # Exceptions in a generator are ignored while it is closed.
        if not frame.f_code.co_filename.startswith(FOLDERS) or frame.f_code.co_flags & inspect.CO_GENERATOR:
            return None
        if event == ("line" if self.lines else "call"):
            # After a switch that has succeeded, the context ends and `convert` returns, neither of which can fail.
            is_end = frame.f_code is Snapshot.__exit__.__code__ and frame.f_locals["kind"] is None
            if is_end or linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() == "return model":
                return self.look if self.lines else None
            if self.left == 0:
                self.raised = True
                sys.settrace(None)
                frame.f_trace = None
                raise self.error
            self.left -= 1
        return self.look if self.lines else None


def model_of(families: str, start: str = "exact"):
    """One model or a list of models, with learned parameters as after training, some of them frozen."""
    if families == "composite":
        return composite()
    models = [convert(start)(tiny_model(family)) for family in families.split()]
    model = models[0] if len(models) == 1 else torch.nn.ModuleList(models)
    torch.manual_seed(1)
    for i, (name, parameter) in enumerate(model.named_parameters()):
        if ".learned_parameters." in name:
            parameter.data.normal_()
            parameter.requires_grad_(i % 2 == 0)
    return model


# A model, its method, how it is switched, and one of how many calls fails in the core suite.
CORE = [
    ("bert", "linformer", convert("flurka"), 9),
    ("bert", "exact", by_name("linformer"), 15),
    ("bert", "separate", by_name("kdeformer"), 15),
    ("bert", "kdeformer", by_name("sdpa"), 15),
    ("bert vit", "linformer", convert("kdeformer"), 40),
    ("composite", "exact", by_name({"encoder": "linformer", "decoder": "linear"}), 40),
]
REST = [(*row[:3], 1) for row in CORE]
REST += [("bert", start, convert(end), 1) for start, end in itertools.pairwise(CHOICES)]
REST += [("bert vit", start, convert(end), 4) for start, end in (("kdeformer", "linformer"), ("mix", "exact"))]
REST += [("bert", start, convert("exact"), 1) for start in ("linformer", "separate", "mix")]
REST += [("bert", start, by_name(name), 1) for start in ("exact", "separate") for name in ("kdeformer", "eager")]


@pytest.mark.parametrize(
    ("families", "start", "switch", "step"),
    [*CORE, *(pytest.param(*row, marks=pytest.mark.exhaustive) for row in REST)],
)
def test_a_switch_fails_at_every_call(families, start, switch, step):
    check_every_failure(model_of(families, start), switch, step)


@pytest.mark.parametrize("step", [70, pytest.param(7, marks=pytest.mark.exhaustive)])
def test_convert_fails_at_every_line(step):
    check_every_failure(model_of("bert", "separate"), convert("mix"), step, lines=True)


def check_every_failure(model, switch, step, lines=False) -> None:
    """Let a switch fail at every call (line) until it succeeds; after each failure nothing may have changed."""
    before = State(model)
    assert failures(lambda: switch(model), before.check, step, lines) > 4
    assert State(model).configs != before.configs


def failures(call, check, step, lines=False) -> int:
    """How often a call fails until it succeeds, at every `step`-th call (line) in it; `check` runs after each."""
    for turn in itertools.count():
        error = (MemoryError, KeyboardInterrupt, UserWarning)[turn % 3]("provoked")
        with FailAt(turn * step, error, lines) as failure:
            try:
                call()
            except type(error):
                assert failure.raised
        if not failure.raised:
            return turn
        check()
    return 0


def test_a_warning_that_is_an_error_changes_nothing():
    model = composite()
    before = State(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for switch in (
            lambda: hea.convert(model, "scatterbrain"),
            lambda: hea.convert(torch.nn.ModuleList([tiny_model("bert"), model]), "scatterbrain"),
            lambda: model.set_attn_implementation("scatterbrain"),
        ):
            refuses("stays exact", switch, error=UserWarning)
            before.check()
    with pytest.warns(UserWarning, match="stays exact"):
        hea.convert(model, "scatterbrain")


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("start", "end"),
    [("exact", "linformer"), ("linformer", "reformer"), ("separate", "reformer"), ("mix", "linformer")],
)
def test_a_refused_container_keeps_the_models_in_it(start, end, order, monkeypatch):
    """Also if the restoration is interrupted, and starts again."""
    model, inputs, restore, calls = model_of("bert", start), tiny_batch("bert"), Snapshot._restore, []
    container = torch.nn.ModuleList([tiny_model("gpt2"), model][::order])
    before, out = State(container), output(model, inputs)

    def interrupted(self):
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        restore(self)

    monkeypatch.setattr(Snapshot, "_restore", interrupted)
    for error, words in ((hea.UnsupportedAttentionError, "no causal form"), (KeyboardInterrupt, "")):
        refuses(words, hea.convert, container, end, error=error)
        before.check()
        assert torch.equal(output(model, inputs), out)
    assert len(calls) == 3


def test_loading_leaves_the_callers_config_alone(tmp_path):
    auto, folder, pair = transformers.AutoModel, tmp_path / "gpt2", composite().config
    tiny_model("bert").save_pretrained(tmp_path)
    tiny_model("gpt2").save_pretrained(folder)
    pair.efficient_attention = {"method": "reformer"}
    pair.encoder._attn_implementation = pair.decoder._attn_implementation = "reformer"
    wrong_layers = tiny_config("bert", efficient_attention={"method": "linear", "layers": [9]})
    for config, load in (
        (tiny_config("gpt2"), lambda config: auto.from_config(config, attn_implementation="reformer")),
        (tiny_config("gpt2"), lambda c: auto.from_pretrained(folder, config=c, attn_implementation="reformer")),
        (wrong_layers, lambda config: auto.from_pretrained(tmp_path, config=config)),
        (wrong_layers, auto.from_config),
        (pair, transformers.EncoderDecoderModel),
        (pair, transformers.AutoModelForSeq2SeqLM.from_config),
    ):
        refuses(None, load, config)  # a first time, since Transformers fills in defaults, such as that of experts
        parts = [config, *(getattr(config, name) for name in config.sub_configs)]
        before = [(copy.copy(vars(part)), part.to_dict()) for part in parts]
        refuses(None, load, config)
        assert before == [(vars(part), part.to_dict()) for part in parts]


@pytest.mark.parametrize(("first", "second"), [("kdeformer", "sdpa"), ("sdpa", "kdeformer"), ("kdeformer", "linear")])
def test_a_model_made_from_the_config_of_another_leaves_it_alone(first, second):
    model, inputs = hea.convert(tiny_model("bert"), first), tiny_batch("bert")
    before = output(model, inputs)
    for make in (transformers.AutoModel.from_config, transformers.BertModel._from_config):
        other = make(model.config, attn_implementation=second)
        assert (model.config._attn_implementation, other.config._attn_implementation) == (first, second)
    assert torch.equal(output(model, inputs), before)


def test_loading_fails_at_every_call(tmp_path):
    model_of("bert", "separate").save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    before = copy.deepcopy(vars(config))

    def check():
        assert vars(config) == before

    assert failures(lambda: transformers.AutoModel.from_pretrained(tmp_path, config=config), check, 61) > 1
    check()
