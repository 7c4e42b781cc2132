"""A local, in-memory server with the part of the Hugging Face Hub's protocol that huggingface_hub uses in the tests.

It creates repositories, accepts commits with the files inline, checks cards, and serves trees and files. It accepts one
token. All requests are recorded, and tests can replace answers.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_token_of_the_tests"
# Code that is run first in a process. It refuses connections to other machines.
LOCAL_CONNECTIONS_ONLY = """
import socket
_connect = socket.socket.connect
def connect(self, address):
    host = address[0] if isinstance(address, tuple) else address
    if self.family in (socket.AF_INET, socket.AF_INET6) and host not in ("127.0.0.1", "localhost", "::1"):
        raise SystemExit(f"a connection to {address} was tried")
    return _connect(self, address)
socket.socket.connect = connect
def getaddrinfo(host, *rest, _real=socket.getaddrinfo, **options):
    if host not in ("127.0.0.1", "localhost", None):
        raise SystemExit(f"the address of {host} was asked for")
    return _real(host, *rest, **options)
socket.getaddrinfo = getaddrinfo
"""


class Repository:
    """Files of the current commit as {path: bytes}, the commits, oldest first, and the visibility."""

    def __init__(self, private: bool) -> None:
        self.private, self.files, self.commits = private, {}, []

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr([self.commits]).encode()).hexdigest()


class Hub(ThreadingHTTPServer):
    """A server. `url` is the value for HF_ENDPOINT; `requests` contains "METHOD /path" of all requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.answers: list[tuple[str, int]] = []

    def answer(self, pattern: str, status: int) -> None:
        """Answer requests whose "METHOD /path" matches a pattern with this status."""
        self.answers.append((pattern, status))


@contextlib.contextmanager
def serve():
    """Run a server during a `with` block."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


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


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        line = f"{self.command} {path}"
        hub.requests.append(line)
        for pattern, status in hub.answers:
            if re.fullmatch(pattern, line):
                return self._json({"error": "as the test asked"}, status)
        for pattern, action in ROUTES:
            match = re.fullmatch(pattern, line)
            if match is None:
                continue
            if "models/" not in pattern and "resolve" not in pattern:
                return action(self, hub)
            repository = hub.repositories.get(match[1])
            if self.command == "POST" and not self.is_known:
                return self._json({"error": "Invalid username or password."}, 401)
            if repository is None or (repository.private and not self.is_known):
                return self._json({"error": "Repository not found"}, 404, **{"X-Error-Code": "RepoNotFound"})
            return action(self, repository, *match.groups())
        return self._json({"error": f"no such path: {line}"}, 404)

    do_HEAD = do_POST = do_GET  # noqa: N815

    def _json(self, value, status: int = 200, **headers: str) -> None:
        self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json", **headers})

    def _send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def create(self, hub: Hub) -> None:
        if not self.is_known:
            return self._json({"error": "Invalid username or password."}, 401)
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}"
        answer = {"url": f"{hub.url}/{name}", "name": name}
        if name in hub.repositories:
            return self._json({**answer, "error": "You already created this model repo"}, 409)
        hub.repositories[name] = Repository(asked.get("visibility") == "private" or asked.get("private") is True)
        return self._json(answer)

    def validate(self, hub: Hub) -> None:
        errors = [{"message": error} for error in card_errors(json.loads(self.body)["content"])]
        self._json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def preupload(self, repository: Repository, name: str) -> None:
        files = [file["path"] for file in json.loads(self.body)["files"]]
        self._json({"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in files]})

    def commit(self, repository: Repository, name: str) -> None:
        lines = [json.loads(line) for line in self.body.splitlines()]
        files, changed = dict(repository.files), []
        for value, kind in ((line["value"], line["key"]) for line in lines[1:]):
            changed.append(value["path"] if kind == "file" else f"-{value['path']}")
            if kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                del files[value["path"]]
        repository.files = files
        repository.commits.append((lines[0]["value"]["summary"], sorted(changed)))
        link = f"{self.server.url}/{name}/commit/{repository.sha}"
        self._json({"commitUrl": link, "commitOid": repository.sha, "success": True})

    def info(self, repository: Repository, name: str) -> None:
        about = {"id": name, "modelId": name, "sha": repository.sha, "private": repository.private, "tags": []}
        self._json({**about, "siblings": [{"rfilename": path} for path in sorted(repository.files)]})

    def tree(self, repository: Repository, name: str) -> None:
        files = sorted(repository.files.items())
        self._json([{"type": "file", "path": p, "size": len(c), "oid": blob_id(c)} for p, c in files])

    def resolve(self, repository: Repository, name: str, path: str) -> None:
        if path not in repository.files:
            return self._json({"error": "Entry not found"}, 404, **{"X-Error-Code": "EntryNotFound"})
        content = repository.files[path]
        return self._send(content, 200, {"X-Repo-Commit": repository.sha, "ETag": f'"{blob_id(content)}"'})


_NAME = r"([\w.-]+/[\w.-]+)"
ROUTES = [
    (r"POST /api/repos/create", Handler.create),
    (r"POST /api/validate-yaml", Handler.validate),
    (rf"POST /api/models/{_NAME}/preupload/main", Handler.preupload),
    (rf"POST /api/models/{_NAME}/commit/main", Handler.commit),
    (rf"GET /api/models/{_NAME}(?:/revision/\w+)?", Handler.info),
    (rf"GET /api/models/{_NAME}/tree/\w+", Handler.tree),
    (rf"(?:GET|HEAD) /{_NAME}/resolve/\w+/(.+)", Handler.resolve),
]
