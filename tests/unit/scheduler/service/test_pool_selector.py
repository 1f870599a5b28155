"""What the metadata of a KEDA trigger selects."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_model, a_store
from torchrelay.common.errors import InvalidRequest
from torchrelay.scheduler.policy.config import PolicyConfig, PoolMode
from torchrelay.scheduler.policy.types import Role
from torchrelay.scheduler.service.pool_selector import PoolSelector

OF_KEDA = {"scalerAddress": "demo-scheduler.models:7102", "enableTLS": "true", "unsafeSsl": "false"}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"numDevices": "1"}, PoolSelector(1)),
        ({"numDevices": "8", "role": "both"}, PoolSelector(8)),
        ({"numDevices": "1", "role": "prefill"}, PoolSelector(1, Role.PREFILL)),
        ({"numDevices": "1", "role": "decode"}, PoolSelector(1, Role.DECODE)),
    ],
)
def test_metadata_selects_a_pool(metadata: dict[str, str], expected: PoolSelector) -> None:
    assert PoolSelector.of(metadata) == PoolSelector.of(metadata | OF_KEDA) == expected


@pytest.mark.parametrize(
    ("metadata", "key", "fault"),
    [
        ({}, "numDevices", "numDevices is missing; give the number of devices of each worker"),
        *(
            ({"numDevices": number}, "numDevices", f"numDevices is {number!r}; give the number")
            for number in ("", "0", "-1", "1.5", "two", "٣", "10000", " 1")
        ),
        ({"numDevices": "1", "role": "Decode"}, "role", "role is 'Decode'; .*: both, prefill, decode"),
        (
            {"numDevice": "1"},
            "numDevice",
            "'numDevice' is not a key of this scaler, whose keys are numDevices and role",
        ),
    ],
)
def test_bad_metadata_is_refused_by_its_key(metadata: dict[str, str], key: str, fault: str) -> None:
    with pytest.raises(InvalidRequest, match=fault) as refused:
        PoolSelector.of(metadata)
    assert refused.value.field == f"scalerMetadata.{key}"


def test_wanted_slots_are_those_of_the_targets() -> None:
    scene = PaperCluster(PolicyConfig(pool_mode=PoolMode.FOLLOW))
    state = scene.policy.state
    assert PoolSelector(1).num_wanted(state) is None, "it is not known in the settling time"
    scene.settle(a_store("store-1", "host-1"))
    selectors = [PoolSelector(1), PoolSelector(1, Role.PREFILL), PoolSelector(1, Role.DECODE), PoolSelector(2)]
    assert [selector.num_wanted(state) for selector in selectors] == [0, 0, 0, 0]
    scene.admit(a_model("acme/first"), "r1")
    assert [selector.num_wanted(state) for selector in selectors] == [1, 1, 1, 0]
