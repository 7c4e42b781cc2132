"""A local Hugging Face Hub: it answers the requests of huggingface_hub, and none leaves the process.

It creates repositories, accepts commits with the files inline, checks cards, and serves trees and files. It accepts one
token. All requests are recorded, and tests can replace answers.
"""

import base64
import hashlib
import importlib
import json
import re
from dataclasses import dataclass, field

import yaml
from huggingface_hub import close_session, constants, set_client_factory
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils._http import default_client_factory

TOKEN = "hf_token_of_the_tests"
# The HTTP library. Which one it is depends on the version of huggingface_hub.
http = importlib.import_module(HfHubHTTPError.__bases__[0].__module__.partition(".")[0])


@dataclass
class Repository:
    """Files of the current commit as {path: bytes}, the commits, oldest first, and the visibility."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[tuple[str, list[str]]] = field(default_factory=list)

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr([self.commits]).encode()).hexdigest()


class Hub:
    """The hub. `requests` contains "METHOD /path" of all requests.

    `answers` contains pairs of a pattern for these lines, and the status with which they are answered, or an error.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.answers: list[tuple[str, int | Exception]] = []

    def install(self) -> None:
        """Let huggingface_hub send its requests here. After `close_session` it does so in new sessions only."""
        set_client_factory(lambda: http.Client(transport=http.MockTransport(self.answer)))
        close_session()

    def remove(self) -> None:
        set_client_factory(default_client_factory)
        close_session()

    def answer(self, request):
        line = f"{request.method} {request.url.path}"
        self.requests.append(line)
        for pattern, given in self.answers:
            if re.fullmatch(pattern, line) and isinstance(given, Exception):
                raise given
            if re.fullmatch(pattern, line):
                return respond({"error": "as the test asked"}, given)
        is_known = request.headers.get("Authorization") == f"Bearer {TOKEN}"
        if line == "POST /api/validate-yaml":
            errors = [{"message": error} for error in card_errors(json.loads(request.read())["content"])]
            return respond({"errors": errors, "warnings": []}, 400 if errors else 200)
        if request.method == "POST" and not is_known:
            return respond({"error": "Invalid username or password."}, 401)
        if line == "POST /api/repos/create":
            return self.create(json.loads(request.read()))
        name, action = re.fullmatch(r"\w+ (?:/api/models)?/([\w.-]+/[\w.-]+)/?(.*)", line).groups()
        repository = self.repositories.get(name)
        if repository is None or (repository.private and not is_known):
            return respond({"error": "Repository not found"}, 404, **{"X-Error-Code": "RepoNotFound"})
        if action == "preupload/main":
            files = [file["path"] for file in json.loads(request.read())["files"]]
            modes = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in files]
            return respond({"files": modes})
        if action == "commit/main":
            return commit(repository, name, [json.loads(line) for line in request.read().splitlines()])
        if action.startswith("tree/"):
            files = sorted(repository.files.items())
            return respond([{"type": "file", "path": p, "size": len(c), "oid": blob_id(c)} for p, c in files])
        if action.startswith("resolve/"):
            return resolve(repository, action.split("/", 2)[2], request.method)
        about = {"id": name, "modelId": name, "sha": repository.sha, "private": repository.private, "tags": []}
        return respond({**about, "siblings": [{"rfilename": path} for path in sorted(repository.files)]})

    def create(self, asked: dict):
        name = f"{asked['organization']}/{asked['name']}"
        answer = {"url": f"{constants.ENDPOINT}/{name}", "name": name}
        if name in self.repositories:
            return respond({**answer, "error": "You already created this model repo"}, 409)
        self.repositories[name] = Repository(asked.get("visibility") == "private" or asked.get("private") is True)
        return respond(answer)


def respond(value, status: int = 200, **headers: str):
    return http.Response(status, json=value, headers=headers)


def commit(repository: Repository, name: str, lines: list[dict]):
    files, changed = dict(repository.files), []
    for value, kind in ((line["value"], line["key"]) for line in lines[1:]):
        changed.append(value["path"] if kind == "file" else f"-{value['path']}")
        if kind == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        else:
            del files[value["path"]]
    repository.files = files
    repository.commits.append((lines[0]["value"]["summary"], sorted(changed)))
    link = f"{constants.ENDPOINT}/{name}/commit/{repository.sha}"
    return respond({"commitUrl": link, "commitOid": repository.sha, "success": True})


def resolve(repository: Repository, path: str, method: str):
    if path not in repository.files:
        return respond({"error": "Entry not found"}, 404, **{"X-Error-Code": "EntryNotFound"})
    content = repository.files[path]
    headers = {"X-Repo-Commit": repository.sha, "ETag": f'"{blob_id(content)}"', "Content-Length": str(len(content))}
    return http.Response(200, headers=headers, content=b"" if method == "HEAD" else content)


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def card_errors(content: str) -> list[str]:
    """The errors that the hub reports for a card, by those of its rules that matter here."""
    block = re.match(r"---\n(.*?)\n---\n", content, re.S)
    try:
        data = yaml.safe_load(block[1]) if block else None
    except yaml.YAMLError as error:
        return [str(error)]
    if not isinstance(data, dict):
        return ["metadata is not a mapping"]
    named = {key: data[key] for key in ("license", "library_name", "pipeline_tag") if key in data}
    identifier = re.compile(r"[a-z0-9][a-z0-9._+-]*")
    errors = [f'"{key}" must be an identifier' for key, value in named.items() if not identifier.fullmatch(str(value))]
    if not all(isinstance(tag, str) for tag in data.get("tags", [])):
        errors.append('"tags" must be strings')
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", data.get("base_model", "a/b")):
        errors.append('"base_model" is not a model')
    languages = data.get("language", [])
    return errors + [f'"language" {c!r}' for c in languages if not re.fullmatch(r"[a-z]{2,3}|code|multilingual", c)]
