from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.wait import eventually
from tests.unit.gateway.http.conftest import RestRig


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


async def test_token_paths_go_to_their_application(rig: RestRig) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert (await rig.acme.post(path, json={})).content == b"tokens"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param", "code"),
    [
        ("GET", "/v1/nothing", None, 404, None, "not_found"),
        ("PATCH", "/v1/keys", {}, 405, None, "method_not_allowed"),
        ("POST", "/v1/keys", {"nam": "x"}, 400, "nam", "invalid_request"),
        ("POST", "/v1/keys", {"requests_per_minute": 0}, 400, "requests_per_minute", "invalid_request"),
        ("POST", "/v1/uploads", {"model": "m", "files": [{"path": "a", "size": -1}]}, 400, "files.0.size", None),
        ("GET", "/v1/usage?group_by=moon", None, 400, "group_by", "invalid_request"),
        ("GET", "/v1/bill?period=2026", None, 400, "period", "invalid_request"),
        ("GET", "/v1/bill?period=soon", None, 400, "period", "invalid_request"),
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
    ],
)
async def test_refusals_have_openais_shape(
    rig: RestRig, method: str, path: str, body: Any, status: int, param: str | None, code: str | None
) -> None:
    reply = await rig.acme.request(method, path, json=body)
    error = fault(reply)
    assert (reply.status_code, error["param"]) == (status, param)
    assert code is None or error["code"] == code


@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
async def test_path_without_version_names_the_right_path(rig: RestRig, path: str) -> None:
    reply = await rig.acme.post(path, json={})
    assert (reply.status_code, fault(reply)["message"]) == (404, f"{path} not found; did you mean /v1{path}?")
    assert fault(await rig.acme.get("/nothing"))["message"] == "/nothing not found"


async def test_invalid_json_is_refused(rig: RestRig) -> None:
    reply = await rig.acme.post("/v1/keys", content=b"{", headers={"content-type": "application/json"})
    assert (reply.status_code, fault(reply)["message"]) == (400, "the body is not valid JSON")


async def test_undeclared_json_names_the_header(rig: RestRig) -> None:
    reply = await rig.acme.post("/v1/uploads", content=b'{"model": "m", "files": []}')
    error = fault(reply)
    assert (reply.status_code, error["param"]) == (400, None)
    assert error["message"] == "send the body with the header `content-type: application/json`, which is missing"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "application/jsonl"])
async def test_body_that_is_declared_as_something_else_is_refused(rig: RestRig, content_type: str) -> None:
    for method, path in (("POST", "/v1/uploads"), ("POST", "/v1/keys"), ("PATCH", "/v1/models/x")):
        reply = await rig.acme.request(method, path, content=b"{}", headers={"content-type": content_type})
        error = fault(reply)
        assert (reply.status_code, error["param"], error["code"]) == (415, "Content-Type", "invalid_request")
        hint = "send JSON, as `Content-Type: application/json`"
        assert error["message"] == f"Content-Type {content_type!r} is not supported: {hint}"


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON", "application/x+json"])
async def test_json_may_be_declared_with_parameters(rig: RestRig, content_type: str) -> None:
    reply = await rig.acme.post("/v1/keys", content=b'{"name": "x"}', headers={"content-type": content_type})
    assert reply.status_code == 201


async def test_oversized_body_is_refused_with_or_without_a_length(rig: RestRig) -> None:
    large = b'{"name":"' + b"x" * (65 << 10) + b'"}'

    async def undeclared() -> Any:
        yield large[: 32 << 10]
        yield large[32 << 10 :]

    for content in (large, undeclared()):
        reply = await rig.acme.post("/v1/keys", content=content)
        assert reply.status_code == 413
        assert fault(reply) == {
            "message": "the body is larger than 65,536 bytes (the gateway's max_body_bytes setting)",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_request",
        }


async def test_unreachable_database_is_unavailable(rig: RestRig) -> None:
    rig.parts.database.interrupt()
    rig.parts.table_versions.invalidate()
    reply = await rig.acme.get("/v1/models")
    assert (reply.status_code, fault(reply)["code"]) == (503, "unavailable")
