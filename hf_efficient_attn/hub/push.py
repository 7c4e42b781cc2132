"""The way of a converted checkpoint to the Hugging Face Hub: what would go up, and sending it, the card last."""

import json
import os
import pathlib
import warnings
import zipfile
from dataclasses import dataclass

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.hub.card import NAME, card_problems, for_repository, read_front_matter
from hf_efficient_attn.hub.facts import check_repo_id, clean, read_facts

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".dill", ".msgpack", ".h5")
UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".incomplete", ".lock", "~", ".swp")
# Hidden files that belong in a repository.
HIDDEN = (".gitattributes",)
# Cards that `write_card` put aside stay here; of weights, an earlier push may have left others there.
STAYS = [f"{NAME}.bak*"]
WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]


class PushError(OSError):
    """The hub refused or could not be reached; the message says why and what had gone up."""


@dataclass(frozen=True)
class PushPlan:
    """What would go up.

    files: (path in the repository, bytes), the card last.
    stays: paths that are not sent.
    problems: what the card's front matter lacks.
    """

    folder: pathlib.Path
    repo_id: str
    private: bool
    files: tuple[tuple[str, int], ...]
    stays: tuple[str, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class PushReport:
    """What went up: the repository's address, the two commits (files, card), and what the hub said of the card."""

    plan: PushPlan
    url: str
    commits: tuple[str, str]
    warnings: tuple[str, ...]


def plan_push(folder: "str | pathlib.Path", repo_id: str, *, private: bool = False) -> PushPlan:
    """Look at a folder as `push` does, without any request to the network.

    Raises:
        UnsupportedAttentionError: the folder is no converted checkpoint, or holds something that must not go up:
            pickles, links that lead outside, unfinished or hidden files; there is no card; `repo_id` is no ORG/NAME.
    """
    from hf_efficient_attn.checkpoint import open_checkpoint

    check_repo_id(repo_id, "the repository")
    if "/" not in repo_id:
        raise UnsupportedAttentionError(
            f"the repository must be given as ORG/NAME, with your name for ORG: not {repo_id!r}"
        )
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise UnsupportedAttentionError(f"{folder} is no folder; push takes a checkpoint that 'convert' wrote")
    # Before anything is read, since a link may lead anywhere.
    found = _listed(folder)
    open_checkpoint(folder)
    read_facts(folder)
    if NAME not in found:
        raise UnsupportedAttentionError(
            f"{folder} has no {NAME}: hf_efficient_attn.hub.write_card({str(folder)!r}) writes the card"
        )
    text = (folder / NAME).read_text(encoding="utf-8", errors="replace")
    try:
        read_front_matter(text)
    except ValueError as error:
        raise UnsupportedAttentionError(f"{folder / NAME}: {error}") from error
    stays = tuple(name for name in found if name.startswith(f"{NAME}.bak"))
    names = [name for name in found if name not in stays and name != NAME]
    sizes = {name: (folder / name).stat().st_size for name in names}
    card = len(for_repository(text, repo_id).encode())
    return PushPlan(folder, repo_id, private, (*sizes.items(), (NAME, card)), stays, tuple(card_problems(text)))


def push(
    folder: "str | pathlib.Path",
    repo_id: str,
    *,
    private: bool = False,
    message: str | None = None,
    token: str | None = None,
) -> PushReport:
    """Send a converted checkpoint to the hub: the repository, all files but the card, and the card, in this order.

    The hub checks the card before anything is made, and a card never describes what is not there. Weights that an
    earlier push left in the repository and that are not in the folder are removed, since Transformers would prefer
    model.safetensors to the shards beside it. The examples of the card that goes up name the repository; the one in the
    folder stays as it is. Running it again continues where an interrupted one ended.

    Args:
        folder: of a checkpoint that `convert` wrote.
        repo_id: "ORG/NAME"; made if it does not exist.
        private: of the repository, where it is new. An existing one that is public is refused.
        message: title of the commits.
        token: of the hub; by default what huggingface_hub finds (HF_TOKEN, `hf auth login`).

    Raises:
        UnsupportedAttentionError: before any request, as `plan_push`, and for HF_HUB_OFFLINE and a missing token.
        PushError: the hub said no or could not be reached.
    """
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError

    plan = plan_push(folder, repo_id, private=private)
    if constants.HF_HUB_OFFLINE:
        names = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name)]
        raise UnsupportedAttentionError(f"offline mode is on: unset {' and '.join(names) or 'HF_HUB_OFFLINE'} to push")
    token = token or get_token()
    if not token:
        raise UnsupportedAttentionError(
            "there is no token of the hub: 'hf auth login' stores one, or set HF_TOKEN to one with write access"
        )
    api = HfApi(token=token, library_name="hf_efficient_attn")
    card = for_repository((plan.folder / NAME).read_text(encoding="utf-8", errors="replace"), repo_id)
    title = message or f"{' and '.join(read_facts(plan.folder).methods)} by hf_efficient_attn"
    gone: list[str] = []
    # HfHubHTTPError's first base is the HTTP library's own error: which library that is changed between versions.
    # RuntimeError and ValueError come from uploads of large files and from answers that huggingface_hub cannot read.
    failures = (OSError, HfHubHTTPError.__bases__[0], RuntimeError, ValueError)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            _check_card(card)
            url = str(api.create_repo(repo_id, private=True if private else None, exist_ok=True))
            gone.append("the repository was made or was there")
            if private and not api.model_info(repo_id).private:
                raise PushError(f"{repo_id} exists and is public: make it private on the hub, or leave out --private")
            files = api.upload_folder(
                repo_id=repo_id,
                folder_path=plan.folder,
                ignore_patterns=[NAME, *STAYS],
                delete_patterns=WEIGHTS,
                commit_message=title,
            )
            gone.append(f"all {len(plan.files) - 1} files but the card are there")
            last = api.upload_file(
                path_or_fileobj=card.encode(),
                path_in_repo=NAME,
                repo_id=repo_id,
                commit_message=f"Card: {title}",
            )
        except failures as error:
            raise PushError(f"{_why(error)}; {'; '.join(gone) or 'nothing had gone up'}") from error
    # Others' warnings are none of the user's business.
    about = [str(item.message) for item in said if "README.md" in str(item.message)]
    return PushReport(plan, url, (files.oid, last.oid), tuple(clean(text, 500) for text in dict.fromkeys(about)))


def _check_card(text: str) -> None:
    """The hub's own check of a card, before anything is made or sent; raises PushError with what it says."""
    from huggingface_hub import ModelCard

    try:
        ModelCard(text).validate()
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        try:
            found = [str(entry["message"]) for entry in json.loads(str(error))["errors"]]
        except (ValueError, KeyError, TypeError):
            found = [str(error)]
        raise PushError(f"the hub does not take the card's front matter: {clean('; '.join(found), 400)}") from error


def _why(error: BaseException) -> str:
    """One sentence for what huggingface_hub raises, with the status where the hub answered."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:  # the upload of a large file wraps its error
        error = error.__cause__
    if isinstance(error, PushError):
        return str(error)
    status = getattr(getattr(error, "response", None), "status_code", None)
    hints = {
        401: "the hub does not accept the token ('hf auth login' stores a new one)",
        403: "the token may not write there",
        404: "there is no such place on the hub, or the token may not see it",
        429: "the hub asks for fewer requests",
    }
    if status is None:
        return f"the hub could not be reached or gave no sense: {clean(str(error), 400) or type(error).__name__}"
    hint = hints.get(status, "the hub failed" if status >= 500 else "the hub refused")
    return f"{status}: {hint}: {clean(str(error), 400)}"


def _listed(folder: pathlib.Path) -> list[str]:
    """Paths of all files below a folder, in order; refuses whatever must not go up."""
    inside, found, bad = folder.resolve(), [], []
    for place, folders, files in os.walk(folder, followlinks=False):
        folders.sort()
        for name in sorted([*folders, *files]):
            path = pathlib.Path(place, name)
            where = path.relative_to(folder).as_posix()
            reason = _unfit(path, inside)
            if reason:
                bad.append(f"{clean(where)} ({reason})")
                if name in folders:
                    folders.remove(name)
            elif name in files:
                found.append(where)
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise UnsupportedAttentionError(f"{folder} holds what must not go up: {', '.join(bad[:5])}{more}; take it out")
    return sorted(found)


def _unfit(path: pathlib.Path, inside: pathlib.Path) -> str | None:
    """Why a file or folder must not go up, None where it may."""
    name = path.name.lower()
    if path.is_symlink():
        try:
            target = path.resolve(strict=True)
        except (OSError, RuntimeError):
            return "a link that leads nowhere"
        if not target.is_relative_to(inside):
            return "a link that leads outside"
        if target.is_dir():
            return "a link to a folder"
    if name.endswith(UNFINISHED):
        return "an unfinished file"
    if name.startswith(".") and name not in HIDDEN:
        return "a hidden or unfinished file"
    if path.is_dir():
        return None
    if not path.is_file():
        return "no regular file"
    if name.endswith(PICKLES) or (not name.endswith(".safetensors") and _is_pickle(path)):
        return "a pickle or another format that can run code; only safetensors are published"
    return None


def _is_pickle(path: pathlib.Path) -> bool:
    """Whether a file is a pickle under another name: by the mark of protocols 2 to 5, or PyTorch's zip archive."""
    with path.open("rb") as file:
        start = file.read(2)
    if len(start) == 2 and start[0] == 0x80 and 2 <= start[1] <= 5:
        return True
    if not zipfile.is_zipfile(path):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError):
        return False
