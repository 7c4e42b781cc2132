"""The figures of the documentation: its tables follow from docs/figures.json, and how recipes.results measures it."""

import copy
import csv
import functools
import json
import pathlib
import re

import pytest

from helpers import commands
from recipes import publish, results
from recipes.results import Spec
from tiny_recipes import refuses

FIGURES = json.loads(results.FIGURES.read_text(encoding="utf-8"))
SPECS = results.read_specs()
run = functools.partial(commands.run, results)


def test_tables_of_the_pages_follow_from_the_figures():
    pages = results.pages(FIGURES)
    assert {"README.md", "results.md", "choosing.md", "minilm-nearfar.md"} <= {path.name for path in pages}
    for path, text in pages.items():
        committed = path.read_text(encoding="utf-8")
        assert committed == text, f"{path.name} differs from docs/figures.json: python -m recipes.results --write"
    shown = {name for text in pages.values() for name in re.findall(r"^<!-- (?:figures|table): (\S+) -->$", text, re.M)}
    assert shown == set(SPECS), "every table is on a page"
    assert len({command for name in shown for command in FIGURES.get(name, {"commands": ()})["commands"]}) > 40


def test_the_file_has_the_tables_of_the_recipe():
    assert list(FIGURES) == [name for name, spec in SPECS.items() if not spec.rows]
    second = [(name, entry.pop("elsewhere")) for name, entry in copy.deepcopy(FIGURES).items() if "elsewhere" in entry]
    assert all(SPECS[name].elsewhere and set(SPECS[name].elsewhere) <= set(SPECS[name].columns) for name, _ in second)
    for name, entry in [*FIGURES.items(), *second]:
        keys = {"commands", "machine", "date", "revision", "rows"}
        assert keys <= set(entry) <= keys | {"elsewhere"} and entry["machine"], name
        for label, row in entry["rows"].items():
            assert set(row) <= set(SPECS[name].columns), (name, label)
            assert label.count(" | ") == len(SPECS[name].headers) - 1, (name, label)


@pytest.mark.parametrize("name", publish.CARDS)
def test_publishing_marks_the_table_of_a_card(name):
    text = (results.ROOT / "model_cards" / f"{name}.md").read_text(encoding="utf-8")
    written = re.sub(r"^<!-- table: .* -->\n\n|\n<!-- end -->\n", "", text, flags=re.M)
    assert written != text == publish.marked(name, written)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with a page, a table that two commands measure, another that has failed, and one that has both."""
    (tmp_path / "docs" / "guides").mkdir(parents=True)
    for folder in ("recipes", "model_cards"):
        (tmp_path / folder).mkdir()
    specs = {
        "speed": Spec(
            "tokens: {length:,} | method: {method}",
            {"faster": "{ratio:.1f}x command=0", "causal": "{ratio:.2f} command=1|2"},
            ["one", "two"],
            prepare={"model": "train"},
            keep={"picture.png": "docs/picture.png"},
            without=["2,048 | sdpa"],
            order="faster",
            elsewhere=["faster"],
        ),
        "broken": Spec("method: {method}", {"ratio": "{ratio}"}, ["fail"]),
        "advice": Spec("use | expect", rows=["[it](docs/a.md#b) | {speed[2,048 | linear][faster]:.0f} times"]),
    }
    ran, files = [], []

    def record(command, data, work, *more):
        ran.append(command)
        files.append(results.FIGURES.exists())
        if command == "train":
            (work / "model").mkdir(exist_ok=True)
        elif command == "fail":
            raise OSError("fail: status 1")
        else:
            rows = [("sdpa", 1.0), ("linear", 4.0), ("performer", 2.345678)][: 3 if command == "one" else 2]
            with pathlib.Path(more[1]).open("w", newline="") as file:
                csv.writer(file).writerows([("method", "length", "ratio"), *((m, 2048, r) for m, r in rows)])
            (work / "picture.png").write_text("drawn")

    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "FIGURES", tmp_path / "docs" / "figures.json")
    monkeypatch.setattr(results, "read_specs", lambda: specs)
    monkeypatch.setattr(results, "run", record)
    (tmp_path / "README.md").write_text("# A\n\n<!-- table: advice -->\nold\n<!-- end -->\n")
    (tmp_path / "recipes" / "README.md").write_text("no tables\n")
    (tmp_path / "docs" / "guides" / "page.md").write_text(
        "# B\n\n<!-- figures: speed -->\n<!-- end -->\n\n<!-- table: advice -->\n<!-- end -->\n"
    )
    return tmp_path, ran, files


def test_tables_are_measured_one_by_one_and_a_failed_one_keeps_its_values(checkout, capsys):
    folder, ran, files = checkout
    output = results.FIGURES
    old = {"commands": ["fail"], "machine": "M", "date": "2026-01-01", "revision": "abc", "rows": {"a": {"ratio": 1}}}
    (folder / "work" / "model").mkdir(parents=True)  # of an interrupted training
    assert run("-o", output, "--only", "speed", "--data", folder, "--work", folder / "work") == 0
    entry = json.loads(output.read_text())["speed"]
    assert ran == ["train", "one", "two"] and files == [False] * 3
    assert entry["rows"] == {"2,048 | performer": {"faster": 2.346, "causal": None},
                             "2,048 | linear": {"faster": 4.0, "causal": 4.0}}  # fmt: skip
    assert entry["commands"] == ["one", "two"] and re.fullmatch(r"\d{4}-\d\d-\d\d", entry["date"])
    assert "torch" in entry["machine"] and (folder / "docs" / "picture.png").read_text() == "drawn"
    output.write_text(json.dumps({"speed": entry | {"machine": "N"}, "broken": old, "gone": old}))
    assert run("-o", output, "--data", folder, "--work", folder / "work") == 1
    stored, said = json.loads(output.read_text()), capsys.readouterr().err
    assert ran[3:] == ["one", "two", "fail"], "what prepares has succeeded"
    assert list(stored) == ["speed", "broken"] and stored["broken"] == old and stored["speed"] == entry
    assert "[2 of 2] broken" in said and "failed, with its values as before: broken: fail: status 1" in said
    assert run("-o", output, "--only", "advice") == 2 and "is not one of speed, broken" in capsys.readouterr().err


def test_figures_of_a_second_processor_stand_beside_the_first(checkout, monkeypatch, capsys):
    """They leave the first figures, the picture and the tables that do not name them as they are."""
    folder, _, _ = checkout
    given = ("--only", "speed", "-o", results.FIGURES, "--data", folder)
    assert run(*given, "--elsewhere") == 1 and "no figures beside which" in capsys.readouterr().err
    assert run(*given) == 0
    before = json.loads(results.FIGURES.read_text())["speed"]
    (folder / "docs" / "picture.png").write_text("of the first")
    monkeypatch.setattr(results, "machine", lambda lines: "AMD EPYC (AVX2), 2 cores; torch")
    assert run(*given, "--elsewhere") == 0 and (folder / "docs" / "picture.png").read_text() == "of the first"
    entry = json.loads(results.FIGURES.read_text())["speed"]
    second = entry.pop("elsewhere")
    assert entry == before and second["machine"].startswith("AMD") and second["rows"] == before["rows"]
    assert run("--write", "-o", results.FIGURES) == 0
    text = (folder / "docs" / "guides" / "page.md").read_text()
    assert "| tokens | method | faster | causal | faster, AMD EPYC (AVX2) |\n" in text
    assert "| 2,048 | linear | 4.0x | 4.00 | 4.0x |\n" in text and "Columns with AMD EPYC (AVX2): measured" in text
    monkeypatch.setattr(results, "machine", lambda lines: "Intel")
    assert run(*given) == 0 and json.loads(results.FIGURES.read_text())["speed"]["elsewhere"] == second


def test_edited_tables_and_figures_are_noticed(checkout):
    folder, _, _ = checkout
    assert run("--only", "speed", "-o", results.FIGURES, "--data", folder) == 0
    assert run("--write", "-o", results.FIGURES) == 0
    page, readme = folder / "docs" / "guides" / "page.md", folder / "README.md"
    text, figures = page.read_text(), json.loads(results.FIGURES.read_text())
    table = "| tokens | method | faster | causal |\n|---|---|---|---|\n| 2,048 | performer | 2.3x |  |\n"
    assert f"```bash\ntrain\none\ntwo\n```\n\n{table}| 2,048 | linear | 4.0x | 4.00 |\n\n*Measured on " in text
    assert "| [it](../a.md#b) | 4 times |" in text and "| [it](docs/a.md#b) | 4 times |" in readme.read_text()
    assert "old" not in readme.read_text() and results.pages(figures) == {readme: readme.read_text(), page: text}
    page.write_text(text.replace("2.3x", "2.4x"))
    assert results.pages(figures)[page] == text != page.read_text()
    figures["speed"]["rows"]["2,048 | linear"]["faster"] = 5
    changed = results.pages(figures)
    assert "| 5 times |" in changed[readme] != readme.read_text() and "5.0x" in changed[page]
    page.write_text("<!-- table: unknown -->\n<!-- end -->\n")
    refuses(r"table unknown, which results\.yaml does not have", results.pages, figures)


def test_figures_of_records():
    records = [{"a": 1, "ok": True, "n": 2, "m": ""}, {"a": 2, "ok": False, "n": 6, "m": 3}]
    assert results.figure_of(records, "{n:.1f} a=2") == 6 and results.figure_of(records, "{n} a=3") is None
    assert results.figure_of(records, "{m} a=1") is None and results.figure_of(records, "{m} a=1|2 ok=False") == 3
    assert results.figure_of(records, "{mean(ok):.0%}") == 0.5 and results.figure_of(records, "{a/n}") == 0.375
    assert results.figure_of([{"top one": 1 / 3, "how": "a b"}], "{top one:.2f} 'how=a b'") == 0.3333
    rows = {"b | x": {"e": 2}, "a | y": {"e": 3}, "b | z": {"e": None}, "a | x": {"e": 1}, "b | y": {"e": 0}}
    assert list(results.in_order(rows, "e")) == ["b | y", "b | x", "b | z", "a | x", "a | y"]
    refuses("2 records match", results.figure_of, records, "{n}")
    refuses("none of the columns", results.rows_of, Spec("a: {a}", {"x": "{n} a=9"}), records)


def test_commands_run_with_the_places_of_the_data(tmp_path, monkeypatch):
    calls = []

    def done(words, *, cwd, env, check):
        calls.append((words[1:], cwd, env["HEA_DATA"], env["PYTHONPATH"]))
        return type("Done", (), {"returncode": len(calls) - 1})

    monkeypatch.setattr(results.subprocess, "run", done)
    data = tmp_path / "with space"
    monkeypatch.setattr(results, "minilm_folder", lambda: tmp_path / "minilm")
    results.run("hf-efficient-attn benchmark MINILM --data DATA/a.txt", data, tmp_path)
    words = ["-m", "hf_efficient_attn", "benchmark", str(tmp_path / "minilm"), "--data", f"{data}/a.txt"]
    assert calls == [(words, tmp_path, str(data), str(results.ROOT))]
    with pytest.raises(OSError, match=r"^python -m recipes.imagenet --model recipes/configs/t2t: status 1"):
        results.run("python -m recipes.imagenet --model recipes/configs/t2t", data, tmp_path, "--csv", "x")
    assert calls[1][0] == ["-m", "recipes.imagenet", "--model", f"{results.ROOT}/recipes/configs/t2t", "--csv", "x"]
