"""Uploading a converted checkpoint to the Hugging Face Hub, in one commit."""

import pathlib
import re
import shlex
from collections.abc import Mapping
from typing import NamedTuple, cast

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, constants, get_token
from huggingface_hub.errors import HfHubHTTPError

from hf_efficient_attn.checkpoint import open_checkpoint
from hf_efficient_attn.checkpoint.files import regular_file, short_name
from hf_efficient_attn.checkpoint.source import FILE, INSTALL, PICKLES, THIS_VERSION, check_hub_id, check_install
from hf_efficient_attn.errors import UnsupportedAttentionError, clean
from hf_efficient_attn.hub.card import NAME, OWN_PART, Facts, card_problems, for_repository, update_card
from hf_efficient_attn.io.json import encode_json, read_json_object
from hf_efficient_attn.io.reading import read_text
from hf_efficient_attn.io.writing import replacing

# The HTTP library's own error. Which library that is depends on the version of huggingface_hub.
_HTTPError = cast(type[Exception], HfHubHTTPError.__bases__[0])
_UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".incomplete", ".lock", "~", ".swp")
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_NO_INSTALL = (
    "the card cannot say where hf_efficient_attn is published, and a package of that name elsewhere may be another "
    f"one: give --install with a URL (https://... or git+https://...) or a version ({THIS_VERSION}); a push "
    "with --yes stores it for later ones"
)


class PushError(OSError):
    """The hub refused a request or could not be reached. The message gives the reason and what had been sent."""


class PushPlan(NamedTuple):
    """What `push` would send.

    Attributes:
        files: (path in the repository, size in bytes).
        problems: What is missing in the card.
        refusals: Why `push` would refuse the folder.
        install: What the card tells its readers to give to `pip install`; None if that is not known, or if the card was
            written by hand.
        card: The text of the card as it would be sent.
        changes: {name: new contents} of files in the folder that `push` writes first, so that they say what to install.
    """

    files: tuple[tuple[str, int], ...]
    problems: tuple[str, ...]
    refusals: tuple[str, ...]
    install: str | None
    card: str
    changes: Mapping[str, bytes]


class PushReport(NamedTuple):
    """What `push` sent: the plan that was carried out, the address of the repository, and the id of the commit."""

    plan: PushPlan
    url: str
    commit: str


def plan_push(folder: "str | pathlib.Path", repo_id: str, *, install: str | None = None) -> PushPlan:
    """Check a folder as `push` does, without any request to the network.

    The arguments are those of `push`. Nothing is written.

    Raises:
        UnsupportedAttentionError: The folder does not contain a converted checkpoint with a card; it contains files
            that must not be published, which are pickles, links that lead out of it, and unfinished or hidden files; or
            `repo_id` is not of the form ORG/NAME; or `install` is neither a URL nor a version.
    """
    if install is not None:
        check_install(install)
    check_hub_id(repo_id, "the repository")
    if "/" not in repo_id:
        raise UnsupportedAttentionError(f"give the repository as ORG/NAME, with your name for ORG: not {repo_id!r}")
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise UnsupportedAttentionError(f"{folder} is not a folder; push takes a checkpoint that 'convert' wrote")
    sizes = _publishable_files(folder)  # refuses links that lead out of the folder, before any file is read
    open_checkpoint(folder)
    facts = Facts(folder)
    if NAME not in sizes:
        raise UnsupportedAttentionError(f"{folder} has no {NAME}: hf_efficient_attn.hub.write_card writes it")
    text = read_text(folder / NAME)
    problems = card_problems(text)
    if facts.benchmark is None or not facts.benchmark.get("complete", True):
        command = shlex.join(["hf-efficient-attn", "benchmark", str(folder), "--card"])
        problems.append(f"no complete measurements: '{command}' adds them for text and pictures")
    for file in (file for file in facts.own_files if file.name not in sizes):
        where = f"put it into the folder, or write into {NAME} where it is"
        problems.append(f"readers need {file.name or 'your code'}, which registers {file.method}: {where}")
    is_own, changes = OWN_PART.search(text) is not None, dict[str, bytes]()
    install = (install or facts.origin[INSTALL]) if is_own else None
    if install != facts.origin[INSTALL] and install is not None:
        stored = read_json_object(folder / FILE) if FILE in sizes else {}
        changes[FILE] = encode_json({**stored, INSTALL: install})
        facts.origin[INSTALL] = install
    if install is not None and f"pip install {shlex.quote(install)}\n" not in text:
        text = update_card(text, facts)
        changes[NAME] = text.encode()
    is_standalone = facts.kernel is not None or facts.code is not None
    refusals = (_NO_INSTALL,) if is_own and install is None and not is_standalone else ()
    card = for_repository(text, repo_id)
    sizes |= {name: len(content) for name, content in changes.items()} | {NAME: len(card.encode())}
    return PushPlan(tuple(sorted(sizes.items())), tuple(problems), refusals, install, card, changes)


def push(
    folder: "str | pathlib.Path",
    repo_id: str,
    *,
    private: bool = False,
    install: str | None = None,
    message: str | None = None,
    token: str | None = None,
) -> PushReport:
    """Send a converted checkpoint to the hub in one commit; the repository is created if it does not exist.

    The hub checks the card before anything is created. A model.safetensors of an earlier push, its shards and their
    index are deleted if the folder lacks them, because Transformers would load an old file instead of new shards. Other
    weights stay. In the card that is sent, the title and the examples name the repository. After an interruption,
    calling `push` again sends the rest.

    Args:
        folder: The folder of a checkpoint that `convert` wrote.
        repo_id: "ORG/NAME".
        private: Whether a new repository becomes private. An existing public repository is then refused.
        install: What readers of the card give to `pip install` to get this package: a URL, or a requirement with a
            version. It is stored in the folder, in efficient_attention.json and in the card. By default what is stored
            there.
        message: The title of the commit.
        token: The hub's token; by default the one that huggingface_hub finds (HF_TOKEN, `hf auth login`).

    Returns:
        What was sent.

    Raises:
        UnsupportedAttentionError: As for `plan_push`, or offline mode is on, or there is no token; or the card could
            not say what to install. No request has been made.
        PushError: The hub refused a request or could not be reached.
    """
    folder, plan = pathlib.Path(folder), plan_push(folder, repo_id, install=install)
    if plan.refusals:
        raise UnsupportedAttentionError("; ".join(plan.refusals))
    if constants.HF_HUB_OFFLINE:
        raise UnsupportedAttentionError("offline mode is on: unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE to push")
    token = token or get_token()
    if not token:
        raise UnsupportedAttentionError(
            "there is no token for the hub: 'hf auth login' stores one, or set HF_TOKEN to one with write access"
        )
    for name, content in plan.changes.items():
        with replacing(folder / name) as draft:
            draft.write_bytes(content)
    api = HfApi(token=token, library_name="hf_efficient_attn")
    sent = {name: folder / name for name, _ in plan.files} | {NAME: plan.card.encode()}
    done = "nothing had been sent"
    try:
        ModelCard(plan.card).validate()
        url = str(api.create_repo(repo_id, private=True if private else None, exist_ok=True))
        done = "the repository exists or was created, and its files are as they were"
        about = api.model_info(repo_id)
        if private and not about.private:
            raise PushError(f"{repo_id} exists and is public: make it private on the hub, or leave out --private")
        old = {file.rfilename for file in about.siblings or () if _WEIGHTS.fullmatch(file.rfilename)} - sent.keys()
        added = [CommitOperationAdd(name, content) for name, content in sent.items()]
        title = message or f"{' and '.join(Facts(folder).methods)} by hf_efficient_attn"
        commit = api.create_commit(repo_id, [*added, *map(CommitOperationDelete, sorted(old))], commit_message=title)
    # RuntimeError and ValueError come from uploads of large files and from answers that cannot be read.
    except (OSError, _HTTPError, RuntimeError, ValueError) as error:
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        raise PushError(f"{clean(str(cause), 400) or type(cause).__name__}; {done}") from error
    return PushReport(plan, url, commit.oid)


def _publishable_files(folder: pathlib.Path) -> dict[str, int]:
    """{path: size} of all files in a folder and its subfolders; refuse the folder if one must not be published."""
    sizes = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()):
        name, parts = path.name.lower(), path.relative_to(folder).parts
        is_hidden = any(part.startswith(".") and part != ".gitattributes" for part in parts)
        if is_hidden or name.endswith(_UNFINISHED) or name.endswith(PICKLES):
            raise UnsupportedAttentionError(
                f"{short_name(path, folder)} must not be published, because it is a hidden or unfinished file, or of a "
                "format that can run code: remove it"
            )
        sizes[path.relative_to(folder).as_posix()] = regular_file(path, folder).st_size
    return sizes
