"""Minimums of instances reach the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.support.gateway_ports import published_model
from tests.support.wait import eventually
from tests.unit.gateway.inference.execution.test_admission_stream import admissions_to, scheduler
from torchrelay.common.errors import Unavailable
from torchrelay.gateway.background import background
from torchrelay.gateway.core import PublishedModel
from torchrelay.gateway.inference.execution.minimums import announce_minimums


async def test_schedule_sends_two_windows_and_skips_unknown_zones() -> None:
    noon = 1_795_608_000.0  # a Wednesday, in UTC
    entries = ("daily 08:00-18:00 UTC = 3", "mon 08:00-18:00 Atlantis/Poseidonis = 1")
    kept = [replace(published_model("acme/m", file_digests={}), schedule=entries)]

    async def with_minimum() -> Sequence[PublishedModel]:
        return kept

    async with (
        scheduler() as made,
        admissions_to(made.address) as admissions,
        background(announce_minimums(with_minimum, admissions, every_s=60.0, unix_s=lambda: noon)),
    ):
        await eventually(lambda: bool(made.minimums))
    (version,) = made.minimums[-1].versions
    told = [(each.begin_unix_s, each.end_unix_s, each.num_instances) for each in version.scaling.scheduled]
    begin, day_s = int(noon) - 4 * 3600, 24 * 3600
    assert told == [(begin, begin + 36_000, 3), (begin + day_s, begin + day_s + 36_000, 3)]
    assert {each.entry for each in version.scaling.scheduled} == {entries[0]}


async def test_minimums_are_sent_on_change_and_to_each_scheduler() -> None:
    kept, num_reads = [replace(published_model("acme/m", file_digests={}), min_instances=2)], 0

    async def with_minimum() -> Sequence[PublishedModel]:
        nonlocal num_reads
        num_reads += 1
        if num_reads == 2:
            raise Unavailable("no database")
        return kept

    def told() -> list[list[tuple[str, int]]]:
        return [[(version.model, version.scaling.min_instances) for version in each.versions] for each in made.minimums]

    async with scheduler() as made, admissions_to(made.address) as admissions:
        async with background(announce_minimums(with_minimum, admissions, every_s=0.01)):
            await eventually(lambda: num_reads > 5)
            await eventually(lambda: bool(made.minimums))
            assert set(map(str, told())) == {"[('acme/m', 2)]"}, "by the hello, or after it"
            kept = []
            await eventually(lambda: told()[-1] == [])
        num_told = len(made.minimums)
        await made.kill()
        await made.revive()
        await eventually(lambda: len(made.minimums) > num_told)
        assert told()[-1] == []
