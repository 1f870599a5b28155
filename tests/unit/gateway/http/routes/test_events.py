from __future__ import annotations

from tests.unit.gateway.http.conftest import RestRig


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
