"""Changes of a platform's settings, each with the command that makes it and the workload that it makes of another.

``CHANGES`` is the table: each function gives the changes of its kind that are possible for a workload.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from torchrelay.sim.advice.workload import Workload

_MOST_MODELS = 3  # that a kind of change tries
_MIB = 1 << 20


@dataclass(frozen=True)
class Change:
    """``estimate``: what was estimated and not measured; empty: nothing."""

    title: str
    command: str
    workload: Workload
    estimate: str = ""


# From the workload, and the number of late first tokens of each model under the settings as they are.
Kind: TypeAlias = Callable[[Workload, Mapping[str, int]], Iterator[Change]]


def changes_of(workload: Workload, late: Mapping[str, int]) -> list[Change]:
    return [change for kind in CHANGES for change in kind(workload, late)]


def _hosts(workload: Workload, late: Mapping[str, int]) -> Iterator[Change]:
    number = workload.fleet.num_hosts
    if number > 1:
        command = "stop torchrelay join on a host (Ctrl-C)"
        yield Change("one host fewer", command, _with_fleet(workload, num_hosts=number - 1))
    yield Change(
        "one more host",
        "torchrelay join join.toml",
        _with_fleet(workload, num_hosts=number + 1),
        "a host as the others are",
    )


def _slots(workload: Workload, late: Mapping[str, int]) -> Iterator[Change]:
    groups = workload.fleet.groups
    up = "torchrelay up --prefill-workers 0 --decode-workers 0 --both-workers"
    command = up if workload.fleet.num_hosts == 1 else "torchrelay join join.toml --workers"
    needed = {model.num_devices for model in workload.models}
    spare = [size for size, number in Counter(groups).items() if number > 1 or size not in needed]
    if spare and len(groups) > 1:
        fewer = list(groups)
        fewer.remove(min(spare))
        yield Change(
            "one slot fewer per host",
            f"{command} {len(fewer)}",
            _with_fleet(workload, groups=tuple(fewer)),
        )
    added = Counter(groups).most_common(1)[0][0]
    yield Change(
        "one more slot per host",
        f"{command} {len(groups) + 1}",
        _with_fleet(workload, groups=(*groups, added)),
        "devices as the others are",
    )


def _minimums(workload: Workload, late: Mapping[str, int]) -> Iterator[Change]:
    """A minimum for the models with most late first tokens; none for models that always have one."""
    without = [model for model in workload.models if not model.min_instances and late.get(model.name)]
    for model in sorted(without, key=lambda model: (-late[model.name], model.name))[:_MOST_MODELS]:
        yield _minimum(workload, model.name, 1)
    constant = [model for model in workload.models if model.min_instances and model.name not in workload.scheduled]
    for model in constant[:_MOST_MODELS]:
        yield _minimum(workload, model.name, 0)


def _minimum(workload: Workload, name: str, number: int) -> Change:
    title = f"{'a' if number else 'no'} minimum for {name}"
    command = f"torchrelay models set {name} --min-instances {number}"
    return Change(title, command, workload.with_model(name, min_instances=number))


def _idle_times(workload: Workload, late: Mapping[str, int]) -> Iterator[Change]:
    """Where idle timeouts are computed, the cost of a late request that they are computed from, if it is known."""
    config = workload.config
    if not config.idle_timeout_s and not workload.knows_late_cost:
        return
    for factor, how in ((0.5, "shorter"), (2.0, "longer")):
        if config.idle_timeout_s:
            idle_s = config.idle_timeout_s * factor
            command, changed = f"torchrelay up --idle-timeout-s {idle_s:g}", replace(config, idle_timeout_s=idle_s)
        else:
            late_cost_s = config.late_cost_s * factor
            command = f"TORCHRELAY_LATE_COST_S={late_cost_s:g} torchrelay up"
            changed = replace(config, late_cost_s=late_cost_s)
        yield Change(f"{how} idle timeouts", command, replace(workload, config=changed))


def _int8(workload: Workload, late: Mapping[str, int]) -> Iterator[Change]:
    """Half the bytes for the largest models."""
    called = {request.model for request in workload.requests}
    wide = [model for model in workload.models if model.name in called - workload.quantized]
    for model in sorted(wide, key=lambda model: (-model.pack_bytes, model.name))[:2]:
        decode = replace(model.latency.decode, base_s=model.latency.decode.base_s / 2)
        changed = workload.with_model(
            model.name, pack_bytes=model.pack_bytes // 2, latency=replace(model.latency, decode=decode)
        )
        estimate = "half the bytes and base time of a decode step; answers differ"
        command = f"torchrelay upload DIR --name {model.name.partition('/')[2] or model.name} --quantize int8"
        yield Change(f"{model.name} in int8", command, changed, estimate)


def _memory(workload: Workload, late: Mapping[str, int]) -> Iterator[Change]:
    """More host memory, if the hosts do not hold all packs."""
    arena_bytes = workload.fleet.arena_bytes
    if sum(model.pack_bytes for model in workload.models) > arena_bytes:
        command = f"torchrelay up --arena-mb {2 * arena_bytes // _MIB} (the same for join)"
        yield Change("twice the host memory", command, _with_fleet(workload, arena_bytes=2 * arena_bytes))


def _with_fleet(workload: Workload, **changes: object) -> Workload:
    return replace(workload, fleet=replace(workload.fleet, **changes))  # type: ignore[arg-type]


CHANGES: Final[tuple[Kind, ...]] = (_hosts, _slots, _minimums, _idle_times, _int8, _memory)
