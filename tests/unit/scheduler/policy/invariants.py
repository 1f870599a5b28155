"""What holds after every input of the policy, whatever came before: on paper, in a running cluster, in the simulator.

Only the functions of the first part know how the policy keeps its state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from torchrelay.scheduler.policy.autoscaling.actions import FIRST_SLOT, Action, SetRoles
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.cluster.version_aliases import tenant_of
from torchrelay.scheduler.policy.config import ROUND_S
from torchrelay.scheduler.policy.dispatch import endpoints, live_scaling
from torchrelay.scheduler.policy.dispatch.placement import NoPlacement, place
from torchrelay.scheduler.policy.effects import AttemptPlaced, Effects, LoadCommand, SchedulerEvent, SetRolesCommand
from torchrelay.scheduler.policy.handlers import scaling, views
from torchrelay.scheduler.policy.inputs import Input, Tick
from torchrelay.scheduler.policy.policy import Policy
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import (
    Admission,
    AttemptKey,
    InstancePhase,
    Placement,
    Role,
    Roles,
    StoreStatus,
    WorkerStatus,
)

_TAKEN = ("evict", "preempt_spare", "time_slice", FIRST_SLOT)  # kinds of drains for another model
_DRAINED = (*_TAKEN, "idle", "cancel")
_MIN_WAIT_S = 0.001  # no request is tried again sooner


# The state


def instances_of(state: State) -> list[Instance]:
    return list(state.instances)


def waiting_of(state: State) -> dict[AttemptKey, Admission]:
    return {admission.key: admission for admission in state.queues}


def placements_of(state: State) -> dict[AttemptKey, Placement]:
    return {attempt.admission.key: attempt.placement for attempt in state.attempts.attempts()}


def num_answers_at(state: State, instance: Instance) -> int:
    """Number of attempts that the instance answers, or will answer."""
    return len(instance.work.decodes)


def pool_bytes_of(state: State, instance: Instance) -> int | None:
    worker = state.membership.workers.get(instance.worker_id)
    return None if worker is None else worker.kv_pool_bytes


def _staying(state: State, version_id: str) -> list[Instance]:
    return [each for each in instances_of(state) if each.version_id == version_id and each.staying]


def is_known(state: State, worker: WorkerStatus) -> bool:
    """Whether the worker's process has reported, and counts as alive."""
    known = state.membership.workers.get(worker.worker_id)
    return known is not None and known.incarnation == worker.incarnation


def decide_on_all(state: State, now: float) -> None:
    """Decides for all models, and issues the commands."""
    scaling.scale(state, now)


def order_roles(state: State, instance: Instance, roles: Roles, now: float) -> None:
    """Orders other roles of the instance, as the autoscaler does."""
    own, change = state.strategies, SetRoles(instance.instance_id, roles, Reason("role_short"))
    state.strategies = replace(own, decide=lambda view: (change,))
    scaling.scale(state, now)
    state.strategies = own


def actions_due(state: State, now: float) -> Sequence[Action]:
    return state.strategies.decide(views.view_of(state, now))


def _endpoint(state: State, placement: Placement, version_id: str, now: float) -> Instance | None:
    """The instance that computes the prompt, if it takes prompts now."""
    able = endpoints.of_version(state, state.known_model(version_id), now)
    return next((each for each in able.all if each.instance_id == placement.prefill.instance_id), None)


def _is_placeable(state: State, admission: Admission, now: float) -> bool:
    """Whether an instance may be given the request now, by a search among all instances."""
    model = state.known_model(admission.version_id)
    able = endpoints.of_version(state, model, now)
    are_several = state.versions.of(model.version_id).usage.callers.are_several(now)
    prefills, decodes = (
        [each for each in instances if each.takes_beside_others or not are_several]
        for instances in (able.prefills, able.decodes)
    )
    return not isinstance(place(state, admission, model, prefills, decodes, now), NoPlacement)


# Effects of an input


def check_effects(state: State, effects: Effects, draining: Collection[str], now: float) -> None:
    """Checks what an input has caused, in the state that it has left. ``draining``: instances that drained before."""
    for command in effects.commands:
        if isinstance(command, LoadCommand):
            _check_load(state, command, now)
        if isinstance(command, LoadCommand | SetRolesCommand):
            _check_number(state, command)
    if drains := [event for event in effects.events if event.kind in _DRAINED and "worker_id" in event.fields]:
        since = {event.subject: event.fields["in_state_s"] for event in effects.events if event.kind == "drain"}
        _check_drains(state, drains, since, draining)
    last = {opened.placement.prefill.instance_id: opened for opened in effects.opened}
    for opened in last.values():
        _check_late_binding(state, opened, now)
    _check_texts(state, effects.events)


def _check_load(state: State, command: LoadCommand, now: float) -> None:
    """Each load is for a free slot in which the model runs, never before the reports of the moment of a start."""
    assert now - state.started_at >= state.config.settle_s
    assert len({hop.store_id for hop in command.hops}) == len(command.hops)
    for order in (order for hop in command.hops for order in hop.loads):
        worker, instance = state.membership.workers[order.worker_id], state.instances.on_worker(order.worker_id)
        assert worker.slot.phase is InstancePhase.FREE and not worker.is_leaving, order
        assert not state.membership.is_suspect(order.worker_id), order
        assert command.model.fits(worker) and order.roles <= worker.playable_roles, order
        assert instance is not None and instance.instance_id == order.instance_id, order


def _check_number(state: State, command: LoadCommand | SetRolesCommand) -> None:
    """The model has no more instances of a role than it may have, unless it had more before."""
    if isinstance(command, LoadCommand):
        version_id = command.model.version_id
        roles = {role for hop in command.hops for order in hop.loads for role in order.roles}
    else:
        instance = state.instances.get(command.instance_id)
        assert instance is not None
        version_id, roles = instance.version_id, set(command.roles - instance.roles)
    most = state.known_model(version_id).max_instances or state.config.max_instances
    for role in roles:
        playing = [each for each in _staying(state, version_id) if role in each.target_roles]
        assert len(playing) <= most, (command, playing)


def _check_drains(
    state: State, drains: Sequence[SchedulerEvent], since: Mapping[str, str | int | float], draining: Collection[str]
) -> None:
    """No drain leaves a model below its minimum. A slot changes hands only for a model that requests need or that has a
    minimum, never on a worker that leaves, and one of the last busy ones only after its time slice.
    """
    used = {*state.queues.versions, *state.minimums.in_force}
    used |= {attempt.admission.version_id for attempt in state.attempts.attempts()}
    for drain in drains:
        version_id = str(drain.fields["version_id"])
        minimum = state.minimums.in_force.get(version_id)
        if minimum is not None and drain.subject not in draining:
            for role in (role for role in Role if role.name.lower() in str(drain.fields["roles"])):
                playing = [each for each in _staying(state, version_id) if role in each.target_roles]
                assert len(playing) >= minimum.number, drain
        if drain.kind in _TAKEN:
            assert used - {version_id}, drain
            assert not state.membership.workers[str(drain.fields["worker_id"])].is_leaving, drain
        if drain.kind == "time_slice":
            assert float(since[drain.subject]) >= state.config.time_slice_s, drain


def _check_late_binding(state: State, opened: AttemptPlaced, now: float) -> None:
    """A prompt is given only to an instance with less than a full step of prompts before it, or to one that computes
    all of them by the end of its load.
    """
    attempt = state.attempts.get(opened.key)
    if attempt is None or attempt.is_computed:
        return
    instance = _endpoint(state, opened.placement, attempt.admission.version_id, now)
    if instance is not None:
        prompt_s = attempt.placement.predicted.prefill_s
        before_s = instance.queued_and_overdue_s(now)[0] - prompt_s - 1e-9
        left_s = instance.load_left_s(now)
        by_layer_s = left_s * (1 - before_s / instance.load_s) if instance.load_s else 0.0
        assert before_s < instance.full_step_s or prompt_s <= by_layer_s, (opened, before_s, instance)


def _check_texts(state: State, events: Iterable[SchedulerEvent]) -> None:
    """What a tenant may read names no other tenant."""
    tenants = {tenant_of(each.model.name) for each in state.versions if each.model is not None}
    for event in events:
        for name in (event.model, *event.aliases):
            own = tenant_of(name)
            text = event.by_tenant.get(own, event.reason)
            assert not any(f"{tenant}/" in text for tenant in tenants - {own}), (name, event)


# The state between inputs


def check_state(state: State) -> None:
    check_requests(state)
    check_instances(state)
    check_indexes(state)


def check_requests(state: State) -> None:
    """Each request is in one place, and no queue is longer than its limit, but for answers that go on."""
    state.queues.check_integrity()
    waiting = waiting_of(state)
    assert not waiting.keys() & placements_of(state).keys()
    new = Counter(each.version_id for each in waiting.values() if not each.num_forced_tokens and not each.was_recalled)
    assert all(number <= state.config.queue_limit for number in new.values()), new


def check_instances(state: State) -> None:
    """No instance has more work than it may have."""
    pools = {each.instance_id: pool_bytes_of(state, each) for each in instances_of(state)}
    state.attempts.check_integrity({key: pool for key, pool in pools.items() if pool is not None})
    for instance in instances_of(state):
        assert num_answers_at(state, instance) <= state.config.max_open_per_instance, instance
        aliases, pool_bytes = state.versions.of(instance.version_id).aliases, pools[instance.instance_id]
        for name, own in instance.work.of_model.items():
            caps = aliases.caps_of(name)
            assert own.num_open <= (caps.max_concurrency or own.num_open), (name, instance)
            assert pool_bytes is None or caps.holds(own.kv_bytes, pool_bytes), (name, instance)


def check_indexes(state: State) -> None:
    """Each index of instances, slots and copies says the same as a scan of them."""
    instances, all_instances = state.instances, instances_of(state)
    assert len({instance.worker_id for instance in all_instances}) == len(all_instances)
    assert set(instances.versions) == {instance.version_id for instance in all_instances}
    for instance in all_instances:
        assert instance.work is state.attempts.work_of(instance.instance_id) and instance.work.is_present
        assert instances.get(instance.instance_id) is instances.on_worker(instance.worker_id) is instance
        assert instance in instances.of_version(instance.version_id) and instance in instances.on_host(instance.host_id)
    by_phase = {phase: {each.instance_id for each in all_instances if each.phase is phase} for phase in InstancePhase}
    assert {each.instance_id for each in instances.loading} == by_phase[InstancePhase.LOADING]
    assert {each.instance_id for each in instances.draining} == by_phase[InstancePhase.DRAINING]
    state.tenant_slots.check_integrity(instances.versions)
    state.least_losses.check_integrity()
    membership = state.membership
    free = [key for key, each in membership.workers.items() if each.slot.phase is InstancePhase.FREE]
    assert set(membership.free_workers) == {key for key in free if not membership.workers[key].is_leaving}
    stores = membership.stores.values()
    for pack_id in {pack_id for store in stores for pack_id in (*store.copies, *(store.disk_pack_ids or ()))}:
        copies = {store.store_id: store.copies[pack_id] for store in stores if pack_id in store.copies}
        assert {store.store_id for store in membership.holders(pack_id)} == copies.keys()
        assert membership.is_held(pack_id) == any(not copy.error for copy in copies.values())
        on_disk = {store.store_id for store in stores if pack_id in (store.disk_pack_ids or ())}
        assert {store.store_id for store in membership.disk_holders(pack_id)} == on_disk


def check_nothing_fits(state: State, now: float) -> None:
    """No instance is free for the next request of a queue, as soon as all that time alone changes is noticed."""
    for version_id in state.queues.versions:
        if state.due.get(version_id, now + 1.0) <= now + _MIN_WAIT_S or live_scaling.is_live(state, version_id):
            continue
        if (admission := state.queues.next(version_id, now)) is not None:
            assert not _is_placeable(state, admission, now), admission


def check_view_is_true(state: State, workers: Collection[WorkerStatus], stores: Collection[StoreStatus]) -> None:
    """The policy knows all peers as they are, but for commands that have not reached them."""
    membership = state.membership
    assert membership.workers.keys() == {worker.worker_id for worker in workers}
    assert membership.stores.keys() == {store.store_id for store in stores}
    for worker in workers:
        known, instance = membership.workers[worker.worker_id], state.instances.on_worker(worker.worker_id)
        assert (known.incarnation, known.slot) == (worker.incarnation, worker.slot)
        if worker.slot.phase is InstancePhase.FREE:
            assert instance is None or not instance.accepted, instance
            continue
        assert instance is not None and instance.instance_id == worker.slot.instance_id
        assert instance.phase in (worker.slot.phase, InstancePhase.DRAINING)
        assert (instance.incarnation, instance.num_layers_ready) == (worker.incarnation, worker.slot.num_layers_ready)
    for store in stores:
        assert membership.stores[store.store_id].copies == store.copies


class CheckedPolicy(Policy):
    """Checks after each input what must hold."""

    def __init__(self, policy: Policy) -> None:
        self.state = policy.state

    def apply(self, input_: Input, now: float) -> Effects:
        draining = {instance.instance_id for instance in self.state.instances.draining}
        effects = super().apply(input_, now)
        check_effects(self.state, effects, draining, now)
        check_state(self.state)
        if isinstance(input_, Tick) and self.state.round_due == now + ROUND_S and self.next_due() > now:
            check_nothing_fits(self.state, now)
        return effects
