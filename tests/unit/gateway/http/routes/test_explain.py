from __future__ import annotations

from tests.unit.gateway.http.conftest import RestRig
from tests.unit.gateway.http.routes.test_uploads import published


async def test_only_a_tenants_own_requests_are_explained(rig: RestRig) -> None:
    await rig.parts.ledger.open(rig.parts.request("req-1"))
    await rig.parts.ledger.open(rig.parts.request("req-old"))
    said = (await rig.acme.get("/v1/requests/req-1/explain")).json()
    assert said["phases"] == [
        {"name": "queue", "begin_unix_us": 1, "end_unix_us": 2, "where": "scheduler", "detail": "cold"}
    ]
    assert said["decisions"][0]["reason"] == "first request"
    assert (await rig.admin.get("/v1/requests/req-1/explain")).json() == said
    assert (await rig.acme.get("/v1/requests/req-old/explain")).status_code == 404
    async with await rig.client_of("zoo") as zoo:
        theirs = await zoo.get("/v1/requests/req-1/explain")
        absent = await zoo.get("/v1/requests/req-x/explain")
        assert (theirs.status_code, absent.status_code) == (404, 404)
        assert theirs.text.replace("req-1", "req-x") == absent.text


async def test_only_a_tenants_own_models_are_explained(rig: RestRig) -> None:
    await published(rig.acme)
    explained = (await rig.acme.get("/v1/explain?model=glossary")).json()
    assert (explained["id"], explained["worth"]) == ("acme/glossary", [{"label": "bid", "text": "of acme/glossary"}])
    assert explained["decisions"][0]["reason"] == "first request"
    assert (await rig.admin.get("/v1/explain?model=acme/glossary")).json() == explained
    async with await rig.client_of("zoo") as zoo:
        assert (await zoo.get("/v1/explain?model=acme/glossary")).status_code == 404


async def test_admin_gets_the_newest_events_since_a_time(rig: RestRig) -> None:
    listed = (await rig.admin.get("/v1/events?since=1970-01-02&limit=2")).json()["data"]
    assert [event["sequence"] for event in listed] == [2, 3]
    event = {
        "at_unix_us": 3,
        "kind": "relay.started",
        "model": "",
        "reason": "",
        "urgency": "event 3 since 86400000000",
    }
    assert listed[-1] == {"sequence": 3, **event}


async def test_events_are_for_the_admin_only(rig: RestRig) -> None:
    assert (await rig.acme.get("/v1/events?since=2026-01-01")).status_code == 403


async def test_unreadable_time_is_refused(rig: RestRig) -> None:
    assert (await rig.admin.get("/v1/events?since=yesterday")).status_code == 400
