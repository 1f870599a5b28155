"""The settings of a worker: its roles, its key, its id and its device."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from torchrelay.common.errors import InvalidRequest
from torchrelay.control.v1 import types_pb2
from torchrelay.worker.device import resolve_device
from torchrelay.worker.settings import WorkerSettings

KEY = "ab" * 32


def test_roles_keep_their_order_without_duplicates() -> None:
    settings = WorkerSettings(node_key=KEY, worker_id="w", roles="decode, prefill,decode")
    assert settings.role_names == ["decode", "prefill"]
    assert settings.role_numbers == [types_pb2.ROLE_DECODE, types_pb2.ROLE_PREFILL]


def test_ranks_of_adapters_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRELAY_MAX_ADAPTER_RANK", "16")
    assert WorkerSettings(node_key=KEY, worker_id="w").max_adapter_rank == 16
    monkeypatch.setenv("TORCHRELAY_MAX_ADAPTER_RANK", "24")
    with pytest.raises(ValidationError, match="must be one of 0, 8, 16, 32, 64, 128, 256, 320, 512, not 24"):
        WorkerSettings(node_key=KEY, worker_id="w")


@pytest.mark.parametrize("roles", ["", " , ", "prefill,encode"])
def test_unknown_or_missing_roles_are_refused(roles: str) -> None:
    with pytest.raises(ValidationError, match="prefill, decode"):
        WorkerSettings(node_key=KEY, worker_id="w", roles=roles)


@pytest.mark.parametrize(
    "wrong", [{"node_key": "abc"}, {"node_key": KEY, "worker_id": "a.b"}, {"worker_id": "w"}, {"node_key": KEY}]
)
def test_worker_requires_key_and_valid_id(wrong: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match=r"node_key|worker_id"):
        WorkerSettings(**wrong)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("size", [{"kv_pool_bytes": 1000}, {"token_budget": 15}])
def test_a_size_is_automatic_or_enough(size: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="must be 0, or at least"):
        WorkerSettings(node_key=KEY, worker_id="w", **size)  # type: ignore[arg-type]


def test_labels_are_checked_and_sorted() -> None:
    assert WorkerSettings(node_key=KEY, worker_id="w", labels="zone=a, gpu=l4,").labels == "gpu=l4,zone=a"
    with pytest.raises(ValidationError, match="'zone' is not a label; write KEY=VALUE"):
        WorkerSettings(node_key=KEY, worker_id="w", labels="zone")
