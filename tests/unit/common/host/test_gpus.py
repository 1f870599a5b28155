"""The GPUs that a machine's programs may use, and the part of them that each worker gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrelay.common.host import gpus
from torchrelay.common.host.gpus import gpu_settings, visible_gpus

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}

SLICES = "MIG-11,MIG-22"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("0", "1")),
        ({"CUDA_VISIBLE_DEVICES": "1, 0"}, ("1", "0")),
        ({"CUDA_VISIBLE_DEVICES": SLICES}, ("MIG-11", "MIG-22")),
        ({"CUDA_VISIBLE_DEVICES": "GPU-7,-1,0"}, ("GPU-7",)),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ()),
    ],
)
def test_gpus_are_those_that_cuda_shows(
    variables: dict[str, str], expected: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        (tmp_path / "driver" / "gpus" / f"0000:0{number}:00.0").mkdir(parents=True)
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "driver")
    monkeypatch.setattr(gpus, "DRIVER_NODE", tmp_path / "nvidiactl")
    monkeypatch.setattr(gpus, "CONTAINER_FILES", [tmp_path / "container"])
    assert visible_gpus(variables) == expected  # the first use of a GPU makes the node
    assert visible_gpus(variables | POD) == ()  # a container without GPUs
    (tmp_path / "container").touch()
    assert visible_gpus(variables) == ()
    (tmp_path / "nvidiactl").touch()
    assert visible_gpus(variables) == visible_gpus(variables | POD) == expected


def test_wsl_has_one_gpu_unless_variables_name_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "driver")
    monkeypatch.setattr(gpus, "WSL_NODE", tmp_path / "dxg")
    assert visible_gpus({}) == ()
    (tmp_path / "dxg").touch()
    assert visible_gpus({}) == ("0",)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == ("0", "1")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()


def test_each_worker_gets_gpus_of_its_own() -> None:
    def given(device: str, names: str, num_devices: int = 1) -> list[tuple[str, str | None]]:
        settings = [
            gpu_settings(device, tuple(filter(None, names.split(","))), number, num_devices) for number in (0, 1)
        ]
        return [(each["TORCHRELAY_DEVICE"], each.get("CUDA_VISIBLE_DEVICES")) for each in settings]

    assert given("auto", "") == [("auto", None)] * 2
    assert given("cpu", "0,1") == [("cpu", None)] * 2
    assert given("cuda", "0,1") == [("cuda:0", None), ("cuda:1", None)]
    assert given("auto", "0,1") == [("auto", "0"), ("auto", "1")]
    assert given("auto", "0,1,2,3", 2) == [("auto", "0,1"), ("auto", "2,3")]
    assert given("cuda:1", "0,1,2,3,4", 2) == [("cuda:1", None), ("cuda:3", None)]
    assert given("cuda", SLICES) == [("cuda:0", "MIG-11"), ("cuda:0", "MIG-22")]
    assert given("auto", SLICES) == [("auto", "MIG-11"), ("auto", "MIG-22")]
