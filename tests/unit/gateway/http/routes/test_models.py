from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from anthropic.types import ModelInfo

from tests.support.gateway_ports import published_model
from tests.unit.gateway.http.conftest import RestRig
from tests.unit.gateway.http.routes.test_uploads import published
from torchrelay.control.v1 import reports_pb2, types_pb2
from torchrelay.gateway.auth.api_keys import ADMIN
from torchrelay.gateway.catalog.model_settings import ModelSettings
from torchrelay.gateway.core import EmbeddingSpec
from torchrelay.gateway.http.routes.models import tasks_of
from torchrelay.gateway.inference.execution.attempt import model_version


async def test_model_is_read_changed_and_deleted_by_both_names(rig: RestRig) -> None:
    model = await published(rig.acme)
    assert (await rig.acme.get("/v1/models/acme/glossary")).json() == model
    assert (await rig.acme.get("/v1/models/glossary")).json() == model
    assert (await rig.acme.get("/v1/models/acme%2Fglossary")).json() == model  # as the openai client writes it
    changed = (await rig.acme.patch("/v1/models/glossary", json={"idle_timeout_s": 1.5})).json()
    assert (model["idle_timeout_s"], model["effective_idle_timeout_s"]) == (0, None)
    assert model["effective_max_instances"] == 8
    assert changed == model | {"idle_timeout_s": 1.5, "effective_idle_timeout_s": 1.5}
    gone = await rig.acme.delete("/v1/models/acme/glossary")
    assert gone.json() == {"id": "acme/glossary", "object": "model", "deleted": True}
    assert (await rig.acme.get("/v1/models/glossary")).status_code == 404
    assert (await rig.acme.delete("/v1/models/glossary")).status_code == 404
    assert rig.events[-1] == ("deleted", "acme/glossary")


async def test_anthropic_clients_get_models_in_their_format(rig: RestRig) -> None:
    version = {"anthropic-version": "2023-06-01"}
    none = {"data": [], "has_more": False, "first_id": None, "last_id": None}
    assert (await rig.acme.get("/v1/models?limit=1000", headers=version)).json() == none
    model = await published(rig.acme)
    listed = (await rig.acme.get("/v1/models?limit=1000", headers=version)).json()
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("acme/glossary", "acme/glossary", False)
    assert (await rig.acme.get("/v1/models/glossary", headers=version)).json() == listed["data"][0]
    assert (await rig.acme.get("/v1/models?limit=1000&beta=true", headers=version)).json() == listed
    assert (await rig.acme.get("/v1/models?beta=true")).status_code == 400, "OpenAI's clients send no such thing"
    shown = ModelInfo.model_validate(listed["data"][0])
    assert (shown.type, shown.id, shown.display_name) == ("model", "acme/glossary", "acme/glossary")
    assert (shown.created_at.timestamp(), shown.max_input_tokens) == (model["created"], model["context_length"])


@pytest.mark.parametrize(
    ("pooling", "has_no_head", "tasks"),
    [
        (types_pb2.POOLING_MEAN, False, ["generate", "embed"]),
        (types_pb2.POOLING_MEAN, True, ["embed"]),
        (types_pb2.POOLING_SCORE, True, ["score"]),
    ],
)
def test_model_tells_its_tasks(pooling: types_pb2.Pooling.ValueType, has_no_head: bool, tasks: list[str]) -> None:
    model = published_model(
        "acme/vectors", file_digests={}, embedding=EmbeddingSpec(pooling, 8, False), has_no_head=has_no_head
    )
    assert tasks_of(model.version) == tasks


async def test_aliases_resolve_and_are_listed(rig: RestRig) -> None:
    model = await published(rig.acme)
    aliases = ["claude-sonnet-4-5", "gpt-4o"]
    changed = await rig.acme.put("/v1/models/acme%2Fglossary/aliases", json={"aliases": aliases[::-1]})
    assert changed.json() == model | {"aliases": aliases}
    for name in (*aliases, "acme/gpt-4o", "glossary"):
        assert (await rig.acme.get(f"/v1/models/{name}")).json() == changed.json()
    assert (await rig.admin.get("/v1/models/gpt-4o")).status_code == 404
    ids = ["acme/glossary", *aliases]
    listed = (await rig.acme.get("/v1/models")).json()["data"]
    assert [entry["id"] for entry in listed] == ids
    assert [entry.get("alias_of") for entry in listed] == [None, "acme/glossary", "acme/glossary"]
    of_all = (await rig.admin.get("/v1/models")).json()["data"]
    assert [entry["id"] for entry in of_all] == ["acme/glossary", *(f"acme/{alias}" for alias in aliases)]
    version = {"anthropic-version": "2023-06-01"}
    page = (await rig.acme.get("/v1/models?limit=2", headers=version)).json()
    assert ([each["id"] for each in page["data"]], page["has_more"], page["last_id"]) == (ids[:2], True, ids[1])
    rest = (await rig.acme.get(f"/v1/models?limit=2&after_id={ids[1]}", headers=version)).json()
    assert ([each["id"] for each in rest["data"]], rest["has_more"]) == (ids[2:], False)
    before = (await rig.acme.get(f"/v1/models?limit=1&before_id={ids[2]}", headers=version)).json()
    assert ([each["id"] for each in before["data"]], before["has_more"]) == (ids[1:2], True)
    refused = await rig.acme.get("/v1/models?after_id=none", headers=version)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "after_id")
    assert (await rig.acme.put("/v1/models/gpt-4o/aliases", json={"aliases": ["x"]})).json()["aliases"] == ["x"]
    assert (await rig.acme.get("/v1/models/gpt-4o")).status_code == 404


async def test_aliases_end_with_their_model(rig: RestRig) -> None:
    await published(rig.acme)
    await rig.acme.put("/v1/models/glossary/aliases", json={"aliases": ["gpt-4o"]})
    refused = await rig.acme.delete("/v1/models/gpt-4o")
    assert refused.status_code == 409 and "is an alias of acme/glossary" in refused.json()["error"]["message"]
    assert (await rig.acme.delete("/v1/models/glossary")).json()["id"] == "acme/glossary"
    assert (await rig.acme.get("/v1/models/gpt-4o")).status_code == 404
    await published(rig.acme)
    assert (await rig.acme.get("/v1/models/glossary")).json()["aliases"] == []


async def test_conflicting_aliases_are_refused(rig: RestRig) -> None:
    await published(rig.acme)
    await published(rig.acme, "other")
    await rig.acme.put("/v1/models/glossary/aliases", json={"aliases": ["gpt-4o"]})
    for names, said in (
        (["other"], "'other' is the name of a model"),
        (["glossary"], "'glossary' is the name of a model"),
        (["gpt-4o"], "'gpt-4o' is an alias of the model 'glossary'"),
    ):
        refused = await rig.acme.put("/v1/models/other/aliases", json={"aliases": names})
        assert (refused.status_code, refused.json()["error"]["message"]) == (409, said)
    for malformed in (["No Name"], ["a/b"], [f"a{number}" for number in range(17)], "x"):
        refused = await rig.acme.put("/v1/models/other/aliases", json={"aliases": malformed})
        assert (refused.status_code, refused.json()["error"]["param"][:7]) == (400, "aliases")
    upload = {"model": "gpt-4o", "files": [{"path": "config.json", "size": 2, "sha256": "0" * 64}]}
    taken = await rig.acme.post("/v1/uploads", json=upload)
    assert taken.status_code == 409 and "'gpt-4o' is an alias of the model 'glossary'" in taken.text
    async with await rig.client_of("zoo") as zoo:
        assert (await zoo.put("/v1/models/acme/glossary/aliases", json={"aliases": []})).status_code == 404
        assert (await zoo.get("/v1/models/gpt-4o")).status_code == 404


async def test_another_tenants_model_looks_absent(rig: RestRig) -> None:
    await published(rig.acme)
    async with await rig.client_of("zoo") as zoo:
        present, absent = await zoo.get("/v1/models/acme/glossary"), await zoo.get("/v1/models/acme/nothing1")
        assert (present.status_code, absent.status_code) == (404, 404)
        assert present.text.replace("glossary", "nothing1") == absent.text
        assert (await zoo.delete("/v1/models/acme/glossary")).status_code == 404
        assert (await zoo.get("/v1/models")).json()["data"] == []
    assert [model["id"] for model in (await rig.admin.get("/v1/models")).json()["data"]] == ["acme/glossary"]


async def test_schedule_minimum_and_targets_require_the_admin_key(rig: RestRig) -> None:
    model = await published(rig.acme)
    entries = ["MON-fri 8:00-18:00 europe/berlin=2", "sat 22:00-02:00 UTC = 1"]
    targets = {"interactive_ttft_s": 0.2, "standard_ttft_s": 0.5, "batch_ttft_s": 60, "tbt_target_s": 0.05}
    assert model == model | dict.fromkeys(targets, 0.0) | {"schedule": []}
    settings = {"schedule": entries, "min_instances": 1, **targets}
    for field, value in settings.items():
        refused = await rig.acme.patch("/v1/models/glossary", json={field: value})
        assert refused.status_code == 403 and f"{field} requires the admin key" in refused.json()["error"]["message"]
    assert (await rig.acme.get("/v1/models/glossary")).json() == model
    for field, value in settings.items():
        assert (await rig.admin.patch("/v1/models/acme/glossary", json={field: value})).status_code == 200
    understood = ["mon-fri 08:00-18:00 Europe/Berlin = 2", "sat 22:00-02:00 UTC = 1"]
    assert (await rig.acme.get("/v1/models/glossary")).json() == model | settings | {"schedule": understood}
    back = await rig.admin.patch("/v1/models/acme/glossary", json={"standard_ttft_s": 0, "schedule": []})
    assert back.json() == model | settings | {"schedule": [], "standard_ttft_s": 0.0}  # the scheduler's default


SCHEDULE = "mon 08:00-18:00 UTC = 1"
TARGET = "tbt_target_s: a target is from 0.001 s to 86,400 s, or 0 for the scheduler's default;"
WRONG_SETTINGS: list[tuple[str, object, str]] = [
    ("tbt_target_s", -1, f"{TARGET} not -1 s"),
    ("tbt_target_s", 0.0005, f"{TARGET} not 0.0005 s"),
    ("tbt_target_s", 86401, f"{TARGET} not 86401 s"),
    ("tbt_target_s", 1e300, f"{TARGET} not 1e+300 s"),
    ("tbt_target_s", "50ms", "tbt_target_s must be a number, not '50ms'"),
    ("tbt_target_s", True, "tbt_target_s must be a number, not true"),
    ("schedule", [SCHEDULE, "mon 08:00-18:00 Berlin = 2"], "has an unknown time zone 'Berlin'; write an IANA name"),
    ("schedule", [SCHEDULE] * 33, ""),
    *(
        (name, value, "")
        for name in ("idle_timeout_s", "max_instances", "min_instances", "interactive_ttft_s", "tbt_target_s")
        for value in (False, True, "1")
    ),
]


async def test_wrong_setting_is_named_and_changes_nothing(rig: RestRig, subtests: pytest.Subtests) -> None:
    model = await published(rig.acme)
    for field, value, message in WRONG_SETTINGS:
        with subtests.test(f"{field}={value}"):
            refused = await rig.admin.patch("/v1/models/acme/glossary", json={field: value})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, field)
            assert message in error["message"]
    assert (await rig.acme.get("/v1/models/glossary")).json() == model


async def test_admin_must_name_a_models_tenant(rig: RestRig) -> None:
    await published(rig.acme)
    why = "the model 'glossary' does not exist; with the admin key, its name must include the tenant: TENANT/MODEL"
    for method in ("GET", "PATCH", "DELETE"):
        refused = await rig.admin.request(method, "/v1/models/glossary", json={"min_instances": 1})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], error["message"]) == (404, "model", why)
    absent = (await rig.admin.get("/v1/models/acme/absent")).json()["error"]["message"]
    assert absent == "the model 'acme/absent' does not exist"


async def test_versions_are_listed_and_rolled_back(rig: RestRig) -> None:
    model = await published(rig.acme)
    current = {"id": "version-one", "replaced": None, "kept_until": None}
    listed = (await rig.acme.get("/v1/versions?model=glossary")).json()
    assert listed["model"] == "acme/glossary" and [each | current for each in listed["data"]] == listed["data"]
    refused = await rig.acme.post("/v1/models/glossary/rollback", json={})
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "version")
    catalog, resolved = rig.services.catalog, await rig.services.catalog.resolve(ADMIN, "acme/glossary")
    async with rig.parts.database.write() as connection:
        newer = replace(resolved.version, version_id="version-two")
        await catalog.publish_in(connection, resolved.tenant_id, "glossary", newer, ModelSettings())
    catalog.published()
    listed = (await rig.acme.get("/v1/versions?model=acme/glossary")).json()["data"]
    assert [each["id"] for each in listed] == ["version-two", "version-one"]
    assert listed[1]["kept_until"] - listed[1]["replaced"] == 540
    other = await rig.client_of("birch")
    assert (await other.get("/v1/versions?model=acme/glossary")).status_code == 404
    assert (await other.post("/v1/models/acme/glossary/rollback", json={})).status_code == 404
    await other.aclose()
    rig.events.clear()
    assert (await rig.acme.post("/v1/models/acme/glossary/rollback")).json() == model
    assert rig.events == [("published", "acme/glossary")]
    unchanged = await rig.acme.post("/v1/models/acme/glossary/rollback", json={"version": "version-one"})
    assert (unchanged.json(), len(rig.events)) == (model, 1)
    again = await rig.acme.post("/v1/models/glossary/rollback", json={"version": "version-two"})
    assert again.json()["version"] == "version-two"


async def test_resources_are_set_by_those_who_may(rig: RestRig) -> None:
    model = await published(rig.acme)
    free = {"max_concurrency": 0, "threads": 0, "kv_share": 1.0, "hosts": []}
    assert {name: model[name] for name in free} == free
    wanted = {"max_concurrency": 4, "threads": 2, "kv_share": 0.5, "hosts": ["zone=a", "gpu=l4"]}
    for field, value in wanted.items():
        refused = await rig.acme.patch("/v1/models/glossary", json={field: value})
        assert (refused.status_code, refused.json()["error"]["message"]) == (403, f"{field} requires the admin key")
    changed = (await rig.admin.patch("/v1/models/acme/glossary", json=wanted)).json()
    assert changed == model | wanted | {"hosts": ["gpu=l4", "zone=a"]}
    resolved = await rig.services.catalog.resolve(ADMIN, "acme/glossary")
    scaling = model_version(resolved).scaling
    assert (scaling.max_concurrency, scaling.threads, scaling.kv_share) == (4, 2, 0.5)
    assert scaling.hosts == ["gpu=l4", "zone=a"]
    assert (await rig.admin.patch("/v1/models/acme/glossary", json=free)).json() == model
    absent = (await rig.admin.patch("/v1/models/acme/glossary", json={"hosts": ["zone=b"]})).json()["error"]
    assert absent["message"].startswith("no host has the labels zone=b; ") and absent["param"] == "hosts"


async def test_engine_and_labels_are_checked_together(rig: RestRig) -> None:
    await published(rig.acme)
    capabilities = reports_pb2.EngineCapabilities(engine="vllm")
    rig.scheduler.workers.append(reports_pb2.WorkerReport(worker_id="w2", labels=["zone=b"], capabilities=capabilities))
    assert (await rig.admin.patch("/v1/models/acme/glossary", json={"hosts": ["zone=b"]})).status_code == 200
    refused = (await rig.acme.patch("/v1/models/glossary", json={"engine": "torchrelay"})).json()["error"]
    assert refused["message"] == "no host with the engine torchrelay has the labels zone=b: set another engine"
    assert (await rig.admin.patch("/v1/models/acme/glossary", json={"engine": "vllm"})).status_code == 200
    refused = (await rig.admin.patch("/v1/models/acme/glossary", json={"hosts": ["zone=a"]})).json()["error"]
    assert refused["message"].startswith("no host with the engine vllm has the labels zone=a; ")
    both = {"hosts": ["zone=a"], "engine": "torchrelay"}
    assert (await rig.admin.patch("/v1/models/acme/glossary", json=both)).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"kv_share": 0}, {"kv_share": 1.5}, {"threads": -1}, {"max_concurrency": 1 << 40}, {"hosts": ["zone"]},
        {"hosts": ["zone=a", "zone=b"]}, {"hosts": [f"k{number}=v" for number in range(17)]},
    ],
)  # fmt: skip
async def test_impossible_resources_are_refused(rig: RestRig, body: dict[str, Any]) -> None:
    await published(rig.acme)
    refused = await rig.admin.patch("/v1/models/acme/glossary", json=body)
    assert refused.status_code == 400 and refused.json()["error"]["param"].startswith(next(iter(body)))
