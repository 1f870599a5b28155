"""Cache of the rosters of all versions, with the versions that take no prompt now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torchrelay.scheduler.policy.core import InstancePhase
from torchrelay.scheduler.policy.dispatch.open_attempts import BoundWork
from torchrelay.scheduler.policy.dispatch.roster_entry import RosterEntry
from torchrelay.scheduler.policy.dispatch.shortlist import LEAST_ENTRIES, Shortlist


class RosterCache:
    """Rosters by version, built on first use and again after ``forget``; after ``forget_loads`` only the entries of
    loading instances. Versions without instances are not cached. A version is blocked while a full step of prompts is
    ahead on each of its instances, so that nothing can be placed.
    """

    def __init__(self) -> None:
        self._of: dict[str, tuple[RosterEntry, ...]] = {}
        self._prefills: dict[str, Sequence[RosterEntry]] = {}
        self._with_old_loads: set[str] = set()
        self._blocked_until: dict[str, float] = {}
        self._shortlists: dict[str, Shortlist] = {}  # of large rosters
        self._listed: dict[str, Shortlist] = {}  # by instance

    def of(
        self,
        version_id: str,
        build: Callable[[], Iterable[RosterEntry]],
        build_load: Callable[[RosterEntry], RosterEntry],
    ) -> tuple[RosterEntry, ...]:
        """The version's roster. ``build_load``: makes the current entry of a loading instance."""
        roster = self._of.get(version_id)
        if roster is None:
            roster = tuple(build())
            if roster:
                self._of[version_id] = roster
        elif version_id in self._with_old_loads:
            shortlist, entries = self._shortlists.get(version_id), list(roster)
            for place, entry in enumerate(entries):
                if entry.phase is InstancePhase.LOADING:
                    entries[place] = build_load(entry)
                    if shortlist is not None:
                        shortlist.replace(entries[place])
            roster = self._of[version_id] = tuple(entries)
            self._prefills.pop(version_id, None)
            self._with_old_loads.discard(version_id)
        return roster

    def prefills(self, version_id: str) -> Sequence[RosterEntry]:
        """Prefill instances of the roster that was returned last."""
        prefills = self._prefills.get(version_id)
        if prefills is None:
            if (entries := self._of.get(version_id)) is None:
                return ()
            are_all = all(entry.plays_prefill for entry in entries)
            prefills = entries if are_all else tuple(entry for entry in entries if entry.plays_prefill)
            self._prefills[version_id] = prefills
        return prefills

    def shortlist(self, version_id: str, work_of: Callable[[str], BoundWork]) -> Shortlist | None:
        """Shortlist of the roster that was returned last; None for a small roster.

        ``work_of``: work bound to an instance.
        """
        entries = self._of.get(version_id, ())
        if len(entries) < LEAST_ENTRIES:
            return None
        shortlist = self._shortlists.get(version_id)
        if shortlist is None:
            shortlist = self._shortlists[version_id] = Shortlist(entries, work_of)
            self._listed |= {entry.instance_id: shortlist for entry in entries}
        return shortlist

    def work_changed(self, instance_id: str) -> None:
        """Records that work was bound to the instance or left it."""
        if (shortlist := self._listed.get(instance_id)) is not None:
            shortlist.change(instance_id)

    def forget(self, version_id: str) -> None:
        entries = self._of.pop(version_id, ())
        self._prefills.pop(version_id, None)
        self._blocked_until.pop(version_id, None)
        self._with_old_loads.discard(version_id)
        if self._shortlists.pop(version_id, None) is not None:
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
        known = (self._of, self._prefills, self._with_old_loads, self._blocked_until, self._shortlists)
        return len(set[str]().union(*known))

    def unblock(self, version_id: str) -> None:
        self._blocked_until.pop(version_id, None)

    def is_blocked(self, version_id: str, now: float) -> bool:
        return version_id in self._blocked_until and now < self._blocked_until[version_id]
