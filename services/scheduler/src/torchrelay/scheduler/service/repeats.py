"""Recognizes reports that repeat the last report of their node, as nearly all reports of an idle fleet do."""

from __future__ import annotations

from dataclasses import dataclass

from nats.aio.msg import Msg

from torchrelay.common.net.load_reports import MAC_HEADER
from torchrelay.common.recent import Recent

_MAX_SUBJECTS = 16_384
WHOLE_EVERY = 40  # every 40th repeat is applied whole, for properties that change by time alone


class Repeats:
    """The last checked message of each subject.

    A message that is equal up to the last byte of its signature needs no other check. The first repeat is still
    applied, because it shows that rates have fallen to zero.
    """

    def __init__(self) -> None:
        self._last: Recent[str, _Last] = Recent(_MAX_SUBJECTS)

    def is_repeat(self, message: Msg) -> bool:
        last = self._last.get(message.subject)
        if last is None or last.mac != _mac(message) or last.data != message.data:
            return False
        last.num_repeats += 1
        return last.num_repeats > 1 and last.num_repeats % WHOLE_EVERY != 0

    def note(self, message: Msg) -> None:
        """Notes a message that the node in its subject has signed."""
        last = self._last.get(message.subject)
        if last is None or last.mac != _mac(message) or last.data != message.data:
            self._last[message.subject] = _Last(_mac(message), message.data)


@dataclass(slots=True)
class _Last:
    mac: str
    data: bytes
    num_repeats: int = 0


def _mac(message: Msg) -> str:
    return (message.headers or {}).get(MAC_HEADER, "")
