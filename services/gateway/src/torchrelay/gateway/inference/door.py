"""The token path as one thing that the gateway opens and closes."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Self

import grpc

from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreStub
from torchrelay.control.v1.scheduler_pb2_grpc import SchedulerStub
from torchrelay.gateway.doors import CatalogueDoor, KeysDoor, LedgerDoor, LimitsDoor
from torchrelay.gateway.inference.admission import Admissions
from torchrelay.gateway.inference.asgi import TokenPaths
from torchrelay.gateway.inference.attempts import Roads
from torchrelay.gateway.inference.bookkeeping import Bookkeeping
from torchrelay.gateway.inference.intake import Intake
from torchrelay.gateway.inference.planning import Bounds
from torchrelay.gateway.inference.prompts import Prompts
from torchrelay.gateway.inference.servicer import InferenceGate
from torchrelay.gateway.inference.store_files import StoreFiles
from torchrelay.gateway.inference.templates import TemplateRenderer
from torchrelay.gateway.inference.tokenizer_cache import TokenizerCache
from torchrelay.gateway.inference.workers import WorkerStreams
from torchrelay.gateway.settings import GatewaySettings


class InferenceDoor:
    """``asgi`` serves the two token paths, ``servicer`` the gRPC door, while the context is entered.

    On exit, requests still running end with an error that says why, and are released and settled.
    """

    asgi: TokenPaths
    servicer: InferenceGate

    def __init__(
        self,
        settings: GatewaySettings,
        gateway_id: str,
        *,
        keys: KeysDoor,
        catalogue: CatalogueDoor,
        ledger: LedgerDoor,
        limits: LimitsDoor,
        scheduler: grpc.aio.Channel,
        store: grpc.aio.Channel,
    ) -> None:
        self._settings = settings
        self._gateway_id = gateway_id
        self._keys = keys
        self._catalogue = catalogue
        self._ledger = ledger
        self._limits = limits
        self._scheduler = scheduler
        self._store = store
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        settings, stack = self._settings, self._stack
        files = StoreFiles(ParamStoreStub(self._store), settings.store_address)
        self.tokenizers = TokenizerCache(files, settings.tokenizer_cache_bytes)
        stack.callback(self.tokenizers.close)
        templates = await stack.enter_async_context(TemplateRenderer(settings.template_timeout_s))
        self.admissions = Admissions(SchedulerStub(self._scheduler), self._gateway_id, settings.scheduler_address)
        self._admitting = asyncio.ensure_future(self.admissions.run())
        stack.push_async_callback(self._stop_admitting)
        self.workers = await stack.enter_async_context(WorkerStreams(self._gateway_id, tls=settings.tls))
        books = await stack.enter_async_context(Bookkeeping(self._ledger, self._limits, settings.drain_s))
        self.intake = Intake(
            self._catalogue,
            self._limits,
            Prompts(files, self.tokenizers, templates),
            Roads(self.admissions, self.workers, self._gateway_id),
            books,
            Bounds(settings.default_max_tokens, settings.max_choices),
            max_attempts=settings.max_attempts,
            keep_alive_s=settings.keep_alive_s,
            request_timeout_s=settings.request_timeout_s,
        )
        stack.push_async_callback(self.intake.stop_all, settings.drain_s)
        self.asgi = TokenPaths(self._keys, self.intake, settings.max_body_bytes)
        self.servicer = InferenceGate(self._keys, self._catalogue, self.intake)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _stop_admitting(self) -> None:
        await self.admissions.flush(0.5)
        self._admitting.cancel()
        with suppress(asyncio.CancelledError):
            await self._admitting
