"""
A small Hub on the loopback: what the real huggingface_hub client asks for when it pushes and downloads, and no more.

Contract: `Hub()` is a context manager; `url` goes into the client's `HF_ENDPOINT`. Repositories keep every commit, a
commit is a whole tree, and a push becomes visible with its commit or not at all. Weights and images come through git
LFS or xet, as the client likes, and are downloaded as they are. `TOKEN` may do everything; without it public
repositories can be read. `requests` is the log, `faults` what goes wrong: `(method, part of the path)` gives a status,
"drop" (the connection) or "stall" (until the end).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from hub_xet import files_of

TOKEN = "hf_" + "loopback" * 5
LFS = re.compile(r"\.(safetensors|bin|png|parquet)$")
_REPO = r"(?P<kind>models|datasets)/(?P<repo>[\w.-]+/[\w.-]+)"
_FILE = r"(?:(?P<kind>datasets)/)?(?P<repo>[\w.-]+/[\w.-]+)"


@dataclass
class Repository:
    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        number = f"{len(self.commits)} {branch} {sorted(files)}".encode()
        oid = hashlib.sha1(number).hexdigest()
        self.commits[oid], self.branches[branch] = files, oid
        return oid

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches.get(revision, revision)]


class Refusal(Exception):
    """An answer that is no success, in the form the client reads."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.headers = status, {"X-Error-Code": code, "X-Error-Message": message}


class Hub:
    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.lfs: dict[str, bytes] = {}  # by sha256
        self.xorbs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.faults: dict[tuple[str, str], int | str] = {}
        self.stalled = threading.Event()
        self._go_on = threading.Event()

    def __enter__(self) -> Hub:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._go_on.set()
        self._server.shutdown()
        self._server.server_close()

    def put(self, repo: str, files: dict[str, bytes], private: bool = False, branch: str = "main") -> str:
        """A commit without a client."""
        return self.repositories.setdefault(repo, Repository(private)).commit(branch, files)

    def fault(self, method: str, path: str) -> int | str | None:
        found = [what for (verb, part), what in self.faults.items() if verb == method and part in path]
        if found and found[0] == "stall":
            self.stalled.set()
            self._go_on.wait()
        return found[0] if found else None

    def repository(self, name: str, is_writing: bool, authorization: str | None) -> Repository:
        if authorization not in (None, f"Bearer {TOKEN}"):
            raise Refusal(401, message="Invalid credentials in Authorization header")
        found = self.repositories.get(name)
        if found is None or ((is_writing or found.private) and authorization is None):
            raise Refusal(401 if authorization is None else 404, "RepoNotFound", "Repository not found")
        return found


# ---------------------------------------------------------------------- what is answered


def _create(hub: Hub, body: dict, authorization: str | None, **_: Any) -> dict:
    if authorization != f"Bearer {TOKEN}":
        raise Refusal(401, message="Invalid username or password.")
    name = f"{body.get('organization') or 'me'}/{body['name']}"
    kind = "datasets/" if body.get("type") == "dataset" else ""
    answer = {"url": f"{hub.url}/{kind}{name}", "name": name}
    if kind + name in hub.repositories:
        return answer | {"status": 409}
    repository = hub.repositories.setdefault(kind + name, Repository(body.get("visibility") == "private"))
    repository.commit("main", {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"})
    return answer


def _validate_yaml(body: dict, **_: Any) -> dict:
    block = re.match(r"---\n(.*?)\n---\n", body["content"], re.DOTALL)
    if block is None or not isinstance(yaml.safe_load(block[1]), dict):
        raise Refusal(400, message="invalid metadata")
    return {"errors": [], "warnings": []}


def _info(repository: Repository, repo: str, revision: str = "main", **_: Any) -> dict:
    files = _revision(repository, revision)
    sha = repository.branches.get(revision, revision)
    return {"id": repo, "sha": sha, "private": repository.private, "siblings": [{"rfilename": p} for p in files]}


def _tree(repository: Repository, revision: str, folder: str = "", **_: Any) -> list[dict]:
    entries = []
    for path, content in _revision(repository, revision).items():
        if path.startswith(folder.strip("/")):
            entries.append({"type": "file", "path": path, "size": len(content), "oid": _blob_id(content)})
            if LFS.search(path):
                sha256 = hashlib.sha256(content).hexdigest()
                entries[-1]["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
    return entries


def _branch(repository: Repository, revision: str, **_: Any) -> dict:
    if revision in repository.branches:
        return {"status": 409}
    repository.branches[revision] = repository.branches["main"]
    return {}


def _preupload(repository: Repository, revision: str, body: dict, **_: Any) -> dict:
    files, answer = _revision(repository, revision), []
    for file in body["files"]:
        mode, old = "lfs" if LFS.search(file["path"]) else "regular", files.get(file["path"])
        oid = None if old is None else hashlib.sha256(old).hexdigest() if mode == "lfs" else _blob_id(old)
        answer.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return {"files": answer}


def _lfs_batch(hub: Hub, body: dict, **_: Any) -> dict:
    objects = []
    for wanted in body["objects"]:
        objects.append({"oid": wanted["oid"], "size": wanted["size"]})
        if wanted["oid"] not in hub.lfs:
            objects[-1]["actions"] = {"upload": {"href": f"{hub.url}/lfs/{wanted['oid']}"}}
    return {"transfer": "basic", "objects": objects}


def _lfs_put(hub: Hub, oid: str, content: bytes, **_: Any) -> dict:
    if hashlib.sha256(content).hexdigest() != oid:
        raise Refusal(400, message="the content is not that of its name")
    hub.lfs[oid] = content
    return {}


def _xet_token(hub: Hub, **_: Any) -> dict:
    return {"casUrl": hub.url, "accessToken": "short-lived", "exp": int(time.time()) + 3600}


def _xet_xorb(hub: Hub, oid: str, content: bytes, **_: Any) -> dict:
    hub.xorbs[oid] = content
    return {"was_inserted": True}


def _xet_shard(hub: Hub, content: bytes, **_: Any) -> dict:
    for oid, file in files_of(content, hub.xorbs).items():
        _lfs_put(hub, oid, file)
    return {"result": 1}


def _commit(hub: Hub, repository: Repository, repo: str, revision: str, content: bytes, query: dict, **_: Any) -> dict:
    files = dict(_revision(repository, revision))
    for line in content.splitlines():
        entry = json.loads(line)
        value = entry["value"]
        if entry["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif entry["key"] == "lfsFile":
            files[value["path"]] = hub.lfs[value["oid"]]
        elif entry["key"] == "deletedFile":
            del files[value["path"]]
    branch = "refs/pr/1" if query.get("create_pr") else revision
    oid = repository.commit(branch, files)
    answer = {"commitUrl": f"{hub.url}/{repo}/commit/{oid}", "commitOid": oid, "success": True}
    return answer | {"pullRequestUrl": f"{hub.url}/{repo}/discussions/1"}


def _resolve(repository: Repository, revision: str, path: str, **_: Any) -> tuple[bytes, dict]:
    files = _revision(repository, revision)
    if path not in files:
        raise Refusal(404, "EntryNotFound", "Entry not found")
    content, headers = files[path], {"X-Repo-Commit": repository.branches.get(revision, revision)}
    if LFS.search(path):
        sha256 = hashlib.sha256(content).hexdigest()
        headers |= {"X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(len(content))}
    return content, headers | {"ETag": f'"{_blob_id(content)}"'}


def _revision(repository: Repository, revision: str) -> dict[str, bytes]:
    if repository.branches.get(revision, revision) not in repository.commits:
        raise Refusal(404, "RevisionNotFound", "Invalid rev id")
    return repository.files(revision)


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


ROUTES = [
    ("POST", r"/api/repos/create", _create),
    ("POST", r"/api/validate-yaml", _validate_yaml),
    ("GET", rf"/api/{_REPO}(?:/revision/(?P<revision>[^/]+))?", _info),
    ("GET", rf"/api/{_REPO}/tree/(?P<revision>[^/]+)(?P<folder>/.*)?", _tree),
    ("POST", rf"/api/{_REPO}/branch/(?P<revision>[^/]+)", _branch),
    ("POST", rf"/api/{_REPO}/preupload/(?P<revision>[^/]+)", _preupload),
    ("POST", rf"/api/{_REPO}/commit/(?P<revision>[^/]+)", _commit),
    ("POST", rf"/{_FILE}\.git/info/lfs/objects/batch", _lfs_batch),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]+)", _lfs_put),
    ("GET", rf"/api/{_REPO}/xet-write-token/(?P<revision>[^/]+)", _xet_token),
    ("POST", r"/v1/xorbs/default/(?P<oid>[0-9a-f]+)", _xet_xorb),
    ("POST", r"/v1/shards", _xet_shard),
    ("GET", rf"/{_FILE}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _resolve),
]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else what follows the headers waits 40 ms for the client
    hub: Hub

    def _answer(self) -> None:
        url, method = urlsplit(self.path), "GET" if self.command == "HEAD" else self.command
        content = b"".join(self._body())
        self.hub.requests.append(f"{self.command} {self.path}")
        fault = self.hub.fault(self.command, self.path)
        if fault in ("drop", "stall"):
            self.close_connection = True
            self.connection.close()
            return
        try:
            if fault is not None:
                raise Refusal(fault, message=f"the server says {fault}")
            self._send(*self._find(method, url, content))
        except Refusal as refusal:
            self._send(refusal.status, b'{"error": "refused"}', refusal.headers)

    def _find(self, method: str, url: Any, content: bytes) -> tuple[int, bytes, dict]:
        for verb, pattern, function in ROUTES:
            found = re.fullmatch(pattern, url.path) if verb == method else None
            if found is None:
                continue
            names = {key: unquote(value) for key, value in found.groupdict().items() if value is not None}
            call = {"hub": self.hub, "content": content, "query": parse_qs(url.query), **names}
            call["authorization"] = self.headers.get("Authorization")
            if content and "json" in self.headers.get("Content-Type", "") and function is not _commit:
                call["body"] = json.loads(content)
            if "repo" in names:
                name = ("datasets/" if names.get("kind") == "datasets" else "") + names["repo"]
                is_writing = method != "GET"
                call["repository"] = self.hub.repository(name, is_writing, call["authorization"])
            answer = function(**call)
            if isinstance(answer, tuple):
                return 200, *answer
            status = answer.pop("status", 200) if isinstance(answer, dict) else 200
            return status, json.dumps(answer).encode(), {"Content-Type": "application/json"}
        raise Refusal(404, message=f"no such route: {method} {url.path}")

    def _body(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            yield self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = do_PUT = _answer

    def log_message(self, *_: Any) -> None:
        pass
