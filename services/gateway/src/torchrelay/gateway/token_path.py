"""The token path: wires the inference rooms and their two protocols, and owns their lifetime."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Self

import grpc
from opentelemetry.metrics import Meter

from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreStub
from torchrelay.control.v1.scheduler_pb2_grpc import SchedulerStub
from torchrelay.gateway.clients.file_reader import StoreFileReader
from torchrelay.gateway.grpc.servicer import GatewayServicer
from torchrelay.gateway.inference.execution.admission_stream import AdmissionStream
from torchrelay.gateway.inference.execution.attempt import Upstreams
from torchrelay.gateway.inference.execution.ledger_writer import LedgerWriter
from torchrelay.gateway.inference.execution.worker_streams import WorkerStreams
from torchrelay.gateway.inference.interfaces import Authenticator, ModelCatalog, RequestLedger, RequestLimiter
from torchrelay.gateway.inference.pipeline import RequestPipeline
from torchrelay.gateway.inference.sampling import GenerationBounds
from torchrelay.gateway.inference.text.prompt_encoder import PromptEncoder
from torchrelay.gateway.inference.text.template_renderer import TemplateRenderer
from torchrelay.gateway.inference.text.tokenizer_cache import TokenizerCache
from torchrelay.gateway.openai.asgi_app import WRITE_GAP_S, CompletionsApp
from torchrelay.gateway.settings import GatewaySettings

FLUSH_TIMEOUT_S = 0.5  # for the last releases to reach the scheduler


class TokenPath:
    """While entered, ``asgi`` serves the OpenAI paths and ``servicer`` gRPC.

    On exit, requests still running end with an error, are released and settled.
    """

    asgi: CompletionsApp
    servicer: GatewayServicer

    def __init__(
        self,
        settings: GatewaySettings,
        gateway_id: str,
        *,
        keys: Authenticator,
        catalog: ModelCatalog,
        ledger: RequestLedger,
        limits: RequestLimiter,
        scheduler: grpc.aio.Channel,
        store: grpc.aio.Channel,
        write_gap_s: float = WRITE_GAP_S,
        meter: Meter | None = None,
    ) -> None:
        self._settings = settings
        self._gateway_id = gateway_id
        self._keys = keys
        self._catalog = catalog
        self._ledger = ledger
        self._limits = limits
        self._scheduler = scheduler
        self._store = store
        self._write_gap_s = write_gap_s
        self._meter = meter
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        settings, stack = self._settings, self._stack
        files = StoreFileReader(ParamStoreStub(self._store), settings.store_address)
        self.tokenizers = TokenizerCache(files, settings.tokenizer_cache_bytes)
        stack.callback(self.tokenizers.close)
        templates = await stack.enter_async_context(TemplateRenderer(settings.template_timeout_s))
        self.admissions = AdmissionStream(SchedulerStub(self._scheduler), self._gateway_id, settings.scheduler_address)
        self._admitting = asyncio.ensure_future(self.admissions.run())
        stack.push_async_callback(self._stop_admitting)
        self.workers = await stack.enter_async_context(WorkerStreams(self._gateway_id, tls=settings.tls))
        ledger_writer = await stack.enter_async_context(LedgerWriter(self._ledger, self._limits, settings.drain_s))
        self.pipeline = RequestPipeline(
            self._catalog,
            self._limits,
            PromptEncoder(files, self.tokenizers, templates),
            Upstreams(self.admissions, self.workers, self._gateway_id),
            ledger_writer,
            GenerationBounds(settings.default_max_tokens, settings.max_choices),
            max_attempts=settings.max_attempts,
            keep_alive_s=settings.keep_alive_s,
            request_timeout_s=settings.request_timeout_s,
            meter=self._meter,
        )
        stack.push_async_callback(self.pipeline.stop_all, settings.drain_s)
        self.asgi = CompletionsApp(self._keys, self.pipeline, settings.max_body_bytes, self._write_gap_s)
        self.servicer = GatewayServicer(self._keys, self._catalog, self.pipeline)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    async def _stop_admitting(self) -> None:
        await self.admissions.flush(FLUSH_TIMEOUT_S)
        self._admitting.cancel()
        with suppress(asyncio.CancelledError):
            await self._admitting
