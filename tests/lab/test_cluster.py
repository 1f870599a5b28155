"""A cluster that cannot start says why and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab import Lab
from tests.lab.cluster import HOSTS, Cluster
from tests.lab.reaper import pids_in

pytestmark = pytest.mark.lab


def test_cluster_that_fails_to_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    with Lab(HOSTS) as lab:
        cluster = Cluster(lab, tmp_path, IDLE_TIMEOUT_S="-1")
        with pytest.raises(AssertionError, match=r"(?s)scheduler did not come up.*idle_timeout_s"), cluster:
            pass
        assert pids_in([host.namespace for host in lab]) == []
        assert not any(path.exists() for path in cluster.arenas.values())
