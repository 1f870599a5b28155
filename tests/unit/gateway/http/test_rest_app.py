"""Health, refusals and bodies of the REST routes, values of fields, pages of other origins, and the schema."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.support.cpu_steps import MAX_STEP_S, without_collections
from tests.support.wait import eventually
from tests.unit.gateway.http.conftest import RestRig
from tests.unit.gateway.http.routes.test_uploads import published
from torchrelay.gateway.dialects.openai.requests import ChatBody
from torchrelay.gateway.http.cors import CorsApp
from torchrelay.gateway.http.openapi import TOKEN_PATHS
from torchrelay.gateway.http.server import http_server
from torchrelay.gateway.settings import GatewaySettings


def fault(reply: httpx.Response) -> dict[str, Any]:
    """The error object, checked for OpenAI's format."""
    body = reply.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


async def test_health_is_keyless_and_reports_a_lost_database(rig: RestRig) -> None:
    async with httpx.AsyncClient(base_url=rig.url, trust_env=False) as nobody:
        reply = await nobody.get("/health")
        assert (reply.status_code, reply.json()) == (200, {"status": "ok", "unavailable": [], "degraded": []})
        rig.parts.database.interrupt()

        async def is_reported() -> bool:
            return (await nobody.get("/health")).status_code != 200

        await eventually(is_reported)
        reply = await nobody.get("/health")
        assert reply.status_code == 503
        assert reply.json() == {"status": "unavailable", "unavailable": ["database"], "degraded": []}


REFUSALS: list[tuple[str, str, Any, int, str | None, str | None]] = [
    ("GET", "/v1/nothing", None, 404, None, "not_found"),
    ("PATCH", "/v1/keys", {}, 405, None, "method_not_allowed"),
    ("POST", "/v1/keys", {"nam": "x"}, 400, "nam", "invalid_request"),
    ("POST", "/v1/keys", {"requests_per_minute": 0}, 400, "requests_per_minute", "invalid_request"),
    ("POST", "/v1/uploads", {"model": "m", "files": [{"path": "a", "size": -1}]}, 400, "files.0.size", None),
    ("GET", "/v1/usage?group_by=moon", None, 400, "group_by", "invalid_request"),
    ("GET", "/v1/invoices/2026", None, 400, "period", "invalid_request"),
    ("GET", "/v1/invoices/2026-11?format=pdf", None, 400, "format", "invalid_request"),
    ("POST", "/v1/invoices/2026-01/close", None, 403, None, "permission_denied"),
    ("POST", "/v1/adjustments", {"tenant": "acme", "period": "2026-01"}, 403, None, "permission_denied"),
    ("GET", "/v1/models/absent", None, 404, "model", "model_not_found"),
    ("GET", "/v1/models/other/absent", None, 404, "model", "model_not_found"),
    ("PATCH", "/v1/models/absent", {}, 404, "model", "model_not_found"),
    ("DELETE", "/v1/models/absent", None, 404, "model", "model_not_found"),
    ("DELETE", "/v1/keys/absent", None, 404, "key_id", "not_found"),
    ("GET", "/v1/uploads/absent", None, 404, "upload_id", "not_found"),
    ("GET", "/v1/tenants", None, 403, None, "permission_denied"),
    ("PUT", "/v1/prices", {"prompt_nano": 1, "cached_nano": 1, "output_nano": 1}, 403, None, "permission_denied"),
    ("GET", "/v1/reconcile", None, 403, None, "permission_denied"),
    ("GET", "/v1/usage?tenant=other", None, 403, "tenant", "permission_denied"),
]


async def test_refusals_have_openais_shape(rig: RestRig, subtests: pytest.Subtests) -> None:
    for method, path, body, status, param, code in REFUSALS:
        with subtests.test(f"{method} {path} {body}"):
            reply = await rig.acme.request(method, path, json=body)
            error = fault(reply)
            assert (reply.status_code, error["param"]) == (status, param)
            assert code is None or error["code"] == code


async def test_path_without_version_names_the_right_path(rig: RestRig) -> None:
    for path in ("/chat/completions", "/completions"):
        assert (await rig.acme.post(f"/v1{path}", json={})).content == b"tokens"
        reply = await rig.acme.post(path, json={})
        assert (reply.status_code, fault(reply)["message"]) == (404, f"{path} not found; did you mean /v1{path}?")
        reply = await rig.acme.post(f"/v1/v1{path}", json={})
        assert fault(reply)["message"] == f"/v1/v1{path} not found; did you mean /v1{path}?"
    reply = await rig.acme.post("/v1/v1/messages", json={})
    assert fault(reply)["message"] == "/v1/v1/messages not found; did you mean /v1/messages?"
    assert fault(await rig.acme.get("/nothing"))["message"] == "/nothing not found"


async def test_body_must_be_json_and_say_so(rig: RestRig) -> None:
    async def send(
        content: bytes, content_type: str | None, method: str = "POST", path: str = "/v1/keys"
    ) -> httpx.Response:
        return await rig.acme.request(
            method, path, content=content, headers={"content-type": content_type} if content_type else {}
        )

    for content_type in ("application/json; charset=utf-8", "Application/JSON", "application/x+json"):
        assert (await send(b'{"name": "x"}', content_type)).status_code == 201
    invalid = await send(b"{", "application/json")
    assert (invalid.status_code, fault(invalid)["message"]) == (400, "the body is not valid JSON")
    undeclared = await send(b'{"model": "m", "files": []}', None, path="/v1/uploads")
    said = "send the body with the header `content-type: application/json`, which is missing"
    assert (undeclared.status_code, fault(undeclared)["param"], fault(undeclared)["message"]) == (400, None, said)
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "application/jsonl"):
        for method, path in (("POST", "/v1/uploads"), ("POST", "/v1/keys"), ("PATCH", "/v1/models/x")):
            reply = await send(b"{}", content_type, method, path)
            error = fault(reply)
            assert (reply.status_code, error["param"], error["code"]) == (415, "Content-Type", "invalid_request")
            hint = "send JSON, as `Content-Type: application/json`"
            assert error["message"] == f"Content-Type {content_type!r} is not supported: {hint}"


async def test_oversized_body_is_refused_with_or_without_a_length(rig: RestRig) -> None:
    large = b'{"name":"' + b"x" * (65 << 10) + b'"}'

    async def undeclared() -> Any:
        yield large[: 32 << 10]
        yield large[32 << 10 :]

    for content in (large, undeclared()):
        reply = await rig.acme.post("/v1/keys", content=content)
        assert reply.status_code == 413
        assert fault(reply) == {
            "message": "the body is larger than 65,536 bytes",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_request",
        }


async def test_declaration_of_an_upload_may_name_512_files(rig: RestRig) -> None:
    files = [{**FILE, "path": f"{'a' * 20}/{number}.safetensors"} for number in range(512)]
    declared = await rig.acme.post("/v1/uploads", json={"model": "m", "files": files})
    assert declared.status_code == 201 and len(declared.request.content) > 64 << 10
    refused = await rig.acme.post("/v1/uploads", json={"model": "m", "files": [*files, FILE]})
    assert (refused.status_code, fault(refused)["param"]) == (400, "files")


def of_size(num_bytes: int, begin: bytes, part: bytes, end: bytes) -> bytes:
    """``part`` again and again between ``begin`` and ``end``; ``%d`` in it is its number."""
    num_parts = (num_bytes - len(begin) - len(end)) // (len(part) + 4 * part.count(b"%d"))
    numbered = (part % number for number in range(10**5, 10**5 + num_parts)) if b"%d" in part else [part] * num_parts
    return begin + b"".join(numbered) + end


HOSTILE = {  # the beginning of a body, what is repeated, and its end
    "unknown fields": (b"{", b'"%d":1,', b'"name":""}'),
    "fields of a file": (b'{"model":"m","files":[{', b'"%d":1,', b'"path":""}]}'),
    "numbers as files": (b'{"model":"m","files":[', b"1,", b"1]}"),
    "deep strings": (b'{"name":' + b"[" * 900, b'"",', b'""' + b"]" * 900 + rb',"a":"\u0000"}'),
    "surrogates": (b'{"name":["', rb'\ud800","', b'"]}'),
    "backslashes": (b'{"name":"', rb"\\", rb'\u0000"}'),
    "brackets": (b'{"name":', b"[", b""),
}


@pytest.mark.parametrize(
    ("path", "num_bytes"), [("/v1/keys", 64 << 10), ("/v1/uploads", 120 << 10), ("/v1/keys", 8 << 20)]
)
async def test_no_body_stops_the_event_loop(rig: RestRig, subtests: pytest.Subtests, path: str, num_bytes: int) -> None:
    """A step of the loop takes at most 0.2 s of CPU, whatever a key sends."""
    longest_s, may_end = 0.0, asyncio.Event()

    async def watch() -> None:
        nonlocal longest_s
        while not may_end.is_set():
            begin_s = time.thread_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.thread_time() - begin_s)

    for name, (begin, part, end) in HOSTILE.items():
        with subtests.test(name):
            content, longest_s = of_size(num_bytes, begin, part, end), 0.0
            may_end.clear()
            watching = asyncio.create_task(watch())
            is_json = {"content-type": "application/json"}
            with without_collections():
                answer = await rig.acme.post(path, content=content, headers=is_json)
                may_end.set()
                await watching
            assert answer.status_code in (400, 413), answer.text[:300]
            assert longest_s < MAX_STEP_S


async def test_unreachable_database_is_unavailable(rig: RestRig) -> None:
    rig.parts.database.interrupt()
    rig.parts.table_versions.invalidate()
    reply = await rig.acme.get("/v1/models")
    assert (reply.status_code, fault(reply)["code"]) == (503, "unavailable")


PRICE = {"prompt_nano": 9, "cached_nano": 1, "output_nano": 1}
FILE = {"path": "w", "size": 1, "sha256": "0" * 64}
FIELDS: list[tuple[str, str, dict[str, Any], str]] = [
    *[("PUT", "/v1/prices", PRICE, name) for name in PRICE],
    ("POST", "/v1/keys", {"tenant": "acme"}, "requests_per_minute"),
    ("PATCH", "/v1/tenants/acme", {}, "budget_nano"),
    ("PATCH", "/v1/tenants/acme", {}, "storage_quota_bytes"),
    ("PATCH", "/v1/models/acme/glossary", {}, "max_instances"),
    ("PATCH", "/v1/models/acme/glossary", {}, "min_instances"),
]


async def test_whole_numbers_are_integers_and_others_are_refused(rig: RestRig, subtests: pytest.Subtests) -> None:
    made = await rig.acme.post("/v1/uploads", json={"model": "m", "files": [{**FILE, "size": 9.0}]})
    assert (made.status_code, made.json()["files"][0]["size"]) == (201, 9)
    refused = await rig.acme.post("/v1/uploads", json={"model": "m", "files": [{**FILE, "size": 9.5}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "files.0.size")
    await published(rig.acme)
    for method, path, body, name in FIELDS:
        with subtests.test(f"{path} {name}"):
            reply = await rig.admin.request(method, path, json={**body, name: 4.0})
            assert reply.status_code in (200, 201)
            value = reply.json()[name]
            assert (value, type(value)) == (4, int)
            for wrong in (4.5, "4", False, True):
                refused = await rig.admin.request(method, path, json={**body, name: wrong})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("character", [r"\ud800", r"\u0000"])
async def test_every_rest_route_names_the_field_with_unusable_text(rig: RestRig, character: str) -> None:
    for method, path, field in (
        ("POST", "/v1/keys", "name"),
        ("POST", "/v1/tenants", "name"),
        ("PUT", "/v1/prices", "model"),
        ("PATCH", "/v1/models/acme/m", "schedule"),
        ("POST", "/v1/uploads", "model"),
    ):
        content, is_json = f'{{"{field}": "a{character}"}}', {"content-type": "application/json"}
        answer = await rig.admin.request(method, path, content=content, headers=is_json)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


async def test_nul_in_path_or_query_is_refused(rig: RestRig) -> None:
    for path in ("/v1/usage?model=a%00b", "/v1/models/a%00b", "/v1/requests/req-%00/explain"):
        answer = await rig.acme.get(path)
        assert answer.status_code in (400, 404), answer.text


PAGE, OTHER = "https://app.example", "https://other.example"
# What the JavaScript client of OpenAI sends from a browser.
SDK_HEADERS = (
    "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,"
    "x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout"
)
PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/acme/glossary", "/v1/none"]
Allowing = Callable[[str], AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def allowing(rig: RestRig) -> Allowing:
    """A client, without a key, of a gateway with this setting."""

    @asynccontextmanager
    async def allow(cors_origins: str) -> AsyncIterator[httpx.AsyncClient]:
        app = CorsApp(rig.router, GatewaySettings(cors_origins=cors_origins).allowed_origins)
        async with (
            http_server(app, "127.0.0.1", 0, 1) as server,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as client,
        ):
            yield client

    return allow


def preflight(origin: str) -> dict[str, str]:
    return {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": SDK_HEADERS}


@pytest.mark.parametrize(("setting", "allowed"), [(f"{PAGE}, http://localhost:3000", PAGE), ("*", "*")])
async def test_page_of_an_allowed_origin_may_call(rig: RestRig, allowing: Allowing, setting: str, allowed: str) -> None:
    async with allowing(setting) as client:
        for path in PATHS:
            asked = await client.options(path, headers=preflight(PAGE))
            assert (asked.status_code, asked.content) == (200, b"OK")
            assert asked.headers["access-control-allow-origin"] == allowed
            assert asked.headers["access-control-allow-headers"] == SDK_HEADERS
            methods = asked.headers["access-control-allow-methods"].split(", ")
            assert {"GET", "POST", "PUT", "PATCH", "DELETE"} <= set(methods)
            assert "access-control-allow-credentials" not in asked.headers
        key = {"origin": PAGE, "authorization": rig.acme.headers["authorization"]}
        for headers, status in ((key, 200), ({"origin": PAGE}, 401)):
            answer = await client.get("/v1/models", headers=headers)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, allowed)
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
            assert answer.headers["vary"] == "Origin"
        streamed = await client.post("/v1/chat/completions", headers=key, json={})
        assert (streamed.content, streamed.headers["access-control-allow-origin"]) == (b"tokens", allowed)


async def test_other_origins_and_other_clients_get_no_such_headers(rig: RestRig, allowing: Allowing) -> None:
    key = {"authorization": rig.acme.headers["authorization"]}
    async with allowing(PAGE) as client:
        for origin in (OTHER, PAGE + ".evil.example", "null", "http://app.example"):
            asked = await client.options("/v1/models", headers=preflight(origin))
            assert asked.status_code == 401
            answer = await client.get("/v1/models", headers={**key, "origin": origin})
            assert answer.status_code == 200
            for reply in (asked, answer):
                assert not [name for name in reply.headers if name.startswith("access-control-")]
        assert "access-control-allow-origin" not in (await client.get("/v1/models", headers=key)).headers


async def test_options_without_a_preflight_is_an_ordinary_request(rig: RestRig, allowing: Allowing) -> None:
    async with allowing("*") as client:
        key = {"authorization": rig.acme.headers["authorization"], "origin": PAGE}
        answer = await client.options("/v1/models", headers=key)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (405, "*")


async def schema_of(rig: RestRig) -> dict[str, Any]:
    schema: dict[str, Any] = (await rig.acme.get("/openapi.json")).json()
    return schema


async def test_token_paths_are_described(rig: RestRig) -> None:
    schema = await schema_of(rig)
    chat = schema["paths"]["/v1/chat/completions"]["post"]
    assert chat["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatBody"}
    body = schema["components"]["schemas"]["ChatBody"]
    assert body["properties"].keys() == set(ChatBody.__struct_fields__) and body["required"] == ["model", "messages"]
    assert {"type": "number", "minimum": 0, "maximum": 2} in body["properties"]["temperature"]["anyOf"]
    assert {"HTTPBearer": []} in schema["paths"]["/v1/messages"]["post"]["security"]


async def test_streams_are_described_by_their_events(rig: RestRig) -> None:
    paths = (await schema_of(rig))["paths"]
    streams = {
        path: paths[path]["post"]["responses"]["200"]["content"].get("text/event-stream") for path in TOKEN_PATHS
    }
    alone = [streams.pop(f"/v1/{name}") for name in ("embeddings", "rerank", "messages/count_tokens")]
    assert alone == [None] * 3
    for event in streams.values():
        assert event["schema"]["type"] == "object" and event["schema"]["required"] == ["data"]
        assert event["schema"]["properties"].keys() == {"event", "data"}


async def test_every_operation_has_a_key_and_true_errors(rig: RestRig) -> None:
    schema = await schema_of(rig)
    operations = [
        (path, method, operation) for path, each in schema["paths"].items() for method, operation in each.items()
    ]
    assert len(operations) > 24
    for path, method, operation in operations:
        assert {"HTTPBearer": []} in operation["security"], (path, method)
        statuses = operation["responses"].keys()
        assert statuses >= {"400", "401", "403", "404", "405", "413", "429", "500", "503"}
        assert ("422" in statuses) == path.startswith("/v1/uploads")
        error = "AnthropicError" if path.startswith("/v1/messages") else "ErrorBody"
        for status, response in operation["responses"].items():
            if status >= "400":
                shape = response["content"]["application/json"]["schema"]
                assert shape == {"$ref": f"#/components/schemas/{error}"}


async def test_every_reference_has_its_schema(rig: RestRig) -> None:
    schema = await schema_of(rig)

    def references(value: Any) -> set[str]:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        own = {value["$ref"]} if isinstance(value, dict) and "$ref" in value else set()
        return own.union(*map(references, inner))

    known = {f"#/components/schemas/{name}" for name in schema["components"]["schemas"]}
    assert references(schema) <= known
    assert not {name for name in known if "ValidationError" in name}


async def test_errors_have_the_described_shape(rig: RestRig) -> None:
    shape = (await schema_of(rig))["components"]["schemas"]
    for response in (
        await rig.acme.get("/v1/invoices/x"),
        await rig.acme.get("/v1/models/absent"),
        await rig.acme.get("/v1/reconcile"),
        await rig.acme.get("/v1/usage", headers={"authorization": ""}),
    ):
        assert response.status_code >= 400
        assert response.json().keys() == shape["ErrorBody"]["properties"].keys()
        assert response.json()["error"].keys() == shape["ErrorObject"]["properties"].keys()


async def test_unknown_and_repeated_query_parameters_are_refused(rig: RestRig) -> None:
    for method, path, name, known in (
        ("GET", "/v1/invoices/2026-01?month=2026-01", "month", "; known are format, tenant"),
        (
            "GET",
            "/v1/usage?from=2026-01-01&until=2026-02-01",
            "until",
            "; known are from, group_by, key, model, tenant, to",
        ),
        ("GET", "/v1/models?page=2", "page", "; known are after_id, before_id, limit"),
        ("GET", "/v1/prices?model=x", "model", ""),
        ("DELETE", "/v1/keys/x?force=1", "force", ""),
    ):
        refused = await rig.acme.request(method, path)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
        assert refused.json()["error"]["message"] == f"unknown query parameter '{name}'{known}"
    repeated = await rig.acme.get("/v1/usage?from=2026-01&from=2026-02")
    assert (repeated.status_code, repeated.json()["error"]["param"]) == (400, "from")
