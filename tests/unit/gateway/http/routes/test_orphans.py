from __future__ import annotations

from tests.unit.gateway.http.conftest import RestRig
from tests.unit.gateway.http.routes.test_uploads import begun, published


async def test_admin_lists_and_frees_orphans(rig: RestRig) -> None:
    await published(rig.acme)
    upload = await begun(rig.acme, "another")
    rig.store.publish("v-of-an-open-upload", upload["id"])
    rig.store.publish("v-unknown")
    assert (await rig.acme.get("/v1/orphans")).status_code == 403
    assert (await rig.acme.delete("/v1/orphans")).status_code == 403
    listed = (await rig.admin.get("/v1/orphans")).json()["data"]
    assert [orphan["id"] for orphan in listed] == ["v-unknown"]
    assert (await rig.admin.delete("/v1/orphans")).json()["deleted"] == ["v-unknown"]
    assert rig.store.deleted == ["v-unknown"]
    assert (await rig.admin.get("/v1/orphans")).json()["data"] == []
    assert (await rig.admin.get("/v1/models")).json()["data"]


async def test_recently_published_version_is_no_orphan(rig: RestRig) -> None:
    rig.store.publish("v-young")
    rig.store.published["v-young"] = 4_000_000_000_000_000  # by the store's clock
    assert (await rig.admin.get("/v1/orphans")).json()["data"] == []
