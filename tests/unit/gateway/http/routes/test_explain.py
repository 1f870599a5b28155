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
