"""The gateway and the key of a command."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from torchrelay.cli.api.client import GatewayClient, clean_key
from torchrelay.cli.errors import CliError
from torchrelay.cli.home import Home
from torchrelay.common.host.labels import checked_labels
from torchrelay.gateway.core import ENGINE_FORMS, checked_target_s

HomeOption = Annotated[
    Path | None,
    typer.Option("--home", envvar="TORCHRELAY_HOME", help="Platform's folder; default: .torchrelay.", metavar="DIR"),
]
UrlOption = Annotated[
    str | None,
    typer.Option("--url", envvar="TORCHRELAY_API_URL", help="Gateway; the local platform's by default.", metavar="URL"),
]
KeyOption = Annotated[
    str | None,
    typer.Option("--key", help="API key; default: $TORCHRELAY_API_KEY, or the one `key create` saved.", metavar="KEY"),
]
AdminKeyOption = Annotated[
    str | None,
    typer.Option("--key", help="Admin key; default: the local platform's, or $TORCHRELAY_API_KEY.", metavar="KEY"),
]
IdleTimeoutOption = Annotated[
    float | None, typer.Option(min=0, max=30 * 86400, help="Idle seconds before scaling to zero; 0: default.")
]
MaxInstancesOption = Annotated[int | None, typer.Option(min=0, help="Maximum instances per role; 0: default.")]
MaxConcurrencyOption = Annotated[
    int | None, typer.Option(min=0, max=10_000, help="Requests that an instance runs at once; 0: no limit; admin.")
]
ThreadsOption = Annotated[
    int | None, typer.Option(min=0, max=4096, help="Threads of an instance on a CPU; 0: no limit; admin.")
]


def _kv_share(share: float | None) -> float | None:
    if share is not None and not 0 < share <= 1:
        raise typer.BadParameter(f"{share:g} is not a share: use more than 0 and at most 1, which is no limit")
    return share


KvShareOption = Annotated[
    float | None,
    typer.Option(help="Part of an instance's KV pool that its requests hold; 1: all of it; admin.", callback=_kv_share),
]


def _hosts(labels: list[str] | None) -> list[str] | None:
    """Checks the labels, unless they are ``none``."""
    try:
        return labels if labels and "none" in labels else checked_labels(labels or []) or None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


HostsOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Label of the hosts of its instances; several: all of them; none: any host; admin.",
        metavar="KEY=VALUE",
        callback=_hosts,
    ),
]


def _engine(engine: str | None) -> str | None:
    if engine is not None and re.match(ENGINE_FORMS, engine) is None:
        raise typer.BadParameter(f"{engine!r} is not an engine: use auto, torchrelay, vllm, or vllm:N on N devices")
    return engine


EngineOption = Annotated[
    str | None,
    typer.Option(
        help="Engine of its instances: torchrelay, vllm, vllm:N on N devices, or auto, at first: any on one device.",
        callback=_engine,
    ),
]
MinInstancesOption = Annotated[int | None, typer.Option(min=0, help="Instances per role that stay loaded; admin.")]
ScheduleOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Minimum at times, as 'mon-fri 08:00-18:00 Europe/Berlin = 2'; several; none: no schedule; admin.",
        metavar="ENTRY",
    ),
]


def _target(seconds: float | None) -> float | None:
    try:
        return None if seconds is None else checked_target_s(seconds)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


InteractiveTtftOption = Annotated[
    float | None,
    typer.Option(
        callback=_target,
        help="Target of requests with service_tier priority: seconds to the first token; 0: default; admin.",
    ),
]
StandardTtftOption = Annotated[
    float | None, typer.Option(callback=_target, help="The same of requests without service_tier; 0: default; admin.")
]
BatchTtftOption = Annotated[
    float | None, typer.Option(callback=_target, help="The same of requests with service_tier flex; 0: default; admin.")
]
TbtTargetOption = Annotated[
    float | None, typer.Option(callback=_target, help="Target between tokens; 0: default; admin.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

_NEED_KEY = "pass one with --key or TORCHRELAY_API_KEY"


@dataclass(frozen=True, slots=True)
class Access:
    """A gateway and a key for it; ``home`` is set for the local platform's gateway."""

    url: str
    key: str
    home: Home | None = None

    @property
    def is_admin(self) -> bool:
        return self.key.startswith("tra-")

    def client(self, waits: bool = True) -> GatewayClient:
        """``waits``: for a gateway that `up` restarts."""
        tenant = self.home.tenant_of(self.key) if self.home else ""
        return GatewayClient(self.url, self.key, lambda: waits and self._is_running_here(), tenant=tenant)

    def may_return(self) -> bool:
        """Whether a gateway that does not answer may do so again: a local one only while its `up` runs."""
        return self.home is None or self._is_running_here()

    def _is_running_here(self) -> bool:
        return self.home is not None and self.home.running_pid() is not None

    def require_tenant(self, what: str) -> None:
        """Raises ``CliError`` when the key is an admin key."""
        if self.is_admin:
            raise CliError(f"{what} needs a tenant's key", "create one: torchrelay key create --tenant NAME")

    def require_admin(self, what: str) -> None:
        """Raises ``CliError`` when the key is a tenant's."""
        if not self.is_admin:
            file = shlex.quote(f"{self.home.path if self.home else 'HOME'}/admin.key")
            raise CliError(f"{what} requires the admin key", f'pass --key "$(cat {file})"')


def tenant_access(home: Path | None, url: str | None, key: str | None, model: str = "") -> Access:
    """Uses a tenant's key if there is one, otherwise the local admin key: for a ``model`` TENANT/NAME the key that is
    kept of its tenant. Raises ``CliError``.
    """
    gateway, local = _gateway(home, url)
    key = key or os.environ.get("TORCHRELAY_API_KEY")
    if local is not None:
        tenant, _, name = model.partition("/")
        key = key or (local.kept_key(tenant) if name else None) or local.saved_key() or local.admin_key()
    if not key:
        raise CliError(f"no API key for {gateway}", _NEED_KEY)
    return Access(gateway, clean_key(key), local)


def admin_access(home: Path | None, url: str | None, key: str | None) -> Access:
    """Uses the local platform's admin key unless another is given. Raises ``CliError``."""
    gateway, local = _gateway(home, url)
    key = key or (local.admin_key() if local else os.environ.get("TORCHRELAY_API_KEY"))
    if not key:
        raise CliError(f"no admin key for {gateway}", _NEED_KEY)
    return Access(gateway, clean_key(key), local)


def _gateway(home: Path | None, url: str | None) -> tuple[str, Home | None]:
    """The gateway and, if it is the local one, its home: local keys are never sent to another gateway."""
    local = Home.at(home)
    if not url:
        return local.endpoints()["http"], local
    if not url.startswith(("http://", "https://")):
        raise CliError(f"--url: {url!r} is not a valid address", "write it as http://host:port")
    url = url.rstrip("/").removesuffix("/v1")
    is_local = local.running_pid() is not None and local.endpoints()["http"] == url
    return url, local if is_local else None
