"""What the commands refuse: each is one line on stderr, exit status 2, before anything is measured or written."""

import math
import pathlib
import shlex

import pytest
import torch
import transformers

import converted
from helpers.commands import TEXT, refused, save
from helpers.encoder_decoders import tiny
from hf_efficient_attn.evaluation import benchmark, crossover
from tiny_models import tiny_model

ANALYZE = "analyze gpt2 --data words.txt"
CONVERT = "convert bert -o out"
PLAIN = "distill bert --data words.txt --length 40 --batch-size 2 --steps 6 --save-steps 3 -o out"
DISTILL = f"{PLAIN} --method linear --set feature_map=hedgehog --set num_features=16"
SOUND = ("benchmark sound", "analyze sound --data words.txt", f"{PLAIN.replace('bert', 'sound')} --method linformer")
GIVE_EITHER = "give either --method NAME, or --config FILE"
NO_DEVICE = "PyTorch cannot compute there; on this machine it can use cpu"
FILES = {
    "words.txt": TEXT.encode(),
    "empty.txt": b" \n",
    "short.txt": b"w1 w2 w3",
    "few.txt": b"w1 w2 w3 " * 40,
    "binary.txt": b"\xff\xfe\x00",
    "text.txt.gz": b"no gzip",
    "three.jsonl": b'{"text": 3}',
    "array.jsonl": b"[1]",
    "end.jsonl": b'{"text": "x"}\n{',
    "broken/broken.png": b"\x89PNG\r\n\x1a\n",
    "full/file.txt": b"",
    "none_kept.json": b'{"calibrated": null}',
    "number.json": b'{"calibrated": 3}',
    "misspelt.json": b'{"method": "kdeformr"}',
    "layer_7.json": b'{"method": "linear", "layers": [7]}',
}
REFUSALS = [
    # All commands.
    ("demos", "Did you mean 'demo'? Try: hf-efficient-attn --help"),
    ("info", "NAME"),
    ("info my_method", "If a file of your own registers it, import that file first (--import FILE of the commands)."),
    ("methods --jsn", "--jsn"),
    *((f"demo --minutes {x}", "Invalid value for '--minutes'") for x in (0, -1, "x")),
    ("demo --method longformr", "Did you mean 'longformer'?"),
    ("demo --method longformer:window=3", "Did you mean 'window_size'?"),
    ("demo --method longformer:window_size=-3", "at least 0"),
    ("demo --method longformer --set num_samples=3", "none of the chosen methods"),
    ("demo --method longformer --set kdeformer.num_samples=3", "none of the chosen methods"),
    ("demo --method longformer --set kdeformr.num_samples=3", "Did you mean 'kdeformer'?"),
    ("demo --method longformer --set window_size", "key=value"),
    ("demo --method longformer --set window_siz=3", "has it. Did you mean 'window_size'?"),
    ("demo --method sdpa", "sdpa is exact attention, with which methods are compared anyway: leave it out"),
    ("demo --length many", "not a number of tokens"),
    ("demo --length 100", "between 512 and 16384"),
    ("demo --length ,", "at least one"),
    ("demo --threads 0", "--threads"),
    ("demo --plot picture.bogus", "must end in one of"),
    ("demo --plot no/such/folder/picture.png", "its folder must exist"),
    ("crossover --method kdeformr", "Did you mean 'kdeformer'?"),
    ("crossover --method linformer", "learned parameters"),
    ("crossover --method auto --renew", "measured for nearfar: name nearfar"),
    ("crossover --device nowhere", f"--device nowhere: {NO_DEVICE}"),
    *((line, "takes input_features. Supported are models of text") for line in SOUND),
    # benchmark
    ("benchmark nowhere", "nowhere"),
    ("benchmark gpt2 --methods nystromformer", "nystromformer has no causal form. Methods that have one: "),
    ("benchmark gpt2 --set window_size=3", "--methods"),
    ("benchmark gpt2 --lengths 0", "not a number of tokens"),
    ("benchmark gpt2 --data nothing.txt", "nothing.txt: not a file"),
    ("benchmark gpt2 --data broken", "no texts in it (.txt, .txt.gz, .jsonl, .jsonl.gz)"),
    ("benchmark gpt2 --data words.txt --data nothing.txt", "nothing.txt: not a file; texts are .txt"),
    ("benchmark gpt2 --data short.txt --lengths 100", "has 3 tokens, but an input of 100 tokens needs 100"),
    ("benchmark gpt2 --data binary.txt", "not UTF-8"),
    ("benchmark gpt2 --data text.txt.gz", "damaged gzip"),
    ("benchmark gpt2 --data three.jsonl", 'line 1: no string "text"'),
    ("benchmark gpt2 --data array.jsonl", "a JSON object is expected"),
    ("benchmark gpt2 --data end.jsonl", "line 2: not JSON"),
    ("benchmark bare", "no tokenizer"),
    ("benchmark nan --methods longformer --data words.txt --lengths 30 --rounds 1 --json", "not finite"),
    ("benchmark bert --lengths 2", "an input of 2 tokens"),
    ("benchmark vit --data words.txt", "a folder or a zip file"),
    ("benchmark vit --data bare", "no pictures in it"),
    ("benchmark vit --data broken --lengths 65 --json", "broken.png: not a picture"),
    ("benchmark gpt2 --card", "names no attention method"),
    ("benchmark gpt2 --card --output x", "leave --output out"),
    ("benchmark gpt2 --output missing/folder", "does not exist"),
    ("benchmark gpt2 --batch 0", "--batch"),
    *((f"benchmark gpt2 --lengths {x}", "GiB are free: give fewer tokens") for x in ("9" * 12, "9" * 20)),
    ("benchmark gpt2 --lengths 64 --batch 999999999999", "or smaller batches"),
    ("benchmark gpt2 --new-tokens 1", "the first token comes with the prompt"),
    *((f"benchmark gpt2 --device {x}", f"--device {x}: {NO_DEVICE}") for x in ("abacus", "meta", "cuda:99")),
    ("benchmark gpt2 --dtype int8", "--dtype 'int8' is not one of float32, bfloat16, float16"),
    # analyze
    ("analyze gpt2", "--data"),
    (f"{ANALYZE} --methods nystromformer", "Methods that have one: "),
    (f"{ANALYZE} --methods longformer --max-error 0", "max_error"),
    (f"{ANALYZE} --length 60 --calibrate -1", "max_error"),
    (f"{ANALYZE} --length 60 --budgets 64", "save nothing"),
    (f"{ANALYZE} --length 999999999999", "give more text"),
    ("analyze nan --methods longformer --data words.txt --length 60 --budgets 8", "not finite"),
    (f"{ANALYZE} --max-error 0.1 --calibrate 0.2", "two limits"),
    # convert
    (f"{CONVERT} --method sdpa --set block_size=3", "takes no layers or hyperparameters"),
    (f"{CONVERT} --method sdpa --layers 0", "all layers"),
    (f"{CONVERT} --method flash_attention_2", "unknown attention method"),
    (f"{CONVERT} --method linear,kdeformer", "give one method"),
    (f"{CONVERT} --method kdeformer --set num_samples=-3", "at least"),
    (f"{CONVERT} --method kdeformer --layers 0-x", "0-5,8"),
    (f"{CONVERT} --method kdeformer --layers 7", "[7]"),
    ("convert bart --method linear --layers encodr -o out", "'encoder', 'encoder.layers'"),
    (f"{CONVERT} --method kdeformer --max-length 64", "shorten its position table"),
    (f"{CONVERT} --method kdeformer --max-length 0", "--max-length"),
    (f"{CONVERT} --method linear --max-length {10**15}", "allocate"),
    (f"{CONVERT} --method linformer --set projection_dim=2000000000", "linformer"),
    *((f"{CONVERT} --method linear --base-model '{x}'", "cannot be the id") for x in ("a/b/c", "no--no", "")),
    (CONVERT, GIVE_EITHER),
    *((f"{CONVERT} --config array.jsonl {x}", GIVE_EITHER) for x in ("--method linear", "--layers 0", "--set seed=1")),
    (f"{CONVERT} --config short.txt", "not JSON"),
    (f"{CONVERT} --config array.jsonl", "a JSON object is expected"),
    (f"{CONVERT} --config none_kept.json", "no method kept the limit"),
    (f"{CONVERT} --config number.json", "must be a dictionary"),
    (f"{CONVERT} --config misspelt.json", "Did you mean 'kdeformer'"),
    (f"{CONVERT} --config layer_7.json", "7"),
    # distill
    (DISTILL.replace("words.txt", "empty.txt"), "there is no text in it"),
    (DISTILL.replace("words.txt", "few.txt"), "has 3 windows of 40 tokens, 1 batches of 2"),
    (DISTILL.replace("words.txt", "short.txt"), "has 3 tokens, but an input of 40"),
    (DISTILL.replace("words.txt", "none.txt"), "not a file"),
    (f"{PLAIN} --method sdpa", "is exact attention, which learns nothing"),
    (f"{PLAIN} --method kdeformer", "kdeformer has no learned parameters"),
    (f"{PLAIN} --method linear", "use feature_map='hedgehog'"),
    (f"{DISTILL} --length 200", "--length 200: the model takes 128 tokens"),
    (f"{DISTILL} --loss outputs", "Did you mean 'output'?"),
    (f"{DISTILL} --lora-rank 2", "need --finetune-steps"),
    (f"{DISTILL} --finetune-steps 5 --finetune-target logit", "Did you mean 'logits'?"),
    (f"{DISTILL} --finetune-steps 5 --finetune-target logits", "has no logits"),
    (f"{DISTILL.replace('bert', 'half')} --finetune-steps 5", "(--lora-rank N)"),
    (f"{DISTILL} --learning-rate 0", "must be a number above 0"),
    (f"{DISTILL} --write-now", "no state is saved in"),
    (f"{DISTILL} --write-now --restart", "--write-now does not train"),
    (f"{DISTILL} --write-now --minutes 1", "--write-now does not train"),
    (f"{DISTILL.replace('bert', 'no/such/model')}", "neither a folder nor the id"),
    (f"{DISTILL} --minutes 0", "Invalid value for '--minutes'"),
    (f"{DISTILL} -o full", "exists already; --force"),
]
# A folder in which nobody can make files, root included.
NO_FILES = "/proc"
if pathlib.Path(NO_FILES).is_dir():
    REFUSALS += [
        (f"{line} {NO_FILES}/out", f": no file can be made in {NO_FILES} (")
        for line in (
            f"{ANALYZE} --output", "benchmark gpt2 --output", f"{CONVERT} --method linear -o", f"{DISTILL} -o",
            "export-kernel nearfar -o",
        )
    ]  # fmt: skip
    REFUSALS.append((f"demo --plot {NO_FILES}/picture.png", f"no file can be made in {NO_FILES} ("))


def test_a_place_for_lengths_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(crossover, "cache_file", lambda: tmp_path / "lengths.json")
    monkeypatch.setattr(crossover, "measure_crossover", None)
    (tmp_path / "lengths.json").mkdir()
    assert "lengths.json': it is a folder" in refused(capsys, "crossover", "--renew")


def test_a_card_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    converted.make(tmp_path)
    monkeypatch.setattr(benchmark, "benchmark_checkpoint", None)
    card = (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").write_text(card.replace("<!-- /hf_efficient_attn -->", ""))
    assert "must contain the lines" in refused(capsys, "benchmark", tmp_path, "--card")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The working folder of the commands, with `FILES` and checkpoints."""
    folder = tmp_path_factory.mktemp("refusals")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    spoiled = tiny_model("bert")
    with torch.no_grad():
        spoiled.encoder.layer[0].attention.self.value.bias.fill_(math.nan)
    models = {"bert": tiny_model("bert"), "half": tiny_model("bert").half(), "nan": spoiled,
              "gpt2": tiny_model("gpt2", head=True), "bart": tiny("bart"), "sound": tiny("whisper")}  # fmt: skip
    for name, model in models.items():
        save(folder / name, model, "gpt2" if name == "gpt2" else "bert")
    save(folder / "vit", tiny_model("vit", head=True), "vit")
    tiny_model("bert").save_pretrained(folder / "bare")
    return folder


@pytest.mark.parametrize(("line", "message"), REFUSALS, ids=[line for line, _ in REFUSALS])
def test_refused_in_one_line(line, message, folder, monkeypatch, capsys):
    if line.startswith(("demo", "distill")):
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    random, verbosity = torch.get_rng_state(), transformers.logging.get_verbosity()
    assert message in refused(capsys, *shlex.split(line))
    assert sorted(folder.rglob("*")) == before
    assert torch.equal(torch.get_rng_state(), random) and transformers.logging.get_verbosity() == verbosity
