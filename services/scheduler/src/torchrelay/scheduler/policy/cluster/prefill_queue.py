"""The prompts that are dispatched to an instance and not computed yet, and the work ahead of a new prompt.

The instance computes prompts in about the order in which they were dispatched. The time of each is predicted
then, and it leaves when its first token is reported, so a prediction error lasts no longer than its prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from torchrelay.scheduler.policy.types import AttemptKey


@dataclass(slots=True)
class PrefillQueue:
    _dispatched: dict[AttemptKey, float] = field(default_factory=dict)  # predicted seconds
    _added_at: dict[AttemptKey, float] = field(default_factory=dict)
    _work_s: float = 0.0
    _head_since: float = 0.0  # when the instance could begin with the first prompt
    _owed_s: float = 0.0  # pauses owed to answers, as of the last time that a prompt was dispatched
    _left_at: float = 0.0  # when the last prompt left

    def __len__(self) -> int:
        return len(self._dispatched)

    def add(self, key: AttemptKey, prefill_s: float, now: float, pause_s: float = 0.0) -> None:
        """Binds a prompt. ``pause_s``: the pause without prompts that the instance's answers need after it, which is
        added to the pauses that they are still owed.
        """
        self._owed_s = max(self._owed_s - self._passed_s(now), 0.0) + pause_s
        if not self._dispatched:
            self._head_since, self._work_s = now, 0.0
        self._dispatched[key], self._added_at[key] = prefill_s, now
        self._work_s += prefill_s

    def predict(self, key: AttemptKey, prefill_s: float) -> None:
        """Replaces the predicted time of a prompt."""
        self._work_s += prefill_s - self._dispatched[key]
        self._dispatched[key] = prefill_s

    def leave(self, key: AttemptKey, now: float) -> None:
        """Removes a prompt that is computed or whose attempt is over."""
        if key not in self._dispatched:
            return
        if key == next(iter(self._dispatched)):
            self._head_since = now
        self._work_s -= self._dispatched.pop(key)
        del self._added_at[key]
        self._left_at = now

    def answers_left(self) -> None:
        """Forgets the pauses owed, because the last answer has left; later answers are owed nothing."""
        self._owed_s = 0.0

    @property
    def owes_pauses(self) -> bool:
        """Whether answers are still owed pauses after recent prompts."""
        return self._owed_s > 0.0

    def paused_s(self, decode_step_s: float, now: float) -> float:
        """Remaining time without another prompt, so that the instance's answers decode alone; less than a decode step
        may stay owed. It passes only while no prompt is dispatched or all dispatched prompts are overdue.
        """
        pause_s = self._owed_s - decode_step_s
        return max(pause_s - self._passed_s(now), 0.0) if pause_s > 0.0 else 0.0

    def paused_until(self, decode_step_s: float) -> float:
        """When the pause will be over if all dispatched prompts are computed as predicted; minus infinity without a
        pause.
        """
        pause_s = self._owed_s - decode_step_s
        return self._pause_begins_at() + pause_s if pause_s > 0.0 else -math.inf

    def _pause_begins_at(self) -> float:
        return self.end_at() if self._dispatched else self._left_at

    def _passed_s(self, now: float) -> float:
        """Elapsed time of the pause that follows the dispatched prompts."""
        return max(now - self._pause_begins_at(), 0.0)

    def resume(self, now: float) -> None:
        """Starts the first prompt now, when the instance has finished loading."""
        self._head_since = now

    def work_s(self) -> float:
        """Predicted time of all dispatched prompts, as if none had begun."""
        return max(self._work_s, 0.0) if self._dispatched else 0.0

    def left_by_layer_s(self, loaded_share: float, now: float) -> float:
        """Predicted time of what an instance has left that has ``loaded_share`` of its layers, and computes each of
        them as soon as it can.
        """
        if not self._dispatched:
            return 0.0
        begun_s = zip(self._dispatched.values(), self._added_at.values(), strict=True)
        computed_s = sum(min(prefill_s * loaded_share, now - bound_at) for prefill_s, bound_at in begun_s)
        return max(self._work_s - min(computed_s, now - next(iter(self._added_at.values()))), 0.0)

    def end_at(self) -> float:
        """When all dispatched prompts are predicted to be computed; the queue must not be empty."""
        return self._head_since + self._work_s

    def less_ahead_at(self, limit_s: float) -> float:
        """When less than ``limit_s`` will be ahead without another report; infinite if that needs a report."""
        if self._work_s < limit_s or not self._dispatched:
            return 0.0
        needed_s = self._work_s - limit_s
        return self._head_since + needed_s if needed_s < next(iter(self._dispatched.values())) else math.inf

    def not_begun(self, now: float, *, is_loading: bool) -> Iterator[tuple[AttemptKey, float]]:
        """The prompts behind the first, or all prompts of a loading instance, in order, each with the predicted seconds
        of the prompts before it.
        """
        ahead_s, is_first = 0.0, not is_loading
        for key, prefill_s in self._dispatched.items():
            if is_first:
                ahead_s, is_first = abs(prefill_s - max(now - self._head_since, 0.0)), False
            else:
                yield key, ahead_s
                ahead_s += prefill_s

    def overdue_s(self, now: float) -> float:
        """How long the first prompt is overdue; it is expected to take as long again."""
        return self.ahead_and_overdue_s(now)[1]

    def ahead_and_overdue_s(self, now: float) -> tuple[float, float]:
        """Predicted time until all dispatched prompts are computed, and ``overdue_s``."""
        if not self._dispatched:
            return 0.0, 0.0
        first_s, since_s = next(iter(self._dispatched.values())), now - self._head_since
        if since_s > first_s:
            left_s, overdue_s = self._work_s - first_s, since_s - first_s
        else:
            left_s, overdue_s = self._work_s - (since_s if since_s > 0.0 else 0.0), 0.0
        return left_s if left_s > 0.0 else 0.0, overdue_s
