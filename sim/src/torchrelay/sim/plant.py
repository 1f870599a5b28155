"""The simulated cluster: a gateway, stores and workers that execute a policy's commands and report to it.

The policy is the scheduler's own, with its own strategies or a rival's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from torchrelay.scheduler.policy import effects
from torchrelay.scheduler.policy.types import InstancePhase, Model, Role
from torchrelay.sim.events import EventQueue
from torchrelay.sim.gateway import SimulatedGateway
from torchrelay.sim.scenario import BLOCK_TOKENS, Fleet, Request, RequestOutcome, ServedModel
from torchrelay.sim.scheduler import RPC_S, SimulatedPolicy, SimulatedScheduler
from torchrelay.sim.spent import Meter, Spent
from torchrelay.sim.stores import SimulatedStores
from torchrelay.sim.timeline import Sample
from torchrelay.sim.workers import SimulatedWorkers

START_S = 1000.0  # when a simulation begins
_REPORT_EVERY_S = 1.0
_BUSY_REST_S, _IDLE_REST_S = 0.25, 1.0  # of a coarse simulation between ticks, while no request waits
GIVEN_UP_S = 3600.0  # after the last arrival


class Plant:
    """Owner of the simulated cluster. ``held``: packs in a host's RAM at the start, by the host's number. ``slowness``:
    how many times longer than predicted the steps of a worker take. ``preferred_roles``: of workers that are set apart.
    ``is_coarse``: the policy ticks at its own times only while requests wait, and rarely otherwise, which takes a
    fraction of the time.
    """

    def __init__(
        self,
        policy: SimulatedPolicy,
        fleet: Fleet,
        models: Iterable[ServedModel],
        held: Mapping[int, Sequence[str]] | None = None,
        slowness: Mapping[str, float] | None = None,
        preferred_roles: Mapping[str, Role] | None = None,
        *,
        is_coarse: bool = False,
    ) -> None:
        self.events = EventQueue(now=START_S)
        self.policy, self.fleet, self._is_coarse = policy, fleet, is_coarse
        self.served = {model.name: model for model in models}
        self.models = {model.name: policy_model(model) for model in self.served.values()}
        self._meter = Meter(self.events)
        self._scheduler = SimulatedScheduler(policy, self.events, self._carry_out, self._rest_s)
        self._stores = SimulatedStores(self.events, fleet, self.served, self._meter, self._scheduler)
        self._workers = SimulatedWorkers(
            self.events,
            fleet,
            self.served,
            self._meter,
            self._scheduler,
            self._stores.of,
            slowness or {},
            preferred_roles or {},
        )
        self._gateway = SimulatedGateway(self.events, fleet, self.served, self.models, self._scheduler, self._workers)
        self.workers, self.outcomes = self._workers.of, self._gateway.outcomes
        self.at_last_arrival = Spent()  # from the first request on
        self.samples: list[Sample] = []  # one per second, from the first request on
        self._begin = math.inf
        for number, pack_ids in (held or {}).items():
            self._stores.hold(self._stores.of[f"store-{number}"], pack_ids)

    def run(
        self,
        requests: Iterable[Request],
        settle_s: float = 5.0,
        *,
        warm_up_s: float = 0.0,
        given_up_s: float = GIVEN_UP_S,
    ) -> list[RequestOutcome]:
        """Simulates from the cluster's start until the last request has ended, at most ``given_up_s`` after the last
        arrival. Requests, in order of arrival, come after ``settle_s``. Of the first ``warm_up_s`` of arrivals neither
        spending nor outcomes count.
        """
        self._gateway.connect()
        self._report_all()
        self.events.run(self.events.now + settle_s)
        self._begin, spent = self.events.now, self.spent_now()
        counted_from, is_counted = self._begin + warm_up_s, not warm_up_s
        for request in requests:
            if not is_counted and request.arrives_at >= warm_up_s:
                self.events.run(counted_from)
                spent, is_counted = self.spent_now(), True
            self.events.run(self._begin + request.arrives_at)
            self._gateway.arrive(request)
        last = self.events.now
        self.at_last_arrival = self.spent_now().since(spent)
        while self._gateway.is_busy and self.events.now <= last + given_up_s:
            self.events.run(self.events.now + 1.0)
        return [outcome for outcome in self.outcomes if outcome.arrived_at >= counted_from]

    def fail_host(self, number: int, away_s: float, *, is_noticed: bool = True) -> None:
        """Ends all processes of a host, whose RAM is lost, and starts them again after ``away_s``. ``is_noticed``: the
        scheduler learns of it at once, and not by their silence.
        """
        store = self._stores.of[f"store-{number}"]
        workers = [worker for worker in self.workers.values() if worker.store is store]
        self._stores.fail(store, is_noticed=is_noticed)
        for worker in workers:
            self._workers.fail(worker, is_noticed=is_noticed)
        self.events.after(away_s, partial(self._stores.start, store))
        for worker in workers:
            self.events.after(away_s, partial(self._workers.start, worker))

    def spent_now(self) -> Spent:
        """Spending until now, with slots that are still held."""
        return self._meter.until_now(self._workers.held_device_s)

    def _rest_s(self) -> float:
        if not self._is_coarse or self._gateway.num_waiting:
            return 0.0
        return _BUSY_REST_S if self._gateway.is_busy else _IDLE_REST_S

    def _carry_out(self, caused: effects.Effects) -> None:
        for command in caused.commands:
            match command:
                case effects.LoadCommand():
                    self.events.after(RPC_S, partial(self._load, command))
                case effects.UnloadCommand():
                    self.events.after(RPC_S, partial(self._workers.unload, command))
                case effects.SetRolesCommand():
                    self.events.after(RPC_S, partial(self._workers.set_roles, command))
                case effects.CopyCommand():
                    self.events.after(RPC_S, partial(self._stores.copy, command))
                case effects.RerouteCommand():
                    self.events.after(RPC_S, partial(self._stores.reroute, command))
                case effects.RetainCommand():
                    self._stores.retain(command)
                case effects.DisconnectCommand():
                    pass
        for answer in caused.answers:
            self._gateway.answered(answer)

    def _load(self, command: effects.LoadCommand) -> None:
        for hop in command.hops:
            if self._stores.of[hop.store_id].is_up:
                self._stores.relay(command.model, hop, is_idle=not hop.urgent)
            for order in hop.loads:
                self._workers.load(command.model, order)

    def _report_all(self) -> None:
        self._stores.report_all()
        self._workers.report_all()
        if self.events.now >= self._begin:
            phase, num_slots, gateway = InstancePhase, self._workers.num_slots, self._gateway
            slots = num_slots(phase.LOADING), num_slots(phase.READY), num_slots(phase.DRAINING)
            requests = gateway.num_waiting, gateway.num_decoding
            self.samples.append(Sample(self.events.now - self._begin, *slots, *requests))
        self.events.after(_REPORT_EVERY_S, self._report_all)


def policy_model(served: ServedModel) -> Model:
    """The model as the policy knows it."""
    return Model(
        name=served.name,
        version_id=f"version of {served.name}",
        pack_id=served.name,
        pack_bytes=served.pack_bytes,
        kv_bytes_per_token=served.kv_bytes_per_token,
        num_devices=served.num_devices,
        min_instances=served.min_instances,
        idle_timeout_s=served.idle_timeout_s,
        max_instances=served.max_instances,
        routing_block_tokens=BLOCK_TOKENS,
    )
