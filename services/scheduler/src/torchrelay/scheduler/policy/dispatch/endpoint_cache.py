"""Cache of the endpoints of all versions, with the versions that take no prompt now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torchrelay.scheduler.policy.dispatch.candidate_index import LEAST_ENTRIES, CandidateIndex
from torchrelay.scheduler.policy.dispatch.endpoint import Endpoint
from torchrelay.scheduler.policy.dispatch.open_attempts import DispatchedWork
from torchrelay.scheduler.policy.types import InstancePhase


class EndpointCache:
    """Endpoints by version, built on first use and again after ``forget``; after ``forget_loads`` only the entries of
    loading instances. Versions without instances are not cached. A version is blocked while a full step of prompts is
    ahead on each of its instances, so that nothing can be placed.
    """

    def __init__(self) -> None:
        self._of: dict[str, tuple[Endpoint, ...]] = {}
        self._prefills: dict[str, Sequence[Endpoint]] = {}
        self._with_old_loads: set[str] = set()
        self._blocked_until: dict[str, float] = {}
        self._candidate_indexes: dict[str, CandidateIndex] = {}  # of large endpoints
        self._listed: dict[str, CandidateIndex] = {}  # by instance

    def of(
        self,
        version_id: str,
        build: Callable[[], Iterable[Endpoint]],
        build_load: Callable[[Endpoint], Endpoint],
    ) -> tuple[Endpoint, ...]:
        """The version's endpoints. ``build_load``: makes the current entry of a loading instance."""
        endpoints = self._of.get(version_id)
        if endpoints is None:
            endpoints = tuple(build())
            if endpoints:
                self._of[version_id] = endpoints
        elif version_id in self._with_old_loads:
            candidate_index, entries = self._candidate_indexes.get(version_id), list(endpoints)
            for place, entry in enumerate(entries):
                if entry.phase is InstancePhase.LOADING:
                    entries[place] = build_load(entry)
                    if candidate_index is not None:
                        candidate_index.replace(entries[place])
            endpoints = self._of[version_id] = tuple(entries)
            self._prefills.pop(version_id, None)
            self._with_old_loads.discard(version_id)
        return endpoints

    def prefills(self, version_id: str) -> Sequence[Endpoint]:
        """Prefill instances of the endpoints that were returned last."""
        prefills = self._prefills.get(version_id)
        if prefills is None:
            if (entries := self._of.get(version_id)) is None:
                return ()
            are_all = all(entry.plays_prefill for entry in entries)
            prefills = entries if are_all else tuple(entry for entry in entries if entry.plays_prefill)
            self._prefills[version_id] = prefills
        return prefills

    def candidate_index(self, version_id: str, work_of: Callable[[str], DispatchedWork]) -> CandidateIndex | None:
        """Index of the endpoints that were returned last; None if these are few.

        ``work_of``: work dispatched to an instance.
        """
        entries = self._of.get(version_id, ())
        if len(entries) < LEAST_ENTRIES:
            return None
        candidate_index = self._candidate_indexes.get(version_id)
        if candidate_index is None:
            candidate_index = self._candidate_indexes[version_id] = CandidateIndex(entries, work_of)
            self._listed |= {entry.instance_id: candidate_index for entry in entries}
        return candidate_index

    def work_changed(self, instance_id: str) -> None:
        """Records that work was dispatched to the instance or left it."""
        if (candidate_index := self._listed.get(instance_id)) is not None:
            candidate_index.change(instance_id)

    def forget(self, version_id: str) -> None:
        entries = self._of.pop(version_id, ())
        self._prefills.pop(version_id, None)
        self._blocked_until.pop(version_id, None)
        self._with_old_loads.discard(version_id)
        if self._candidate_indexes.pop(version_id, None) is not None:
            for entry in entries:
                del self._listed[entry.instance_id]

    def forget_loads(self, version_id: str) -> None:
        """Rebuilds only the entries of loading instances on the next use, because their predicted load times
        changed.
        """
        if version_id in self._of:
            self._with_old_loads.add(version_id)

    def block(self, version_id: str, until: float) -> None:
        """Blocks the version until ``until``, or until its instances change or prompts leave them."""
        self._blocked_until[version_id] = until

    @property
    def num_known(self) -> int:
        """Number of versions with any cached data."""
        known = (self._of, self._prefills, self._with_old_loads, self._blocked_until, self._candidate_indexes)
        return len(set[str]().union(*known))

    def unblock(self, version_id: str) -> None:
        self._blocked_until.pop(version_id, None)

    def is_blocked(self, version_id: str, now: float) -> bool:
        return version_id in self._blocked_until and now < self._blocked_until[version_id]
