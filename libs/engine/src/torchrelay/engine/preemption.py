"""Which running groups are set back so that a tenant that has nothing gets its share of the KV pages.

A group that is set back loses its pages, not its output: that becomes forced output, and its KV is computed again. Each
group is set back at most once, and one that was sets back no other, so every group ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torchrelay.engine.sequences import Group


@dataclass(frozen=True, slots=True)
class Holding:
    """A group with pages."""

    group_id: str
    tenant: str
    num_pages: int
    admitted: int  # the higher, the younger
    can_be_set_back: bool


def victims(num_wanted: int, shares: Mapping[str, float], holdings: Sequence[Holding]) -> tuple[str, ...]:
    """The groups that free ``num_wanted`` pages or more; none when those that may be set back would not do.

    ``shares`` says how many pages each tenant may hold while others wait. Each victim is the youngest group (it loses
    least) of the tenant that is furthest above its share.
    """
    held: Counter[str] = Counter()
    open_to_it: dict[str, list[Holding]] = {}
    for holding in sorted(holdings, key=lambda each: each.admitted):
        held[holding.tenant] += holding.num_pages
        if holding.can_be_set_back:
            open_to_it.setdefault(holding.tenant, []).append(holding)
    found: list[str] = []
    while num_wanted > 0:
        above = {tenant: held[tenant] - shares[tenant] for tenant in open_to_it if held[tenant] > shares[tenant]}
        if not above:
            return ()
        tenant = max(sorted(above), key=lambda name: above[name])
        victim = open_to_it[tenant].pop()
        if not open_to_it[tenant]:
            del open_to_it[tenant]
        found.append(victim.group_id)
        held[tenant] -= victim.num_pages
        num_wanted -= victim.num_pages
    return tuple(found)


def who_makes_room(
    wanting: Group,
    groups: Collection[Group],
    num_pages: int,
    num_lacking: int,
    can_be_set_back: Callable[[Group], bool],
) -> tuple[Group, ...]:
    """The groups to set back for one whose tenant has no pages, of all groups there are.

    Those that were set back once are left alone, and those that had their turn while it waited already.
    """
    holdings = [
        Holding(
            each.spec.group_id,
            each.spec.salt,
            each.num_pages,
            each.admitted,
            not each.was_set_back and each.admitted < wanting.queued and can_be_set_back(each),
        )
        for each in groups
        if each.num_pages
    ]
    weights = {each.spec.salt: each.spec.weight for each in (*groups, wanting)}
    found = set(victims(num_lacking, fair_shares(num_pages, weights), holdings))
    return tuple(each for each in groups if each.spec.group_id in found)


def fair_shares(num_pages: int, weights: Mapping[str, float]) -> dict[str, float]:
    """The pages of each tenant, by its weight."""
    total = sum(weights.values())
    return {tenant: num_pages * weight / total for tenant, weight in weights.items()}
