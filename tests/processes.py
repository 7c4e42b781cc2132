"""Several processes on this machine for a test: torch.distributed with gloo on 127.0.0.1."""

import datetime
import os
import socket
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import hf_efficient_attn as hea

# A server that has imported what takes long forks the processes; elsewhere each imports it.
_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
PRELOADED = [
    "hf_efficient_attn._api", "hf_efficient_attn.training.callback", "torch._dynamo", "transformers.trainer",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "bert", "gpt2")),
]  # fmt: skip


def _start(rank: int, size: int, port: int, folder: str, function: Callable[..., Any], arguments: tuple) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size)
    )
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
    try:
        result = function(*arguments)
    except BaseException:  # noqa: BLE001  # as a script that fails: the others must notice that this process has ended
        Path(folder, f"error{rank}").write_text(traceback.format_exc(), encoding="utf-8")
        os._exit(1)
    torch.save(result, Path(folder, f"result{rank}"))
    dist.barrier()
    dist.destroy_process_group()


def run(size: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What a function of a module of the tests returns in each of `size` processes.

    Raises:
        AssertionError: a process fails. The message contains the first error of each.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder.mkdir(parents=True, exist_ok=True)
    if _METHOD == "forkserver":
        multiprocessing.set_forkserver_preload(PRELOADED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        given = size, free.getsockname()[1], str(folder), function, arguments
    context = multiprocessing.start_processes(_start, given, size, join=False, start_method=_METHOD)
    ended = [process.join(timeout=900) or process.exitcode for process in context.processes]
    errors = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("error*"))]
    assert not any(ended), "\n".join([f"exit codes {ended}", *errors])
    return [torch.load(folder / f"result{rank}", weights_only=False) for rank in range(size)]


def mesh(dimensions: int) -> types.SimpleNamespace:
    """What `hea.sequence_parallel` reads of a DeviceMesh, without processes."""
    return types.SimpleNamespace(ndim=dimensions, mesh_dim_names=("dp", "sp"), get_group=object)


def refused(function: Callable[[], Any]) -> str | None:
    """The message with which a call is refused; None if it is not."""
    try:
        function()
    except hea.UnsupportedAttentionError as error:
        return str(error)
    return None
