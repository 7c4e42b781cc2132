"""Model cards and `push`: contents, what the hub accepts, what is refused, and a complete upload and download."""

import json
import os
import pathlib
import re
import shutil
import time

import pytest
import torch
import transformers
import yaml
from huggingface_hub import HfApi, ModelCard, constants
from safetensors.torch import load_file

import converted
import hf_efficient_attn as hea
import hub_server
from each import refuses
from helpers.commands import refused, run_json, shown
from hf_efficient_attn import hub
from hf_efficient_attn.hub import write_card
from hf_efficient_attn.hub.card import END, OWN_PART, START, card_problems, clean, escape, for_repository
from tiny_models import SMALL, output, tiny_batch

ROOT = pathlib.Path(__file__).resolve().parents[2]
REPOSITORY = "someone/tiny-kdeformer"
INSTALL = "git+https://example.org/a/b@v0.2.0"


def config_json(method="kdeformer", architecture="BertForMaskedLM", layers=None, **changes):
    choice = hea.EfficientAttentionConfig(method, SMALL[method], layers).to_dict()
    named = {"architectures": [architecture], "model_type": "bert", "num_hidden_layers": 4}
    return {**named, "attn_implementation": method, "efficient_attention": choice, **changes}


def write(folder, config=None, origin=None, **others):
    """The JSON files of a converted folder, without weights, which a card does not need."""
    files = {"config": config or config_json(), "efficient_attention": origin or converted.origin(), **others}
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def card_of(folder, **files):
    return write_card(write(folder, **files)).read_text()


def test_front_matter(tmp_path):
    write(tmp_path, origin=converted.origin(license="My Own, v2", tags=["exbert", "text-embeddings-inference"]))
    text = write_card(tmp_path, name="tiny-kdeformer").read_text()
    assert ModelCard(text).data.to_dict() == {
        "library_name": "transformers",
        "base_model": "someone/tiny-bert",
        "language": ["en"],
        "pipeline_tag": "fill-mask",
        "tags": ["efficient-attention", "hf_efficient_attn", "kdeformer", "exbert"],
    }
    assert "\n# tiny-kdeformer\n" in text


@pytest.mark.parametrize("architecture", ["ViTForImageClassification", "Dinov2ForImageClassification"])
def test_the_card_says_how_to_give_larger_pictures(architecture, tmp_path):
    text = card_of(tmp_path, config=config_json(architecture=architecture))
    assert 'pipeline("image-classification"' in text
    assert ("interpolate_pos_encoding=True" in text) == architecture.startswith("ViT")


@pytest.mark.parametrize("method", hea.available_methods())
def test_every_method_has_a_card(method, tmp_path):
    text = card_of(tmp_path, config=config_json(method), benchmark=converted.benchmark(method))
    info = hea.method_info(method)
    assert all(expected in text for expected in (info.title, info.paper, f'"{method}"'))
    defaults = info.config_class().to_dict()
    changed = {key: value for key, value in SMALL[method].items() if value != defaults[key]}
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", text, re.M)
    assert rows == [(key, escape(changed[key])) for key in defaults if key in changed]  # no default values
    assert ("All hyperparameters have their default values." in text) == (not changed)
    assert (f"{info.title} has no causal form" in text) == (not info.causal)
    keys = info.config_class(**SMALL[method]).exact_length
    limit = f"- {info.title}: up to {keys} tokens the output is exact. Beyond that it is an approximation"
    assert (limit in text) == (keys > 0)
    assert ("differs from that of the original attention at every length" in text) == (keys == 0)
    assert hub_server.card_errors(text) == []


MIX = hea.EfficientAttentionConfig(
    "longformer", None, [{"layers": [0], "method": "longformer"}, {"layers": [1, 2], "method": "linear"}]
).to_dict()
EXACT = {"architectures": ["BertForMaskedLM"], "attn_implementation": "sdpa"}
GENERATION = converted.benchmark()
for _number, _row in enumerate(GENERATION["measurements"]):
    _row |= {"first_token_seconds": 0.25 * _number, "tokens_per_second": None if _number == 1 else 12.345}
# {case: (files, what the card contains, what it does not contain)}
STATEMENTS = {
    "measurements": (
        {"benchmark": converted.benchmark(summary=["linear does not pay off."], notes=["The data are small."])},
        [
            "| 128 | 2 | kdeformer | 0.0321 | 1.25x | 0.2500 |  | 18 |",
            "| 64 | 2 | linear | 0.005 | 2.00x | 0.7500 | 0.2500 |  |",
            "\n- linear does not pay off.\n- The data are small.\n",
            "on 8 examples of book.txt, with up to 128 tokens. Machine", "Agreement: share of the masked tokens, every",
            "cpu A CPU; threads 2",
        ],
        ["Not measured", "benchmark.png", "The measurement was stopped", "tokens/s"],
    ),
    "generation": (
        {"benchmark": GENERATION},
        [
            "| peak memory, MiB | first token, s | tokens/s |\n|---|---|---|---|---|---|---|---|---|---|\n",
            "| 128 | 2 | kdeformer | 0.0321 | 1.25x | 0.2500 |  | 18 | 1 | 12.35 |",
            "| 64 | 2 | kdeformer | 0.02 | 0.50x | 0.1250 | 0.9877 | 9 | 0.25 |  |",
        ], [],
    ),
    "one example": (
        {"benchmark": converted.benchmark(data={"name": "book.txt", "rows": 1})}, ["on 1 example of book.txt"], [],
    ),
    "stopped": ({"benchmark": converted.benchmark(complete=False)}, ["The measurement was stopped before its end"], []),
    "extended": (
        {"origin": converted.origin(max_length=1024)},
        [
            "extended to 1024 tokens without training",
            "did not change the weights, except that the position table was extended to 1024 tokens. This card",
        ], [],
    ),
    "no measurements": (
        {},
        ['Not measured. `hf-efficient-attn benchmark "ORG/NAME"` compares a model of text or pictures with exact'],
        ["calibrated", "is not part of"],
    ),
    "exact again": (
        {"config": EXACT},
        [
            "with exact attention, converted back", "nothing but Transformers.\n", "\ntags:\n- exbert\n",
            "Licence of the original model: apache-2.0.",
        ],
        ["import hf_efficient_attn", "extended", "efficient-attention"],
    ),
    "exact again, extended": (
        {"config": EXACT, "origin": converted.origin(max_length=1024, trained_positions=512)},
        ["nothing but Transformers. The position table was extended from 512 to 1024 tokens without training.\n"], [],
    ),
    "calibrated": (
        {"config": config_json(efficient_attention={"method": "kdeformer", "calibrated_length": 2048, "version": 2})},
        ["calibrated on inputs of 2048 tokens"], [],
    ),
    "a mix": (
        {"config": config_json(attn_implementation="longformer", efficient_attention=MIX)},
        ["### Longformer", "### Linear transformer", "Layers: 1-2 of 4, counted from zero; exact: 3"], [],
    ),
    "a composite model": (
        {"config": {"architectures": ["CLIPModel"], "text_config": config_json("linear")}},
        ["in the part text\\_config"], [],
    ),
    "sentence-transformers": (
        {"origin": converted.origin(max_length=1024), "modules": []},
        ['SentenceTransformer("ORG/NAME")\n'], ["model_kwargs"],
    ),
    "sentence-transformers, a kernel": (
        {"config": config_json(attn_implementation="org/kdeformer:kdeformer"), "modules": []},
        [
            'SentenceTransformer("ORG/NAME", model_kwargs={"allow_all_kernels": True})\n',
            'pipeline("fill-mask", model="ORG/NAME", model_kwargs={"allow_all_kernels": True})\n',
            "```\n\n```python\nfrom transformers import pipeline\n\npipe",
        ],
        ["import hf_efficient_attn\nfrom"],
    ),
    "sentence-transformers, remote code": (
        {
            "config": config_json(auto_map={"AutoModelForMaskedLM": "modeling_efficient_attention.BertForMaskedLM"}),
            "modules": [],
        },
        [
            'SentenceTransformer("ORG/NAME", trust_remote_code=True)\n',
            'pipeline("fill-mask", model="ORG/NAME", trust_remote_code=True)\n',
        ],
        ["import hf_efficient_attn\nfrom"],
    ),
    "no pipeline": ({"config": config_json(architecture="BertForQuestionAnswering")}, [], ["pipeline("]),
    "an original on the hub": ({}, ["This is [someone/tiny-bert](https://huggingface.co/someone/tiny-bert) with"], []),
    "an original elsewhere": (
        {"origin": converted.origin(base_model=None, base_name="folder-of-mine"), "benchmark": converted.benchmark()},
        ["\nThis is a model of the class `BertForMaskedLM` with sub-quadratic attention: `kdeformer`."],
        ["folder-of-mine", "base_model"],
    ),
    "nothing to install": (
        {"origin": converted.origin(install=None)},
        ["install it from where the author of this checkpoint got it"], ["pip install"],
    ),
    **{
        install: ({"origin": converted.origin(install=install)}, [f"\npip install {install}\n"], [])
        for install in ("hf_efficient_attn==0.2.0", "git+https://example.org/a/b@v0.2.0")
    },
    **{
        architecture: (
            {"config": config_json(architecture=architecture), "origin": converted.origin(pipeline_tag=None)},
            [f"\npipeline_tag: {task}\n", f'pipeline("{task}", model="ORG/NAME")'] if task else [],
            [] if task else ["pipeline_tag", "pipeline("],
        )
        for architecture, task in (
            ("WhisperForConditionalGeneration", "automatic-speech-recognition"), ("WhisperModel", None),
            ("GPT2LMHeadModel", "text-generation"), ("BertModel", "feature-extraction"),
            ("ViTModel", "image-feature-extraction"), ("SomethingElse", None),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("case", STATEMENTS)
def test_the_card_states_what_the_files_say(case, tmp_path):
    files, expected, absent = STATEMENTS[case]
    text = card_of(tmp_path, **files)
    assert [part for part in expected if part not in text] == [part for part in absent if part in text] == []


def test_figures_and_the_order_of_the_parts(tmp_path):
    (tmp_path / "benchmark.png").write_bytes(b"\x89PNG")
    text = card_of(tmp_path, benchmark=converted.benchmark())
    assert "](benchmark.png)" in text
    assert re.findall(r"^## (.*)$", text, re.M) == ["Measured", "Load", "Attention", "Limits", "How it was made"]


def test_learned_parameters_are_those_of_the_weights(tmp_path):
    model = converted.make(tmp_path, "bert", "linformer")
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters() if ".learned_parameters." in name}
    text = (tmp_path / "README.md").read_text()
    listed = re.search(r"new parameters that the attention learns \((.*?)\)", text)[1]
    assert set(re.findall(r"`(\w+)`", listed)) == names != set()
    assert "fine-tune the model before use" in text


def test_the_same_files_give_the_same_card(tmp_path):
    first = card_of(tmp_path, benchmark=converted.benchmark())
    assert write_card(tmp_path).read_text() == first
    (tmp_path / "other").mkdir()
    other = card_of(tmp_path / "other", benchmark=converted.benchmark())
    assert "\n# other\n" in other
    assert for_repository(other, "some/name") == for_repository(first, "some/name")  # no path and no date


def test_what_a_user_wrote_is_kept(tmp_path):
    card = ModelCard(card_of(tmp_path, benchmark=converted.benchmark()))
    mine = {"type": "accuracy", "value": 0.5}
    result = {"task": {"type": "fill-mask"}, "dataset": {"type": "glue", "name": "GLUE"}, "metrics": [mine]}
    data = {**card.data.to_dict(), "thumbnail": "mine.png", "license": "mit"}
    data |= {"tags": [*data["tags"], "my-tag"], "model-index": [{"name": "x", "results": [result]}]}
    body = f"Before.\n{START}\nforged\n{END}\nAfter.\n"
    (tmp_path / "README.md").write_text(f"---\n{yaml.safe_dump(data)}---\n{body}")
    again = card_of(tmp_path, config=config_json("linear"), benchmark=converted.benchmark("linear"))
    written = ModelCard(again)
    assert written.text.startswith("Before.\n" + START)
    assert again.endswith(END + "\nAfter.\n")
    assert "forged" not in again
    assert written.data.thumbnail == "mine.png"
    assert written.data.license == "apache-2.0"  # the card's own key
    assert written.data.tags == ["efficient-attention", "hf_efficient_attn", "linear", "exbert", "my-tag"]
    assert [(entry.metric_type, entry.dataset_name) for entry in written.data.eval_results] == [("accuracy", "GLUE")]


def test_another_readme_is_kept_below_the_card(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: mit\nthumbnail: x.png\n---\n# By hand\n")
    text = card_of(tmp_path)
    assert text.endswith(f"{END}\n# By hand\n") and "thumbnail: x.png\n" in text and "license: mit" not in text
    assert text == write_card(tmp_path).read_text()


@pytest.mark.parametrize(
    "damaged", ["---\na: [\n---\n", "---\n- a\n---\n", f"{START}\none\n", f"{END}\n{START}\n", "J\xfcrgen"]
)
def test_a_readme_that_cannot_be_kept_is_refused(damaged, tmp_path):
    (tmp_path / "README.md").write_text(damaged, encoding="latin-1")
    reasons = {START: "once and in this order", "---": "front matter", "": "not UTF-8 text"}
    refuses(next(reason for part, reason in reasons.items() if part in damaged), card_of, tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="latin-1") == damaged


def test_a_card_needs_a_method_or_a_source(tmp_path):
    card_of(tmp_path, config=EXACT)
    (tmp_path / "efficient_attention.json").unlink()
    refuses("names no attention method", write_card, tmp_path)


def test_a_method_of_another_package_has_to_be_imported(tmp_path, monkeypatch):
    (tmp_path / "modules.json").write_text("[]")
    monkeypatch.setattr(hea.KDEformerConfig, "__module__", "mine.my_file")
    text = card_of(tmp_path)
    sentence = "The method `kdeformer` is not part of `hf_efficient_attn`. The file `mine/my_file.py` registers it"
    assert text.count(sentence) == 1 and text.index(sentence) < text.index("```python")
    # Each block that can be run alone imports the file: those of Transformers, a pipeline and sentence-transformers.
    imports = r"```python\nimport hf_efficient_attn.*\nimport mine.my_file  # registers kdeformer\nfrom "
    assert len(re.findall(imports, text)) == 3
    monkeypatch.setattr(hea.KDEformerConfig, "__module__", "__main__")
    text = card_of(tmp_path)
    assert "import __main__" not in text and "\n# first run the code that registers kdeformer\n" in text


def test_problems_of_the_front_matter_are_reported():
    assert len(card_problems("no front matter")) == 3
    assert card_problems("---\nlicense: mit\nbase_model: a/b\npipeline_tag: fill-mask\n---\n") == []
    found = card_problems("---\ntags: [a]\n---\n")
    assert [problem.partition(":")[0] for problem in found] == ["no license", "no base_model", "no pipeline_tag"]
    assert "add 'base_model:' to the front matter" in found[1]


ROWS = converted.benchmark()["measurements"]
BROKEN = {
    "unknown key": ({"config": config_json(efficient_attention={"window": 3})}, "unknown key"),
    "base model": ({"origin": converted.origin(base_model="../../etc")}, "base_model"),
    "base model's type": ({"origin": converted.origin(base_model=3)}, "base_model cannot be 3"),
    "two lines": ({"origin": converted.origin(license="a\n# b")}, "license cannot be 'a"),
    "version": ({"origin": converted.origin(hf_efficient_attn=1)}, "hf_efficient_attn cannot be 1"),
    "measurements": ({"benchmark": converted.benchmark(measurements={})}, "benchmark.json"),
    "machine": ({"benchmark": converted.benchmark(machine="fast")}, "benchmark.json"),
    "row": ({"benchmark": converted.benchmark(measurements=["x"])}, "benchmark.json"),
    **{
        f"seconds {value!r}": (
            {"benchmark": converted.benchmark(measurements=[*ROWS[:4], {**ROWS[4], "seconds": value}])},
            "no card can be made of benchmark.json",
        )
        for value in ("1", "fast", None)
    },
    # What nobody else can install.
    **{
        f"install {text}": ({"origin": converted.origin(install=text)}, "efficient_attention.json: install: give")
        for text in (
            "hf_efficient_attn", ".", "/home/me/hf_efficient_attn", "file:///home/me/x", "git+file:///home/me/x",
            "other==1.0", "git+https://user:token@example.org/a/b", "https://example.org/a b",
            "https://example.org/$(id)", "-e .",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_damaged_files_are_refused_and_nothing_is_written(name, tmp_path):
    files, message = BROKEN[name]
    write(tmp_path, **files)
    refuses(re.escape(message), write_card, tmp_path)
    assert not (tmp_path / "README.md").exists()


@pytest.mark.parametrize(
    "signs",
    ["\n# heading\n", "\n---\nlicense: mit\n---\n", "| a |", "```\n", f"\n{START}\n", f"\n{END}\n", "$(id)", ": - '\""],
)
def test_text_from_files_does_not_change_the_structure_of_the_card(signs, tmp_path):
    written, plain = _card_with(tmp_path, f"a {signs}"), _card_with(tmp_path, "a word")
    assert hub_server.card_errors(written) == []
    assert ModelCard(written).data.to_dict().keys() == ModelCard(plain).data.to_dict().keys()
    assert (written.splitlines().count(START), written.splitlines().count(END)) == (1, 1)
    body, expected = (OWN_PART.search(text)[1].splitlines() for text in (written, plain))
    assert len(body) == len(expected)
    # Each line of a table has as many cells.
    cells = [[re.sub(r"\\\\|\\\|", "", x).count("|") for x in lines if x[:1] == "|"] for lines in (body, expected)]
    assert cells[0] == cells[1]


def _card_with(folder, text):
    """The card of a folder with the text in every place where a file can contain any text."""
    plain = clean(text)  # other texts are refused there
    origin = converted.origin(hf_efficient_attn=plain, license=plain, tags=[plain])
    measured = converted.benchmark(machine={"cpu": text, f"k{text}": 1}, summary=[text], notes=[text])
    measured["measurements"][1]["attention"] = text
    measured["data"]["name"] = text
    (folder / "README.md").unlink(missing_ok=True)
    return card_of(folder, config=config_json(architecture=text), origin=origin, benchmark=measured)


def test_escaped_text_is_one_line():
    assert escape("a\nb | *c* <d> `e` [f]") == r"a b \| \*c\* \<d\> \`e\` \[f\]"
    assert clean("a\x00b\u202ec \ud800") == "a b c"
    assert len(clean("word " * 100)) <= 200


def test_the_template_is_linked_from_model_cards_and_contains_no_numbers():
    link = ROOT / "model_cards" / "card.md.jinja"
    assert link.is_symlink() and not link.readlink().is_absolute()
    assert link.resolve() == ROOT / "hf_efficient_attn" / "hub" / "card.md.jinja"
    # Every number of a card comes from a file.
    assert re.findall(r"\d", re.sub(r"\{[{%].*?[}%]\}", "", link.read_text(), flags=re.S)) == []


# push


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
    """A local server in place of the hub, and its token. Nothing is written outside `tmp_path`."""
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
    out, err = shown(capsys, "push", made, REPOSITORY, "--private", "--yes")
    assert err == "" and f"{constants.ENDPOINT}/{REPOSITORY}" in out  # quiet when piped
    repository = online.repositories[REPOSITORY]
    names = sorted(path.name for path in made.iterdir())
    assert repository.private and repository.commits == [("kdeformer by hf_efficient_attn", names)]
    assert all(repository.files[name] == (made / name).read_bytes() for name in names if name != "README.md")
    model = transformers.AutoModelForMaskedLM.from_pretrained(REPOSITORY, cache_dir=tmp_path).eval()
    assert len(transformers.AutoTokenizer.from_pretrained(REPOSITORY, cache_dir=tmp_path)) == 60
    assert model.config._attn_implementation == "kdeformer"
    batch = tiny_batch("bert", padding="right")
    assert torch.equal(output(model, batch), output(transformers.BertForMaskedLM.from_pretrained(made).eval(), batch))
    assert any(line.startswith(f"GET /{REPOSITORY}/resolve/") for line in online.requests)


def test_without_yes_there_are_no_requests(folder, online, capsys):
    (folder / "README.md").unlink()
    _origin(folder, license=None)
    line = ("push", folder, REPOSITORY)
    out = shown(capsys, *line, "--private").out
    assert "(private)" in out and "Nothing was sent. Add --yes" in out
    names = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")][2:]
    assert names == sorted(path.name for path in folder.iterdir())
    plan = run_json(capsys, *line)
    assert (plan["repository"], plan["private"], plan["sent"]) == (REPOSITORY, False, False)
    assert {"path": "config.json", "bytes": (folder / "config.json").stat().st_size} in plan["files"]
    kinds = [problem.partition(":")[0] for problem in plan["card_problems"]]
    assert kinds == ["no license", "no complete measurements"]
    assert plan["install"] == converted.ORIGIN["install"] and plan["refusals"] == []
    assert "--show-card sends nothing" in refused(capsys, *line, "--show-card", "--yes")
    assert online.requests == []


def test_a_second_push_updates_files_and_removes_old_weights(folder, online, capsys):
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "README.md").write_text("not the card")
    (folder / "notes.txt").symlink_to("tokenizer.json")
    shown(capsys, "push", folder, REPOSITORY, "--yes")
    repository = online.repositories[REPOSITORY]
    assert not repository.private and {"1_Pooling/README.md", "README.md"} < set(repository.files)
    assert repository.files["notes.txt"] == (folder / "tokenizer.json").read_bytes()
    others = dict.fromkeys(["lora/adapter_model.safetensors", "v1/model.safetensors", "model.fp16.safetensors"], b"")
    repository.files |= others
    shard = "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(folder / shard)
    weights = dict.fromkeys(load_file(folder / shard), shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    assert run_json(capsys, "push", folder, REPOSITORY, "--yes")["sent"] is True
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert shard in names and set(repository.files) == names | others.keys()


def _origin(folder, **changes):
    (folder / "efficient_attention.json").write_text(json.dumps(converted.origin(**changes)))
    write_card(folder)


def test_what_to_install_is_asked_for_once_and_stored(folder, online, capsys):
    _origin(folder, install=None)
    out, err = shown(capsys, "push", folder, REPOSITORY, "--show-card")
    assert "This card does not know where that is published" in out
    assert err.startswith("--yes would refuse: the card cannot say where hf_efficient_attn is published")
    assert "Correct this first" in shown(capsys, "push", folder, REPOSITORY).out
    assert "give --install with a URL" in refused(capsys, "push", folder, REPOSITORY, "--yes")
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
        write_card(folder)
    with (folder / "README.md").open("a") as file:
        file.write("\nMy own remarks.\n")
    before = {path: path.read_bytes() for path in folder.rglob("*")}
    line = ("push", folder, REPOSITORY, *options)
    card, err = shown(capsys, *line, "--show-card")
    assert err == "" and before == {path: path.read_bytes() for path in folder.rglob("*")} and online.requests == []
    assert "\n# tiny-kdeformer\n" in card and card.endswith("My own remarks.\n")
    assert '"ORG/NAME"' not in card and card.count(f'"{REPOSITORY}"') >= 2
    assert f"\npip install {options[-1] if options else converted.ORIGIN['install']}\n" in card
    plan = run_json(capsys, *line, "--show-card")
    assert plan["card"] == card
    # What the list of the dry run says is reported again, and true.
    assert ("Card: no complete measurements" in shown(capsys, *line, "--yes").out) == (not measured)
    sent = online.repositories[REPOSITORY].files
    assert sent["README.md"].decode() == card
    sizes = {entry["path"]: entry["bytes"] for entry in plan["files"]}
    assert {name: len(content) for name, content in sent.items()} == sizes


def test_the_file_of_a_method_is_missed(folder, monkeypatch):
    def problems():
        write_card(folder)
        return hub.plan_push(folder, REPOSITORY).problems

    end = "which registers kdeformer: put it into the folder, or write into README.md where it is"
    for module, file in ((hea.KDEformerConfig.__module__, None), ("my_file", "my_file.py"), ("__main__", "your code")):
        monkeypatch.setattr(hea.KDEformerConfig, "__module__", module)
        assert [text for text in problems() if "readers" in text] == ([f"readers need {file}, {end}"] if file else [])
    monkeypatch.setattr(hea.KDEformerConfig, "__module__", "my_file")
    (folder / "my_file.py").write_text("")
    assert len(problems()) == 1


def test_incomplete_measurements_are_reported(folder):
    command = f"'hf-efficient-attn benchmark {folder} --card' adds them for text and pictures"
    for changes, expected in (({"complete": False}, (f"no complete measurements: {command}",)), ({}, ())):
        (folder / "benchmark.json").write_text(json.dumps(converted.benchmark(**changes)))
        assert hub.plan_push(folder, REPOSITORY).problems == expected


DAMAGED = {
    "not converted": (lambda f: (f / "config.json").write_text('{"model_type": "bert"}'), "names no attention method"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "broken config": (lambda f: (f / "config.json").write_text('{"a": '), "config.json"),
    "no card": (lambda f: (f / "README.md").unlink(), "write_card"),
    "broken card": (lambda f: (f / "README.md").write_text("---\na: [\n---\n"), "front matter"),
    "other text": (lambda f: (f / "README.md").write_bytes(b"J\xfcrgen"), "not UTF-8 text (byte 1): save it as"),
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


@pytest.mark.parametrize("case", DAMAGED)
def test_refused_before_any_request(case, folder, online, capsys):
    damage, message = DAMAGED[case]
    damage(folder)
    assert all(message in refused(capsys, "push", folder, REPOSITORY, *sending) for sending in ([], ["--yes"]))
    assert online.requests == []


@pytest.mark.parametrize(
    "name", ["name", "a/b/c", "a/b--c", "../b", "a b/c", "a/" + "x" * 100, "a/b.git", "", "--install"]
)
def test_names_and_sources_that_cannot_be(name, made, online, capsys):
    arguments = [REPOSITORY, name, "/home/me/package"] if name == "--install" else [name]
    assert ("--install" in refused(capsys, "push", made, *arguments, "--yes")) == ("--install" in arguments)
    assert online.requests == []


def no_token(online, patch, folder):
    patch.delenv("HF_TOKEN")
    patch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no-token"))


def bad_card(online, patch, folder):
    path = folder / "README.md"
    path.write_text(path.read_text().replace("license: apache-2.0", "license: My Own"))


def answering(pattern, answer):
    return lambda online, *_: online.answers.append((pattern, answer))


def broken_upload(online, patch, folder):
    def fail(*args, **options):
        raise RuntimeError("Error while uploading a file") from ConnectionResetError("the connection broke")

    patch.setattr(HfApi, "create_commit", fail)


NOTHING, REPOSITORY_ONLY = "nothing had been sent", "the repository exists"
PREVENTED = {
    "offline": (lambda _, patch, __: patch.setattr(constants, "HF_HUB_OFFLINE", True), 2, "unset HF_HUB_OFFLINE", ""),
    "no token": (no_token, 2, "hf auth login", ""),
    "wrong token": (lambda _, patch, __: patch.setenv("HF_TOKEN", "hf_wrong"), 1, "401", NOTHING),
    "bad card": (bad_card, 1, "must be an identifier", NOTHING),
    "unreachable": (answering(".*", hub_server.http.ConnectError("not connected")), 1, "not connected", NOTHING),
    "card": (answering("POST /api/validate-yaml", 500), 1, "500", NOTHING),
    "create": (answering("POST /api/repos/create", 403), 1, "403", NOTHING),
    "preupload": (answering(".*/preupload/main", 503), 1, "503", REPOSITORY_ONLY),
    "commit": (answering(".*/commit/main", 429), 1, "429", REPOSITORY_ONLY),
    "upload": (broken_upload, 1, "the connection broke; ", f"{REPOSITORY_ONLY} or was created, and its files"),
}


@pytest.mark.parametrize("case", PREVENTED)
def test_what_prevents_a_push_is_one_line_that_says_what_was_sent(case, folder, online, monkeypatch, capsys):
    change, code, message, sent = PREVENTED[case]
    change(online, monkeypatch, folder)
    shown(capsys, "push", folder, REPOSITORY)
    assert online.requests == []  # without --yes
    err = refused(capsys, "push", folder, REPOSITORY, "--yes", status=code)
    assert message in err and sent in err and hub_server.TOKEN not in err and (code == 1 or online.requests == [])
    assert all(not repository.files for repository in online.repositories.values())
    assert bool(online.repositories) == sent.startswith(REPOSITORY_ONLY)


def test_private_files_are_not_sent_to_a_public_repository(made, online):
    online.repositories[REPOSITORY] = hub_server.Repository(private=False)
    refuses("is public", hub.push, made, REPOSITORY, private=True, error=hub.PushError)
    assert online.repositories[REPOSITORY].files == {}
    online.repositories[REPOSITORY].private = True
    report = hub.push(made, REPOSITORY, private=True, token=hub_server.TOKEN)
    assert report.url == f"{constants.ENDPOINT}/{REPOSITORY}"
    assert report.commit == online.repositories[REPOSITORY].sha
