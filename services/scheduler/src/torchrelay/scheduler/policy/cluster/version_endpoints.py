"""The instances of a version that take requests."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

from torchrelay.scheduler.policy.cluster.candidate_index import LEAST_ENTRIES, CandidateIndex
from torchrelay.scheduler.policy.cluster.instance import Instance


class VersionEndpoints:
    """The instances of a version that take requests: not draining, and accepted by workers that are present and not
    suspected. Built again when an instance changes; see ``dispatch/endpoints.py``.
    """

    def __init__(self, instances: Iterable[Instance]) -> None:
        self.all = tuple(instances)
        self.has_old_loads = False  # the times of loads are to be predicted again
        # A full step of prompts is ahead on each instance, so that nothing can be placed, until this time or until
        # prompts leave.
        self.blocked_until = -math.inf

    @cached_property
    def prefills(self) -> tuple[Instance, ...]:
        return tuple(instance for instance in self.all if instance.plays_prefill)

    @cached_property
    def decodes(self) -> tuple[Instance, ...]:
        return tuple(instance for instance in self.all if instance.plays_decode)

    @cached_property
    def index(self) -> CandidateIndex | None:
        """Index of the instances if these are many."""
        return CandidateIndex(self.all) if len(self.all) >= LEAST_ENTRIES else None
