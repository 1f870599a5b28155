"""A real PostgreSQL for tests: own folder, port and user, without fsync."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.brokers import end, free_port
from tests.support.wait import wait_until
from torchrelay.common.process.parent_death import tied_to_this_process


def postgres_program(name: str) -> str:
    """The path of a program of PostgreSQL."""
    folders = [str(folder) for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    path = shutil.which(name, path=os.pathsep.join([*folders, os.environ.get("PATH", "")]))
    assert path, "PostgreSQL is not installed: run `make test`, which installs it, or apt-get install postgresql"
    return path


@dataclass(slots=True)
class PostgresServer:
    """A server that can be killed and started again: without fsync a killed process loses nothing, a machine does."""

    url: str
    _command: tuple[str, ...]
    _log: Path
    _port: int
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it, as soon as the last processes of a killed one have left the data, until it accepts queries."""
        wait_until(self._has_started, "the start of PostgreSQL", limit_s=20)

    def _has_started(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            with self._log.open("ab") as output:
                self._process = subprocess.Popen(tied_to_this_process(self._command), stdout=output, stderr=output)
        ask = [postgres_program("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self._port)]
        return subprocess.run(ask, check=False, timeout=10).returncode == 0 and self._process.poll() is None

    def kill(self) -> None:
        """kill -9 of the server's first process; its others end by themselves."""
        assert self._process is not None, "it has not been started"
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None:
            end(self._process)


@contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of a fresh server. As root it runs as ``nobody``: PostgreSQL refuses to run as root."""
    with killable_postgres() as server:
        yield server.url


@contextmanager
def killable_postgres() -> Iterator[PostgresServer]:
    """A fresh server; as ``postgres_server``."""
    initdb, postgres = postgres_program("initdb"), postgres_program("postgres")
    prefix: list[str] = []
    with tempfile.TemporaryDirectory(
        prefix="relay-pg-", dir="/tmp"
    ) as folder:  # user nobody cannot enter pytest's folders
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
            program = shutil.which("setpriv") or "setpriv"
            prefix = [program, f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups"]
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
        url = f"postgresql://torchrelay@127.0.0.1:{port}/postgres"
        server = PostgresServer(url, (*command, *quick), Path(folder) / "postgres.log", port)
        try:
            server.start()
            yield server
        finally:
            server.stop()
