"""What a copy in RAM or on disk saves."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.policy.paper_cluster import a_model
from torchrelay.scheduler.policy.cluster.storage_tiers import Tier
from torchrelay.scheduler.policy.replication.pack_worth import pack_worth

LOADS = {Tier.HOST: 2.0, Tier.FILLING: 3.0, Tier.PEER: 3.0, Tier.DISK: 8.0, Tier.REMOTE: 26.0}


def test_a_copy_is_worth_the_device_seconds_it_saves_by_use_and_bytes() -> None:
    """The worked example of docs/replication.md."""
    model = a_model(pack_bytes=16_000_000_000)
    worth = pack_worth(model, LOADS, return_s=300.0, is_on_disk=False)
    assert worth.in_ram == pytest.approx(24.0 / 300 / 16)
    assert worth.on_disk == pytest.approx(18.0 / 300 / 16)
    assert str(worth) == "its next use is expected in 300 s, and RAM saves 24 s then: 18 device seconds per GB and hour"


def test_where_a_disk_has_it_ram_saves_less() -> None:
    model = a_model(pack_bytes=16_000_000_000)
    assert pack_worth(model, LOADS, 300.0, is_on_disk=True).in_ram == pytest.approx(6.0 / 300 / 16)


def test_four_devices_wait_for_a_load_as_one_does() -> None:
    one, four = (a_model(num_devices=number) for number in (1, 4))
    worths = [pack_worth(model, LOADS, 300.0, is_on_disk=False).in_ram for model in (one, four)]
    assert worths[1] == pytest.approx(4 * worths[0])
