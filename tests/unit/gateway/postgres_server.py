"""A real PostgreSQL for tests: own folder, port and user, without fsync."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.brokers import free_port, running


def postgres_program(name: str) -> str:
    """The path of a program of PostgreSQL."""
    folders = [str(folder) for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    path = shutil.which(name, path=os.pathsep.join([*folders, os.environ.get("PATH", "")]))
    assert path, "PostgreSQL is not installed: run `make test`, which installs it, or apt-get install postgresql"
    return path


def _await_ready(port: int) -> None:
    """It listens a moment before it accepts queries."""
    ask = [postgres_program("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(port)]
    deadline = time.monotonic() + 20
    while subprocess.run(ask, check=False, timeout=10).returncode != 0:
        if time.monotonic() > deadline:
            raise RuntimeError(f"PostgreSQL on port {port} did not answer within 20 s")
        time.sleep(0.02)


@contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of a fresh server. As root it runs as ``nobody``: PostgreSQL refuses to run as root."""
    initdb, postgres = postgres_program("initdb"), postgres_program("postgres")
    prefix: list[str] = []
    with tempfile.TemporaryDirectory(
        prefix="relay-pg-", dir="/tmp"
    ) as folder:  # user nobody cannot enter pytest's folders
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
            prefix = ["setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups"]
        data = f"{folder}/data"
        made = subprocess.run(
            [*prefix, initdb, "-D", data, "-A", "trust", "-N", "-U", "torchrelay"],
            capture_output=True,
            cwd=folder,
            timeout=60,
            check=False,
        )
        if made.returncode != 0:
            raise RuntimeError(f"initdb failed:\n{made.stderr.decode()}")
        port = free_port()
        command = [*prefix, postgres, "-D", data, "-p", str(port), "-h", "127.0.0.1", "-k", folder]
        quick = ["-c", "fsync=off", "-c", "shared_buffers=16MB", "-c", "max_connections=60"]
        with running([*command, *quick], Path(folder) / "postgres.log", port):
            _await_ready(port)
            yield f"postgresql://torchrelay@127.0.0.1:{port}/postgres"
