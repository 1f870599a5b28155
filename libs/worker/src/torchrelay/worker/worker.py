"""The worker: one slot, one engine thread, the roles it plays, and the data plane that serves KV."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from nats.aio.client import Client

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.host.addresses import join_address, split_address
from torchrelay.common.identity.tls import Tls
from torchrelay.common.ids import new_id
from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.common.liveness import Liveness
from torchrelay.common.net.nats_client import Subjects
from torchrelay.common.process.telemetry import get_logger
from torchrelay.common.process.watchdog import end_process
from torchrelay.control.v1 import generation_pb2, types_pb2
from torchrelay.engine.core import LoadFailed, StepResult
from torchrelay.transfer.buffers import Buffer
from torchrelay.transfer.fetch.follow import Receiver
from torchrelay.transfer.serve.holder import HolderServer
from torchrelay.transfer.transport.interface import Transport
from torchrelay.transfer.transport.tls import transport_for
from torchrelay.worker.attempts.hosted_adapters import READ_TIMEOUT_S, HostedAdapters
from torchrelay.worker.attempts.hosted_tokenizer import HostedTokenizer, read_file
from torchrelay.worker.attempts.usage_publisher import UsagePublisher
from torchrelay.worker.device import device_fault
from torchrelay.worker.metrics.step_metrics import StepMetrics
from torchrelay.worker.role import WorkerRole, load_roles
from torchrelay.worker.settings import WorkerSettings
from torchrelay.worker.slot.compiled_code import CompiledCode, compiling_environment
from torchrelay.worker.slot.engine import Engine
from torchrelay.worker.slot.engine_thread import EngineThread
from torchrelay.worker.slot.engines import load_engine
from torchrelay.worker.slot.loader import Loader, StoreLost
from torchrelay.worker.slot.slot import DRAINING, HostedInstance, Slot

if TYPE_CHECKING:
    from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreAsyncStub  # exists in the stubs only

log = get_logger(__name__)


async def _guarded(work: Coroutine[Any, Any, None], name: str) -> None:
    try:
        await work
    except Exception:
        log.error("background_work_failed", work=name, exc_info=True)


class Worker:
    """The shared state of the servicers and roles of this process. All methods run on the event loop."""

    def __init__(
        self,
        settings: WorkerSettings,
        nats: Client,
        store: ParamStoreAsyncStub,
        tls: Tls | None = None,
        weights_bytes: int = 0,
        device_name: str = "",
    ) -> None:
        """``weights_bytes``: what the slot's GPUs hold; 0: it computes in the host's arena. ``device_name``: of its
        first GPU.
        """
        self.settings, self.weights_bytes, self.device_name = settings, weights_bytes, device_name
        self.tls = tls
        self.transport: Transport = transport_for(tls)
        self.incarnation = new_id("inc")
        self.slot = Slot()
        self.step_metrics = StepMetrics(settings.token_budget)
        self.served_by: Engine = load_engine(settings)
        self.tokenizers = HostedTokenizer(partial(read_file, store))
        self.adapters = HostedAdapters(partial(read_file, store, timeout_s=READ_TIMEOUT_S))
        self.usage = UsagePublisher(nats, Subjects(settings.nats_prefix))
        self.buffers: dict[str, Buffer] = {}
        node_key = bytes.fromhex(settings.node_key)
        self.receiver = Receiver(settings.worker_id, node_key)
        listener = self.transport.listen(settings.host, settings.data_port)
        self.holder = HolderServer(settings.worker_id, node_key, self.buffers.get, listener)
        self.engine = EngineThread(self._on_step, self._on_fault)
        self.liveness = Liveness(time.monotonic())  # of the engine, for this worker's own health check
        self.roles: list[WorkerRole] = load_roles(settings.role_names, self)
        self._store = store
        self._load: asyncio.Task[None] | None = None
        self._environment = compiling_environment(settings)  # loads change the variables of this process
        self.loader: Loader | None = None  # of the last load
        self._fault = ""  # why the engine gave up the instance
        self._spawned: set[asyncio.Task[None]] = set()
        self._drained: asyncio.Event | None = None  # exists during a drain; set when the last attempt has ended
        self._drain_end: asyncio.Timeout | None = None  # exists while a drain waits
        self.task_group: asyncio.TaskGroup | None = None  # runs spawned work

    @property
    def data_address(self) -> str:
        """The address at which other workers reach this worker's data plane."""
        return join_address(self.settings.advertised_host, split_address(self.holder.address)[1])

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs ``work`` in the process's task group; an unexpected error is logged and ends only this work."""
        assert self.task_group is not None, "the worker is not serving"
        task = self.task_group.create_task(_guarded(work, name), name=name)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)
        return task

    # -- the slot ----------------------------------------------------------------------------------------------------

    async def load(self, hosted: HostedInstance, traceparent: str) -> None:
        """Starts a load into the free slot. Raises ``Conflict`` or ``InvalidRequest``."""
        self._check_roles(hosted.roles)
        await self.slot.begin_load(hosted)
        self._load = self.spawn(self._run_load(hosted, traceparent), "load")
        log.info("instance_loading", instance_id=hosted.instance_id, model=hosted.version.model)

    async def set_roles(self, instance_id: str, roles: list[types_pb2.Role.ValueType]) -> None:
        self.slot.require_instance(instance_id)
        self._check_roles(roles)
        await self.slot.set_roles(roles)

    async def unload(self, instance_id: str, drain_s: float) -> None:
        """Starts the drain, after which the slot is free. A further call may only shorten it."""
        if self.slot.hosted is None:
            return
        if self.slot.state == DRAINING:
            self._shorten_drain(drain_s)
            return
        self.slot.require_instance(instance_id)
        await self.slot.move(DRAINING)
        self.spawn(self._run_drain(drain_s, self._load), "drain")
        log.info("instance_draining", instance_id=instance_id)

    async def leave(self, grace_s: float) -> None:
        """Drains the slot for good: reports that this worker leaves, and returns once the slot is free.

        After ``grace_s`` the attempts that still run fail, and their gateways resume them elsewhere.
        """
        await self.slot.leave()
        load = self._load
        if self.slot.hosted is None or load is None:
            return
        await self.unload(self.slot.hosted.instance_id, grace_s)
        await asyncio.wait({load}, timeout=grace_s)  # the scheduler may have begun a longer drain before
        self._end_load()
        await asyncio.wait({load})

    def _check_roles(self, roles: list[types_pb2.Role.ValueType]) -> None:
        missing = set(roles) - {role.number for role in self.roles}
        if missing or not roles:
            names = ", ".join(types_pb2.Role.Name(number) for number in missing) or "no role"
            raise InvalidRequest(f"this worker cannot play {names}", field="roles")

    async def _run_load(self, hosted: HostedInstance, traceparent: str) -> None:
        pack_id = hosted.version.pack_id
        compiled = self._compiled_code(pack_id)
        loader = self.loader = Loader(
            self.slot, self.engine, self.served_by, self._store, self.settings.worker_id, self.latency, compiled
        )
        error = self._fault = ""
        store_was_lost = False
        try:
            await loader.run(pack_id, traceparent)
        except LoadFailed as failure:
            error, store_was_lost = failure.message, isinstance(failure, StoreLost)
            log.warning("load_failed", instance_id=hosted.instance_id, error=error)
        except Exception as failure:
            # A damaged or foreign pack may raise any exception in the engine's builder, and the slot must become free.
            error = f"the instance could not be built: {failure}"
            log.error("load_failed", instance_id=hosted.instance_id, exc_info=True)
        finally:
            error = error or self._fault
            if error and (fault := await device_fault(self.settings.device, self.settings.devices)):
                log.error("gpu_failed", fault=fault, error=error)
                end_process()  # only a new process can compute on it
            code = generation_pb2.RunError.CODE_LOAD_FAILED if error else generation_pb2.RunError.CODE_WRONG_INSTANCE
            self._fail_attempts(code, error or "the instance was unloaded")
            self.adapters.clear()
            await self.slot.release(error, store_was_lost)
            log.info("slot_free", instance_id=hosted.instance_id)

    def _compiled_code(self, pack_id: str) -> CompiledCode | None:
        """Where this load compiles, if other workers may have the result."""
        if not (key := self.settings.compiled_key) or (folder := self.served_by.compiled_folder()) is None:
            return None
        return CompiledCode(self._store, bytes.fromhex(key), pack_id, self._environment, folder)

    async def _run_drain(self, drain_s: float, load: asyncio.Task[None] | None) -> None:
        self._drained = asyncio.Event()
        try:
            if any(role.attempts for role in self.roles):
                async with asyncio.timeout(drain_s) as self._drain_end:
                    await self._drained.wait()
        except TimeoutError:
            log.warning("drain_cut", num_left=sum(len(role.attempts) for role in self.roles))
        finally:
            self._drained = self._drain_end = None
        if load is self._load:
            self._end_load()

    def _shorten_drain(self, drain_s: float) -> None:
        """Ends a drain that waits for answers after ``drain_s``, unless it ends before."""
        if self._drain_end is None or self._drain_end.expired():
            return
        end, when = asyncio.get_running_loop().time() + drain_s, self._drain_end.when()
        if when is None or end < when:
            self._drain_end.reschedule(end)

    def _end_load(self) -> None:
        """Ends the load and with it the instance, unless it is ending already."""
        if self._load is not None and not (self.loader is not None and self.loader.closing):
            self._load.cancel()

    def role(self, number: types_pb2.Role.ValueType) -> WorkerRole | None:
        """The role of this number; None if this process cannot play it."""
        return next((role for role in self.roles if role.number == number), None)

    def attempt_ended(self) -> None:
        """Ends a drain once the last attempt has been dropped."""
        if self._drained is not None and not any(role.attempts for role in self.roles):
            self._drained.set()

    # -- the engine --------------------------------------------------------------------------------------------------

    def cancel(self, group_id: str, choice: int | None = None) -> None:
        """Frees the pages of a group, or of one choice, between two layers of the running step."""
        instance = self.engine.instance
        if instance is not None:
            instance.cancel_soon(group_id, choice)

        def cancel() -> None:
            if self.engine.instance is not None:
                self.engine.instance.cancel(group_id, choice)

        self.engine.post(cancel)  # for an idle engine, and for a group whose prefill is still queued
        self.pages_freed()

    def latency(self) -> LatencyModel | None:
        """(any thread) The latency model of the instance in the slot; None before its first step."""
        return self.step_metrics.latency(self.slot.instance_labels)

    def progress(self) -> types_pb2.EngineProgress:
        """The progress of the engine, for the watchers of this worker."""
        progress = self.engine.progress(self.latency())
        self.liveness.observe(progress, time.monotonic())
        return types_pb2.EngineProgress(**asdict(progress))

    async def fault(self) -> str:
        """Why this worker cannot serve; empty if it can.

        Waits longer than the scheduler, which places requests elsewhere: a worker that fails this check is killed.
        """
        self.progress()
        now = time.monotonic()
        if not self.liveness.is_stalled(now, self.settings.engine_stall_s):
            return ""
        return f"the engine has work and has made no step for {now - self.liveness.advanced_at:.0f} s"

    async def health_fault(self) -> str:
        """For health checks: why nothing more should be sent here; empty if it should."""
        return "the worker leaves" if self.slot.is_leaving else await self.fault()

    def _on_step(self, result: StepResult) -> None:
        for role in self.roles:
            role.prefilled(result.prefilled)
            role.advance_prompts(result.prompts)
            role.deliver_prompt_logprobs(result.prompt_logprobs)
            role.deliver(result.tokens)
            role.deliver_embeddings(result.embeddings)
            role.expire(result.expired)
        if result.prefilled or result.expired or any(token.finish for token in result.tokens):
            self.pages_freed()
        floor = self.slot.hosted.step_floor if self.slot.hosted is not None else None
        self.step_metrics.record_step(result, self.slot.instance_labels, floor)

    def pages_freed(self) -> None:
        """Makes waiting offers retry after the commands posted so far, because pages may have been freed."""
        for role in self.roles:
            role.pages_freed()

    def _on_fault(self, error: Exception) -> None:
        if self.loader is not None and self.loader.closing:
            return  # closing failed a step that needed more layers
        self._fault = f"the engine failed: {error}"
        self._fail_attempts(generation_pb2.RunError.CODE_LOAD_FAILED, self._fault)
        self._end_load()

    def _fail_attempts(self, code: generation_pb2.RunError.Code.ValueType, message: str) -> None:
        error = generation_pb2.RunError(code=code, message=message, lost_worker="")
        for role in self.roles:
            role.fail_all(error)

    async def close(self) -> None:
        """Ends all running work; closes the slot, the engine's thread and the data plane."""
        self._end_load()
        if self._load is not None:
            await asyncio.gather(self._load, return_exceptions=True)
        for task in self._spawned:
            task.cancel()
        await asyncio.gather(*self._spawned, return_exceptions=True)
        await self.usage.flush()
        self.engine.post(self.served_by.close)
        await asyncio.to_thread(self.engine.close)
        self.holder.close()
