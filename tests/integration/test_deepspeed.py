"""DeepSpeed's own Ulysses and Trainer's `sp_size`; without the package deepspeed these tests are skipped.

On a machine without a GPU `DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed` installs it.
"""

import copy
import functools
import importlib.util
import os

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
from transformers import Trainer, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import processes
from processes import refused
from test_engines import LENGTH, METHODS, ids, largest_error, llama, relative

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="pip install deepspeed")


def own_tokens():
    """The positions of the tokens of this process."""
    size, rank = dist.get_world_size(), dist.get_rank()
    return slice(rank * LENGTH // size, (rank + 1) * LENGTH // size)


def begin():
    """Start DeepSpeed's communication on the CPU, without an operator that would be compiled."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # `import deepspeed.comm.torch` would give torch, which that package imports.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)


def by_deepspeed(cases):
    """The differences of the logits and of the gradients from one process, and a refusal."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as state
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    begin()
    found, own = {}, own_tokens()
    for method, num_kv_heads in cases:
        model, attend = llama(method, num_kv_heads), ALL_ATTENTION_FUNCTIONS[method]
        divided = copy.deepcopy(model)
        wanted = model(ids()).logits
        UlyssesSPAttentionHF.register_with_transformers(
            divided, method, sequence_parallel_size=dist.get_world_size(), micro_batch_size=2
        )
        try:
            call = {"position_ids": torch.arange(LENGTH)[None, own].repeat(2, 1), "use_cache": False}
            logits = divided(ids()[:, own], **call).logits
            logits.square().sum().backward()
            padded = torch.ones(2, LENGTH // dist.get_world_size(), dtype=torch.int64)
            padded[:, 0] = 0
            call["attention_mask"] = padded
            lost = refused(functools.partial(divided, ids()[:, own], **call))
        finally:
            ALL_ATTENTION_FUNCTIONS[method] = attend
            state._SEQUENCE_PARALLEL_GROUP = state._SEQUENCE_DATA_PARALLEL_GROUP = None
        wanted.square().sum().backward()
        error = max(relative(logits, wanted[:, own]), largest_error(model, divided))
        found[method, num_kv_heads] = error, lost
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_ulysses(tmp_path, size):
    cases = [(method, 4) for method in METHODS] + [("kdeformer", 2), ("linear", 2), ("kdeformer", 1)]
    for found in processes.run(size, tmp_path, by_deepspeed, cases):
        for case, (error, lost) in found.items():
            assert error < 1e-6, (case, error)
            assert "without the attention_mask" in lost


def sequences():
    tokens = torch.randint(0, 64, (8, LENGTH), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": row, "position_ids": torch.arange(LENGTH)} for row in tokens]


def train(method, folder, **options):
    """The losses of some steps of Trainer.

    AdamW does not depend on the size of the gradients, which DeepSpeed scales, with exact attention as well.
    """
    args = TrainingArguments(
        folder, max_steps=3, per_device_train_batch_size=2, learning_rate=0.01, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, max_grad_norm=0.0, disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = Trainer(llama(method).float().train(), args, train_dataset=sequences())
    trainer.train()
    return [x["loss"] for x in trainer.state.log_history if "loss" in x]


def by_trainer(method, folder):
    begin()
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True)
    handler.sp_attn_implementation = method
    parallelism = ParallelismConfig(sp_size=dist.get_world_size(), sp_backend="deepspeed", sp_handler=handler)
    engine = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 0},
        "zero_allow_untested_optimizer": True,
    }
    return train(method, folder, parallelism_config=parallelism, deepspeed=engine)


def test_trainer_with_sp_size(tmp_path):
    losses = train("kdeformer", tmp_path / "one")
    for found in processes.run(2, tmp_path / "run", by_trainer, "kdeformer", str(tmp_path / "two")):
        assert found == pytest.approx(losses, rel=1e-4)
