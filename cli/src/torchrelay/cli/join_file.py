"""The join file: what a machine needs to join a cluster. It is secret, for its token and the broker's password."""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

from torchrelay.cli.errors import CliError


@dataclass(frozen=True, slots=True)
class JoinFile:
    """Addresses of a cluster, and the credentials of a machine that joins."""

    scheduler: str  # host:port
    nats_url: str  # with user and password
    remote_url: str
    token: str  # see torchrelay.common.identity.join_token

    @property
    def scope(self) -> str:
        """The beginning of the ids of the nodes that the token is for."""
        return self.token.partition(".")[0]

    def as_toml(self) -> str:
        """TOML takes strings of JSON."""
        return "".join(f"{name} = {json.dumps(value)}\n" for name, value in asdict(self).items())

    @classmethod
    def read(cls, path: Path) -> Self:
        """``-`` is the standard input. Raises ``CliError`` for a file that cannot be read or is not complete."""
        hint = "copy join.toml from the home of an `up` with --cluster-host"
        try:
            content = tomllib.loads(sys.stdin.read() if path == Path("-") else path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise CliError(f"{path} cannot be read: {reason}", hint) from error
        except tomllib.TOMLDecodeError as error:
            raise CliError(f"{path} is not TOML: {error}", hint) from error
        values = {}
        for field in fields(cls):
            value = content.get(field.name)
            if not isinstance(value, str):
                raise CliError(f"{path} lacks {field.name!r}, or it is not a string", hint)
            values[field.name] = value
        return cls(**values)
