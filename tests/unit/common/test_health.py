"""Health of the parts of a service; a peer that hangs is told from one that is slow or at rest."""

from __future__ import annotations

import asyncio

import pytest

from torchrelay.common import health as health_module
from torchrelay.common.health import Health, HealthReport
from torchrelay.common.liveness import SILENT_S, EngineProgress, Liveness


class Part:
    """A part of the platform that answers with ``fault``; None: it does not answer."""

    def __init__(self) -> None:
        self.fault: str | None = ""
        self.num_asked = 0
        self.may_answer = asyncio.Event()

    async def ask(self) -> str:
        self.num_asked += 1
        if self.fault is None:
            await self.may_answer.wait()
        return self.fault or ""


async def test_missing_essential_part_is_unavailable_and_other_degraded() -> None:
    database, redis, nats = Part(), Part(), Part()
    health = Health({"database": database.ask}, {"redis": redis.ask, "nats": nats.ask}, silent_s=0.05, ask_every_s=0)
    assert await health.report() == HealthReport({}, {}) and await health.fault() == ""
    redis.fault, num_asked = None, redis.num_asked
    report = await health.report()
    assert (report.status, report.fault, dict(report.others)) == ("degraded", "", {"redis": "does not answer"})
    nats.fault = "is not connected"
    database.fault = None
    async with asyncio.timeout(20):
        report = await health.report()
    assert (report.status, report.fault) == ("unavailable", "the database does not answer")
    assert dict(report.others) == {"redis": "does not answer", "nats": "is not connected"}
    assert redis.num_asked == num_asked + 1  # its first answer may still come
    for part in (database, redis, nats):
        part.fault = ""
        part.may_answer.set()
    async with asyncio.timeout(60):
        while (await health.report()).status != "ok":
            pass
    await health.close()


async def test_frequent_reports_ask_parts_once() -> None:
    part = Part()
    health = Health({"database": part.ask}, {}, ask_every_s=60)
    for _ in range(3):
        await asyncio.gather(*(health.report() for _ in range(10)))
    assert part.num_asked == 1
    await health.close()


async def test_part_within_silence_limit_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "WAIT_S", 0.05)
    disk = Part()
    disk.fault = None
    health = Health({"disk": disk.ask}, {}, silent_s=60, ask_every_s=0)
    assert (await health.report()).status == "ok" == (await health.report()).status
    assert disk.num_asked == 1
    await health.close()


async def test_raising_question_is_fault_and_repeated() -> None:
    num_asked = 0

    async def ask() -> str:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            raise KeyError("of the driver")
        return ""

    other = Part()
    other.fault = "is not connected"
    health = Health({"database": ask}, {"nats": other.ask}, ask_every_s=0)
    report = await health.report()
    assert (report.fault, dict(report.others)) == ("the database fails: KeyError", {"nats": "is not connected"})
    assert (await health.report()).fault == ""
    await health.close()


async def test_leaving_service_is_unavailable_without_a_question() -> None:
    database = Part()
    health = Health({"database": database.ask}, {})
    health.leave("gateway")
    assert (await health.report()).status == "unavailable" and await health.fault() == "the gateway leaves"
    assert database.num_asked == 0


def test_silence_counts_from_last_message() -> None:
    peer = Liveness(10.0)
    assert not peer.is_silent(10.0 + SILENT_S) and peer.is_silent(10.1 + SILENT_S)
    peer.record_message(12.0)
    assert not peer.fault(12.0 + SILENT_S)
    assert peer.fault(12.1 + SILENT_S) == "was silent for 3 s"


def test_silence_before_listening_is_not_counted() -> None:
    peer = Liveness(0.0)
    peer.observe(EngineProgress(5, True), 1.0)
    peer.listening_since(60.0)
    assert not peer.fault(60.0 + SILENT_S) and peer.fault(60.1 + SILENT_S)
    peer.listening_since(0.0)  # what is past counts no more
    assert peer.fault(60.1 + SILENT_S)


def test_engine_without_advance_is_stalled_despite_messages() -> None:
    peer = Liveness(0.0)
    for tenth in range(1, 32):
        peer.observe(EngineProgress(7, True), tenth / 10)
    assert not peer.is_stalled(3.1)
    assert not peer.is_silent(3.2) and peer.fault(3.2) == "had work and made no step for 3.1 s"
    peer.observe(EngineProgress(8, True), 3.3)
    assert not peer.fault(3.3)


def test_predicted_long_step_is_not_stalled() -> None:
    peer = Liveness(0.0)
    for second in range(1, 10):
        peer.observe(EngineProgress(7, True, expected_s=5.0), second)
    assert not peer.fault(9.0) and peer.fault(9.1)


def test_idle_engine_is_never_stalled() -> None:
    peer = Liveness(0.0)
    for second in range(1, 60):
        peer.observe(EngineProgress(7, False), second)
    peer.observe(EngineProgress(7, True), 60.0)
    assert not peer.fault(60.0 + SILENT_S)
    assert peer.is_stalled(60.1 + SILENT_S)


def test_work_after_long_idleness_is_no_stall() -> None:
    """The peer was at rest and silent, or nobody looked: its first step has only begun."""
    peer = Liveness(0.0)
    peer.observe(EngineProgress(7, False), 1.0)
    peer.observe(EngineProgress(7, True), 100.0)
    assert not peer.fault(100.0)
    peer.observe(EngineProgress(7, True), 100.0 + SILENT_S)
    assert not peer.fault(100.0 + SILENT_S)
    peer.observe(EngineProgress(7, True), 100.1 + SILENT_S)
    assert peer.is_stalled(100.1 + SILENT_S)
