"""Time of a role change in place and of a load, each until the first answer in the new role.

The bench plays the scheduler and the gateway towards the workers of `torchrelay up`: it orders roles and loads, and
sends the requests at once. Two other workers play the other part of each request.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.report import Check, progress
from tests.support.platform import Platform
from torchrelay.common.identity.callers import Caller
from torchrelay.common.ids import new_id
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import reports_pb2, types_pb2, worker_pb2
from torchrelay.control.v1.decode_pb2_grpc import DecodeStub
from torchrelay.control.v1.prefill_pb2_grpc import PrefillStub
from torchrelay.control.v1.worker_pb2_grpc import WorkerStub
from torchrelay.transfer.protocol.tickets import TicketIssuer

PREFILL, DECODE = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE
NAMES = {PREFILL: "prefill", DECODE: "decode"}
DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A worker, its instance of the model, and a channel to it."""

    ref: types_pb2.WorkerRef
    channel: Any

    async def set_roles(self, epoch: int, role: types_pb2.Role.ValueType) -> None:
        request = worker_pb2.SetRolesRequest(epoch=epoch, instance_id=self.ref.instance_id, roles=[role])
        await WorkerStub(self.channel).SetRoles(request, timeout=DEADLINE_S)

    async def load(self, epoch: int, version: types_pb2.ModelVersion, role: types_pb2.Role.ValueType) -> None:
        request = worker_pb2.LoadRequest(epoch=epoch, instance_id=self.ref.instance_id, version=version, roles=[role])
        await WorkerStub(self.channel).Load(request, timeout=DEADLINE_S)

    async def unload(self, epoch: int) -> None:
        """Unloads the instance and waits until the slot is free."""
        await WorkerStub(self.channel).Unload(
            worker_pb2.UnloadRequest(epoch=epoch, instance_id=self.ref.instance_id), timeout=DEADLINE_S
        )
        await self.until(epoch, reports_pb2.SlotState.STATE_FREE)

    async def until(self, epoch: int, state: reports_pb2.SlotState.State.ValueType) -> None:
        watch = WorkerStub(self.channel).WatchSlot(worker_pb2.WatchSlotRequest(epoch=epoch), timeout=DEADLINE_S)
        async for report in watch:
            if report.slot.state == state:
                break
        watch.cancel()


@dataclass(frozen=True, slots=True)
class RoleBench:
    """``changing``: the worker that is measured; the others play one role each."""

    epoch: int
    version: types_pb2.ModelVersion
    tickets: TicketIssuer
    prefill: Peer
    decode: Peer
    changing: Peer
    prompt: list[int]

    async def change_s(self, role: types_pb2.Role.ValueType) -> float:
        """Seconds from the order of the role to the first token that the worker sends in it."""
        begin = time.perf_counter()
        await self.changing.set_roles(self.epoch, role)
        return await self.answer(role) - begin

    async def load_s(self, role: types_pb2.Role.ValueType) -> float:
        """The same from the order of a load, with the pack in the host's memory."""
        await self.changing.unload(self.epoch)
        begin = time.perf_counter()
        await self.changing.load(self.epoch, self.version, role)
        answered_at = await self.answer(role)
        await self.changing.until(self.epoch, reports_pb2.SlotState.STATE_READY)
        return answered_at - begin

    async def request_s(self, role: types_pb2.Role.ValueType) -> float:
        """Seconds of a request to the loaded instance, which plays the role already."""
        begin = time.perf_counter()
        return await self.answer(role) - begin

    async def answer(self, role: types_pb2.Role.ValueType) -> float:
        """Sends a request in which the worker plays ``role``; returns when its first token in that role came."""
        prefill = self.changing if role == PREFILL else self.prefill
        decode = self.changing if role == DECODE else self.decode
        key = types_pb2.AttemptKey(request_id=new_id("req"), attempt=1)
        for_decode = pb.AttemptStart(
            key=key,
            instance_id=decode.ref.instance_id,
            num_prompt_tokens=len(self.prompt),
            sampling=pb.Sampling(temperature=0.0, max_tokens=2, top_p=1.0, ignore_eos=True),
            choices=[pb.ChoiceStart(choice=0)],
        )
        for_prefill = pb.AttemptStart()
        for_prefill.CopyFrom(for_decode)
        for_prefill.instance_id, for_prefill.prompt[:] = prefill.ref.instance_id, self.prompt
        for_prefill.decode.CopyFrom(decode.ref)
        expires_unix_ms = int((time.time() + DEADLINE_S) * 1000)
        for_prefill.kv_ticket.CopyFrom(
            self.tickets.issue(f"{key.request_id}/1", prefill.ref.worker_id, decode.ref.worker_id, expires_unix_ms)
        )
        has_ended = asyncio.Event()
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
            decoding = tasks.create_task(_answered_at(DecodeStub(decode.channel), for_decode, has_ended))
            prefilling = tasks.create_task(_answered_at(PrefillStub(prefill.channel), for_prefill, has_ended))
        return (prefilling if role == PREFILL else decoding).result()


async def _answered_at(stub: Any, start: pb.AttemptStart, has_ended: asyncio.Event) -> float:
    """When the worker sent the attempt's first token on a new stream, which stays open until the attempt has ended."""
    call = stub.Run()
    try:
        await call.write(pb.RunCommand(hello=pb.RunHello(gateway_id=new_id("bench"))))
        await call.write(pb.RunCommand(start=start))
        answered_at = 0.0
        async for step in call:
            for output in step.outputs:
                if output.finish_reason == pb.FINISH_REASON_ERROR:
                    raise RuntimeError(output.error.message)
                answered_at = answered_at or (time.perf_counter() if output.token_ids else 0.0)
                if output.finish_reason:
                    has_ended.set()
            if answered_at and (start.prompt or has_ended.is_set()):
                await has_ended.wait()  # if a prefill worker's stream ended before, it would not send its KV
                return answered_at
        raise RuntimeError("the worker ended the stream")
    finally:
        call.cancel()


@asynccontextmanager
async def running_role_bench(platform: Platform, prompt: list[int]) -> AsyncIterator[RoleBench]:
    """The model was woken on the first prefill and the decode worker; it is loaded on the second prefill worker."""
    view = await asyncio.to_thread(lambda: next(platform.views()))
    (version,), (name,) = view.versions, {instance.model for instance in view.instances}
    peers = {}
    for worker in view.workers:
        token = platform.home.call_token(worker.worker_id, *Caller)
        ref = types_pb2.WorkerRef(
            worker_id=worker.worker_id,
            grpc_address=worker.grpc_address,
            instance_id=worker.slot.instance_id or new_id("i"),
            worker_token=token,
        )
        peers[tuple(worker.slot.roles)] = Peer(ref, open_channel(worker.grpc_address, token=token))
    named = types_pb2.ModelVersion(version_id=version.version_id, model=name, pack_id=version.pack_id)
    tickets = TicketIssuer(bytes.fromhex(platform.home.cluster_key()))
    bench = RoleBench(
        view.epoch, named, tickets, peers[(PREFILL,)], peers[(DECODE,)], changing=peers[()], prompt=prompt
    )
    try:
        await bench.changing.load(bench.epoch, named, PREFILL)
        await bench.changing.until(bench.epoch, reports_pb2.SlotState.STATE_READY)
        yield bench
    finally:
        for peer in peers.values():
            await peer.channel.close()


async def measured(platform: Platform, prompt: list[int], num_samples: int) -> list[Check]:
    """The figures, as medians of ``num_samples`` changes, loads and plain requests in each direction."""
    samples: dict[tuple[str, int], list[float]] = defaultdict(list)
    async with running_role_bench(platform, prompt) as bench:
        await bench.request_s(PREFILL)
        for number in range(num_samples):
            for role in (DECODE, PREFILL):
                samples["change", role].append(await bench.change_s(role))
                samples["request", role].append(await bench.request_s(role))
            for role in (DECODE, PREFILL):
                samples["load", role].append(await bench.load_s(role))
            progress(f"sample {number + 1} of {num_samples}")
    times = {key: median(values) for key, values in samples.items()}
    ratios = {role: times["change", role] / times["load", role] for role in NAMES}
    worst = max(ratios, key=lambda role: ratios[role])
    against = "; ".join(
        f"to {NAMES[role]} {times['change', role]:.3g} s, load {times['load', role]:.3g} s" for role in NAMES
    )
    extra = {role: (times["change", role] - times["request", role]) * 1000 for role in NAMES}
    beside = "; ".join(f"to {NAMES[role]} {extra[role]:.1f} ms" for role in NAMES)
    return [
        Check("role_change_ratio", ratios[worst], "ratio", 0.2, against),
        Check(
            "role_change_extra_ms", max(extra.values()), "ms", None, f"over the same request without a change: {beside}"
        ),
    ]
