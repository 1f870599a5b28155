"""The token path with everything around it: real gRPC servers that echo, a real HTTP server, ports in memory."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial

import httpx
import openai
import pytest
from blake3 import blake3
from opentelemetry.metrics import Meter
from starlette.types import ASGIApp, Receive, Scope, Send
from tokenizers import Tokenizer

from tests.support.echo_services import EchoScheduler, EchoStore
from tests.support.echo_worker import NUM_DIMENSIONS, EchoModel, EchoWorker
from tests.support.gateway_ports import KEY, InMemoryPorts, published_model
from tests.support.sample_tokenizers import EOS, tiny_tokenizer
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.common.net.rpc.health import Faults, no_fault
from torchrelay.control.v1 import types_pb2
from torchrelay.gateway.core import EmbeddingSpec
from torchrelay.gateway.exchange.asgi_app import WRITE_GAP_S
from torchrelay.gateway.grpc.server import public_grpc_server
from torchrelay.gateway.http.server import http_server
from torchrelay.gateway.inference.interfaces import RequestLedger
from torchrelay.gateway.limits.connection_shares import ConnectionShares, connection_shares
from torchrelay.gateway.settings import GatewaySettings
from torchrelay.gateway.token_path import TokenPath, open_token_path

PROMPT = [40, 41, 42, 43, 44, 45, 46]
TEMPLATE = (
    "{% if tools is not none %}{{ raise_exception('tools') }}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass
class TokenPathRig:
    """A gateway's token path and everything it talks to."""

    tokenizer: Tokenizer
    model: EchoModel
    workers: list[EchoWorker]
    scheduler: EchoScheduler
    store: EchoStore
    ports: InMemoryPorts
    token_path: TokenPath
    shares: ConnectionShares
    url: str
    grpc_address: str
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI
    settings: GatewaySettings
    stack: AsyncExitStack = field(repr=False)

    def echoed(self, prompt: list[int], num_tokens: int, choice: int = 0) -> list[int]:
        """The tokens an echo worker answers ``prompt`` with."""
        return [prompt[(position + choice) % len(prompt)] for position in range(num_tokens)]

    def num_accepted(self) -> list[int]:
        """The output tokens accepted so far, of each running request."""
        return [request.usage.num_output_tokens for request in self.token_path.pipeline.requests]

    def text(self, token_ids: list[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


@pytest.fixture(scope="session")
def tokenizer_json() -> bytes:
    return tiny_tokenizer()


MakeRig = Callable[..., Awaitable[TokenPathRig]]


@pytest.fixture
async def make_rig(tokenizer_json: bytes) -> AsyncIterator[MakeRig]:
    async with AsyncExitStack() as stack:
        yield partial(_make, stack, tokenizer=tokenizer_json)


@pytest.fixture
async def rig(make_rig: MakeRig) -> TokenPathRig:
    return await make_rig()


def by_path(apps: Mapping[str, ASGIApp]) -> ASGIApp:
    """The application that passes each request to the application of its path."""

    async def asgi(scope: Scope, receive: Receive, send: Send) -> None:
        await apps[scope["path"]](scope, receive, send)

    return asgi


async def _make(
    stack: AsyncExitStack,
    *,
    tokenizer: bytes,
    template: str = TEMPLATE,
    write_gap_s: float = WRITE_GAP_S,
    meter: Meter | None = None,
    fault: Faults = no_fault,
    ledger: RequestLedger | None = None,
    **settings: object,
) -> TokenPathRig:
    config = json.dumps({"eos_token": EOS, "chat_template": template}).encode()
    files = {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
    digests = {name: blake3(data).hexdigest() for name, data in files.items()}
    read = Tokenizer.from_str(tokenizer.decode())
    size, eos = read.get_vocab_size(), read.token_to_id(EOS)
    assert eos is not None
    published = partial(published_model, file_digests=digests, vocab_size=size)
    embedding = partial(EmbeddingSpec, types_pb2.POOLING_LAST_TOKEN, NUM_DIMENSIONS)
    models = [
        published("acme/echo", context=512, eos_token_ids=(eos,)),
        published("acme/plain", file_digests={"tokenizer.json": digests["tokenizer.json"]}, context=512),
        published("acme/long", context=5000),
        published("acme/headless", embedding=embedding(True), has_no_head=True),
        published("acme/embed", context=64, embedding=embedding(True)),
        published("acme/embed-raw", context=64, embedding=embedding(False)),
        published(
            "acme/rerank", context=64, embedding=EmbeddingSpec(types_pb2.POOLING_SCORE, 1, False), has_no_head=True
        ),
    ]
    ports = InMemoryPorts(models)
    model = EchoModel(tokenizer=read)
    workers = [EchoWorker(f"w{index}", model) for index in range(2)]
    scheduler, store = EchoScheduler(workers), EchoStore({digests[name]: data for name, data in files.items()})
    servers: list[EchoWorker | EchoScheduler | EchoStore] = [*workers, scheduler, store]
    for server in servers:
        await server.start()
        stack.push_async_callback(server.stop)
    channels = [open_channel(scheduler.address), open_channel(store.address)]
    for channel in channels:
        stack.push_async_callback(channel.close)
    gateway_settings = GatewaySettings.model_validate({"grace_s": 1.0, **settings})
    shares = connection_shares(gateway_settings)
    token_path = await stack.enter_async_context(
        open_token_path(
            gateway_settings,
            "gw-test",
            keys=ports,
            catalog=ports,
            ledger=ledger or ports,
            limits=ports,
            shares=shares,
            scheduler=channels[0],
            store=channels[1],
            fault=fault,
            write_gap_s=write_gap_s,
            meter=meter,
        )
    )
    grpc_server = public_grpc_server(gateway_settings, no_fault)
    for servicer in token_path.servicers:
        servicer.add_to(grpc_server.server)
    await grpc_server.start()
    stack.push_async_callback(grpc_server.stop, 0)
    stall_s = gateway_settings.answer_silence_s
    serving = http_server(by_path(token_path.apps), "127.0.0.1", 0, gateway_settings.grace_s, stall_s=stall_s)
    url = f"http://127.0.0.1:{(await stack.enter_async_context(serving)).port}"
    headers = {"authorization": f"Bearer {KEY}"}
    # Without TLS's authorities, whose certificates take 0.03 s to load.
    http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, headers=headers, timeout=20, verify=False))
    quick = openai.DefaultAsyncHttpxClient(verify=False)
    client = openai.AsyncOpenAI(api_key=KEY, base_url=f"{url}/v1", max_retries=0, timeout=20, http_client=quick)
    stack.push_async_callback(client.close)
    return TokenPathRig(
        tokenizer=read,
        model=model,
        workers=workers,
        scheduler=scheduler,
        store=store,
        ports=ports,
        token_path=token_path,
        shares=shares,
        url=url,
        grpc_address=f"127.0.0.1:{grpc_server.port}",
        http=http,
        client=client,
        settings=gateway_settings,
        stack=stack,
    )
