"""Tells the scheduler which models have a minimum of instances: nobody needs to ask for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from torchrelay.common.errors import Unavailable
from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1 import types_pb2
from torchrelay.gateway.core import PublishedModel
from torchrelay.gateway.inference.execution.admission_stream import AdmissionStream
from torchrelay.gateway.inference.execution.attempt import model_version

log = get_logger(__name__)


async def announce_minimums(
    with_minimum: Callable[[], Awaitable[Sequence[PublishedModel]]], admissions: AdmissionStream, every_s: float
) -> None:
    """Reads the catalog ``every_s``, and sends what has changed. While it cannot be read, what was sent last holds."""
    sent: list[types_pb2.ModelVersion] | None = None
    while True:
        try:
            found = [_version(model) for model in await with_minimum()]
        except Unavailable as error:
            log.warning("minimums_unknown", error=error.message)
        else:
            if found != sent:
                sent = found
                admissions.set_minimums(found)
        await asyncio.sleep(every_s)


def _version(model: PublishedModel) -> types_pb2.ModelVersion:
    version = model_version(model)
    version.scaling.min_instances = model.min_instances
    return version
