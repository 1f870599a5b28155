"""Workers as jobs of Slurm, on a cluster of two nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.life_of_models import models_come_from_zero_outlive_a_machine_and_go_to_zero
from tests.fleet.slurm_cluster import SlurmCluster, slurm_cluster

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def slurm(short_path: Path) -> Iterator[SlurmCluster]:
    with slurm_cluster(short_path) as cluster:
        yield cluster


def test_models_live_on_slurm(slurm: SlurmCluster, tmp_path: Path) -> None:
    models_come_from_zero_outlive_a_machine_and_go_to_zero(slurm, tmp_path)
    assert slurm.jobs() == []
