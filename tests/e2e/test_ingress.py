"""The ingress of compose and chart before a platform: TLS, both versions of HTTP, gRPC, streams, uploads and limits."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.types import Receive, Scope, Send

from tests.support.certificates import Authority
from tests.support.completions import headers
from tests.support.ingress import running_ingress
from tests.support.platform import Platform, running_platform
from tests.support.raw_http import head
from tests.support.wait import HANG_S, wait_until
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.api.model_source import Folder
from torchrelay.cli.api.upload import ModelUpload
from torchrelay.gateway.http.server import http_server
from torchrelay.inference.v1 import inference_pb2, inference_pb2_grpc

pytestmark = pytest.mark.e2e
MODEL = Path(__file__).parents[2] / "examples" / "glossary" / "model"
NAME = "api.example.com"
QUESTION = "What is a relay?"
NUM_CONNECTIONS = 5
SMALL = {"timeout http-request": 2, "timeout client": 3, "sc0_conn_cur gt": NUM_CONNECTIONS}  # what a test can reach


@dataclass(frozen=True)
class Ingress:
    """An ingress on loopback, its CA, and a tenant of the platform behind it."""

    platform: Platform
    port: int
    ca: Path
    key: str

    @property
    def tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca))

    @contextmanager
    def connection(self, source: str = "127.0.0.1", *protocols: str) -> Iterator[ssl.SSLSocket]:
        """A connection from an address of loopback."""
        context = self.tls
        context.set_alpn_protocols(protocols or ("http/1.1",))
        plain = socket.create_connection(("127.0.0.1", self.port), HANG_S, (source, 0))
        with plain, context.wrap_socket(plain, server_hostname=NAME) as sock:
            yield sock


@pytest.fixture(scope="module")
def ingress(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ingress]:
    folder = tmp_path_factory.mktemp("ingress")
    files = Authority(folder / "ca").node("ingress", dns=(NAME, "localhost"))
    pem = folder / "certificate.pem"
    pem.write_bytes(files.cert.read_bytes() + files.key.read_bytes())
    with (
        running_platform(folder / "platform", ["--arena-mb", "64"]) as platform,
        running_ingress(platform.endpoints, folder, SMALL, pem) as port,
    ):
        key = platform.tenant("acme")
        platform.upload(key, MODEL, "glossary")
        yield Ingress(platform, port, files.ca, key)


def test_client_of_openai_streams(ingress: Ingress) -> None:
    http = openai.DefaultHttpxClient(verify=ingress.tls)
    client = openai.OpenAI(base_url=f"https://localhost:{ingress.port}/v1", api_key=ingress.key, http_client=http)
    messages: Any = [{"role": "user", "content": QUESTION}]
    pieces = list(client.chat.completions.create(model="acme/glossary", messages=messages, stream=True))
    assert len(pieces) > 10 and pieces[-1].choices[0].finish_reason == "stop"


def test_client_that_leaves_after_the_first_token_ends_its_request(ingress: Ingress) -> None:
    """So answers are not buffered, and the gateway learns that a client has left."""
    key, most = ingress.platform.tenant("leaver"), 16 * 900
    ingress.platform.upload(key, MODEL, "glossary")
    body = {"model": "leaver/glossary", "prompt": "relay", "stream": True, "n": 16, "max_tokens": 900}
    with httpx.stream(
        "POST",
        f"https://localhost:{ingress.port}/v1/completions",
        headers=headers(key),
        json={**body, "ignore_eos": True},
        timeout=HANG_S,
        verify=ingress.tls,
    ) as answer:
        assert next(answer.iter_lines()).startswith(("data: ", ":"))
    with GatewayClient(ingress.platform.http, key) as client:

        def output() -> int:
            number: int = client.call("GET", "/v1/usage")["total"]["completion_tokens"]
            return number

        wait_until(lambda: output() > 0, "the bill")
        assert output() < most


def test_grpc_call_streams_through_the_same_port(ingress: Ingress) -> None:
    credentials = grpc.ssl_channel_credentials(ingress.ca.read_bytes())
    options = [("grpc.ssl_target_name_override", NAME), ("grpc.enable_http_proxy", 0)]
    with grpc.secure_channel(f"127.0.0.1:{ingress.port}", credentials, options) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        chat = inference_pb2.Messages(messages=[inference_pb2.Message(role="user", content=QUESTION)])
        request = inference_pb2.GenerateRequest(model="acme/glossary", chat=chat, temperature=0)
        events = list(stub.Generate(request, metadata=(("authorization", f"Bearer {ingress.key}"),), timeout=HANG_S))
        assert len(events) > 10
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(request, timeout=HANG_S))
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_model_is_uploaded_through_it(ingress: Ingress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(ingress.ca))
    with GatewayClient(f"https://localhost:{ingress.port}", ingress.key) as client:
        assert ModelUpload(client, Folder(MODEL), "again", lambda *_: None).run({})["id"] == "acme/again"


def answer_of(sock: ssl.SSLSocket, limit_s: float) -> bytes:
    """What the ingress says until it ends the connection, within ``limit_s``."""
    begin_s, said = time.monotonic(), b""
    with suppress(ConnectionError):
        while piece := sock.recv(1 << 16):
            said += piece
    assert time.monotonic() - begin_s < limit_s, "the connection stayed open"
    return said


def status_of(said: bytes) -> int:
    """The status of an answer, whose error has the format of the gateway's."""
    lines, _, body = said.partition(b"\r\n\r\n")
    assert json.loads(body)["error"].keys() == {"message", "type", "param", "code"}
    return int(lines.split()[1])


def test_head_that_does_not_end_is_answered_and_closed(ingress: Ingress) -> None:
    with ingress.connection() as sock:
        sock.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n")
        assert answer_of(sock, HANG_S).startswith(b"HTTP/1.1 408 ")


def test_body_that_stops_ends_the_request(ingress: Ingress) -> None:
    with ingress.connection() as sock:
        sock.sendall(head("POST", "/v1/completions", authorization=f"Bearer {ingress.key}", content_length=500) + b"{")
        assert status_of(answer_of(sock, HANG_S)) == 408


def test_body_that_is_too_long_is_refused_before_it_is_read(ingress: Ingress) -> None:
    with ingress.connection() as sock:
        sock.sendall(head("POST", "/v1/completions", authorization="Bearer tr-x", content_length=10**8))
        assert status_of(answer_of(sock, HANG_S)) == 413


def test_address_holds_a_bounded_number_of_connections(ingress: Ingress) -> None:
    """Beyond it connections of the address end; another address is served meanwhile."""
    with ExitStack() as stack:
        for _ in range(NUM_CONNECTIONS):
            stack.enter_context(ingress.connection("127.0.0.3"))
        assert is_refused(ingress.port, "127.0.0.3")
        with ingress.connection("127.0.0.4") as other:
            other.sendall(head("GET", "/health", connection="close"))
            assert b"HTTP/1.1 " in answer_of(other, HANG_S)


def is_refused(port: int, source: str) -> bool:
    """Whether a connection from an address of loopback is ended at once."""
    try:
        with socket.create_connection(("127.0.0.1", port), HANG_S, (source, 0)) as sock:
            return sock.recv(1) == b""
    except ConnectionError:
        return True


def test_both_versions_of_http_are_offered(ingress: Ingress) -> None:
    for protocol in ("h2", "http/1.1"):
        with ingress.connection("127.0.0.1", protocol) as sock:
            assert sock.selected_alpn_protocol() == protocol


@pytest.mark.parametrize(("authorization", "most"), [(None, 300), ("Bearer tr-nobody", 1000)])
def test_address_without_a_valid_key_sends_a_bounded_number_of_requests(
    ingress: Ingress, authorization: str | None, most: int
) -> None:
    """Another address is answered meanwhile."""
    given = {} if authorization is None else {"authorization": authorization}
    address = f"127.0.0.{5 + len(given)}"
    with ingress.connection(address) as sock:
        sock.sendall(head("GET", "/v1/models", **given) * (most + 10))
        answered = b""
        while b"HTTP/1.1 429 " not in answered:
            piece = sock.recv(1 << 16)
            assert piece, "the connection ended before the limit"
            answered += piece
        assert answered.count(b"HTTP/1.1 401 ") <= most + 1
    with ingress.connection("127.0.0.8") as other:
        other.sendall(head("GET", "/health", connection="close"))
        assert b"HTTP/1.1 200 " in answer_of(other, HANG_S)


def test_health_is_checked_and_not_watched(ingress: Ingress) -> None:
    credentials = grpc.ssl_channel_credentials(ingress.ca.read_bytes())
    options = [("grpc.ssl_target_name_override", NAME), ("grpc.enable_http_proxy", 0)]
    with grpc.secure_channel(f"127.0.0.1:{ingress.port}", credentials, options) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        health = stub.Check(health_pb2.HealthCheckRequest(), timeout=HANG_S)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Watch(health_pb2.HealthCheckRequest(), timeout=HANG_S))
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_client_that_reads_nothing_is_disconnected(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def endless(_scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
                await asyncio.sleep(0)

        writing = asyncio.create_task(write())
        while (await receive())["type"] != "http.disconnect":
            pass
        writing.cancel()
        ended.set()

    async with http_server(endless, "127.0.0.1", 0, drain_s=1) as server:
        endpoints = {"http": f"http://127.0.0.1:{server.port}", "grpc": "127.0.0.1:1"}
        with (
            running_ingress(endpoints, tmp_path, {"timeout client": 1}) as port,
            socket.create_connection(("127.0.0.1", port)) as client,
        ):
            client.sendall(head("GET", "/"))
            await asyncio.wait_for(ended.wait(), HANG_S)
