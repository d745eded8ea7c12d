"""A Hub on loopback: as much of its HTTP as `huggingface_hub` speaks to make a repository and commit files to it."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import huggingface_hub
import pytest

WRITER = "hf_writer"  # the token that may write, to `owner/...` alone
READER = "hf_reader"


@dataclass
class Repository:
    """What was committed: file name to bytes, and the commits' messages."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


class StandInHub(ThreadingHTTPServer):
    """`repositories` by id; `requests` are `"METHOD path"` in order."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}  # large files by sha256
        self.requests: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def stand_in_hub() -> Iterator[StandInHub]:
    """A running one."""
    server = StandInHub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """A stand-in that the Hub's client talks to, with a token that may write."""
    with stand_in_hub() as server:
        for name, value in (("ENDPOINT", server.address), ("HF_HUB_OFFLINE", False), ("HF_HUB_DISABLE_XET", True)):
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setenv("HF_TOKEN", WRITER)
        yield server


class _Handler(BaseHTTPRequestHandler):
    server: StandInHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self._body()
        path = self.path.partition("?")[0]
        if path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if not self._may_write(path, body):
            return None
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if "/branch/" in path or path.endswith("/verify"):
            return self._answer({})
        if "/preupload/" in path:
            return self._answer({"files": [self._mode(file["path"]) for file in json.loads(body)["files"]]})
        if path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            return self._answer({"transfer": "basic", "objects": [self._instructions(item) for item in wanted]})
        repo_id = path.removeprefix("/api/models/").partition("/commit/")[0]
        return self._commit(repo_id, [json.loads(line) for line in body.splitlines()])

    @staticmethod
    def _mode(path: str) -> dict[str, Any]:
        return {
            "path": path,
            "uploadMode": "lfs" if path.endswith(".safetensors") else "regular",
            "shouldIgnore": False,
        }

    def do_PUT(self) -> None:
        self.server.objects[self.path.rpartition("/")[2]] = self._body()
        self._answer({})

    def do_GET(self) -> None:
        self._body()
        self._answer({"error": "nothing is read here"}, 404)

    def _create(self, wanted: dict[str, Any]) -> None:
        repo_id = f"{wanted.get('organization') or 'owner'}/{wanted['name']}"
        known = repo_id in self.server.repositories
        if not known:
            self.server.repositories[repo_id] = Repository(
                wanted.get("private", False) or wanted.get("visibility") == "private"
            )
        self._answer({"url": f"{self.server.address}/{repo_id}"}, 409 if known else 200)

    def _instructions(self, wanted: dict[str, Any]) -> dict[str, Any]:
        upload = {"href": f"{self.server.address}/storage/{wanted['oid']}", "header": {}}
        return {**wanted, "actions": {"upload": upload}}

    def _commit(self, repo_id: str, lines: list[dict[str, Any]]) -> None:
        repository = self.server.repositories[repo_id]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                repository.messages.append(value["summary"])
            elif line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            else:
                content = self.server.objects[value["oid"]]
                assert hashlib.sha256(content).hexdigest() == value["oid"]
                repository.files[value["path"]] = content
        self._answer({"commitUrl": f"{self.server.address}/{repo_id}/commit/abc", "commitOid": "abc", "success": True})

    def _may_write(self, path: str, body: bytes) -> bool:
        token = (self.headers.get("authorization") or "").removeprefix("Bearer ")
        if not token:
            self._answer({"error": "Invalid username or password."}, 401)
        elif token != WRITER or (path == "/api/repos/create" and json.loads(body).get("organization") == "stranger"):
            self._answer({"error": "You don't have the rights to do this"}, 403)
        else:
            return True
        return False

    def _body(self) -> bytes:
        self.server.requests.append(f"{self.command} {self.path}")
        if self.headers.get("transfer-encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def _answer(self, content: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
