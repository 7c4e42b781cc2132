"""Up-training with FSDP2 on two processes (gloo, CPU): same losses as one process, and refusals."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

PROGRAM = """
import json, sys
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
import hf_efficient_attn as hea

folder, batch, sharded = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "fsdp"
generator = torch.Generator().manual_seed(1)
samples = [{"input_ids": torch.randint(5, 60, (24,), generator=generator), "labels": i % 2} for i in range(32)]


def trainer(stages, resume=None):
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    model.accepts_loss_kwargs = False
    shards = {"version": 2, "fsdp_version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"]}
    options = {"fsdp": "full_shard auto_wrap", "fsdp_config": shards} if sharded else {}
    arguments = TrainingArguments(
        folder, max_steps=8, save_steps=4, logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True,
        per_device_train_batch_size=batch, learning_rate=1e-2, adam_epsilon=1e-3, weight_decay=0.1, **options)
    return Trainer(model, arguments, train_dataset=samples, callbacks=[hea.UptrainingCallback(stages)])


def show(trained):
    if trained.is_world_process_zero():
        entries = trained.state.log_history
        print("RESULT", json.dumps([[e["loss"] for e in entries if "loss" in e],
                                    [e["uptraining_stage"] for e in entries if "uptraining_stage" in e]]))


stages = [("sdpa", 2), ("linear", 5), ("longformer", None, {"window_size": 8})]
first = trainer(stages)
first.train()
show(first)
if sharded:
    again = trainer(stages)
    again.train(resume_from_checkpoint=folder + "/checkpoint-4")
    show(again)
    learned = [("linformer", 2, {"projection_dim": 8}), ("flurka_linear", None)]
    trainer(learned).train()
    try:
        trainer([*learned[:1], ("linear", None)])
    except hea.UnsupportedAttentionError as error:
        if int(__import__("os").environ["RANK"]) == 0:
            print("REFUSED", error)
"""


@pytest.mark.slow
def test_fsdp2_on_two_processes(tmp_path):
    pytest.importorskip("accelerate")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }

    def run(*launcher: str, batch: int, how: str) -> list[str]:
        command = [sys.executable, *launcher, str(program), str(tmp_path / how), str(batch), how]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()

    def results(lines: list[str]) -> list:
        return [json.loads(line.partition(" ")[2]) for line in lines if line.startswith("RESULT")]

    ((losses, switches),) = results(run(batch=8, how="one"))
    assert switches == ["linear", "longformer"]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    lines = run(*launcher, batch=4, how="fsdp")
    (sharded, again), wanted = results(lines), torch.tensor(losses)
    for found, stages in (sharded, again):
        assert stages == switches
        torch.testing.assert_close(torch.tensor(found), wanted, rtol=0, atol=1e-4)
    assert again == sharded
    (refusal,) = [line for line in lines if line.startswith("REFUSED")]
    assert "do not learn the same parameters" in refusal and "DistributedDataParallel" in refusal
