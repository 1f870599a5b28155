from __future__ import annotations

from typing import Any

from tests.unit.gateway.http.conftest import RestRig, client
from tests.unit.gateway.http.routes.test_uploads import begun, published


async def made(rig: RestRig, name: str, role: str) -> str:
    answer = await rig.admin.post("/v1/operators", json={"name": name, "role": role})
    assert answer.status_code == 201, answer.text
    key: str = answer.json()["key"]
    return key


async def test_roles_may_what_they_say(rig: RestRig) -> None:
    assert (await rig.acme.get("/v1/operators")).status_code == 403
    calls: list[tuple[str, str, Any]] = [
        ("GET", "/v1/tenants", None),
        ("PATCH", "/v1/tenants/acme", {"tokens_per_minute": 9}),
        ("POST", "/v1/operators", {"name": "eve", "role": "admin"}),
        ("PUT", "/v1/prices", {"prompt_nano": 9, "cached_nano": 1, "output_nano": 9}),
        ("DELETE", "/v1/tenants/acme", None),
    ]
    expected = {"viewer": [200, 403, 403, 403, 403], "operator": [200, 200, 403, 403, 403]}
    for role, statuses in {**expected, "admin": [200, 200, 201, 200, 200]}.items():
        async with client(rig.url, await made(rig, f"the-{role}", role)) as caller:
            answers = [await caller.request(method, path, json=body) for method, path, body in calls]
        assert [each.status_code for each in answers] == statuses, role


async def test_operator_is_changed_and_revoked(rig: RestRig) -> None:
    key = await made(rig, "ann", "viewer")
    assert key.startswith("tro-")
    assert (await rig.admin.post("/v1/operators", json={"name": "ann", "role": "admin"})).status_code == 409
    assert (await rig.admin.patch("/v1/operators/ann", json={"role": "operator"})).json()["role"] == "operator"
    async with client(rig.url, key) as caller:
        assert (await caller.patch("/v1/tenants/acme", json={})).status_code == 200
        assert (await rig.admin.delete("/v1/operators/ann")).status_code == 204
        assert (await caller.get("/v1/tenants")).status_code == 401
    async with client(rig.url, key[:-1] + ("0" if key[-1] != "0" else "1")) as caller:
        assert (await caller.get("/v1/tenants")).status_code == 401
    listed = (await rig.admin.get("/v1/operators")).json()["data"]
    assert [(each["name"], each["role"], each["revoked"]) for each in listed] == [("ann", "operator", True)]
    assert (await rig.admin.delete("/v1/operators/ann")).status_code == 404


async def test_every_change_is_in_the_audit_log(rig: RestRig) -> None:
    async with client(rig.url, await made(rig, "ann", "operator")) as ann:
        await ann.patch("/v1/tenants/acme", json={"tokens_per_minute": 9})
    key = (await rig.acme.post("/v1/keys", json={"name": "x"})).json()
    await rig.acme.patch(f"/v1/keys/{key['id']}", json={"requests_per_minute": 5})
    await rig.acme.post(f"/v1/keys/{key['id']}/rotate", json={})
    await rig.acme.delete(f"/v1/keys/{key['id']}")
    await published(rig.acme)
    await rig.acme.patch("/v1/models/glossary", json={"max_instances": 3})
    await rig.acme.put("/v1/models/glossary/aliases", json={"aliases": ["words"]})
    await rig.acme.delete("/v1/models/glossary")
    await rig.admin.put("/v1/prices", json={"prompt_nano": 9, "cached_nano": 1, "output_nano": 9})
    log = (await rig.admin.get("/v1/audit")).json()["data"]
    assert [each["action"] for each in reversed(log)] == [
        "tenant.create",
        "key.create",
        "operator.create",
        "tenant.change",
        "key.create",
        "key.change",
        "key.rotate",
        "key.revoke",
        "model.publish",
        "model.change",
        "model.aliases",
        "model.delete",
        "price.add",
    ]
    by_action = {each["action"]: each for each in log}
    change = by_action["tenant.change"]
    assert (change["actor"], change["target"]) == ("operator:ann", "acme")
    assert (change["before"], change["after"]) == ({"tokens_per_minute": None}, {"tokens_per_minute": 9})
    assert by_action["price.add"]["actor"] == "admin key"
    own_id = (await rig.acme.get("/v1/keys/me")).json()["id"]
    assert by_action["key.revoke"]["actor"] == f"key:{own_id}"
    assert by_action["model.change"]["after"] == {"max_instances": 3}
    assert key["key"] not in str(log) and "mac" not in str(log)


async def test_tenant_reads_its_own_changes_by_pages(rig: RestRig) -> None:
    async with await rig.client_of("zoo") as zoo:
        await zoo.post("/v1/keys", json={"name": "theirs"})
    for number in range(3):
        await rig.acme.post("/v1/keys", json={"name": str(number)})
    first = (await rig.acme.get("/v1/audit?limit=2&action=key.create")).json()
    assert first["has_more"] and [each["after"]["name"] for each in first["data"]] == ["2", "1"]
    rest = (await rig.acme.get(f"/v1/audit?action=key.create&before={first['data'][-1]['id']}")).json()
    assert not rest["has_more"] and [each["after"]["name"] for each in rest["data"]] == ["0", "first"]
    of_zoo = (await rig.admin.get("/v1/audit?tenant=zoo")).json()["data"]
    assert [each["action"] for each in of_zoo] == ["key.create", "key.create", "tenant.create"]
    assert (await rig.acme.get("/v1/audit?tenant=zoo")).status_code == 403
    limited = (await rig.acme.post("/v1/keys", json={"requests_per_minute": 5})).json()
    async with client(rig.url, limited["key"]) as caller:
        assert (await caller.get("/v1/audit")).status_code == 403


async def test_suspended_tenant_is_refused_and_resumed(rig: RestRig) -> None:
    for suspended, status in ((True, 403), (False, 200)):
        answer = await rig.admin.patch("/v1/tenants/acme", json={"suspended": suspended})
        assert answer.json()["suspended"] is suspended
        answer = await rig.acme.get("/v1/models")
        assert answer.status_code == status and ("is suspended" in answer.text) is suspended


async def test_deleted_tenant_leaves_its_accounts_alone(rig: RestRig) -> None:
    await published(rig.acme)
    await begun(rig.acme, "other")
    deleted = (await rig.admin.delete("/v1/tenants/acme")).json()
    assert deleted["deleted"] and "ledger" in deleted["kept"]
    assert rig.events[-1] == ("deleted", "acme/glossary")
    assert (await rig.acme.get("/v1/models")).status_code == 401
    [tenant] = (await rig.admin.get("/v1/tenants")).json()["data"]
    assert tenant["deleted"] and tenant["suspended"]
    assert (await rig.admin.get("/v1/models")).json()["data"] == []
    assert (await rig.admin.get("/v1/uploads")).json()["data"] == []
    assert (await rig.admin.get("/v1/usage?tenant=acme")).status_code == 200
    assert (await rig.admin.post("/v1/keys", json={"tenant": "acme"})).status_code == 409
    assert (await rig.admin.post("/v1/tenants", json={"name": "acme"})).status_code == 409
    assert (await rig.admin.delete("/v1/tenants/acme")).status_code == 200, "again, as after a broken connection"
    assert (await rig.admin.delete("/v1/tenants/absent")).status_code == 404
