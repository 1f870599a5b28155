"""Small scenarios for what traces do not show. Each has a figure, less is better."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.policy import Policy
from torchrelay.scheduler.policy.strategies import Strategies
from torchrelay.scheduler.policy.types import Role
from torchrelay.sim.fleets import CLUSTER_A, CLUSTER_B, twelve_models
from torchrelay.sim.plant import START_S, Plant
from torchrelay.sim.scenario import Fleet, Request, RequestOutcome
from torchrelay.sim.setup import one_copy_each
from torchrelay.sim.summary import percentile

_LATE_S = 60.0  # device seconds that a late request costs; the default of ``late_cost_s``
_TWO_SLOTS = replace(CLUSTER_B, num_hosts=1, groups=(1, 1))
_SMALL = tuple(model for model in twelve_models() if model.num_devices == 1)  # six models of 8B


@dataclass(frozen=True)
class Scenario:
    """``figure``: from all outcomes and the device seconds that were taken."""

    fleet: Fleet
    num_models: int
    requests: Sequence[Request]
    figure: Callable[[Sequence[RequestOutcome], float], float]
    slowness: Mapping[str, float] = field(default_factory=dict)
    tpot_target_s: float = _SMALL[0].tpot_target_s
    preferred_roles: Mapping[str, Role] = field(default_factory=dict)
    num_kept: int = 0  # of the models, which have a minimum of one instance

    def run(self, strategies: Strategies) -> float:
        ids = count()
        models = [
            replace(model, tpot_target_s=self.tpot_target_s, min_instances=int(number < self.num_kept))
            for number, model in enumerate(_SMALL[: self.num_models])
        ]
        policy = Policy(PolicyConfig(), lambda: f"instance-{next(ids)}", START_S, strategies)
        held = one_copy_each(self.fleet, models)
        plant = Plant(policy, self.fleet, models, held, self.slowness, self.preferred_roles)
        outcomes = plant.run(self.requests, given_up_s=120.0)
        return self.figure(outcomes, plant.at_last_arrival.device_s)


def _stream(
    name: str, seed: int, model: int, begin: float, end: float, per_s: float, tokens: tuple[int, int], **fields: object
) -> list[Request]:
    """Poisson arrivals of requests with ``tokens`` in the prompt and in the answer."""
    random_ = random.Random(f"{name} {seed}")
    requests: list[Request] = []
    at = begin
    while (at := at + random_.expovariate(per_s)) < end:
        requests.append(
            replace(Request(f"{name}-{len(requests)}", at, _SMALL[model].name, *tokens), **fields)  # type: ignore[arg-type]
        )
    return requests


def _merged(*streams: Sequence[Request]) -> list[Request]:
    return sorted((request for stream in streams for request in stream), key=lambda request: request.arrives_at)


def _p95_s(outcomes: Sequence[RequestOutcome], prefix: str = "") -> float:
    """P95 of the time to the first token of requests whose names begin with ``prefix``; at most 120 s each."""
    return percentile((min(each.ttft_s, 120.0) for each in outcomes if each.request.request_id.startswith(prefix)), 95)


def _mean_s(outcomes: Sequence[RequestOutcome], prefix: str = "") -> float:
    """Mean time to the first token of requests whose names begin with ``prefix``; at most 120 s each."""
    times_s = [min(each.ttft_s, 120.0) for each in outcomes if each.request.request_id.startswith(prefix)]
    return sum(times_s) / len(times_s)


def _cost(outcomes: Sequence[RequestOutcome], device_s: float) -> float:
    """Device seconds, and the cost of late requests."""
    by_name = {model.name: model for model in _SMALL}
    return device_s + _LATE_S * sum(not each.attains(by_name[each.request.model]) for each in outcomes)


def _two_tenants(seed: int) -> Scenario:
    """P95 of a tenant with few requests beside a tenant with bursts, of the same model."""
    light = _stream("light", seed, 0, 0, 120, 0.5, (500, 50), tenant="light")
    bursts = [_stream(f"heavy{at}", seed, 0, at, at + 4, 40, (2000, 50), tenant="heavy") for at in range(10, 120, 20)]
    return Scenario(_TWO_SLOTS, 1, _merged(light, *bursts), lambda outcomes, _: _p95_s(outcomes, "light"))


def _slow_worker(seed: int) -> Scenario:
    """P95 if the steps of one of four workers take four times what it reports."""
    fleet = replace(CLUSTER_B, num_hosts=2, groups=(1, 1))
    requests = _stream("request", seed, 0, 0, 120, 16, (1500, 60))
    return Scenario(fleet, 1, requests, lambda outcomes, _: _p95_s(outcomes), {"worker-0-0": 4.0})


def _little_ram(seed: int) -> Scenario:
    """Cost if the RAM of the host holds 60% of the packs."""
    packs_bytes = sum(model.pack_bytes for model in _SMALL)
    fleet = replace(CLUSTER_B, num_hosts=1, groups=(1, 1), arena_bytes=int(0.6 * packs_bytes))
    rates = (0.5, 0.3, 0.1, 0.05, 0.05, 0.02)
    streams = [_stream(f"m{number}", seed, number, 0, 150, rate, (800, 40)) for number, rate in enumerate(rates)]
    return Scenario(fleet, 6, _merged(*streams), _cost)


def _shared_prefixes(seed: int) -> Scenario:
    """P95 of prompts of which three quarters are one of twelve shared beginnings, on four workers."""
    streams = [
        _stream(f"p{number}", seed, 0, 0, 60, 2.5, (4000, 20), prefix=f"prefix {number}", num_prefix_tokens=3008)
        for number in range(12)
    ]
    fleet = replace(CLUSTER_A, num_hosts=2, groups=(1, 1))
    return Scenario(fleet, 1, _merged(*streams), lambda outcomes, _: _p95_s(outcomes))


def _flapping(seed: int) -> Scenario:
    """Cost of a model with three requests each 75 s, which is longer than its idle timeout."""
    random_ = random.Random(seed)
    requests = [
        Request(f"{turn}-{number}", 75.0 * turn + random_.random(), _SMALL[0].name, 600, 40)
        for turn in range(16)
        for number in range(3)
    ]
    return Scenario(_TWO_SLOTS, 1, _merged(requests), _cost)


def _ebb(seed: int) -> Scenario:
    """Device seconds of a model whose burst needs three instances, and whose few requests afterwards need one."""
    burst, ebb = _stream("burst", seed, 0, 0, 30, 24, (1500, 60)), _stream("ebb", seed, 0, 30, 330, 1, (500, 40))
    fleet = replace(CLUSTER_B, num_hosts=2, groups=(1, 1))
    return Scenario(fleet, 1, _merged(burst, ebb), lambda _, device_s: device_s)


def _long_answers(seed: int) -> Scenario:
    """Mean time per token, over a target of 15 ms, of answers of 800 tokens; no prompt has to wait."""
    requests = _stream("answer", seed, 0, 0, 60, 10, (200, 800))
    fleet = replace(CLUSTER_B, num_hosts=2, groups=(1, 1, 1, 1))
    target_s = 0.015

    def figure(outcomes: Sequence[RequestOutcome], device_s: float) -> float:
        return sum(each.tpot_s for each in outcomes) / len(outcomes) / target_s

    return Scenario(fleet, 1, requests, figure, tpot_target_s=target_s)


def _contended_loads(seed: int) -> Scenario:
    """P95 of a model that needs a second instance, a while after all models loaded at the same time."""
    fleet = replace(CLUSTER_B, num_hosts=2, groups=(1, 1, 1, 1), nic_bytes_per_s=2e9)
    at_once = [Request(f"first-{number}", 0.0, model.name, 500, 20) for number, model in enumerate(_SMALL)]
    later = _stream("later", seed, 0, 40, 100, 16, (1500, 40))
    return Scenario(fleet, 6, _merged(at_once, later), lambda outcomes, _: _p95_s(outcomes, "later"))


def _loads_at_once(seed: int) -> Scenario:
    """Mean time to the first token of requests for six models that load at the same time over one slow link."""
    fleet = replace(CLUSTER_B, num_hosts=2, groups=(1, 1, 1), nic_bytes_per_s=2e9)
    order = random.Random(seed).sample(range(len(_SMALL)), len(_SMALL))
    requests = [Request(f"{number}", 0.2 * place, _SMALL[number].name, 500, 20) for place, number in enumerate(order)]
    return Scenario(fleet, 6, requests, lambda outcomes, _: _mean_s(outcomes))


def _second_model(seed: int) -> Scenario:
    """P95 of a model that is called now and then, while another of the same tenant has grown into all slots."""
    busy = _stream("busy", seed, 0, 0, 120, 14, (1500, 60))
    rare = [Request(f"rare-{number}", 15.0 + 20 * number, _SMALL[1].name, 500, 20) for number in range(6)]
    return Scenario(_TWO_SLOTS, 2, _merged(busy, rare), lambda outcomes, _: _p95_s(outcomes, "rare"))


def _beside_idle(seed: int) -> Scenario:
    """P95 of a burst for a model with an instance, while idle models hold the other slots."""
    fleet = replace(CLUSTER_B, num_hosts=2, groups=(1, 1))
    idle = [Request(f"idle-{number}", 1.0 + number, _SMALL[number].name, 500, 20) for number in range(1, 4)]
    own = _stream("own", seed, 0, 0, 50, 1, (500, 20))
    burst = _stream("burst", seed, 0, 20, 50, 20, (1500, 40))
    return Scenario(fleet, 4, _merged(idle, own, burst), lambda outcomes, _: _p95_s(outcomes, "burst"))


def _lone_tenant(seed: int) -> Scenario:
    """P95 of single short requests to a fourth model, while another tenant floods three models on two slots."""
    floods = [_stream(f"flood{number}", seed, number, 0, 150, 3, (500, 500), tenant="flood") for number in range(3)]
    lone = [Request(f"lone-{number}", 20.0 + 18 * number, _SMALL[3].name, 100, 20) for number in range(7)]
    return Scenario(_TWO_SLOTS, 4, _merged(*floods, lone), lambda outcomes, _: _p95_s(outcomes, "lone"))


def _roles_apart(seed: int) -> Scenario:
    """Cost of long prompts and long answers in turn, on eight slots of which every second one prefers to decode."""
    fleet = replace(CLUSTER_B, num_hosts=2, groups=(1, 1, 1, 1))
    apart = {f"worker-{host}-{place}": tuple(Role)[place % 2] for host in range(2) for place in range(4)}
    streams = [
        _stream(f"prompts{at}", seed, 0, at, at + 20, 16, (4000, 10))
        + _stream(f"answers{at}", seed, 0, at + 20, at + 40, 16, (100, 800))
        for at in range(0, 120, 40)
    ]
    return Scenario(fleet, 1, _merged(*streams), _cost, preferred_roles=apart)


def _beside_minimum(seed: int) -> Scenario:
    """Mean time to the first token of a starving model, if a model's minimum and a busy model hold both slots."""
    kept, busy = _stream("kept", seed, 0, 0, 120, 0.2, (500, 40)), _stream("busy", seed, 1, 0, 120, 6, (1500, 60))
    starving = _stream("starving", seed, 2, 10, 120, 0.1, (500, 40))
    return Scenario(
        _TWO_SLOTS, 3, _merged(kept, busy, starving), lambda outcomes, _: _mean_s(outcomes, "starving"), num_kept=1
    )


def _crowded_arena(seed: int) -> Scenario:
    """Cost if two busy models have all four slots of a host whose arena holds two packs, and two others are called."""
    fleet = replace(CLUSTER_B, num_hosts=1, groups=(1, 1, 1, 1), arena_bytes=int(2.2 * _SMALL[0].pack_bytes))
    busy = [_stream(f"busy{number}", seed, number, 0, 120, 12, (1500, 60)) for number in range(2)]
    rare = [_stream(f"rare{number}", seed, number, 10, 120, 0.1, (500, 40)) for number in (2, 3)]
    return Scenario(fleet, 4, _merged(*busy, *rare), _cost)


SCENARIOS: Mapping[str, Callable[[int], Scenario]] = {
    "two_tenants": _two_tenants,
    "slow_worker": _slow_worker,
    "little_ram": _little_ram,
    "shared_prefixes": _shared_prefixes,
    "flapping": _flapping,
    "ebb": _ebb,
    "long_answers": _long_answers,
    "contended_loads": _contended_loads,
    "loads_at_once": _loads_at_once,
    "second_model": _second_model,
    "beside_idle": _beside_idle,
    "lone_tenant": _lone_tenant,
    "roles_apart": _roles_apart,
    "beside_minimum": _beside_minimum,
    "crowded_arena": _crowded_arena,
}
