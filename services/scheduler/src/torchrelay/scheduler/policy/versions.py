"""All that the scheduler knows of a model version, in one record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torchrelay.scheduler.policy.autoscaling.load_failures import LoadFailures
from torchrelay.scheduler.policy.cluster.version_aliases import VersionAliases
from torchrelay.scheduler.policy.cluster.version_endpoints import VersionEndpoints
from torchrelay.scheduler.policy.demand.usage import Usage
from torchrelay.scheduler.policy.types import MAX_VERSIONS, AttemptKey, Model


@dataclass(slots=True)
class Version:
    """A version that was called or has an instance. Its waiting requests are in the queues, its instances in
    ``Instances``.
    """

    version_id: str
    model: Model | None = None  # settings in force, under the name of the last call; None before the first
    aliases: VersionAliases = field(default_factory=VersionAliases)
    usage: Usage = field(default_factory=Usage)
    failures: LoadFailures = field(default_factory=LoadFailures)
    endpoints: VersionEndpoints | None = None  # None: to be built; see ``dispatch/endpoints.py``
    too_large: set[AttemptKey] = field(default_factory=set)  # parked requests with more KV than ``too_large_for`` has
    too_large_for: VersionEndpoints | None = None
    has_new_caps: bool = False  # limits that are not yet compared with the waiting requests
    slot_lost_at: float = -math.inf  # the last time that it lost an instance while requests waited
    told_at: float = -math.inf  # when gateways were last told about its load; see ``load_notices``
    had_slot_when_told: bool = False


class Versions:
    """The versions by id, those that were called or appeared last at the end; of more than ``MAX_VERSIONS``, the first
    version without use is forgotten.
    """

    def __init__(self, is_used: Callable[[str], bool], on_forget: Callable[[Version], None]) -> None:
        self._of: dict[str, Version] = {}
        self._is_used, self._on_forget = is_used, on_forget

    def __iter__(self) -> Iterator[Version]:
        return iter(self._of.values())

    def __reversed__(self) -> Iterator[Version]:
        return reversed(self._of.values())

    def of(self, version_id: str) -> Version:
        """The record of the version, which may be new."""
        version = self._of.get(version_id)
        if version is None:
            version = self._of[version_id] = Version(version_id)
            self._forget_one(version_id)
        return version

    def get(self, version_id: str) -> Version | None:
        return self._of.get(version_id)

    def model(self, version_id: str) -> Model | None:
        """The settings in force of the version; None if it was never called."""
        version = self._of.get(version_id)
        return None if version is None else version.model

    def called(self, version_id: str) -> Version:
        """The record of a version that is called now."""
        version = self.of(version_id)
        self._of[version_id] = self._of.pop(version_id)
        return version

    def _forget_one(self, new: str) -> None:
        if len(self._of) > MAX_VERSIONS:
            unused = next((each for each in self._of if each != new and not self._is_used(each)), None)
            if unused is not None:
                self._on_forget(self._of.pop(unused))
