"""Files and batches over REST; how batches run is tested in batches/."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.unit.gateway.http.conftest import RestRig
from torchrelay.gateway.sql.tables import files

LINE = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}).encode()


@pytest.fixture
async def client(rig: RestRig) -> AsyncIterator[openai.AsyncOpenAI]:
    key, quick = rig.acme.headers["authorization"].split()[1], openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(api_key=key, base_url=f"{rig.url}/v1", max_retries=0, http_client=quick) as opened:
        yield opened


async def test_file_is_sent_in_slices_read_and_deleted(rig: RestRig, client: openai.AsyncOpenAI) -> None:
    content = LINE * 20_000
    file = await client.files.create(file=("in put.jsonl", content), purpose="batch")
    assert (file.bytes, file.filename, file.purpose, file.object) == (len(content), "in put.jsonl", "batch", "file")
    assert rig.store.largest_slice < 1 << 20
    assert (await client.files.content(file.id)).content == content
    assert await client.files.retrieve(file.id) == file
    other = await rig.client_of("birch")
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        assert (await other.request(method, f"/v1/files/{file.id}{path}")).status_code == 404
    await other.aclose()
    assert (await client.files.delete(file.id)).deleted and not rig.store.objects
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(file.id)


async def test_purpose_may_follow_the_file(rig: RestRig) -> None:
    parts = [("file", ("a.jsonl", LINE)), ("purpose", (None, b"batch"))]
    reply = await rig.acme.post("/v1/files", files=parts)
    assert reply.status_code == 200 and reply.json()["bytes"] == len(LINE)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"files": {"file": ("a", LINE)}, "data": {"purpose": "fine-tune"}}, "purpose"),
        ({"files": {"file": ("a", LINE)}}, "purpose"),
        ({"files": {"file": ("a", b"")}, "data": {"purpose": "batch"}}, "file"),
        ({"files": {"other": ("a", LINE)}, "data": {"purpose": "batch"}}, "file"),
        (
            {"files": {"file": ("a", LINE)}, "data": {"purpose": "batch", "expires_after[seconds]": "9"}},
            "expires_after",
        ),
        ({"json": {"purpose": "batch"}}, "Content-Type"),
        ({"content": b"--x\r\nbad", "headers": {"content-type": "multipart/form-data; boundary=x"}}, None),
    ],
)
async def test_faulty_form_leaves_nothing_behind(rig: RestRig, options: dict[str, Any], field: str | None) -> None:
    reply = await rig.acme.post("/v1/files", **options)
    assert reply.status_code == 400 and (reply.json()["error"]["param"] or "").startswith(field or "")
    assert (await rig.acme.get("/v1/files")).json()["data"] == [] and not rig.store.objects
    async with rig.parts.database.read() as connection:
        assert (await connection.execute(files.select())).all() == []


async def test_files_count_in_the_quota_and_are_few(rig: RestRig, client: openai.AsyncOpenAI) -> None:
    small = await rig.client_of("small", storage_quota_bytes=1000)
    form: dict[str, Any] = {"files": {"file": ("a", b"x" * 700)}, "data": {"purpose": "batch"}}
    sent = await small.post("/v1/files", **form)
    assert sent.status_code == 200
    refused = await small.post("/v1/files", **form)
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "file")
    await small.aclose()
    names = [(await client.files.create(file=("a", LINE), purpose="batch")).id for _ in range(3)]
    with pytest.raises(openai.PermissionDeniedError, match="3 files"):
        await client.files.create(file=("a", LINE), purpose="batch")
    assert [file.id async for file in client.files.list(limit=2)] == names[::-1]
    assert [file.id async for file in client.files.list(limit=2, order="asc")] == names


async def test_batch_is_shown_listed_and_cancelled(rig: RestRig, client: openai.AsyncOpenAI) -> None:
    file = await client.files.create(file=("a", LINE), purpose="batch")

    async def create(**changes: Any) -> openai.types.Batch:
        given: dict[str, Any] = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
        return await client.batches.create(**given | changes)

    made = [await create(metadata={"a": "b"}), await create()]
    assert (made[0].status, made[0].metadata, made[0].errors) == ("validating", {"a": "b"}, None)
    assert made[0].expires_at == made[0].created_at + 86400
    assert [batch.id async for batch in client.batches.list(limit=1)] == [made[1].id, made[0].id]
    with pytest.raises(openai.RateLimitError, match="2 batches"):
        await create()
    with pytest.raises(openai.ConflictError):
        await client.files.delete(file.id)
    for _ in range(2):
        assert (await client.batches.cancel(made[0].id)).status == "cancelling"
    other = await rig.client_of("birch")
    assert (await other.post(f"/v1/batches/{made[1].id}/cancel")).status_code == 404
    await other.aclose()
    assert [batch["id"] for batch in (await rig.admin.get("/v1/batches")).json()["data"]] == [made[1].id, made[0].id]
    for changes in ({"endpoint": "/v1/rerank"}, {"completion_window": "1h"}, {"metadata": {"a": "b" * 513}}):
        with pytest.raises(openai.BadRequestError):
            await create(**changes)
    with pytest.raises(openai.NotFoundError):
        await create(input_file_id="file-none")


async def test_price_of_batches_is_a_row_of_its_own(rig: RestRig) -> None:
    async def put(**changes: Any) -> httpx.Response:
        price = {"prompt_nano": 10, "cached_nano": 5, "output_nano": 20}
        return await rig.admin.put("/v1/prices", json=price | changes)

    assert (await put(service="batch")).json()["service"] == "batch"
    assert (await put(service="night")).status_code == 400
    prices = rig.parts.prices
    assert (await prices.current("acme/a", "batch")).prompt_nano == 10 != (await prices.current("acme/a")).prompt_nano
    await put(model="acme/a", prompt_nano=7)
    assert (await prices.current("acme/a", "batch")).prompt_nano == 10
    await put(model="acme/a", service="batch", prompt_nano=6)
    assert (await prices.current("acme/a", "batch")).prompt_nano == 6
    assert (await prices.current("acme/a")).prompt_nano == 7
