"""`push`: what it would send, what it refuses, and a complete upload to a local hub and download from it."""

import json
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

import converted
import hf_efficient_attn as hea
import hub_server
from hf_efficient_attn import cli, hub
from tiny_models import output, tiny_batch

ROOT = pathlib.Path(__file__).resolve().parents[2]
REPOSITORY = "someone/tiny-kdeformer"


def status(*arguments):
    return cli.run(cli.app, [str(a) for a in arguments], "hf-efficient-attn")


@pytest.fixture
def server():
    with hub_server.serve() as running:
        yield running


@pytest.fixture
def online(server, monkeypatch, tmp_path):
    """Let this process connect to the local server only, with its token, and write nothing outside `tmp_path`."""
    from huggingface_hub import constants

    connect = __import__("socket").socket.connect

    def connect_locally(self, address):
        assert address[0] == "127.0.0.1", f"a connection to {address} was tried"
        return connect(self, address)

    monkeypatch.setattr("socket.socket.connect", connect_locally)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "agents.json"), raising=False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # huggingface_hub waits before it tries again
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    return server


@pytest.fixture
def folder(tmp_path):
    converted.make(tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.exhaustive
def test_a_pushed_checkpoint_is_loaded_from_the_hub_in_new_processes(server, tmp_path):
    out = tmp_path / "out"
    model = converted.make(out)
    (out / "README.md.bak").write_text("an older card")
    before = (out / "README.md").read_text()
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    environment |= {
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }

    def python(code, **more):
        line = [sys.executable, "-c", f"{hub_server.LOCAL_CONNECTIONS_ONLY}\n{code}"]
        return subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env={**environment, **more})

    pushed = python(
        "import sys; from hf_efficient_attn.cli import main\n"
        f"main(['push', 'out', {REPOSITORY!r}, '--private', '--yes', '--message', 'First'])",
        HF_TOKEN=hub_server.TOKEN,
    )
    assert pushed.returncode == 0, pushed.stderr
    assert pushed.stderr == ""  # quiet when piped
    assert f"{server.url}/{REPOSITORY}" in pushed.stdout
    repository = server.repositories[REPOSITORY]
    assert repository.private
    files = sorted(path.name for path in out.iterdir() if not path.name.startswith("README.md"))
    assert repository.commits == [("First", files), ("Card: First", ["README.md"])]
    assert all(repository.files[name][0] == (out / name).read_bytes() for name in files)
    expected = before.replace('"ORG/NAME"', f'"{REPOSITORY}"').replace("\n# out\n", "\n# tiny-kdeformer\n")
    assert repository.files["README.md"][0].decode() == expected
    assert expected.count("# tiny-kdeformer\n") == 1 and expected.count(REPOSITORY) >= 2
    assert (out / "README.md").read_text() == before

    batch = tiny_batch("bert", padding="right")
    torch.save(batch, tmp_path / "batch.pt")
    loaded = python(
        "import json, sys, torch, hf_efficient_attn\n"
        "from transformers import AutoModelForMaskedLM, AutoTokenizer\n"
        f"model = AutoModelForMaskedLM.from_pretrained({REPOSITORY!r}).eval()\n"
        f"assert len(AutoTokenizer.from_pretrained({REPOSITORY!r})) == 60\n"
        "batch = torch.load('batch.pt')\n"
        "with torch.no_grad(): torch.save(model(**batch)[0], 'output.pt')\n"
        "print(model.config._attn_implementation)",
        HF_TOKEN=hub_server.TOKEN,
    )
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.strip() == "kdeformer"
    assert torch.equal(torch.load(tmp_path / "output.pt"), output(model, batch))
    assert any(line.startswith(f"GET /{REPOSITORY}/resolve/") for line in server.requests)


def test_without_yes_or_with_dry_run_there_are_no_requests(folder, online, capsys):
    (folder / "README.md").rename(folder / "README.md.bak")
    _origin(folder, license=None)
    assert status("push", folder, REPOSITORY, "--private") == 0
    out = capsys.readouterr().out
    assert "(private)" in out and "Nothing was sent. Add --yes" in out and "Not sent: README.md.bak" in out
    names = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")][2:]
    assert names == [*sorted(p.name for p in folder.iterdir() if not p.name.startswith("README")), "README.md"]
    assert status("push", folder, REPOSITORY, "--private", "--dry-run") == 0
    assert capsys.readouterr().out == out
    assert status("push", folder, REPOSITORY, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["repository"], plan["private"], plan["sent"]) == (REPOSITORY, False, False)
    assert plan["stays"] == ["README.md.bak"] and [file["path"] for file in plan["files"]] == names
    assert {"path": "config.json", "bytes": (folder / "config.json").stat().st_size} in plan["files"]
    assert [problem.partition(":")[0] for problem in plan["card_problems"]] == ["no license", "no measurements"]
    assert plan["install"] == converted.ORIGIN["install"] and plan["refusals"] == []
    for option, message in (("--dry-run", "--dry-run sends nothing, and --yes"), ("--show-card", "--show-card sends")):
        assert status("push", folder, REPOSITORY, option, "--yes") == 2
        assert message in capsys.readouterr().err
    assert online.requests == []


def test_a_second_push_updates_files_and_removes_old_weights(folder, online, capsys):
    assert status("push", folder, REPOSITORY, "--yes") == 0
    repository = online.repositories[REPOSITORY]
    assert not repository.private
    shard = "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(folder / shard)
    weights = dict.fromkeys(load_file(folder / shard), shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    capsys.readouterr()
    assert status("push", folder, REPOSITORY, "--yes", "--json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out)["sent"] is True
    assert "model.safetensors" not in repository.files
    assert {shard, "model.safetensors.index.json"} <= set(repository.files)
    assert set(repository.files) == {path.name for path in folder.iterdir()}


def _origin(folder, **changes):
    (folder / "efficient_attention.json").write_text(json.dumps(converted.origin(**changes)))
    hub.write_card(folder)


def test_what_to_install_is_asked_for_once_and_stored(folder, online, monkeypatch, capsys):
    monkeypatch.setattr("hf_efficient_attn.hub.facts.known_source", lambda: None)
    _origin(folder, install=None)
    assert status("push", folder, REPOSITORY) == 0
    out = capsys.readouterr().out
    assert "--yes would refuse: the card cannot say where hf_efficient_attn is published" in out
    assert "Correct this first" in out
    assert status("push", folder, REPOSITORY, "--show-card") == 0
    out, err = capsys.readouterr()
    assert "This card does not know where that is published" in out
    assert err.startswith("--yes would refuse: the card cannot say where")
    assert status("push", folder, REPOSITORY, "--yes") == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "give --install with a URL" in err
    assert online.requests == []
    url, before = "git+https://example.org/a/b@v0.2.0", (folder / "README.md").read_text()
    assert status("push", folder, REPOSITORY, "--install", url) == 0
    assert "would refuse" not in capsys.readouterr().out
    assert (folder / "README.md").read_text() == before  # without --yes nothing is written
    assert status("push", folder, REPOSITORY, "--yes", "--install", url) == 0
    for _ in range(2):
        sent = online.repositories[REPOSITORY].files
        assert f"pip install {url}\n" in sent["README.md"][0].decode()
        assert json.loads(sent["efficient_attention.json"][0])["install"] == url
        assert status("push", folder, REPOSITORY, "--yes") == 0


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("measured", "options"), [(True, []), (False, ["--install", "git+https://example.org/a/b@v0.2.0"])]
)
def test_the_card_that_is_shown_is_the_one_that_is_sent(measured, options, folder, online, capsys):
    if measured:
        (folder / "benchmark.json").write_text(json.dumps(converted.benchmark()))
        hub.write_card(folder)
    card = (folder / "README.md").read_text()
    (folder / "README.md").write_text(f"{card}\nMy own remarks.\n")
    before = contents(folder)
    assert status("push", folder, REPOSITORY, "--show-card", *options) == 0
    shown, err = capsys.readouterr()
    assert err == "" and contents(folder) == before and online.requests == []
    assert "\n# tiny-kdeformer\n" in shown and shown.endswith("My own remarks.\n")
    assert f"\npip install {options[-1] if options else converted.ORIGIN['install']}\n" in shown
    assert status("push", folder, REPOSITORY, "--show-card", "--json", *options) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["card"] == shown
    assert status("push", folder, REPOSITORY, "--yes", *options) == 0
    # What the list of the dry run says is reported again, and true.
    assert ("Card: no measurements" in capsys.readouterr().out) == (not measured)
    sent = online.repositories[REPOSITORY].files
    assert sent["README.md"][0].decode() == shown
    assert {name: len(content[0]) for name, content in sent.items()} == {
        entry["path"]: entry["bytes"] for entry in plan["files"]
    }


def test_the_file_of_a_method_is_missed(folder, monkeypatch, capsys):
    def lines():
        assert status("push", folder, REPOSITORY) == 0
        return [line for line in capsys.readouterr().out.splitlines() if "readers need" in line]

    assert lines() == []
    monkeypatch.setattr(hea.KDEformerConfig, "__module__", "my_file")
    hub.write_card(folder)
    end = "which registers kdeformer: put it into the folder, or write into README.md where it is"
    assert lines() == [f"Card: readers need my_file.py, {end}"]
    (problem,) = [text for text in hub.plan_push(folder, REPOSITORY).problems if "no measurements" in text]
    assert f"'hf-efficient-attn benchmark {folder} --card --import my_file.py' adds them" in problem
    (folder / "my_file.py").write_text("")
    assert lines() == []
    monkeypatch.setattr(hea.KDEformerConfig, "__module__", "__main__")
    assert lines() == [f"Card: readers need your code, {end}"]


def test_files_that_truncate_below_the_length_of_the_card_are_refused(folder, online, capsys):
    (folder / "modules.json").write_text("[]")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    _origin(folder, max_length=128)  # that of the tokenizer
    assert status("push", folder, REPOSITORY) == 0
    out = capsys.readouterr().out
    assert "--yes would refuse: sentence_bert_config.json truncates texts at 64 tokens" in out
    assert "tokenizer_config.json" not in out.partition("would refuse")[2]
    assert status("push", folder, REPOSITORY, "--yes") == 2
    assert "the card claims 128" in capsys.readouterr().err
    assert online.requests == []
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 128}')
    assert status("push", folder, REPOSITORY, "--yes") == 0
    _origin(folder, max_length=256)
    assert {"tokenizer_config.json", "sentence_bert_config.json"} == {
        reason.split()[0] for reason in hub.plan_push(folder, REPOSITORY).refusals
    }


@pytest.mark.parametrize(
    ("measured", "problem"),
    [
        (None, "no measurements: 'hf-efficient-attn benchmark {folder} --card' adds them"),
        (converted.benchmark(complete=False), "the measurements are not complete"),
        (converted.benchmark("linear"), "no measurement of this checkpoint's own"),
        (converted.benchmark(), ""),
    ],
)
def test_missing_measurements_are_reported(measured, problem, folder):
    if measured is not None:
        (folder / "benchmark.json").write_text(json.dumps(measured))
    found = [text for text in hub.plan_push(folder, REPOSITORY).problems if "measure" in text]
    assert bool(found) == bool(problem) and problem.format(folder=folder) in "".join(found)


DAMAGED = {
    "not converted": (lambda f: _edit(f, attn_implementation=None), "names no attention method"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "broken config": (lambda f: (f / "config.json").write_text('{"a": '), "config.json"),
    "no card": (lambda f: (f / "README.md").unlink(), "write_card"),
    "broken card": (lambda f: (f / "README.md").write_text("---\na: [\n---\n"), "front matter"),
    "pickle": (lambda f: (f / "pytorch_model.bin").write_bytes(b"x"), "pytorch_model.bin (a pickle"),
    "pickle below": (
        lambda f: ((f / "optimizer").mkdir(), torch.save({}, f / "optimizer" / "state.pt")),
        "optimizer/state.pt (a pickle",
    ),
    "link outside": (lambda f: (f / "vocab.txt").symlink_to("/etc/hostname"), "vocab.txt (a link that leads outside)"),
    "link nowhere": (lambda f: (f / "vocab.txt").symlink_to(f / "not-there"), "leads nowhere"),
    "link to folder": (lambda f: (f / "again").symlink_to(f), "link to a folder"),
    "unfinished": (lambda f: (f / "model.safetensors.incomplete").write_text("x"), "unfinished file"),
    "secrets": (lambda f: (f / ".env").write_text("KEY=1"), ".env (a hidden"),
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
        assert status("push", folder, REPOSITORY, *sending) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert len(err.splitlines()) == 1
        assert message in err
    assert online.requests == []


@pytest.mark.parametrize("sending", [[], ["--yes"]], ids=["list", "yes"])
@pytest.mark.parametrize(
    "arguments",
    [
        *([n] for n in ["name", "a/b/c", "a/b--c", "a/.b", "../b", "a b/c", "a/" + "x" * 100, "a/b.git", ""]),
        *([REPOSITORY, "--install", x] for x in ["hf_efficient_attn", "/home/me/package", "file:///home/me/package"]),
    ],
    ids=lambda value: value[-1][:20],
)
def test_names_and_sources_that_cannot_be(arguments, sending, folder, online, capsys):
    assert status("push", folder, *arguments, *sending) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and ("--install" in err) == ("--install" in arguments)
    assert online.requests == []


def _offline(monkeypatch, folder):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def _no_token(monkeypatch, folder):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(folder / "no-token"))


def _unreachable(monkeypatch, folder):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")


def _bad_card(monkeypatch, folder):
    path = folder / "README.md"
    path.write_text(path.read_text().replace("license: apache-2.0", "license: My Own"))


@pytest.mark.parametrize(
    ("change", "code", "messages"),
    [
        (_offline, 2, ["unset HF_HUB_OFFLINE"]),
        (_no_token, 2, ["hf auth login"]),
        (lambda patch, _: patch.setenv("HF_TOKEN", "hf_wrong"), 1, ["401", "nothing had been sent"]),
        (_unreachable, 1, ["could not be reached", "nothing had been sent"]),
        (_bad_card, 1, ['"license" must be an identifier', "nothing had been sent"]),
    ],
    ids=["offline", "no token", "wrong token", "unreachable", "card"],
)
def test_what_prevents_a_push_is_one_line(change, code, messages, folder, online, monkeypatch, capsys):
    change(monkeypatch, folder)
    assert status("push", folder, REPOSITORY) == 0  # without --yes there are no requests
    capsys.readouterr()
    assert status("push", folder, REPOSITORY, "--yes") == code
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and all(message in err for message in messages), err
    assert online.repositories == {} and (code == 1 or online.requests == [])


@pytest.mark.parametrize(
    ("pattern", "code", "sent"),
    [
        ("POST /api/repos/create", 403, "nothing had been sent"),
        ("POST /api/repos/create", 500, "nothing had been sent"),
        (".*/preupload/main", 404, "the repository exists"),
        (".*/preupload/main", 503, "the repository exists"),
        (".*/info/lfs/objects/batch", 403, "the repository exists"),
        ("PUT /lfs/.*", 500, "the repository exists"),
        (".*/commit/main", 429, "the repository exists"),
        ("POST /api/validate-yaml", 500, "nothing had been sent"),
    ],
    ids=lambda value: re.sub(r"[^\w]+", "-", value).strip("-")[:25] if isinstance(value, str) else None,
)
def test_an_error_of_the_hub_is_one_line_that_says_what_was_sent(pattern, code, sent, folder, online, capsys):
    online.answer(pattern, code)
    assert status("push", folder, REPOSITORY, "--yes") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert f"{code}:" in err
    assert sent in err
    assert hub_server.TOKEN not in err
    repository = online.repositories.get(REPOSITORY)
    assert repository is None or "README.md" not in repository.files


def test_if_sending_the_card_fails_the_other_files_are_there(folder, online, monkeypatch, capsys):
    from huggingface_hub import HfApi

    def fail(*args, **options):
        raise ConnectionResetError("the connection broke")

    monkeypatch.setattr(HfApi, "upload_file", fail)
    assert status("push", folder, REPOSITORY, "--yes") == 1
    err = capsys.readouterr().err
    names = {path.name for path in folder.iterdir()} - {"README.md"}
    assert f"the connection broke; the repository exists or was created; all {len(names)} files but the card" in err
    assert set(online.repositories[REPOSITORY].files) == names


def test_private_files_are_not_sent_to_a_public_repository(folder, online):
    online.repositories[REPOSITORY] = hub_server.Repository(private=False)
    with pytest.raises(hub.PushError, match="is public"):
        hub.push(folder, REPOSITORY, private=True)
    assert online.repositories[REPOSITORY].files == {}
    online.repositories[REPOSITORY].private = True
    report = hub.push(folder, REPOSITORY, private=True, token=hub_server.TOKEN)
    assert report.url == f"{online.url}/{REPOSITORY}"
    assert len(set(report.commits)) == 2
    assert report.warnings == ()


def test_links_inside_the_folder_and_subfolders_are_sent(folder, online):
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "1_Pooling" / "README.md").write_text("not the card")
    (folder / "notes.txt").symlink_to("tokenizer.json")
    hub.push(folder, REPOSITORY)
    files = online.repositories[REPOSITORY].files
    assert {"1_Pooling/config.json", "1_Pooling/README.md", "notes.txt", "README.md"} <= set(files)
    assert files["notes.txt"][0] == (folder / "tokenizer.json").read_bytes()
