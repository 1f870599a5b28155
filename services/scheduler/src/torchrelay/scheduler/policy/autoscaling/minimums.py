"""Minimum instances: how many instances of each model stay loaded without demand, always or at scheduled times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torchrelay.common.quantities import format_duration
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.types import ROLES, Model, ScheduledMinimum


@dataclass(frozen=True, slots=True)
class Minimum:
    """``number``: instances per role; ``scheduled``: the entry that sets it, None if it is the model's constant one."""

    number: int
    scheduled: ScheduledMinimum | None = None

    @property
    def plain_text(self) -> str:
        """Text for tenants who share the version, without the schedule, which may be another tenant's."""
        return f"its minimum is {self.number} per role"

    def text(self, now: float) -> str:
        if self.scheduled is None:
            return self.plain_text
        left_s = self.scheduled.begin - now
        begins = f", which begins in {format_duration(left_s)}" if left_s > 0 else ""
        return f"{self.plain_text}, by its schedule {self.scheduled.entry!r}{begins}"


class Minimums:
    """Minimums by version. Identical uploads share instances, and the greatest of their minimums counts."""

    def __init__(self) -> None:
        self.models: dict[str, list[Model]] = {}  # with a minimum, now or at another time
        self.in_force: dict[str, Minimum] = {}  # as last evaluated; a minimum of 0 is absent
        self._begun: set[ScheduledMinimum] = set()

    def set(self, models: Iterable[Model]) -> None:
        """Replaces the models that have a minimum; takes effect with the next evaluation."""
        self.models = {}
        for model in models:
            self.models.setdefault(model.version_id, []).append(model)

    def evaluate(self, now: float, lead_s: Callable[[Model], float]) -> dict[str, Minimum]:
        """Updates ``in_force`` and returns what has changed. ``lead_s``: how long before the begin of a schedule entry
        its model is loaded. An entry that has begun so stays in force until its end.
        """
        before, begun = self.in_force, self._begun
        self.in_force, self._begun = {}, set()
        for version_id, models in self.models.items():
            first = now + lead_s(models[0])
            entries = (each for each in _scheduled(models) if each.end > now)
            running = [each for each in entries if each.begin <= first or each in begun]
            self._begun.update(running)
            if (minimum := _greatest(models, running)).number:
                self.in_force[version_id] = minimum
        ended = {key: Minimum(0) for key in before if key not in self.in_force}
        return {key: minimum for key, minimum in (self.in_force | ended).items() if before.get(key) != minimum}

    def next_change(self, version_id: str, now: float) -> tuple[float, int] | None:
        """Time and number of the next different minimum; None if none is scheduled."""
        models, number = self.models[version_id], self.in_force.get(version_id, Minimum(0)).number
        entries = _scheduled(models)
        for at in sorted({at for each in entries for at in (each.begin, each.end) if at > now}):
            then = _greatest(models, [each for each in entries if each.begin <= at < each.end]).number
            if then != number:
                return at, then
        return None


def reserved_instances(
    minimums: Mapping[str, Minimum], of_version: Callable[[str], Iterable[Instance]]
) -> frozenset[str]:
    """Instances that stay without demand: per role, the model's oldest instances up to its minimum."""
    reserved: set[str] = set()
    for version_id, minimum in minimums.items():
        instances = [instance for instance in of_version(version_id) if instance.staying]
        instances.sort(key=lambda instance: (instance.created_at, instance.instance_id))
        for role in ROLES:
            playing = [instance.instance_id for instance in instances if role in instance.target_roles]
            reserved.update(playing[: minimum.number])
    return frozenset(reserved)


def _scheduled(models: Iterable[Model]) -> list[ScheduledMinimum]:
    return [each for model in models for each in model.scheduled]


def _greatest(models: Iterable[Model], scheduled: Iterable[ScheduledMinimum]) -> Minimum:
    """The greatest of the constant and the scheduled minimums. Among equals, the constant comes first, then the minimum
    that lasts longest.
    """
    constant = max(model.min_instances for model in models)
    greatest = max(scheduled, key=lambda each: (each.num_instances, each.end), default=None)
    if greatest is None or greatest.num_instances <= constant:
        return Minimum(constant)
    return Minimum(greatest.num_instances, greatest)
