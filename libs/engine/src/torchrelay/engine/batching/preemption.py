"""The running groups to preempt so that a tenant without pages gets its share.

A preempted group loses its pages, not its output: that becomes forced output, and its KV is recomputed. A group is
preempted at most once and then preempts no other, so every group ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from torchrelay.engine.batching.sequences import SequenceGroup


def groups_to_preempt(
    wanting: SequenceGroup,
    groups: Collection[SequenceGroup],
    num_pages: int,
    num_pages_lacking: int,
    can_be_preempted: Callable[[SequenceGroup], bool],
) -> tuple[SequenceGroup, ...]:
    """The groups that free ``num_pages_lacking`` pages or more for a group whose tenant has none; empty if too few can.

    A tenant's share is ``num_pages`` divided by the number of tenants. Each victim is the youngest group, which loses
    least, of the tenant furthest above its share. Groups that were preempted before, or were admitted while ``wanting``
    waited, are not preempted. Victims come youngest first: each returns to the front of its queue.
    """
    share = num_pages / len({each.spec.tenant_id for each in (*groups, wanting)})
    held: Counter[str] = Counter()
    preemptible: dict[str, list[SequenceGroup]] = {}
    for group in sorted((each for each in groups if each.num_pages), key=lambda each: each.admission_order):
        held[group.spec.tenant_id] += group.num_pages
        if not group.was_preempted and group.admission_order < wanting.arrival_order and can_be_preempted(group):
            preemptible.setdefault(group.spec.tenant_id, []).append(group)
    victims: list[SequenceGroup] = []
    while num_pages_lacking > 0:
        above = [tenant for tenant in sorted(preemptible) if preemptible[tenant] and held[tenant] > share]
        if not above:
            return ()
        tenant = max(above, key=held.__getitem__)
        victims.append(preemptible[tenant].pop())
        held[tenant] -= victims[-1].num_pages
        num_pages_lacking -= victims[-1].num_pages
    return tuple(victims)
