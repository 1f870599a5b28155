"""Demand for decode instances, if the roles are played by different instances and each role is sized by its own
work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torchrelay.scheduler.policy.autoscaling.lateness import Fluid
from torchrelay.scheduler.policy.autoscaling.usage import WINDOW_S


@dataclass(frozen=True)
class DecodeDemand:
    """Answers as a fluid: an instance holds ``num_held`` answers at once and finishes each after ``answer_s``, so one
    second of its work is worth ``num_held / answer_s`` answers.
    """

    num_answers: int  # open answers and those of waiting requests
    num_held: int  # answers per instance whose tokens meet the target and whose KV fits the pool
    num_most: int  # answers per instance whose KV fits the pool; further answers wait
    answer_s: float  # from placement, before the prompt is computed, to the last token, in a batch of ``num_held``
    arrivals_per_s: float
    target_s: float  # for the first token; an answer that waits longer for a place is late
    late_s: float  # cost of a late request, in seconds of a slot
    last_full_at: float = 0.0  # when all decode instances were last needed
    num_waiting: int = 0  # of ``num_answers``, those of waiting requests

    @property
    def request_s(self) -> float:
        """Work of one answer, in seconds of an instance."""
        return self.answer_s / self.num_held

    @property
    def load(self) -> float:
        """Work that arrives per second, in instances."""
        return self.arrivals_per_s * self.request_s

    def backlog_s(self, num_instances: int) -> float:
        """Work beyond what the instances hold at once; negative if they can hold more."""
        return (self.num_answers - num_instances * self.num_held) * self.request_s

    def without_excess(self, num_instances: int) -> DecodeDemand:
        """The demand without placed answers beyond those that the instances hold in time: they stay where they are, so
        more instances would not help them.
        """
        num_placed = min(self.num_answers - self.num_waiting, num_instances * self.num_held)
        return replace(self, num_answers=num_placed + self.num_waiting)

    @property
    def fluid(self) -> Fluid:
        work_s = self.num_answers * self.request_s
        return Fluid(work_s, self.load, self.request_s, self.target_s, self.late_s, self.answer_s, self.known_s)

    @property
    def known_s(self) -> float:
        """Answers go on for longer than the arrivals of a moment: a lack of places lasts as long as an instance."""
        return max(self.late_s, WINDOW_S)


def most_in_time(num_most: int, tbt_target_s: float, base_s: float, per_answer_s: float) -> int:
    """The largest batch whose tokens are at most ``tbt_target_s`` apart; ``num_most`` if a single answer misses the
    target, because more instances would not help then.
    """
    spare_s = tbt_target_s - base_s
    if spare_s < per_answer_s:
        return num_most
    return min(int(spare_s / per_answer_s), num_most) if per_answer_s > 0 else num_most
