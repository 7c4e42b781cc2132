"""Sphinx extension, and a script: the text of pages that follows from the code, so that it cannot go out of date.

- `reference/methods/`: one page for each registered method, and a table of all of them.
- `reference/commands.md`: every command with its options, from the application of the command line.
- Between `<!-- refusals MODULES -->` and `<!-- end -->`: the messages of `UnsupportedAttentionError` in these modules,
  separated by blanks or lines; `ops/*` stands for all below `ops`. No module that refuses something may be left out.
- Between `<!-- code FILE -->` and `<!-- end -->`: a file of code.

The text is committed, because many read the pages as they are in the repository. A build writes it again, and so does

    python docs/_ext/reference.py

`tests/test_docs.py` fails where it was forgotten. Nothing of Sphinx is imported before the build.
"""

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from sphinx.application import Sphinx

PACKAGE = Path(__file__).resolve().parents[2] / "hf_efficient_attn"
# Functions that raise UnsupportedAttentionError with the message that they are given.
_RAISING = ("UnsupportedAttentionError", "refuse")


def _yes(value: object) -> str:
    return "yes" if value else "no"


def _cell(text: object) -> str:
    """Text for a cell of a Markdown table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def _table(headers: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    names = list(headers)
    lines = [names, ["---"] * len(names), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def method_page(name: str) -> str:
    """The page of one method in MyST Markdown."""
    import hf_efficient_attn as hea

    info = hea.method_info(name)
    config = info.config_class
    # A method that switches to another one does so at a length that depends on the machine.
    exact = 0 if config.switches_to else config().exact_length
    paper = f"[{info.paper}]({info.paper_url})" if info.paper_url else info.paper
    facts = {
        "paper": paper,
        "near field": info.near,
        "far field": info.far,
        "causal form, for decoders": _yes(info.causal),
        "number of keys may differ from the number of queries": _yes(info.rectangular),
        "decoding of new tokens": info.decoding or "",
        "exact attention up to": f"{exact} keys, with the default hyperparameters" if exact else "",
        "learned parameters": ", ".join(f"`{each}`" for each in info.learned_parameters) or "none",
        "exports to ONNX": _yes(config.exportable),
        "compared by the commands unless you name methods": _yes(config.default_rank is not None),
    }
    options = [
        (
            f"`{spec.name}`",
            f"`{spec.default!r}`",
            _allowed(spec.metadata, isinstance(spec.default, float)),
            spec.metadata.get("help", ""),
        )
        for spec in dataclasses.fields(config)
    ]
    source = inspect.getdoc(inspect.getmodule(config)) or ""
    return "\n".join(
        [
            f"# {info.title}: `{name}`",
            "",
            f"{_sentence(info.summary)} This page states what the method computes, what it can be used for, and its "
            "hyperparameters. [Choosing a method](../../choosing.md) compares the methods.",
            "",
            "```python",
            f'model = AutoModel.from_pretrained("...", attn_implementation="{name}")',
            "```",
            "",
            _table(("", ""), ((f"**{fact}**", text) for fact, text in facts.items() if text)),
            "",
            "## Hyperparameters",
            "",
            f"`hea.{config.__name__}`. {' '.join((inspect.getdoc(config) or '').split())}",
            "",
            _table(("name", "default", "allowed", "meaning"), options),
            "",
            "## Function",
            "",
            f"`hea.functional.{name}_attention(query, key, value, **hyperparameters)`",
            "",
            "```{eval-rst}",
            f".. autofunction:: hf_efficient_attn.functional.{name}_attention",
            "```",
            "",
            "## From the paper to the code",
            "",
            f"From `{Path(inspect.getfile(config)).relative_to(PACKAGE.parent)}`:",
            "",
            source,
            "",
        ]
    )


def _allowed(metadata: Any, is_number: bool) -> str:
    """The values that a hyperparameter allows, in words."""
    if metadata.get("choices"):
        return ", ".join(f"`{choice!r}`" for choice in metadata["choices"])
    minimum = metadata.get("minimum")
    return "" if minimum is None else f"{'number' if is_number else 'integer'}, at least {minimum}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def methods_index() -> str:
    """The table of all methods, with links to their pages."""
    import hf_efficient_attn as hea

    infos = [hea.method_info(name) for name in hea.available_methods()]
    rows = [
        (f"[`{i.name}`]({i.name}.md)", i.near, i.far, _yes(i.causal), _yes(i.rectangular), _yes(i.learned_parameters))
        for i in infos
    ]
    return "\n".join(
        [
            "# Methods",
            "",
            "Every method of this package, with a page for each. A name in the first column is an "
            "`attn_implementation` in Transformers and an argument of `hea.convert`. The *near field* is computed "
            "exactly, and the *far field* stands for all other pairs; see [Concepts](../../concepts.md). A decoder "
            "needs a method with a causal form. In *rectangular* attention the number of keys differs from that of "
            "the queries, as in BigGAN.",
            "",
            _table(("name", "near field", "far field", "causal", "rectangular", "learns parameters"), rows),
            "",
            "```{toctree}",
            ":hidden:",
            "",
            *(info.name for info in infos),
            "```",
            "",
        ]
    )


def commands_page() -> str:
    """The reference of the command line, from its application."""
    import typer

    from hf_efficient_attn.cli import app

    group: Any = typer.main.get_command(app)
    context = type(group).context_class(group, info_name="hf-efficient-attn")
    commands = {name: group.get_command(context, name) for name in group.list_commands(context)}
    parts = [
        "# Command line",
        "",
        "`hf-efficient-attn` converts, measures and publishes checkpoints without a line of Python. This page lists "
        "its commands and their options. `python -m hf_efficient_attn` is the same command. The exit status is 0 if "
        "all went well, 1 after an error while working, such as a file that could not be written, 2 if a request was "
        "refused, and 130 after Ctrl-C. Errors are one line on stderr.",
        "",
        _table(
            ("command", "purpose"),
            ((f"[`{name}`](#{name})", _first_sentence(command.help)) for name, command in commands.items()),
        ),
        "",
    ]
    for name, command in commands.items():
        inner = type(context)(command, info_name=name, parent=context)
        records = [(p.param_type_name, p.get_help_record(inner)) for p in command.get_params(inner)]
        rows = [(f"`{record[0]}`", record[1]) for _, record in records if record and record[0] != "--help"]
        usage = " ".join([context.command_path, name, *command.collect_usage_pieces(inner)])
        parts += [f"## {name}", "", command.help or "", "", "```text", usage, "```", ""]
        parts += [_table(("option", "meaning"), rows), ""]
        if command.epilog:
            parts += ["Example:", "", "```bash", command.epilog.removeprefix("Example: "), "```", ""]
    return "\n".join(parts)


def _first_sentence(text: str | None) -> str:
    return " ".join((text or "").split()).split(". ")[0].rstrip(".") + "."


class Refusal(NamedTuple):
    """A place in the code that refuses something. Names in angle brackets stand for values in the message."""

    module: str
    line: int
    message: str


def refusals() -> list[Refusal]:
    """Everything that the package refuses, in the order of the modules; modules are paths such as `cli/convert`."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        module = path.relative_to(PACKAGE).with_suffix("").as_posix()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _called(node) in _RAISING and node.args:
                message = " ".join(_text(node.args[0], tree).split())
                # Some places pass a message on. It is listed where it is written.
                if any(letter.isalpha() for letter in "".join(_literal(message))):
                    found.append(Refusal(module, node.lineno, message))
    return sorted(found)


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _literal(message: str) -> Iterator[str]:
    """The parts of a message outside angle brackets."""
    for part in message.split("<"):
        yield part.rpartition(">")[2]


def _text(node: ast.expr, tree: ast.Module) -> str:
    """The message that an expression makes, with <name> in place of what is known at run time only."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value, tree) for value in values)
        case ast.FormattedValue(value=ast.Call() as call) if _called(call) in ("unknown_name", "unknown_method"):
            return _text(call, tree)
        case ast.FormattedValue(value=value):
            return _placeholder(value)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, tree) + _text(right, tree)
        case ast.IfExp(orelse=ast.Constant(value="")):  # an optional part
            return "<…>"
        case ast.IfExp(body=body, orelse=other):
            return _either([_text(body, tree), _text(other, tree)])
        case ast.Call(args=[kind, *_]) if _called(node) == "unknown_name":
            return f"unknown {_text(kind, tree)} <name>. Did you mean <name>? Known: <names>."
        case ast.Call() if _called(node) == "unknown_method":
            from hf_efficient_attn.errors import OWN_FILE

            return f"unknown attention method <name>. Did you mean <name>? Known: <names>. {OWN_FILE}"
        case ast.Name(id=name):  # a variable or constant of the same module that holds the message
            values = [
                _text(other.value, tree)
                for other in ast.walk(tree)
                if isinstance(other, ast.Assign) and [ast.unparse(target) for target in other.targets] == [name]
            ]
            return _either(values) if values else _placeholder(node)
        case ast.Call():  # a function of the same module that returns the message
            for other in ast.walk(tree):
                if isinstance(other, ast.FunctionDef) and other.name == _called(node):
                    returned = [inner.value for inner in ast.walk(other) if isinstance(inner, ast.Return)]
                    return _either([_text(value, tree) for value in returned if value is not None])
    return _placeholder(node)


def _either(texts: list[str]) -> str:
    """Alternatives, without those that consist of placeholders only."""
    said = [text for text in texts if any(letter.isalpha() for letter in "".join(_literal(text)))]
    return " / ".join(said) or "<…>"


def _placeholder(node: ast.expr) -> str:
    match node:
        case ast.Name(id="EXACT"):
            return "'sdpa'"
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return f"<{name.strip('_').lower()}>"
        case ast.Call(args=[inner, *_]):
            return _placeholder(inner)
        case ast.Subscript(value=inner):
            return _placeholder(inner)
    return "<…>"


def escape_docstring(lines: list[str]) -> list[str]:
    """Make a docstring of this package reStructuredText: in it, stars and bars stand for themselves outside of code."""
    escaped, literal = [], None
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if literal is not None and line.strip() and indent <= literal:
            literal = None
        if literal is None:
            parts = line.split("`")
            line = "`".join(
                re.sub(r"(?<!\\)([*|])", r"\\\1", part) if i % 2 == 0 else part for i, part in enumerate(parts)
            )
            if line.endswith("::"):
                literal = indent
        escaped.append(line)
    return escaped


def covered(pattern: str, found: list[Refusal]) -> list[Refusal]:
    """The refusals of the modules that a pattern names."""
    some = [refusal for refusal in found if Path(refusal.module).match(pattern)]
    if not some and not list(PACKAGE.glob(f"{pattern}.py")):
        raise ValueError(f"there is no module {pattern}")
    return some


def _escaped(message: str) -> str:
    """A message as Markdown, in which <name> would be an invisible tag."""
    parts = message.split("`")
    for i in range(0, len(parts), 2):  # outside of code
        parts[i] = re.sub(r"[\\<*\[\]]|(?<!\w)_|_(?!\w)", r"\\\g<0>", parts[i])
    return "`".join(parts)


_PART = re.compile(r"^(<!-- (refusals|code)\s+([^>]*?)\s*-->\n)(.*?)^(?=<!-- end -->$)", re.M | re.S)


def filled(path: Path, found: list[Refusal], seen: set[str]) -> str:
    """The text of a page with what follows from the code. Adds the modules whose refusals it has to `seen`."""

    def fill(match: re.Match[str]) -> str:
        start, kind, given, _ = match.groups()
        if kind == "code":
            code = (path.parent / given).read_text(encoding="utf-8")
            return f"{start}```py\n{code.rstrip()}\n```\n"  # not "python", whose blocks are examples to run
        some = [refusal for pattern in given.split() for refusal in covered(pattern, found)]
        seen.update(refusal.module for refusal in some)
        messages = dict.fromkeys(refusal.message for refusal in some)
        return "\n".join([start, *(f"- {_escaped(message)}" for message in messages), "", ""])

    return _PART.sub(fill, path.read_text(encoding="utf-8"))


def pages(folder: Path) -> dict[Path, str]:
    """The text of every page below the folder `docs` that follows from the code, as a whole or in parts."""
    import hf_efficient_attn as hea

    methods = folder / "reference" / "methods"
    made = {methods / f"{name}.md": method_page(name) for name in hea.available_methods()}
    made |= {methods / "index.md": methods_index(), folder / "reference" / "commands.md": commands_page()}
    found, seen = refusals(), set[str]()
    for path in [*sorted(folder.glob("*.md")), *sorted((folder / "guides").glob("*.md"))]:
        if _PART.search(path.read_text(encoding="utf-8")):
            made[path] = filled(path, found, seen)
    missing = {refusal.module for refusal in found} - seen
    if missing and seen:
        raise ValueError(f"refusals of these modules are on no page: {', '.join(sorted(missing))}")
    return made


def write_pages(folder: Path) -> None:
    """Write the pages below the folder `docs`, and remove pages of methods that are gone."""
    made = pages(folder)
    for path, text in made.items():
        # Sphinx reads a page again only after a change.
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for path in (folder / "reference" / "methods").glob("*.md"):
        if path not in made:
            path.unlink()


def setup(app: "Sphinx") -> dict[str, bool]:
    """Register the extension."""

    def write(app: "Sphinx") -> None:
        write_pages(Path(app.srcdir))

    def escape(app: "Sphinx", what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
        if name.startswith("hf_efficient_attn"):
            lines[:] = escape_docstring(lines)

    app.connect("autodoc-process-docstring", escape, priority=400)
    app.connect("builder-inited", write)
    return {"parallel_read_safe": False, "parallel_write_safe": True}


if __name__ == "__main__":
    write_pages(Path(__file__).resolve().parents[1])
