"""Lists of requests, explanations of requests and models, and the history of events."""

from __future__ import annotations

from dataclasses import replace

import pytest
from google.protobuf.json_format import ParseDict

from tests.unit.gateway.http.conftest import RestRig
from tests.unit.gateway.http.routes.test_uploads import published
from torchrelay.common.clock import now_unix_us
from torchrelay.control.v1.scheduler_pb2 import ClusterView
from torchrelay.gateway.core import ChoiceUsage, FinishCause


@pytest.fixture
async def used(rig: RestRig) -> RestRig:
    """A request of acme that ended, and two that run."""
    for number, name in enumerate(("req-1", "req-2", "req-3")):
        await rig.parts.ledger.open(replace(rig.parts.request(name), opened_unix_us=now_unix_us() + number))
    await rig.parts.ledger.settle("req-1", [ChoiceUsage("req-1", 0, 10, 4, 30, FinishCause.LENGTH)])
    return rig


async def test_requests_are_listed_for_their_tenant_and_the_admin(used: RestRig) -> None:
    reply = (await used.acme.get("/v1/requests")).json()
    assert [(each["id"], each["status"]) for each in reply["data"]] == [
        ("req-3", "running"),
        ("req-2", "running"),
        ("req-1", "ok"),
    ]
    ended = dict(reply["data"][-1])
    assert ended.pop("ended_unix_us") >= ended.pop("opened_unix_us") > 1
    assert ended == {
        "id": "req-1",
        "object": "request",
        "model": "acme/glossary",
        "key": "key-1",
        "status": "ok",
        "causes": ["length"],
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "completion_tokens": 30,
        "cost_nano": 6 * 100 + 4 * 25 + 30 * 400,
        "cost": "0.000012700",
    }
    for query in ("", "?tenant=acme", "?model=acme/glossary", "?tenant=acme&model=glossary&key=key-1"):
        assert (await used.admin.get(f"/v1/requests{query}")).json() == reply
    assert (await used.acme.get("/v1/requests/req-1")).json() == (await used.admin.get("/v1/requests/req-1")).json()


@pytest.mark.parametrize(
    ("query", "pages"),
    [
        ("", [("req-3", "running"), ("req-2", "running"), ("req-2", "ok"), ("req-3", "ok"), ("req-1", "ok")]),
        ("status=running&", [("req-3", "running"), ("req-2", "running")]),
    ],
)
async def test_pages_skip_no_request_when_the_last_listed_ends(
    used: RestRig, query: str, pages: list[tuple[str, str]]
) -> None:
    """Each request that runs ends before the page after it is read."""
    listed: list[tuple[str, str]] = []
    after, has_more = "", True
    while has_more:
        reply = (await used.acme.get(f"/v1/requests?{query}limit=1{after}")).json()
        (last,), has_more = reply["data"], reply["has_more"]
        name, status = last["id"], last["status"]
        listed.append((name, status))
        if status == "running":
            await used.parts.ledger.settle(name, [ChoiceUsage(name, 0, 10, 4, 30, FinishCause.LENGTH)])
        after = f"&after_id={name}&after_status={status}"
    assert listed == pages


async def test_filters_select(used: RestRig) -> None:
    for query, names in {
        "status=running": ["req-3", "req-2"],
        "status=ok": ["req-1"],
        "status=error": [],
        "model=glossary&status=ok": ["req-1"],
        "model=other": [],
        "status=ok&to=2026-01-01": [],
    }.items():
        assert [each["id"] for each in (await used.acme.get(f"/v1/requests?{query}")).json()["data"]] == names, query


async def test_tenant_sees_nothing_of_another(used: RestRig) -> None:
    async with await used.client_of("zoo") as zoo:
        assert (await zoo.get("/v1/requests")).json() == {"object": "list", "data": [], "has_more": False}
        assert (await zoo.get("/v1/requests?model=acme/glossary")).json()["data"] == []
        theirs, absent = await zoo.get("/v1/requests/req-1"), await zoo.get("/v1/requests/req-x")
        assert (theirs.status_code, theirs.text.replace("req-1", "req-x")) == (404, absent.text)
        after = await zoo.get("/v1/requests?after_id=req-1")
        assert (after.status_code, after.json()["error"]["param"]) == (400, "after_id")
        assert (await zoo.get("/v1/requests?tenant=acme")).status_code == 403


async def test_wrong_parameter_is_named(used: RestRig) -> None:
    for query, param in {
        "status=late": "status",
        "limit=0": "limit",
        "limit=501": "limit",
        "limit=x": "limit",
        "from=yesterday": "from",
        "to=x": "to",
        "after_id=req-x": "after_id",
        "after_id=req-1&after_status=late": "after_status",
        "page=2": "page",
    }.items():
        refused = await used.acme.get(f"/v1/requests?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    short = await used.admin.get("/v1/requests?model=glossary")  # of which tenant?
    assert (short.status_code, short.json()["error"]["param"]) == (400, "model")


async def test_only_a_tenants_own_requests_are_explained(rig: RestRig) -> None:
    await rig.parts.ledger.open(rig.parts.request("req-1"))
    await rig.parts.ledger.open(rig.parts.request("req-old"))
    said = (await rig.acme.get("/v1/requests/req-1/explain")).json()
    assert said["phases"] == [
        {"name": "queue", "begin_unix_us": 1, "end_unix_us": 2, "where": "scheduler", "detail": "cold"}
    ]
    assert said["decisions"][0]["reason"] == "first request"
    assert (await rig.admin.get("/v1/requests/req-1/explain")).json() == said
    assert (await rig.admin.get("/v1/requests/req-unopened/explain")).json()["phases"] == said["phases"]
    assert (await rig.acme.get("/v1/requests/req-old/explain")).status_code == 404
    async with await rig.client_of("zoo") as zoo:
        theirs, absent = [await zoo.get(f"/v1/requests/req-{name}/explain") for name in ("1", "x")]
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


async def test_admin_alone_gets_the_newest_events_since_a_time(rig: RestRig) -> None:
    listed = (await rig.admin.get("/v1/events?since=1970-01-02&limit=2")).json()["data"]
    assert [event["sequence"] for event in listed] == [2, 3]
    event = {"sequence": 3, "at_unix_us": 3, "kind": "relay.started", "model": "", "reason": ""}
    assert listed[-1] == {**event, "urgency": "event 3 since 86400000000"}
    for after, numbers in ((0, [1, 2]), (2, [3]), (3, [])):
        page = (await rig.admin.get(f"/v1/events?since=1970-01-02&limit=2&after={after}")).json()["data"]
        assert [event["sequence"] for event in page] == numbers
    assert (await rig.acme.get("/v1/events?since=2026-01-01")).status_code == 403
    assert (await rig.admin.get("/v1/events?since=2026-01-01&after=-1")).status_code == 400
    assert (await rig.admin.get("/v1/events?since=yesterday")).status_code == 400


async def test_admin_alone_gets_the_cluster(rig: RestRig) -> None:
    view = (await rig.admin.get("/v1/cluster")).json()
    assert (view["largest_slot_bytes"], view["workers"][0]["worker_id"], view["relays"]) == ("12345", "w1", [])
    message = await rig.admin.get("/v1/cluster", headers={"accept": "application/x-protobuf"})
    assert ClusterView.FromString(message.content) == ParseDict(view, ClusterView())
    assert (await rig.acme.get("/v1/cluster")).status_code == 403
