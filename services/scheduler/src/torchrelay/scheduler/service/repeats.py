"""Reports that say what the last one of their node said: of an idle fleet, nearly all."""

from __future__ import annotations

from dataclasses import dataclass

from nats.aio.msg import Msg

from torchrelay.common.net.load_reports import MAC_HEADER
from torchrelay.common.recent import Recent

_MAX_SUBJECTS = 16_384
WHOLE_EVERY = 40  # repeats: what time alone changes is looked at now and then


class Repeats:
    """The last checked message of each subject.

    A message that is the same to the last byte of its signature needs no other check. The first repeat counts as none:
    from it rates are known to have fallen to zero.
    """

    def __init__(self) -> None:
        self._last: Recent[str, _Last] = Recent(_MAX_SUBJECTS)

    def is_one(self, message: Msg) -> bool:
        last = self._last.get(message.subject)
        if last is None or last.mac != _mac(message) or last.data != message.data:
            return False
        last.num_repeats += 1
        return last.num_repeats > 1 and last.num_repeats % WHOLE_EVERY != 0

    def note(self, message: Msg) -> None:
        """The message was signed by the node in its subject."""
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
