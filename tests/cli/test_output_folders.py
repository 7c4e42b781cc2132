"""Where `convert`, `benchmark` and `analyze` write: never over what others put there, and nothing half-done."""

import os

import pytest

from commands import command, interrupt, read, refused, save, tree
from each import refuses
from hf_efficient_attn.checkpoint import open_checkpoint
from hf_efficient_attn.conversion import checkpoint as checkpoint_conversion
from hf_efficient_attn.io.writing import replacing, write_results
from tiny_models import tiny_model


@pytest.fixture
def convert(made):
    """convert(output, *options) -> the arguments of a conversion to that folder."""
    return lambda output, *options: ("convert", made("bert", True), "--method", "linear", "-o", output, *options)


def at_the_end(monkeypatch, action):
    """Do something when the conversion is complete but for its last renaming."""
    write_card = checkpoint_conversion.write_card

    def write_and_act(*arguments, **options):
        write_card(*arguments, **options)
        action()

    monkeypatch.setattr(checkpoint_conversion, "write_card", write_and_act)


def fill(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_txt", ".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


# Existing folders, and files that appear during the work


def test_existing_folders_are_replaced_only_with_force(convert, tmp_path, capsys):
    out = tmp_path / "out"
    fill(out, mine_txt="mine")
    assert "--force" in refused(capsys, *convert(out)) and tree(out) == {"mine.txt": b"mine"}
    assert command(*convert(out, "--force")) == 0
    assert not (out / "mine.txt").exists() and (out / "config.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "empty").mkdir()
    assert command(*convert(tmp_path / "empty")) == 0


@pytest.mark.parametrize(
    ("before", "options"),
    [(None, []), ({}, []), ({"old__old_txt": "old", "changed_txt": "old"}, ["--force"])],
    ids=["new", "empty", "replaced"],
)
def test_what_appears_during_the_work_is_not_lost(before, options, convert, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    if before is not None:
        out.mkdir()
        fill(out, **before)
    at_the_end(monkeypatch, lambda: fill(out, new_txt="mine", old__new_txt="mine", changed_txt="mine now"))
    error = refused(capsys, *convert(out, *options))
    assert "something else has written" in error and "--force" in error
    mine = {"new.txt": b"mine", "old": None, "old/new.txt": b"mine", "changed.txt": b"mine now"}
    assert tree(out) == mine | ({"old/old.txt": b"old"} if before else {})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("number", range(1, 4))
def test_nothing_is_lost_when_a_replacement_is_interrupted(number, convert, tmp_path, monkeypatch):
    fill(tmp_path / "out", old_txt="old")
    rename, calls = os.rename, iter(range(1, 10))
    monkeypatch.setattr(os, "rename", lambda *given: interrupt() if next(calls) == number else rename(*given))
    status = command(*convert(tmp_path / "out", "--force"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert status == (130 if number < 3 else 0)
    if status:
        assert tree(tmp_path / "out") == {"old.txt": b"old"}
    else:
        open_checkpoint(tmp_path / "out")


def test_two_conversions_to_the_same_folder(convert, tmp_path, capsys):
    """The first one is running, or was killed while it wrote."""
    at_work = tmp_path / ".out.converting"
    fill(at_work, half_txt="half")
    assert f"or was killed: in that case delete {at_work}" in refused(capsys, *convert(tmp_path / "out"))
    assert tree(tmp_path) == {at_work.name: None, f"{at_work.name}/half.txt": b"half"}
    assert command(*convert(tmp_path / "other")) == 0


# Names that cannot be used


def test_outputs_that_cannot_be_used_are_refused(tmp_path, monkeypatch):
    """They would damage other files, or are no names."""
    source = save(tmp_path / "above" / "source", tiny_model("bert"))
    fill(tmp_path, file="mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    before, no_name = tree(tmp_path), "the output .* is not the name of a folder.*"
    for output, message in [
        (source, "in the source"),
        (source / ".." / "source" / "inside", "in the source"),
        (tmp_path / "above", "holds the source"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "link", "symbolic link"),
        (tmp_path / "work", "never replaced"),
        ("", "never replaced"),
        ("/", "holds"),
        ("\ud812x", f"{no_name}surrogates not allowed"),
        ("a\0b", f"{no_name}embedded null"),
        *(("x" * length, f"{no_name}File name too long") for length in (300, 245)),
        (tmp_path / "file/a/b/out", f"{no_name}Not a directory"),
    ]:
        refuses(message, checkpoint_conversion.convert_checkpoint, source, output, "linear", force=True)
    assert tree(tmp_path) == before


# Full disks


# 20,000 bytes are too few for the weights, 600 for config.json, and 20 for the names of the tensors.
@pytest.mark.parametrize("limit", [20_000, 600, 20])
def test_a_full_disk_is_an_error_of_one_line(limit, convert, tmp_path, capsys):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores the signal that comes with this limit, so that writing fails as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        err = refused(capsys, *convert(tmp_path / "new" / "out"), status=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert err.startswith("error: the output ")
    assert "out' cannot be written: " in err and "File too large" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_results_on_a_full_disk(tmp_path):
    path = tmp_path / "analysis.json"
    path.write_text("old")
    full = pytest.raises(OSError, match=r"analysis\.json cannot be written: .*No space left")
    with full, replacing(path) as draft:
        draft.symlink_to("/dev/full")
        draft.write_text("new")
    assert tree(tmp_path) == {"analysis.json": b"old"}


def test_results_do_not_replace_files_that_appeared_during_the_measurement(tmp_path):
    def draw(result, path):
        path.write_text(str(result["n"]))

    (tmp_path / "analysis.png").write_text("mine")
    written = write_results({"n": 1}, tmp_path, "analysis", draw, force=False)
    assert [path.name for path in written] == ["analysis-1.json", "analysis-1.png"]
    assert read(tmp_path, "analysis-1.json") == {"n": 1} and written[1].read_text() == "1"
    assert (tmp_path / "analysis.png").read_text() == "mine"
    assert write_results({"n": 3}, tmp_path, "analysis", draw)[1].read_text() == "3"

    def fail(result, path):
        raise OSError("no font")

    before = tree(tmp_path)
    with pytest.raises(OSError, match="no font"):
        write_results({}, tmp_path, "other", fail, force=False)
    assert tree(tmp_path) == before
