"""`replace_sdpa`: models that call `scaled_dot_product_attention` or `nn.MultiheadAttention` themselves."""

import copy
import io
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import hf_efficient_attn as hea
from each import close, refuses
from hf_efficient_attn.methods import learns
from hf_efficient_attn.sdpa import _running
from instances import relative_error
from tiny_models import FIRST, METHODS

LENGTH = 96
SMALL = hea.NearFarConfig(block_size=16, num_samples=16)
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


REPLACED = [{}, {"is_causal": True}, {"scale": 0.2}]
REPLACED += [
    {"attn_mask": mask} for mask in (KEYS[:, None, None], KEYS[:, None, None].expand(2, 3, LENGTH, LENGTH), BIAS)
]


@pytest.mark.parametrize("options", REPLACED, ids=str)
def test_calls_that_are_replaced(options, x):
    plain = model(**options)
    exact = plain(x)
    with hea.replace_sdpa(plain, WHOLE, min_length=0) as replacement:
        close(plain(x)[KEYS], exact[KEYS], 1e-4)
    assert {outcome for *_, outcome in replacement.counts} == {"replaced"}
    with hea.replace_sdpa(plain, SMALL, min_length=0):
        assert 1e-3 < relative_error(plain(x)[KEYS], exact[KEYS]) < 0.5
    assert torch.equal(plain(x), exact)


EXACT = [
    ("nearfar", {"attn_mask": PAIRS}, "pairs of queries and keys"),
    ("nearfar", {"attn_mask": BIAS + 0.5}, "a bias is added"),
    ("nystromformer", {"is_causal": True}, "no causal form"),
    (SMALL, {"min_length": 97}, "fewer than 97 tokens"),
    ("nearfar", {"min_length": None}, "fewer than"),
]


@pytest.mark.parametrize(("method", "options", "reason"), EXACT, ids=str)
def test_calls_that_stay_exact(method, options, reason, x):
    options = {"min_length": 0, **options}
    min_length = options.pop("min_length")
    plain = model(**options)
    exact = plain(x)
    with hea.replace_sdpa(plain, method, min_length=min_length) as replacement:
        assert torch.equal(plain(x), exact)
    assert reason in replacement.report() and {name for name, *_ in replacement.counts} == {"0", "1"}


@pytest.mark.parametrize("mask", ["none", "padding", "causal", "causal padding", "pairs", "weights"])
def test_multi_head_attention(mask, x):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(24, 3, batch_first=True).eval()
    options = {"need_weights": mask == "weights"}
    if "padding" in mask:
        options["key_padding_mask"] = ~KEYS
    if "causal" in mask or mask == "pairs":
        options |= {"attn_mask": ~PAIRS, "is_causal": "causal" in mask}
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
        seed = zlib.crc32(b"Attention") // 2
        expected = hea.attention(config, query, key, value, is_causal=is_causal, seed=seed)
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
    with pytest.raises(RuntimeError, match="another hook"):
        plain(x)
    handle.remove()
    assert torch.equal(plain(x), plain(x)) and not _running.modules
    for wrong, reason in ((("bert", "nearfar"), "give a torch"), ((plain, "linformer"), "learned parameters")):
        refuses(reason, hea.replace_sdpa, *wrong)


def test_cross_attention_of_other_sizes(x):
    layer = nn.MultiheadAttention(24, 3, kdim=10, vdim=12, batch_first=True, bias=False).eval()
    given = x, torch.randn(2, 60, 10), torch.randn(2, 60, 12)
    exact = layer(*given, need_weights=False)[0]
    with hea.replace_sdpa(layer, WHOLE, min_length=0) as replacement:
        close(layer(*given, need_weights=False)[0], exact, 1e-4)
    assert "replaced" in replacement.report()


def test_gradient_checkpointing_computes_the_same_again(x):
    plain, gradients = model().train(), []
    hea.replace_sdpa(plain, SMALL, min_length=0)
    for call in (plain, lambda x: checkpoint_sequential(plain, 2, x, use_reentrant=False)):
        torch.manual_seed(3)
        gradients += torch.autograd.grad(call(x.requires_grad_()).square().sum(), plain[0].qkv.weight)
    close(*gradients, 1e-5)


def test_copies_and_files_keep_the_replacement(x):
    plain = model()
    hea.replace_sdpa(plain, SMALL, min_length=0)
    out = plain(x)
    file = io.BytesIO()
    torch.save(plain, file)
    file.seek(0)
    for other in (copy.deepcopy(plain), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), out)
    assert plain.state_dict().keys() == model().state_dict().keys()


def test_failed_calls_and_other_threads_and_models(x):
    plain, other = model(), model()
    exact = other(x)
    hea.replace_sdpa(plain, SMALL, min_length=0)
    out = plain(x)
    with pytest.raises(RuntimeError):
        plain(x[..., :5])
    assert torch.equal(other(x), exact)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda module: module(x), (plain, other)))
    assert torch.equal(results[0], out) and torch.equal(results[1], exact)


def test_compiles(x):
    plain = model(is_causal=True)
    hea.replace_sdpa(plain, SMALL, min_length=0)
    out = plain(x)
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), out)
