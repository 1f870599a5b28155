"""Targets by name and by number."""

from __future__ import annotations

import pytest

from torchrelay.cli.bench.targets import MLPERF, read_targets


def test_names_are_those_of_mlperf_and_say_that_they_are_only_like_it() -> None:
    targets = read_targets("llama2-70b-interactive")
    assert (targets.ttft_s, targets.tpot_s) == (0.45, 0.04)
    assert targets.label == "MLPerf-like llama2-70b-interactive"
    assert {name.rpartition("-")[2] for name in MLPERF} == {"server", "interactive"}
    for server in (each for each in MLPERF.values() if each.name.endswith("-server")):
        interactive = read_targets(server.name.replace("-server", "-interactive"))
        assert interactive.ttft_s < server.ttft_s and interactive.tpot_s < server.tpot_s


def test_own_targets_are_two_numbers_of_seconds() -> None:
    targets = read_targets("0.5,0.03")
    assert (targets.ttft_s, targets.tpot_s, targets.label) == (0.5, 0.03, "your targets")


@pytest.mark.parametrize("text", ["", "0.5", "0.5,0.03,1", "a,b", "llama3.1-8b"])
def test_other_text_is_refused_with_the_names(text: str) -> None:
    with pytest.raises(ValueError, match=r"pair of seconds, as 0\.5,0\.03, nor one of llama3\.1-8b-server"):
        read_targets(text)


@pytest.mark.parametrize("text", ["0,1", "1,-1", "nan,1", "1,inf"])
def test_targets_must_be_above_zero(text: str) -> None:
    with pytest.raises(ValueError, match="both must be above 0"):
        read_targets(text)
