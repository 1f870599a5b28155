"""Loads a model into the slot: holds its pack at this host's store, maps it, and opens its layers as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import stamina

from torchrelay.common.clock import now_unix_us
from torchrelay.common.net.rpc.errors import error_from_rpc, is_from_peer
from torchrelay.common.process.telemetry import span_of
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.engine.batching.decode_shares import Latency
from torchrelay.engine.core import LoadFailed
from torchrelay.transfer.arena.mapped_slab import MappedSlab
from torchrelay.worker.metrics.step_floor import StepFloor
from torchrelay.worker.slot.compiled_code import CompiledCode
from torchrelay.worker.slot.engine import Engine, EngineHooks, ServedModel
from torchrelay.worker.slot.engine_thread import EngineThread
from torchrelay.worker.slot.slot import LOADING, READY, Slot

if TYPE_CHECKING:
    from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreAsyncStub  # exists in the stubs only

    HoldCall = grpc.aio.UnaryStreamCall[pb.HoldRequest, pb.HoldReply]


class _HoldEnded(Exception):
    """The store closed the stream. Not an ``Unavailable``, because ``LoadFailed`` is one, and final."""


class StoreLost(LoadFailed):
    """The store could not be reached before the pack was complete."""


_HOLD_LOST = (grpc.aio.AioRpcError, _HoldEnded)


@dataclass(slots=True)
class Loader:
    """A load, from Hold to the last layer; keeps the pack pinned until it is cancelled."""

    _slot: Slot
    _engine: EngineThread
    _served_by: Engine
    _store: ParamStoreAsyncStub
    _worker_id: str
    _latency: Latency
    _compiled: CompiledCode | None  # None: no worker shares what the load compiles
    _retry_s: float = 0.5
    slab: MappedSlab | None = None
    closing: bool = False  # releasing the instance; must not be cancelled again
    _sharing: asyncio.Task[None] | None = None
    _instance: ServedModel | None = None
    _mapped_at: tuple[str, int] = ("", 0)  # arena file and offset
    _next_segment: int = 0
    _why_closed: str = "the instance was unloaded"
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _woken: asyncio.Event = field(default_factory=asyncio.Event)  # by the engine

    async def run(self, pack_id: str, traceparent: str) -> None:
        """Loads, then holds the pack until cancelled. Raises ``LoadFailed`` when the bytes stop arriving."""
        hold = self._store.Hold(pb.HoldRequest(pack_id=pack_id, owner_id=self._worker_id, waits_for_relay=True))
        try:
            with span_of("worker.load", traceparent, pack_id=pack_id):
                await self._load(hold)
            if self._compiled is not None:
                self._sharing = asyncio.create_task(self._compiled.share())
            # The mapping outlives the store; a store that restarts must learn of the pin again.
            async for attempt in stamina.retry_context(
                _HOLD_LOST, attempts=None, timeout=None, wait_initial=self._retry_s, wait_exp_base=1, wait_jitter=0
            ):
                with attempt:
                    if attempt.num > 1:
                        request = pb.HoldRequest(pack_id=pack_id, owner_id=self._worker_id)
                        hold = self._store.Hold(request, wait_for_ready=True)
                        await self._check_mapping(hold)
                    await self._wait_until_lost(hold)
        except LoadFailed as error:
            self._why_closed = error.message
            raise
        finally:
            self.closing = True
            if self._sharing is not None:
                self._sharing.cancel()
            try:
                await self._close()
            finally:
                hold.cancel()  # not earlier: without the pin the store may give the range to another pack

    async def _wait_until_lost(self, hold: HoldCall) -> None:
        """Keeps the pin until the store ends the hold. Raises ``AioRpcError`` or ``_HoldEnded`` then."""
        async for _ in hold:
            pass
        raise _HoldEnded("the store ended the hold")

    async def _check_mapping(self, hold: HoldCall) -> None:
        """Checks that the pack is still where it is mapped: its range may hold another pack. Raises ``LoadFailed``."""
        assert self.slab is not None
        try:
            reply = await anext(aiter(hold))
        except (grpc.aio.AioRpcError, StopAsyncIteration) as error:
            if isinstance(error, grpc.aio.AioRpcError) and error.code() == grpc.StatusCode.UNAVAILABLE:
                raise  # the store has gone away again
            raise LoadFailed("the store no longer holds the pack that this instance computes with") from error
        if (reply.arena_path, reply.slab_offset) != self._mapped_at:
            raise LoadFailed("the store holds the pack at another offset than this instance has mapped")

    async def _load(self, hold: HoldCall) -> None:
        try:
            await self._follow(hold.__aiter__())
        except grpc.aio.AioRpcError as error:
            was_lost = error.code() == grpc.StatusCode.UNAVAILABLE and not is_from_peer(error)
            kind = StoreLost if was_lost else LoadFailed
            raise kind(f"the store did not deliver the pack: {error_from_rpc(error).message}") from error
        except StopAsyncIteration:
            raise LoadFailed("the store ended the hold before the pack was complete") from None

    async def _follow(self, replies: AsyncIterator[pb.HoldReply]) -> None:
        """Maps the pack at the first reply and opens its segments as further replies announce them."""
        begin = now_unix_us()
        fetching = None if self._compiled is None else asyncio.create_task(self._compiled.fetch())
        try:
            reply = await anext(replies)
            self._slot.add_phase("hold", begin)
            if fetching is not None:
                await fetching
        finally:
            if fetching is not None:
                fetching.cancel()
        begin = now_unix_us()
        self._mapped_at = (reply.arena_path, reply.slab_offset)
        slab = self.slab = MappedSlab(reply.arena_path, reply.slab_offset, reply.slab_bytes)
        num_segments = len(slab.manifest.segments)
        await self._engine.call(lambda: self._build(slab))
        self._slot.add_phase("map", begin)
        if self._slot.hosted is not None:
            self._slot.hosted.step_floor = StepFloor.of(slab.manifest, self._served_by.memory_bytes_per_s)
            self._slot.hosted.settled.set()
        begin = now_unix_us()
        await self._advance(reply.num_segments_ready, num_segments, begin)
        while self._next_segment < num_segments:
            reply = await anext(replies)
            if reply.error:
                raise LoadFailed(reply.error)
            await self._advance(reply.num_segments_ready, num_segments, begin)
        begin = now_unix_us()
        if await self._wait_until_ready():
            self._slot.add_phase("engine", begin)
        if self._slot.state == LOADING:  # it may be draining already
            await self._slot.move(READY)

    async def _wait_until_ready(self) -> bool:
        """Waits for an engine that starts after the last bytes. False: it computes already."""
        assert self._instance is not None
        has_waited = False
        while not self._instance.is_ready:
            has_waited = True
            await self._woken.wait()
            self._woken.clear()
        return has_waited

    def _build(self, slab: MappedSlab) -> None:
        def wake() -> None:
            self._engine.wake()
            self._loop.call_soon_threadsafe(self._woken.set)

        compiled = None if self._compiled is None else self._compiled.folder
        hosted = self._slot.hosted
        max_threads = hosted.version.scaling.threads if hosted is not None else 0
        hooks = EngineHooks(wake, self._engine.run_short_commands, self._latency, compiled, max_threads)
        self._engine.instance = self._instance = self._served_by.load(slab, hooks)

    async def _advance(self, num_ready: int, num_segments: int, begin_us: int) -> None:
        """Opens every segment that has become complete, and notifies the watchers, who derive the remaining time."""
        assert self._instance is not None and self.slab is not None and self._slot.hosted is not None
        for segment in range(self._next_segment, num_ready):
            self._instance.segment_ready(segment)
            if segment == 1:
                self._slot.add_phase("first_layer", begin_us)
        self._next_segment = num_ready
        self._slot.hosted.num_layers_ready = max(0, min(num_ready - 1, num_segments - 2))
        if num_ready:
            ends = [segment.end for segment in self.slab.manifest.segments]
            self._slot.hosted.loaded_share = ends[num_ready - 1] / ends[-1]
        if num_ready == num_segments:
            self._slot.add_phase("last_layer", begin_us)
        await self._slot.notify_watchers()

    async def _close(self) -> None:
        if self._instance is not None:
            self._instance.fail(self._why_closed)  # ends prompts that need more layers
        await self._engine.call(self._forget)
        if self.slab is not None:
            self.slab.close()

    def _forget(self) -> None:
        """(engine's thread) Closes the instance; a build whose caller was cancelled has finished here by now."""
        instance, self._instance = self._instance, None
        if instance is not None:
            if self._engine.instance is instance:
                self._engine.instance = None
            instance.close()
