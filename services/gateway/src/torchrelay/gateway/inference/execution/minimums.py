"""Sends the scheduler the models that have a minimum of instances, before anybody calls them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from zoneinfo import ZoneInfoNotFoundError

from torchrelay.common.errors import InvalidRequest, Unavailable
from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1 import types_pb2
from torchrelay.gateway.catalog.schedules import parse_entry
from torchrelay.gateway.core import PublishedModel
from torchrelay.gateway.inference.execution.admission_stream import AdmissionStream
from torchrelay.gateway.inference.execution.attempt import model_version

log = get_logger(__name__)
_NUM_WINDOWS = 2  # sent of each entry: the current window, and the next


async def announce_minimums(
    with_minimum: Callable[[], Awaitable[Sequence[PublishedModel]]],
    admissions: AdmissionStream,
    every_s: float,
    unix_s: Callable[[], float] = time.time,
) -> None:
    """Reads the catalog ``every_s`` and sends changes. While it cannot be read, the minimums sent last hold."""
    sent: list[types_pb2.ModelVersion] | None = None
    while True:
        try:
            versions = [_version(model, unix_s()) for model in await with_minimum()]
        except Unavailable as error:
            log.warning("minimums_unknown", error=error.message)
        else:
            if versions != sent:
                sent = versions
                admissions.set_minimums(versions)
        await asyncio.sleep(every_s)


def _version(model: PublishedModel, now_unix_s: float) -> types_pb2.ModelVersion:
    version = model_version(model)
    version.scaling.min_instances = model.min_instances
    for text in model.schedule:
        try:
            entry = parse_entry(text)
            windows = list(islice(entry.windows(now_unix_s), _NUM_WINDOWS))
        except (InvalidRequest, ZoneInfoNotFoundError) as error:  # another machine's time zones are not this one's
            log.warning("schedule_unknown", model=model.name, error=str(error))
            continue
        for window in windows:
            version.scaling.scheduled.add(
                begin_unix_s=window.begin_unix_s,
                end_unix_s=window.end_unix_s,
                num_instances=entry.num_instances,
                entry=text,
            )
    return version
