"""The worker: one slot, one engine thread, the roles it plays, and the data plane that hands KV on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nats.aio.client import Client

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.ids import new_id
from torchrelay.common.net.nats_client import Subjects
from torchrelay.common.process.telemetry import get_logger
from torchrelay.common.tls import Tls
from torchrelay.control.v1 import generation_pb2, types_pb2
from torchrelay.engine.core import LoadFailed, StepResult
from torchrelay.engine.kernels.cpu.active_processes import ActiveProcesses
from torchrelay.engine.kv.pool import KvPool
from torchrelay.transfer.buffers import Buffer
from torchrelay.transfer.fetch.follow import Receiver
from torchrelay.transfer.serve.holder import HolderServer
from torchrelay.transfer.transport.auto import AutoTransport, open_local_listener
from torchrelay.transfer.transport.tls import transport_for
from torchrelay.worker.attempts.hosted_tokenizer import HostedTokenizer
from torchrelay.worker.attempts.usage_publisher import UsagePublisher
from torchrelay.worker.metrics.step_metrics import StepMetrics
from torchrelay.worker.role import WorkerRole, load_roles
from torchrelay.worker.settings import WorkerSettings
from torchrelay.worker.slot.engine_thread import EngineThread
from torchrelay.worker.slot.loader import Loader
from torchrelay.worker.slot.slot import DRAINING, HostedInstance, Slot

if TYPE_CHECKING:
    from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreAsyncStub  # exists in the stubs only

log = get_logger(__name__)


async def _guarded(work: Coroutine[Any, Any, None], name: str) -> None:
    try:
        await work
    except Exception:
        log.error("background_work_failed", work=name, exc_info=True)


@dataclass(slots=True)
class _Drain:
    """A drain under way: set when the last attempt ended."""

    empty: asyncio.Event


class Worker:
    """What the servicers and roles of this process share. All methods on the event loop."""

    def __init__(
        self, settings: WorkerSettings, nats: Client, store: ParamStoreAsyncStub, tls: Tls | None = None
    ) -> None:
        self.settings = settings
        self.tls = tls
        self.transport = AutoTransport(transport_for(tls))
        self.incarnation = new_id("inc")
        self.slot = Slot()
        self.step_metrics = StepMetrics(settings.token_budget)
        self.pool = KvPool(settings.kv_pool_bytes, settings.device)
        cores_file = settings.cores_file if self.pool.device.type == "cpu" else None
        self._active_processes = None if cores_file is None else ActiveProcesses(cores_file)
        self.tokenizers = HostedTokenizer(store)
        self.usage = UsagePublisher(nats, Subjects(settings.nats_prefix))
        self.buffers: dict[str, Buffer] = {}
        node_key = bytes.fromhex(settings.node_key)
        self.receiver = Receiver(settings.worker_id, node_key)
        listener = self.transport.listen(settings.host, settings.data_port)
        self.holder = HolderServer(settings.worker_id, node_key, self.buffers.get, listener)
        self.local_address = ""  # of the same, for workers of this host
        self.engine = EngineThread(self._on_step, self._on_fault)
        self.roles: list[WorkerRole] = load_roles(settings.role_names, self)
        self._store = store
        self._load: asyncio.Task[None] | None = None
        self._loader: Loader | None = None
        self._fault = ""  # why the engine gave the instance up
        self._spawned: set[asyncio.Task[None]] = set()
        self._drain: _Drain | None = None
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def data_address(self) -> str:
        """Where other workers reach this one's data plane."""
        return f"{self.settings.advertised_host}:{self.holder.address.rpartition(':')[2]}"

    def serve_data(self) -> None:
        """Opens the data plane, within this host too if that is set; ``close`` ends it."""
        if self.settings.kv_by_shared_memory and (listener := open_local_listener(self.receiver.node_key)):
            self.local_address = listener.address
            self.holder.add_listener(listener)
        self.holder.start()

    def set_task_group(self, tasks: asyncio.TaskGroup) -> None:
        """Background work belongs to this group from now on."""
        self._tasks = tasks

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs ``work`` in the process's task group; an error that it did not expect is logged, and ends it alone."""
        assert self._tasks is not None, "the worker is not serving"
        task = self._tasks.create_task(_guarded(work, name), name=name)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)
        return task

    # -- the slot ----------------------------------------------------------------------------------------------------

    async def load(self, hosted: HostedInstance, traceparent: str) -> None:
        """Begins a load into the free slot. Raises ``Conflict`` or ``InvalidRequest``."""
        self._check_roles(hosted.roles)
        await self.slot.begin_load(hosted)
        self._load = self.spawn(self._run_load(hosted, traceparent), "load")
        log.info("instance_loading", instance_id=hosted.instance_id, model=hosted.version.model)

    async def set_roles(self, instance_id: str, roles: list[types_pb2.Role.ValueType]) -> None:
        self.slot.require_instance(instance_id)
        self._check_roles(roles)
        await self.slot.set_roles(roles)

    async def unload(self, instance_id: str, drain_s: float) -> None:
        """Begins the drain; the slot is free once it is over. Unloading twice has the effect of once."""
        if self.slot.hosted is None or self.slot.state == DRAINING:
            return
        self.slot.require_instance(instance_id)
        await self.slot.move(DRAINING)
        self.spawn(self._run_drain(drain_s, self._load), "drain")
        log.info("instance_draining", instance_id=instance_id)

    def _check_roles(self, roles: list[types_pb2.Role.ValueType]) -> None:
        missing = set(roles) - {role.number for role in self.roles}
        if missing or not roles:
            names = ", ".join(types_pb2.Role.Name(number) for number in missing) or "none at all"
            raise InvalidRequest(f"this worker cannot play {names}", field="roles")

    async def _run_load(self, hosted: HostedInstance, traceparent: str) -> None:
        loader = self._loader = Loader(
            self.slot, self.engine, self.pool, self._store, self.settings, self._active_processes
        )
        error = self._fault = ""
        try:
            await loader.run(hosted.version.pack_id, traceparent)
        except LoadFailed as failure:
            error = failure.message
            log.warning("load_failed", instance_id=hosted.instance_id, error=error)
        except Exception as failure:
            # Whatever a damaged or foreign pack does to the engine's builder: the slot must come back.
            error = f"the instance could not be built: {failure}"
            log.error("load_failed", instance_id=hosted.instance_id, exc_info=True)
        finally:
            error = error or self._fault
            code = generation_pb2.RunError.CODE_LOAD_FAILED if error else generation_pb2.RunError.CODE_WRONG_INSTANCE
            self._fail_attempts(code, error or "the instance was unloaded")
            await self.slot.release(error)
            log.info("slot_free", instance_id=hosted.instance_id)

    async def _run_drain(self, drain_s: float, load: asyncio.Task[None] | None) -> None:
        self._drain = _Drain(asyncio.Event())
        try:
            if any(len(role.attempts) for role in self.roles):
                async with asyncio.timeout(drain_s):
                    await self._drain.empty.wait()
        except TimeoutError:
            log.warning("drain_cut", num_left=sum(len(role.attempts) for role in self.roles))
        finally:
            self._drain = None
        if load is self._load:
            self._end_load()

    def _end_load(self) -> None:
        """Ends the load, and with it the instance; while that is under way it does nothing."""
        if self._load is not None and not (self._loader is not None and self._loader.closing):
            self._load.cancel()

    def role(self, number: types_pb2.Role.ValueType) -> WorkerRole | None:
        """The role of this number, when this process can play it."""
        return next((role for role in self.roles if role.number == number), None)

    def attempt_ended(self) -> None:
        """A role let go of an attempt: a drain may be over."""
        if self._drain is not None and not any(len(role.attempts) for role in self.roles):
            self._drain.empty.set()

    # -- the engine --------------------------------------------------------------------------------------------------

    def cancel(self, group_id: str, choice: int | None = None) -> None:
        """Frees the pages of a group, or of one choice, between two layers of the step under way."""
        instance = self.engine.instance
        if instance is not None:
            instance.cancel_soon(group_id, choice)

        def cancel() -> None:
            if self.engine.instance is not None:
                self.engine.instance.cancel(group_id, choice)

        self.engine.post(cancel)  # for an engine that is idle, and for a group whose prefill is still posted
        self.pages_freed()

    def _on_step(self, result: StepResult) -> None:
        for role in self.roles:
            role.attempts.mark_prefilled(result.prefilled)
            role.deliver(result.tokens)
            role.expire(result.expired)
        if result.prefilled or result.expired or any(token.finish for token in result.tokens):
            self.pages_freed()
        self.step_metrics.record_step(result, self.slot.instance_labels)

    def pages_freed(self) -> None:
        """Some group lets go of pages; who waits for pages tries again, after the commands posted so far."""
        for role in self.roles:
            role.pages_freed()

    def _on_fault(self, error: Exception) -> None:
        if self._loader is not None and self._loader.closing:
            return  # a step that waited for layers was told to give up
        self._fault = f"the engine gave up: {error}"
        self._fail_attempts(generation_pb2.RunError.CODE_LOAD_FAILED, self._fault)
        self._end_load()

    def _fail_attempts(self, code: generation_pb2.RunError.Code.ValueType, message: str) -> None:
        error = generation_pb2.RunError(code=code, message=message, lost_worker="")
        for role in self.roles:
            role.fail_all(error)

    async def close(self) -> None:
        """Cuts what still runs and frees the slot; the engine's thread and the data plane end."""
        self._end_load()
        if self._load is not None:
            await asyncio.gather(self._load, return_exceptions=True)
        for task in self._spawned:
            task.cancel()
        await asyncio.gather(*self._spawned, return_exceptions=True)
        await self.usage.flush()
        await asyncio.to_thread(self.engine.close)
        self.holder.close()
