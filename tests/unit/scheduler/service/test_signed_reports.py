"""Reports count only from the worker or store that they are about, and repeats of checked ones are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from structlog.testing import capture_logs

from tests.unit.scheduler.service.scripted_cluster import CLUSTER_KEY, ScriptedCluster, cluster
from torchrelay.common.net.load_reports import MAC_HEADER, report_mac
from torchrelay.control.v1.reports_pb2 import StoreReport, WorkerReport
from torchrelay.scheduler.service.signed_reports import WHOLE_EVERY, SignedReports
from torchrelay.transfer.protocol.tickets import derive_node_key

KEY = bytes.fromhex(CLUSTER_KEY)
EVIL: dict[str, Any] = {"incarnation": "i", "host_id": "host-1", "grpc_address": "127.0.0.1:1", "epoch": 1 << 62}
FORGED = WorkerReport(worker_id="evil", kv_free_bytes=1 << 40, **EVIL)
FORGED_STORE = StoreReport(store_id="evil", **EVIL)
Signer = Callable[[str, str, bytes], dict[str, str]]


def signed(node_id: str, subject: str, payload: bytes, cluster_key: bytes = KEY) -> dict[str, str]:
    return {MAC_HEADER: report_mac(derive_node_key(cluster_key, node_id), subject, payload)}


def for_another_subject(node_id: str, subject: str, payload: bytes) -> dict[str, str]:
    """A worker's as a store's, and the reverse."""
    words = {"worker": "store", "store": "worker"}
    return signed(node_id, ".".join(words.get(word, word) for word in subject.split(".")), payload)


SIGNERS: dict[str, Signer] = {
    "unsigned": lambda node_id, subject, payload: {},
    "by another cluster": lambda node_id, subject, payload: signed(node_id, subject, payload, bytes(16)),
    "for another subject": for_another_subject,
    "for another payload": lambda node_id, subject, payload: signed(node_id, subject, payload + b"x"),
    "with nonsense": lambda node_id, subject, payload: {MAC_HEADER: "ünsinn"},
}


async def tell(it: ScriptedCluster, subject_id: str, report: WorkerReport | StoreReport, sign: Signer, by: str) -> None:
    load = it.subjects.worker_load if isinstance(report, WorkerReport) else it.subjects.store_load
    subject, payload = load(subject_id), report.SerializeToString()
    await it.nats.publish(subject, payload, headers=sign(by, subject, payload) or None)


@pytest.mark.parametrize("sign", SIGNERS.values(), ids=SIGNERS)
async def test_forged_reports_are_refused_and_logged_once(it: ScriptedCluster, sign: Signer) -> None:
    async with it.scheduler() as address:
        with capture_logs() as logged:
            for _ in range(3):
                await tell(it, "evil", FORGED, sign, by="evil")
            await tell(it, "evil", FORGED_STORE, sign, by="evil")
            await it.nats.flush()
            await it.host(1)  # whose reports come after
            view = await cluster(address, lambda view: len(view.workers) == 2 and len(view.stores) == 1)
        assert "evil" not in {worker.worker_id for worker in view.workers}
        refused = [line["subject"] for line in logged if line["event"] == "report_refused"]
        # Two subscriptions: whose task runs first is chance.
        assert sorted(refused) == [it.subjects.store_load("evil"), it.subjects.worker_load("evil")]


async def test_report_signed_by_another_worker_is_refused(it: ScriptedCluster) -> None:
    """With its own key, on its own subject or on the other's."""
    async with it.scheduler() as address:
        _, first, _ = await it.host(1)
        await cluster(address, lambda view: len(view.workers) == 2)
        stolen = first.report()
        stolen.grpc_address, stolen.incarnation = "127.0.0.1:1", "forged"
        with capture_logs() as logged:
            await tell(it, "evil", stolen, signed, by="evil")
            await tell(it, first.worker_id, stolen, signed, by="evil")
            await it.nats.flush()
            await it.host(2)
            view = await cluster(address, lambda view: len(view.workers) == 4)
        reported = next(worker for worker in view.workers if worker.worker_id == first.worker_id)
        assert reported.grpc_address == first.address
        assert len([line for line in logged if line["event"] == "report_refused"]) == 2


async def test_false_epoch_of_one_worker_ends_no_scheduler(it: ScriptedCluster) -> None:
    store, first, _ = await it.host(1)
    store.epoch = first.epoch = 1 << 62
    async with it.scheduler() as address:
        view = await cluster(address, lambda view: len(view.workers) == 2)
        assert 0 < view.epoch < 1 << 61
        first.epoch = (1 << 62) + 1  # after the start-up as well
        await first.touch()
        await it.host(2)
        later = await cluster(address, lambda view: len(view.workers) == 4)
        assert later.epoch == view.epoch


REPORT, OTHER = (WorkerReport(worker_id="w1", epoch=epoch).SerializeToString() for epoch in (1, 2))


def message(data: bytes = REPORT, mac: str | None = None, subject: str = "relay.load.worker.w1") -> Msg:
    """A message with the signature of its node, or another one."""
    headers = signed(subject.rpartition(".")[2], subject, data) if mac is None else {MAC_HEADER: mac}
    return Msg(Client(), subject=subject, data=data, headers=headers)


def test_second_repeat_counts_and_every_fortieth_does_not() -> None:
    reports, verdicts = SignedReports(KEY), []
    assert not reports.is_repeat(message())
    assert reports.read(WorkerReport, message())
    for _ in range(2 * WHOLE_EVERY):
        verdicts.append(reports.is_repeat(message()))
        if not verdicts[-1]:
            assert reports.read(WorkerReport, message())
    assert not verdicts[0] and all(verdicts[1 : WHOLE_EVERY - 1])
    assert verdicts.count(False) == 3


@pytest.mark.parametrize(
    "other", [message(data=OTHER), message(mac="ab"), message(subject="relay.load.worker.w2"), message(mac="")]
)
def test_different_message_is_no_repeat(other: Msg) -> None:
    reports = SignedReports(KEY)
    assert reports.read(WorkerReport, message())
    reports.is_repeat(message())
    assert not any(reports.is_repeat(other) for _ in range(3))


def test_message_that_is_not_signed_is_no_repeat() -> None:
    reports = SignedReports(KEY)
    for _ in range(5):
        assert not reports.is_repeat(message(mac="forged"))
        assert reports.read(WorkerReport, message(mac="forged")) is None
