"""A server that speaks the Hugging Face hub's protocol: models, their files, and what can go wrong."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LFS = (".safetensors", ".bin")


@dataclass
class Hub:
    """What the server has and does.

    Attributes:
        models: directory of each model, by name.
        gated: names whose files are given to nobody.
        cut: file names that are sent by half.
        cut_once: file names that are sent by half the first time.
        status_of: file names that are answered with this status.
        renamed: new names of models, by their old names, which are redirected.
        changed: file names of which a byte is another than the hub's hash says.
        status: every question is answered with it; 0: as it should be.
        asked: method and path of each question.
    """

    models: dict[str, Path]
    gated: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    cut_once: set[str] = field(default_factory=set)
    status_of: dict[str, int] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    status: int = 0
    asked: list[str] = field(default_factory=list)
    endpoint: str = ""

    def commit(self, model: str) -> str:
        return hashlib.sha1(model.encode(), usedforsecurity=False).hexdigest()

    def sent(self) -> list[str]:
        """Names of the files whose content was asked for."""
        paths = [
            one.removeprefix("GET ") for one in self.asked if one.startswith("GET /") and "/api/" not in one
        ]
        return [path.rsplit("/", 1)[-1] for path in paths]


@contextmanager
def hub_server(models: dict[str, Path]) -> Iterator[Hub]:
    """A server of these models while the block lasts."""
    hub = Hub(models)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        old = next((name for name in self.hub.renamed if name in path), None)
        if self.hub.status:
            self._reply(self.hub.status)
        elif old is not None:
            self._reply(307, {"Location": self.path.replace(old, self.hub.renamed[old], 1)})
        elif path.startswith("/api/models/"):
            model, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            self._info(model, revision or "main")
        elif path.startswith("/cdn/"):
            self._content(path.removeprefix("/cdn/"))
        else:
            model, _, rest = path.lstrip("/").partition("/resolve/")
            self._resolve(model, *rest.split("/", 1))

    def _known(self, model: str, revision: str) -> bool:
        if model not in self.hub.models:
            self._reply(404, {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", "v1", self.hub.commit(model)):
            self._reply(404, {"X-Error-Code": "RevisionNotFound"})
        else:
            return True
        return False

    def _info(self, model: str, revision: str) -> None:
        if not self._known(model, revision):
            return
        siblings = []
        root = self.hub.models[model]
        for file in sorted(path for path in root.rglob("*") if path.is_file()):
            content = file.read_bytes()
            one = {
                "rfilename": str(file.relative_to(root)),
                "size": len(content),
                "blobId": _git_hash(content),
            }
            if file.suffix in _LFS:
                digest = hashlib.sha256(content).hexdigest()
                one["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
            siblings.append(one)
        told = {"_id": "0", "id": model, "modelId": model, "sha": self.hub.commit(model), "private": False}
        self._reply(
            200, {"Content-Type": "application/json"}, json.dumps({**told, "siblings": siblings}).encode()
        )

    def _resolve(self, model: str, revision: str = "", name: str = "") -> None:
        if not self._known(model, revision):
            return
        commit = {"X-Repo-Commit": self.hub.commit(model)}
        file = self.hub.models[model] / name
        if model in self.hub.gated:
            self._reply(403, {"X-Error-Code": "GatedRepo"})
        elif not file.is_file():
            self._reply(404, {"X-Error-Code": "EntryNotFound", **commit})
        elif file.suffix in _LFS:
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(file.stat().st_size)}
            other_host = self.hub.endpoint.replace("127.0.0.1", "localhost")
            self._reply(302, {"Location": f"{other_host}/cdn/{model}/{name}", **linked, **commit})
        else:
            self._content(f"{model}/{name}", commit)

    def _content(self, path: str, more: dict[str, str] | None = None) -> None:
        model, _, name = path.rpartition("/")
        while model not in self.hub.models:
            model, _, above = model.rpartition("/")
            name = f"{above}/{name}"
        content = (self.hub.models[model] / name).read_bytes()
        tag = f'"{_git_hash(content)}"'
        if name in self.hub.status_of:
            self._reply(self.hub.status_of[name])
            return
        if name in self.hub.changed:
            content = content[:-1] + bytes([content[-1] ^ 1])
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        part = content[first:]
        headers = {"ETag": tag, **(more or {})}
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        is_cut = name in self.hub.cut | self.hub.cut_once and self.command == "GET"
        if is_cut:
            self.hub.cut_once.discard(name)
        self._reply(206 if first else 200, headers, part, len(part) // 2 if is_cut else None)

    def _reply(
        self,
        status: int,
        headers: dict[str, str] | None = None,
        content: bytes = b"",
        sent: int | None = None,
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:sent])
        if sent is not None:
            self.close_connection = True


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
