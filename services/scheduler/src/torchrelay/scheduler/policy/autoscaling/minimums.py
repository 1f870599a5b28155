"""Minimum instances: how many instances of each model stay loaded without demand, always or at scheduled times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchrelay.common.quantities import format_duration
from torchrelay.scheduler.policy.types import ROLES, Instance, Model, ScheduledMinimum


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
        text = f"{self.plain_text}, by its schedule {self.scheduled.entry!r}"
        left_s = self.scheduled.begin - now
        return f"{text}, which begins in {format_duration(left_s)}" if left_s > 0 else text


class Minimums:
    """Minimums by version. Identical uploads share instances, and the greatest of their minimums counts."""

    def __init__(self) -> None:
        self._models: dict[str, list[Model]] = {}
        self._begun: set[ScheduledMinimum] = set()
        self.in_force: dict[str, Minimum] = {}  # as last evaluated; a minimum of 0 is absent

    def __contains__(self, version_id: str) -> bool:
        """Whether the version has a minimum, now or at another time."""
        return version_id in self._models

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def set(self, models: Iterable[Model]) -> None:
        """Replaces the models that have a minimum; takes effect with the next evaluation."""
        by_version = defaultdict[str, list[Model]](list)
        for model in models:
            by_version[model.version_id].append(model)
        self._models = dict(by_version)

    def models(self, version_id: str) -> Sequence[Model]:
        return self._models[version_id]

    def evaluate(self, now: float, lead_s: Callable[[Model], float]) -> dict[str, Minimum]:
        """Updates ``in_force`` and returns what has changed. ``lead_s``: how long before the begin of a schedule entry
        its model is loaded. An entry that has begun so stays in force until its end.
        """
        begun: set[ScheduledMinimum] = set()
        before, self.in_force = self.in_force, {}
        for version_id, models in self._models.items():
            first = now + lead_s(models[0])
            running = [
                each for each in _scheduled(models) if each.end > now and (each.begin <= first or each in self._begun)
            ]
            begun.update(running)
            minimum = _greatest(models, running)
            if minimum.number:
                self.in_force[version_id] = minimum
        self._begun = begun
        changed = {key: minimum for key, minimum in self.in_force.items() if before.get(key) != minimum}
        return changed | {key: Minimum(0) for key in before if key not in self.in_force}

    def next_change(self, version_id: str, now: float) -> tuple[float, int] | None:
        """Time and number of the next different minimum; None if none is scheduled."""
        models = self._models[version_id]
        number = self.in_force.get(version_id, Minimum(0)).number
        for at in sorted({at for each in _scheduled(models) for at in (each.begin, each.end) if at > now}):
            then = _greatest(models, (each for each in _scheduled(models) if each.begin <= at < each.end)).number
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
