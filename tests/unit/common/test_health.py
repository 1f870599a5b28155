from __future__ import annotations

import asyncio
import time

from torchrelay.common.health import Health, HealthReport


class Part:
    """A part of the platform: ``fault`` is what it says when asked, None: it says nothing."""

    def __init__(self) -> None:
        self.fault: str | None = ""
        self.num_asked = 0
        self.speaks = asyncio.Event()

    async def ask(self) -> str:
        self.num_asked += 1
        if self.fault is None:
            await self.speaks.wait()
        return self.fault or ""


async def test_without_what_is_essential_it_is_unavailable_and_without_others_degraded() -> None:
    database, redis, nats = Part(), Part(), Part()
    health = Health({"database": database.ask}, {"redis": redis.ask, "nats": nats.ask}, silent_s=0.05, ask_every_s=0)
    assert await health.report() == HealthReport({}, {}) and await health.fault() == ""
    redis.fault, num_asked = None, redis.num_asked
    report = await health.report()
    assert (report.status, report.fault, dict(report.others)) == ("degraded", "", {"redis": "does not answer"})
    nats.fault = "is not connected"
    database.fault = None
    begin_s = time.monotonic()
    report = await health.report()
    assert time.monotonic() - begin_s < 5
    assert (report.status, report.fault) == ("unavailable", "the database does not answer")
    assert dict(report.others) == {"redis": "does not answer", "nats": "is not connected"}
    assert redis.num_asked == num_asked + 1  # its first answer may still come
    for part in (database, redis, nats):
        part.fault = ""
        part.speaks.set()
    async with asyncio.timeout(10):
        while (await health.report()).status != "ok":
            pass
    await health.close()


async def test_however_often_it_is_asked_it_asks_once_in_a_while() -> None:
    part = Part()
    health = Health({"database": part.ask}, {}, ask_every_s=60)
    for _ in range(3):
        await asyncio.gather(*(health.report() for _ in range(10)))
    assert part.num_asked == 1
    await health.close()


async def test_a_part_may_take_its_time_before_it_counts_as_silent() -> None:
    disk = Part()
    disk.fault = None
    health = Health({"disk": disk.ask}, {}, silent_s=60, ask_every_s=0)
    assert (await health.report()).status == "ok" == (await health.report()).status
    assert disk.num_asked == 1
    await health.close()


async def test_a_question_that_raises_is_a_fault_of_its_part_and_asked_anew() -> None:
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
