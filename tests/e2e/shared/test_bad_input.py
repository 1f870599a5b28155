"""Keys, isolation of tenants, gRPC beside REST, and uploads that break off or hold a bad model."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.e2e.tenants import Tenant
from tests.support.completions import complete, headers
from tests.support.http import http
from tests.support.platform import Platform
from tests.support.wait import wait_until
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.errors import CliError
from torchrelay.inference.v1 import inference_pb2, inference_pb2_grpc

pytestmark = pytest.mark.e2e


def post(platform: Platform, key: str, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
    return http.post(f"{platform.http}{path}", json=body, headers=headers(key), timeout=60)


def error(response: httpx.Response) -> dict[str, Any]:
    body: dict[str, Any] = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    return body


def test_unknown_and_revoked_keys_are_refused(platform: Platform, tenant: Tenant) -> None:
    assert post(platform, "tr-nobody", {}).status_code == 401
    with GatewayClient(platform.http, tenant.key) as client:
        made = client.call("POST", "/v1/keys", json={"name": "short-lived"})
        body = {"model": tenant.model(), "prompt": "hello", "max_tokens": 1}
        assert post(platform, made["key"], body).status_code == 200
        client.call("DELETE", f"/v1/keys/{made['id']}")
    wait_until(lambda: post(platform, made["key"], {"model": "x"}).status_code == 401, "the refusal of the revoked key")


def test_model_of_another_tenant_is_not_found(platform: Platform, tenant: Tenant) -> None:
    other = platform.tenant("other")
    theirs = post(platform, other, {"model": tenant.model(), "prompt": "hello"})
    nobodys = post(platform, other, {"model": "acme/never-was", "prompt": "hello"})
    assert theirs.status_code == nobodys.status_code == 404
    told = [
        error(theirs)["message"].replace(tenant.model(), ""),
        error(nobodys)["message"].replace("acme/never-was", ""),
    ]
    assert told[0] == told[1]


def test_grpc_returns_the_tokens_of_rest(platform: Platform, tenant: Tenant) -> None:
    expected = complete(platform, tenant.key, tenant.model(), [3, 4, 5], max_tokens=7, ignore_eos=True)
    request = inference_pb2.GenerateRequest(
        model=tenant.model(),
        prompt_token_ids=inference_pb2.TokenIds(ids=[3, 4, 5]),
        max_tokens=7,
        temperature=0,
        return_token_ids=True,
        ignore_eos=True,
    )
    with grpc.insecure_channel(platform.endpoints["grpc"]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        events = list(stub.Generate(request, metadata=(("authorization", f"Bearer {tenant.key}"),)))
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(request, metadata=(("authorization", "Bearer tr-nobody"),)))
    tokens = [token for event in events for choice in event.choices for token in choice.token_ids]
    assert tokens == expected["choices"][0]["token_ids"]
    assert events[-1].usage.completion_tokens == 7
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def declaration_of(folder: Path) -> list[dict[str, Any]]:
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    return [
        {"path": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    ]


def test_interrupted_upload_resumes(platform: Platform, tenant: Tenant) -> None:
    folder = tenant.checkpoint("qwen3", tied=True)
    with GatewayClient(platform.http, tenant.key) as client:
        upload = client.call("POST", "/v1/uploads", json={"model": "resumed", "files": declaration_of(folder)})
        for path in folder.iterdir():
            url, data = f"/v1/uploads/{upload['id']}/files/{path.name}", path.read_bytes()
            half = len(data) // 2
            with pytest.raises(httpx.TransportError), httpx.Client(base_url=platform.http) as broken:
                declared_length = {**headers(tenant.key), "Content-Length": str(len(data))}
                broken.put(url, content=cut_off(data[:half]), headers=declared_length)
            assert put_rest(client, str(upload["id"]), path.name, data)["complete"]
        model = client.call("POST", f"/v1/uploads/{upload['id']}/commit", json={})
    assert model["id"] == "acme/resumed"
    assert complete(platform, tenant.key, "resumed", [1, 2], max_tokens=2)["usage"]["prompt_tokens"] == 2


def put_rest(client: GatewayClient, upload_id: str, path: str, data: bytes) -> dict[str, Any]:
    """Resumes like a client: asks how much arrived and sends the rest."""
    for _ in range(20):
        states = client.call("GET", f"/v1/uploads/{upload_id}")["files"]
        received = next(int(state["received"]) for state in states if state["path"] == path)
        try:
            url, offset = f"/v1/uploads/{upload_id}/files/{path}", {"Upload-Offset": str(received)}
            state: dict[str, Any] = client.call("PUT", url, content=data[received:], headers=offset)
        except CliError:
            continue  # the broken transfer was still being written
        return state
    raise AssertionError(f"{path} could not be resumed")


def cut_off(data: bytes) -> Any:
    """A body that ends early."""
    yield data
    raise httpx.WriteError("the line went dead")


def test_bad_model_is_refused_with_its_file_and_not_published(
    platform: Platform, tenant: Tenant, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tenant.checkpoint("llama"), folder)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-4] + b"\xff\xff\xff\x7f")  # the last weight is NaN
    declared = declaration_of(folder)
    with GatewayClient(platform.http, tenant.key) as client:
        upload = client.call("POST", "/v1/uploads", json={"model": "refused", "files": declared})
        for path in folder.iterdir():
            client.call("PUT", f"/v1/uploads/{upload['id']}/files/{path.name}", content=path.read_bytes())
    url = f"{platform.http}/v1/uploads/{upload['id']}/commit"
    refused = http.post(url, json={}, headers=headers(tenant.key), timeout=60)
    assert refused.status_code == 422, refused.text
    assert error(refused)["param"] == "model.safetensors"
    listed = http.get(f"{platform.http}/v1/models", headers=headers(tenant.key)).json()["data"]
    assert "acme/refused" not in [model["id"] for model in listed]
