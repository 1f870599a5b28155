"""Load reports on the broker: which are signed by their own worker or store, and which repeat its last one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

from google.protobuf.message import DecodeError
from nats.aio.msg import Msg

from torchrelay.common.identity.keys import derive_node_key
from torchrelay.common.net.load_reports import MAC_HEADER, is_report_mac
from torchrelay.common.process.telemetry import get_logger
from torchrelay.common.recent import Recent
from torchrelay.scheduler.service.controller import Report
from torchrelay.scheduler.service.converters import peer_of

log = get_logger(__name__)
_MAX_NAMED = 1024
_MAX_NODES = 16_384
WHOLE_EVERY = 40  # every 40th repeat is applied whole, for properties that change by time alone


@dataclass(slots=True)
class _Signed:
    mac: str
    data: bytes
    num_repeats: int = 0


class SignedReports:
    """Checks messages against the key of the node that their subject names; each offence is logged once."""

    def __init__(self, cluster_key: bytes) -> None:
        self._node_key = lru_cache(_MAX_NODES)(partial(derive_node_key, cluster_key))
        self._last: Recent[str, _Signed] = Recent(_MAX_NODES)  # by subject
        self._logged: Recent[tuple[str, str], bool] = Recent(_MAX_NAMED)

    def is_repeat(self, message: Msg) -> bool:
        """Whether the message equals the last signed one of its subject up to the last byte of its signature, as nearly
        all reports of an idle fleet do; then it needs no other check. False for the first repeat, which shows that
        rates have fallen to zero, and for every ``WHOLE_EVERY``th.
        """
        last = self._same(message)
        if last is None:
            return False
        last.num_repeats += 1
        return last.num_repeats > 1 and last.num_repeats % WHOLE_EVERY != 0

    def read(self, kind: type[Report], message: Msg) -> Report | None:
        """The report in a message; None if it cannot be read, or if the node in the message's subject has not signed
        it, as only this node has its key. The broker may serve others.
        """
        mac, node = _mac(message), node_id(message)
        if not mac:
            why = "it is not signed"
        elif not is_report_mac(mac, self._node_key(node), message.subject, message.data):
            why = "its signature is not that of the node in its subject"
        else:
            if self._same(message) is None:
                self._last[message.subject] = _Signed(mac, message.data)
            try:
                report = kind.FromString(message.data)
            except DecodeError as error:
                log.warning("report_unreadable", subject=message.subject, error=str(error))
                return None
            if peer_of(report).node_id == node:
                return report
            why = "it is about another node than its subject"
        if (message.subject, why) not in self._logged:
            self._logged[message.subject, why] = True
            log.warning("report_refused", subject=message.subject, reason=why)
        return None

    def _same(self, message: Msg) -> _Signed | None:
        """The last signed message of the subject, if this is the same."""
        last = self._last.get(message.subject)
        return last if last is not None and (last.mac, last.data) == (_mac(message), message.data) else None


def node_id(message: Msg) -> str:
    """The id of the worker or store in the message's subject."""
    return message.subject.rpartition(".")[2]


def _mac(message: Msg) -> str:
    return (message.headers or {}).get(MAC_HEADER, "")
