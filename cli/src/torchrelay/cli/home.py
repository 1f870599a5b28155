"""The home of one embedded install: where its keys, data, logs and addresses lie."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from torchrelay.cli.problems import Problem

DEFAULT_HOME = Path(".torchrelay")


@dataclass(frozen=True, slots=True)
class Home:
    """The folder of one install. Keys are made at the first start and readable by their owner alone."""

    path: Path

    @classmethod
    def at(cls, path: Path | None) -> Home:
        """``path``, or TORCHRELAY_HOME, or ``.torchrelay`` below the current folder."""
        chosen = path or Path(os.environ.get("TORCHRELAY_HOME", DEFAULT_HOME))
        return cls(chosen.absolute())

    @property
    def run(self) -> Path:
        return self.path / "run"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def traces(self) -> Path:
        return self.path / "traces.jsonl"

    @property
    def endpoints_file(self) -> Path:
        return self.run / "up.json"

    def make(self) -> None:
        """Creates the folders. Raises ``Problem`` when the place cannot be written."""
        try:
            for folder in (self.path, self.run, self.logs, self.path / "store", self.path / "remote"):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Problem(
                f"{self.path} cannot be used as home: {error.strerror}", "choose another with --home"
            ) from error

    def admin_key(self) -> str:
        return self._key("admin.key", "tra-")

    def cluster_key(self) -> str:
        return self._key("cluster.key", "")

    def _key(self, name: str, prefix: str) -> str:
        path = self.path / name
        try:
            return path.read_text().strip()
        except FileNotFoundError:
            key = prefix + secrets.token_hex(32)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(key + "\n")
            return key

    def endpoints(self) -> dict[str, str]:
        """The addresses of the running install. Raises ``Problem`` when none runs here."""
        try:
            found = json.loads(self.endpoints_file.read_text())
        except FileNotFoundError:
            raise Problem(f"no platform runs at {self.path}", "start one: torchrelay up") from None
        return {str(key): str(value) for key, value in found.items()}

    def running_pid(self) -> int | None:
        """The process of the ``up`` that runs on this home."""
        try:
            pid = int(json.loads(self.endpoints_file.read_text())["pid"])
            os.kill(pid, 0)
        except (FileNotFoundError, ProcessLookupError, KeyError, ValueError):
            return None
        except PermissionError:
            return pid
        return pid
