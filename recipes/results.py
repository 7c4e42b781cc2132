"""Measure the figures of the documentation, and write its tables.

    python -m recipes.results -o docs/figures.json --data DATA                (everything)
    python -m recipes.results -o docs/figures.json --data DATA --only onnx    (one table again; the others stay)
    python -m recipes.results --write                                         (the tables of the pages, from the file)

results.yaml describes the tables: the commands that measure one, and which of their figures it shows. The file of
figures has for each of them the commands, the machine, the date, the revision of this repository, and the values by row
and column. It is written after each table, so that nothing is lost. A table whose commands fail keeps its values; such
tables are listed at the end, and the exit status is 1.

README.md, the pages of docs/, model_cards/ and recipes/README.md mark the place of a table:

    <!-- figures: NAME -->     the commands, the table, and the machine and date
    <!-- table: NAME -->       the table alone
    <!-- machines: all -->     which tables were measured on which machine, when, and at which revision
    <!-- end -->

`--write` replaces what is between the marks. A test compares the pages with the file.

Commands run in the folder `--work`. A command of `prepare`, such as a training, that has succeeded there is not run
again, so a kept folder continues. Duration: two to three hours on two idle cores without training (`--no-training`),
and days with it. Expected: the tables of the documentation.
"""

import csv
import datetime
import os
import pathlib
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import transformers
import typer
import yaml

from hf_efficient_attn.cli import main_of, split_list
from hf_efficient_attn.cli.demo import minilm_folder
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.timing import processor_name
from hf_efficient_attn.io.json import encode_json, parse_value, read_json_object
from hf_efficient_attn.io.writing import check_writable, replacing
from recipes.common import commands
from recipes.common.memory import ROOT

app = commands.new_app()

FIGURES = ROOT / "docs" / "figures.json"
MODEL = "a model of an NVIDIA H100"  # recipes.common.gpu_model
Records = list[dict[str, Any]]
Rows = dict[str, dict[str, Any]]  # label of a row -> header of a column -> value

_PART = re.compile(r"^(<!-- (figures|table|machines): (\S+) -->\n)(.*?)^(?=<!-- end -->$)", re.M | re.S)
_COLUMN = re.compile(r"\{(?P<field>[^}:]+)(?::(?P<form>[^}]*))?\}(?P<unit>\S*)(?P<where>.*)")
_LINK = re.compile(r"(\]\()(?!https?:|#)([^)#]+)")


class Spec(NamedTuple):
    """A table of results.yaml, which describes the keys."""

    row: str
    columns: Mapping[str, str] = {}
    commands: Sequence[str] = ()
    prepare: Mapping[str, str] = {}
    read: str | None = None
    keep: Mapping[str, str] = {}
    without: Sequence[str] = ()
    order: str | None = None
    training: bool = False
    rows: Sequence[str] = ()
    elsewhere: Sequence[str] = ()

    @property
    def headers(self) -> list[str]:
        """The headers of the columns that hold labels; in a table of other tables, all headers."""
        return self.row.split(" | ") if self.rows else [cell.partition(": ")[0] for cell in self.row.split(" | ")]

    def label(self, record: Mapping[str, Any]) -> str:
        """The label of a record's row: the cells of its first columns."""
        return " | ".join(cell.partition(": ")[2].format_map(record) for cell in self.row.split(" | "))


def read_specs() -> dict[str, Spec]:
    """The tables of results.yaml by name."""
    given = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {name: Spec(**one) for name, one in given.items() if not name.startswith(".")}


# Measuring


def figure_of(records: Records, column: str) -> Any:
    """The value of a column in the records of one row, with four digits; None if no record matches.

    The column is "{FIELD}" and conditions KEY=VALUE or KEY=VALUE|VALUE. FIELD is a key of the one record that matches;
    "mean(KEY)", over those that match; or "KEY/KEY", a ratio of their sums.
    """
    match = _COLUMN.fullmatch(column)
    assert match is not None, column
    field, wanted = match["field"], dict(word.split("=", 1) for word in shlex.split(match["where"]))
    found = [one for one in records if all(str(one.get(key)) in values.split("|") for key, values in wanted.items())]
    if not found:
        return None
    if mean := re.fullmatch(r"mean\((.+)\)", field):
        value = statistics.fmean(one[mean[1]] for one in found)
    elif "/" in field:
        above, below = (sum(one[key] for one in found) for key in field.split("/"))
        value = above / below if below else None
    elif len(found) > 1:
        raise ValueError(f"{len(found)} records match {column!r}: add conditions")
    else:
        value = found[0][field]
    return float(f"{value:.4g}") if isinstance(value, float) else None if value == "" else value


def rows_of(spec: Spec, records: Records) -> Rows:
    """The rows of a table that have a value, in the order of the records or as `order` says."""
    groups: dict[str, Records] = {}
    for record in records:
        groups.setdefault(spec.label(record), []).append(record)
    rows = {
        label: {header: figure_of(group, column) for header, column in spec.columns.items()}
        for label, group in groups.items()
        if label not in spec.without
    }
    rows = {label: row for label, row in rows.items() if any(value not in (None, "") for value in row.values())}
    if not rows:
        raise ValueError("the commands measure none of the columns")
    return rows if spec.order is None else in_order(rows, spec.order)


def in_order(rows: Rows, column: str) -> Rows:
    """Sort the rows that share their first cell by a column, those without a value last."""
    firsts = list(dict.fromkeys(label.partition(" | ")[0] for label in rows))

    def place(label: str) -> tuple[int, bool, float]:
        value = rows[label][column]
        return firsts.index(label.partition(" | ")[0]), value is None, value or 0.0

    return {label: rows[label] for label in sorted(rows, key=place)}


def read_records(path: pathlib.Path) -> Records:
    """Read the rows of a CSV file, or of the list "measurements" or "rows" in a JSON file."""
    if path.suffix == ".json":
        stored = read_json_object(path)
        return stored["measurements"] if "measurements" in stored else stored["rows"]
    with path.open(newline="", encoding="utf-8") as file:
        return [{key: parse_value(text) for key, text in row.items()} for row in csv.DictReader(file)]


def run(command: str, data: pathlib.Path, work: pathlib.Path, *more: str) -> None:
    """Run a command in the folder `work`, with DATA and MINILM replaced. Raises OSError if it fails."""
    places = {"DATA": lambda: data, "MINILM": minilm_folder, "recipes": lambda: ROOT / "recipes"}
    replaced = re.compile(r"\b(?:DATA|MINILM)\b|^recipes(?=/)")
    words = [replaced.sub(lambda found: str(places[found[0]]()), word) for word in shlex.split(command)]
    program = ["-m", "hf_efficient_attn"] if words[0] == "hf-efficient-attn" else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HEA_DATA": str(data)}
    done = subprocess.run([sys.executable, *program, *words[1:], *more], cwd=work, env=environment, check=False)
    if done.returncode:
        raise OSError(f"{command}: status {done.returncode}")


def measured(spec: Spec, data: pathlib.Path, work: pathlib.Path) -> Rows:
    """Run the commands of a table in the folder `work`; its rows. A record has the number of its command."""
    for made, command in spec.prepare.items():
        done = work / f"{made}.done"  # an interrupted command leaves something unfinished
        if not done.exists() or done.read_text(encoding="utf-8") != command:
            run(command, data, work)
            done.write_text(command, encoding="utf-8")
    records: Records = []
    for number, command in enumerate(spec.commands):
        path = work / (spec.read or f"figures-{number}.csv")
        if path.parent != work:  # of an earlier run
            shutil.rmtree(work / path.relative_to(work).parts[0], ignore_errors=True)
        run(command, data, work, *([] if spec.read else ["--csv", str(path)]))
        records += [{**record, "command": number} for record in read_records(path)]
    rows = rows_of(spec, records)
    for made, kept in spec.keep.items():
        shutil.copyfile(work / made, ROOT / kept)
    return rows


def machine(lines: Sequence[str]) -> str:
    """The processor, or the GPU of the commands, and the versions."""
    if any("benchmarks.roofline" in line for line in lines):
        return MODEL
    on_gpu = any("--device cuda" in line for line in lines)
    kind = torch.backends.cpu.get_cpu_capability() + ", AMX" * torch.cpu._is_amx_tile_supported()
    name = torch.cuda.get_device_name() if on_gpu else f"{processor_name()} ({kind}), {os.cpu_count()} cores"
    return f"{name}; torch {torch.__version__}, transformers {transformers.__version__}"


def revision() -> str | None:
    """The revision of the checkout, with "-dirty" if files differ from it; None outside of git."""
    line = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    with tempfile.TemporaryFile() as errors:
        done = subprocess.run(line, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
    return done.stdout.strip() or None


def encoded(figures: Mapping[str, Any]) -> bytes:
    """The figures as JSON with a line for each row."""
    return re.sub(rb"\{[^{}]*\}", lambda row: re.sub(rb"\n\s*", b" ", row[0]), encode_json(figures))


def measure(
    specs: Mapping[str, Spec], output: pathlib.Path, data: pathlib.Path, work: pathlib.Path, *, elsewhere: bool = False
) -> Iterator[tuple[str, Exception]]:
    """Measure tables one after the other, and write each to the file at once. Yields those that fail, and why.

    With `elsewhere`, as the figures of another processor beside those in the file.
    """
    version = revision()  # before the pictures of the first table change the checkout
    for number, (name, spec) in enumerate(specs.items(), 1):
        typer.echo(f"[{number} of {len(specs)}] {name}", err=True)
        try:
            stored = read_json_object(output) if output.exists() else {}
            if elsewhere and name not in stored:
                raise ValueError("the file has no figures beside which these could stand")
            rows = measured(spec._replace(keep={}) if elsewhere else spec, data, work)
            entry = {"commands": list(spec.commands), "machine": machine(spec.commands)}
            entry |= {"date": datetime.date.today().isoformat(), "revision": version, "rows": rows}
            stored = read_json_object(output) if output.exists() else {}
            before = stored.get(name, {})
            if elsewhere:
                entry = before | {"elsewhere": entry}
            elif "elsewhere" in before:
                entry["elsewhere"] = before["elsewhere"]
            known = {one: stored.get(one) for one in read_specs()} | {name: entry}
            with replacing(output) as draft:
                draft.write_bytes(encoded({one: found for one, found in known.items() if found}))
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            typer.echo(f"{name} failed: {error}", err=True)
            yield name, error


# Pages


def shown(value: Any, column: str = "{x}") -> str:
    """A value as its column shows it."""
    match = _COLUMN.fullmatch(column)
    assert match is not None, column
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:{match['form'] or ''}}{match['unit']}"


def table_text(spec: Spec, figures: Mapping[str, Any], name: str) -> str:
    """A table in Markdown, without columns that have no value."""
    if spec.rows:
        values = {one: entry["rows"] for one, entry in figures.items()}
        headers, lines = spec.headers, [row.format_map(values) for row in spec.rows]
    else:
        rows, columns, second = figures[name]["rows"], dict(spec.columns), figures[name].get("elsewhere")
        if second:
            again = {f"{header}, {processor(second)}": header for header in spec.elsewhere}
            columns |= {named: columns[header] for named, header in again.items()}
            values = {label: second["rows"].get(label, {}) for label in rows}
            rows = {k: row | {named: values[k].get(h) for named, h in again.items()} for k, row in rows.items()}
        used = {h: column for h, column in columns.items() if any(row.get(h) is not None for row in rows.values())}
        headers = [*spec.headers, *used]
        lines = [" | ".join([label, *(shown(row.get(h), c) for h, c in used.items())]) for label, row in rows.items()]
    return "\n".join([f"| {' | '.join(headers)} |", "|---" * len(headers) + "|", *(f"| {line} |" for line in lines)])


def processor(entry: Mapping[str, Any]) -> str:
    """The processor of a machine, such as "AMD EPYC (AVX2)"."""
    return entry["machine"].partition("), ")[0] + ")"


def origin(entry: Mapping[str, Any]) -> str:
    """Where and when a table was measured."""
    known = [entry["machine"], entry["date"], entry["revision"] and f"revision {entry['revision']}"]
    return f"{'Predicted by' if entry['machine'] == MODEL else 'Measured on'} {'; '.join(filter(None, known))}"


def machines_text(figures: Mapping[str, Any], folder: pathlib.Path, homes: Mapping[str, pathlib.Path]) -> str:
    """The tables by their origin, with links to the pages of a folder that have them."""
    found: dict[str, list[str]] = {}
    for name, entry in figures.items():
        home = homes.get(name)
        is_inside = home is not None and home.is_relative_to(folder)
        shown_as = f"[{name}]({home.relative_to(folder).as_posix()})" if home is not None and is_inside else name
        for one in filter(None, (entry, entry.get("elsewhere"))):
            found.setdefault(origin(one), []).append(shown_as)
    lines = [f"| {where} | {', '.join(names)} |" for where, names in found.items()]
    return "\n".join(["| origin | tables |", "|---|---|", *lines])


def wrapped(command: str, width: int = 118) -> str:
    """A command on several lines, each with at most `width` characters where its words allow that."""
    lines = textwrap.wrap(
        command, width - len(" \\"), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return " \\\n".join(lines)


def filled(
    page: str,
    folder: pathlib.Path,
    specs: Mapping[str, Spec],
    figures: Mapping[str, Any],
    homes: Mapping[str, pathlib.Path],
) -> str:
    """The text of a page in a folder of the repository, with its tables from the figures."""

    def link(match: re.Match[str]) -> str:
        return match[1] + pathlib.Path(os.path.relpath(ROOT / match[2], folder)).as_posix()

    def fill(match: re.Match[str]) -> str:
        start, kind, name, _ = match.groups()
        if kind == "machines":
            return "\n".join([start, machines_text(figures, folder, homes), "", ""])
        if name not in specs:
            raise UnsupportedAttentionError(f"a page shows the table {name}, which results.yaml does not have")
        spec, parts = specs[name], []
        text = _LINK.sub(link, table_text(spec, figures, name))
        if kind == "figures":
            lines = [*spec.prepare.values(), *figures[name]["commands"]]
            parts = ["```bash\n" + "\n".join(map(wrapped, lines)) + "\n```"]
            second = figures[name].get("elsewhere") if spec.elsewhere else None
            also = second and f" Columns with {processor(second)}: {origin(second)[0].lower()}{origin(second)[1:]}."
            text += f"\n\n*{origin(figures[name])}.{also or ''}*"
        return "\n".join([start, "\n\n".join([*parts, text]), "", ""])

    return _PART.sub(fill, page)


def pages(figures: Mapping[str, Any]) -> dict[pathlib.Path, str]:
    """The text of every page that has tables of the figures."""
    paths = [ROOT / "README.md", ROOT / "recipes" / "README.md"]
    paths += [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "model_cards").glob("*.md"))]
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    specs = read_specs()
    included = {ROOT / "recipes" / "README.md": ROOT / "docs" / "recipes.md"}
    homes = {
        name: included.get(path, path)
        for wanted in ("table", "figures")
        for path, text in texts.items()
        for _, kind, name, _ in _PART.findall(text)
        if kind == wanted
    }
    return {
        path: filled(text, path.parent, specs, figures, homes) for path, text in texts.items() if _PART.search(text)
    }


@app.command(epilog="Example: python -m recipes.results -o docs/figures.json --only onnx")
def results(
    output: commands.option(
        pathlib.Path,
        "The file of figures.",
        "--output",
        "-o",
        metavar="FILE",
        callback=commands.checked(check_writable),
    ) = FIGURES,
    only: commands.option(list[str], "Tables of results.yaml; repeated or separated by commas. [default: all]") = [],  # noqa: B006 (typer copies it)
    training: commands.option(
        bool, "Also the tables whose models are trained first.", "--training/--no-training"
    ) = True,
    data: commands.Data = None,
    work: commands.option(
        pathlib.Path | None, "Folder of the commands. [default: a temporary one]", metavar="FOLDER"
    ) = None,
    write: commands.option(bool, "Measure nothing, and write the tables of the pages.", "--write") = False,
    elsewhere: commands.option(
        bool, "Keep the figures of the file, and add these as columns of another processor.", "--elsewhere"
    ) = False,
) -> None:
    """Measure the figures of the documentation, or write its tables."""
    if write:
        for path, text in pages(read_json_object(output)).items():
            if text != path.read_text(encoding="utf-8"):
                path.write_text(text, encoding="utf-8")
                typer.echo(f"Written: {path}")
        return
    known = {name: spec for name, spec in read_specs().items() if spec.commands and (training or not spec.training)}
    commands.check_known("--only", split_list(only), known)
    chosen = {name: spec for name, spec in known.items() if not only or name in split_list(only)}
    folder = commands.data_folder(data).resolve()
    with tempfile.TemporaryDirectory() as temporary:
        place = (work or pathlib.Path(temporary)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        failed = dict(measure(chosen, output.resolve(), folder, place, elsewhere=elsewhere))
    typer.echo(
        f"{len(chosen) - len(failed)} of {len(chosen)} tables are measured; --write shows them in the pages", err=True
    )
    for name, error in failed.items():
        typer.echo(f"failed, with its values as before: {name}: {error}", err=True)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    main_of(app, "python -m recipes.results")
