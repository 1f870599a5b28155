"""Notices of the scheduler about the loads for which requests wait."""

from __future__ import annotations

from typing import Final

from torchrelay.common.quantities import format_count
from torchrelay.common.recent import Recent
from torchrelay.control.v1 import scheduler_pb2 as pb

_MAX_VERSIONS = 1024
# A notice comes every second while requests wait, so an older one is about a load that has ended.
VALID_S: Final = 2.5


class LoadNotices:
    """The last notice about each version, with the time of its arrival."""

    def __init__(self) -> None:
        self._of: Recent[str, tuple[pb.Loading, float]] = Recent(_MAX_VERSIONS)

    def note(self, notice: pb.Loading, now: float) -> None:
        self._of[notice.version_id] = notice, now

    def text(self, version_id: str, model: str, now: float) -> str:
        """A line about the load that a request for ``model`` waits for; empty if none is known."""
        notice, noted_at = self._of.get(version_id, (None, 0.0))
        if notice is None or now - noted_at > VALID_S:
            return ""
        if not notice.has_slot:
            return f"{model} waits for a slot, and then about {_seconds(notice.left_s)} to load"
        number, left_s = notice.num_layers, notice.left_s - (now - noted_at)
        layers = f", {notice.num_layers_ready} of {format_count(number, 'layer')}" if number else ""
        end = f", about {_seconds(left_s)} left" if left_s > 0 else ""  # an overdue prediction is none
        return f"loading {model}{layers}{end}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
