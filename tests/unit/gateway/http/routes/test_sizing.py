"""/v1/sizing: what a model takes and gives, before its upload and after."""

from __future__ import annotations

from tests.unit.gateway.http.conftest import RestRig
from tests.unit.gateway.http.routes.test_uploads import published
from tests.unit.modelspec.test_config import LLAMA


async def test_sizes_of_a_published_model(rig: RestRig) -> None:
    model = await published(rig.acme)
    sizing = (await rig.acme.get("/v1/sizing?model=glossary&prompt=10&answer=4")).json()
    assert (sizing["model"], sizing["footprint"]["weights_bytes"]) == (model["id"], model["size_bytes"])
    assert (sizing["steps"], sizing["curve"]) == (None, [])  # no worker has learned any
    assert "hosts" not in sizing
    assert (await rig.admin.get("/v1/sizing?model=acme/glossary")).json()["hosts"] == {"fit": 0, "total": 1}
    assert (await rig.acme.get("/v1/sizing?model=nothing")).status_code == 404
    assert (await rig.acme.get("/v1/sizing?model=glossary&prompt=0")).status_code == 400


async def test_a_config_is_sized_before_the_upload(rig: RestRig) -> None:
    sizing = (await rig.acme.post("/v1/sizing", json={"config": LLAMA, "weights_bytes": 4096})).json()
    assert sizing["footprint"]["weights_bytes"] == 4096
    narrow = (await rig.acme.post("/v1/sizing", json={"config": LLAMA, "quantize": True})).json()
    assert narrow["footprint"]["shared_bytes"] < sizing["footprint"]["shared_bytes"]
    for config, field in (({}, "architectures"), (LLAMA | {"hidden_size": "x"}, "hidden_size")):
        refused = await rig.acme.post("/v1/sizing", json={"config": config})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"config.{field}")
