"""OIDC: bearer tokens of an issuer, whose claims give people a role or a tenant.

The issuer's keys come from its discovery document, and are fetched again after ten minutes or when a token names a key
that is not among them. ``joserfc`` verifies the tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import urllib.request
from collections.abc import Mapping
from typing import Any, Final, cast

from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from torchrelay.common.errors import PermissionDenied, Unauthenticated, Unavailable
from torchrelay.common.process.telemetry import get_logger
from torchrelay.gateway.auth.tenants import Tenants
from torchrelay.gateway.core import URGENCY, Principal, ServiceClass
from torchrelay.gateway.grants import Grant, is_safe_url
from torchrelay.gateway.sql.table_versions import TableVersions
from torchrelay.gateway.sql.versioned_cache import VersionedCache

log = get_logger(__name__)
_ALGORITHMS: Final = ["RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA"]
_MAX_TOKEN_CHARS: Final = 16_384
_MAX_ANSWER_BYTES: Final = 1 << 20
_KEYS_HOLD_S, _KEYS_HOLD_LEAST_S, _FETCH_S = 600.0, 10.0, 5.0
_LEEWAY_S: Final = 30  # between the clocks of the issuer and the gateway


class OidcTokens:
    """Verifies tokens of one issuer for one audience; the first grant that applies counts."""

    def __init__(
        self, issuer: str, audience: str, grants: tuple[Grant, ...], tenants: Tenants, versions: TableVersions
    ) -> None:
        self._issuer = issuer.rstrip("/")
        self._audience = audience
        self._grants = grants
        self._tenants = tenants
        self._versions = versions
        self._cache: VersionedCache[str, Principal] = VersionedCache(1000)  # by tenant and key id
        self._issued_by, self._keys = "", cast(Any, None)  # the latter: joserfc's KeySet
        self._fetched_at_s = float("-inf")
        self._fetching = asyncio.Lock()

    async def authenticate(self, token: str) -> Principal:
        """The person of a token.

        Raises ``Unauthenticated`` for a token that is not valid, ``PermissionDenied`` for a person without a grant,
        and ``Unavailable`` if the issuer's keys cannot be had.
        """
        if len(token) > _MAX_TOKEN_CHARS:
            raise Unauthenticated(f"the token is longer than {_MAX_TOKEN_CHARS:,} characters")
        claims = await self._claims(token)
        subject = str(claims.get("sub", ""))
        person = f"oidc:{subject}"[:200]
        grant = next((each for each in self._grants if each.applies_to(claims)), None)
        if grant is None:
            raise PermissionDenied(f"{person} has no role here: the setting oidc_grants has no rule for its claims")
        # A key id of its own, by which usage and limits tell people apart.
        key_id = f"oidc-{hashlib.blake2b(subject.encode(), digest_size=8).hexdigest()}"
        if grant.role is not None:
            return Principal("", "", key_id, is_admin=True, role=grant.role, person=person)
        return await self._of_tenant(grant.tenant, key_id, person)

    async def _of_tenant(self, name: str, key_id: str, person: str) -> Principal:
        version = await self._versions.confirmed("keys")
        cached = self._cache.get(f"{name} {key_id}", version)
        if cached is not None:
            return cached
        tenant = await self._tenants.by_name(name)
        if tenant.is_suspended or tenant.is_deleted:
            raise PermissionDenied(f"the tenant {name} is suspended; ask the platform's operator")
        top = ServiceClass[(tenant.service_class or "interactive").upper()]
        principal = Principal(
            tenant.tenant_id,
            name,
            key_id,
            person=person,
            tenant_limits=tenant.limits,
            service_class=min(top, ServiceClass.STANDARD, key=URGENCY.index),
            top_class=top,
        )
        self._cache.put(f"{name} {key_id}", version, principal)
        return principal

    async def _claims(self, token: str) -> Mapping[str, Any]:
        for hold_s in (_KEYS_HOLD_S, _KEYS_HOLD_LEAST_S):  # the second time with newer keys, if those are old enough
            issuer, keys = await self._issuers_keys(hold_s)
            try:
                claims: Mapping[str, Any] = jwt.decode(token, keys, algorithms=_ALGORITHMS).claims
                _registry(issuer, self._audience).validate(dict(claims))
            except (JoseError, ValueError) as error:
                why = getattr(error, "description", "") or error
                refused = Unauthenticated(f"the token is not valid: {why}")
                continue
            return claims
        raise refused

    async def _issuers_keys(self, hold_s: float) -> tuple[str, Any]:
        """The issuer's name, as its tokens have it, and its keys; after a failure the last ones."""
        if time.monotonic() - self._fetched_at_s >= hold_s:
            async with self._fetching:
                if time.monotonic() - self._fetched_at_s >= hold_s:
                    try:
                        self._issued_by, self._keys = await asyncio.to_thread(_fetch_keys, self._issuer)
                    except (OSError, ValueError, KeyError, JoseError) as error:
                        log.warning("oidc_keys_unknown", issuer=self._issuer, error=repr(error)[:200])
                    self._fetched_at_s = time.monotonic()
        if self._keys is None:
            raise Unavailable("the issuer of OIDC tokens does not give its keys", retry_after_s=_KEYS_HOLD_LEAST_S)
        return self._issued_by, self._keys


def _registry(issuer: str, audience: str) -> Any:
    return jwt.JWTClaimsRegistry(
        leeway=_LEEWAY_S,
        iss={"essential": True, "value": issuer},
        aud={"essential": True, "value": audience},
        exp={"essential": True},
        sub={"essential": True},
    )


def _fetch_keys(issuer: str) -> tuple[str, Any]:
    """The issuer's name by its discovery document, and its keys."""
    document = _fetch_json(f"{issuer}/.well-known/openid-configuration")
    named = str(document["issuer"])
    if named.rstrip("/") != issuer:
        raise ValueError(f"the discovery document is of the issuer {named!r}")
    return named, KeySet.import_key_set(cast(Any, _fetch_json(str(document["jwks_uri"]))))


def _fetch_json(url: str) -> dict[str, Any]:
    if not is_safe_url(url):
        raise ValueError(f"{url!r} must begin with https://")
    with urllib.request.urlopen(url, timeout=_FETCH_S) as answer:
        document = json.loads(answer.read(_MAX_ANSWER_BYTES))
    if not isinstance(document, dict):
        raise ValueError(f"{url} has no JSON object")
    return document
