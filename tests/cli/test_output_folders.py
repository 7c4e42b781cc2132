"""Where `convert`, `benchmark` and `analyze` write: never over what others put there, and nothing half-done."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from hf_efficient_attn import cli
from hf_efficient_attn.checkpoint import open_checkpoint
from hf_efficient_attn.checkpoint.loading import quiet
from hf_efficient_attn.conversion import checkpoint as checkpoint_conversion
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.io.writing import replacing, write_results
from tiny_models import tiny_model

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint of a tiny BERT."""
    folder = tmp_path_factory.mktemp("output-folders") / "source"
    with quiet():
        tiny_model("bert", head=True).save_pretrained(folder)
    return folder


def convert(source, output, *options):
    return cli.run(cli.app, ["convert", str(source), "--method", "linear", "-o", str(output), *options], "convert")


def at_the_end(monkeypatch, action):
    """Do something when the conversion is complete but for its last renaming."""
    write_card = checkpoint_conversion.write_card

    def write_and_act(*arguments, **options):
        write_card(*arguments, **options)
        action()

    monkeypatch.setattr(checkpoint_conversion, "write_card", write_and_act)


def tree(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
    }


# Two conversions, and files that appear during the work

# Converts, and waits for a line on its standard input before the last renaming.
WAITING = """
import sys
from hf_efficient_attn import cli
from hf_efficient_attn.conversion import checkpoint

write_card = checkpoint.write_card

def wait(*arguments, **options):
    write_card(*arguments, **options)
    print("ready", flush=True)
    sys.stdin.readline()

checkpoint.write_card = wait
cli.main(sys.argv[1:])
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("exists", [False, True], ids=["new", "empty"])
def test_of_two_conversions_to_one_output_the_later_is_refused(exists, whole, tmp_path):
    if exists:
        (tmp_path / "out").mkdir()
    line = [sys.executable, "-c", WAITING, "convert", whole, "-o", tmp_path / "out", "--method"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    methods = ("linear", "longformer")
    running = [subprocess.Popen([*map(str, line), name], text=True, cwd=ROOT, **pipes) for name in methods]
    assert [process.stdout.readline() for process in running] == ["ready\n"] * 2
    ends = [process.communicate("go\n") for process in running]  # one after the other
    assert [process.returncode for process in running] == [0, 2]
    assert "something else has written" in ends[1][1] and ends[1][1].count("\n") == 1
    assert json.loads((tmp_path / "out" / "config.json").read_text())["attn_implementation"] == "linear"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    open_checkpoint(tmp_path / "out")


@pytest.mark.parametrize("name", ["mine.txt", "config.json", "sub/mine.txt"])
@pytest.mark.parametrize("exists", [False, True], ids=["new", "empty"])
def test_a_file_that_appears_during_the_work_is_not_lost(exists, name, whole, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    if exists:
        out.mkdir()

    def appear():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")

    at_the_end(monkeypatch, appear)
    assert convert(whole, out) == 2
    error = capsys.readouterr().err
    assert "something else has written" in error and "--force" in error and error.count("\n") == 1
    assert {path: text for path, text in tree(tmp_path).items() if text} == {f"out/{name}": b"mine"}


def test_force_keeps_a_folder_in_which_something_appears_during_the_work(whole, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    (out / "old").mkdir(parents=True)
    for name in ("old.txt", "old/old.txt", "changed.txt"):
        (out / name).write_text("old")

    def appear():
        (out / "new.txt").write_text("mine")
        (out / "old" / "new.txt").write_text("mine")
        (out / "changed.txt").write_text("mine now")

    at_the_end(monkeypatch, appear)
    assert convert(whole, out, "--force", "--json") == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    kept = [path for path in tmp_path.iterdir() if path != out]
    assert len(kept) == 1 and any(str(kept[0]) in note for note in notes)
    mine = {"new.txt": b"mine", "old/new.txt": b"mine", "changed.txt": b"mine now"}
    expected = {**mine, "old": None, "old.txt": b"old", "old/old.txt": b"old"}
    assert tree(kept[0]) == expected
    assert not (out / "new.txt").exists()
    open_checkpoint(out)
    # A further conversion leaves them alone.
    monkeypatch.undo()
    assert convert(whole, out, "--force") == 0
    assert tree(kept[0]) == expected


def test_force_with_an_output_that_appears_during_the_work(whole, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"

    def appear():
        out.mkdir()
        (out / "mine.txt").write_text("mine")

    at_the_end(monkeypatch, appear)
    assert convert(whole, out, "--force") == 0
    kept = [path for path in tmp_path.iterdir() if path != out]
    assert len(kept) == 1 and tree(kept[0]) == {"mine.txt": b"mine"}
    assert str(kept[0]) in capsys.readouterr().out


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("appears", [False, True], ids=["quiet", "appearing"])
def test_nothing_is_lost_when_a_replacement_is_interrupted(appears, number, whole, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old.txt").write_text("old")
    if appears:
        at_the_end(monkeypatch, lambda: (out / "mine.txt").write_text("mine"))
    rename, calls = os.rename, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == number:
            raise KeyboardInterrupt
        rename(*arguments)
        if len(calls) == number + 1 == 1:
            raise KeyboardInterrupt  # after the first

    monkeypatch.setattr(os, "rename", interrupted)
    status = convert(whole, out, "--force")
    found = {path.rpartition("/")[2]: text for path, text in tree(tmp_path).items() if text}
    assert ("mine.txt" in found) == appears
    if status == 130:
        assert tree(out) == {"old.txt": b"old"} | ({"mine.txt": b"mine"} if appears else {})
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
    else:
        assert status == 0 and len(calls) < max(number, 4)
        open_checkpoint(out)


@pytest.mark.exhaustive
def test_a_folder_that_a_killed_conversion_moved_returns(whole, tmp_path, capsys):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    moved = tmp_path / f".out.replaced-{dead.pid}"
    moved.mkdir()
    (moved / "old.txt").write_text("old")
    assert convert(whole, tmp_path / "out") == 2
    assert "exists again" in capsys.readouterr().err
    assert tree(tmp_path) == {"out": None, "out/old.txt": b"old"}


# Full disks

LIMITED = """
import resource, sys
from hf_efficient_attn import cli
# Python ignores the signal that comes with this limit, so that writing fails as on a full disk.
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
cli.main(sys.argv[2:])
"""


# 20,000 bytes are too few for the weights, and 600 for config.json.
@pytest.mark.exhaustive
@pytest.mark.parametrize(("limit", "method"), [(20_000, "linear"), (600, "linear"), (20, "linformer")])
def test_a_full_disk_is_an_error_of_one_line(limit, method, whole, tmp_path):
    line = [sys.executable, "-c", LIMITED, limit, "convert", whole, "--method", method, "-o", tmp_path / "new" / "out"]
    done = subprocess.run(list(map(str, line)), text=True, capture_output=True, cwd=ROOT)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: the output ")
    assert "out' cannot be written: File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_a_full_file_system(whole, tmp_path, capsys):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system needs root")
    try:
        assert convert(whole, disk / "out") == 1
        assert list(disk.iterdir()) == []
        assert "No space left on device; nothing of it was kept" in capsys.readouterr().err
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_results_on_a_full_disk(tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    path = tmp_path / "analysis.json"
    path.write_text("old")

    def write():
        with replacing(path) as draft:
            draft.symlink_to("/dev/full")
            draft.write_text("new")

    with pytest.raises(OSError, match=r"analysis\.json cannot be written: No space left"):
        write()
    assert tree(tmp_path) == {"analysis.json": b"old"}


# Results of measurements


def test_results_do_not_replace_files_that_appeared_during_the_measurement(tmp_path):
    def draw(result, path):
        path.write_text(str(result["n"]))

    (tmp_path / "analysis.png").write_text("mine")
    written = write_results({"n": 1}, tmp_path, "analysis", draw, force=False)
    assert [path.name for path in written] == ["analysis-1.json", "analysis-1.png"]
    # More of the same results replace what this process has written.
    assert write_results({"n": 2}, tmp_path, "analysis", draw, force=False) == written
    assert json.loads(written[0].read_text()) == {"n": 2} and written[1].read_text() == "2"
    assert (tmp_path / "analysis.png").read_text() == "mine"
    assert write_results({"n": 3}, tmp_path, "analysis", draw)[1].read_text() == "3"

    def fail(result, path):
        raise OSError("no font")

    before = tree(tmp_path)
    with pytest.raises(OSError, match="no font"):
        write_results({}, tmp_path, "other", fail, force=False)
    assert tree(tmp_path) == before


# Names that cannot be used


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("\udcff", "files of weights need names in UTF-8"),
        ("\ud812x", "files of weights need names in UTF-8"),
        ("a\0b", "is not the name of a folder"),
        ("x" * 300, "File name too long"),
        ("x" * 245, "File name too long"),
        ("file/out", "is not a folder"),
        ("file/a/b/out", "is not a folder"),
    ],
    ids=lambda value: ascii(value)[:12],
)
def test_names_that_cannot_be_used_are_the_outputs_fault(name, reason, whole, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UnsupportedAttentionError, match=reason) as refused:
        checkpoint_conversion.convert_checkpoint(whole, f"{tmp_path}/{name}", "linear")
    assert str(refused.value).startswith("the output ") and "checkpoint" not in str(refused.value)
    assert tree(tmp_path) == {"file": b"mine"}


def test_a_source_that_cannot_be_named_in_utf8(tmp_path):
    with pytest.raises(UnsupportedAttentionError, match=r"the source .* need names in UTF-8"):
        open_checkpoint(str(tmp_path / "\udcff"))


@pytest.mark.exhaustive
def test_a_locale_without_the_letters_of_the_output(whole, tmp_path):
    line = [sys.executable, "-X", "utf8=0", "-m", "hf_efficient_attn", "convert", str(whole), "--method", "linear"]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [*line, "-o", f"{tmp_path}/caf\u00e9".encode()], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2 and "error: the output" in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == []
