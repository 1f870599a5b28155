from __future__ import annotations

import pytest

from torchrelay.common.errors import InvalidRequest
from torchrelay.worker.device import resolve_device


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "expected"),
    [
        ("cpu", 0, "cpu"),
        ("cpu", 2, "cpu"),
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda:0"),
        ("cuda", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_device_is_resolved(wanted: str, num_gpus: int, expected: str) -> None:
    assert resolve_device(wanted, num_gpus) == expected


@pytest.mark.parametrize(("wanted", "num_gpus"), [("cuda", 0), ("cuda:1", 1)])
def test_missing_gpu_is_refused(wanted: str, num_gpus: int) -> None:
    with pytest.raises(InvalidRequest, match=r"GPU \d is configured, but torch finds") as caught:
        resolve_device(wanted, num_gpus)
    assert caught.value.field == "device"


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "message", "field"),
    [
        ("cuda:1", 2, "GPU 2 is configured, but torch finds 2 on this machine", "devices"),
        ("auto", 1, "GPU 1 is configured, but torch finds 1 on this machine", "devices"),
        ("cuda", 0, "GPU 1 is configured, but torch finds none on this machine", "device"),
    ],
)
def test_a_slot_needs_all_its_gpus(wanted: str, num_gpus: int, message: str, field: str) -> None:
    assert resolve_device("cuda:1", 3, 2) == "cuda:1" and resolve_device("cpu", 0, 2) == "cpu"
    with pytest.raises(InvalidRequest) as caught:
        resolve_device(wanted, num_gpus, 2)
    assert (caught.value.message, caught.value.field) == (message, field)


@pytest.mark.parametrize("wanted", ["", "gpu", "cuda:x", "cpu:0", "mps"])
def test_invalid_device_is_refused(wanted: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a valid device"):
        resolve_device(wanted, 1)
