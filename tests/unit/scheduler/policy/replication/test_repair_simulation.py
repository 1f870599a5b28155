"""Copies survive losses: hosts in racks, models with Zipf demand, hosts that fail and return at random."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from random import Random

from torchrelay.scheduler.policy.config import TICK_S, PolicyConfig
from torchrelay.scheduler.policy.effects import CopyCommand, RetainCommand
from torchrelay.scheduler.policy.inputs import CommandEnded, CommandOutcome, Copy, Input, StoreGone, StoreReported, Tick
from torchrelay.scheduler.policy.policy import Policy
from torchrelay.scheduler.policy.types import Model, PackCopy, StoreStatus

GB = 1 << 30
NUM_CHUNKS = 256
STEP_S = 0.5
BYTES_PER_S = 1.5e9  # at which each copy arrives
REQUESTS_PER_S = 3.6
RULES = PolicyConfig(recent_s=300.0)


@dataclass
class Host:
    store_id: str
    domain: str
    run: int = 1
    is_up: bool = True
    held: dict[str, float] = field(default_factory=dict)  # bytes that have arrived, by pack
    retained_packs: tuple[str, ...] = ()


class Simulation:
    """Hosts whose arenas hold all packs that come, in racks of equal size."""

    def __init__(self, seed: int, num_hosts: int, num_racks: int, num_models: int, config: PolicyConfig) -> None:
        self.random, self.config, self.now, ids = Random(seed), config, 1000.0, count()
        self.policy = Policy(config, lambda: f"{next(ids)}", self.now - 100)
        names = [f"store-{number:03}" for number in range(num_hosts)]
        self.hosts = {name: Host(name, f"rack-{rank % num_racks}") for rank, name in enumerate(names)}
        sizes = [int(GB * 2 ** self.random.uniform(-1, 3)) for _ in range(num_models)]
        models = [Model(f"model-{n}", f"v{n}", f"pack-{n}", size, 1024) for n, size in enumerate(sizes)]
        self.models = {model.pack_id: model for model in models}
        self.weights = [1 / (rank + 1) for rank in range(num_models)]
        self.num_rebuilds = 0
        self._protected: set[str] = set()
        self._returns: list[tuple[float, Host]] = []

    def pass_time(self, seconds: float, *, is_single_loss: bool = True) -> None:
        for _ in range(int(seconds / STEP_S)):
            self.step()
            assert not (is_single_loss and self.without_copy())

    def step(self) -> None:
        self.now += STEP_S
        for model in self.random.choices([*self.models.values()], self.weights, k=round(REQUESTS_PER_S * STEP_S)):
            self._request(model)
        for due in [due for due in self._returns if due[0] <= self.now]:
            self._returns.remove(due)
            due[1].is_up = True
        for host in self.up():
            for pack_id, num_bytes in host.held.items():
                host.held[pack_id] = min(num_bytes + STEP_S * BYTES_PER_S, self.models[pack_id].pack_bytes)
            self._apply(StoreReported(self._report(host), streamed=True))
        for _ in range(round(STEP_S / TICK_S)):  # a decision on all copies takes several
            self._apply(Tick())
        ordered = self.policy.state.transfers.ordered
        assert len(ordered) <= self.config.max_replications
        arriving = Counter(store_id for _, store_id in ordered)
        assert max(arriving.values(), default=0) <= self.config.max_replications_per_store
        domains = {pack_id: {host.domain for host in hosts} for pack_id, hosts in self.whole().items()}
        self._protected &= domains.keys()
        self._protected |= {pack_id for pack_id, names in domains.items() if len(names) >= self.config.recent_copies}

    def _report(self, host: Host) -> StoreStatus:
        copies = {}
        for pack_id, num_bytes in host.held.items():
            size = self.models[pack_id].pack_bytes
            num_verified, retained = int(num_bytes / size * NUM_CHUNKS), pack_id in host.retained_packs
            copies[pack_id] = PackCopy(pack_id, size, NUM_CHUNKS, num_verified, retained=retained)
        name = host.store_id
        return StoreStatus(name, f"{name} {host.run}", name, "", "", self.now, 1024 * GB, copies, host.domain)

    def _apply(self, input_: Input) -> None:
        effects = self.policy.apply(input_, self.now)
        self.num_rebuilds += sum(event.kind == "rebuild" for event in effects.events)
        for command in effects.commands:
            if isinstance(command, RetainCommand):
                self.hosts[command.store_id].retained_packs = command.pack_ids
            else:
                assert isinstance(command, CopyCommand) and self.hosts[command.hop.store_id].is_up
                self.hosts[command.hop.store_id].held.setdefault(command.model.pack_id, 0.0)
                self._apply(CommandEnded(Copy(command.model.pack_id, command.hop.store_id), CommandOutcome.ACCEPTED))

    def _request(self, model: Model) -> None:
        """Without any copy the model is loaded on the emptiest host."""
        self.policy.state.replication_state.recent_packs.note(model, self.now)
        if not any(model.pack_id in host.held for host in self.up()):
            emptiest = min(self.up(), key=lambda host: sum(self.models[each].pack_bytes for each in host.held))
            emptiest.held[model.pack_id] = 0.0

    def up(self) -> list[Host]:
        return [host for host in self.hosts.values() if host.is_up]

    def fail(self, host: Host, back_s: float, *, keeps_arena: bool = False) -> None:
        host.is_up, host.retained_packs = False, ()
        host.run += 1
        if not keeps_arena:
            host.held.clear()
        self._returns.append((self.now + back_s, host))
        self._apply(StoreGone(host.store_id))

    def whole(self) -> dict[str, list[Host]]:
        """The hosts with a whole copy, by pack that was used of late."""
        since, state = self.now - self.config.recent_s, self.policy.state.replication_state
        used = [use.model for use in state.recent_packs if use.last_used >= since]
        up = self.up()
        return {
            model.pack_id: [host for host in up if host.held.get(model.pack_id) == model.pack_bytes] for model in used
        }

    def short(self, pack_ids: Iterable[str]) -> list[str]:
        """Recently used packs among ``pack_ids`` that are in too few failure domains."""
        whole, num_copies = self.whole(), self.config.recent_copies
        return [
            pack_id
            for pack_id in pack_ids
            if pack_id in whole and len({host.domain for host in whole[pack_id]}) < num_copies
        ]

    def without_copy(self) -> list[str]:
        """Packs used of late that had all their copies once, and have none now."""
        whole = self.whole()
        return [pack_id for pack_id in self._protected if pack_id in whole and not whole[pack_id]]

    def pass_until_repaired(self, pack_ids: Iterable[str], within_s: float, *, is_single_loss: bool = True) -> None:
        begin, pack_ids = self.now, list(pack_ids)
        while self.short(pack_ids):
            assert self.now - begin < within_s
            self.pass_time(STEP_S, is_single_loss=is_single_loss)


def test_single_losses_leave_every_pack_a_copy() -> None:
    """Hosts and stores fail one after the other, each once the last loss is repaired; then two at once, then a rack."""
    simulation = Simulation(7, num_hosts=60, num_racks=10, num_models=600, config=RULES)
    simulation.pass_time(80.0)
    for number in range(8):
        restarts, num_rebuilds = number % 4 == 3, simulation.num_rebuilds
        had_copies = [pack_id for pack_id, hosts in simulation.whole().items() if hosts]
        host = simulation.random.choice(simulation.up())
        simulation.fail(host, 1.0 if restarts else simulation.random.uniform(10, 60), keeps_arena=restarts)
        assert restarts or simulation.short(had_copies), "nothing was lost"
        assert not simulation.without_copy()
        simulation.pass_until_repaired(had_copies, 30.0)
        assert (simulation.num_rebuilds == num_rebuilds) is restarts, "a store that comes back at once costs nothing"
        simulation.pass_time(5.0)
        kept = {
            host.store_id: sum(host.held[pack_id] for pack_id in host.retained_packs if pack_id in host.held)
            for host in simulation.up()
        }
        assert max(kept.values()) < 1.5 * sum(kept.values()) / len(kept)
        num_kept = Counter(pack_id for host in simulation.up() for pack_id in host.retained_packs)
        assert max(num_kept.values()) == RULES.recent_copies
    assert len(simulation.policy.state.replication_state.settled) > 200
    had_copies = [pack_id for pack_id, hosts in simulation.whole().items() if hosts]
    for host in simulation.random.choice([hosts for hosts in simulation.whole().values() if len(hosts) == 2]):
        simulation.fail(host, 30.0)
    assert simulation.without_copy()
    simulation.pass_until_repaired(had_copies, 90.0, is_single_loss=False)
    rack = simulation.up()[0].domain
    for host in simulation.up():
        if host.domain == rack:
            simulation.fail(host, 30.0)
    assert not simulation.without_copy(), "many hosts at once, but of one failure domain"


def test_single_copies_do_not_survive_losses() -> None:
    simulation = Simulation(7, 60, 10, 300, PolicyConfig(recent_s=300.0, recent_copies=1))
    simulation.pass_time(40.0)
    for host in simulation.random.sample(simulation.up(), 6):
        simulation.fail(host, 30.0)
    assert simulation.without_copy()
