from __future__ import annotations

import asyncio

import pytest

from torchrelay.common import health as health_module
from torchrelay.common.health import Health, HealthReport


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
