"""Rules that give the owners of OIDC tokens a role or a tenant. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast, get_args
from urllib.parse import urlsplit

from torchrelay.gateway.core import Role

_TENANT: Final = "tenant/"


@dataclass(frozen=True, slots=True)
class Grant:
    """A rule: people whose ``claim`` is or contains ``value`` get a role, or act for a tenant."""

    claim: str
    value: str
    role: Role | None
    tenant: str

    def applies_to(self, claims: Mapping[str, Any]) -> bool:
        if self.claim == "email" and claims.get("email_verified") is not True:
            return False  # the issuer lets people name any address
        held = claims.get(self.claim)
        return self.value in held if isinstance(held, list) else held == self.value


def parse_grants(text: str) -> tuple[Grant, ...]:
    """``groups:sre=operator, email:ann@x.example=admin, groups:acme=tenant/acme``. Raises ``ValueError``."""
    grants = []
    for rule in filter(None, map(str.strip, text.split(","))):
        condition, equals, given = rule.rpartition("=")
        claim, colon, value = condition.partition(":")
        is_tenant, is_role = given.startswith(_TENANT) and given != _TENANT, given in get_args(Role)
        if not (equals and colon and claim and value and (is_tenant or is_role)):
            raise ValueError(
                "must be rules CLAIM:VALUE=ROLE with commas, where ROLE is admin, operator, viewer or tenant/NAME; "
                f"not {rule!r}"
            )
        role, tenant = (None, given.removeprefix(_TENANT)) if is_tenant else (cast(Role, given), "")
        grants.append(Grant(claim, value, role, tenant))
    return tuple(grants)


def is_safe_url(url: str) -> bool:
    """Whether nobody on the way can change what the address gives."""
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in ("127.0.0.1", "::1", "localhost"))
