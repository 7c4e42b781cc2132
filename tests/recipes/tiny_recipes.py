"""Every recipe with tiny data and models, for the tests of what all of them promise and of each one's parts."""

import functools
import gzip
import io
import itertools
import json
import pathlib
import subprocess
import sys
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from matplotlib.figure import Figure
from PIL import Image
from safetensors.torch import load_file

import each
from hf_efficient_attn.models.t2t_vit import T2TViTConfig
from recipes import accelerate_loop, clm, glue, imagenet, lra, mlm, translation
from recipes.common import reporting
from recipes.common.data import glue as glue_data
from recipes.common.data import lra as lra_data
from tiny_models import T2T_VIT, tiny_model

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "it", "was", "not", "good", "bad"]
COLORS = {"red": (200, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 200)}

# --- GLUE ---

# A CSV reader would join the rows after an unclosed quote.
QUOTED = ('he said " no', 'a "good" cat')
# The columns of the official files, and after "=" what the tests write into them. CoLA's files have no header.
LAYOUT = {
    "cola": "id,=label,mark,=first",
    "sst2": "sentence=first,label=label",
    "mrpc": "\ufeffQuality=label,#1 ID,#2 ID,#1 String=first,#2 String=second",
    "stsb": "index,genre,filename,year,old_index,source1,source2,sentence1=first,sentence2=second,score=label",
    "qqp": "id,qid1,qid2,question1=first,question2=second,is_duplicate=label",
    "mnli": "index,promptID,pairID,genre,sentence1_binary_parse,sentence2_binary_parse,sentence1_parse,sentence2_parse,"
    "sentence1=first,sentence2=second,label1,gold_label=label",
    "qnli": "index,question=first,sentence=second,label=label",
    "rte": "index,sentence1=first,sentence2=second,label=label",
    "wnli": "index,sentence1=first,sentence2=second,label=label",
}


def sentence(number: int) -> str:
    return " ".join(WORDS[(number * step + step) % len(WORDS)] for step in range(1, 3 + number % 6))


def labels_of(name: str, count: int) -> list[str]:
    known = list(glue_data.TASKS[name].labels) or [f"{score}.000" for score in range(6)]
    return [known[number % len(known)] for number in range(count)]


def write_glue(folder: pathlib.Path, name: str, count: int = 24, *, zipped: bool = False) -> pathlib.Path:
    """Write a task in the official layout with `count` rows per file."""
    columns = [column.partition("=") for column in LAYOUT[name].split(",")]
    rows = [] if name == "cola" else [[header for header, _, _ in columns]]
    for number, label in enumerate(labels_of(name, count)):
        cells = {"label": label, "first": [*QUOTED, sentence(number)][min(number, 2)], "second": sentence(number + 1)}
        rows.append([cells.get(what, "neutral") for _, _, what in columns])
    content = "".join("\t".join(cells) + "\n" for cells in rows).encode()
    for stem in glue_data.TASKS[name].splits.values():
        path = folder / glue_data.TASKS[name].folder / f"{stem}.tsv{'.gz' * zipped}"
        write(path, gzip.compress(content) if zipped else content)
    return folder


def write(path: pathlib.Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


# --- pictures ---


def packed(picture: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


def painted(color, size=(40, 36), seed=0, format="JPEG") -> bytes:
    """A file of one colour with some noise."""
    noise = np.random.default_rng(seed).integers(-20, 21, (size[1], size[0], 3))
    return packed(Image.fromarray((np.array(color) + noise).clip(0, 255).astype("uint8")), format)


def grey(value: int) -> bytes:
    """A square of one grey value."""
    return packed(Image.fromarray(np.full((4, 4), value, np.uint8)))


def lay_out(target: pathlib.Path, files: dict[str, bytes]) -> str:
    """Write the files to a folder, or to a zip file if the target ends in .zip."""
    if target.suffix == ".zip":
        target.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(target, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
    else:
        for name, content in files.items():
            write(target / name, content)
    return str(target)


def write_colors(target: pathlib.Path) -> str:
    """The splits train and val of pictures of three colours."""
    files = {
        f"{split}/{name}/{i}.jpg": painted(color, (40 + i, 36), seed=i)
        for split, count in (("train", 8), ("val", 4))
        for name, color in COLORS.items()
        for i in range(count)
    }
    return lay_out(target, files)


# --- text ---


def prose(count: int, seed: int) -> str:
    generator = np.random.default_rng(seed)
    return "\n".join(" ".join(generator.choice(WORDS, 12)).capitalize() + "." for _ in range(count)) + "\n"


def write_corpus(folder: pathlib.Path) -> None:
    """Three documents of about 1,800, 900 and 90 tokens, and a file that is none."""
    write(folder / "a.txt", prose(100, 1))
    write(folder / "b.txt.gz", gzip.compress(prose(50, 2).encode()))
    write(folder / "c.jsonl", json.dumps({"text": prose(5, 3)}) + "\n")
    write(folder / "notes.md", "not text of the corpus")


# --- Long Range Arena ---


def write_listops(folder: pathlib.Path) -> None:
    """The benchmark's layout, with parentheses."""
    rows = ["( ( ( [MAX 2 ) 9 ) ] )\t9", "( ( ( [SM 5 ) 6 ) ] )\t1", "3\t3", "4\t4"] * 3
    for name in ("train", "val", "test"):
        write(folder / f"basic_{name}.tsv", "Source\tTarget\n" + "\n".join(rows) + "\n")


def write_text(folder: pathlib.Path) -> None:
    for split, i in itertools.product(("train", "test"), range(6)):
        write(folder / "aclImdb" / split / "pos" / f"{i}_9.txt", f"good {i} \u00e9")
        write(folder / "aclImdb" / split / "neg" / f"{i}_1.txt", f"bad {i} " * 20)


def write_image(folder: pathlib.Path) -> None:
    """A zip file of ten classes with one grey value each."""
    splits = itertools.product(("train", "test"), enumerate("abcdefghij"), range(2))
    files = {f"{split}/{name}/{i}.png": grey(20 * number + i) for split, (number, name), i in splits}
    lay_out(folder / "cifar.zip", files)


WRITERS = {name: globals()[f"write_{name}"] for name in lra_data.TASKS}


def write_lra(task: str, folder: pathlib.Path) -> str:
    """Write artificial data of a task, and return its source."""
    WRITERS[task](folder)
    return str(folder / "cifar.zip" if task == "image" else folder)


# --- the recipes ---


def make(folder: pathlib.Path) -> None:
    """Write the data and the models that the commands below name."""
    for task in ("mrpc", "mnli", "rte", "stsb"):
        write_glue(folder / "glue", task)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": len(vocabulary), "max_position_embeddings": 32}
    for name, dropout in (("encoder", 0.1), ("encoder_without_dropout", 0.0)):
        transformers.BertTokenizer(vocab=vocabulary).save_pretrained(folder / name)
        rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        tiny_model("bert", **sizes, **rates).save_pretrained(folder / name)
    write_colors(folder / "colors.zip")
    tiny_model("vit", head=True, patch_size=8, num_labels=3).save_pretrained(folder / "vit")
    transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder / "vit")
    T2TViTConfig(**T2T_VIT, id2label=dict(enumerate(sorted(COLORS)))).save_pretrained(folder / "t2t")
    write_corpus(folder / "corpus")
    for task in WRITERS:
        write_lra(task, folder / task)


_GLUE = "--task mrpc --data HERE/glue --max_length 16", "--model HERE/encoder"
_TEXT = "--text HERE/corpus --block_size 48 --eval_share 0.2"
_NEW = "--train_tokenizer 300 --config_overrides hidden_size=16 num_hidden_layers=1 num_attention_heads=2"
_MARIAN = (
    "--model_type marian --train_tokenizer 300 --config_overrides d_model=16 encoder_layers=1 decoder_layers=1 "
    "encoder_attention_heads=2 decoder_attention_heads=2 encoder_ffn_dim=16 decoder_ffn_dim=16 "
    "max_position_embeddings=48"
)
_PAIRS = "--generate 60 --eval_share 0.1 --max_source_length 48 --max_target_length 12"
_LRA = {task: f"--task {task} --data HERE/{task}{'/cifar.zip' * (task == 'image')}" for task in WRITERS}
# The recipes on Trainer, and the loop: their options besides those of the training, and those of a model to start from.
# HERE stands for the folder of `make`.
COMMANDS = {
    "glue": (glue, *_GLUE),
    "loop": (accelerate_loop, *_GLUE),
    "imagenet": (imagenet, "--train_data HERE/colors.zip", "--model HERE/vit"),
    "mlm": (mlm, _TEXT, f"--model_type bert {_NEW} intermediate_size=32"),
    "clm": (clm, _TEXT, f"--model_type gpt2 {_NEW}"),
    "translation": (translation, _PAIRS, _MARIAN),
    **{
        f"lra-{task}": (lra, words, f"--max_length {2 ** (6 + (task == 'text'))} --num_layers 1 --hidden_size 16")
        for task, words in _LRA.items()
    },
}


def options_of(name: str, here: pathlib.Path, out: pathlib.Path, *more: Any, model: str | None = None) -> list[str]:
    """The words of a command: six steps on four examples each. Of an option that is given twice, the last one counts.

    After the word ONLY come all options.
    """
    if more[:1] == ("ONLY",):
        return ["--output_dir", str(out), *more[1:]]
    _, data, usual = COMMANDS[name]
    text = f"{data} {model or usual} --max_steps 6 --per_device_train_batch_size 4 --output_dir {out}"
    if name != "loop":
        text += " --logging_steps 1 --use_cpu --eval_strategy no --save_strategy no"
    return [*text.replace("HERE", str(here)).split(), *map(str, more)]


def train(name: str, here: pathlib.Path, out: pathlib.Path, *more: Any, model: str | None = None) -> dict[str, Any]:
    """Run a recipe in this process: the contents of metrics.json."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    # Drawing takes longer than a tiny training, and test_recipe_core.py tests it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reporting, "learning_curve", lambda *_: Figure(figsize=(1, 1)))
        return COMMANDS[name][0].run(options_of(name, here, out, *more, model=model))


refuses = functools.partial(each.refuses, error=ValueError)


def launch(script: str | pathlib.Path, *options: Any) -> subprocess.CompletedProcess:
    """Run a script in two processes, with the config for CPUs."""
    line = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "recipes/configs/cpu.yaml", script]
    return subprocess.run([*map(str, (*line, *options))], cwd=ROOT, capture_output=True, text=True, timeout=300)


def weights(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same_weights(one: pathlib.Path, other: pathlib.Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
