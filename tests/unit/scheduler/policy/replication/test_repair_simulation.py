"""Copies survive losses: hosts in racks, models with Zipf demand, hosts that fail and return at random."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.unit.scheduler.policy.replication.replication_simulation import STEP_S, Figures, Simulation
from torchrelay.scheduler.policy.config import PolicyConfig

REQUESTS_PER_S = 3.6
RULES = PolicyConfig(recent_s=300.0)
NUM_SINGLE, NUM_DOUBLE = 8, 1
BUILD_STEPS = 160


def run(seed: int = 7) -> Figures:
    """Builds up, then loses one host after the other, each once the last loss is repaired; then two at a time."""
    simulation = Simulation(seed, num_hosts=60, racks=10, num_models=600, config=RULES)
    figures = simulation.figures
    for _ in range(BUILD_STEPS):
        simulation.step(REQUESTS_PER_S)
    for number in range(NUM_SINGLE):
        _lose_one(simulation, restart=number % 4 == 3)
        _go_on(simulation, 5.0)
        simulation.measure()
    for _ in range(NUM_DOUBLE):
        _lose_two(simulation)
        _go_on(simulation, 5.0)
    rack = simulation.hosts[_up(simulation)[0]].domain
    for name in _up(simulation):
        if simulation.hosts[name].domain == rack:
            simulation.fail(name, 30.0)
    figures.rack_lost = len(simulation.without_copy())
    return figures


def _go_on(simulation: Simulation, seconds: float) -> None:
    for _ in range(int(seconds / STEP_S)):
        simulation.step(REQUESTS_PER_S)
        simulation.figures.num_windows += len(simulation.without_copy())


def _up(simulation: Simulation) -> list[str]:
    return [name for name, host in simulation.hosts.items() if host.up]


def _lose_one(simulation: Simulation, restart: bool) -> None:
    """A host fails, or its store's process alone, and everything it had is whole again in a bounded time."""
    figures, random = simulation.figures, simulation.random
    had_copies = [pack_id for pack_id, hosts in simulation.whole().items() if hosts]
    simulation.fail(random.choice(_up(simulation)), 1.0 if restart else random.uniform(10, 60), keeps_arena=restart)
    begin, num_rebuilds = simulation.now, figures.num_rebuilds
    assert restart or simulation.short(had_copies), "nothing was lost"
    figures.num_windows += len(simulation.without_copy())
    while short := simulation.short(had_copies):
        assert simulation.now - begin < 60, f"{len(short)} packs are still short"
        simulation.step(REQUESTS_PER_S)
        figures.num_windows += len(simulation.without_copy())
    figures.unprotected_s = max(figures.unprotected_s, simulation.now - begin)
    if restart:
        assert figures.num_rebuilds == num_rebuilds, "a store that comes back at once costs no transfer"
    else:
        assert figures.num_rebuilds > num_rebuilds


def _lose_two(simulation: Simulation) -> None:
    """Two hosts of one pack at the same moment; what had both its copies there comes back from the remote store."""
    had_copies = [pack_id for pack_id, hosts in simulation.whole().items() if hosts]
    pairs = [hosts for hosts in simulation.whole().values() if len(hosts) == 2]
    for host in simulation.random.choice(pairs):
        simulation.fail(host.store_id, 30.0)
    assert simulation.without_copy()
    begin = simulation.now
    while simulation.short(had_copies):
        assert simulation.now - begin < 90
        simulation.step(REQUESTS_PER_S)


def test_single_losses_leave_every_pack_a_copy() -> None:
    figures = run()
    assert figures.num_settled > 200
    assert figures.num_windows == 0
    assert figures.num_exposed > figures.num_settled and figures.exposed_s < 5
    assert figures.unprotected_s < 30
    assert max(figures.max_over_mean_bytes) < 1.5
    assert figures.max_kept_per_pack == RULES.recent_copies
    assert figures.mean_copies_per_pack < 2.5
    assert figures.max_at_once <= RULES.max_replications
    assert figures.max_arriving <= RULES.max_replications_per_store
    assert figures.num_stale_relays == 0
    assert figures.rack_lost == 0, "many hosts at once, but of one failure domain"
    assert figures.double_loss_packs < 0.5


def test_single_copies_do_not_survive_losses() -> None:
    simulation = Simulation(7, 60, 10, 600, PolicyConfig(recent_s=300.0, recent_copies=1))
    for _ in range(BUILD_STEPS):
        simulation.step(REQUESTS_PER_S)
    for name in simulation.random.sample(_up(simulation), 6):
        simulation.fail(name, 30.0)
    assert simulation.without_copy()


def figures_of_one_seed() -> str:
    simulation = Simulation(3, 12, 3, 40, RULES)
    for _ in range(40):
        simulation.step(4.0)
    simulation.fail("store-004", 5.0)
    for _ in range(40):
        simulation.step(4.0)
    simulation.measure()
    return str(simulation.figures)


def test_simulation_is_independent_of_hash_seed() -> None:
    """In processes of their own: within one, all sets have the same order."""
    code = f"import sys; sys.path[:0] = {sys.path}; import {__name__} as it; print(it.figures_of_one_seed())"
    figures = [
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert figures[0] == figures[1] != b""
