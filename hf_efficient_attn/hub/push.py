"""Uploading a converted checkpoint to the Hugging Face Hub: the files first, and the model card last."""

import contextlib
import dataclasses
import json
import pathlib
import shlex
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import cast

from huggingface_hub import HfApi, ModelCard, constants, get_token
from huggingface_hub.errors import HfHubHTTPError

from hf_efficient_attn.checkpoint import open_checkpoint
from hf_efficient_attn.checkpoint.files import refusing
from hf_efficient_attn.checkpoint.limits import find_limits
from hf_efficient_attn.checkpoint.provenance import FILE, INSTALL, check_hub_id
from hf_efficient_attn.checkpoint.weights import PICKLES
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.hub.card import NAME, OWN_PART, card_problems, for_repository, update_card
from hf_efficient_attn.hub.context import find_own_files, import_options
from hf_efficient_attn.hub.facts import Facts, check_install, clean, read_facts
from hf_efficient_attn.io.json import encode_json, read_json_object
from hf_efficient_attn.io.writing import replacing

# The HTTP library's own error. Which library that is depends on the version of huggingface_hub.
_HTTPError = cast(type[Exception], HfHubHTTPError.__bases__[0])
_UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".incomplete", ".lock", "~", ".swp")
_BACKUPS = f"{NAME}.bak"  # with a number, cards that `write_card` renamed
_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
_NO_INSTALL = (
    "the card cannot say where hf_efficient_attn is published, and a package of that name elsewhere may be another "
    "one: give --install with a URL (https://... or git+https://...) or a version (hf_efficient_attn==0.2.0); a push "
    "with --yes stores it for later ones"
)
_HINTS = {
    401: "the hub does not accept the token ('hf auth login' stores a new one)",
    403: "the token may not write there",
    404: "there is no such repository or page on the hub, or the token may not see it",
    429: "the hub asks for fewer requests",
}


class PushError(OSError):
    """The hub refused a request or could not be reached. The message gives the reason and what had been sent."""


@dataclass(frozen=True)
class PushPlan:
    """What `push` would send.

    Attributes:
        folder: The folder of the checkpoint.
        repo_id: The repository.
        private: Whether a new repository becomes private.
        files: (path in the repository, size in bytes), the card last.
        stays: Paths of files that are not sent.
        problems: What is missing in the card.
        refusals: Why `push` would refuse the folder.
        install: What the card tells its readers to give to `pip install`; None if that is not known, or if the card was
            written by hand.
        card: The text of the card as it would be sent.
        changes: {name: new contents} of files in the folder that `push` writes first, so that they say what to install.
    """

    folder: pathlib.Path
    repo_id: str
    private: bool
    files: tuple[tuple[str, int], ...]
    stays: tuple[str, ...]
    problems: tuple[str, ...]
    refusals: tuple[str, ...]
    install: str | None
    card: str
    changes: Mapping[str, bytes]


@dataclass(frozen=True)
class PushReport:
    """What `push` sent.

    Attributes:
        plan: The plan that was carried out.
        url: The address of the repository.
        commits: The ids of two commits: that of the files, and that of the card.
        warnings: What the hub reported about the card.
    """

    plan: PushPlan
    url: str
    commits: tuple[str, str]
    warnings: tuple[str, ...]


def plan_push(
    folder: "str | pathlib.Path", repo_id: str, *, private: bool = False, install: str | None = None
) -> PushPlan:
    """Check a folder as `push` does, without any request to the network.

    Args:
        folder: The folder of a converted checkpoint.
        repo_id: "ORG/NAME".
        private: Whether a new repository becomes private.
        install: As for `push`.

    Returns:
        What `push` would send. Nothing is written.

    Raises:
        UnsupportedAttentionError: The folder does not contain a converted checkpoint with a card; it contains files
            that must not be published, which are pickles, links that lead out of it, and unfinished or hidden files; or
            `repo_id` is not of the form ORG/NAME; or `install` is neither a URL nor a version.
    """
    install = None if install is None else check_install(install)
    check_hub_id(repo_id, "the repository")
    if "/" not in repo_id:
        raise UnsupportedAttentionError(
            f"the repository must be given as ORG/NAME, with your name for ORG: not {repo_id!r}"
        )
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise UnsupportedAttentionError(f"{folder} is not a folder; push takes a checkpoint that 'convert' wrote")
    found = _publishable_files(folder)  # refuses links that lead out of the folder, before any file is read
    open_checkpoint(folder)
    facts = read_facts(folder)
    if NAME not in found:
        raise UnsupportedAttentionError(
            f"{folder} has no {NAME}: hf_efficient_attn.hub.write_card({str(folder)!r}) writes the card"
        )
    text = (folder / NAME).read_text(encoding="utf-8", errors="replace")
    with refusing(str(folder / NAME)):
        problems = [*card_problems(text), *_problems(facts, found)]
    stays = tuple(name for name in found if name.startswith(_BACKUPS))
    is_own, changes = OWN_PART.search(text) is not None, dict[str, bytes]()
    install = (install or facts.origin[INSTALL]) if is_own else None
    if install is not None:
        stored = read_json_object(folder / FILE) if FILE in found else {}
        if stored.get(INSTALL) != install:
            changes[FILE] = encode_json({**stored, INSTALL: install})
        if f"pip install {shlex.quote(install)}\n" not in text:
            text = update_card(text, dataclasses.replace(facts, origin={**facts.origin, INSTALL: install}))
            changes[NAME] = text.encode()
    refusals = [_NO_INSTALL] if is_own and install is None else []
    max_length = facts.origin["max_length"] or 0
    refusals += [
        f"{limit.file} truncates texts at {limit.tokens} tokens ({limit.key}), and the card claims {max_length}: "
        f"convert again with --max-length {max_length}, or change the number in the file"
        for limit in find_limits(folder)
        if limit.tokens < max_length
    ]
    card = for_repository(text, repo_id)
    sizes = {name: (folder / name).stat().st_size for name in found if name not in stays}
    sizes |= {name: len(content) for name, content in changes.items()}
    del sizes[NAME]
    return PushPlan(
        folder=folder,
        repo_id=repo_id,
        private=private,
        files=(*sorted(sizes.items()), (NAME, len(card.encode()))),
        stays=stays,
        problems=tuple(problems),
        refusals=tuple(refusals),
        install=install,
        card=card,
        changes=changes,
    )


def _problems(facts: Facts, found: Collection[str]) -> list[str]:
    """What the card does not say about speed and error, and the files of methods that are not in the folder."""
    own_files, benchmark = find_own_files(facts), facts.benchmark
    words = ["hf-efficient-attn", "benchmark", str(facts.folder), "--card", *import_options(own_files)]
    command, problems = f"'{shlex.join(words)}'", []
    if benchmark is None:
        problems.append(f"no measurements: {command} adds them")
    elif not benchmark["complete"]:
        problems.append(f"the measurements are not complete: {command} measures the rest")
    elif not any(row["own"] for row in benchmark["measurements"]):
        problems.append(f"no measurement of this checkpoint's own methods and layers: {command} adds them")
    return problems + [
        f"readers need {file.name or 'your code'}, which registers {file.method}: put it into the folder, or write "
        f"into {NAME} where it is"
        for file in own_files
        if file.name not in found
    ]


def push(
    folder: "str | pathlib.Path",
    repo_id: str,
    *,
    private: bool = False,
    install: str | None = None,
    message: str | None = None,
    token: str | None = None,
) -> PushReport:
    """Send a converted checkpoint to the hub: first the repository is created, then the files are sent, then the card.

    The hub checks the card before anything is created, and the card is sent after all files. Weights of an
    earlier push that are not in the folder are deleted from the repository, because Transformers would load an old
    model.safetensors instead of new shards. In the card that is sent, the title and the examples name the repository.
    After an interruption, calling `push` again sends the rest.

    Args:
        folder: The folder of a checkpoint that `convert` wrote.
        repo_id: "ORG/NAME". The repository is created if it does not exist.
        private: Whether a new repository becomes private. An existing public repository is then refused.
        install: What readers of the card give to `pip install` to get this package: a URL, or a requirement with a
            version. It is stored in the folder, in efficient_attention.json and in the card. By default what is stored
            there, or else the public place that the metadata of the installed package name.
        message: The title of the commits.
        token: The hub's token; by default the one that huggingface_hub finds (HF_TOKEN, `hf auth login`).

    Returns:
        What was sent.

    Raises:
        UnsupportedAttentionError: As for `plan_push`, or offline mode is on, or there is no token; the card could not
            say what to install; or files of the tokenizer or of sentence-transformers truncate texts below the length
            that the card claims. No request has been made.
        PushError: The hub refused a request or could not be reached.
    """
    plan = plan_push(folder, repo_id, private=private, install=install)
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
        with replacing(plan.folder / name) as draft:
            draft.write_bytes(content)
    api = HfApi(token=token, library_name="hf_efficient_attn")
    title = message or f"{' and '.join(read_facts(plan.folder).methods)} by hf_efficient_attn"
    done = "nothing had been sent"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            ModelCard(plan.card).validate()
            url = str(api.create_repo(repo_id, private=True if private else None, exist_ok=True))
            done = "the repository exists or was created"
            if private and not api.model_info(repo_id).private:
                raise PushError(f"{repo_id} exists and is public: make it private on the hub, or leave out --private")
            files = api.upload_folder(
                repo_id=repo_id,
                folder_path=plan.folder,
                ignore_patterns=[NAME, f"{_BACKUPS}*"],
                delete_patterns=_WEIGHTS,
                commit_message=title,
            )
            done += f"; all {len(plan.files) - 1} files but the card are there"
            last = api.upload_file(
                path_or_fileobj=plan.card.encode(),
                path_in_repo=NAME,
                repo_id=repo_id,
                commit_message=f"Card: {title}",
            )
        # RuntimeError and ValueError come from uploads of large files and from answers that cannot be read.
        except (OSError, _HTTPError, RuntimeError, ValueError) as error:
            raise PushError(f"{_reason(error)}; {done}") from error
    # Warnings of other libraries do not concern the user.
    about_card = dict.fromkeys(str(item.message) for item in caught if NAME in str(item.message))
    return PushReport(plan, url, (files.oid, last.oid), tuple(clean(text, 500) for text in about_card))


def _reason(error: BaseException) -> str:
    """Describe an error of huggingface_hub in one sentence, with the status code if the hub answered."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:  # uploads of large files wrap their errors
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", None)
    text = clean(str(error), 400)
    if isinstance(error, PushError):
        return text
    if status is not None:
        return f"{status}: {_HINTS.get(status, 'the hub failed' if status >= 500 else 'the hub refused')}: {text}"
    if type(error) is ValueError:  # from `ModelCard.validate`
        with contextlib.suppress(ValueError, KeyError, TypeError):
            text = clean("; ".join(entry["message"] for entry in json.loads(str(error))["errors"]), 400)
        return f"the hub does not accept the card's front matter: {text}"
    return f"the hub could not be reached or its answer could not be read: {text or type(error).__name__}"


def _publishable_files(folder: pathlib.Path) -> list[str]:
    """The paths of all files in a folder and its subfolders, sorted; refuse the folder if one must not be published."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    reasons = {name: _why_refused(path, folder.resolve()) for name, path in paths.items()}
    refused = [f"{clean(name)} ({reason})" for name, reason in reasons.items() if reason]
    if refused:
        more = f" and {len(refused) - 5} more" if len(refused) > 5 else ""
        raise UnsupportedAttentionError(
            f"{folder} holds files that must not be published: {', '.join(refused[:5])}{more}; remove them"
        )
    return sorted(name for name, path in paths.items() if path.is_file())


def _why_refused(path: pathlib.Path, inside: pathlib.Path) -> str | None:
    """Why a file or folder must not be published, or None if it may."""
    name = path.name.lower()
    if path.is_symlink():
        if not path.exists():
            return "a link that leads nowhere"
        if not path.resolve().is_relative_to(inside):
            return "a link that leads outside"
        if path.is_dir():
            return "a link to a folder"
    if name.endswith(_UNFINISHED) or (name.startswith(".") and name != ".gitattributes"):
        return "a hidden or unfinished file"
    if path.is_dir():
        return None
    if not path.is_file():
        return "not a regular file"
    if name.endswith(PICKLES):
        return "a pickle or another format that can run code; only safetensors are published"
    return None
