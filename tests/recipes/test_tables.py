"""Tables of recipes: operations, whose counter is checked by hand for every kind, errors in half precision, traffic."""

import re

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

import hf_efficient_attn as hea
from hf_efficient_attn.ops import attend as attend_module
from hf_efficient_attn.ops.attend import attend
from hf_efficient_attn.ops.backends import cpu, products
from instances import inputs, numbers
from recipes.benchmarks import error as error_table
from recipes.benchmarks import operations, sequence_parallel
from recipes.common import counting
from recipes.common.counting import count
from recipes.common.inputs import Activation


@pytest.fixture(autouse=True)
def kernels_of_pytorch(monkeypatch):
    """What is counted here are PyTorch's kernels, whatever others the table of backends has."""
    monkeypatch.setattr(attend_module, "BACKENDS", (cpu.BACKEND, products.BACKEND))


X = numbers(4, 8, 16).float()
INDEX = torch.tensor([2, 0, 1])
SAME, CROSS = inputs(2, 3, 20, 16, kv_len=12), inputs(2, 3, 20, 16, value_dim=10)

# (what, call, products, exponentials, sorting, gathers)
CASES = [
    ("matmul", lambda: X[0] @ X[1].t(), 2 * 8 * 8 * 16, 0, 0, 0),
    ("baddbmm_", lambda: torch.zeros(4, 8, 8).baddbmm_(X, X.transpose(1, 2)), 2 * 4 * 8 * 8 * 16, 0, 0, 0),
    ("attention", lambda: scaled_dot_product_attention(*SAME), 2 * 1440 * 32, 1440, 0, 0),
    ("other values", lambda: scaled_dot_product_attention(*CROSS), 2 * 2400 * 26, 2400, 0, 0),
    ("exp", lambda: X.exp(), 0, 512, 0, 0),
    ("exp2_", lambda: X.clone().exp2_(), 0, 512, 0, 0),
    ("softmax", lambda: X.softmax(1), 0, 512, 0, 0),
    ("softmax into", lambda: torch.softmax(X, 1, out=torch.empty_like(X)), 0, 512, 0, 0),
    ("logsumexp", lambda: X.logsumexp(-1), 0, 512, 0, 0),
    ("logaddexp", lambda: torch.logaddexp(X, X[:, :1]), 0, 512, 0, 0),
    ("sort", lambda: X.sort(-1), 0, 0, 32 * 16 * 4, 0),
    ("sort of columns", lambda: X.sort(dim=1, descending=True), 0, 0, 64 * 8 * 3, 0),
    ("stable sort", lambda: X.sort(dim=1, stable=True), 0, 0, 64 * 8 * 3, 0),
    ("topk", lambda: X.topk(3), 0, 0, 32 * 16 * 4, 0),
    ("topk of columns", lambda: X.topk(3, 1), 0, 0, 64 * 8 * 3, 0),
    ("sort of one", lambda: X[..., :1].sort(-1), 0, 0, 0, 0),
    ("searchsorted", lambda: torch.searchsorted(torch.arange(7.0), X), 0, 0, 512 * 3, 0),
    ("bucketize", lambda: torch.bucketize(X, torch.arange(7.0)), 0, 0, 512 * 3, 0),
    ("gather", lambda: X.gather(1, INDEX[None, :, None].expand(4, 3, 16)), 0, 0, 0, 4 * 3 * 16),
    ("index_select", lambda: X.index_select(2, INDEX), 0, 0, 0, 4 * 8 * 3),
    ("index", lambda: X[:, INDEX], 0, 0, 0, 4 * 3 * 16),
    ("index by pairs", lambda: X[INDEX[:, None], INDEX], 0, 0, 0, 3 * 3 * 16),
    ("embedding", lambda: torch.nn.functional.embedding(INDEX, X[0]), 0, 0, 0, 3 * 16),
    ("scatter", lambda: X.scatter(1, INDEX[None, :, None].expand(4, 3, 16), 0.0), 0, 0, 0, 4 * 3 * 16),
    ("index_add", lambda: X[0].index_add(0, INDEX, X[1, :3]), 0, 0, 0, 3 * 16),
    ("index_fill", lambda: X.index_fill(1, INDEX, 0.0), 0, 0, 0, 4 * 3 * 16),
    ("index_fill_", lambda: X.clone().index_fill_(2, INDEX, 0.0), 0, 0, 0, 4 * 8 * 3),
    ("assignment", lambda: X.clone().__setitem__(INDEX, 0.0), 0, 0, 0, 3 * 8 * 16),
    ("sums and copies", lambda: (X.sum(1), X + X, X.clone(), X.cumsum(1), X.amax(1)), 0, 0, 0, 0),
]  # fmt: skip


@pytest.mark.parametrize("inference", [False, True], ids=["gradients", "inference"])
@pytest.mark.parametrize(
    ("call", "expected"), [pytest.param(call, tuple(rest), id=name) for name, call, *rest in CASES]
)
def test_every_operator_by_hand(call, expected, inference):
    with torch.inference_mode(inference):
        assert tuple(count(call)) == expected


def test_gradients_and_conventions():
    leaves = [x.requires_grad_() for x in inputs(1, 2, 24, 16)]
    found = count(lambda: scaled_dot_product_attention(*leaves).sum().backward())
    pairs = 2 * 24 * 24
    # Two products in the forward pass; the scores again and four gradients in the backward pass.
    assert found == (2 * pairs * 32 + 2 * pairs * (3 * 16 + 2 * 16), 2 * pairs, 0, 0)
    query, key, value = (x.requires_grad_() for x in inputs(6, 1, 5, 8, kv_len=7, value_dim=6))
    found = count(lambda: attend(query, key, value, scale=1.0).out.sum().backward())
    pairs = 6 * 5 * 7  # the kernel takes values of the dimension of the keys
    assert found == (2 * pairs * (8 + 8) + 2 * pairs * (3 * 8 + 2 * 8), 2 * pairs, 0, 0)

    def call():
        return (X @ X.transpose(1, 2)).exp().sort(-1)

    two, one = count(call), count(call, multiply_adds_as_one=True)
    assert count(call) == two  # counts do not accumulate
    assert one == two._replace(products=two.products // 2) and one.products == 4 * 8 * 8 * 16


# Multiplications of one head with N tokens, queries and keys of dimension D and values of dimension Dv; no padding.
@pytest.mark.parametrize(
    ("config", "multiplications"),
    [
        (None, lambda n, d, dv: n * n * d + n * n * dv),
        # Hash codes of queries and keys and their ranks; scores of 8 + 24 keys, and their product with the values.
        # The kernel takes keys and values of one dimension.
        (
            hea.HyperAttentionConfig(block_size=8, num_samples=24, num_hashes=7, near_field="lsh"),
            lambda n, d, dv: 2 * n * 7 * (d + 1) + n * 32 * 2 * max(d, dv),
        ),
        # The state of the keys, and its product with each query, with 8 columns for the sums of weights.
        (hea.LinearConfig(), lambda n, d, dv: n * d * dv + n * d * (dv + 8)),
        # The directions attend to the keys, and the queries to the directions.
        (hea.PerformerConfig(num_features=32), lambda n, d, dv: 2 * n * 32 * 2 * max(d, dv)),
        # Projected keys and values; attention to them.
        (hea.LinformerConfig(projection_dim=12), lambda n, d, dv: 12 * n * (d + dv) + n * 12 * 2 * max(d, dv)),
    ],
    ids=lambda x: getattr(x, "method", None),
)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_operations_are_two_for_every_multiplication(config, multiplications, needs_grad):
    for values in (16, 10):
        leaves = tuple(x.requires_grad_(needs_grad) for x in inputs(1, 2, 96, 16, value_dim=values))
        found = count(lambda: counting.compute(config, leaves)).products  # noqa: B023
        assert found == 2 * 2 * multiplications(96, 16, values)


class Called(TorchDispatchMode):
    """Records the called operators, and in place of composite ones those of which they consist."""

    def __init__(self):
        super().__init__()
        self.operators = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        with self:
            found = operator.decompose(*args, **(kwargs or {}))
        if found is not NotImplemented:
            return found
        self.operators.add(operator._overloadpacket)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", hea.available_methods())
def test_everything_that_counts_is_counted(name):
    with torch.no_grad(), Called() as called:
        hea.attention(hea.method_info(name).config_class().with_budget(32), *inputs(1, 2, 96, 16))
    for part, pattern in {
        "products": r"mm(?!ax)|mv|dot|conv|_linear|attention|outer|cdist",
        "exponentials": r"exp(?!and)|softmax|attention|sigmoid|(?<!r)elu",
        "sorting": r"sort|topk|kthvalue|bucketize",
        "gathers": r"gather|^index|scatter|take",
    }.items():
        known = {*counting.FORMULAS_BY_PART[part], *(flop_counter.flop_registry if part == "products" else ())}
        found = {operator for operator in called.operators if re.search(pattern, operator.__name__)}
        assert found <= known
        assert found or part not in ("products", "exponentials")


@pytest.mark.parametrize(
    ("layer", "exact"),
    [("biggan", 8 * 4096 * 1024 * 320), ("t2t.0", 128 * 3136**2 * 128), ("t2t.1", 128 * 784**2 * 128)],
)
def test_exact_attention_is_the_paper_s(layer, exact):
    (row,) = operations.measure(operations.LAYERS[layer], {}, [], rounds=1)
    assert row["products"] == exact and row["fewer_products"] == 1
    if row["paper_gflop"]:
        assert exact / 1e9 == pytest.approx(row["paper_gflop"], rel=3e-4)


def test_kdeformer_at_the_authors_settings_costs_what_they_say_or_less():
    rows = operations.measure(operations.LAYERS["biggan"], {"kdeformer": hea.KDEformerConfig()}, [128], rounds=1)
    _, own, theirs = rows
    assert (own["setting"], theirs["setting"]) == ("budget 128", "authors'")
    # 2.596 in Table 1, which does not count sorts and gathers. They are not part of the products here either. Theirs
    # is attention to 64 + 128 keys of dimension 64 and values of dimension 256 for each query, and the choice of these
    # keys. Our kernel takes keys of dimension 256; choosing them takes fewer products.
    attention, kernel = (8 * 4096 * (64 + 128) * (d + 256) / 1e9 for d in (64, 256))
    assert 0 < theirs["products"] / 1e9 - kernel < 2.596 - attention
    assert own["fewer_products"] > theirs["fewer_products"] > theirs["fewer"]


def test_table_is_printed_and_written(table):
    (exact, linear), out = table(operations, "--layer biggan --method scatterbrain,linear --rounds 1")
    assert "Omitted, since they have no rectangular form: scatterbrain" in out
    assert (exact["method"], linear["method"]) == ("sdpa", "linear")
    assert float(linear["fewer_products"]) == pytest.approx(4096 * 1024 * 320 / (64 * (256 * 1024 + 264 * 4096)))
    _, out = table(operations, "--layer t2t.1 --method linear --rounds 1")
    assert re.search(r"linear .*\d\.\dx +\|$", out, re.MULTILINE) and "10.071" in out


@pytest.mark.parametrize("causal", [False, True])
def test_errors_of_a_method(causal):
    tensors, options = inputs(1, 2, 96, 16, dtype=torch.bfloat16), {"is_causal": causal, "scale": 0.5}
    found = error_table.half_errors(hea.LongformerConfig(), Activation(0, *tensors, 0.5), 16, causal)
    given, config = (tensors, [x.double() for x in tensors]), hea.LongformerConfig().with_budget(16)
    half, truth = (scaled_dot_product_attention(*x, **options) for x in given)
    ours, reference = (hea.attention(config, *x, **options) for x in given)
    pairs = {"exact": (half, truth), "at": (ours, reference)}
    pairs |= {"approximation": (reference, truth), "in_all": (ours, truth)}
    for name, (out, expected) in pairs.items():
        errors = (out.double() - expected).norm(dim=(2, 3)) / expected.norm(dim=(2, 3))
        assert found[name] == pytest.approx(errors.mean().item())
    assert 0 < found["within"] <= 3 * found["exact"] and 0 < found["at"] < 0.01 < found["approximation"]


def test_the_command_of_errors(table):
    methods = "--method nearfar,linear,nystromformer:pinv=solve --half bfloat16,float16"
    wider, out = table(error_table, "--tokens 64 --budget 16,32 --inputs 2", methods)
    rows = [row for row in wider if row["budget"] == "16"]
    assert len(wider) == 2 * len(rows) and float(wider[0]["approximation"]) > float(wider[3]["approximation"]) > 0
    names = ["nearfar", "linear", "nystromformer (pinv=solve)"]
    assert [(row["dtype"], row["method"]) for row in rows] == [(d, n) for d in ("bfloat16", "float16") for n in names]
    bfloat16, float16 = (float(row["exact"]) for row in rows[::3])
    assert float16 < bfloat16 / 4
    assert [bool(row["within"]) for row in rows[:3]] == [True, False, True]
    assert all(float(row["within"]) <= 3 * float(row["exact"]) for row in rows if row["within"])
    assert "random: 64 tokens, 1 layers, 8 heads of 64, 2 inputs. Relative" in out


HOW = sequence_parallel.Setting((1, 16, 16, 64), 8, False)


@pytest.mark.parametrize("length", [4096, 8192])
def test_summaries_do_not_grow_with_the_length(length):
    names = ("linear", "performer", "linformer", "nystromformer", "longformer")
    configs = {name: hea.method_info(name).config_class() for name in names}
    assert {name: sequence_parallel.traffic(x, length, HOW).forward.total() for name, x in configs.items()} == {
        "linear": 16 * (64 * (64 + 8) + 1) * 4,
        "performer": 16 * (256 * (64 + 8) + 1) * 4,
        "linformer": 16 * 256 * (64 + 64) * 4,
        "nystromformer": 16 * 64 * (2 * 64 + 64 + 1) * 4,
        "longformer": 16 * 2 * 256 * (64 + 64) * 2,
    }


@pytest.mark.parametrize("kv_heads", [16, 8, 4, 1])
def test_tokens_for_heads(kv_heads):
    found = sequence_parallel.traffic(None, 65_536, HOW._replace(shape=(1, 16, kv_heads, 64)))
    # Fewer key heads than processes are sent in copies, one for each process.
    assert found.forward.total() == found.backward.total() == 65_536 // 8 * (2 * 16 + 2 * max(8, kv_heads)) * 64 * 2
    assert found.calls == 2


def test_the_command_of_traffic(table):
    rows, _ = table(sequence_parallel, "--length 8192 --causal")
    assert [row["method"] for row in rows] == ["linear", "longformer", "performer", "tokens for heads"]
