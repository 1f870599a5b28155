"""Load reports of a process on NATS: ten times a second while it is active, otherwise twice, so that idling is cheap.

Each is signed with the node's key. The scheduler derives the same key, which identifies the node of each report.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable
from typing import Final

import nats.errors
from google.protobuf.message import Message
from nats.aio.client import Client

from torchrelay.common.cancellation import raise_if_cancelled
from torchrelay.common.identity.keys import framed_mac
from torchrelay.common.process.telemetry import get_logger

log = get_logger(__name__)

MAC_HEADER: Final = "Torchrelay-Mac"
POLL_EVERY_S: Final = 0.1
IDLE_EVERY_S: Final = 0.5


class Cadence:
    """Decides, every ``POLL_EVERY_S``, whether a report is due."""

    def __init__(self) -> None:
        self._reported: object = None
        self._reported_at_s = float("-inf")

    def is_due(self, activity: object, now_s: float) -> bool:
        """Whether the activity has changed since the last report, or that report is old."""
        if activity == self._reported and now_s - self._reported_at_s < IDLE_EVERY_S:
            return False
        self._reported, self._reported_at_s = activity, now_s
        return True


def report_mac(node_key: bytes, subject: str, payload: bytes) -> str:
    """The value of a report's header ``MAC_HEADER``."""
    return framed_mac(node_key, b"torchrelay report", subject.encode(), payload).hex()


def is_report_mac(mac: str, node_key: bytes, subject: str, payload: bytes) -> bool:
    return hmac.compare_digest(mac.encode(), report_mac(node_key, subject, payload).encode())


async def publish_reports(
    client: Client, subject: str, node_key: bytes, activity: Callable[[], object], report: Callable[[], Message]
) -> None:
    """Publishes until cancelled; reports are lost while NATS is unreachable.

    ``activity`` returns a cheap value that changes whenever the process has done something.
    """
    cadence = Cadence()
    while True:
        if cadence.is_due(activity(), time.monotonic()):
            try:
                payload = report().SerializeToString()
                await client.publish(subject, payload, headers={MAC_HEADER: report_mac(node_key, subject, payload)})
            except (nats.errors.Error, OSError) as error:
                log.debug("report_not_published", error=str(error))
            raise_if_cancelled()
        await asyncio.sleep(POLL_EVERY_S)
