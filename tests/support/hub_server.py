"""A real HTTP server in a thread that speaks the protocol of the Hugging Face hub, as faulty as a test wants."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_sesame"
_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([0-9a-f]{40})/(.+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_LARGE = (".safetensors", ".gguf")


@dataclass
class HubServer:
    """The repositories, and the requests received: method, path, and the headers of the client.

    Large files are answered with a redirect to another host, as the hub does, which would be told no token.
    """

    url: str = ""
    repos: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)  # files by repository and commit
    private: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)  # files whose last byte is turned
    cut_at: int | None = None  # connections break before this byte of a large file, once unless `stays_cut`
    stays_cut: bool = False
    ignores_ranges: bool = False
    listing: bytes = b""  # answered in place of every list of files
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    def publish(self, repo: str, files: Mapping[str, bytes]) -> str:
        """Makes a commit of these files, the last of the branch main; returns its id."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.repos.setdefault(repo, {}).pop(commit, None)
        self.repos[repo][commit] = dict(files)
        return commit

    def ranges(self, name: str) -> list[str]:
        """The ranges asked for of a large file."""
        digests = [_sha256(files[name]) for repo in self.repos.values() for files in repo.values() if name in files]
        return [headers["range"] for _, path, headers in self.asked if path.removeprefix("/cdn/") in digests]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, format: str, *args: Any) -> None:
        return

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:  # the client has gone
            self.close_connection = True

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, {name.lower(): value for name, value in self.headers.items()}))
        if path.startswith("/cdn/"):
            return self._cdn(path.removeprefix("/cdn/"))
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if given not in ("", TOKEN):
            return self._error(401, message="Invalid credentials in Authorization header")
        if listed := _API.fullmatch(path):
            return self._list(listed[1], listed[2] or "main", given)
        resolved = _RESOLVE.fullmatch(path)
        files = self.hub.repos.get(resolved[1], {}).get(resolved[2]) if resolved else None
        if not resolved or files is None or resolved[3] not in files:
            return self._error(404, "EntryNotFound")
        if resolved[1] in self.hub.gated:
            return self._error(403 if given else 401, "GatedRepo")
        return self._file(resolved[3], files[resolved[3]], resolved[2])

    do_HEAD = do_GET

    def _list(self, repo: str, revision: str, token: str) -> None:
        commits = self.hub.repos.get(repo)
        if not commits or (repo in self.hub.private and not token):
            return self._error(404 if token else 401, "RepoNotFound" if token else "")
        commit = list(commits)[-1] if revision == "main" else revision
        if commit not in commits:
            return self._error(404, "RevisionNotFound")
        siblings: list[dict[str, Any]] = []
        for name, content in commits[commit].items():
            siblings.append({"rfilename": name, "size": len(content), "blobId": _git_sha1(content)})
            if name.endswith(_LARGE):
                siblings[-1]["lfs"] = {"sha256": _sha256(content), "size": len(content), "pointerSize": 134}
        if not urlsplit(self.path).query.startswith("blobs="):
            siblings = [{"rfilename": each["rfilename"]} for each in siblings]
        body = self.hub.listing or json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode()
        return self._send(200, body, {"Content-Type": "application/json"})

    def _file(self, name: str, content: bytes, commit: str) -> None:
        headers = {"X-Repo-Commit": commit}
        if not name.endswith(_LARGE):
            return self._range(self._sent(name, content), headers | {"ETag": f'"{_git_sha1(content)}"'})
        digest = _sha256(content)
        headers |= {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{digest}"'}
        place = self.hub.url.replace("127.0.0.1", "localhost")
        return self._send(302, b"", headers | {"Location": f"{place}/cdn/{digest}"})

    def _cdn(self, digest: str) -> None:
        files = [file for repo in self.hub.repos.values() for commit in repo.values() for file in commit.items()]
        name, content = next((name, content) for name, content in files if _sha256(content) == digest)
        self._range(self._sent(name, content), {"ETag": f'"{digest}"'}, self.hub.cut_at)

    def _sent(self, name: str, content: bytes) -> bytes:
        return content[:-1] + bytes([content[-1] ^ 1]) if name in self.hub.damaged else content

    def _range(self, content: bytes, headers: dict[str, str], cut_at: int | None = None) -> None:
        wanted = _RANGE.fullmatch("" if self.hub.ignores_ranges else self.headers.get("Range") or "")
        begin, end = (int(wanted[1]), int(wanted[2]) + 1) if wanted else (0, len(content))
        status = 206 if wanted else 200
        headers |= {"Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"} if wanted else {}
        if cut_at is None:
            return self._send(status, content[begin:end], headers)
        if not self.hub.stays_cut:
            self.hub.cut_at = None
        self.close_connection = True
        return self._send(status, content[begin:end], headers, max(cut_at - begin, 0))

    def _error(self, status: int, code: str = "", message: str = "no") -> None:
        self._send(status, b'{"error": "no"}', {"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, status: int, body: bytes, headers: dict[str, str], num_bytes: int | None = None) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:num_bytes])


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def running_hub() -> Iterator[HubServer]:
    hub = HubServer()
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub})) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving.start()
        try:
            yield hub
        finally:
            server.shutdown()
            serving.join()
