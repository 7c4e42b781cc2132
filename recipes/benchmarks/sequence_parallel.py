"""Bytes that each process sends in one attention layer of a model that `hea.sequence_parallel` divides.

    python -m recipes.benchmarks.sequence_parallel
    python -m recipes.benchmarks.sequence_parallel --length 131072 --processes 16 --causal

Duration: a quarter of a minute. Expected with 8 processes and 16 heads of dimension 64 in bfloat16: 295 KB for linear,
.8 MB for nystromformer, 1.2 MB for performer and 2.1 MB for linformer and longformer, which do not depend on the
length. Methods that exchange tokens for heads send 8 MB at 8,192 tokens and 67 MB at 65,536.

One process runs the calls of a model and exchanges nothing. The bytes are what it gives to the collectives. How much of
that is on the wire depends on the library: all_reduce moves about twice as much, all_gather one copy for each other
process, and all_to_all all but the process's own part. "tokens for heads" stands for every method without a form of its
own, and for exact attention.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from hf_efficient_attn.cli import main_of, parse_lengths, parse_methods
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods import MethodConfig, available_methods, get_method, method_info, sharded_attention
from hf_efficient_attn.ops.shards import Shards, over_heads
from recipes.common import commands

app = commands.new_app()

EXCHANGE = "tokens for heads"
# Operators of torch's functional collectives, which its differentiable ones call.
_COLLECTIVES = {
    "all_gather_into_tensor": "all_gather", "all_reduce": "all_reduce", "all_to_all_single": "all_to_all",
    "reduce_scatter_tensor": "reduce_scatter",
}  # fmt: skip


class Traffic(TorchDispatchMode):
    """Counts what this process gives to collectives in a context: `forward` and `backward`, bytes by their names.

    `calls` is the number of collectives forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forward, self.backward, self.calls = Counter[str](), Counter[str](), 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name = _COLLECTIVES.get(operator._opname) if operator.namespace == "_c10d_functional" else None
        if name is not None:
            is_backward = torch._C._current_autograd_node() is not None
            (self.backward if is_backward else self.forward)[name] += args[0].numel() * args[0].element_size()
            self.calls += not is_backward
        return operator(*args, **(kwargs or {}))


@contextmanager
def middle_of(processes: int) -> Iterator[Any]:
    """The group of a process in the middle of so many, in which nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=processes // 2, world_size=processes)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class Setting(NamedTuple):
    """What is the same for all rows: (B, H, H_kv, D), the number of processes, and whether attention is causal."""

    shape: tuple[int, int, int, int]
    processes: int
    is_causal: bool


def traffic(config: MethodConfig | None, length: int, how: Setting) -> Traffic:
    """What a process in the middle sends; None for the exchange of tokens for heads."""
    (batch, heads, kv_heads, dim), size = how.shape, how.processes
    lengths = tuple(b - a for a, b in itertools.pairwise(length * i // size for i in range(size + 1)))
    draws = torch.Generator().manual_seed(0)
    shapes = [(batch, n, lengths[size // 2], dim) for n in (heads, kv_heads, kv_heads)]
    own = [torch.randn(shape, generator=draws).to(torch.bfloat16).requires_grad_() for shape in shapes]
    with middle_of(size) as group, Traffic() as found:
        shards = Shards(group, lengths, size // 2)
        if config is None:
            out = over_heads(_any_attention, *own, shards)
        else:
            initial = get_method(config.method).initial_parameters
            sizes = {"num_heads": heads, "head_dim": dim, "value_dim": dim, "max_length": length}
            parameters = initial(config, **sizes) if initial else {}
            out = sharded_attention(config, *own, shards=shards, is_causal=how.is_causal, parameters=parameters)
        torch.autograd.grad(out, own, torch.ones_like(out), allow_unused=True)
    return found


def _any_attention(query: Tensor, key: Tensor, value: Tensor, _: Any) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    return query + key.repeat_interleave(groups, 1) + value.repeat_interleave(groups, 1)


def row(label: str, config: MethodConfig | None, length: int, how: Setting) -> dict[str, Any]:
    """The megabytes of one method at one length. A method without a form of its own exchanges tokens for heads."""
    form = None if config is None else get_method(config.method).sharded
    if config is not None and not (form is not None and form.applies(config, length, how.is_causal)):
        label, config = f"{label} ({EXCHANGE})", None
    found = traffic(config, length, how)
    sizes = {"forward": found.forward.total() / 1e6, "backward": found.backward.total() / 1e6}
    return {"method": label, "length": length, **sizes, "collectives": ", ".join(found.forward)}


@app.command(epilog="Example: python -m recipes.benchmarks.sequence_parallel --length 65536 --processes 16")
def run(
    length: commands.numbers_option("Tokens of all processes together", "8192,65536") = [],  # noqa: B006
    method: commands.methods_option("those with a form of their own") = [],  # noqa: B006
    processes: commands.option(int, "Processes that share a sequence.", min=1) = 8,
    causal: commands.option(bool, "Causal attention.", "--causal/--bidirectional") = False,
    csv: commands.Csv = None,
) -> None:
    """Count the bytes that a process sends in one layer, in bfloat16."""
    how, lengths = Setting((1, 16, 16, 64), processes, causal), parse_lengths(length) or [8192, 65_536]
    if min(lengths) < processes:
        raise UnsupportedAttentionError(f"--length {min(lengths)}: give at least one token for each process")
    names = method or [name for name in available_methods() if get_method(name).sharded is not None]
    configs = {k: v for k, v in parse_methods(names).items() if not causal or method_info(v.method).causal}
    rows = [
        row(label, config, tokens, how) for tokens in lengths for label, config in {**configs, EXCHANGE: None}.items()
    ]
    columns = {"tokens": "{length:,}", "attention": "{method}", "sent forward": "{forward:.3g} MB"}
    columns |= {"sent backward": "{backward:.3g} MB", "collectives": "{collectives}"}
    note = (
        f"{'causal' if causal else 'bidirectional'}, batch 1, 16 heads of dimension 64, bfloat16, {processes} "
        "processes: bytes that each process gives to the collectives in one layer"
    )
    commands.report(rows, columns, note, csv=csv)


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.sequence_parallel")
