"""Views of the cluster and its transfers, for the CLI and the gateways."""

from __future__ import annotations

import math
from collections import Counter

from torchrelay.common.latency.bottleneck import ADVICE
from torchrelay.common.quantities import format_count
from torchrelay.control.v1 import scheduler_pb2
from torchrelay.control.v1.reports_pb2 import StoreReport, WorkerReport
from torchrelay.control.v1.scheduler_pb2 import RelaySource, RelayView
from torchrelay.scheduler.policy.autoscaling.minimums import Minimum
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.handlers.views import newest_version
from torchrelay.scheduler.policy.relay.transfers import Transfer
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import Pool
from torchrelay.scheduler.service import converters
from torchrelay.scheduler.service.controller import Controller

_EVERY_S = 0.1
_MANY_PEERS = 500  # a view of so many takes 3 ms to build: from here on all watchers share it for a second
_MANY_EVERY_S = 1.0
_SHARED_S = 0.95  # less than ``_MANY_EVERY_S``, as timers may fire early


class ClusterViews:
    """The views of all watchers, of which none asks more often than every ``every_s``."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._changed = controller.watch()  # since the last view was built
        self._view, self._built_at = scheduler_pb2.ClusterView(), -math.inf

    @property
    def every_s(self) -> float:
        return _EVERY_S if len(self._controller.reports) < _MANY_PEERS else _MANY_EVERY_S

    def latest(self) -> tuple[scheduler_pb2.ClusterView, bool]:
        """The view, and whether it shows the last change."""
        now = self._controller.clock.now()
        if self.every_s == _EVERY_S or now - self._built_at >= _SHARED_S:
            self._changed.clear()
            self._view, self._built_at = cluster_view(self._controller), now
        return self._view, not self._changed.is_set()


def cluster_view(controller: Controller) -> scheduler_pb2.ClusterView:
    """The last reports as received; instances and demand as the scheduler counts them."""
    state, now = controller.policy.state, controller.clock.now()
    waiting = Counter(admission.model for admission in state.queues)
    running = Counter(attempt.admission.model for attempt in state.attempts.attempts())
    reports = [report for peer, report in controller.reports.items() if controller.is_present(peer)]
    return scheduler_pb2.ClusterView(
        epoch=controller.epoch.value,
        workers=[report for report in reports if isinstance(report, WorkerReport)],
        stores=[report for report in reports if isinstance(report, StoreReport)],
        instances=[_instance_view(state, instance, now) for instance in state.instances],
        demand=[
            scheduler_pb2.ModelDemand(model=name, num_waiting=waiting[name], num_running=running[name])
            for name in sorted(waiting.keys() | running.keys())
        ],
        largest_slot_bytes=state.membership.sizes.largest_weights_bytes,
        slot_bytes={
            report.worker_id: _slot_bytes(state, report) for report in reports if isinstance(report, WorkerReport)
        },
        relays=relay_views(state, now),
        versions=_version_views(state),
        minimums=_minimum_views(state, now),
        pools=[_pool_view(state, pool) for pool in state.pool_targets if pool.role is None],
    )


def bottleneck_line(controller: Controller, model: str) -> list[scheduler_pb2.WorthLine]:
    """A line that names what holds the instances of a model back, and what to do; none before their first step."""
    version_id = newest_version(controller.policy.state, model)
    names = Counter(
        report.profile.bottleneck
        for peer, report in controller.reports.items()
        if isinstance(report, WorkerReport) and report.slot.version_id == version_id and controller.is_present(peer)
    )
    texts = [
        f"{name} ({format_count(number, 'instance')}). {ADVICE[name]}"
        for name, number in names.most_common()
        if name in ADVICE
    ]
    return [scheduler_pb2.WorthLine(label="bottleneck", text=" ".join(texts))] if texts else []


def _slot_bytes(state: State, worker: WorkerReport) -> int:
    return worker.kv_pool_bytes + (worker.weights_bytes or state.membership.sizes.arena_share(worker.host_id))


def relay_views(state: State, now: float) -> list[RelayView]:
    """Transfers under way and those that ended within the last seconds: the plan, the progress by the reports, and the
    time left.
    """
    shown = state.transfers.shown(now)
    names = {pack_id: state.model_of_pack(pack_id).name for pack_id in {transfer.pack_id for transfer in shown}}
    return [_relay_view(transfer, names[transfer.pack_id], now) for transfer in shown]


def _relay_view(transfer: Transfer, model: str, now: float) -> RelayView:
    copy = transfer.copy
    view = converters.to_message(
        RelayView,
        transfer,
        model=model,
        state=_relay_state(transfer, now),
        sources=_relay_sources(transfer),
        running_s=transfer.running_s(now),
        reason=transfer.reason.text,
    )
    if copy is not None:
        view.num_chunks, view.num_chunks_verified = copy.num_chunks, copy.num_chunks_verified
        view.num_repairs = copy.num_repairs
    if transfer.ended_at:
        view.ended_s, view.bytes_per_s = now - transfer.ended_at, transfer.mean_bytes_per_s
    elif copy is not None:
        view.bytes_per_s = copy.bytes_per_s
        view.left_s = copy.missing_bytes / view.bytes_per_s if view.bytes_per_s else 0.0
    return view


def _relay_state(transfer: Transfer, now: float) -> RelayView.State.ValueType:
    if transfer.ended_at:
        return RelayView.STATE_FAILED if transfer.error else RelayView.STATE_FINISHED
    if not transfer.begun_at:
        return RelayView.STATE_PLANNED
    return RelayView.STATE_SLOW if transfer.is_slow(now) else RelayView.STATE_RUNNING


def _relay_sources(transfer: Transfer) -> list[RelaySource]:
    """Sources by report, then planned ones that no report has shown yet."""
    sources = [converters.to_message(RelaySource, share) for share in transfer.shares]
    if not transfer.ended_at:
        reported = {source.holder_id for source in sources}
        sources += [RelaySource(holder_id=source) for source in transfer.sources if source not in reported]
    return sources


def _pool_view(state: State, pool: Pool) -> scheduler_pb2.PoolView:
    target = state.pool_targets[pool]
    waits = state.launcher_waits if pool.num_devices == 1 else ""  # of the slots that a launcher starts
    reason = f"{target.reason.text}; {waits}" if waits else target.reason.text
    return converters.to_message(scheduler_pb2.PoolView, target, num_devices=pool.num_devices, reason=reason)


def _minimum_views(state: State, now: float) -> list[scheduler_pb2.MinimumView]:
    views = []
    for version_id, models in state.minimums.models.items():
        at, number = state.minimums.next_change(version_id, now) or (now, 0)
        minimum = state.minimums.in_force.get(version_id, Minimum(0))
        views += [
            scheduler_pb2.MinimumView(
                model=model.name,
                num_instances=minimum.number,
                reason=minimum.text(now),
                next_s=at - now,
                next_num_instances=number,
            )
            for model in models
        ]
    return views


def _version_views(state: State) -> list[scheduler_pb2.VersionView]:
    """Versions whose pack is in a store or an instance."""
    held = {pack_id for store in state.membership.stores.values() for pack_id in store.copies}
    held |= {instance.pack_id for instance in state.instances}
    return [
        scheduler_pb2.VersionView(version_id=each.version_id, pack_id=each.model.pack_id, models=each.aliases.names)
        for each in state.versions
        if each.aliases.names and each.model is not None and each.model.pack_id in held
    ]


def _instance_view(state: State, instance: Instance, now: float) -> scheduler_pb2.InstanceView:
    num_open = instance.work.num_open
    return converters.to_message(
        scheduler_pb2.InstanceView,
        instance,
        roles=converters.roles_to_proto(instance.roles),
        state=instance.phase.value,
        in_state_s=now - instance.since,
        num_running=num_open,
        idle_s=0.0 if num_open else now - instance.last_active,
        roles_s=now - instance.roles_since if instance.roles_since else 0.0,
        moves=[
            scheduler_pb2.PromptMoves(worker_id=worker_id, num_prompts=number, saved_s=saved_s)
            for worker_id, (number, saved_s) in instance.prompt_moves.items()
        ],
    )
