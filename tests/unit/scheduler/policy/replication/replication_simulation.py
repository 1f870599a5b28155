"""The replicator in a simulated cluster: demand, wakes, hosts that fail and return, and what becomes of the copies."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations, count

from tests.unit.scheduler.policy.replication.simulated_hosts import GB, Host, transfer
from torchrelay.scheduler.policy.config import TICK_S, PolicyConfig
from torchrelay.scheduler.policy.effects import CopyCommand, RetainCommand
from torchrelay.scheduler.policy.inputs import CopyAccepted, CopyFailed, Input, StoreGone, StoreReported, Tick
from torchrelay.scheduler.policy.policy import Policy
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import REMOTE, Model

STEP_S = 0.5
IDLE_S = 20.0  # an instance holds its copy so long after its last request


@dataclass
class Figures:
    """The measurements of a run."""

    num_rebuilds: int = 0
    unprotected_s: float = 0.0  # longest time in which a pack with a copy had fewer than it should, after one loss
    exposed_s: float = 0.0  # longest time from a used pack's first copy to its second, in another domain
    num_exposed: int = 0  # packs that had one copy alone for a step at least
    num_windows: int = 0  # moments at which a used pack that had two copies has none in RAM, under single losses
    max_over_mean_bytes: list[float] = field(default_factory=list)  # of kept copies, over the hosts that are up
    max_kept_per_pack: int = 0
    mean_copies_per_pack: float = 0.0
    max_at_once: int = 0
    max_arriving: int = 0
    num_settled: int = 0
    num_stale_relays: int = 0  # that count on their links, though nothing arrives by them
    double_loss_packs: float = 0.0  # recent packs that lose their last copy, mean over all pairs of hosts
    rack_lost: int = 0  # recent packs that lost their last copy with a whole rack


class Simulation:
    """``racks`` failure domains of equal size."""

    def __init__(self, seed: int, num_hosts: int, racks: int, num_models: int, config: PolicyConfig) -> None:
        self.random = random.Random(seed)
        self.config, self.now, self.figures = config, 1000.0, Figures()
        names = [f"store-{number:03}" for number in range(num_hosts)]
        self.hosts = {name: Host(name, f"rack-{rank % racks}", 64 * GB) for rank, name in enumerate(names)}
        self.models = [self._model(number) for number in range(num_models)]
        self.weights = [1 / (rank + 1) for rank in range(num_models)]
        ids = count()
        self.policy = Policy(config, lambda: f"{next(ids)}", self.now - 100)
        self.protected: set[str] = set()  # used packs that have been in as many domains as they should be
        self._single_since: dict[str, float] = {}  # used packs that have copies in one domain, and never had more
        self._returns: list[tuple[float, str, bool]] = []

    @property
    def state(self) -> State:
        return self.policy.state

    def _model(self, number: int) -> Model:
        num_bytes = int(GB * 2 ** self.random.uniform(-1, 3))
        return Model(f"model-{number}", f"v{number}", f"pack-{number}", num_bytes, 1024)

    # One step

    def step(self, requests: float) -> None:
        self.now += STEP_S
        for model in self.random.choices(self.models, self.weights, k=round(requests * STEP_S)):
            self._request(model)
        transfer(self.hosts, STEP_S)
        self._bring_back()
        for host in self.hosts.values():
            if host.up:
                self._apply(StoreReported(replace(host.report(self.now), seen_at=self.now), streamed=True))
        for _ in range(round(STEP_S / TICK_S)):  # a decision on all copies takes several
            self._apply(Tick())
        self._watch_bounds()
        self._watch_copies()

    def _apply(self, input_: Input) -> None:
        effects = self.policy.apply(input_, self.now)
        kinds = Counter(event.kind for event in effects.events)
        self.figures.num_rebuilds += kinds["rebuild"]
        for command in effects.commands:
            match command:
                case RetainCommand():
                    self.hosts[command.store_id].retained_packs = command.pack_ids
                    self.hosts[command.store_id].touch()
                case CopyCommand():
                    self._copy(command)
                case _:
                    raise AssertionError(f"nothing here asks for {command}")

    def _copy(self, command: CopyCommand) -> None:
        pack_id, name, sources = command.model.pack_id, command.hop.store_id, command.hop.sources
        host = self.hosts[name]
        if not host.up:
            self._apply(CopyFailed(pack_id, name, "nobody listens"))
        elif pack_id in host.held or host.reserve(
            pack_id, command.model.pack_bytes, sources, self.now, command.keep_retained
        ):
            self._apply(CopyAccepted(pack_id, name))
        else:
            self._apply(CopyFailed(pack_id, name, "the arena is full"))

    def _request(self, model: Model) -> None:
        """A request keeps an instance alive, or wakes the model: where a copy is, else on the emptiest host."""
        self.state.replication_state.recent_packs.note(model, self.now)
        up = [host for host in self.hosts.values() if host.up]
        holders = [host for host in up if model.pack_id in host.held]
        if holders:
            held = max((host.held[model.pack_id] for host in holders), key=lambda held: (held.pinned_until, held.have))
            held.pinned_until, held.last_used = self.now + IDLE_S, self.now
            for host in holders:
                host.touch()
            return
        host = min(up, key=lambda host: sum(held.num_bytes for held in host.held.values()))
        host.reserve(model.pack_id, model.pack_bytes, (REMOTE,), self.now, keep_retained=False, pin_s=IDLE_S)

    # Failures

    def fail(self, name: str, back_s: float, keeps_arena: bool = False) -> None:
        host = self.hosts[name]
        host.up = False
        host.run += 1
        if not keeps_arena:
            host.held.clear()
        host.retained_packs = ()
        host.touch()
        self._returns.append((self.now + back_s, name, keeps_arena))
        self._apply(StoreGone(name))

    def _bring_back(self) -> None:
        for due in [due for due in self._returns if due[0] <= self.now]:
            self._returns.remove(due)
            self.hosts[due[1]].up = True

    # What is asked of the cluster

    def whole(self) -> dict[str, list[Host]]:
        """The hosts with a whole copy, by pack that was used of late."""
        since = self.now - self.config.recent_s
        whole: dict[str, list[Host]] = {
            use.model.pack_id: [] for use in self.state.replication_state.recent_packs if use.last_used >= since
        }
        for host in self.hosts.values():
            for pack_id, held in host.held.items():
                if host.up and held.whole and pack_id in whole:
                    whole[pack_id].append(host)
        return whole

    def short(self, pack_ids: Iterable[str]) -> list[str]:
        """Recently used packs among ``pack_ids`` that are in too few failure domains."""
        whole = self.whole()
        return [
            pack_id
            for pack_id in pack_ids
            if pack_id in whole and len({host.domain for host in whole[pack_id]}) < self.config.recent_copies
        ]

    def without_copy(self) -> list[str]:
        """Packs used of late that had all their copies once, and have none now."""
        whole = self.whole()
        return [pack_id for pack_id in self.protected if pack_id in whole and not whole[pack_id]]

    def kept_bytes(self) -> Counter[str]:
        """Bytes of retained copies, by host."""
        kept: Counter[str] = Counter({name: 0 for name, host in self.hosts.items() if host.up})
        for name, host in self.hosts.items():
            for pack_id in host.retained_packs:
                if host.up and pack_id in host.held:
                    kept[name] += host.held[pack_id].num_bytes
        return kept

    def _watch_bounds(self) -> None:
        figures, under_way = self.figures, self.state.transfers.ordered
        figures.max_at_once = max(figures.max_at_once, len(under_way))
        arriving = Counter(name for _, name in under_way)
        figures.max_arriving = max([figures.max_arriving, *arriving.values()])

    def _watch_copies(self) -> None:
        whole = self.whole()
        domains = {pack_id: {host.domain for host in hosts} for pack_id, hosts in whole.items()}
        self.protected &= whole.keys()
        self.protected |= {pack_id for pack_id, names in domains.items() if len(names) >= self.config.recent_copies}
        single = {pack_id for pack_id, names in domains.items() if names} - self.protected
        self.figures.num_exposed += len(single - self._single_since.keys())
        self._single_since = {pack_id: self._single_since.get(pack_id, self.now) for pack_id in single}
        longest = max((self.now - since for since in self._single_since.values()), default=0.0)
        self.figures.exposed_s = max(self.figures.exposed_s, longest)

    def measure(self) -> None:
        """Takes the figures of a moment in which nothing is being rebuilt."""
        transfers = {transfer.key for transfer in self.state.transfers.with_rates()}
        arriving = {
            (pack_id, name)
            for name, host in self.hosts.items()
            for pack_id, held in host.held.items()
            if not held.whole
        }
        self.figures.num_stale_relays += len(transfers - arriving)
        figures, settled = self.figures, self.state.replication_state.settled
        kept = self.kept_bytes()
        figures.max_over_mean_bytes.append(max(kept.values()) / (sum(kept.values()) / len(kept)))
        retained_packs = Counter(pack_id for host in self.hosts.values() if host.up for pack_id in host.retained_packs)
        figures.max_kept_per_pack = max(figures.max_kept_per_pack, *retained_packs.values())
        copies = Counter(pack_id for host in self.hosts.values() if host.up for pack_id in host.held)
        figures.mean_copies_per_pack = sum(copies.values()) / len(copies)
        figures.num_settled = len(settled)
        pairs: Counter[tuple[str, ...]] = Counter()
        for hosts in self.whole().values():
            places = tuple(sorted(host.store_id for host in hosts))
            if len(places) == 2:
                pairs[places] += 1
        num_pairs = sum(1 for _ in combinations(kept, 2))
        figures.double_loss_packs = sum(pairs.values()) / num_pairs
