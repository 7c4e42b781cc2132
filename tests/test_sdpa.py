"""`replace_sdpa`: models that call `scaled_dot_product_attention` or `nn.MultiheadAttention` themselves."""

import copy
import functools
import io
import signal
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import hf_efficient_attn as hea
from each import close, refuses
from hf_efficient_attn.evaluation import crossover as measuring
from hf_efficient_attn.methods import crossover, learns
from hf_efficient_attn.sdpa.replacement import _running
from instances import relative_error
from tiny_models import FIRST, METHODS, output, tiny_batch, tiny_model

LENGTH = 96
SMALL = hea.NearFarConfig(block_size=16, num_samples=16)
CAUSAL = hea.method_info("kdeformer").config_class(block_size=16, num_samples=16)  # nearfar is nearly exact here
# A budget above the length: the output must be that of exact attention.
WHOLE = hea.NearFarConfig(block_size=LENGTH, num_samples=LENGTH)


class Attention(nn.Module):
    """Attention as in timm, with the arguments of `scaled_dot_product_attention` at hand."""

    def __init__(self, **options):
        super().__init__()
        self.qkv = nn.Linear(24, 72)
        self.options = options

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(2, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, **self.options).transpose(1, 2).flatten(2)


def model(**options):
    torch.manual_seed(0)
    return nn.Sequential(Attention(**options), Attention(**options)).eval()


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert not _running.modules and torch._C._len_torch_function_stack() == 0


@pytest.fixture
def x():
    return torch.randn(2, LENGTH, 24, generator=torch.Generator().manual_seed(1))


KEYS = torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 30]])  # bool (2, N)
PAIRS = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
BIAS = torch.zeros(2, 1, 1, LENGTH).masked_fill(~KEYS[:, None, None], float("-inf"))


def added(mask):
    """The mask that is added to the scores, as some models make it."""
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


KEYS_OF_PAIRS = KEYS[:, None, None] & torch.ones(LENGTH, 1, dtype=torch.bool)
REPLACED = {
    "no mask": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.2},
    "keys": {"attn_mask": KEYS[:, None, None]},
    "keys, expanded": {"attn_mask": KEYS[:, None, None].expand(2, 3, LENGTH, LENGTH)},
    "keys, for each pair": {"attn_mask": KEYS_OF_PAIRS},
    "keys, added": {"attn_mask": BIAS},
    "keys, added for each pair and head": {"attn_mask": added(KEYS_OF_PAIRS).repeat(1, 3, 1, 1)},
    "causal mask": {"attn_mask": PAIRS},
    "causal mask, added": {"attn_mask": torch.full((LENGTH, LENGTH), float("-inf")).triu(1)},
    "causal mask with keys": {"attn_mask": PAIRS & KEYS_OF_PAIRS},
    "causal mask with keys, added": {"attn_mask": added(PAIRS & KEYS_OF_PAIRS)},
}


@pytest.mark.parametrize("name", REPLACED)
def test_calls_that_are_replaced(name, x):
    plain = model(**REPLACED[name])
    exact = plain(x)
    with hea.replace_sdpa(plain, WHOLE, min_length=0) as replacement:
        close(plain(x)[KEYS], exact[KEYS], 1e-4)
    assert {outcome for *_, outcome in replacement.counts} == {"replaced"}
    small = CAUSAL if "causal" in name else SMALL
    with hea.replace_sdpa(plain, small, min_length=0):
        out = plain(x)
    assert 1e-3 < relative_error(out[KEYS], exact[KEYS]) < 0.5
    if "causal" in name:  # the causal form, in which no later token matters
        with hea.replace_sdpa(plain, small, min_length=0):
            assert torch.equal(plain(torch.cat((x[:, :40], torch.zeros_like(x[:, 40:])), 1))[:, :40], out[:, :40])
    assert torch.equal(plain(x), exact)


OTHER_PAIRS = PAIRS.clone()
OTHER_PAIRS[50, 20] = False
EXACT = [
    ("nearfar", {"attn_mask": OTHER_PAIRS}, "pairs of queries and keys"),
    ("nearfar", {"attn_mask": PAIRS.mT}, "pairs of queries and keys"),
    ("nearfar", {"attn_mask": torch.stack((PAIRS, PAIRS, OTHER_PAIRS))}, "pairs of queries and keys"),
    ("nearfar", {"attn_mask": BIAS + 0.5}, "a bias is added"),
    ("nearfar", {"attn_mask": added(PAIRS) - 0.5}, "a bias is added"),
    ("nearfar", {"attn_mask": nn.Parameter(torch.zeros(1, LENGTH))}, "a bias is added"),
    ("nystromformer", {"is_causal": True}, "no causal form"),
    ("nystromformer", {"attn_mask": PAIRS}, "no causal form"),
    ("nearfar", {"dropout_p": 1.0}, "all weights are dropped"),
    (SMALL, {"min_length": 97}, "fewer than 97 tokens (min_length)"),
    (SMALL, {"min_length": 97, "attn_mask": PAIRS}, "fewer than 97 tokens (min_length)"),
    ("nearfar", {"min_length": None}, "`hf-efficient-attn crossover --method nearfar`"),
    ("auto", {"min_length": None}, "`hf-efficient-attn crossover --method nearfar`"),
]


@pytest.mark.parametrize(("method", "options", "reason"), EXACT, ids=[f"{x[0]}-{i}" for i, x in enumerate(EXACT)])
def test_calls_that_stay_exact(method, options, reason, x):
    plain = model(**{name: value for name, value in options.items() if name != "min_length"})
    exact = plain(x)
    with hea.replace_sdpa(plain, method, min_length=options.get("min_length", 0)) as replacement:
        assert torch.equal(plain(x), exact)
    assert reason in replacement.report() and {name for name, *_ in replacement.counts} == {"0", "1"}


class Tagged(torch.Tensor):
    """A subclass without methods of its own, as torchvision's `Image` is one."""


def nested(layout):
    tensors = [torch.randn(n, 3, 8, generator=torch.Generator().manual_seed(n)) for n in (40, 60)]
    if layout == torch.strided:
        return torch.nested.nested_tensor([x.transpose(0, 1) for x in tensors], layout=layout)
    return torch.nested.nested_tensor(tensors, layout=layout).transpose(1, 2)


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


OTHERS = {
    "jagged": (3 * [nested(torch.jagged)], "nested"),
    "nested": (3 * [nested(torch.strided)], "nested"),
    "subclass": (3 * [random(2, 3, LENGTH, 8).as_subclass(Tagged)], "another subclass"),
    "mask of a subclass": (
        [*3 * [random(2, 3, LENGTH, 8)], KEYS[:, None, None].as_subclass(Tagged)], "another subclass"
    ),
    "meta": (3 * [torch.empty(2, 3, LENGTH, 8, device="meta")], "meta device"),
    "one head of values": ([*2 * [random(2, 3, LENGTH, 8)], random(2, 1, LENGTH, 8)], "heads are broadcast"),
    "one head": ([random(2, 3, LENGTH, 8), *2 * [random(2, 1, LENGTH, 8)]], "heads are broadcast"),
    "one sequence of keys": ([random(2, 3, LENGTH, 8), *2 * [random(1, 3, LENGTH, 8)]], "with one B"),
    "no batch": (3 * [random(3, LENGTH, 8)], "with one B"),
}  # fmt: skip


class Call(nn.Module):
    def forward(self, *tensors):
        return F.scaled_dot_product_attention(*tensors)


@pytest.mark.parametrize("name", OTHERS)
def test_tensors_that_no_method_takes(name):
    tensors, reason = OTHERS[name]
    layer = Call()
    exact = layer(*tensors)
    for min_length in (0, 1000):
        with hea.replace_sdpa(layer, "nearfar", min_length=min_length) as replacement:
            out = layer(*tensors)
        assert type(out) is type(exact) and out.layout == exact.layout and out.device == exact.device
        for one, other in zip(out.unbind(), exact.unbind(), strict=True):
            assert one.is_meta or torch.equal(one, other)
        assert reason in replacement.report()


def test_a_transform_does_not_show_the_values_of_a_mask():
    layer, q = Call(), random(3, 2, 3, LENGTH, 8)
    masks = torch.zeros(3, 2, 1, 1, LENGTH)
    exact = torch.func.vmap(lambda q, mask: layer(q, q, q, mask))(q, masks)
    with hea.replace_sdpa(layer.eval(), SMALL, min_length=0) as replacement:
        torch.testing.assert_close(torch.func.vmap(lambda q, mask: layer(q, q, q, mask))(q, masks), exact)
    assert "values of the mask" in replacement.report()


def test_whether_a_call_is_replaced_does_not_depend_on_the_batch():
    """Without min_length, where larger calls gain earlier."""
    layer = Call()
    crossover.use_measured(lambda method, device: {"float32": crossover.Crossover(1300, 700)})
    try:
        with hea.replace_sdpa(layer, "nearfar") as replacement:
            for batch in (1, 64):
                layer(*3 * [random(batch, 1, 1000, 8)])
    finally:
        measuring.register()
    assert len({outcome for *_, outcome in replacement.counts}) == 1 and len(replacement.counts) == 2


def test_hyperparameters(x):
    plain = model()
    with hea.replace_sdpa(plain, "nearfar", min_length=0, block_size=16, num_samples=16):
        out = plain(x)
    with hea.replace_sdpa(plain, SMALL, min_length=0):
        assert torch.equal(plain(x), out)
    with hea.replace_sdpa(plain, WHOLE, min_length=0, block_size=16, num_samples=16) as replacement:
        assert torch.equal(plain(x), out)
    assert replacement.config == SMALL
    refuses("unknown hyperparameter 'layers'", hea.replace_sdpa, plain, "nearfar", layers=[0])


MASKS = ["none", "padding", "causal", "causal padding", "mask", "mask padding", "mask of heads", "pairs", "weights"]


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_multi_head_attention(mask, is_added, x):
    """`mask` is a causal one, as a tensor."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(24, 3, batch_first=True).eval()
    options = {"need_weights": mask == "weights"}
    form = added if is_added else lambda mask: ~mask
    if "padding" in mask:
        options["key_padding_mask"] = form(KEYS)
    if "causal" in mask or "mask" in mask or mask == "pairs":
        pairs = form(OTHER_PAIRS if mask == "pairs" else PAIRS)
        pairs = pairs.repeat(6, 1, 1) if "heads" in mask else pairs
        options |= {"attn_mask": pairs, "is_causal": "causal" in mask}
    exact = layer(x, x, x, **options)
    with hea.replace_sdpa(layer, WHOLE, min_length=0) as replacement:
        out = layer(x, x, x, **options)
    valid = KEYS if "padding" in mask else torch.ones_like(KEYS)
    close(out[0][valid], exact[0][valid], 1e-4)
    assert (out[1] is None) == (exact[1] is None)
    assert ("replaced" in replacement.report()) == (mask not in ("pairs", "weights"))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("method", [name for name in METHODS if not learns(FIRST[name].config())])
def test_every_method_gives_its_own_output(method, is_causal, x):
    """Within one call of `scaled_dot_product_attention`, the output is that of `hea.attention`."""
    config, plain = FIRST[method].config(), Attention(is_causal=is_causal).eval()
    replacement = hea.replace_sdpa(plain, config, min_length=0)
    out = plain(x)
    query, key, value = plain.qkv(x).unflatten(2, (3, 3, 8)).permute(2, 0, 3, 1, 4)
    replaced = config.causal or not is_causal
    assert ("replaced" in replacement.report()) == replaced
    if replaced:
        expected = hea.attention(config, query, key, value, is_causal=is_causal, seed=zlib.crc32(b"Attention") // 2)
    else:
        expected = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    torch.testing.assert_close(out, expected.transpose(1, 2).flatten(2))


def test_of_two_replacements_the_last_one_decides(x):
    plain = model()
    hea.replace_sdpa(plain, SMALL, min_length=0)
    out = plain(x)
    with hea.replace_sdpa(plain[0], "longformer", min_length=0) as inner:
        assert not torch.equal(plain(x), out)
    assert torch.equal(plain(x), out)
    assert list(inner.counts.values()) == [1]
    first = hea.replace_sdpa(plain, "longformer", min_length=0)
    with hea.replace_sdpa(plain, SMALL, min_length=0):
        assert torch.equal(plain(x), out)
    assert not first.counts


def test_a_hook_that_fails_leaves_nothing_behind(x):
    plain = model()

    def fail(*_):
        raise RuntimeError("another hook")

    handle = plain[1].register_forward_pre_hook(fail)  # it runs before the hooks of the replacement
    hea.replace_sdpa(plain, SMALL, min_length=0)
    refuses("another hook", plain, x, error=RuntimeError)
    handle.remove()
    assert torch.equal(plain(x), plain(x)) and not _running.modules
    wrong = [("bert", None, "give a torch"), (plain, None, "learned parameters")]
    wrong.append((torch.jit.trace(model(), x), None, "does not run Python"))
    for model_or_name, length, reason in [*wrong, *((plain, x, "0 or more, an integer") for x in (True, -1, 1.5, "1"))]:
        refuses(reason, hea.replace_sdpa, model_or_name, "linformer", min_length=length)


def test_nothing_is_replaced_after_ctrl_c(x, request):
    """PyTorch calls no hook when it ends a forward."""
    plain, other = model(), model()
    exact = other(x)
    request.addfinalizer(functools.partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores the signal
    for runs_again in (True, False):
        replacement = hea.replace_sdpa(plain, SMALL, min_length=0)
        handle = plain[1].register_forward_hook(lambda *_: signal.raise_signal(signal.SIGINT))
        refuses(None, plain, x, error=KeyboardInterrupt)
        handle.remove()
        assert torch.equal(other(x), exact)
        assert not runs_again or not torch.equal(plain(x), exact)
        replacement.remove()
        assert torch._C._len_torch_function_stack() == 0


def test_a_method_in_the_model_stays_as_it_is():
    inner, inputs = tiny_model("bert", "nearfar"), tiny_batch("bert")
    out = output(inner, inputs)
    with hea.replace_sdpa(nn.Sequential(inner), "longformer", window_size=1, min_length=0):
        assert torch.equal(output(inner, inputs), out)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_function_stays_exact(use_reentrant, x):
    """Its backward pass would be exact, because it runs outside the module."""

    class Block(Attention):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=use_reentrant)

    block, gradients = Block(), []
    for min_length in (LENGTH + 1, 0):
        with hea.replace_sdpa(block, SMALL, min_length=min_length) as replacement:
            block.zero_grad()
            block(x.requires_grad_()).square().sum().backward()
        gradients.append(block.qkv.weight.grad)
    close(*gradients, 1e-5)
    assert "checkpoint a module instead" in replacement.report()


def test_cross_attention_of_other_sizes(x):
    layer = nn.MultiheadAttention(24, 3, kdim=10, vdim=12, batch_first=True, bias=False).eval()
    given = x, torch.randn(2, 60, 10), torch.randn(2, 60, 12)
    exact = layer(*given, need_weights=False)[0]
    for method, outcome in ((hea.ThinformerConfig(num_samples=60), "replaced"), (SMALL, "nearfar depends on other")):
        with hea.replace_sdpa(layer, method, min_length=0) as replacement:
            close(layer(*given, need_weights=False)[0], exact, 1e-4)
        assert outcome in replacement.report()


def test_copies_and_files_keep_the_replacement_until_it_is_ended(x):
    plain = model()
    exact, inner = plain(x), plain[0](x)
    hea.replace_sdpa(plain, SMALL, min_length=0)
    out = plain(x)
    file = io.BytesIO()
    torch.save(plain, file)
    file.seek(0)
    for other in [copy.deepcopy(plain), torch.load(file, weights_only=False), copy.deepcopy(copy.deepcopy(plain))]:
        assert torch.equal(other(x), out)
        refuses("hea.restore_sdpa", hea.convert, other, "sdpa")
        assert hea.restore_sdpa(other) is other
        assert torch.equal(other(x), exact) and not any(hooks_of(other))
        refuses("no Transformers model", hea.convert, other, "sdpa")
    part = hea.restore_sdpa(copy.deepcopy(plain[0]))
    assert torch.equal(part(x), inner) and not any(hooks_of(part))
    assert torch.equal(plain(x), out)
    assert plain.state_dict().keys() == model().state_dict().keys()
    hea.replace_sdpa(plain[0], "longformer", min_length=0)
    assert torch.equal(hea.restore_sdpa(plain)(x), exact) and not any(hooks_of(plain))
    refuses("give a torch", hea.restore_sdpa, "model")


def hooks_of(model):
    for module in model.modules():
        yield from (module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_always_called)


def test_failed_calls_and_other_threads_and_models(x):
    plain, other = model(), model()
    exact = other(x)
    hea.replace_sdpa(plain, SMALL, min_length=0)
    out = plain(x)
    refuses(None, plain, x[..., :5], error=RuntimeError)
    assert torch.equal(other(x), exact)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda module: module(x), (plain, other)))
    assert torch.equal(results[0], out) and torch.equal(results[1], exact)


def whole(plain, backend="eager", **options):
    return torch.compile(plain, fullgraph=True, backend=backend, **options)


def in_place(plain):
    plain.compile(fullgraph=True, backend="eager")
    return plain


def part(plain):
    plain[0] = whole(plain[0])
    return plain


def part_in_place(plain):
    in_place(plain[0])
    return plain


@pytest.mark.parametrize("order", ["replaced first", "compiled first", "compiled and run first"])
@pytest.mark.parametrize("compiles", [whole, in_place, part, part_in_place])
def test_compiled_models(compiles, order, x):
    """The replacement begins and ends in compiled models, too, and the report names their calls."""
    plain = model(is_causal=True)
    exact = plain(x)
    with hea.replace_sdpa(plain, SMALL, min_length=0):
        out = plain(x)
    if order == "replaced first":
        replacement = hea.replace_sdpa(plain, SMALL, min_length=0)
        compiled = compiles(plain)
    else:
        compiled = compiles(plain)
        if order == "compiled and run first":
            torch.testing.assert_close(compiled(x), exact)
        replacement = hea.replace_sdpa(compiled, SMALL, min_length=0)
    torch.testing.assert_close(compiled(x), out)
    torch.testing.assert_close(compiled(x), out)
    is_part = compiles in (part, part_in_place)
    assert replacement.traced == [("0", "replaced"), ("1", "replaced")][: 1 if is_part else 2]
    assert [(key[0], n) for key, n in replacement.counts.items()] == [("1", 2)] * is_part
    assert "in a graph, calls not counted: 0: replaced" in replacement.report()
    replacement.remove()
    torch.testing.assert_close(compiled(x), exact)


def test_graphs_of_any_length_and_mask(x):
    """Without `min_length`, too, and the report says what a graph does not show."""
    plain = model(attn_mask=PAIRS)
    replacement = hea.replace_sdpa(plain, SMALL, min_length=0)
    whole(plain)(x)
    assert "exact, because the values of the mask" in replacement.report()
    layer = Attention().eval()
    compiled = whole(layer, dynamic=True)
    for min_length, outcome in ((0, "replaced"), (None, "exact, because fewer than")):
        with hea.replace_sdpa(layer, SMALL, min_length=min_length) as replacement:
            for rows in (x, x[:1, :50]):
                torch.testing.assert_close(compiled(rows), layer(rows))
        assert len(replacement.traced) == 1 and replacement.traced[0][1].startswith(outcome)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["checkpointed", "compiled"])
def test_gradients_of_a_compiled_model_and_with_checkpointing(is_compiled, x):
    """Checkpointing draws the same again in training."""
    plain, gradients = model(is_causal=is_compiled).train(not is_compiled), []
    hea.replace_sdpa(plain, SMALL, min_length=0)
    checkpointed = functools.partial(checkpoint_sequential, plain, 2, use_reentrant=False)
    for call in (plain, whole(plain, "aot_eager") if is_compiled else checkpointed):
        torch.manual_seed(3)
        gradients += torch.autograd.grad(call(x.requires_grad_()).square().sum(), plain[0].qkv.weight)
    close(*gradients, 1e-5)
