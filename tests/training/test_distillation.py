"""Distillation: layer-wise training of learned parameters, its losses, refusals, interruption and continuation."""

import math

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import hf_efficient_attn as hea
from each import close, refuses
from helpers.model_types import case
from helpers.trainings import HEDGEHOG, batches, values
from hf_efficient_attn.evaluation.capture import Call, capture_attention, forward
from hf_efficient_attn.evaluation.progress import Interrupted
from hf_efficient_attn.methods import make_config
from hf_efficient_attn.training import DistillationOptions, DivergedError, FinetuningOptions, steps
from hf_efficient_attn.training.distillation import WEIGHTS_SHARE, Distillation, backward
from hf_efficient_attn.training.finetuning import Finetuning, make_teacher
from tiny_models import DECODERS, tiny_batch, tiny_model

# Everything that learns something, at sizes for tiny models.
LEARNING = {
    "hedgehog": ("linear", {"feature_map": "hedgehog", "num_features": 16}),
    "t2r": ("linear", {"feature_map": "t2r", "num_features": 16}),
    "exp": ("performer", {"feature_map": "exp", "num_features": 16}),
    "flurka_linear": ("flurka_linear", {"projection_dim": 24, "feature_map": "hedgehog", "num_features": 16}),
    "flurka_performer": ("flurka_performer", {"projection_dim": 24, "num_features": 16}),
    "flurka_eva": ("flurka_eva", {"projection_dim": 24, "num_landmarks": 4, "window_size": 4}),
    "linformer": ("linformer", {"projection_dim": 16}),
    "nystromformer": ("nystromformer", {"num_landmarks": 8, "conv_kernel_size": 5}),
    "eva": ("eva", {"num_landmarks": 4, "window_size": 4, "proposal": "learned"}),
}


def error_of(model, batch) -> float:
    """Mean relative error of the layers on the inputs of the exact model."""
    errors = Distillation(model, 1).measure(batch)
    return sum(one.loss for one in errors) / len(errors)


@pytest.mark.parametrize(
    ("family", "name", "dtype"),
    [
        *(("bert", name, torch.float32) for name in LEARNING),
        *((family, "hedgehog", torch.float32) for family in ("vit", *DECODERS)),
        ("bert", "hedgehog", torch.bfloat16),
        ("bert", "hedgehog", "autocast"),
    ],
)
def test_every_method_that_learns_comes_closer_to_exact_attention(family, name, dtype):
    method, options = LEARNING[name]
    model, test = tiny_model(family), tiny_batch(family, seed=9)
    autocast = dtype == "autocast"
    model = model.to(torch.float32 if autocast else dtype)
    before, dtypes = values(model), {p.dtype for p in model.parameters()}
    untrained = error_of(hea.convert(tiny_model(family), method, **options), test)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        assert hea.distill(model, method, batches(family), steps=20, **options) is model
    # In a random model a convolution or a projection of the tokens can do little.
    assert error_of(model, test) < (0.97 if "feature_map" in options else 1.0) * untrained
    assert model.config.efficient_attention["method"] == method
    close(values(model, False), before, 0)
    assert not model.training and {p.dtype for p in model.parameters()} == dtypes
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("loss", ["output", "weights", "both", "second stage"])
def test_contents_of_padding_have_no_influence(loss):
    batch = tiny_batch("bert", padding="right")
    other = {**batch, "input_ids": torch.where(batch["attention_mask"].bool(), batch["input_ids"], 7)}
    assert not torch.equal(batch["input_ids"], other["input_ids"])
    given = {"loss": loss}
    if loss == "second stage":
        given = {"options": DistillationOptions(finetuning=FinetuningOptions(steps=3))}
    results = []
    for one in (batch, other):
        model = tiny_model("bert")
        hea.distill(model, "linear", [one, one], steps=3, **given, **HEDGEHOG)
        results.append({name: p for name, p in model.state_dict().items() if "word_embeddings" not in name})
    close(*results, 1e-5 if loss == "second stage" else 0)


@pytest.mark.parametrize(
    ("family", "padding"), [("bert", "none"), ("bert", "right"), ("gpt2", "none"), ("llama", "none")]
)
def test_losses_are_those_of_dense_matrices(family, padding, monkeypatch):
    monkeypatch.setattr("hf_efficient_attn.training.distillation._BLOCK", 16)
    calls: list[Call] = []
    model = tiny_model(family)
    with capture_attention(model, calls.append):
        forward(model, tiny_batch(family, length=100 if family == "bert" else 70, padding=padding))
    call, config = calls[-1], make_config("linear", **HEDGEHOG)
    num_heads, num_kv_heads = call.query.shape[1], call.key.shape[1]
    torch.manual_seed(1)
    shape = (num_kv_heads, call.query.shape[-1], 16)
    maps = {name: torch.randn(shape, requires_grad=True) for name in ("query_map", "key_map")}
    losses = {loss: backward(call, config, maps, loss) for loss in ("output", "weights", "both")}
    key, value = (x.repeat_interleave(num_heads // num_kv_heads, 1) for x in (call.key, call.value))
    scores = call.query @ key.mT * call.query.shape[-1] ** -0.5
    phi = []
    for x, name in ((call.query, "query_map"), (key, "key_map")):
        y = x @ maps[name].repeat_interleave(num_heads // num_kv_heads, 0)
        phi.append(torch.cat((y, -y), -1).softmax(-1).clamp(min=1e-12))
    products = phi[0] @ phi[1].mT
    if call.key_mask is not None:
        products = products * call.key_mask[:, None, None]
        scores = scores.masked_fill(~call.key_mask[:, None, None], -torch.inf)
    if call.is_causal:
        products, scores = products.tril(), scores.masked_fill(~torch.ones_like(scores).tril().bool(), -torch.inf)
    exact, found = scores.softmax(-1), products / products.sum(-1, keepdim=True)
    valid = torch.ones(exact.shape[0], exact.shape[2]) if call.key_mask is None else call.key_mask.float()
    entropy = -(exact * found.clamp(min=1e-9).log()).sum(-1)
    entropy = (entropy * valid[:, None]).sum() / valid.sum() / num_heads
    error = ((found @ value - exact @ value) * valid[:, None, :, None]).square().sum((2, 3))
    output = (error / (exact @ value * valid[:, None, :, None]).square().sum((2, 3))).mean()
    assert losses["output"] == pytest.approx(output.item(), rel=1e-4)
    assert losses["weights"] == pytest.approx(entropy.item(), rel=1e-4)
    assert losses["both"] == pytest.approx(output.item() + WEIGHTS_SHARE * entropy.item(), rel=1e-4)
    wanted = torch.autograd.grad(2 * output + (1 + WEIGHTS_SHARE) * entropy, list(maps.values()))
    torch.testing.assert_close([x.grad for x in maps.values()], list(wanted), rtol=1e-3, atol=1e-5)


def second(**options) -> dict:
    finetuning = FinetuningOptions(steps=5, **options)
    return {"options": DistillationOptions(on_step=lambda *_: pytest.fail("a step was taken"), finetuning=finetuning)}


REFUSED = {
    "no data": ("linear", HEDGEHOG, [], {}, "there is no batch"),
    "one batch": ("linear", HEDGEHOG, 1, {}, "there is a single batch"),
    "text": ("linear", HEDGEHOG, "a text", {}, "a batch is a mapping"),
    "convolution": ("nystromformer", {"num_landmarks": 8}, 4, {}, "use conv_kernel_size=3"),
    "steps": ("linear", HEDGEHOG, 4, {"steps": 0}, "1 or more, an integer"),
    "layer": ("linear", HEDGEHOG, 4, {"layers": [7]}, "no attention in layers"),
    "hyperparameter": ("linear", {"features": "hedgehog"}, 4, {}, "features"),
    "no logits": ("linear", HEDGEHOG, 4, second(target="logits"), "has no logits: use target='hidden_states'"),
    "no peft": ("linear", HEDGEHOG, 4, second(lora_rank=2), "LoRA needs the package peft: install it"),
    "weights of tables": ("linformer", {}, 4, {"loss": "weights"}, "what linformer learns .* use the loss 'output'"),
    "convolved": ("nystromformer", {"conv_kernel_size": 3}, 4, {"loss": "both"}, "negative or change their sum"),
    "within the budget": ("linear", HEDGEHOG, 4, {}, "sequences are within the budget of the method"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_leave_the_model_as_it_was(case, monkeypatch):
    method, options, data, changes, message = REFUSED[case]
    if case == "within the budget":
        # Only a method that is exact up to some length and learns something; a user's own can be one.
        monkeypatch.setattr(hea.LinearConfig, "exact_length", 100)
    if case == "no peft":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    model = tiny_model("bert")
    before = {name: p.detach().clone() for name, p in model.state_dict().items()}
    data = batches(count=data) if isinstance(data, int) else data
    refuses(message, hea.distill, model, method, data, **{"steps": 20, **changes}, **options)
    assert model.config.efficient_attention is None
    close(dict(model.state_dict()), before, 0)


class Broken(torch.utils.data.Dataset):
    """Batches of which one cannot be read."""

    def __init__(self, error: BaseException, at: int) -> None:
        self.error, self.at, self.read = error, at, 0

    def __iter__(self):
        for batch in batches(count=8):
            self.read += 1
            if self.read == self.at:
                raise self.error
            yield batch


def test_an_interrupted_model_is_converted_with_its_last_state():
    model, whole = tiny_model("bert"), hea.convert(tiny_model("bert"), "linear", **HEDGEHOG)
    with pytest.raises(Interrupted) as info:
        hea.distill(model, "linear", Broken(KeyboardInterrupt(), 4), steps=8, **HEDGEHOG)
    assert info.value.result is model
    distillation = Distillation(whole, 8)
    for batch in batches(count=3):
        distillation.step(batch)
    distillation.finish()
    close(values(model), values(whole), 0)


def make_stage(number: int):
    """A model and its distillation or its fine-tuning in 40 steps."""
    model, options = tiny_model("bert"), FinetuningOptions(steps=40)
    teacher = make_teacher(model, options, batches()[0])
    model = hea.convert(model, "linear", **HEDGEHOG)
    return model, Distillation(model, 40) if number == 1 else Finetuning(model, teacher, options)


@pytest.mark.parametrize("other_process", [False, True])
@pytest.mark.parametrize(
    ("stage", "name", "step"),
    [
        (1, r"layer\.1\.", "of the distillation: use a smaller learning rate"),
        (2, "hidden states after layer 1", "of the fine-tuning"),
    ],
)
def test_a_loss_that_is_not_finite_stops_all_processes_with_the_best_parameters(
    stage, name, step, other_process, monkeypatch
):
    diverged = []

    def reduce(x: torch.Tensor) -> torch.Tensor:
        """The loss is not finite in another process; gradients stay the same."""
        return x * float("nan") if diverged and x.shape == (1,) else x

    model, training = make_stage(stage)
    if other_process:
        monkeypatch.setattr(steps, "world_size", lambda: 2)
        monkeypatch.setattr(steps, "mean_over_processes", reduce)
    for number, batch in enumerate(batches() * 6, start=1):
        training.step(batch)
        if number == 20:
            at_window = [p.detach().clone() for p in training.trained]
    if other_process:
        diverged.append(True)
    else:
        layer = model.encoder.layer[1]
        first = training.copies[layer.attention.self.learned_parameters]["query_map"] if stage == 1 else None
        with torch.no_grad():
            (layer.output.dense.bias if first is None else first).fill_(float("nan"))
    with pytest.raises(DivergedError, match=f"{'another process' if other_process else name}.*step 25 {step}"):
        training.step(tiny_batch("bert"))
    training.finish()
    close(training.trained, at_window, 0)
    learned = values(model, True)
    assert learned and all(p.isfinite().all() for p in learned.values())
    found = {tuple(p.flatten().tolist()) for p in learned.values()}
    assert found <= {tuple(best.flatten().tolist()) for best in at_window}, "the model has the best parameters"


@pytest.mark.parametrize("stage", [1, 2])
def test_a_continued_stage_equals_an_uninterrupted_one(stage, tmp_path):
    models, data = [], batches() * 6
    for stop in (None, 22):
        model, training = make_stage(stage)
        for i, batch in enumerate(data):
            if i == stop:
                torch.save(training.state_dict(), tmp_path / "state.pt")
                model, training = make_stage(stage)
                training.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
                assert training.step_number == 22
            training.step(batch)
        training.finish()
        models.append(dict(model.state_dict()))
    close(*models, 0)


def test_seed_order_and_report():
    models, seen = [tiny_model("bert") for _ in range(2)], []
    for seed, model in enumerate(models):
        options = DistillationOptions(on_step=lambda step, losses: seen.append((step, losses[0].layer)), seed=seed)
        hea.distill(model, "linear", batches(), steps=6, layers=[1], options=options, **HEDGEHOG)
    assert seen == 2 * [(step, 1) for step in range(1, 7)]
    one, other = (values(model, True) for model in models)
    assert not all(torch.equal(p, other[name]) for name, p in one.items())


@pytest.mark.parametrize(
    ("family", "target", "rank"),
    [
        ("bert", "hidden_states", None),
        ("gpt2", "logits", 2),
        pytest.param("vit", "logits", None, marks=pytest.mark.exhaustive),
        pytest.param("llama", "hidden_states", None, marks=pytest.mark.exhaustive),
    ],
)
def test_second_stage_brings_the_outputs_closer(family, target, rank):
    # On its own training data: random weights and tokens have nothing in common that could be learned.
    exact, test = tiny_model(family, head=True), batches(family)[0]
    models = [tiny_model(family, head=True) for _ in range(2)]
    finetuning = FinetuningOptions(steps=20, target=target, lora_rank=rank, learning_rate=1e-3)
    for model, options in zip(models, (None, DistillationOptions(finetuning=finetuning)), strict=True):
        hea.distill(model, "linear", batches(family), steps=10, options=options, **HEDGEHOG)
    with torch.no_grad():
        outputs = [m(**test, output_hidden_states=True) for m in (exact, *models)]
    wanted, *found = (x.logits.log_softmax(-1) if target == "logits" else x.hidden_states[-1] for x in outputs)
    errors = [(x - wanted).norm() for x in found]
    assert errors[1] < 0.95 * errors[0]
    assert [name for name, _ in models[1].named_parameters()] == [name for name, _ in models[0].named_parameters()]
    assert all(p.requires_grad and p.grad is None for p in models[1].parameters())
    assert not models[1].training


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_or_interruption_in_the_second_stage_keeps_the_last_state(rank, error):
    model = tiny_model("bert")
    before = values(model)
    options = DistillationOptions(finetuning=FinetuningOptions(steps=5, lora_rank=rank))
    with pytest.raises(OSError if error is OSError else Interrupted):
        hea.distill(model, "linear", Broken(error(), 6), steps=2, options=options, **HEDGEHOG)
    after = values(model, False)
    assert list(after) == list(before) and values(model, True)
    assert not all(torch.equal(p, before[name]) for name, p in after.items())


@pytest.mark.parametrize("rank", [None, 2])
def test_the_second_stage_is_without_dropout_and_has_the_draws_of_the_teacher(rank):
    models, options = [tiny_model("bert"), tiny_model("bert").train()], FinetuningOptions(steps=2, lora_rank=rank)
    for model in models:
        hea.distill(model, "linear", batches(), steps=2, options=DistillationOptions(finetuning=options), **HEDGEHOG)
    close(values(models[1]), values(models[0]), 0)
    assert [model.embeddings.dropout.training for model in models] == [False, True]
    kind, config, inputs = case("ViTMAE")  # draws its mask in eval mode, too
    model = kind(config)
    losses = Finetuning(model, make_teacher(model, options, inputs), options).measure(inputs)
    assert max(one.loss for one in losses) < 1e-9


def test_the_course_of_the_learning_rates():
    """Constant, then falling linearly; in the second stage a warmup of a tenth of the steps, then a cosine."""
    rates = []
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, *_: rates.append([group["lr"] for group in optimizer.param_groups])
    )
    finetuning = FinetuningOptions(steps=20, learning_rate=3e-4, attention_learning_rate=2e-3)
    options = DistillationOptions(learning_rate=0.03, finetuning=finetuning)
    hea.distill(tiny_model("bert"), "linear", batches(), steps=8, options=options, **HEDGEHOG)
    hook.remove()
    first, second = rates[:8], rates[8:]
    for course in zip(*first, strict=True):  # of a parameter, whose rate depends on its numbers
        assert 0.1 * 0.03 <= course[0] <= 0.03
        assert course == pytest.approx([course[0] * x for x in (1, 1, 1, 1, 1, 0.75, 0.5, 0.25)])
    shares = [0.5, 1, *(0.5 + 0.5 * math.cos(math.pi * step / 18) for step in range(18))]
    for course, rate in zip(zip(*second, strict=True), (3e-4, 2e-3), strict=True):
        assert course == pytest.approx([rate * x for x in shares])
