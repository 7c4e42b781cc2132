"""Switching is one transaction: it succeeds, or every model, config and parameter is as it was before."""

import copy
import inspect
import linecache
import pathlib
import sys
import warnings

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from hf_efficient_attn.integration.models import configs_of
from tiny_models import SMALL, output, tiny_batch, tiny_config, tiny_model

Refused = hea.UnsupportedAttentionError
PACKAGE = pathlib.Path(hea.__file__).parent
# Where a failure is provoked: everything that decides and changes something.
FOLDERS = (str(PACKAGE / "integration"), str(PACKAGE / "conversion"))

LINFORMER = {"method": "linformer", "projection_dim": 8}
SEPARATE = {"method": "linformer", "projection_dim": 8, "share": "none"}
EVA = {"method": "eva", "window_size": 8, "num_landmarks": 8, "proposal": "learned"}
NYSTROMFORMER = {"method": "nystromformer", "num_landmarks": 8, "conv_kernel_size": 3}
FLURKA = {"method": "flurka_linear", "projection_dim": 8}
KDEFORMER = {"method": "kdeformer", **SMALL["kdeformer"]}
MIX = {
    "method": "linformer",
    "layers": [{"layers": [0], **LINFORMER}, {"layers": [1], **EVA}],
}
PART = {**LINFORMER, "layers": [1]}
CHOICES = {
    "exact": "sdpa",
    "eager": "eager",
    "kdeformer": KDEFORMER,
    "linformer": LINFORMER,
    "separate": SEPARATE,
    "eva": EVA,
    "flurka": FLURKA,
    "nystromformer": NYSTROMFORMER,
    "mix": MIX,
    "part": PART,
}
# All kinds of switches: exact, without parameters, learned, learned in some layers.
SWITCHES = [
    ("linformer", "flurka"),
    *(
        pytest.param(start, end, marks=pytest.mark.exhaustive)
        for start, end in [
            ("exact", "mix"), ("separate", "part"), ("mix", "exact"),
            ("exact", "linformer"), ("exact", "separate"), ("kdeformer", "nystromformer"), ("linformer", "eva"),
            ("linformer", "separate"), ("mix", "linformer"), ("linformer", "kdeformer"), ("linformer", "exact"),
            ("separate", "eager"),
        ]
    ),
]  # fmt: skip

# Every fourth call, or every one.
some_or_all = pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.exhaustive)])


def convert(model, choice: str):
    return hea.convert(model, copy.deepcopy(CHOICES[choice]))


def trained(model):
    """The model with learned parameters as after training, some of them frozen."""
    torch.manual_seed(1)
    for i, (name, parameter) in enumerate(model.named_parameters()):
        if ".learned_parameters." in name:
            parameter.data.normal_()
            parameter.requires_grad_(i % 2 == 0)
    return model


class State:
    """Everything that a switch could change in a model, to be compared with a later one."""

    def __init__(self, model) -> None:
        self.modules = {name: self.attributes(module) for name, module in model.named_modules()}
        self.configs = [(id(config), dict(vars(config)), config.to_dict()) for config in configs_of(model)]
        state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **model.state_dict()}
        self.tensors = {name: (x.data_ptr(), x.requires_grad) for name, x in state.items()}
        self.values = {name: x.clone() for name, x in state.items()}

    @staticmethod
    def attributes(module) -> list:
        """Names, order and identity of the attributes, and of the entries of dictionaries among them."""
        dictionaries = [value for value in vars(module).values() if isinstance(value, dict)]
        plain = {
            name: id(value) if not isinstance(value, (bool, int, float, str)) else value
            for name, value in vars(module).items()
        }
        return [id(module), plain, [[(key, id(x)) for key, x in content.items()] for content in dictionaries]]

    def check(self, model) -> None:
        now = State(model)
        assert list(self.modules) == list(now.modules)
        for name, attributes in self.modules.items():
            assert attributes == now.modules[name], name
        assert self.configs == now.configs
        assert self.tensors == now.tensors
        assert list(self.values) == list(now.values)
        assert all(torch.equal(x, now.values[name]) for name, x in self.values.items())


class FailAt:
    """Raises `error` when a function of `FOLDERS` is called for the k-th time (from 0), or at its k-th line."""

    def __init__(self, k: int, error: BaseException, lines: bool = False) -> None:
        self.left, self.error, self.lines = k, error, lines

    def __enter__(self):
        self.raised = False
        self.previous = sys.gettrace()
        (sys.settrace if self.lines else sys.setprofile)(self.look)
        return self

    def __exit__(self, *exception) -> None:
        sys.setprofile(None)
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
            # After a switch that has succeeded, `convert` only returns, which cannot fail.
            if linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() == "return model":
                return self.look
            if self.left == 0:
                self.raised = True
                sys.setprofile(None)
                sys.settrace(None)
                frame.f_trace = None
                raise self.error
            self.left -= 1
        return self.look


def check_every_failure(model, switch, inputs=None, lines=False, step=1) -> None:
    """Let a switch fail at every call (line) until it succeeds; after each failure nothing may have changed."""
    before = State(model)
    out = None if inputs is None else output(model, inputs)
    errors = (MemoryError, KeyboardInterrupt, UserWarning)
    k = 0
    while True:
        error = errors[k // step % len(errors)]("provoked")
        with FailAt(k, error, lines) as failure:
            try:
                switch(model)
            except type(error):
                assert failure.raised
        if not failure.raised:
            break
        before.check(model)
        k += step
    assert k > 4 * step
    if out is not None:
        assert not torch.equal(output(model, inputs), out)


@some_or_all
@pytest.mark.parametrize(("start", "end"), SWITCHES)
def test_convert_fails_at_every_call(start, end, step):
    model = trained(convert(tiny_model("bert"), start))
    check_every_failure(model, lambda model: convert(model, end), tiny_batch("bert"), step=step)


@pytest.mark.parametrize("step", [35, pytest.param(7, marks=pytest.mark.exhaustive)])
def test_convert_fails_at_every_line(step):
    model = trained(convert(tiny_model("bert"), "separate"))
    check_every_failure(model, lambda model: convert(model, "mix"), tiny_batch("bert"), lines=True, step=step)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("start", "end"), [("kdeformer", "linformer"), ("linformer", "kdeformer"), ("mix", "exact")])
def test_several_models_in_one_container_fail_at_every_call(start, end):
    both = torch.nn.ModuleList([convert(tiny_model("bert"), start), convert(tiny_model("vit"), start)])
    check_every_failure(trained(both), lambda model: convert(model, end), step=4)


@pytest.mark.parametrize("step", [15, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", ["linformer", "kdeformer", "sdpa", "eager"])
@pytest.mark.parametrize("start", ["exact", "kdeformer", "separate"])
def test_set_attn_implementation_fails_at_every_call(start, name, step):
    model = trained(convert(tiny_model("bert"), start))
    if model.config._attn_implementation == name:
        pytest.skip("no switch")
    check_every_failure(model, lambda model: model.set_attn_implementation(name), step=step)


def composite():
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        tiny_config("bert"), tiny_config("bert", is_decoder=True, add_cross_attention=True)
    )
    return transformers.EncoderDecoderModel(config).eval()


@pytest.mark.exhaustive
@pytest.mark.parametrize("choice", ["linear", {"encoder": "linformer", "decoder": "linear"}], ids=["name", "parts"])
def test_a_composite_model_fails_at_every_call(choice):
    check_every_failure(composite(), lambda model: model.set_attn_implementation(choice), step=9)


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
            with pytest.raises(UserWarning, match="stays exact"):
                switch()
            before.check(model)
    with pytest.warns(UserWarning, match="stays exact"):
        hea.convert(model, "scatterbrain")


@pytest.mark.parametrize("order", [1, -1])
def test_a_refused_container_keeps_the_models_in_it(order):
    inputs = tiny_batch("bert")
    for start, end in (
        ("exact", "linformer"),
        ("linformer", "reformer"),
        ("separate", "reformer"),
        ("mix", "linformer"),
    ):
        bert = trained(convert(tiny_model("bert"), start))
        container = torch.nn.ModuleList([tiny_model("gpt2"), bert][::order])
        before, out = State(container), output(bert, inputs)
        with pytest.raises(Refused, match="no causal form"):
            hea.convert(container, end)
        before.check(container)
        assert torch.equal(output(bert, inputs), out)


def tiny_gpt_oss():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.GptOssConfig(
        **sizes, head_dim=8, intermediate_size=16, vocab_size=60, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["full_attention"] * 2,
    )  # fmt: skip
    return transformers.GptOssModel(config).eval()


@pytest.mark.parametrize("order", [1, -1])
def test_a_model_that_refuses_sdpa_keeps_the_others(order):
    bert = trained(convert(tiny_model("bert"), "linformer"))
    container = torch.nn.ModuleList([tiny_gpt_oss(), bert][::order])
    before = State(container)
    with pytest.raises(ValueError, match=r"sdpa|scaled_dot_product"):
        hea.convert(container, "sdpa")
    before.check(container)


def test_loading_leaves_the_callers_config_alone(tmp_path):
    tiny_model("bert").save_pretrained(tmp_path)
    tiny_model("gpt2").save_pretrained(tmp_path / "gpt2")
    causal = {"is_decoder": True, "add_cross_attention": True}
    encoder, decoder = tiny_config("bert"), tiny_config("bert", **causal)
    pair = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    pair.efficient_attention = {"method": "reformer"}
    pair.encoder._attn_implementation = pair.decoder._attn_implementation = "reformer"
    wrong_layers = tiny_config("bert", efficient_attention={"method": "linear", "layers": [9]})
    for config, load in (
        (
            tiny_config("gpt2"),
            lambda config: transformers.AutoModel.from_config(config, attn_implementation="reformer"),
        ),
        (
            tiny_config("gpt2"),
            lambda config: transformers.AutoModel.from_pretrained(
                tmp_path / "gpt2", config=config, attn_implementation="reformer"
            ),
        ),
        (wrong_layers, lambda config: transformers.AutoModel.from_pretrained(tmp_path, config=config)),
        (wrong_layers, transformers.AutoModel.from_config),
        (pair, transformers.EncoderDecoderModel),
        (pair, transformers.AutoModelForSeq2SeqLM.from_config),
    ):
        with pytest.raises(Refused):
            load(config)  # a first time, since Transformers fills in defaults, such as that of experts
        before = [(copy.copy(vars(part)), part.to_dict()) for part in (config, *sub_configs(config))]
        with pytest.raises(Refused):
            load(config)
        assert before == [(vars(part), part.to_dict()) for part in (config, *sub_configs(config))]


def sub_configs(config) -> list:
    return [getattr(config, name) for name in config.sub_configs]


def test_loading_fails_at_every_call(tmp_path):
    convert(tiny_model("bert"), "separate").save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    before = copy.deepcopy(vars(config))
    k = 0
    while True:
        with FailAt(k, KeyboardInterrupt()) as failure:
            try:
                transformers.AutoModel.from_pretrained(tmp_path, config=config)
            except KeyboardInterrupt:
                assert failure.raised
        assert vars(config) == before
        if not failure.raised:
            break
        k += 29
    assert k > 100


def test_an_interrupted_restoration_starts_again(monkeypatch):
    from hf_efficient_attn.integration.models import Snapshot

    model, restore, calls = trained(convert(tiny_model("bert"), "linformer")), Snapshot._restore, []

    def interrupted(self):
        calls.append(None)
        if len(calls) == 1:
            raise KeyboardInterrupt
        restore(self)

    before = State(model)
    monkeypatch.setattr(Snapshot, "_restore", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hea.convert(torch.nn.ModuleList([model, tiny_model("gpt2")]), "reformer")
    before.check(model)
