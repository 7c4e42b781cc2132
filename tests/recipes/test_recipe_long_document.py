"""The recipe that embeds a long document, in one process and in two."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizer

pytest.importorskip("accelerate")
from recipes import long_document

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def model(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words), max_position_embeddings=32, num_hidden_layers=2, num_attention_heads=2, hidden_size=16,
        intermediate_size=24,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    (tmp_path / "document.txt").write_text("q w e r t y " * 12, encoding="utf-8")
    return folder


def test_one_process_embeds_a_document(tmp_path, model):
    options = ["--document", str(tmp_path / "document.txt"), "--model", str(model), "--max_tokens", "61"]
    long_document.main([*options, "--output", str(tmp_path / "one.json")])
    one = json.loads((tmp_path / "one.json").read_text())
    assert (one["processes"], one["tokens"], one["tokens_of_first_process"]) == (1, 61, 61)
    assert "repeated up to 61" in one["positions"]
    assert abs(torch.tensor(one["embedding"]).norm() - 1.0) < 1e-5


@pytest.mark.exhaustive
def test_two_processes_give_the_embedding_of_one(tmp_path, model):
    options = ["--document", str(tmp_path / "document.txt"), "--model", str(model), "--max_tokens", "61"]
    long_document.main([*options, "--output", str(tmp_path / "one.json")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launcher, str(ROOT / "recipes" / "long_document.py"), *options, "--output", str(tmp_path / "two.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    assert (two["processes"], two["tokens"], two["tokens_of_first_process"]) == (2, 61, 30)
    torch.testing.assert_close(torch.tensor(two["embedding"]), torch.tensor(one["embedding"]), rtol=1e-4, atol=1e-5)


def test_a_document_needs_tokens(tmp_path):
    with pytest.raises(ValueError, match="--max_tokens 0"):
        long_document.main(["--output", str(tmp_path / "x.json"), "--max_tokens", "0"])
