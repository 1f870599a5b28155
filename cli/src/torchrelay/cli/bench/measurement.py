"""A load on a model from its begin to its result, with progress, until it ends or is interrupted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from torchrelay.cli.bench.devices import DeviceWatch, computed_tokens, device_seconds
from torchrelay.cli.bench.figures import Figures, Held
from torchrelay.cli.bench.load_client import LoadClient
from torchrelay.cli.bench.run import run_closed, run_cold, run_open
from torchrelay.cli.bench.workload import Scenario, Workload
from torchrelay.cli.errors import CliError
from torchrelay.cli.views import console
from torchrelay.sim.traces import Arrival

_TICK_S = 0.25
_REPORTS_S = 3.0  # until the workers' last reports have arrived


@dataclass(slots=True)
class Measurement:
    """``watch``: None without the admin key, which only the scenario cold needs. ``arrivals``: of an open load.
    ``error``: why the load ended before its time, with answers.
    """

    client: LoadClient
    load: Workload
    arrivals: Sequence[Arrival]
    watch: DeviceWatch | None
    error: CliError | None = None

    def run(self, has_warm_up: bool) -> bool:
        """Returns whether the load came to its end; Ctrl-C stops it and cancels what runs. Raises ``CliError`` if
        nothing was answered before it.
        """
        try:
            asyncio.run(self._run(has_warm_up))
        except KeyboardInterrupt:
            return False
        return self.error is None

    async def _run(self, has_warm_up: bool) -> None:
        try:
            if has_warm_up:
                await self.client.send(self.load.num_prompt or 1, 2)
            if self.load.scenario == Scenario.COLD:
                with console.err().status("waiting until the model is at zero"):
                    await self._zero()
            self.client.begin()
            if self.watch is not None:
                self.watch.samples.clear()
            async with _beside(self._show_progress(), *([self.watch.run()] if self.watch else [])):
                try:
                    await self._load()
                except CliError as error:
                    if not self.client.answered:
                        raise
                    self.error = error
        finally:
            await self.client.close()

    async def _load(self) -> None:
        if self.load.scenario == Scenario.COLD:
            await run_cold(self.client, self.load, self._zero)
        elif self.load.scenario in (Scenario.SINGLE, Scenario.MULTI):
            await run_closed(self.client, self.load)
        else:
            await run_open(self.client, self.arrivals)

    async def _zero(self) -> None:
        assert self.watch is not None
        await self.watch.zero()

    async def _show_progress(self) -> None:
        """Draws a bar on standard error, by requests where their number is known, otherwise by time."""
        total = len(self.arrivals) or self.load.num_requests
        columns = TextColumn("{task.description}", markup=False), BarColumn(20), TimeElapsedColumn()
        with Progress(*columns, console=console.err(), transient=True) as progress:
            bar = progress.add_task("", total=total or self.load.seconds)
            while True:
                answered = self.client.answered
                num_failed = sum(bool(each.error) for each in answered)
                text = f"{len(answered):,} ended ({num_failed:,} failed), {self.client.num_running:,} running"
                progress.update(bar, description=text, completed=len(answered) if total else self.client.now_s)
                await asyncio.sleep(_TICK_S)


def held_by(watch: DeviceWatch, figures: Figures) -> Held | None:
    """The devices held until the last answer, and what they computed; None without samples."""
    end_s = watch.now_s() + _REPORTS_S
    with suppress(CliError):
        watch.sample()
        is_seen = any(sample.holders for sample in watch.samples)
        while is_seen and computed_tokens(watch.samples) < figures.num_needed and watch.now_s() < end_s:
            time.sleep(_TICK_S)
            watch.sample()
    samples = sorted(watch.samples, key=lambda sample: sample.at_s)
    if len(samples) < 2 or samples[0].at_s > figures.seconds:
        return None
    most = max(later.num_devices for earlier, later in pairwise(samples) if earlier.at_s <= figures.seconds)
    return Held(device_seconds(samples, figures.seconds), most, computed_tokens(samples))


@asynccontextmanager
async def _beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs ``work`` until the end of the block."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
