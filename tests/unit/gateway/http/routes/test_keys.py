from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from tests.unit.gateway.http.conftest import RestRig, client
from tests.unit.gateway.http.routes.test_uploads import WEIGHTS, begun, declared, published
from torchrelay.common.clock import now_unix_us

LIMITS = {
    "requests_per_minute": 60,
    "tokens_per_minute": 10_000,
    "concurrent_requests": 3,
    "budget_nano": 5_000_000_000,
    "budget_period": "month",
}
NO_LIMITS = dict.fromkeys(LIMITS)


async def made(rig: RestRig, **settings: Any) -> dict[str, Any]:
    answer = await rig.acme.post("/v1/keys", json=settings)
    assert answer.status_code == 201, answer.text
    key: dict[str, Any] = answer.json()
    return key


async def status(rig: RestRig, key: str) -> int:
    async with client(rig.url, key) as caller:
        return (await caller.get("/v1/models")).status_code


async def test_key_shows_and_changes_what_it_may(rig: RestRig) -> None:
    expires = datetime.now(UTC).replace(microsecond=0) + timedelta(days=3)
    key = await made(rig, name="laptop", **LIMITS, expires_at=expires.isoformat())
    shown = {field: key[field] for field in LIMITS}
    assert (shown, key["may_manage_keys"], key["paused"], key["models"]) == (LIMITS, False, False, None)
    assert key["expires_at"] == expires.isoformat()
    change = {"requests_per_minute": None, "budget_nano": None, "budget_period": None, "expires_at": None, "name": "x"}
    changed = (await rig.acme.patch(f"/v1/keys/{key['id']}", json=change)).json()
    assert changed == {name: value for name, value in {**key, **change}.items() if name != "key"}
    cleared = (await rig.acme.patch(f"/v1/keys/{key['id']}", json=NO_LIMITS)).json()
    assert cleared["may_manage_keys"], "as before it had limits"
    plain = (await rig.acme.patch(f"/v1/keys/{key['id']}", json={"may_manage_keys": False})).json()
    assert not plain["may_manage_keys"]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"requests_per_minute": 5, "may_manage_keys": True}, "may_manage_keys"),
        ({"service_class": "batch", "may_manage_keys": True}, "may_manage_keys"),
        ({"expires_at": "2100-01-01", "may_manage_keys": True}, "may_manage_keys"),
        ({"budget_period": "day"}, "budget_period"),
        ({"budget_nano": 5, "budget_period": "year"}, "budget_period"),
        ({"expires_at": "2020-01-01"}, "expires_at"),
        ({"expires_at": "tomorrow"}, "expires_at"),
        ({"models": []}, "models"),
        ({"models": ["absent"]}, "model"),
        ({"may_manage_keys": None}, "may_manage_keys"),
        ({"concurrent_requests": 0}, "concurrent_requests"),
    ],
)
async def test_contradictions_and_unknown_names_are_refused(rig: RestRig, settings: dict[str, Any], field: str) -> None:
    for answer in (
        await rig.acme.post("/v1/keys", json=settings),
        await rig.acme.patch(f"/v1/keys/{(await made(rig))['id']}", json=settings),
    ):
        assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == field


async def test_limited_key_manages_itself_alone(rig: RestRig) -> None:
    other, key = await made(rig), await made(rig, requests_per_minute=1000)
    async with client(rig.url, key["key"]) as caller:
        refused = [
            await caller.post("/v1/keys", json={}),
            await caller.patch(f"/v1/keys/{key['id']}", json={"requests_per_minute": None}),
            await caller.delete(f"/v1/keys/{other['id']}"),
            await caller.post(f"/v1/keys/{other['id']}/rotate", json={}),
        ]
        assert [each.status_code for each in refused] == [403] * 4
        assert "may not manage keys" in refused[0].text
        assert [each["id"] for each in (await caller.get("/v1/keys")).json()["data"]] == [key["id"]]
        rotated = (await caller.post(f"/v1/keys/{key['id']}/rotate", json={"overlap_s": 0})).json()
        assert await status(rig, key["key"]) == 401
    async with client(rig.url, rotated["key"]) as caller:
        assert (await caller.delete(f"/v1/keys/{key['id']}")).status_code == 204
    assert await status(rig, rotated["key"]) == 401


async def test_rotated_key_has_two_secrets_until_the_overlap_ends(
    rig: RestRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await made(rig)
    rotated = (await rig.acme.post(f"/v1/keys/{key['id']}/rotate", json={"overlap_s": 60})).json()
    assert rotated["id"] == key["id"] and rotated["key"] != key["key"]
    assert [await status(rig, each) for each in (key["key"], rotated["key"])] == [200, 200]
    async with client(rig.url, key["key"]) as old:  # which a thief may have
        for answer in (await old.post(f"/v1/keys/{key['id']}/rotate", json={}), await old.post("/v1/keys", json={})):
            assert answer.status_code == 403
    later_us = now_unix_us() + 61_000_000
    monkeypatch.setattr("torchrelay.gateway.auth.api_keys.now_unix_us", lambda: later_us)
    assert [await status(rig, each) for each in (key["key"], rotated["key"])] == [401, 200]


async def test_paused_and_expired_keys_are_refused_by_their_reason(
    rig: RestRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await made(rig, expires_at=(datetime.now(UTC) + timedelta(hours=1)).isoformat())
    for paused, expected in ((True, 403), (False, 200)):
        await rig.acme.patch(f"/v1/keys/{key['id']}", json={"paused": paused})
        async with client(rig.url, key["key"]) as caller:
            answer = await caller.get("/v1/models")
        assert answer.status_code == expected and ("paused" in answer.text) is paused
    later_us = now_unix_us() + 3_600_000_000
    monkeypatch.setattr("torchrelay.gateway.auth.api_keys.now_unix_us", lambda: later_us)
    async with client(rig.url, key["key"]) as caller:
        answer = await caller.get("/v1/models")
    assert answer.status_code == 401 and "expired at 20" in answer.text


async def test_key_of_models_calls_and_lists_these_alone(rig: RestRig) -> None:
    await published(rig.acme)
    await published(rig.acme, "atlas")
    assert (await rig.acme.put("/v1/models/atlas/aliases", json={"aliases": ["maps"]})).status_code == 200
    key = await made(rig, models=["maps"])
    assert key["models"] == ["acme/maps"] and not key["may_manage_keys"]
    async with client(rig.url, key["key"]) as caller:
        listed = {each["id"] for each in (await caller.get("/v1/models")).json()["data"]}
        assert listed == {"acme/atlas", "maps"}
        assert (await caller.get("/v1/models/atlas")).status_code == 200
        refused = await caller.get("/v1/models/glossary")
        assert refused.status_code == 403 and "its models: acme/maps" in refused.text
        assert (await caller.delete("/v1/models/glossary")).status_code == 403
        for model in ("glossary", "new"):
            refused = await caller.post("/v1/uploads", json={"model": model, "files": declared({"w": WEIGHTS})})
            assert refused.status_code == 403, refused.text
        upload = await begun(rig.acme, "glossary")
        assert (await caller.post(f"/v1/uploads/{upload['id']}/commit", json={})).status_code == 403


async def test_key_tells_what_it_and_its_tenant_have_left(rig: RestRig) -> None:
    tenant = await rig.admin.patch("/v1/tenants/acme", json={"tokens_per_minute": 900, "concurrent_requests": 7})
    assert tenant.json()["tokens_per_minute"] == 900
    key = await made(rig, budget_nano=9_000, budget_period="day", requests_per_minute=30)
    async with client(rig.url, key["key"]) as caller:
        mine = (await caller.get("/v1/keys/me")).json()
    assert (mine["id"], mine["requests_left"], mine["left_nano"], mine["spent_nano"]) == (key["id"], 30, 9_000, 0)
    begin, end = (datetime.fromisoformat(mine[name]) for name in ("period_begin", "period_end"))
    assert end - begin == timedelta(days=1) and begin <= datetime.now(UTC) < end
    of_tenant = mine["limits_of_tenant"]
    assert (of_tenant["name"], of_tenant["tokens_left"], of_tenant["requests_running"]) == ("acme", 900, 0)
    assert (await rig.admin.get("/v1/keys/me")).json()["tenant"] is None


async def test_last_use_is_written(rig: RestRig) -> None:
    key = await made(rig)
    assert key["last_used_at"] is None
    assert await status(rig, key["key"]) == 200
    await rig.parts.keys.write_last_uses()
    listed = {each["id"]: each for each in (await rig.acme.get("/v1/keys")).json()["data"]}
    used = datetime.fromisoformat(listed[key["id"]]["last_used_at"])
    assert abs((datetime.now(UTC) - used).total_seconds()) < 60


async def test_admin_changes_keys_of_every_tenant(rig: RestRig) -> None:
    key = await made(rig)
    other = await rig.client_of("zoo")
    async with other:
        refused: httpx.Response = await other.patch(f"/v1/keys/{key['id']}", json={"paused": True})
    assert refused.status_code == 404
    assert (await rig.admin.patch(f"/v1/keys/{key['id']}", json={"paused": True})).json()["paused"]
    assert await status(rig, key["key"]) == 403
