"""Small real programs for the supervisor's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from torchrelay.cli.errors import CliError
from torchrelay.cli.up.children.child import ChildSpec
from torchrelay.cli.up.children.stack import Stack

SERVE = """
import json, os, pathlib, signal, sys
ready, trail = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
def stop(*_):
    with trail.open("a") as file:
        file.write(f"{ready.stem} stopped\\n")
    ready.unlink()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
draft = ready.with_suffix(".draft")
draft.write_text(json.dumps({"pid": os.getpid()}))
draft.replace(ready)
while True:
    signal.pause()
"""
ANSWERS = """
import json, os, pathlib, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
server = HTTPServer(("127.0.0.1", 0), Handler)
draft = pathlib.Path(sys.argv[1]).with_suffix(".draft")
draft.write_text(json.dumps({"http": f"http://127.0.0.1:{server.server_port}", "pid": os.getpid()}))
draft.replace(sys.argv[1])
server.serve_forever()
"""
NEVER_READY = "import signal\nwhile True: signal.pause()"
STUBBORN = """
import signal, subprocess, sys, pathlib
signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
ready = pathlib.Path(sys.argv[1])
draft = ready.with_suffix(".draft")
draft.write_text('{"grandchild": %d}' % grandchild.pid)
draft.replace(ready)
while True:
    signal.pause()
"""


class Programs:
    """Makes specs whose files lie in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trail = folder / "trail"

    def spec(self, name: str, code: str = SERVE, *, ready_s: float = 20.0) -> ChildSpec:
        ready = self.folder / f"{name}.json"
        command = (sys.executable, "-c", code, str(ready), str(self.trail))
        return ChildSpec(name, command, self.folder / f"{name}.log", ready_file=ready, ready_s=ready_s)

    def stack(self, *groups: Iterable[ChildSpec]) -> Stack:
        return Stack(tuple(tuple(group) for group in groups), {})


class Recorder:
    """An audience that remembers."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []
        self.waits_s: list[float] = []

    def starting(self, names: Iterable[str]) -> None:
        self.said += [("starting", name) for name in names]

    def ready(self, name: str, took_s: float, address: str) -> None:
        self.said.append(("ready", name))

    def ended(self, name: str, how: str, wait_s: float) -> None:
        self.said.append((how, name))
        self.waits_s.append(wait_s)

    def failed(self, problem: CliError) -> None:
        self.said.append(("failed", problem.message))

    def disk(self, message: str) -> None:
        self.said.append(("disk", message))

    def stopping(self) -> None:
        self.said.append(("stopping", ""))


def is_running(pid: int) -> bool:
    """Whether a process lives (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
