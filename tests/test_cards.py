"""Model cards: what they say, that the hub takes them, and that nothing in a stranger's files breaks out of them."""

import json
import logging
import math
import pathlib
import re

import pytest
import yaml
from huggingface_hub import ModelCard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import converted
import hf_efficient_attn as hea
import hub_server
from hf_efficient_attn import cli
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.hub import write_card
from hf_efficient_attn.hub.card import END, OWN_PART, START, card_problems, front_matter, render
from hf_efficient_attn.hub.facts import clean, read_facts
from hf_efficient_attn.hub.markdown import escape
from hf_efficient_attn.integration.layers import ranges
from hf_efficient_attn.integration.settings import EfficientAttentionConfig
from tiny_models import SMALL

ROOT = pathlib.Path(__file__).resolve().parent.parent


def config_json(method="kdeformer", architecture="BertForMaskedLM", layers=None, **changes):
    choice = EfficientAttentionConfig(method, SMALL[method], layers).to_dict()
    named = {"architectures": [architecture], "model_type": "bert", "num_hidden_layers": 4}
    return {**named, "attn_implementation": method, "efficient_attention": choice, **changes}


def write(folder, config=None, origin=None, benchmark=None):
    """The JSON files of a converted folder, without weights, which a card does not need."""
    files = {"config": config or config_json(), "efficient_attention": origin or converted.origin()}
    files |= {} if benchmark is None else {"benchmark": benchmark}
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def card_of(folder, **files):
    return write_card(write(folder, **files)).read_text()


def test_front_matter(tmp_path):
    data = ModelCard(card_of(tmp_path, benchmark=converted.benchmark())).data
    assert data.library_name == "transformers"
    assert data.base_model == "someone/tiny-bert"
    assert data.license == "apache-2.0"
    assert data.language == ["en"]
    assert data.pipeline_tag == "fill-mask"
    assert data.tags == ["efficient-attention", "hf_efficient_attn", "kdeformer", "exbert"]
    assert data.model_name == "tiny-bert-kdeformer"
    found = {(r.metric_type, r.metric_args["length"]): r.metric_value for r in data.eval_results}
    # Of its own method only, and only what was measured.
    assert found == {
        ("exact_attention_top1", 64): 0.987654,
        ("exact_attention_relative_error", 64): 0.125,
        ("exact_attention_relative_error", 128): 0.25,
    }
    assert {(r.task_type, r.dataset_name, r.dataset_type) for r in data.eval_results} == {
        ("fill-mask", "book.txt", "book-txt")
    }


@pytest.mark.parametrize("method", hea.available_methods())
def test_every_method_has_a_card_that_the_hub_takes(method, tmp_path, monkeypatch):
    from huggingface_hub import constants

    text = card_of(tmp_path, config=config_json(method), benchmark=converted.benchmark(method))
    info = hea.method_info(method)
    for said in (info.title, info.paper, f'"{method}"'):
        assert said in text
    for key, value in SMALL[method].items():
        assert f"| `{key}` | {escape(value)} |" in text
    assert (f"{info.title} has no causal form" in text) == (not info.causal)
    with hub_server.serve() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "agents.json"), raising=False)
        ModelCard(text).validate()
        with pytest.raises(ValueError, match="identifier"):
            ModelCard(text.replace("license: apache-2.0", "license: My Own")).validate()


def test_what_was_measured_stands_there(tmp_path):
    text = card_of(tmp_path, benchmark=converted.benchmark(notes=["The data are small."]))
    assert "| 128 | 2 | kdeformer | 0.0321 | 1.25x | 0.2500 |  | 18 |" in text
    assert "| 64 | 2 | linear | 0.005 | 2.00x | 0.7500 | 0.2500 |  |" in text
    assert "From 128 tokens on kdeformer is faster than exact attention." in text
    assert "Up to 128 tokens linear was not faster" in text
    assert "on 8 rows of book.txt" in text
    assert "cpu A CPU; threads 2" in text
    assert "The data are small." in text
    assert "Not measured" not in text
    assert "benchmark.png" not in text
    (tmp_path / "benchmark.png").write_bytes(b"\x89PNG")
    assert "](benchmark.png)" in write_card(tmp_path).read_text()


def test_rows_of_other_layers_are_not_its_own(tmp_path):
    files = {"config": config_json(layers=[1, 2]), "benchmark": converted.benchmark()}
    text = card_of(tmp_path, **files)
    assert "None of these rows" in text
    assert "model-index" not in text
    text = card_of(tmp_path, **{**files, "benchmark": converted.benchmark(layers=[1, 2])})
    assert "None of these rows" not in text
    assert "model-index" in text


def test_not_measured_is_said(tmp_path):
    text = card_of(tmp_path)
    assert "Not measured. Run `hf-efficient-attn benchmark OUT --card`." in text
    assert "model-index" not in text


def test_the_command_that_made_it_is_one_that_convert_takes(tmp_path):
    config = config_json(layers=[0, 1, 3])
    text = card_of(tmp_path, config=config, origin=converted.origin(max_length=1024))
    line = re.search(r"```bash\n(hf-efficient-attn convert .*)\n```", text)[1]
    assert line.startswith("hf-efficient-attn convert someone/tiny-bert --method kdeformer --set ")
    assert line.endswith("--layers 0-1,3 --max-length 1024 -o OUT")
    pairs = re.findall(r"--set (\S+=\S+)", line)
    changed = next(iter(cli.parse_methods(["kdeformer"], pairs).values()))
    assert changed == hea.KDEformerConfig(**SMALL["kdeformer"])
    assert "extended to 1024 tokens without training" in text


def test_a_mix_names_all_methods_and_no_command(tmp_path):
    mix = [{"layers": [0], "method": "longformer"}, {"layers": [1, 2], "method": "linear"}]
    choice = EfficientAttentionConfig("longformer", None, mix).to_dict()
    text = card_of(tmp_path, config=config_json(attn_implementation="longformer", efficient_attention=choice))
    assert "### Longformer" in text
    assert "### Linear transformer" in text
    assert "Layers: 1-2 (the first is 0) of 4; exact: 3" in text
    assert "-o OUT" not in text
    assert ModelCard(text).data.tags[2:4] == ["longformer", "linear"]


def test_parts_of_a_composite_model(tmp_path):
    part = config_json("linear")
    text = card_of(tmp_path, config={"architectures": ["CLIPModel"], "text_config": part})
    assert "in the part text\\_config" in text


def test_learned_parameters_are_read_from_the_weights(tmp_path):
    model = converted.make(tmp_path, "bert", "linformer")
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters() if ".learned_parameters." in name}
    text = (tmp_path / "README.md").read_text()
    said = re.search(r"new parameters that the attention learns \((.*?)\)", text)[1]
    assert {name.strip("`") for name in said.split(" and ")} == names != set()
    assert "fine-tune before use" in text
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(UnsupportedAttentionError, match=r"model\.safetensors"):
        write_card(tmp_path)


def test_the_same_files_give_the_same_card(tmp_path):
    first = card_of(tmp_path, benchmark=converted.benchmark())
    assert write_card(tmp_path).read_text() == first
    (tmp_path / "other").mkdir()
    assert card_of(tmp_path / "other", benchmark=converted.benchmark()) == first  # no path, no date
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == [
        "README.md", "benchmark.json", "config.json", "efficient_attention.json",
    ]  # fmt: skip


def test_what_a_user_wrote_survives(tmp_path):
    text = card_of(tmp_path, benchmark=converted.benchmark())
    card = ModelCard(text)
    mine = {"type": "accuracy", "value": 0.5}
    result = {"task": {"type": "fill-mask"}, "dataset": {"type": "glue", "name": "GLUE"}, "metrics": [mine]}
    data = {**card.data.to_dict(), "thumbnail": "mine.png", "license": "mit"}
    data["tags"] = [*data["tags"], "my-tag"]
    data["model-index"][0]["results"].insert(0, result)
    body = f"Before.\n{START}\nforged\n{END}\nAfter.\n"
    (tmp_path / "README.md").write_text(f"---\n{yaml.safe_dump(data)}---\n{body}")
    changed = config_json("linear")
    again = card_of(tmp_path, config=changed, benchmark=converted.benchmark("linear", pays_from={}))
    written = ModelCard(again)
    assert written.text.startswith("Before.\n" + START)
    assert again.endswith(END + "\nAfter.\n")
    assert "forged" not in again
    assert written.data.thumbnail == "mine.png"
    assert written.data.license == "apache-2.0"  # the card's own key
    assert written.data.tags == ["efficient-attention", "hf_efficient_attn", "linear", "exbert", "my-tag"]
    types = [entry.metric_type for entry in written.data.eval_results]
    assert types.count("accuracy") == 1
    assert {entry.dataset_name for entry in written.data.eval_results} == {"GLUE", "book.txt"}
    (tmp_path / "benchmark.json").unlink()
    assert [entry.metric_type for entry in ModelCard(write_card(tmp_path).read_text()).data.eval_results] == [
        "accuracy"
    ]


@pytest.mark.parametrize(
    "foreign",
    ["# By hand\n", "---\na: [\n---\n", f"{START}\nonly one marker\n", "---\n- a\n- b\n---\n", f"{END}\n{START}\n", ""],
    ids=["no markers", "broken yaml", "one marker", "a list", "turned round", "empty"],
)
def test_a_readme_of_others_is_put_aside_and_said(foreign, tmp_path, caplog):
    (tmp_path / "README.md").write_text(foreign)
    (tmp_path / "README.md.bak").write_text("older still")
    with caplog.at_level(logging.WARNING):
        text = card_of(tmp_path)
    assert (tmp_path / "README.md.bak2").read_text() == foreign
    assert (tmp_path / "README.md.bak").read_text() == "older still"
    assert "kept as README.md.bak2" in caplog.text
    assert text == write_card(tmp_path).read_text()


def test_a_licence_that_the_hub_does_not_know_keeps_its_name(tmp_path):
    data = ModelCard(card_of(tmp_path, origin=converted.origin(license="My Own License, v2"))).data
    assert (data.license, data.license_name) == ("other", "my-own-license-v2")


def test_back_to_exact_attention_has_a_card_too(tmp_path):
    card_of(tmp_path)
    text = card_of(tmp_path, config={"architectures": ["BertForMaskedLM"], "attn_implementation": "sdpa"})
    assert "tiny-bert with exact attention" in text
    assert "import hf_efficient_attn" not in text
    assert "Licence of the original, carried over: apache-2.0." in text
    assert ModelCard(text).data.tags == ["exbert"]
    (tmp_path / "efficient_attention.json").unlink()
    with pytest.raises(UnsupportedAttentionError, match="names no attention method"):
        write_card(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertForMaskedLM", "fill-mask"),
        ("GPT2LMHeadModel", "text-generation"),
        ("LlamaForCausalLM", "text-generation"),
        ("BertModel", "feature-extraction"),
        ("ViTModel", "image-feature-extraction"),
        ("ViTForImageClassification", "image-classification"),
        ("SomethingElse", None),
    ],
)
def test_the_task_where_the_original_names_none(architecture, task, tmp_path):
    text = card_of(tmp_path, config=config_json(architecture=architecture), origin=converted.origin(pipeline_tag=None))
    assert ModelCard(text).data.pipeline_tag == task
    assert ("pipeline(" in text) == (task is not None)
    assert task is None or f'pipeline("{task}", model="ORG/NAME")' in text


def test_problems_are_told():
    assert card_problems("no front matter") == ["there is no front matter"]
    assert "cannot be read" in card_problems("---\na: [\n---\n")[0]
    assert card_problems("---\nlicense: mit\nbase_model: a/b\npipeline_tag: fill-mask\n---\n") == []
    found = " ".join(card_problems("---\nlicense: [mit]\ntags: [1]\npipeline_tag: A B\n---\n"))
    for said in ("license", "base_model", "pipeline_tag", "tags"):
        assert said in found


BROKEN = {
    "unknown key": ({"config": config_json(efficient_attention={"window": 3})}, "unknown key"),
    "choice of the wrong type": ({"config": config_json(efficient_attention=[1])}, "must be a JSON object"),
    "base model": ({"origin": converted.origin(base_model="../../etc")}, "base_model"),
    "base model's type": ({"origin": converted.origin(base_model=3)}, "base_model must be text"),
    "tags": ({"origin": converted.origin(tags=[1])}, "tags must be a list of texts"),
    "version": ({"origin": converted.origin(hf_efficient_attn="1; rm -rf")}, "is no version"),
    "task": ({"benchmark": converted.benchmark(task="chess")}, "task must be one of"),
    "measurements": ({"benchmark": converted.benchmark(measurements={})}, "measurements must be a list"),
    "pays": ({"benchmark": converted.benchmark(pays_from={"kdeformer": -1})}, "must be a count"),
    "machine": ({"benchmark": converted.benchmark(machine="fast")}, "machine must be a JSON object"),
    "row": ({"benchmark": converted.benchmark(measurements=["x"])}, "must be a JSON object"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused_before_anything_is_written(name, tmp_path):
    files, said = BROKEN[name]
    write(tmp_path, **files)
    with pytest.raises(UnsupportedAttentionError, match=re.escape(said)):
        write_card(tmp_path)
    assert not (tmp_path / "README.md").exists()


@pytest.mark.parametrize("seconds", ["NaN", "Infinity", "1e999", "true", '"1"', "null", "9" * 4000, "9" * 5000])
def test_numbers_that_are_none(seconds, tmp_path):
    write(tmp_path, benchmark=converted.benchmark())
    path = tmp_path / "benchmark.json"
    path.write_text(path.read_text().replace('"seconds": 0.0321', f'"seconds": {seconds}'))
    with pytest.raises(UnsupportedAttentionError, match=r"benchmark\.json"):
        write_card(tmp_path)


MARKS = [
    "\n",
    "---",
    "\n---\n",
    "|",
    "`",
    "```\n",
    "<script>",
    "-->",
    END,
    START,
    "](http://evil)",
    "![x](",
    "# ",
    "**",
]
MARKS += ["{{ 1 }}", "{% raw %}", "\u2028", "\x85", "\x00", "\ud800", "\u202e", ": ", "- ", "'", '"', "$(id)", "a"]
HOSTILE = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(MARKS), max_size=8).map("".join))


WORDS, PLAIN = [f"word{number}" for number in range(12)], {}


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(HOSTILE, min_size=12, max_size=12))
@example(["\n---\nlicense: mit\n---\n", "<script>x</script>", *["| a | b |"] * 10])
def test_nothing_breaks_out_of_its_place(tmp_path, texts):
    """Whatever the texts are, the card has the structure that it has with plain words in their places."""
    shown, plain = _card_with(tmp_path, texts), PLAIN.setdefault("card", None) or _card_with(tmp_path, WORDS)
    PLAIN["card"] = plain
    data = yaml.safe_load(re.match(r"---\n(.*?)\n---\n", shown, re.S)[1])
    allowed = {"library_name", "license", "license_name", "language", "pipeline_tag", "tags", "model-index"}
    assert set(data) <= allowed
    assert hub_server.card_errors(shown) == []
    assert (shown.splitlines().count(START), shown.splitlines().count(END)) == (1, 1)
    body, expected = (OWN_PART.search(text)[1] for text in (shown, plain))
    assert _shape(body) == _shape(expected)
    live = _live(body)
    assert "<" not in live
    assert "](http" not in live
    assert live.count("|") == _live(expected).count("|")
    assert live.count("`") == _live(expected).count("`")


def _live(body):
    """The text without fenced blocks and marks that a backslash takes the meaning of."""
    text = re.sub(r"^```\w+\n.*?^```$", "", body, flags=re.S | re.M)
    return re.sub(r"\\[\\`*_{}\[\]|~$]", "", text)


def _shape(body):
    """The first characters of all lines, which is what makes headings, lists, tables, fences."""
    lines = body.splitlines()
    return [re.match(r"#+ |- |\| |\|-|```\w*|> |", line)[0] for line in lines]


def _card_with(folder, texts):
    take = iter(texts)
    origin = {
        "base_name": "n" + next(take),
        "license": "l" + next(take),
        "tags": [next(take)],
        "pipeline_tag": next(take),
    }
    measured = converted.benchmark()
    measured["measurements"][1]["attention"] = "a" + next(take)
    measured["measurements"][2]["method"] = next(take)
    measured["data"]["name"] = "d" + next(take)
    measured["machine"] = {"cpu": next(take), "k" + next(take): 1}
    measured["pays_from"] = {"p" + next(take): 64}
    measured["notes"] = ["n" + next(take)]
    architecture = next(take)
    config = config_json(architectures=[architecture if architecture.startswith("word") else "x y" + architecture])
    config["architectures"] = config["architectures"] if not architecture.startswith("word") else ["x y"]
    (folder / "README.md").unlink(missing_ok=True)
    return card_of(folder, config=config, origin=origin, benchmark=measured)


@given(st.text(max_size=300))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_escaped_text_is_one_line_that_html_and_tables_do_not_see(text):
    shown = escape(text)
    assert len(shown.splitlines()) <= 1
    assert not re.search(r"[<>\"]", shown)
    assert not re.search(r"(?<!\\)(?:\\\\)*[`*_|\[\]]", re.sub(r"\\[^\\]", "", shown.replace("\\\\", "")))
    assert clean(clean(text)) == clean(text)


def test_ranges():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert ranges([]) == ""


def test_the_template_is_where_the_issue_wants_it_and_in_the_package():
    link = ROOT / "model_cards" / "card.md.jinja"
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == ROOT / "hf_efficient_attn" / "hub" / "card.md.jinja"
    assert "hf_efficient_attn.hub = *.jinja" in (ROOT / "setup.cfg").read_text()


def test_no_number_in_the_template():
    """Every number of a card comes from a file."""
    text = (ROOT / "hf_efficient_attn" / "hub" / "card.md.jinja").read_text()
    assert re.findall(r"\d", re.sub(r"\{[{%].*?[}%]\}", "", text)) == []


def test_facts_are_what_the_card_is_made_of(tmp_path):
    facts = read_facts(write(tmp_path, benchmark=converted.benchmark()))
    assert facts.methods == ("kdeformer",)
    assert facts.layers == 4
    assert [row.own for row in facts.benchmark.measurements] == [False, True, False, False, True]
    assert all(math.isfinite(row.seconds) for row in facts.benchmark.measurements)
    assert render(facts) in card_of(tmp_path, benchmark=converted.benchmark())
    assert front_matter(facts)["pipeline_tag"] == "fill-mask"
