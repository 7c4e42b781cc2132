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
        self.answers: list[tuple[str, int, dict]] = []

    def answer(self, pattern: str, status: int, **body) -> None:
        """Answer requests whose "METHOD /path" matches a pattern with this status and body."""
        self.answers.append((pattern, status, body))


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
    if not block:
        return ["empty or missing yaml metadata"]
    try:
        data = yaml.safe_load(block[1])
    except yaml.YAMLError as error:
        return [str(error)]
    errors = []
    if not isinstance(data, dict):
        return ["metadata is not a mapping"]
    named = {key: data[key] for key in ("license", "library_name", "pipeline_tag", "license_name") if key in data}
    identifier = re.compile(r"[a-z0-9][a-z0-9._+-]*")
    errors += [f'"{key}" must be an identifier' for key, value in named.items() if not identifier.fullmatch(str(value))]
    if data.get("license") == "other" and "license_name" not in data:
        errors.append('"license_name" is required with license: other')
    if not all(isinstance(tag, str) for tag in data.get("tags", [])):
        errors.append('"tags" must be strings')
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", data.get("base_model", "a/b")):
        errors.append('"base_model" is not a model')
    languages = data.get("language", [])
    errors += [f'"language" {c!r}' for c in languages if not re.fullmatch(r"[a-z]{2,3}|code|multilingual", c)]
    return errors


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def _serve(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        line = f"{self.command} {path}"
        hub.requests.append(line)
        for pattern, status, body in hub.answers:
            if re.fullmatch(pattern, line):
                return self._json(body or {"error": "as the test asked"}, status)
        for pattern, action in ROUTES:
            match = re.fullmatch(pattern, line)
            if match:
                return action(self, hub, *match.groups())
        return self._json({"error": f"no such path: {line}"}, 404)

    def _json(self, value, status: int = 200, **headers: str) -> None:
        self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json", **headers})

    def _send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, name: str, write: bool = False) -> Repository | None:
        """The repository; or None, after an error has been sent."""
        found = self.server.repositories.get(name)
        if write and not self._known():
            self._json({"error": "Invalid username or password."}, 401)
        elif found is None or (found.private and not self._known()):
            self._json({"error": "Repository not found"}, 404, **{"X-Error-Code": "RepoNotFound"})
        else:
            return found
        return None

    def create(self, hub: Hub) -> None:
        if not self._known():
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

    def preupload(self, hub: Hub, name: str) -> None:
        if self._repository(name, write=True) is None:
            return
        files = [file["path"] for file in json.loads(self.body)["files"]]
        self._json({"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in files]})

    def commit(self, hub: Hub, name: str) -> None:
        repository = self._repository(name, write=True)
        if repository is None:
            return
        lines = [json.loads(line) for line in self.body.splitlines()]
        files, changed = dict(repository.files), []
        for value, kind in ((line["value"], line["key"]) for line in lines[1:]):
            changed.append(value["path"] if kind != "deletedFile" else f"-{value['path']}")
            if kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                del files[value["path"]]
        repository.files = files
        repository.commits.append((lines[0]["value"]["summary"], sorted(changed)))
        link = f"{hub.url}/{name}/commit/{repository.sha}"
        self._json({"commitUrl": link, "commitOid": repository.sha, "success": True})

    def info(self, hub: Hub, name: str) -> None:
        repository = self._repository(name)
        if repository is not None:
            about = {"id": name, "modelId": name, "sha": repository.sha, "private": repository.private, "tags": []}
            self._json({**about, "siblings": [{"rfilename": path} for path in sorted(repository.files)]})

    def tree(self, hub: Hub, name: str) -> None:
        repository = self._repository(name)
        if repository is not None:
            files = sorted(repository.files.items())
            entries = [{"type": "file", "path": p, "size": len(c), "oid": blob_id(c)} for p, c in files]
            self._json(entries)

    def resolve(self, hub: Hub, name: str, revision: str, path: str) -> None:
        repository = self._repository(name)
        if repository is None:
            return
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
    (rf"(?:GET|HEAD) /{_NAME}/resolve/(\w+)/(.+)", Handler.resolve),
]
