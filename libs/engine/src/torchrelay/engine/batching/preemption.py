"""Which running groups to preempt so that a tenant without pages gets its share.

A preempted group loses its pages, not its output: that becomes forced output, and its KV is recomputed. A group is
preempted at most once and then preempts no other, so every group ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torchrelay.engine.batching.sequences import SequenceGroup


@dataclass(frozen=True, slots=True)
class PageHolding:
    """A group with pages."""

    group_id: str
    tenant: str
    num_pages: int
    admission_order: int  # the higher, the younger
    can_be_preempted: bool


def pick_victims(num_wanted: int, shares: Mapping[str, float], holdings: Sequence[PageHolding]) -> tuple[str, ...]:
    """The groups that free ``num_wanted`` pages or more; none if preemptible ones are too few.

    ``shares`` are the pages each tenant may hold while others wait. Each victim is the youngest group, which loses
    least, of the tenant furthest above its share.
    """
    held: Counter[str] = Counter()
    preemptible: dict[str, list[PageHolding]] = {}
    for holding in sorted(holdings, key=lambda each: each.admission_order):
        held[holding.tenant] += holding.num_pages
        if holding.can_be_preempted:
            preemptible.setdefault(holding.tenant, []).append(holding)
    found: list[str] = []
    while num_wanted > 0:
        above = {tenant: held[tenant] - shares[tenant] for tenant in preemptible if held[tenant] > shares[tenant]}
        if not above:
            return ()
        tenant = max(sorted(above), key=lambda name: above[name])
        victim = preemptible[tenant].pop()
        if not preemptible[tenant]:
            del preemptible[tenant]
        found.append(victim.group_id)
        held[tenant] -= victim.num_pages
        num_wanted -= victim.num_pages
    return tuple(found)


def groups_to_preempt(
    wanting: SequenceGroup,
    groups: Collection[SequenceGroup],
    num_pages: int,
    num_pages_lacking: int,
    can_be_preempted: Callable[[SequenceGroup], bool],
) -> tuple[SequenceGroup, ...]:
    """Those to preempt for a group whose tenant has no pages: none preempted before, or admitted while it waited."""
    holdings = [
        PageHolding(
            each.spec.group_id,
            each.spec.tenant_id,
            each.num_pages,
            each.admission_order,
            not each.was_preempted and each.admission_order < wanting.arrival_order and can_be_preempted(each),
        )
        for each in groups
        if each.num_pages
    ]
    weights = {each.spec.tenant_id: each.spec.weight for each in (*groups, wanting)}
    found = set(pick_victims(num_pages_lacking, fair_shares(num_pages, weights), holdings))
    return tuple(each for each in groups if each.spec.group_id in found)


def fair_shares(num_pages: int, weights: Mapping[str, float]) -> dict[str, float]:
    """Pages per tenant, by weight."""
    total = sum(weights.values())
    return {tenant: num_pages * weight / total for tenant, weight in weights.items()}
