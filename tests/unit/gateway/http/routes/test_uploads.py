from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any, TypeAlias

import httpx
import pytest
from sqlalchemy import delete, func, select, update

from tests.unit.gateway.http.conftest import RestRig
from torchrelay.common.errors import Conflict, InvalidRequest, NotFound, TorchrelayError, Unavailable, UploadRefused
from torchrelay.gateway.auth.api_keys import ADMIN
from torchrelay.gateway.catalog.garbage_collection import free_retired_versions
from torchrelay.gateway.catalog.model_settings import ModelSettings, TenantSettings
from torchrelay.gateway.catalog.uploads import Upload
from torchrelay.gateway.sql.tables import models, retired_versions, uploads

Files: TypeAlias = dict[str, bytes]
WEIGHTS = bytes(range(256)) * 8192  # 2 MiB


def declared(files: Files) -> list[dict[str, Any]]:
    return [
        {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for path, data in files.items()
    ]


async def begun(client: httpx.AsyncClient, model: str = "glossary", files: Files | None = None) -> dict[str, Any]:
    reply = await client.post("/v1/uploads", json={"model": model, "files": declared(files or {"w": WEIGHTS})})
    assert reply.status_code == 201, reply.text
    described: dict[str, Any] = reply.json()
    return described


async def published(
    client: httpx.AsyncClient, model: str = "glossary", data: bytes = WEIGHTS, **settings: Any
) -> dict[str, Any]:
    upload = await begun(client, model, {"w": data})
    await client.put(f"/v1/uploads/{upload['id']}/files/w", content=data)
    reply = await client.post(f"/v1/uploads/{upload['id']}/commit", json=settings)
    assert reply.status_code == 200, reply.text
    described: dict[str, Any] = reply.json()
    return described


async def test_files_are_sent_in_slices_and_published_by_commit(rig: RestRig) -> None:
    upload = await begun(rig.acme, files={"w": WEIGHTS, "config.json": b"{}"})
    assert upload["model"] == "acme/glossary"
    put = await rig.acme.put(f"/v1/uploads/{upload['id']}/files/w", content=WEIGHTS)
    (weights, _) = declared({"w": WEIGHTS, "config.json": b"{}"})
    assert put.json() == weights | {"received": len(WEIGHTS), "complete": True}
    assert 0 < rig.store.largest_slice <= 1 << 20
    state = (await rig.acme.get(f"/v1/uploads/{upload['id']}")).json()
    assert [(file["path"], file["complete"]) for file in state["files"]] == [("w", True), ("config.json", False)]
    reply = await rig.acme.post(f"/v1/uploads/{upload['id']}/commit", json={"idle_timeout_s": 3, "max_instances": 2})
    model = reply.json()
    assert (model["id"], model["version"], model["idle_timeout_s"]) == ("acme/glossary", "version-one", 3)
    assert (model["context_length"], model["size_bytes"], model["owned_by"]) == (128, 900, "acme")
    assert model["tasks"] == ["generate"]
    assert rig.store.largest_slot_bytes == 12345
    assert rig.events == [("published", "acme/glossary")]
    assert (await rig.acme.get("/v1/models")).json()["data"] == [model]
    assert (await rig.acme.get(f"/v1/uploads/{upload['id']}")).status_code == 404


async def test_commit_takes_an_engine_that_a_worker_has(rig: RestRig) -> None:
    upload = await begun(rig.acme)
    await rig.acme.put(f"/v1/uploads/{upload['id']}/files/w", content=WEIGHTS)
    commit = f"/v1/uploads/{upload['id']}/commit"
    reply = await rig.acme.post(commit, json={"engine": "vllm"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "engine")
    assert reply.json()["error"]["message"] == "no worker has the engine vllm; the workers have torchrelay"
    reply = await rig.acme.post(commit, json={"engine": "vllm:2"})
    assert reply.json()["error"]["message"] == "no worker has the engine vllm:2; the workers have torchrelay"
    begin = {"model": "other", "files": [{"path": "config.json", "size": 1, "sha256": "0" * 64}]}
    reply = await rig.acme.post("/v1/uploads", json=begin | {"engine": "vllm"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "engine"), "before any file is sent"
    for engine in ("tensorrt", "torchrelay:2", "vllm:1", "vllm:65", "vllm:2x"):
        assert (await rig.acme.post(commit, json={"engine": engine})).status_code == 400
    assert (await rig.acme.post(commit, json={"engine": "torchrelay"})).json()["engine"] == "torchrelay"
    change = await rig.acme.patch("/v1/models/acme/glossary", json={"engine": "vllm"})
    assert (change.status_code, change.json()["error"]["param"]) == (400, "engine")
    assert (await rig.acme.patch("/v1/models/acme/glossary", json={"engine": "auto"})).json()["engine"] == "auto"


async def test_upload_that_would_replace_the_base_of_adapters_is_refused_at_once(rig: RestRig) -> None:
    await published(rig.acme)
    base = await rig.services.catalog.resolve(ADMIN, "acme/glossary")
    async with rig.parts.database.write() as connection:
        adapter = replace(base.version, version_id="version-two", base_version_id="version-one")
        await rig.services.catalog.publish_in(connection, base.tenant_id, "tuned", adapter, ModelSettings())
    rig.services.catalog.published()
    body = {"model": "glossary", "files": declared({"w": WEIGHTS})}
    refused = await rig.acme.post("/v1/uploads", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (409, "model")
    assert "delete tuned first" in refused.json()["error"]["message"]
    assert (await rig.acme.get("/v1/uploads")).json()["data"] == []
    change = await rig.acme.patch("/v1/models/acme/glossary", json={"engine": "vllm"})
    assert (change.status_code, change.json()["error"]["param"]) == (400, "engine")
    assert change.json()["error"]["message"].startswith("acme/glossary has adapters, which need the engine torchrelay")
    await begun(rig.acme, "tuned")
    await rig.acme.delete("/v1/models/tuned")
    await begun(rig.acme)


async def test_the_store_hears_which_engines_may_compute_the_model(rig: RestRig) -> None:
    await published(rig.acme)
    assert rig.store.engines == ["torchrelay"]  # those of the workers
    rig.store.needed_engine, rig.store.content = "vllm", "two"
    await published(rig.acme, "packed", b"two")
    assert rig.store.engines == ["torchrelay"]
    change = await rig.acme.patch("/v1/models/acme/packed", json={"engine": "torchrelay"})
    assert (change.status_code, change.json()["error"]["param"]) == (400, "engine")
    assert change.json()["error"]["message"] == "acme/packed needs the engine vllm, for its weights"
    assert (await rig.acme.patch("/v1/models/acme/packed", json={"engine": "auto"})).status_code == 200
    packed = await rig.services.catalog.resolve(ADMIN, "acme/packed")
    await rig.services.catalog.change_settings(packed, ModelSettings(engine="vllm:2"))
    rig.store.content = "three"
    await published(rig.acme, "packed", b"three")
    assert rig.store.engines == ["vllm"]  # of the model's settings, which a new version keeps
    upload = await begun(rig.acme, "adapter")
    reply = await rig.acme.post(f"/v1/uploads/{upload['id']}/commit", json={"base": "packed"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "engine")
    assert reply.json()["error"]["message"] == "no worker has the engine vllm:2; the workers have torchrelay"
    glossary = await rig.services.catalog.resolve(ADMIN, "acme/glossary")
    await rig.services.catalog.change_settings(glossary, ModelSettings(engine="vllm"))
    reply = await rig.acme.post(f"/v1/uploads/{upload['id']}/commit", json={"base": "glossary"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "base")
    message = "adapters of acme/glossary need the engine torchrelay, not vllm, which it names"
    assert reply.json()["error"]["message"] == message


async def test_the_store_hears_how_weights_are_quantized(rig: RestRig) -> None:
    upload = await begun(rig.acme)
    await rig.acme.put(f"/v1/uploads/{upload['id']}/files/w", content=WEIGHTS)
    commit = f"/v1/uploads/{upload['id']}/commit"
    reply = await rig.acme.post(commit, json={"quantize": "int4"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "quantize")
    rig.store.refusal = InvalidRequest("the weights are quantized already", field="quantize")
    reply = await rig.acme.post(commit, json={"quantize": "int8"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "quantize")
    rig.store.refusal = None  # the upload is still open
    assert (await rig.acme.post(commit, json={"quantize": "int8"})).status_code == 200
    assert rig.store.quantize == "int8"
    await published(rig.acme, "plain")
    assert rig.store.quantize == ""


async def test_interrupted_upload_is_resumed(rig: RestRig) -> None:
    upload = await begun(rig.acme)
    url = f"/v1/uploads/{upload['id']}/files/w"

    async def interrupted() -> Any:
        yield WEIGHTS[: 1 << 20]
        raise ConnectionResetError("the laptop was closed")

    with pytest.raises(ConnectionResetError):
        await rig.acme.put(url, content=interrupted())
    received = 0
    while received < 1 << 20:  # the server notices the disconnect later and stores slice by slice
        received = (await rig.acme.get(f"/v1/uploads/{upload['id']}")).json()["files"][0]["received"]
    assert received == 1 << 20
    rest = await rig.acme.put(url, content=WEIGHTS[received:], headers={"upload-offset": str(received)})
    assert rest.json()["complete"] is True


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (Conflict("w continues at offset 5, not 3", field="Upload-Offset"), 409, "conflict"),
        (NotFound("x is not a declared file", field="x"), 404, "not_found"),
        (UploadRefused("w: more bytes were sent than the 7 declared", field="w"), 422, "upload_refused"),
    ],
    ids=["offset", "file", "length"],
)
async def test_opening_refused_by_the_store_keeps_its_cause(
    rig: RestRig, refusal: TorchrelayError, status: int, code: str
) -> None:
    upload = await begun(rig.acme)
    rig.store.put_refusal = refusal
    headers = {"upload-offset": "3"}
    refused = await rig.acme.put(f"/v1/uploads/{upload['id']}/files/w", content=b"abcd", headers=headers)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (status, code, refusal.field)
    assert error["message"] == refusal.message
    (opening,) = rig.store.openings
    assert (opening.upload_id, opening.path, opening.offset, opening.num_bytes) == (upload["id"], "w", 3, 4)


@pytest.mark.parametrize("notes", [(), ("tensors were left out",)])
async def test_commit_streams_its_steps_as_lines(rig: RestRig, notes: tuple[str, ...]) -> None:
    rig.store.notes = notes
    upload = await begun(rig.acme)
    headers = {"accept": "application/x-ndjson"}
    reply = await rig.acme.post(f"/v1/uploads/{upload['id']}/commit", headers=headers)
    *steps, last = [json.loads(line) for line in reply.text.splitlines()]
    assert steps == [{"stage": "validate", "done": 5, "total": 10}, {"stage": "publish", "done": 10, "total": 10}]
    model = (await rig.acme.get("/v1/models/glossary")).json()
    assert last["model"] == model | ({"notes": list(notes)} if notes else {})
    assert (await published(rig.acme, data=b"w")).get("notes", []) == list(notes)


@pytest.mark.parametrize("as_lines", [False, True])
async def test_refused_commit_ends_the_upload(rig: RestRig, as_lines: bool) -> None:
    rig.store.refusal = UploadRefused("the header is longer than the file", field="model.safetensors")
    upload = await begun(rig.acme)
    headers = {"accept": "application/x-ndjson"} if as_lines else {}
    reply = await rig.acme.post(f"/v1/uploads/{upload['id']}/commit", headers=headers)
    assert reply.status_code == (200 if as_lines else 422)
    last = json.loads(reply.text.splitlines()[-1])
    error = last["error"]
    assert last.get("status") == (422 if as_lines else None)
    assert (error["code"], error["param"]) == ("upload_refused", "model.safetensors")
    assert (await rig.acme.get("/v1/models")).json()["data"] == []
    assert rig.events == []
    assert "upload again" in error["message"]
    assert (await rig.acme.get(f"/v1/uploads/{upload['id']}")).status_code == 404
    assert (await rig.acme.get("/v1/uploads")).json()["data"] == []


async def test_failed_commit_is_repeatable(rig: RestRig) -> None:
    rig.store.refusal = Unavailable("the disk is full")
    upload = await begun(rig.acme)
    assert (await rig.acme.post(f"/v1/uploads/{upload['id']}/commit")).status_code == 503
    rig.store.refusal = None
    assert (await rig.acme.post(f"/v1/uploads/{upload['id']}/commit")).status_code == 200


async def test_open_uploads_are_listed_and_aborted_by_their_tenant(rig: RestRig) -> None:
    first, second = await begun(rig.acme, "one"), await begun(rig.acme, "two", {"w": b"abc"})
    async with await rig.client_of("zoo") as zoo:
        other = await begun(zoo, "three")
        assert [upload["id"] for upload in (await zoo.get("/v1/uploads")).json()["data"]] == [other["id"]]
        assert (await zoo.delete(f"/v1/uploads/{first['id']}")).status_code == 404
    listed = (await rig.acme.get("/v1/uploads")).json()["data"]
    assert [(upload["id"], upload["model"], upload["size_bytes"]) for upload in listed] == [
        (first["id"], "acme/one", len(WEIGHTS)),
        (second["id"], "acme/two", 3),
    ]
    assert all(upload["expires"] - upload["created"] == 86400 for upload in listed)
    assert len((await rig.admin.get("/v1/uploads")).json()["data"]) == 3
    assert (await rig.acme.delete(f"/v1/uploads/{first['id']}")).status_code == 204
    assert [upload["id"] for upload in (await rig.acme.get("/v1/uploads")).json()["data"]] == [second["id"]]


async def test_open_uploads_are_bounded_in_number_and_bytes(rig: RestRig) -> None:
    limits = rig.services.uploads.limits
    opened = [await begun(rig.acme, f"m{index}", {"w": b"x"}) for index in range(limits.max_open)]
    reply = await rig.acme.post("/v1/uploads", json={"model": "more", "files": declared({"w": b"x"})})
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "overloaded")
    assert "16 uploads are open already; commit or abort one" in reply.json()["error"]["message"]
    async with await rig.client_of("zoo") as zoo:
        huge = {"path": "w", "size": limits.max_open_bytes, "sha256": "0" * 64}
        assert (await zoo.post("/v1/uploads", json={"model": "one", "files": [huge]})).status_code == 201
        reply = await zoo.post("/v1/uploads", json={"model": "two", "files": [huge]})
        assert reply.status_code == 429
        assert "together they may have 1.1 TB; commit or abort one" in reply.json()["error"]["message"]
    assert (await rig.acme.delete(f"/v1/uploads/{opened[0]['id']}")).status_code == 204
    assert await begun(rig.acme, "more")


async def test_model_deleted_during_its_upload_is_published_anew(rig: RestRig) -> None:
    model = await published(rig.acme)
    upload = await begun(rig.acme)
    assert (await rig.acme.delete(f"/v1/models/{model['id']}")).status_code == 200
    assert (await rig.acme.post(f"/v1/uploads/{upload['id']}/commit")).status_code == 200
    assert [each["id"] for each in (await rig.acme.get("/v1/models")).json()["data"]] == ["acme/glossary"]
    assert await free_retired_versions(rig.parts.database, rig.services.store, retired_for_s=0) == 0


async def test_crashed_commit_ends_with_an_error_line(rig: RestRig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("out of luck")

    upload = await begun(rig.acme)
    monkeypatch.setattr(rig.parts.catalog, "publish_in", broken)
    headers = {"accept": "application/x-ndjson"}
    reply = await rig.acme.post(f"/v1/uploads/{upload['id']}/commit", headers=headers)
    last = json.loads(reply.text.splitlines()[-1])
    assert (last["error"]["code"], last["status"]) == ("internal", 500)


async def test_quota_counts_models_open_uploads_and_deleted_models_until_they_are_freed(rig: RestRig) -> None:
    size = len(WEIGHTS)
    async with await rig.client_of("small", storage_quota_bytes=2 * size) as small:

        async def refusal(data: bytes) -> str:
            reply = await small.post("/v1/uploads", json={"model": "more", "files": declared({"w": data})})
            assert (reply.status_code, reply.json()["error"]["code"]) == (403, "quota_exceeded")
            message: str = reply.json()["error"]["message"]
            return message

        rig.store.stored_bytes = size
        model = await published(small, "one")
        waiting = await begun(small, "two")
        await refusal(b"x")
        assert (await small.delete(f"/v1/uploads/{waiting['id']}")).status_code == 204
        await begun(small, "three", {"w": b"x"})
        assert (await small.delete(f"/v1/models/{model['id']}")).status_code == 200
        assert "versions not freed yet" in await refusal(WEIGHTS)
        assert await free_retired_versions(rig.parts.database, rig.services.store, retired_for_s=0) == 1
        await begun(small, "four")


async def test_quota_counts_the_packed_size(rig: RestRig) -> None:
    async with await rig.client_of("small", storage_quota_bytes=3 << 20) as small:
        upload = await begun(small)
        rig.store.stored_bytes = 4 << 20
        reply = await small.post(f"/v1/uploads/{upload['id']}/commit")
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "quota_exceeded")
        assert (await small.get("/v1/models")).json()["data"] == []
    async with rig.parts.database.read() as connection:
        assert list((await connection.execute(select(retired_versions.c.version_id))).scalars()) == ["version-one"]
        assert (await connection.execute(select(uploads))).all() == []
        assert (await connection.execute(select(models))).all() == []


async def test_another_tenants_upload_is_out_of_reach(rig: RestRig) -> None:
    upload = await begun(rig.acme)
    async with await rig.client_of("zoo") as zoo:
        for method, path in (("GET", ""), ("DELETE", ""), ("PUT", "/files/w"), ("POST", "/commit")):
            assert (await zoo.request(method, f"/v1/uploads/{upload['id']}{path}")).status_code == 404
        for name in ("acme/m", "absent/m"):
            reply = await zoo.post("/v1/uploads", json={"model": name, "files": declared({"w": b"x"})})
            assert reply.status_code == 403


async def test_admin_uploads_for_a_named_tenant(rig: RestRig) -> None:
    assert (await begun(rig.admin, "acme/glossary"))["model"] == "acme/glossary"
    reply = await rig.admin.post("/v1/uploads", json={"model": "glossary", "files": declared({"w": b"x"})})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tenant")
    for name in ("", "a/b/c", "../m", "M", "a b"):
        refused = await rig.acme.post("/v1/uploads", json={"model": name, "files": declared({"w": b"x"})})
        assert refused.status_code in (400, 403)


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


async def completes(client: httpx.AsyncClient, upload: dict[str, Any]) -> list[bool]:
    return [file["complete"] for file in (await client.get(f"/v1/uploads/{upload['id']}")).json()["files"]]


async def test_files_of_a_model_are_not_sent_again(rig: RestRig) -> None:
    model = await published(rig.acme)
    upload = await begun(rig.acme, "again")
    assert [(file["received"], file["complete"]) for file in upload["files"]] == [(len(WEIGHTS), True)]
    assert await completes(rig.acme, upload) == [True]
    rig.store.refusal = Unavailable("the store is not asked")
    headers = {"accept": "application/x-ndjson"}
    reply = await rig.acme.post(f"/v1/uploads/{upload['id']}/commit", json={"max_instances": 2}, headers=headers)
    *steps, last = [json.loads(line) for line in reply.text.splitlines()]
    assert steps == [{"stage": "publish", "done": len(WEIGHTS), "total": len(WEIGHTS)}]
    again = last["model"]
    assert (again["id"], again["version"], again["max_instances"]) == ("acme/again", model["version"], 2)
    assert rig.store.aborted[-1] == upload["id"]
    assert (await rig.acme.get("/v1/uploads")).json()["data"] == []
    assert (await rig.acme.delete("/v1/models/glossary")).status_code == 200
    assert await free_retired_versions(rig.parts.database, rig.services.store, retired_for_s=0) == 0
    assert await completes(rig.acme, await begun(rig.acme, "third")) == [True]  # those of the second model


async def test_another_tenant_sends_all_files(rig: RestRig) -> None:
    await published(rig.acme)
    async with await rig.client_of("zoo") as zoo:
        upload = await begun(zoo)
        assert [(file["received"], file["complete"]) for file in upload["files"]] == [(0, False)]
        assert await completes(zoo, upload) == [False]


async def test_files_of_a_model_deleted_before_the_commit_are_asked_for(rig: RestRig) -> None:
    await published(rig.acme)
    upload = await begun(rig.acme, "again")
    assert (await rig.acme.delete("/v1/models/glossary")).status_code == 200
    rig.store.refusal = Conflict("w: the file is not complete", field="w")
    commit = f"/v1/uploads/{upload['id']}/commit"
    assert (await rig.acme.post(commit)).status_code == 409
    assert await completes(rig.acme, upload) == [False]
    rig.store.refusal = None
    await rig.acme.put(f"/v1/uploads/{upload['id']}/files/w", content=WEIGHTS)
    assert (await rig.acme.post(commit)).json()["id"] == "acme/again"


async def test_other_files_names_or_weights_are_another_source(rig: RestRig) -> None:
    await published(rig.acme)
    for files in ({"w": b"x"}, {"v": WEIGHTS}, {"w": WEIGHTS, "config.json": b"{}"}):
        assert not any(file["complete"] for file in (await begun(rig.acme, "other", files))["files"])
    body = {"model": "small", "files": declared({"w": WEIGHTS}), "quantize": "int8"}
    upload = (await rig.acme.post("/v1/uploads", json=body)).json()
    assert await completes(rig.acme, upload) == [False]
    await rig.acme.put(f"/v1/uploads/{upload['id']}/files/w", content=WEIGHTS)
    rig.store.content = "two"
    reply = await rig.acme.post(f"/v1/uploads/{upload['id']}/commit", json={"quantize": "int8"})
    assert reply.json()["version"] == "version-two"
    assert (await rig.acme.post("/v1/uploads", json=body)).json()["files"][0]["complete"] is True


async def test_a_commit_with_another_quantize_asks_for_the_files(rig: RestRig) -> None:
    await published(rig.acme)
    upload = await begun(rig.acme, "small")
    rig.store.refusal = Conflict("w: the file is not complete", field="w")
    commit = f"/v1/uploads/{upload['id']}/commit"
    assert (await rig.acme.post(commit, json={"quantize": "int8"})).status_code == 409
    assert await completes(rig.acme, upload) == [False]


async def test_a_version_rolled_back_to_has_no_known_source(rig: RestRig) -> None:
    await published(rig.acme)
    rig.store.content = "two"
    await published(rig.acme, data=b"two")
    assert await completes(rig.acme, await begun(rig.acme, "first")) == [False]
    assert (await rig.acme.post("/v1/models/glossary/rollback")).status_code == 200
    for data in (WEIGHTS, b"two"):
        assert await completes(rig.acme, await begun(rig.acme, "other", {"w": data})) == [False]


async def test_known_weights_for_an_engine_that_no_worker_has_are_refused(rig: RestRig) -> None:
    rig.store.needed_engine = "vllm"
    await published(rig.acme)
    upload = await begun(rig.acme, "again")
    reply = await rig.acme.post(f"/v1/uploads/{upload['id']}/commit")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "engine")
    assert "only the engine vllm computes these weights" in reply.json()["error"]["message"]


async def test_an_upload_of_an_earlier_release_has_no_known_source(rig: RestRig) -> None:
    """Its rows have an empty source, which is that of no model."""
    await published(rig.acme)
    upload = await begun(rig.acme, "again")
    async with rig.parts.database.write() as connection:
        await connection.execute(update(uploads).values(source=""))
        await connection.execute(update(models).values(source=""))
    assert await completes(rig.acme, upload) == [False]


async def test_a_version_that_an_earlier_release_published_is_not_taken_for_the_files_before_it(rig: RestRig) -> None:
    """It changes the version of a model and leaves the source."""
    await published(rig.acme)
    async with rig.parts.database.write() as connection:
        await connection.execute(update(models).values(source=func.replace(models.c.source, "@", "@of-another-")))
    assert await completes(rig.acme, await begun(rig.acme, "again")) == [False]


async def test_an_aborted_upload_of_known_files_publishes_nothing(rig: RestRig) -> None:
    """The abort comes between the look at the upload and the publication."""
    await published(rig.acme)
    upload = await begun(rig.acme, "again")
    async with rig.parts.database.write() as connection:
        (row,) = (await connection.execute(select(uploads).where(uploads.c.upload_id == upload["id"]))).all()
        await connection.execute(delete(uploads))
    known = Upload(row.upload_id, row.tenant_id, "acme", row.model, row.declared_bytes, row.source, 0)
    with pytest.raises(NotFound):
        async for _ in rig.services.uploads.commit(known, TenantSettings(), 0):
            pass
    assert (await rig.acme.get("/v1/models/again")).status_code == 404
