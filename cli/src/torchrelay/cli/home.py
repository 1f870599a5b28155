"""The home folder of one embedded install: its keys, data, logs and addresses."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from torchrelay.cli.errors import CliError
from torchrelay.common.identity.callers import Caller, call_token
from torchrelay.common.identity.keys import derive_node_key

DEFAULT_HOME = Path(".torchrelay")
_UP_SECRETS = ("admin.key", "cluster.key", "redis.conf", "nats.conf")
_SECRETS = (*_UP_SECRETS, "cli.key", "join.toml")
_UP_ENTRIES = (*_UP_SECRETS, "up.lock", "run", "logs", "store", "remote", "tls", "redis", "nats")
_ENTRIES = frozenset(
    (
        *_UP_ENTRIES,
        *("cli.key", "keys", "join.toml", "http.port", "traces.jsonl"),
        *(f"{name}.draft" for name in _SECRETS),
        *("ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.db-journal"),
    )
)


class Home:
    """The folder of one install. Keys are created at the first start, readable by their owner only.

    ``run`` holds what its processes tell each other; while `up` runs it lies in memory, so that they can do so when the
    disk is full.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.run, self.logs = path, path / "run", path / "logs"
        self.traces = path / "traces.jsonl"
        self.endpoints_file = self.run / "up.json"
        self.saved_key_file = path / "cli.key"
        self._http_port_file = path / "http.port"
        self._is_on_trial = False  # made just now, for an `up` that may still be refused

    @classmethod
    def at(cls, path: Path | None) -> Home:
        """``path``, or TORCHRELAY_HOME, or ``.torchrelay`` below the current folder."""
        chosen = path or Path(os.environ.get("TORCHRELAY_HOME") or DEFAULT_HOME)
        return cls(chosen.absolute())

    def last_http_port(self) -> int:
        """The REST port of the last `up` here; 0 when none is known."""
        try:
            port = int(self._http_port_file.read_text())
        except (FileNotFoundError, ValueError):
            return 0
        return port if 0 < port < 65536 else 0

    def save_http_port(self, port: int) -> None:
        self._http_port_file.write_text(f"{port}\n")

    def make(self) -> None:
        """Creates the folders, and closes to others what they may read. Raises ``CliError`` when it cannot."""
        try:
            self._is_on_trial = self._make_folder()
            if self.run.is_symlink() and not self.run.exists():  # the memory is gone with a restart of the machine
                self.run.unlink()
            private = [self.path / name for name in _SECRETS]
            # A folder that holds something else, such as /tmp, is not ours to close, nor are the keys in its tls/.
            if self._is_ours_alone():
                _make_private(self.path)
                private += [*self.path.glob("tls/*.key"), *self.path.glob("keys/*.key")]
            for folder in (self.run, self.logs, self.path / "store", self.path / "remote"):
                folder.mkdir(mode=0o700, exist_ok=True)
            for secret in filter(Path.exists, private):
                _make_private(secret)
        except OSError as error:
            is_file = isinstance(error, FileExistsError) and self.path.is_file()
            message = f"{self.path} cannot be used as home: {'it is a file' if is_file else error.strerror}"
            raise CliError(message, "choose another folder with --home or TORCHRELAY_HOME") from error

    def _make_folder(self) -> bool:
        """Creates the folder; returns whether it is new."""
        try:
            self.path.mkdir(mode=0o700, parents=True)  # the ledger and traces are private
        except FileExistsError:
            if not self.path.is_dir():
                raise
            return False
        return True

    def keep(self) -> None:
        """Keeps the folder when this `up` ends; without this call, ``owned`` removes a folder that was made for it.

        A folder that holds more than the files of a starting `up`, or cannot be removed, stays in any case.
        """
        self._is_on_trial = False

    def _is_ours_alone(self) -> bool:
        return all(entry.name in _ENTRIES for entry in self.path.iterdir())

    def write_private(self, name: str, text: str) -> Path:
        """Writes a file of the home that its owner alone may read; returns its path."""
        path = self.path / name
        _write_private(path, text)
        return path

    @contextmanager
    def owned(self, lock: Callable[[TextIO, int], None] = fcntl.flock) -> Iterator[None]:
        """Locks the home for a single `up`; the kernel drops the lock with the process. Raises ``CliError``."""
        # The removal comes after the lock file is closed: NFS keeps a folder in which a file is open.
        with ExitStack() as removal, self._lock_file() as file:
            try:
                lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = self.running_pid()
                process = f" (process {pid})" if pid is not None else ""
                message = f"a platform is already running at {self.path}{process}"
                raise CliError(message, "stop it, or choose another --home") from None
            except OSError as error:
                message = f"the file system of {self.path} has no file locks: {error.strerror}"
                raise CliError(message, "choose a --home on a local disk") from error
            if not self._is_lock_file(file):  # that of a home which was set aside between the opening and the lock
                raise CliError(f"{self.path} was removed while this `up` began", "start it again")
            self.endpoints_file.unlink(missing_ok=True)  # left behind by a killed `up`
            try:
                with self._run_in_memory():
                    yield
            finally:
                if self._is_on_trial and (aside := self._set_aside()):
                    removal.callback(shutil.rmtree, aside, ignore_errors=True)

    def _lock_file(self) -> TextIO:
        try:
            return (self.path / "up.lock").open("a")
        except OSError as error:
            message = f"{self.path} cannot be used as home: {error.strerror}"
            raise CliError(message, "fix its permissions, or choose another") from error

    def _is_lock_file(self, file: TextIO) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), (self.path / "up.lock").stat())
        except FileNotFoundError:
            return False

    def _set_aside(self) -> Path | None:
        """Renames the folder if nothing in it is to be kept: it is gone in one step. ``None``: it stays."""
        aside = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}")
        try:
            if _is_made_by_up_alone(self.path):
                self.path.rename(aside)
                if _is_made_by_up_alone(aside):
                    return aside
                aside.rename(self.path)  # a key was saved meanwhile
        except OSError:
            pass  # why this `up` is refused matters more, and a home that stays is harmless
        return None

    @contextmanager
    def _run_in_memory(self) -> Iterator[None]:
        """Makes ``run`` a link to a folder in shared memory, where there is some."""
        try:
            if self.run.is_symlink():  # left behind by a killed `up`
                shutil.rmtree(self.run.resolve(), ignore_errors=True)
                self.run.unlink()
            else:
                self.run.rmdir()
            memory = Path(tempfile.mkdtemp(prefix="torchrelay-run-", dir="/dev/shm"))
            self.run.symlink_to(memory)
        except OSError:  # no shared memory, or a file system without links
            self.run.mkdir(exist_ok=True)
            yield
            return
        try:
            yield
        finally:
            self.run.unlink()
            self.run.mkdir()
            shutil.rmtree(memory, ignore_errors=True)

    def admin_key(self) -> str:
        return self._key("admin.key", "tra-")

    def cluster_key(self) -> str:
        return self._key("cluster.key", "")

    def call_token(self, node_id: str, *callers: Caller) -> str:
        """The token with which these callers call a node of this install."""
        return call_token(derive_node_key(bytes.fromhex(self.cluster_key()), node_id), *callers)

    def _key(self, name: str, prefix: str) -> str:
        path = self.path / name
        try:
            return path.read_text().strip()
        except FileNotFoundError:
            key = prefix + secrets.token_hex(32)
            _write_private(path, f"{key}\n")
            return key

    def saved_key(self) -> str | None:
        """The tenant's key with which the other commands act: that of the last `key create` or `key use`."""
        return _read_key(self.saved_key_file)

    def save_key(self, key: str) -> None:
        _write_private(self.saved_key_file, f"{key}\n")

    def keep_key(self, key: str, tenant: str) -> None:
        """Keeps a key as its tenant's, so that commands can change to the tenant and name its models."""
        file = self._tenant_key_file(tenant)
        file.parent.mkdir(mode=0o700, exist_ok=True)
        _write_private(file, f"{key}\n")

    def kept_key(self, tenant: str) -> str | None:
        """The tenant's last key; None if there is none."""
        return _read_key(self._tenant_key_file(tenant)) if tenant in self.kept_tenants() else None

    def kept_tenants(self) -> list[str]:
        """The tenants of which a key is kept, by name."""
        return sorted(file.stem for file in self.path.glob("keys/*.key"))

    def tenant_of(self, key: str) -> str:
        """The tenant as whose key this is kept; empty if it is not."""
        return next((tenant for tenant in self.kept_tenants() if self.kept_key(tenant) == key), "")

    def forget_key(self, key_id: str) -> None:
        """Removes a key, by the id in ``tr-<id>-<secret>``, wherever it is saved."""
        for file in (self.saved_key_file, *self.path.glob("keys/*.key")):
            if (_read_key(file) or "").split("-")[1:2] == [key_id]:
                file.unlink(missing_ok=True)

    def _tenant_key_file(self, tenant: str) -> Path:
        return self.path / "keys" / f"{tenant}.key"

    def endpoints(self) -> dict[str, str]:
        """The addresses of the running install. Raises ``CliError`` when none runs here."""
        if self.running_pid() is None:
            raise CliError(
                f"no platform is running at {self.path}",
                "start one with `torchrelay up`, give its folder with --home, or a gateway with --url and --key",
            )
        endpoints = json.loads(self.endpoints_file.read_text())
        return {str(key): str(value) for key, value in endpoints.items()}

    def running_pid(self) -> int | None:
        """The process of the ``up`` on this home, once everything is up."""
        try:
            pid = int(json.loads(self.endpoints_file.read_text())["pid"])
        except (FileNotFoundError, NotADirectoryError, KeyError, ValueError):
            return None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            return pid
        return pid


def _is_made_by_up_alone(folder: Path) -> bool:
    """Whether it holds no more than an `up` makes before it starts its first child."""
    known = {folder / name for name in _UP_ENTRIES}
    return all(path in known or path.parent == folder / "tls" for path in folder.rglob("*"))


def _write_private(path: Path, text: str) -> None:
    """Replaces the file with one that only its owner can read."""
    draft = path.with_name(f"{path.name}.draft")
    draft.unlink(missing_ok=True)  # left by a killed command
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    draft.replace(path)


def _read_key(file: Path) -> str | None:
    try:
        return file.read_text().strip() or None
    except FileNotFoundError:
        return None


def _make_private(path: Path) -> None:
    mode = path.stat().st_mode
    if mode & 0o077:
        path.chmod(mode & 0o700)
