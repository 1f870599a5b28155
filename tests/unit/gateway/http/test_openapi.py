"""The schema at ``/openapi.json``, and unknown query parameters."""

from __future__ import annotations

from typing import Any

from tests.unit.gateway.http.conftest import RestRig
from torchrelay.gateway.http.openapi import TOKEN_PATHS
from torchrelay.gateway.http.router import _TOKEN_PATHS
from torchrelay.gateway.openai.requests import ChatBody


async def schema_of(rig: RestRig) -> dict[str, Any]:
    schema: dict[str, Any] = (await rig.acme.get("/openapi.json")).json()
    return schema


async def test_token_paths_are_described(rig: RestRig) -> None:
    schema = await schema_of(rig)
    assert TOKEN_PATHS.keys() == _TOKEN_PATHS
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
    assert streams.pop("/v1/embeddings") is streams.pop("/v1/messages/count_tokens") is None
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
        await rig.acme.get("/v1/bill?period=x"),
        await rig.acme.get("/v1/models/absent"),
        await rig.acme.get("/v1/reconcile"),
        await rig.acme.get("/v1/usage", headers={"authorization": ""}),
    ):
        assert response.status_code >= 400
        assert response.json().keys() == shape["ErrorBody"]["properties"].keys()
        assert response.json()["error"].keys() == shape["ErrorObject"]["properties"].keys()


async def test_unknown_and_repeated_query_parameters_are_refused(rig: RestRig) -> None:
    for method, path, name, known in (
        ("GET", "/v1/bill?month=2026-01", "month", "; known are period, tenant"),
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
    repeated = await rig.acme.get("/v1/bill?period=2026-01&period=2026-02")
    assert (repeated.status_code, repeated.json()["error"]["param"]) == (400, "period")
