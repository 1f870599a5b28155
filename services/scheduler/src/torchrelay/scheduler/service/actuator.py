"""Carries out commands over gRPC; outcomes go back as inputs. Each command is a task of its own with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import grpc
from google.protobuf.message import Message

from torchrelay.common.errors import NotFound, TorchrelayError, Unavailable
from torchrelay.common.ids import new_id
from torchrelay.common.net.rpc.errors import error_from_rpc, logged_cause
from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1 import param_store_pb2, worker_pb2
from torchrelay.control.v1.param_store_pb2 import RELAY_URGENCY_IDLE, RELAY_URGENCY_URGENT
from torchrelay.scheduler.policy import effects, inputs
from torchrelay.scheduler.service import converters
from torchrelay.scheduler.service.controller import Controller
from torchrelay.scheduler.service.peer_channels import PeerChannels

if TYPE_CHECKING:
    from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreAsyncStub
    from torchrelay.control.v1.worker_pb2_grpc import WorkerAsyncStub  # exists in the stubs only

log = get_logger(__name__)

_TIMEOUT_S = 5.0  # Load and SetRoles return at once, and Relay where memory is faulted in
_FAULTING_BYTES_PER_S = 0.25e9  # a store may have to fault its arena in before it can reserve a range
_WHOLE_S = 0.05  # how long a load from a whole copy waits for the store to say that it has it
_UPSTREAM_S = 1.0  # how long a store may wait for those that it follows to be told
_RETRY_S = 0.05  # before the second attempt of a call that did not reach the peer


class _Unanswered(Unavailable):
    """The deadline of a call passed: whether it was carried out is not known."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """A call that is on its way, and what it takes to try again."""

    rpc: Callable[..., Awaitable[object]]
    request: Message
    timeout_s: float
    answer: Awaitable[object]


class _BegunWake(NamedTuple):
    """Of a wake of one host. ``loads``: by instance; none where they wait for the answer to the relay."""

    relay: _Begun
    loads: Mapping[str, _Begun]


class Actuator:
    """``tasks`` owns the running commands."""

    def __init__(self, controller: Controller, channels: PeerChannels, tasks: asyncio.TaskGroup) -> None:
        self._controller = controller
        self._channels = channels
        self._tasks = tasks
        self._stopped = False

    def stop(self) -> None:
        """Starts no further command: the service shuts down."""
        self._stopped = True

    def start(self, command: effects.Command) -> None:
        if self._stopped:
            return
        match command:
            case effects.WakeCommand():
                begun = self._begin_wake(command)
                self._tasks.create_task(self._wake(command, begun), name=f"wake {command.model.name}")
            case effects.SetRolesCommand():
                self._tasks.create_task(self._set_roles(command), name=f"set roles {command.instance_id}")
            case effects.UnloadCommand():
                self._tasks.create_task(self._unload(command), name=f"unload {command.instance_id}")
            case effects.RerouteCommand():
                self._tasks.create_task(self._reroute(command), name=f"reroute {command.hop.store_id}")
            case effects.CopyCommand():
                self._tasks.create_task(self._copy(command), name=f"copy {command.model.name}")
            case effects.RetainCommand():
                self._tasks.create_task(self._retain(command), name=f"retain {command.store_id}")
            case effects.DisconnectCommand():
                self._tasks.create_task(self._channels.forget(command.address), name=f"disconnect {command.address}")

    def _begin_wake(self, command: effects.WakeCommand) -> _BegunWake | None:
        """A wake of one host begins before the event loop turns to anything else: requests wait for it. Where the host
        has the pack, as far as is known, and its store is connected, the loads begin at once too: in case that the pack
        was just let go, the store keeps them waiting for the relay. None: of several hosts, or a peer is gone.
        """
        if len(command.hops) != 1:
            return None
        (hop,) = command.hops
        try:
            relay = self._begin_relay(command, self._hop_of_wake(command, hop))
            if not self._has_whole(hop.store_id, command.model.pack_id) or not self._is_connected(hop.store_id):
                return _BegunWake(relay, {})
            return _BegunWake(relay, {order.instance_id: self._begin_load(command, order) for order in hop.loads})
        except Unavailable:
            return None

    async def _wake(self, command: effects.WakeCommand, begun: _BegunWake | None) -> None:
        """All hosts at once, but each after those of this wake that it follows: a store that hangs delays its followers
        alone, for ``_UPSTREAM_S``, as they have other sources. Where the store has the pack, as far as is known, loads
        are told beside the relay; elsewhere once it has accepted it.
        """
        if begun is not None and begun.loads:
            await self._finish_wake(command, begun)
            return
        if len(command.hops) == 1:
            relay = begun.relay if begun is not None else None
            await self._wake_host(command, command.hops[0], (), asyncio.Event(), relay)
            return
        told = {hop.store_id: asyncio.Event() for hop in command.hops}
        async with asyncio.TaskGroup() as hosts:
            for hop in command.hops:
                upstream = [told[source] for source in hop.sources[: hop.num_striped] if source in told]
                hosts.create_task(self._wake_host(command, hop, upstream, told[hop.store_id]))

    async def _finish_wake(self, command: effects.WakeCommand, begun: _BegunWake) -> None:
        """The relay and the loads of one host are under way."""
        (hop,) = command.hops
        async with asyncio.TaskGroup() as calls:
            relay = calls.create_task(self._request_relay(command, hop, begun.relay))
            for order in hop.loads:
                calls.create_task(self._load_beside(command, hop, order, relay, begun.loads[order.instance_id]))

    async def _wake_host(
        self,
        command: effects.WakeCommand,
        hop: effects.Hop,
        upstream: Sequence[asyncio.Event],
        told: asyncio.Event,
        relay: _Begun | None = None,
    ) -> None:
        if self._has_whole(hop.store_id, command.model.pack_id):
            told.set()
            await self._load_whole(command, hop, relay)
            return
        if upstream:
            with suppress(TimeoutError):
                async with asyncio.timeout(_UPSTREAM_S):
                    for one in upstream:
                        await one.wait()
        try:
            cause = await self._request_relay(command, hop, relay)
        finally:
            told.set()
        if cause:
            self._refuse_loads(hop, hop.loads, cause)
            return
        async with asyncio.TaskGroup() as loads:
            for order in hop.loads:
                loads.create_task(self._load(command, order))

    async def _load_whole(self, command: effects.WakeCommand, hop: effects.Hop, begun: _Begun | None) -> None:
        """The host has the pack, as far as is known: the relay is for the case that it has not any more. A store that
        takes long for its answer delays no load.
        """
        async with asyncio.TaskGroup() as calls:
            relay = calls.create_task(self._request_relay(command, hop, begun))
            await asyncio.wait({relay}, timeout=_WHOLE_S)
            if relay.done() and (cause := relay.result()):
                self._refuse_loads(hop, hop.loads, cause)
                return
            for order in hop.loads:
                calls.create_task(self._load_beside(command, hop, order, relay))

    async def _load_beside(
        self,
        command: effects.WakeCommand,
        hop: effects.Hop,
        order: effects.LoadOrder,
        relay: asyncio.Task[str],
        begun: _Begun | None = None,
    ) -> None:
        """A load whose relay may still be refused. The policy hears of that after what the worker says: a load that was
        taken has to be ended.
        """
        await self._load(command, order, begun)
        if cause := await relay:
            self._refuse_loads(hop, (order,), cause)

    def _refuse_loads(self, hop: effects.Hop, orders: Sequence[effects.LoadOrder], cause: str) -> None:
        for order in orders:
            self._controller.apply(inputs.LoadRefused(order.instance_id, cause, hop.store_id))

    async def _request_relay(self, command: effects.WakeCommand, hop: effects.Hop, relay: _Begun | None) -> str:
        """Why the store did not take the relay; empty if it did."""
        try:
            await self._finish(relay or self._begin_relay(command, self._hop_of_wake(command, hop)))
        except TorchrelayError as error:
            log.info("relay_refused", store_id=hop.store_id, error=logged_cause(error))
            return f"param-store {hop.store_id} did not take the relay: {error.message}"
        return ""

    def _hop_of_wake(self, command: effects.WakeCommand, hop: effects.Hop) -> effects.Hop:
        """What has the pack needs one source, for the case that it has not any more."""
        is_whole = self._has_whole(hop.store_id, command.model.pack_id)
        return replace(hop, sources=hop.sources[:1], num_striped=1) if is_whole else hop

    def _has_whole(self, store_id: str, pack_id: str) -> bool:
        store = self._controller.policy.state.membership.stores.get(store_id)
        copy = store.copies.get(pack_id) if store is not None else None
        return copy is not None and copy.complete

    async def _relay(self, command: effects.CopyCommand | effects.RerouteCommand, hop: effects.Hop) -> None:
        await self._finish(self._begin_relay(command, hop))

    def _begin_relay(
        self, command: effects.WakeCommand | effects.CopyCommand | effects.RerouteCommand, hop: effects.Hop
    ) -> _Begun:
        """Raises ``Unavailable`` if the store is gone."""
        store, stores = self._store(hop.store_id), self._controller.policy.state.membership.stores
        holders = [stores[source] for source in hop.sources if source in stores]
        model, cluster_tickets = command.model, self._controller.cluster_tickets
        sources = [cluster_tickets.source(model.pack_id, holder, hop.store_id) for holder in holders]
        sources.append(cluster_tickets.source(model.pack_id, None, hop.store_id))
        request = param_store_pb2.RelayRequest(
            epoch=self._controller.epoch.value,
            pack_id=model.pack_id,
            sources=sources,
            relay_id=new_id("relay"),
            num_striped=max(sum(source in stores for source in hop.sources[: hop.num_striped]), 1),
            urgency=RELAY_URGENCY_URGENT,
        )
        if isinstance(command, effects.CopyCommand):
            request.keep_retained = command.keep_retained
        if not (hop.urgent if isinstance(command, effects.WakeCommand) else command.urgent):
            request.urgency = RELAY_URGENCY_IDLE
        return self._begin(store.Relay, request, _TIMEOUT_S + model.pack_bytes / _FAULTING_BYTES_PER_S)

    async def _reroute(self, command: effects.RerouteCommand) -> None:
        """If the store cannot be reached, its relay goes on unchanged."""
        try:
            await self._relay(command, command.hop)
        except TorchrelayError as error:
            log.info("reroute_failed", store_id=command.hop.store_id, error=logged_cause(error))

    async def _copy(self, command: effects.CopyCommand) -> None:
        pack_id, store_id = command.model.pack_id, command.hop.store_id
        try:
            await self._relay(command, command.hop)
        except TorchrelayError as error:
            cause = f"the relay could not be started: {error.message}"
            self._controller.apply(inputs.CopyFailed(pack_id, store_id, cause, isinstance(error, NotFound)))
            return
        self._controller.apply(inputs.CopyAccepted(pack_id, store_id))

    async def _retain(self, command: effects.RetainCommand) -> None:
        request = param_store_pb2.RetainRequest(
            epoch=self._controller.epoch.value,
            pack_ids=command.pack_ids,
            lease_s=command.lease_s,
            disk_pack_ids=command.disk_pack_ids,
        )
        try:
            await self._call(self._store(command.store_id).Retain, request)
        except TorchrelayError as error:
            log.info("retain_failed", store_id=command.store_id, error=logged_cause(error))
            self._controller.apply(inputs.RetainFailed(command.store_id))

    def _is_connected(self, store_id: str) -> bool:
        """One whose process is gone is known to be so at once, and its host's loads are not begun in vain."""
        store = self._controller.policy.state.membership.stores.get(store_id)
        return store is not None and self._channels.is_connected(store.grpc_address, store_id)

    def _store(self, store_id: str) -> ParamStoreAsyncStub:
        store = self._controller.policy.state.membership.stores.get(store_id)
        if store is None:
            raise Unavailable("the store is gone")
        return self._channels.store(store.grpc_address, store_id)

    def _begin_load(self, command: effects.WakeCommand, order: effects.LoadOrder) -> _Begun:
        """Raises ``Unavailable`` if the worker is gone."""
        request = worker_pb2.LoadRequest(
            epoch=self._controller.epoch.value,
            instance_id=order.instance_id,
            version=self._controller.version(command.model.version_id),
            roles=converters.roles_to_proto(order.roles),
            traceparent=command.traceparent,
        )
        return self._begin(self._worker(order.worker_id).Load, request, _TIMEOUT_S)

    async def _load(self, command: effects.WakeCommand, order: effects.LoadOrder, begun: _Begun | None = None) -> None:
        try:
            await self._finish(begun or self._begin_load(command, order))
        except _Unanswered:
            self._controller.apply(inputs.LoadUnanswered(order.instance_id))
            return
        except TorchrelayError as error:
            cause = f"worker {order.worker_id} did not accept the load: {error.message}"
            self._controller.apply(inputs.LoadRefused(order.instance_id, cause))
            return
        self._controller.apply(inputs.LoadAccepted(order.instance_id))

    async def _set_roles(self, command: effects.SetRolesCommand) -> None:
        request = worker_pb2.SetRolesRequest(
            epoch=self._controller.epoch.value,
            instance_id=command.instance_id,
            roles=converters.roles_to_proto(command.roles),
        )
        try:
            await self._call(self._worker(command.worker_id).SetRoles, request)
        except TorchrelayError as error:
            self._controller.apply(inputs.RolesFailed(command.instance_id, error.message))
            return
        self._controller.apply(inputs.RolesSet(command.instance_id))

    async def _unload(self, command: effects.UnloadCommand) -> None:
        request = worker_pb2.UnloadRequest(
            epoch=self._controller.epoch.value, instance_id=command.instance_id, drain_s=command.drain_s
        )
        try:
            await self._call(self._worker(command.worker_id).Unload, request, command.drain_s + _TIMEOUT_S)
        except TorchrelayError as error:
            self._controller.apply(inputs.UnloadFailed(command.instance_id, error.message))

    def _worker(self, worker_id: str) -> WorkerAsyncStub:
        worker = self._controller.policy.state.membership.workers.get(worker_id)
        if worker is None:
            raise Unavailable("the worker is gone")
        return self._channels.worker(worker.grpc_address, worker_id)

    async def _call(
        self, rpc: Callable[..., Awaitable[object]], request: Message, timeout_s: float = _TIMEOUT_S
    ) -> None:
        await self._finish(self._begin(rpc, request, timeout_s))

    def _begin(self, rpc: Callable[..., Awaitable[object]], request: Message, timeout_s: float) -> _Begun:
        """Raises ``Unavailable`` if the peer's channel is closed."""
        try:
            return _Begun(rpc, request, timeout_s, rpc(request, timeout=timeout_s))
        except grpc.aio.UsageError as error:
            raise Unavailable("the peer was lost before the call") from error

    async def _finish(self, begun: _Begun) -> None:
        """Waits for the answer of an RPC, which is tried again if the peer was not reached.

        A ``StaleEpoch`` fails it like any error: a newer scheduler shows by the reports of all, not by one's word.
        """
        try:
            try:
                await begun.answer
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(_RETRY_S)
                await self._begin(begun.rpc, begun.request, begun.timeout_s).answer
        except asyncio.CancelledError:
            # Either we are cancelled, or the peer was lost and its channel closed under the call.
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise Unavailable("the peer was lost during the call") from None
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise _Unanswered(f"there was no answer within {begun.timeout_s:g} s") from error
            raise error_from_rpc(error) from error
