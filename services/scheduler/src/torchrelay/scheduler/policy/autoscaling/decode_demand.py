"""The work of answers, where other instances decode than prefill: each role gets as many as its own work needs."""

from __future__ import annotations

from dataclasses import dataclass

from torchrelay.scheduler.policy.autoscaling import price


@dataclass(frozen=True)
class DecodeDemand:
    """Answers as a fluid: an instance holds ``num_held`` at once, and is done with each after ``answer_s``. That is
    one second of its work for every ``num_held / answer_s`` answers.
    """

    num_answers: int  # those open, and those of requests that wait
    num_held: int  # whose tokens meet the target together, and whose KV the pool holds
    num_most: int  # by the pool alone: more wait
    answer_s: float  # from its placement, before its prompt is computed, to its last token, beside as many others
    arrivals_per_s: float
    target_s: float  # for the first token: an answer that waits for a place is late after it
    price_s: float
    crowded_at: float = 0.0  # when all decode instances were last needed

    @property
    def request_s(self) -> float:
        """Work of one answer, in seconds of an instance."""
        return self.answer_s / self.num_held

    @property
    def load(self) -> float:
        """Work that comes per second, in instances."""
        return self.arrivals_per_s * self.request_s

    def backlog_s(self, num_instances: int) -> float:
        """Work beyond what the instances hold at once; negative: they hold more."""
        return (self.num_answers - num_instances * self.num_held) * self.request_s

    def num_saved(self, num_instances: int, load_s: float) -> float:
        """Requests that one more instance, there in ``load_s``, keeps from being late while it is held; counted as in
        ``price``. It begins with as many answers as it holds at once.
        """
        left_s = self.held_s(num_instances, load_s) - load_s
        if left_s <= 0:
            return 0.0
        queue_s = self.backlog_s(num_instances) + (self.load - num_instances) * load_s
        without = price.lateness(num_instances, queue_s, self.load, self.target_s, left_s)
        with_it = price.lateness(num_instances + 1, queue_s - self.answer_s, self.load, self.target_s, left_s)
        return (without - with_it) / (self.request_s * self.target_s)

    def held_s(self, num_instances: int, load_s: float) -> float:
        return price.held_s(num_instances, max(self.backlog_s(num_instances), 0.0), load_s, self.price_s)

    def least_saved(self, num_instances: int, load_s: float) -> float:
        """The cost of one more instance, in late requests."""
        return price.least_saved(load_s, self.held_s(num_instances, load_s), self.price_s)


def most_in_time(num_most: int, tbt_target_s: float, base_s: float, per_answer_s: float) -> int:
    """The largest batch whose tokens are ``tbt_target_s`` apart at most; ``num_most`` where not even one is: more
    instances would not help then.
    """
    spare_s = tbt_target_s - base_s
    if spare_s < per_answer_s:
        return num_most
    return min(int(spare_s / per_answer_s), num_most) if per_answer_s > 0 else num_most
