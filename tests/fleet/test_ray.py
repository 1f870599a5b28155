"""Workers as actors of Ray, on a cluster of a head and two raylets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.life_of_models import (
    models_come_from_zero_outlive_a_machine_and_go_to_zero,
    platform_on,
    workers,
)
from tests.fleet.machines import programs
from tests.fleet.ray_cluster import RayCluster, ray_cluster
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import complete
from tests.support.wait import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]  # a start of Ray takes minutes on a busy machine
KILL = """
import ray, sys
ray.init(sys.argv[1], _node_ip_address="127.0.0.1")
(actor,) = (each for each in ray.util.list_named_actors(all_namespaces=True) if each["name"] == sys.argv[2])
ray.kill(ray.get_actor(**actor))
"""


@pytest.fixture(scope="module")
def ray(short_path: Path) -> Iterator[RayCluster]:
    with ray_cluster(short_path) as cluster:
        yield cluster


def test_killed_actor_leaves_no_process_and_is_replaced(ray: RayCluster, tmp_path: Path) -> None:
    with platform_on(ray, tmp_path / "home") as platform:
        key = platform.tenant("acme")
        model = platform.upload(key, make_checkpoint(tmp_path / "model", "llama"), "model")
        complete(platform, key, model, [1, 2, 3], max_tokens=4, ignore_eos=True)
        (killed,) = workers(platform)
        (pid,) = programs(killed)
        subprocess.run([sys.executable, "-c", KILL, ray.address, killed], check=True, timeout=60)
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the actor's program")
        complete(platform, key, model, [1, 2, 3], max_tokens=4, ignore_eos=True)
        assert killed not in workers(platform)


def test_models_live_on_ray(ray: RayCluster, tmp_path: Path) -> None:
    """Comes last, since it kills a machine."""
    models_come_from_zero_outlive_a_machine_and_go_to_zero(ray, tmp_path)
