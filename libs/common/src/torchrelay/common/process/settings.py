"""Settings: one class per service; the same names as flags, environment variables and in a file.

Precedence: flags, then environment (``TORCHRELAY_`` prefix), then the TOML file named by ``TORCHRELAY_CONFIG``, then
defaults.
"""

from __future__ import annotations

import difflib
import os
import sys
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from torchrelay.common.identity.callers import Caller
from torchrelay.common.identity.tls import Tls, TlsFiles, TlsUnusable

PREFIX = "TORCHRELAY_"
CONFIG_VARIABLE = f"{PREFIX}CONFIG"
MISSPELT_SIMILARITY = 0.85
NODE_ID = "^[A-Za-z0-9_-]{1,63}$"  # one word of a NATS subject


class ConfigUnusable(Exception):
    """The file that ``TORCHRELAY_CONFIG`` names cannot be used; says why."""


class ConfigFile(TomlConfigSettingsSource):
    """The TOML file, which may hold the settings of several services.

    Raises ``ConfigUnusable`` for a file that cannot be read, and for a key that looks like a misspelt setting or has
    ended as a setting.
    """

    def __init__(self, settings_cls: type[ServiceSettings], path: Path) -> None:
        try:
            path.open("rb").close()
            super().__init__(settings_cls, path)
        except OSError as error:
            raise ConfigUnusable(f"{CONFIG_VARIABLE}: {path} cannot be read: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigUnusable(f"{CONFIG_VARIABLE}: {path} is not TOML: {error}") from error
        for key in self.toml_data:
            if why := settings_cls.ended.get(key):
                raise ConfigUnusable(f"{path}: {key!r} is not a setting any more: {why}")
            if key not in settings_cls.model_fields and (near := misspelt(key, settings_cls.model_fields)):
                raise ConfigUnusable(f"{path}: {key!r} is not a setting; did you mean {near!r}?")


def misspelt(key: str, known: Collection[str]) -> str | None:
    """The setting whose name ``key`` resembles; a key that resembles none belongs to another service."""
    return next(iter(difflib.get_close_matches(key, known, 1, MISSPELT_SIMILARITY)), None)


def ignored_variables(known: Collection[str], ended: Mapping[str, str]) -> list[str]:
    """A sentence for each variable of the environment that was a setting, or resembles the name of a setting."""
    faults = []
    for name in (name.removeprefix(PREFIX).lower() for name in os.environ if name.startswith(PREFIX)):
        if name in ended:
            fault = f"is not a setting any more and is ignored: {ended[name]}"
        elif name not in known and (near := misspelt(name, known)):
            fault = f"is not a setting and is ignored; did you mean {PREFIX}{near.upper()}?"
        else:
            continue
        faults.append(f"{PREFIX}{name.upper()} {fault}")
    return faults


def flag_error(message: str, known: Collection[str], ended: Mapping[str, str]) -> str:
    """The message of argparse about the flags; for an unknown flag, with the most similar known one, or the reason why
    it has ended.
    """
    message = message.removeprefix("error parsing CLI: ")
    flag = message.removeprefix("unrecognized arguments: ").split()[0].partition("=")[0]
    if flag == message.split()[0] or not flag.startswith("--"):
        return message
    name = flag.removeprefix("--").replace("-", "_")
    if why := ended.get(name):
        return f"{flag} is not an option any more: {why}"
    near = misspelt(name, known)
    return f"{flag} is not an option" + (f"; did you mean --{near.replace('_', '-')}?" if near else "")


class ServiceSettings(BaseSettings):
    """Settings that all services share; each service adds its own in a subclass."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        extra="ignore",
        frozen=True,
        str_strip_whitespace=True,  # a key or address that was read from a file may have its line end
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
    )

    host: str = Field("127.0.0.1", description="Address that servers of this process listen on.")
    advertise_host: str = Field("", description="Address at which others reach this process; empty: same as host.")
    nats_url: str = Field(
        "nats://127.0.0.1:4222",
        description="NATS server with JetStream (several of a cluster: with commas), with user and password.",
    )
    nats_replicas: int = Field(
        1, ge=1, le=5, description="Servers of a NATS cluster that keep each stream; set the same everywhere."
    )
    nats_prefix: str = Field(
        "", description="Prefix of NATS subjects and streams, so that installs can share a server."
    )
    ready_file: Path | None = Field(None, description="File with this process's addresses as JSON, while it serves.")
    watchdog_s: float = Field(
        20.0, ge=0, description="A process whose event loop stands still this long ends, to be started again; 0: never."
    )
    grace_s: float = Field(
        15.0,
        ge=0,
        description="Time after SIGTERM in which running streams end or move to another process, before this process"
        " shuts down, which takes a few seconds more. A supervisor should wait 15 s longer than this until it kills.",
    )
    tls_ca_file: Path | None = Field(
        None, description="PEM of the cluster's CA; with the next two, TLS between all processes."
    )
    tls_cert_file: Path | None = Field(
        None, description="PEM of this process's certificate, for torchrelay.internal and its role."
    )
    tls_key_file: Path | None = Field(None, description="PEM of the certificate's key, unencrypted.")
    log_level: str = Field("info", description="debug, info, warning or error.")
    log_format: str = Field("json", description="json, or console for people.")
    trace_file: Path | None = Field(None, description="Append finished spans to this file, one JSON object per line.")
    otlp_endpoint: str = Field("", description="OTLP gRPC endpoint for traces and metrics; empty: none.")
    metrics_port: int = Field(0, description="Port for Prometheus metrics; 0: none.")
    metrics_host: str = Field(
        "127.0.0.1", description="Address that metrics are served on. They name models, and need no key."
    )

    @property
    def advertised_host(self) -> str:
        """The address at which others reach this process."""
        return self.advertise_host or self.host

    @property
    def tls_files(self) -> TlsFiles | None:
        """None: TLS is off. Raises ``TlsUnusable`` when only some of the files are set."""
        ca, cert, key = self.tls_ca_file, self.tls_cert_file, self.tls_key_file
        if ca is not None and cert is not None and key is not None:
            return TlsFiles(ca, cert, key)
        fields = {"tls_ca_file": ca, "tls_cert_file": cert, "tls_key_file": key}
        missing = [f"TORCHRELAY_{name.upper()}" for name, path in fields.items() if path is None]
        if len(missing) == len(fields):
            return None
        raise TlsUnusable(f"TLS needs all three files or none: set {' and '.join(missing)}, or unset the rest")

    @property
    def tls(self) -> Tls | None:
        """The TLS identity of this process, which follows its files; None: TLS is off."""
        files = self.tls_files
        return None if files is None else Tls(files, self.caller)

    caller: ClassVar[Caller | None] = None  # the part that this process plays
    ended: ClassVar[Mapping[str, str]] = {}  # settings of earlier releases, each with what is true instead

    @model_validator(mode="after")
    def _tls_is_usable(self) -> Self:
        if (tls := self.tls) is not None:
            tls.check(self.caller)
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        sources = [init_settings, env_settings]
        if path := os.environ.get(CONFIG_VARIABLE):
            sources.append(ConfigFile(cls, Path(path)))
        return tuple(sources)


S = TypeVar("S", bound=ServiceSettings)


def load_settings(settings_cls: type[S], program: str, args: list[str] | None = None) -> S:
    """Settings from flags (``args``, by default ``sys.argv``), environment and file.

    ``program``: the name in ``--help``. An invalid flag or value ends the process with status 2 and a line per field.
    A variable that looks misspelt, or has ended as a setting, is named on standard error.
    """
    try:
        source: CliSettingsSource[Any] = CliSettingsSource(
            settings_cls,
            cli_prog_name=program,
            cli_parse_args=sys.argv[1:] if args is None else args,
            cli_exit_on_error=False,  # it would print a hundred lines of usage above the one that matters
        )
    except SettingsError as error:
        fault = flag_error(str(error), settings_cls.model_fields, settings_cls.ended)
        print(f"{program}: {fault} ({program} --help lists all)", file=sys.stderr)
        raise SystemExit(2) from error
    for message in ignored_variables(settings_cls.model_fields, settings_cls.ended):
        print(f"{program}: {message}", file=sys.stderr)
    try:
        return settings_cls(**source())
    except ConfigUnusable as error:
        print(f"{program}: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except ValidationError as error:
        for message in setting_errors(error):
            print(f"{program}: {message}", file=sys.stderr)
        raise SystemExit(2) from error


def setting_errors(error: ValidationError) -> list[str]:
    """The faults of the settings, one line per field."""
    lines = []
    for fault in error.errors():
        name = ".".join(str(part) for part in fault["loc"])
        where = f"{name} (TORCHRELAY_{name.upper()}): " if name else ""  # no name: several fields together
        lines.append(where + fault["msg"].removeprefix("Value error, "))
    return lines
