"""Pages of other origins: preflights and the headers without which a browser hides an answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import httpx
import pytest

from tests.unit.gateway.http.conftest import RestRig
from torchrelay.gateway.edge.http_server import http_server
from torchrelay.gateway.http.cors import CorsApp
from torchrelay.gateway.settings import GatewaySettings

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
            http_server(app, "127.0.0.1", 0, 1, group_of=rig.router.group_of) as server,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as client,
        ):
            yield client

    return allow


def preflight(origin: str) -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": SDK_HEADERS,
    }


@pytest.mark.parametrize(("setting", "allowed"), [(f"{PAGE}, http://localhost:3000", PAGE), ("*", "*")])
async def test_page_of_an_allowed_origin_may_call(rig: RestRig, allowing: Allowing, setting: str, allowed: str) -> None:
    async with allowing(setting) as client:
        for path in PATHS:
            asked = await client.options(path, headers=preflight(PAGE))
            assert (asked.status_code, asked.content) == (204, b"")
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
            assert answer.headers["vary"] == "origin"
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
