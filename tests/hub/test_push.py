"""`push`: what it would send, what it refuses, and a complete upload to a local hub and download from it."""

import json
import os
import shutil
import time

import pytest
import torch
import transformers
from huggingface_hub import HfApi, constants
from safetensors.torch import load_file

import converted
import hf_efficient_attn as hea
import hub_server
from hf_efficient_attn import cli, hub
from tiny_models import output, tiny_batch

REPOSITORY = "someone/tiny-kdeformer"
INSTALL = "git+https://example.org/a/b@v0.2.0"


def status(*arguments):
    return cli.run(cli.app, ["push", *map(str, arguments)], "hf-efficient-attn")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "out"
    converted.make(folder)
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "out")


@pytest.fixture
def online(monkeypatch, tmp_path):
    """The stand-in for the hub, with its token; nothing is written outside `tmp_path`."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "agents.json"), raising=False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # huggingface_hub waits before it tries again
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    hub = hub_server.Hub()
    hub.install()
    yield hub
    hub.remove()


def test_a_pushed_checkpoint_is_loaded_from_the_hub(online, made, tmp_path, capsys):
    assert status(made, REPOSITORY, "--private", "--yes", "--message", "First") == 0
    out, err = capsys.readouterr()
    assert err == "" and f"{constants.ENDPOINT}/{REPOSITORY}" in out  # quiet when piped
    repository = online.repositories[REPOSITORY]
    names = sorted(path.name for path in made.iterdir())
    assert repository.private and repository.commits == [("First", names)]
    assert all(repository.files[name] == (made / name).read_bytes() for name in names if name != "README.md")
    model = transformers.AutoModelForMaskedLM.from_pretrained(REPOSITORY, cache_dir=tmp_path).eval()
    assert len(transformers.AutoTokenizer.from_pretrained(REPOSITORY, cache_dir=tmp_path)) == 60
    assert model.config._attn_implementation == "kdeformer"
    batch = tiny_batch("bert", padding="right")
    expected = output(transformers.BertForMaskedLM.from_pretrained(made).eval(), batch)
    assert torch.equal(output(model, batch), expected)
    assert any(line.startswith(f"GET /{REPOSITORY}/resolve/") for line in online.requests)


def test_without_yes_or_with_dry_run_there_are_no_requests(folder, online, capsys):
    (folder / "README.md").unlink()
    _origin(folder, license=None)
    assert status(folder, REPOSITORY, "--private") == 0
    out = capsys.readouterr().out
    assert "(private)" in out and "Nothing was sent. Add --yes" in out
    names = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")][2:]
    assert names == sorted(path.name for path in folder.iterdir())
    assert status(folder, REPOSITORY, "--private", "--dry-run") == 0
    assert capsys.readouterr().out == out
    assert status(folder, REPOSITORY, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["repository"], plan["private"], plan["sent"]) == (REPOSITORY, False, False)
    assert {"path": "config.json", "bytes": (folder / "config.json").stat().st_size} in plan["files"]
    assert [problem.partition(":")[0] for problem in plan["card_problems"]] == [
        "no license", "no complete measurements"
    ]  # fmt: skip
    assert plan["install"] == converted.ORIGIN["install"] and plan["refusals"] == []
    for option in ("--dry-run", "--show-card"):
        assert status(folder, REPOSITORY, option, "--yes") == 2
        assert "--dry-run and --show-card send nothing" in capsys.readouterr().err
    assert online.requests == []


def test_a_second_push_updates_files_and_removes_old_weights(folder, online, capsys):
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "README.md").write_text("not the card")
    (folder / "notes.txt").symlink_to("tokenizer.json")
    assert status(folder, REPOSITORY, "--yes") == 0
    repository = online.repositories[REPOSITORY]
    assert not repository.private and {"1_Pooling/README.md", "README.md"} < set(repository.files)
    assert repository.files["notes.txt"] == (folder / "tokenizer.json").read_bytes()
    shard = "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(folder / shard)
    weights = dict.fromkeys(load_file(folder / shard), shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    capsys.readouterr()
    assert status(folder, REPOSITORY, "--yes", "--json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out)["sent"] is True
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert shard in names and set(repository.files) == names


def _origin(folder, **changes):
    (folder / "efficient_attention.json").write_text(json.dumps(converted.origin(**changes)))
    hub.write_card(folder)


def test_what_to_install_is_asked_for_once_and_stored(folder, online, capsys):
    _origin(folder, install=None)
    assert status(folder, REPOSITORY, "--show-card") == 0
    out, err = capsys.readouterr()
    assert "This card does not know where that is published" in out
    assert err.startswith("--yes would refuse: the card cannot say where hf_efficient_attn is published")
    assert status(folder, REPOSITORY) == 0 and "Correct this first" in capsys.readouterr().out
    assert status(folder, REPOSITORY, "--yes") == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "give --install with a URL" in err
    assert online.requests == []
    before = (folder / "README.md").read_text()
    assert not hub.plan_push(folder, REPOSITORY, install=INSTALL).refusals
    assert (folder / "README.md").read_text() == before  # without --yes nothing is written
    hub.push(folder, REPOSITORY, install=INSTALL)
    for _ in range(2):
        sent = online.repositories[REPOSITORY].files
        assert f"pip install {INSTALL}\n" in sent["README.md"].decode()
        assert json.loads(sent["efficient_attention.json"])["install"] == INSTALL
        hub.push(folder, REPOSITORY)


@pytest.mark.parametrize(("measured", "options"), [(True, []), (False, ["--install", INSTALL])])
def test_the_card_that_is_shown_is_the_one_that_is_sent(measured, options, folder, online, capsys):
    if measured:
        (folder / "benchmark.json").write_text(json.dumps(converted.benchmark()))
        hub.write_card(folder)
    card = (folder / "README.md").read_text()
    (folder / "README.md").write_text(f"{card}\nMy own remarks.\n")
    before = {path: path.read_bytes() for path in folder.rglob("*")}
    assert status(folder, REPOSITORY, "--show-card", *options) == 0
    shown, err = capsys.readouterr()
    assert err == "" and before == {path: path.read_bytes() for path in folder.rglob("*")} and online.requests == []
    assert "\n# tiny-kdeformer\n" in shown and shown.endswith("My own remarks.\n")
    assert '"ORG/NAME"' not in shown and shown.count(f'"{REPOSITORY}"') >= 2
    assert f"\npip install {options[-1] if options else converted.ORIGIN['install']}\n" in shown
    assert status(folder, REPOSITORY, "--show-card", "--json", *options) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["card"] == shown
    assert status(folder, REPOSITORY, "--yes", *options) == 0
    # What the list of the dry run says is reported again, and true.
    assert ("Card: no complete measurements" in capsys.readouterr().out) == (not measured)
    sent = online.repositories[REPOSITORY].files
    assert sent["README.md"].decode() == shown
    assert {name: len(content) for name, content in sent.items()} == {
        entry["path"]: entry["bytes"] for entry in plan["files"]
    }


def test_the_file_of_a_method_is_missed(folder, monkeypatch):
    def problems():
        hub.write_card(folder)
        return hub.plan_push(folder, REPOSITORY).problems

    end = "which registers kdeformer: put it into the folder, or write into README.md where it is"
    for module, file in ((hea.KDEformerConfig.__module__, None), ("my_file", "my_file.py"), ("__main__", "your code")):
        monkeypatch.setattr(hea.KDEformerConfig, "__module__", module)
        assert [text for text in problems() if "readers" in text] == ([f"readers need {file}, {end}"] if file else [])
    monkeypatch.setattr(hea.KDEformerConfig, "__module__", "my_file")
    (folder / "my_file.py").write_text("")
    assert len(problems()) == 1


@pytest.mark.parametrize(
    ("measured", "is_complete"),
    [(None, False), ({"complete": False}, False), ({}, True)],
)
def test_missing_measurements_are_reported(measured, is_complete, folder):
    if measured is not None:
        (folder / "benchmark.json").write_text(json.dumps(converted.benchmark(**measured)))
    command = f"'hf-efficient-attn benchmark {folder} --card' adds them"
    expected = () if is_complete else (f"no complete measurements: {command}",)
    assert hub.plan_push(folder, REPOSITORY).problems == expected


DAMAGED = {
    "not converted": (lambda f: _edit(f, attn_implementation=None), "names no attention method"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "broken config": (lambda f: (f / "config.json").write_text('{"a": '), "config.json"),
    "no card": (lambda f: (f / "README.md").unlink(), "write_card"),
    "broken card": (lambda f: (f / "README.md").write_text("---\na: [\n---\n"), "front matter"),
    "pickle": (lambda f: (f / "pytorch_model.bin").write_bytes(b"x"), "pytorch_model.bin must not be published"),
    "pickle below": (
        lambda f: ((f / "optimizer").mkdir(), torch.save({}, f / "optimizer" / "state.pt")),
        "optimizer/state.pt must not be published",
    ),
    "link outside": (lambda f: (f / "vocab.txt").symlink_to("/etc/hostname"), "leads out of its folder"),
    "link nowhere": (lambda f: (f / "vocab.txt").symlink_to(f / "not-there"), "vocab.txt cannot be read"),
    "link to folder": (lambda f: (f / "again").symlink_to(f), "again is not a regular file"),
    "unfinished": (lambda f: (f / "model.safetensors.incomplete").write_text("x"), "must not be published"),
    "secrets": (lambda f: (f / ".env").write_text("KEY=1"), ".env must not be published"),
    "hidden folder": (lambda f: ((f / ".git").mkdir(), (f / ".git" / "HEAD").write_text("x")), ".git/HEAD must not"),
    "fifo": (lambda f: os.mkfifo(f / "pipe"), "not a regular file"),
    "no folder": (lambda f: f.rename(f.with_name("gone")), "is not a folder"),
}


def _edit(folder, **changes):
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


@pytest.mark.parametrize("case", DAMAGED)
def test_refused_before_any_request(case, folder, online, capsys):
    damage, message = DAMAGED[case]
    damage(folder)
    for sending in ([], ["--yes"]):
        assert status(folder, REPOSITORY, *sending) == 2
        out, err = capsys.readouterr()
        assert out == "" and len(err.splitlines()) == 1 and message in err
    assert online.requests == []


@pytest.mark.parametrize(
    "arguments",
    [
        *([n] for n in ["name", "a/b/c", "a/b--c", "../b", "a b/c", "a/" + "x" * 100, "a/b.git", ""]),
        *([REPOSITORY, "--install", x] for x in ["hf_efficient_attn", "/home/me/package", "file:///home/me/package"]),
    ],
    ids=lambda value: value[-1][:20],
)
def test_names_and_sources_that_cannot_be(arguments, made, online, capsys):
    assert status(made, *arguments, "--yes") == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and ("--install" in err) == ("--install" in arguments)
    assert online.requests == []


def _no_token(monkeypatch, folder):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no-token"))


def _bad_card(monkeypatch, folder):
    path = folder / "README.md"
    path.write_text(path.read_text().replace("license: apache-2.0", "license: My Own"))


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (lambda patch, _: patch.setattr(constants, "HF_HUB_OFFLINE", True), 2, "unset HF_HUB_OFFLINE"),
        (_no_token, 2, "hf auth login"),
        (lambda patch, _: patch.setenv("HF_TOKEN", "hf_wrong"), 1, "401"),
        (_bad_card, 1, "must be an identifier"),
    ],
    ids=["offline", "no token", "wrong token", "card"],
)
def test_what_prevents_a_push_is_one_line(change, code, message, folder, online, monkeypatch, capsys):
    change(monkeypatch, folder)
    assert status(folder, REPOSITORY) == 0  # without --yes there are no requests
    capsys.readouterr()
    assert status(folder, REPOSITORY, "--yes") == code
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and message in err
    assert ("nothing had been sent" in err) == (code == 1)
    assert online.repositories == {} and (code == 1 or online.requests == [])


@pytest.mark.parametrize(
    ("pattern", "answer", "sent"),
    [
        ("POST /api/repos/create", 403, "nothing had been sent"),
        (".*/preupload/main", 503, "the repository exists"),
        (".*/commit/main", 429, "the repository exists"),
        ("POST /api/validate-yaml", 500, "nothing had been sent"),
        (".*", hub_server.http.ConnectError("could not connect"), "nothing had been sent"),
    ],
    ids=["create", "preupload", "commit", "card", "unreachable"],
)
def test_an_error_of_the_hub_is_one_line_that_says_what_was_sent(pattern, answer, sent, made, online, capsys):
    online.answers.append((pattern, answer))
    assert status(made, REPOSITORY, "--yes") == 1
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert str(answer) in err and sent in err and hub_server.TOKEN not in err
    repository = online.repositories.get(REPOSITORY)
    assert repository is None or repository.files == {}


def test_the_cause_of_a_failed_upload_is_named(made, online, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("Error while uploading a file") from ConnectionResetError("the connection broke")

    monkeypatch.setattr(HfApi, "create_commit", fail)
    with pytest.raises(
        hub.PushError, match="the connection broke; the repository exists or was created, and its files"
    ):
        hub.push(made, REPOSITORY)


def test_private_files_are_not_sent_to_a_public_repository(made, online):
    online.repositories[REPOSITORY] = hub_server.Repository(private=False)
    with pytest.raises(hub.PushError, match="is public"):
        hub.push(made, REPOSITORY, private=True)
    assert online.repositories[REPOSITORY].files == {}
    online.repositories[REPOSITORY].private = True
    report = hub.push(made, REPOSITORY, private=True, token=hub_server.TOKEN)
    assert report.url == f"{constants.ENDPOINT}/{REPOSITORY}"
    assert report.commit == online.repositories[REPOSITORY].sha
