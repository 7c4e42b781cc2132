"""What the tests of commands and recipes share: calls of them, and tiny checkpoints, texts and pictures."""

import csv
import json
import pathlib
import shlex
import zipfile

import pytest
import torch
from safetensors.torch import load_file

from converted import save, tokenizer_for  # noqa: F401 (for the tests)
from hf_efficient_attn import cli
from hf_efficient_attn.evaluation import pictures, timing
from tiny_models import tiny_model

WORDS = [f"w{i}" for i in range(5, 55)]
# The words have no period, which could coincide with that of masked tokens or a window.
TEXT = " ".join(WORDS[(i * i + 3 * (i // 7)) % 50] for i in range(3000))
NOTHING_COMPLETE = "error: interrupted before the first measurement was complete: nothing was written\n"


def command(*arguments) -> int:
    """The exit status of the command, which runs in this process."""
    return cli.run(cli.app, list(map(str, arguments)), "hf-efficient-attn")


def shown(capsys, *arguments, status: int = 0):
    """What a command that ends with this status writes, as (out, err)."""
    capsys.readouterr()
    found = command(*arguments)
    printed = capsys.readouterr()
    assert found == status, printed.err
    return printed


def run_json(capsys, *arguments):
    out, err = shown(capsys, *arguments, "--json")
    assert err == ""
    return json.loads(out)


def run(recipe, *arguments):
    """The exit status of a recipe's module. A string may have several words, as in a shell."""
    words = [word for one in arguments for word in (shlex.split(one) if isinstance(one, str) else [str(one)])]
    return cli.run(recipe.app, words, recipe.__name__.rpartition(".")[2])


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def losses(folder):
    history = json.loads((pathlib.Path(folder) / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def refused(capsys, *arguments, status: int = 2) -> str:
    """The one line that a refused command writes."""
    out, err = shown(capsys, *arguments, status=status)
    assert out == "" and err.startswith("error: ") and len(err.splitlines()) == 1, err
    return err


def interrupt(*arguments, **options):
    """Press Ctrl-C, in place of a function."""
    raise KeyboardInterrupt


def read(folder, name="config.json"):
    return json.loads((folder / name).read_text())


def tree(folder) -> dict[str, bytes | None]:
    """The contents of all files, and None for folders, links, pipes and huge files, by their paths in `folder`."""
    sizes = {path: path.lstat().st_size for path in folder.rglob("*")}
    files = {path for path, size in sizes.items() if size < 2**24 and not path.is_symlink() and path.is_file()}
    return {path.relative_to(folder).as_posix(): path.read_bytes() if path in files else None for path in sizes}


def tensors(folder):
    """Name -> tensor, of all files."""
    return {name: x for path in sorted(folder.glob("*.safetensors")) for name, x in load_file(path).items()}


def same(first, second) -> bool:
    """Whether names, dtypes and bits are equal."""
    return first.keys() == second.keys() and all(
        a.dtype == b.dtype and torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (a, b)))
        for a, b in ((tensor, second[name]) for name, tensor in first.items())
    )


@pytest.fixture(autouse=True)
def _quick(request, monkeypatch):
    """Time single calls, which otherwise are repeated for a tenth of a second, and draw only for tests of `figures`."""
    monkeypatch.setattr(timing, "calls_to_time", lambda work, first=None: 1)
    drawings = ("draw_benchmark", "draw_analysis", "draw_distillation")
    for name in drawings if "figures" not in request.fixturenames else ():
        monkeypatch.setattr(pictures, name, lambda result, path: path.write_bytes(b""))


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """make(family, head) -> the folder of a tiny checkpoint, which no test may change."""
    folders = {}

    def make(family, head=False):
        if (family, head) not in folders:
            folder = tmp_path_factory.mktemp(f"{family}-{head}")
            folders[family, head] = save(folder, tiny_model(family, head=head), family)
        return folders[family, head]

    return make


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="session")
def photographs(tmp_path_factory) -> pathlib.Path:
    """A zip file of six pictures."""
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path_factory.mktemp("pictures")
    generator = torch.Generator().manual_seed(0)
    with zipfile.ZipFile(folder / "pictures.zip", "w") as archive:
        for i in range(6):
            pixels = torch.randint(256, (40, 50, 3), generator=generator, dtype=torch.uint8).numpy()
            image.fromarray(pixels).save(folder / f"{i}.png")
            archive.write(folder / f"{i}.png", f"class/{i}.png")
    return folder / "pictures.zip"


@pytest.fixture
def figures(monkeypatch):
    kind, saved = pytest.importorskip("matplotlib.figure").Figure, []
    save = kind.savefig
    monkeypatch.setattr(kind, "savefig", lambda figure, *rest, **more: (save(figure, *rest), saved.append(figure)))
    return saved
