"""Carries out commands over gRPC. Each is a task with a deadline, whose outcome goes back as ``CommandEnded``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, assert_never

import grpc
from msgspec import structs

from torchrelay.common.cancellation import raise_if_cancelled
from torchrelay.common.errors import NotFound, TorchrelayError, Unavailable
from torchrelay.common.ids import new_id
from torchrelay.common.net.rpc.errors import error_from_rpc, logged_cause
from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1 import param_store_pb2, types_pb2, worker_pb2
from torchrelay.control.v1.param_store_pb2 import RELAY_URGENCY_IDLE, RELAY_URGENCY_URGENT
from torchrelay.scheduler.policy import effects, inputs
from torchrelay.scheduler.policy.inputs import CommandEnded, CommandOutcome
from torchrelay.scheduler.policy.types import Peer
from torchrelay.scheduler.service import converters
from torchrelay.scheduler.service.controller import Controller
from torchrelay.scheduler.service.peer_channels import PeerChannels

log = get_logger(__name__)

_TIMEOUT_S = 5.0  # Load and SetRoles return at once, and Relay where memory is faulted in
_FAULTING_BYTES_PER_S = 0.25e9  # a store may have to fault its arena in before it can reserve a range
_UPSTREAM_S = 1.0  # how long a relay waits until the stores that it follows have answered
_RETRY_S = 0.05  # before the second attempt of a call that did not reach the peer


class _Unanswered(Unavailable):
    """The deadline of a call passed: the peer may have carried it out or not."""


class Actuator:
    """``tasks`` owns the running commands."""

    def __init__(self, controller: Controller, channels: PeerChannels, tasks: asyncio.TaskGroup) -> None:
        self._controller, self._channels, self._tasks = controller, channels, tasks

    def start(self, command: effects.Command) -> None:
        """Starts to carry a command out; its outcome comes back as an input."""
        self._tasks.create_task(self._carry_out(command), name=type(command).__name__)

    async def _carry_out(self, command: effects.Command) -> None:
        match command:
            case effects.LoadCommand(hops=hops):
                answered = {hop.store_id: asyncio.Event() for hop in hops}
                async with asyncio.TaskGroup() as hosts:
                    for hop in hops:
                        hosts.create_task(self._load_host(command, hop, answered))
            case effects.SetRolesCommand(instance_id, worker_id, roles):
                request = worker_pb2.SetRolesRequest(instance_id=instance_id, roles=converters.roles_to_proto(roles))
                with self._outcome(inputs.RoleChange(instance_id)):
                    await self._call(Peer(worker_id), "SetRoles", request)
            case effects.UnloadCommand(instance_id, worker_id, drain_s):
                unload = worker_pb2.UnloadRequest(instance_id=instance_id, drain_s=drain_s)
                with self._outcome(inputs.Unload(instance_id)):
                    await self._call(Peer(worker_id), "Unload", unload, drain_s + _TIMEOUT_S)
            case effects.RerouteCommand(hop=hop):
                await self._request_relay(command, hop)  # where it is refused, the relay goes on unchanged
            case effects.CopyCommand(model, hop):
                with self._outcome(inputs.Copy(model.pack_id, hop.store_id), "the relay could not be started: "):
                    await self._relay(command, hop)
            case effects.RetainCommand(store_id, pack_ids, lease_s, disk_pack_ids):
                retain = param_store_pb2.RetainRequest(pack_ids=pack_ids, lease_s=lease_s, disk_pack_ids=disk_pack_ids)
                with self._outcome(inputs.Retention(store_id)):
                    await self._call(Peer(store_id, is_store=True), "Retain", retain)
            case effects.DisconnectCommand(address):
                await self._channels.forget(address)
            case _:
                assert_never(command)

    async def _load_host(
        self, command: effects.LoadCommand, hop: effects.Hop, answered: Mapping[str, asyncio.Event]
    ) -> None:
        """Relays the pack to one host and loads it there. The loads go out beside the relay if the host has the whole
        pack, and otherwise once its store has accepted the relay.

        ``answered``: by store, set once the store has answered. A relay waits for the stores of this load that it
        follows, but no longer than ``_UPSTREAM_S``: it has other sources.
        """
        has_pack = self._has_pack(hop.store_id, command.model.pack_id)
        if has_pack:
            # The relay is only for the case that the store has just evicted the pack: one source is enough.
            hop = replace(hop, sources=hop.sources[:1], num_striped=1)
            answered[hop.store_id].set()
        else:
            upstream = [answered[source] for source in hop.sources[: hop.num_striped] if source in answered]
            with suppress(TimeoutError):
                async with asyncio.timeout(_UPSTREAM_S):
                    for event in upstream:
                        await event.wait()

        async def load(order: effects.LoadOrder) -> None:
            if has_pack or not await relay:
                await self._load(command, order)
            if cause := await relay:  # told after the worker's answer: the policy ends a load that the worker accepted
                failed = inputs.Load(order.instance_id, failed_store=hop.store_id)
                self._controller.apply(CommandEnded(failed, CommandOutcome.REFUSED, cause))

        async with asyncio.TaskGroup() as calls:
            relay = calls.create_task(self._request_relay(command, hop))
            relay.add_done_callback(lambda _: answered[hop.store_id].set())
            for order in hop.loads:
                calls.create_task(load(order))

    async def _request_relay(self, command: effects.LoadCommand | effects.RerouteCommand, hop: effects.Hop) -> str:
        """Returns why the store did not accept the relay; empty if it did."""
        try:
            await self._relay(command, hop)
        except TorchrelayError as error:
            name = "reroute_refused" if isinstance(command, effects.RerouteCommand) else "relay_refused"
            log.info(name, store_id=hop.store_id, error=logged_cause(error))
            return f"param-store {hop.store_id} did not accept the relay: {error.message}"
        return ""

    def _has_pack(self, store_id: str, pack_id: str) -> bool:
        """Whether the store has last reported a whole copy, and is connected: otherwise its process may be gone."""
        store = self._controller.policy.state.membership.stores.get(store_id)
        copy = store.copies.get(pack_id) if store is not None else None
        if store is None or copy is None or not copy.complete:
            return False
        return self._channels.is_connected(store.grpc_address, Peer(store_id, is_store=True))

    async def _relay(
        self, command: effects.LoadCommand | effects.CopyCommand | effects.RerouteCommand, hop: effects.Hop
    ) -> None:
        stores = self._controller.policy.state.membership.stores
        pack_id, cluster_tickets = command.model.pack_id, self._controller.cluster_tickets
        holders = [stores[source] for source in hop.sources if source in stores]
        is_urgent = hop.urgent if isinstance(command, effects.LoadCommand) else command.urgent
        request = param_store_pb2.RelayRequest(
            pack_id=pack_id,
            sources=[cluster_tickets.source(pack_id, holder, hop.store_id) for holder in (*holders, None)],
            relay_id=new_id("relay"),
            num_striped=max(sum(source in stores for source in hop.sources[: hop.num_striped]), 1),
            urgency=RELAY_URGENCY_URGENT if is_urgent else RELAY_URGENCY_IDLE,
            keep_retained=isinstance(command, effects.CopyCommand) and command.keep_retained,
        )
        timeout_s = _TIMEOUT_S + command.model.pack_bytes / _FAULTING_BYTES_PER_S
        await self._call(Peer(hop.store_id, is_store=True), "Relay", request, timeout_s)

    async def _load(self, command: effects.LoadCommand, order: effects.LoadOrder) -> None:
        with self._outcome(inputs.Load(order.instance_id), f"worker {order.worker_id} cannot load it: "):
            version = types_pb2.ModelVersion()
            version.CopyFrom(self._controller.version(command.model.version_id))
            version.scaling.threads = command.model.threads  # of all its names
            request = worker_pb2.LoadRequest(
                instance_id=order.instance_id,
                version=version,
                roles=converters.roles_to_proto(order.roles),
                traceparent=command.traceparent,
            )
            await self._call(Peer(order.worker_id), "Load", request)

    @contextmanager
    def _outcome(self, command: inputs.CommandId, why: str = "") -> Iterator[None]:
        """Passes on whether the block has carried the command out. ``why`` begins the cause if it has not."""
        outcome, cause = CommandOutcome.ACCEPTED, ""
        try:
            yield
        except TorchrelayError as error:
            kind = type(command).__name__
            log.info("command_failed", command=kind, error=logged_cause(error), **structs.asdict(command))
            outcome, cause = _outcome_of(error), why + error.message
        self._controller.apply(CommandEnded(command, outcome, cause))

    async def _call(self, peer: Peer, method: str, request: Any, timeout_s: float = _TIMEOUT_S) -> None:
        """Calls the peer with our epoch and waits for its answer. A call that did not reach the peer is repeated once.

        A ``StaleEpoch`` is an error like any other: whether a newer scheduler is active is decided by the reports of
        most peers, not by the answer of one.
        """
        status = self._controller.status(peer)
        if status is None:
            raise Unavailable(f"the {'store' if peer.is_store else 'worker'} is gone")
        rpc = getattr(self._channels.stub(status.grpc_address, peer), method)
        request.epoch = self._controller.epoch.value
        try:
            try:
                await rpc(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(_RETRY_S)
                await rpc(request, timeout=timeout_s)
        except grpc.aio.UsageError as error:
            raise Unavailable("the peer was lost before the call") from error
        except asyncio.CancelledError:
            raise_if_cancelled()  # otherwise the channel was closed
            raise Unavailable("the peer was lost during the call") from None
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise _Unanswered(f"there was no answer within {timeout_s:g} s") from error
            raise error_from_rpc(error) from error


def _outcome_of(error: TorchrelayError) -> CommandOutcome:
    match error:
        case _Unanswered():
            return CommandOutcome.UNANSWERED
        case NotFound():
            return CommandOutcome.NOT_FOUND
    return CommandOutcome.REFUSED
