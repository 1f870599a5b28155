"""What `torchrelay up` refuses before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrelay.cli.errors import CliError
from torchrelay.cli.up.machine_check import check_machine
from torchrelay.cli.up.plan import UpOptions
from torchrelay.common.host.machine import Machine


def test_own_engine_refuses_several_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHRELAY_ENGINE", raising=False)
    options = UpOptions(num_devices=2)
    with pytest.raises(CliError) as caught:
        check_machine(options, tmp_path / "arena", Machine.here())
    assert str(caught.value) == "the engine torchrelay computes a model on one device, and --devices is 2"
    monkeypatch.setenv("TORCHRELAY_ENGINE", "vllm")
    check_machine(options, tmp_path / "arena", Machine.here())


def test_a_slot_needs_all_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRELAY_ENGINE", "vllm")
    gpus = tmp_path / "gpus"
    for number in range(2):
        (gpus / str(number)).mkdir(parents=True)
    check_machine(UpOptions(device="cuda", num_devices=2), tmp_path / "arena", Machine.here(), gpus)
    with pytest.raises(CliError) as caught:
        check_machine(UpOptions(device="cuda:1", num_devices=2), tmp_path / "arena", Machine.here(), gpus)
    assert str(caught.value) == "cuda:1 to cuda:2 is asked for and this machine has 2"
