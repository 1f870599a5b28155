"""A real S3 protocol server (moto) as a process, and a proxy before it that is as faulty as a test wants."""

from __future__ import annotations

import http.client
import re
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.brokers import listening

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_PIECE_BYTES = 16 << 10


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """The URL of a fresh S3 server whose objects lie in its memory; it takes any credentials."""

    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]

    with listening(command, folder / "s3.log", "127.0.0.1") as port:
        yield f"http://127.0.0.1:{port}"


def make_bucket(endpoint: str, bucket: str) -> None:
    request = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")
    with urllib.request.urlopen(request, timeout=10) as reply:
        assert reply.status == 200


@dataclass(frozen=True)
class ProxiedRequest:
    """A request as the proxy has seen it. ``begin`` and ``end`` are the bytes it asks for, -1: no range."""

    method: str
    path: str
    begin: int = -1
    end: int = -1

    @property
    def for_pack(self) -> bool:
        """It reads a range of a pack."""
        return self.begin >= 0


@dataclass(frozen=True)
class Fault:
    """The fault of a reply."""

    status: int = 0  # answered with at once, 0: the server's own reply
    cut_after_bytes: int = -1  # the connection ends there, -1: it does not
    silent: bool = False  # nothing is ever answered
    bytes_per_s: float = 0  # 0: as fast as it goes
    flip_at: int = -1  # a bit of this byte of the object is turned, -1: of none


@dataclass
class FaultyProxy:
    """``decide`` is asked about every request, in the order they come; None: the request passes."""

    endpoint: str
    decide: Callable[[ProxiedRequest], Fault | None] = lambda asked: None
    asked: list[ProxiedRequest] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    closing: threading.Event = field(default_factory=threading.Event)

    def judge(self, asked: ProxiedRequest) -> Fault:
        with self.lock:
            self.asked.append(asked)
            return self.decide(asked) or Fault()


def first(count: int, fault: Fault, at: int = -1) -> Callable[[ProxiedRequest], Fault | None]:
    """The fault for the first ``count`` reads of packs, or for those that ask for the byte ``at``."""
    left = [fault] * count

    def decide(asked: ProxiedRequest) -> Fault | None:
        concerned = asked.begin <= at < asked.end if at >= 0 else asked.for_pack
        return left.pop() if left and concerned else None

    return decide


def always(fault: Fault) -> Callable[[ProxiedRequest], Fault | None]:
    """The fault for each read of a pack."""
    return lambda asked: fault if asked.for_pack else None


@contextmanager
def faulty_proxy(upstream: str) -> Iterator[FaultyProxy]:
    """A proxy before the server at ``upstream``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    proxy = FaultyProxy(f"http://127.0.0.1:{server.server_port}")
    server.RequestHandlerClass = type("Handler", (_Handler,), {"proxy": proxy, "upstream": upstream})
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    serving.start()
    try:
        yield proxy
    finally:
        proxy.closing.set()
        server.shutdown()
        serving.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultyProxy
    upstream: str

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:  # the client has given up
            self.close_connection = True

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        wanted = _RANGE.fullmatch(self.headers.get("Range") or "")
        span = (int(wanted[1]), int(wanted[2]) + 1) if wanted else (-1, -1)
        fault = self.proxy.judge(ProxiedRequest(self.command, self.path, *span))
        if fault.silent:
            self.proxy.closing.wait()
            self.close_connection = True
        elif fault.status:
            self._reply(fault.status, [], b"<Error><Code>Fault</Code></Error>", Fault())
        else:
            self._forward(body, fault, max(span[0], 0))

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _forward(self, body: bytes, fault: Fault, begin: int) -> None:
        server = http.client.HTTPConnection(self.upstream.removeprefix("http://"), timeout=30)
        try:
            server.request(self.command, self.path, body, dict(self.headers))
            reply = server.getresponse()
            data = bytearray(reply.read())
            if begin <= fault.flip_at < begin + len(data):
                data[fault.flip_at - begin] ^= 1
            self._reply(reply.status, reply.getheaders(), bytes(data), fault)
        finally:
            server.close()

    def _reply(self, status: int, headers: list[tuple[str, str]], data: bytes, fault: Fault) -> None:
        self.send_response_only(status)
        named = {name.lower() for name, _ in headers}
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection"):
                self.send_header(name, value)
        if "content-length" not in named:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if 0 <= fault.cut_after_bytes < len(data):
            data = data[: fault.cut_after_bytes]
            self.close_connection = True
        for at in range(0, len(data), _PIECE_BYTES):
            self.wfile.write(data[at : at + _PIECE_BYTES])
            if fault.bytes_per_s and self.proxy.closing.wait(_PIECE_BYTES / fault.bytes_per_s):
                return

    def log_message(self, format: str, *args: object) -> None: ...
