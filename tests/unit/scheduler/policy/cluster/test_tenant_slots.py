"""Slots count for each tenant that uses them."""

from __future__ import annotations

from torchrelay.scheduler.policy.cluster.tenant_slots import TenantSlots, VersionSlots


def test_version_counts_for_all_its_tenants_until_it_has_no_slot() -> None:
    slots = {"own": VersionSlots({"acme"}, 2), "shared": VersionSlots({"acme", "birch"}, 1)}
    counted = TenantSlots(lambda version_id: slots.get(version_id, VersionSlots((), 0)))
    for version_id in slots:
        counted.changed(version_id)
    assert counted.numbers == {"acme": 3, "birch": 1}
    slots["shared"] = VersionSlots({"birch", "cedar"}, 1)  # cedar uploaded the same files, acme deleted them
    counted.changed("shared")
    assert counted.numbers == {"acme": 2, "birch": 1, "cedar": 1}
    counted.check_integrity(slots)
    slots.clear()
    counted.changed("own")
    counted.changed("shared")
    assert counted.numbers == {} and set(counted.numbers) == set()
