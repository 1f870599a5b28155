from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from joserfc.jwk import RSAKey

from tests.support.oidc_issuer import AUDIENCE, Issuer, running_issuer
from tests.unit.gateway.conftest import AccountingRig
from torchrelay.common.errors import PermissionDenied, Unauthenticated, Unavailable
from torchrelay.gateway.auth import oidc
from torchrelay.gateway.auth.oidc import OidcTokens
from torchrelay.gateway.core import Limits
from torchrelay.gateway.grants import Grant, is_safe_url, parse_grants

GRANTS = parse_grants("groups:sre=operator, email:ann@x.example=admin, groups:staff=viewer, groups:acme=tenant/acme")


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    return sqlite_url


@pytest.fixture(scope="module")
def shared_issuer() -> Iterator[Issuer]:
    with running_issuer() as issuer:
        yield issuer


def tokens_of(parts: AccountingRig, issuer: Issuer) -> OidcTokens:
    return OidcTokens(issuer.url, AUDIENCE, GRANTS, parts.tenants, parts.table_versions)


async def test_first_grant_that_applies_gives_the_role(parts: AccountingRig, shared_issuer: Issuer) -> None:
    tokens = tokens_of(parts, shared_issuer)
    for claims, role, person in (
        ({"groups": ["sre", "staff"], "email": "ann@x.example", "email_verified": True}, "operator", "oidc:ann"),
        ({"email": "ann@x.example", "email_verified": True}, "admin", "oidc:ann"),
        ({"groups": ["other", "staff"], "sub": "bo"}, "viewer", "oidc:bo"),
        ({"groups": "staff"}, "viewer", "oidc:ann"),
    ):
        caller = await tokens.authenticate(shared_issuer.token(**claims))
        assert (caller.is_admin, caller.role, caller.actor) == (True, role, person)
    refused: list[dict[str, Any]] = [{"groups": ["none"]}, {"email": "ann@x.example"}]
    for held in (*refused, {"email": "ann@x.example", "email_verified": "no"}):
        with pytest.raises(PermissionDenied, match="oidc:ann has no role here"):
            await tokens.authenticate(shared_issuer.token(**held))


async def test_person_of_a_tenant_has_its_limits(parts: AccountingRig, shared_issuer: Issuer) -> None:
    tokens = tokens_of(parts, shared_issuer)
    await parts.tenants.change("acme", {"tokens_per_minute": 7})
    caller = await tokens.authenticate(shared_issuer.token(groups=["acme"]))
    assert (caller.tenant_id, caller.is_admin, caller.tenant_limits) == (
        parts.acme.tenant_id,
        False,
        Limits(tokens_per_minute=7),
    )
    other = await tokens.authenticate(shared_issuer.token(groups=["acme"], sub="bo"))
    assert caller.key_id != other.key_id and caller.key_id.startswith("oidc-")
    await parts.tenants.change("acme", {"suspended_unix_us": 1})
    with pytest.raises(PermissionDenied, match="suspended"):
        await tokens.authenticate(shared_issuer.token(groups=["acme"]))


@pytest.mark.parametrize(
    "claims",
    [
        {"aud": "another"},
        {"iss": "https://evil.example"},
        {"exp": int(time.time()) - 3600},
        {"nbf": int(time.time()) + 3600},
        {"sub": None},
        {"exp": None},
    ],
    ids=("audience", "issuer", "expired", "not yet", "no subject", "no expiry"),
)
async def test_token_that_is_not_valid_is_refused(
    parts: AccountingRig, shared_issuer: Issuer, claims: dict[str, Any]
) -> None:
    with pytest.raises(Unauthenticated, match="the token is not valid"):
        await tokens_of(parts, shared_issuer).authenticate(shared_issuer.token(groups=["sre"], **claims))


async def test_forged_tokens_are_refused(parts: AccountingRig, shared_issuer: Issuer) -> None:
    tokens, forger = (
        tokens_of(parts, shared_issuer),
        RSAKey.generate_key(2048, {"kid": shared_issuer.keys[0].kid or ""}),
    )
    head, body, _ = shared_issuer.token(groups=["sre"]).split(".")
    for forged in (shared_issuer.token(forger, groups=["sre"]), f"{head}.{body}.", "eyJhbGciOiJub25lIn0.e30.", "a.b.c"):
        with pytest.raises(Unauthenticated):
            await tokens.authenticate(forged)
    with pytest.raises(Unauthenticated, match="longer than"):
        await tokens.authenticate(f"{'x' * 20_000}.y.z")


async def test_keys_are_fetched_again_when_the_issuer_rotates(
    parts: AccountingRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_issuer() as issuer:
        tokens = tokens_of(parts, issuer)
        for _ in range(3):
            await tokens.authenticate(issuer.token(groups=["sre"]))
        assert issuer.num_fetched == 1
        issuer.rotate()
        with pytest.raises(Unauthenticated):  # fetched a moment ago
            await tokens.authenticate(issuer.token(groups=["sre"]))
        monkeypatch.setattr(oidc, "_KEYS_HOLD_LEAST_S", 0.0)
        await tokens.authenticate(issuer.token(groups=["sre"]))
        assert issuer.num_fetched == 2
        last = issuer.token(groups=["sre"])
    monkeypatch.setattr(oidc, "_KEYS_HOLD_S", 0.0)
    await tokens.authenticate(last)  # the issuer is away, and its keys are known
    with pytest.raises(Unavailable):
        await tokens_of(parts, issuer).authenticate(last)


async def test_issuer_may_end_with_a_slash_and_give_faulty_keys(
    parts: AccountingRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_issuer() as issuer:
        tokens = tokens_of(parts, issuer)
        issuer.url += "/"
        await tokens.authenticate(issuer.token(groups=["sre"]))
        monkeypatch.setattr(oidc, "_KEYS_HOLD_S", 0.0)
        for faulty in ({"keys": [{"kty": "RSA"}]}, {"nothing": 1}):
            issuer.faulty_keys = faulty
            await tokens.authenticate(issuer.token(groups=["sre"]))  # by the keys that are known
        with pytest.raises(Unavailable):
            await tokens_of(parts, issuer).authenticate(issuer.token(groups=["sre"]))


def test_grants_are_parsed_and_refused_by_their_text() -> None:
    assert GRANTS[0] == Grant("groups", "sre", "operator", "")
    assert GRANTS[3] == Grant("groups", "acme", None, "acme")
    assert parse_grants("a:b:c=d=viewer") == (Grant("a", "b:c=d", "viewer", ""),)
    for wrong in ("groups=admin", "groups:a=root", "groups:a=tenant/", ":a=admin", "groups:=admin"):
        with pytest.raises(ValueError, match="must be rules CLAIM:VALUE=ROLE"):
            parse_grants(wrong)


def test_only_safe_addresses_are_asked() -> None:
    assert is_safe_url("https://idp.example") and is_safe_url("http://127.0.0.1:8")
    assert not any(map(is_safe_url, ("http://idp.example", "file:///etc/passwd", "ftp://127.0.0.1")))
