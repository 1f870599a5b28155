from __future__ import annotations

from tests.unit.gateway.http.conftest import RestRig, client


async def test_admin_creates_tenant_and_key_and_tenant_more_keys(rig: RestRig) -> None:
    wanted = {"name": "zoo", "storage_quota_bytes": 10, "budget_nano": 5}
    made = await rig.admin.post("/v1/tenants", json=wanted)
    assert made.status_code == 201 and wanted.items() <= made.json().items()
    assert [tenant["name"] for tenant in (await rig.admin.get("/v1/tenants")).json()["data"]] == ["acme", "zoo"]
    key = (await rig.admin.post("/v1/keys", json={"tenant": "zoo", "name": "ci"})).json()
    assert key["tenant"] == "zoo"
    async with client(rig.url, key["key"]) as zoo:
        second = (await zoo.post("/v1/keys", json={"requests_per_minute": 5})).json()
        assert (second["tenant"], second["requests_per_minute"]) == ("zoo", 5)
        listed = (await zoo.get("/v1/keys")).json()["data"]
        assert [shown["id"] for shown in listed] == [key["id"], second["id"]]
        assert all("key" not in shown and "mac" not in shown for shown in listed)
        assert (await zoo.delete(f"/v1/keys/{second['id']}")).status_code == 204
        async with client(rig.url, second["key"]) as revoked:
            assert (await revoked.get("/v1/models")).status_code == 401


async def test_duplicate_invalid_and_missing_tenants_are_refused(rig: RestRig) -> None:
    assert (await rig.admin.post("/v1/tenants", json={"name": "acme"})).status_code == 409
    for name in ("", "A", "a/b", "../x", "x" * 65, "-a"):
        reply = await rig.admin.post("/v1/tenants", json={"name": name})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "name")
    reply = await rig.admin.post("/v1/keys", json={})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tenant"), "a key is of a tenant"
    assert (await rig.admin.post("/v1/keys", json={"tenant": "absent"})).status_code == 404


async def test_keys_of_another_tenant_are_out_of_reach(rig: RestRig) -> None:
    async with await rig.client_of("zoo") as zoo:
        own = (await zoo.get("/v1/keys")).json()["data"][0]["id"]
        assert (await rig.acme.delete(f"/v1/keys/{own}")).status_code == 404
        for tenant in ("zoo", "absent"):  # the same answer, whether or not it exists
            reply = await rig.acme.post("/v1/keys", json={"tenant": tenant})
            assert (reply.status_code, reply.json()["error"]["message"]) == (403, "this key belongs to another tenant")
        assert (await zoo.get("/v1/keys")).status_code == 200


async def test_tenant_limits_change_separately(rig: RestRig) -> None:
    await rig.admin.post("/v1/tenants", json={"name": "zoo", "storage_quota_bytes": 10, "budget_nano": 5})
    raised = (await rig.admin.patch("/v1/tenants/zoo", json={"budget_nano": 9})).json()
    assert (raised["budget_nano"], raised["storage_quota_bytes"]) == (9, 10)
    freed = (await rig.admin.patch("/v1/tenants/zoo", json={"storage_quota_bytes": None})).json()
    assert (freed["budget_nano"], freed["storage_quota_bytes"]) == (9, None)
    assert (await rig.admin.patch("/v1/tenants/zoo", json={})).json() == freed
    assert (await rig.admin.patch("/v1/tenants/absent", json={"budget_nano": 9})).status_code == 404
    for value, said in ((-1, "must be at least 0, not -1"), ("much", "must be an integer, not 'much'")):
        wrong = await rig.admin.patch("/v1/tenants/zoo", json={"budget_nano": value})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "budget_nano")
        assert wrong.json()["error"]["message"] == f"budget_nano {said}"
    assert (await rig.acme.patch("/v1/tenants/acme", json={"budget_nano": 9})).status_code == 403


async def test_service_classes_are_stored_and_listed(rig: RestRig) -> None:
    made = (await rig.admin.post("/v1/tenants", json={"name": "zoo", "service_class": "batch"})).json()
    assert made["service_class"] == "batch"
    assert (await rig.admin.patch("/v1/tenants/zoo", json={"budget_nano": 9})).json()["service_class"] == "batch"
    assert (await rig.admin.patch("/v1/tenants/zoo", json={"service_class": None})).json()["service_class"] is None
    assert (await rig.acme.patch("/v1/tenants/acme", json={"service_class": "batch"})).status_code == 403
    shown = {each["name"]: each["service_class"] for each in (await rig.admin.get("/v1/tenants")).json()["data"]}
    assert shown == {"acme": None, "zoo": None}
    key = (await rig.acme.post("/v1/keys", json={"name": "nightly", "service_class": "batch"})).json()
    assert key["service_class"] == "batch"
    listed = (await rig.acme.get("/v1/keys")).json()["data"]
    assert {each["name"]: each["service_class"] for each in listed} == {"first": None, "nightly": "batch"}
    asked = rig.acme.post("/v1/keys", json={"service_class": "flex"})
    for reply in (await asked, await rig.admin.patch("/v1/tenants/zoo", json={"service_class": "flex"})):
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "service_class")
        message = "service_class must be 'interactive', 'standard' or 'batch', not 'flex'"
        assert reply.json()["error"]["message"] == message
