"""What the scheduler hears of models with a minimum of instances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.support.gateway_ports import published_model
from tests.unit.gateway.inference.execution.test_admission_stream import admissions_to, scheduler
from tests.unit.gateway.token_path_rig import until
from torchrelay.common.errors import Unavailable
from torchrelay.gateway.background import background
from torchrelay.gateway.core import PublishedModel
from torchrelay.gateway.inference.execution.minimums import announce_minimums


async def test_minimums_are_told_when_they_change_and_to_each_new_scheduler() -> None:
    kept, num_reads = [replace(published_model("acme/m", file_digests={}), min_instances=2)], 0

    async def with_minimum() -> Sequence[PublishedModel]:
        nonlocal num_reads
        num_reads += 1
        if num_reads == 2:
            raise Unavailable("no database")
        return kept

    def told() -> list[list[tuple[str, int]]]:
        return [[(one.model, one.scaling.min_instances) for one in each.versions] for each in made.minimums]

    async with scheduler() as made, admissions_to(made.address) as admissions:
        async with background(announce_minimums(with_minimum, admissions, every_s=0.01)):
            await until(lambda: num_reads > 5)
            await until(lambda: bool(made.minimums))
            assert set(map(str, told())) == {"[('acme/m', 2)]"}, "by the hello, or after it"
            kept = []
            await until(lambda: told()[-1] == [])
        num_told = len(made.minimums)
        await made.kill()
        await made.revive()
        await until(lambda: len(made.minimums) > num_told)
        assert told()[-1] == []
