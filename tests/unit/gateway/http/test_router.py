"""The router checks the key, the tenant's share and the declared length before it reads a body."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from datetime import UTC
from email.utils import parsedate_to_datetime
from itertools import product

import httpx
import pytest

from tests.support.raw_http import RawAnswer, head, raw_connection
from tests.support.wait import eventually
from tests.unit.gateway.http.conftest import RestRig
from torchrelay.common.errors import UploadRefused

ROUTES = [
    ("POST", "/v1/keys"),
    ("POST", "/v1/tenants"),
    ("PATCH", "/v1/tenants/acme"),
    ("PUT", "/v1/prices"),
    ("POST", "/v1/uploads"),
    ("POST", "/v1/uploads/upl-1/commit"),
    ("PATCH", "/v1/models/m"),
    ("DELETE", "/v1/keys/x"),
    ("GET", "/v1/models"),
    ("GET", "/v1/usage"),
    ("POST", "/v1/nothing"),
]
FILE = ("PUT", "/v1/uploads/upl-1/files/w")  # of any length
ODD_TARGETS = [("TRACE", "/"), ("GET", "http://other/v1/models"), ("GET", "/v1/../../etc/passwd")]
HUGE = 100 << 20
TOO_LARGE = "the body is larger than 65,536 bytes"


async def early_answer(rig: RestRig, method: str, path: str, **headers: str | int) -> RawAnswer:
    """The answer to a request whose body does not arrive."""
    async with raw_connection(rig.port) as raw:
        await raw.send(head(method, path, **headers))
        answer = await raw.answer()
        if "connection" in answer.headers:
            await raw.wait_closed()
    return answer


@pytest.mark.parametrize("key", ["", "Bearer tr-nobody", "Basic abc"])
async def test_missing_key_is_refused_before_the_body(rig: RestRig, key: str, subtests: pytest.Subtests) -> None:
    authorization = {"authorization": key} if key else {}
    framings: list[dict[str, str | int]] = [
        {"content_length": HUGE},
        {"transfer_encoding": "chunked"},
        {"content_length": 9, "expect": "100-continue"},
    ]
    for (method, path), framing in product([*ROUTES, FILE, *ODD_TARGETS], framings):
        with subtests.test(f"{method} {path} {framing}"):
            answer = await early_answer(rig, method, path, **authorization, **framing)
            assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert ("connection" in answer.headers) is ("expect" in framing)
            assert json.loads(answer.body)["error"]["code"] == "invalid_api_key"


async def test_declared_length_above_the_limit_is_refused_at_once(rig: RestRig, subtests: pytest.Subtests) -> None:
    key = rig.acme.headers["authorization"]
    for method, path in ROUTES:
        with subtests.test(f"{method} {path}"):
            answer = await early_answer(rig, method, path, authorization=key, content_length=HUGE)
            expected = (
                TOO_LARGE.replace("65,536", "1,048,576") if (method, path) == ("POST", "/v1/uploads") else TOO_LARGE
            )
            assert (answer.status, answer.message) == (413, expected)
            declared: dict[str, str | int] = {"content_length": HUGE, "expect": "100-continue"}
            answer = await early_answer(rig, method, path, authorization=key, **declared)
            assert (answer.status, answer.headers["connection"]) == (413, "close")


async def test_public_pages_read_no_body_and_name_no_tenant(rig: RestRig) -> None:
    for path in ("/health", "/openapi.json"):
        answer = await early_answer(rig, "GET", path, content_length=HUGE)
        assert answer.status == 200 and b"acme" not in answer.body


async def test_every_answer_has_an_id_of_its_own(rig: RestRig) -> None:
    answers = []
    for method, path in [*ROUTES, FILE, ("GET", "/health"), ("GET", "/openapi.json"), ("GET", "/none")]:
        answers.append(await rig.acme.request(method, path))
        answers.append(await rig.acme.request(method, path, headers={"authorization": ""}))
    assert {answer.status_code for answer in answers} >= {200, 400, 401, 403, 404}
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert all(each.startswith("req-") for each in ids) and len(set(ids)) == len(ids)


async def test_public_pages_allow_only_reading(rig: RestRig) -> None:
    for path, method in product(("/", "/health", "/openapi.json"), ("POST", "PUT", "DELETE", "OPTIONS")):
        refused = await rig.acme.request(method, path)
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
        assert refused.json()["error"]["code"] == "method_not_allowed"
        assert (await rig.acme.request(method, path, headers={"authorization": ""})).status_code == 401


@pytest.mark.parametrize("has_key", [True, False])
async def test_head_is_answered_as_get_without_the_body(rig: RestRig, has_key: bool, subtests: pytest.Subtests) -> None:
    key = {"authorization": rig.acme.headers["authorization"]} if has_key else {}
    for path in ("/", "/health", "/openapi.json", "/v1/models", "/v1/models/acme/absent", "/v1/none"):
        got = await rig.acme.get(path, headers=key or {"authorization": ""})
        with subtests.test(path):
            async with raw_connection(rig.port) as raw:
                await raw.send(head("HEAD", path, **key))
                answer = await raw.answer(has_body=False)
                assert (answer.status, answer.headers["content-type"]) == (got.status_code, "application/json")
                if path != "/v1/none":  # which names the method
                    assert answer.headers["content-length"] == got.headers["content-length"]
                if "connection" not in answer.headers:
                    await raw.send(head("GET", path, **key))
                    assert (await raw.answer()).body == got.content


async def test_all_methods_of_a_path_are_listed(rig: RestRig) -> None:
    allowed = {
        "/v1/models": "GET, HEAD",
        "/v1/models/x": "DELETE, GET, HEAD, PATCH",
        "/v1/models/acme/x": "DELETE, GET, HEAD, PATCH",
        "/v1/keys": "GET, HEAD, POST",
        "/v1/keys/x": "DELETE, PATCH",
        "/v1/uploads/x": "DELETE, GET, HEAD",
        "/v1/prices": "GET, HEAD, PUT",
        "/v1/orphans": "DELETE, GET, HEAD",
    }
    refused = {path: await rig.admin.request("TRACE", path) for path in allowed}
    assert {path: (reply.status_code, reply.headers["allow"]) for path, reply in refused.items()} == {
        path: (405, methods) for path, methods in allowed.items()
    }


async def test_answers_have_the_date(rig: RestRig) -> None:
    for path in ("/health", "/v1/models", "/v1/none"):
        (date,) = (await rig.acme.get(path)).headers.get_list("date")
        assert parsedate_to_datetime(date).tzinfo is UTC


async def test_buffered_body_bytes_per_tenant_are_bounded(rig: RestRig) -> None:
    key = rig.acme.headers["authorization"]
    share = rig.settings.max_buffered_body_bytes_per_tenant
    half = head("POST", "/v1/keys", authorization=key, content_length=share // 2) + bytes(share // 2 - 1)
    async with raw_connection(rig.port) as first, raw_connection(rig.port) as second:
        for raw in (first, second):
            await raw.send(half)
        await eventually(lambda: rig.shares.body_bytes.num_held == share - 2)
        refused = await rig.acme.post("/v1/keys", json={"name": "x"})
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert "max_buffered_body_bytes_per_tenant" in refused.json()["error"]["message"]
        async with await rig.client_of("zoo") as zoo:
            assert (await zoo.post("/v1/keys", json={"name": "x"})).status_code == 201
        for raw in (first, second):
            await raw.send(b" ")
            assert (await raw.answer()).status == 400
    assert rig.shares.body_bytes.num_held == 0
    assert (await rig.acme.post("/v1/keys", json={"name": "x"})).status_code == 201


async def test_buffered_body_bytes_in_total_are_bounded(rig: RestRig) -> None:
    limits = rig.settings
    rig.shares.body_bytes.take("others-1", limits.max_buffered_body_bytes_per_tenant)
    rig.shares.body_bytes.take("others-2", limits.max_buffered_body_bytes - limits.max_buffered_body_bytes_per_tenant)
    refused = await rig.acme.post("/v1/keys", json={"name": "x"})
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    assert (refused.json()["error"]["code"], "max_buffered_body_bytes)" in refused.text) == ("at_capacity", True)


async def test_open_rest_requests_per_tenant_are_bounded(rig: RestRig) -> None:
    limit = rig.settings.max_open_requests_per_tenant
    key = rig.acme.headers["authorization"]
    async with AsyncExitStack() as stack:
        zoo = await stack.enter_async_context(await rig.client_of("zoo"))
        connections = [await stack.enter_async_context(raw_connection(rig.port)) for _ in range(limit)]
        for raw in connections:
            await raw.send(head("POST", "/v1/keys", authorization=key, content_length=9))
        await eventually(lambda: rig.shares.requests.num_held == limit)
        refused = await rig.acme.get("/v1/models")
        assert refused.status_code == 429
        assert "max_open_requests_per_tenant" in refused.json()["error"]["message"]
        assert (await zoo.get("/v1/models")).status_code == 200
        connections[0].close()
        await eventually(lambda: rig.shares.requests.num_held < limit)
        assert (await rig.acme.get("/v1/models")).status_code == 200


async def test_uploads_under_way_per_tenant_are_bounded(rig: RestRig) -> None:
    files = [{"path": f"f{number}", "size": 9, "sha256": "0" * 64} for number in range(3)]
    upload = (await rig.acme.post("/v1/uploads", json={"model": "m", "files": files})).json()["id"]
    key = rig.acme.headers["authorization"]
    async with raw_connection(rig.port) as first, raw_connection(rig.port) as second:
        for number, raw in enumerate((first, second)):
            path = f"/v1/uploads/{upload}/files/f{number}"
            await raw.send(head("PUT", path, authorization=key, content_length=9))
        await eventually(lambda: rig.shares.uploads.num_held == 2)
        for method, path in (("PUT", "files/f2"), ("POST", "commit")):
            refused = await rig.acme.request(method, f"/v1/uploads/{upload}/{path}", content=b"123456789")
            assert (refused.status_code, "max_uploads_per_tenant" in refused.text) == (429, True)
        await first.send(b"123456789")
        assert (await first.answer()).status == 200
    await eventually(lambda: rig.shares.uploads.num_held == 0)
    assert (await rig.acme.put(f"/v1/uploads/{upload}/files/f2", content=b"123456789")).status_code == 200


async def test_rest_of_a_refused_file_is_discarded(rig: RestRig) -> None:
    """A reset could overtake the refusal, so the connection stays open."""
    size = 4 << 20
    async with raw_connection(rig.port) as raw:
        key = rig.acme.headers["authorization"]
        await raw.send(head("PUT", "/v1/uploads/upl-1/files/w", authorization=key, content_length=size))
        assert (await raw.answer()).status == 404
        await raw.send(bytes(size) + head("GET", "/v1/models", authorization=key))
        assert (await raw.answer()).status == 200


async def test_callers_id_comes_back_on_every_path(rig: RestRig) -> None:
    for path in ("/v1/models", "/v1/models/absent"):
        answer = await rig.acme.get(path, headers={"x-request-id": "trace-7"})
        assert answer.headers["x-client-request-id"] == "trace-7" != answer.headers["x-request-id"]


async def test_queries_wait_only_for_those_of_their_tenant(rig: RestRig) -> None:
    queries = rig.services.queries
    async with await rig.client_of("zoo") as zoo, queries.turn(rig.parts.acme.tenant_id):
        slow = [asyncio.ensure_future(rig.acme.get("/v1/usage")) for _ in range(6)]
        quick = await zoo.post("/v1/keys", json={"name": "y"})
        assert quick.status_code == 201
        assert (await rig.acme.get("/v1/models/absent")).status_code == 404, "reading a row needs no turn"
        assert (await rig.acme.get("/v1/models")).status_code == 200, "an index answers lists"
        assert (await rig.acme.get("/v1/keys")).status_code == 200
        too_many = [asyncio.ensure_future(rig.acme.get("/v1/requests")) for _ in range(6)]
        refused, _ = await asyncio.wait(too_many, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        reply: httpx.Response = refused.pop().result()
        assert (reply.status_code, "max_queries_per_tenant" in reply.text) == (429, True)
        assert not any(each.done() for each in slow)
    replies = await asyncio.gather(*slow, *too_many)
    assert [each.status_code for each in replies[:6]] == [200] * 6
    assert {each.status_code for each in replies[6:]} == {200, 429}


@pytest.mark.parametrize("name", ["模型.safetensors", "😀" * 500, "é" * 480 + ".safetensors", "a\tb", "a\x7f\u202eb"])
async def test_refusal_keeps_non_ascii_names(rig: RestRig, name: str) -> None:
    files = [{"path": name, "size": 0, "sha256": "0" * 64}]
    refusal = UploadRefused(f"{name}: the header of {name} is longer than the file", field=name)
    rig.store.begin_refusal = refusal
    begun = await rig.acme.post("/v1/uploads", json={"model": "m", "files": files})
    rig.store.begin_refusal, rig.store.refusal = None, refusal
    upload = (await rig.acme.post("/v1/uploads", json={"model": "m", "files": files})).json()["id"]
    committed = await rig.acme.post(f"/v1/uploads/{upload}/commit")
    for reply in (begun, committed):
        assert reply.status_code == 422
        error = json.loads(reply.text)["error"]
        assert error["message"].startswith(name) and name.startswith(error["param"])
        assert len(error["param"]) >= min(len(name), 256)


async def test_path_with_empty_parts_is_the_path_without_them(rig: RestRig) -> None:
    async with raw_connection(rig.port) as raw:
        for path in ("/v1//models", "//v1/models", "/v1/models/", "///v1///models//"):
            await raw.send(head("GET", path, authorization=rig.acme.headers["authorization"]))
            answer = await raw.answer()
            assert answer.status == 200 and json.loads(answer.body)["object"] == "list"


async def test_compressed_body_is_refused_by_name(rig: RestRig) -> None:
    for path, encoding in product(("/v1/keys", "/v1/uploads"), ("gzip", "br", "deflate, gzip")):
        headers = {"content-encoding": encoding}
        answer = await rig.acme.post(path, content=b"{}", headers=headers)
        said = f"Content-Encoding '{encoding}' is not supported: send the body without compression"
        assert (answer.status_code, answer.json()["error"]["message"]) == (415, said)


async def test_body_that_stops_ends_its_request(rig: RestRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrelay.gateway.exchange.http_request.BODY_SILENCE_S", 0.2)
    files = [{"path": "f", "size": 9, "sha256": "0" * 64}]
    upload = (await rig.acme.post("/v1/uploads", json={"model": "m", "files": files})).json()["id"]
    for method, path in (("POST", "/v1/keys"), ("PUT", f"/v1/uploads/{upload}/files/f")):
        async with raw_connection(rig.port) as raw:
            await raw.send(head(method, path, authorization=rig.acme.headers["authorization"], content_length=9) + b"{")
            answer = await raw.answer()
            assert (answer.status, answer.message) == (408, "nothing of the body arrived for 0.2 s")
