"""Parameters of all decisions; the service fills them from its settings, a simulation from its scenario."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from torchrelay.common.liveness import SILENT_S

ROUND_S: Final = 0.1
TURN_S: Final = 0.02  # short, so that each turn evaluates few versions and delays no request for long


class PoolMode(StrEnum):
    """Whether the scheduler computes how many slots each pool should have."""

    OFF = "off"
    ADVISE = "advise"  # computes and shows the targets, and changes nothing
    FOLLOW = "follow"  # the same, and a launcher follows them


class ScalingMode(StrEnum):
    """Whether the scheduler loads and drains instances by its own decisions."""

    ACT = "act"
    ADVISE = "advise"  # only minimums are loaded; all other decisions are recorded


@dataclass(frozen=True)
class PolicyConfig:
    """All times are seconds. Defaults are those of the embedded install."""

    # Queues
    queue_limit: int = 1024  # admissions waiting per model
    queue_limit_total: int = 8192
    max_open_per_instance: int = 64  # attempts placed on one instance at once, per role

    # Time from a request's arrival to its first token, for models without targets: the earliest deadline goes first
    interactive_ttft_s: float = 0.5
    standard_ttft_s: float = 2.0
    batch_ttft_s: float = 600.0

    # Scaling
    scaling: ScalingMode = ScalingMode.ACT
    late_cost_s: float = 60.0  # device seconds that a late request costs
    idle_timeout_s: float = 0.0  # how long to keep an unused slot, for models without a setting; 0: computed
    max_instances: int = 8  # per model and role, for models without a setting of their own
    preempt_spare_after_s: float = 1.0  # wait without a slot before a model may get another's second slot
    time_slice_s: float = 10.0  # least time that a model keeps its slot while others have none
    # A model that waited this long for a slot, and longer than its target, takes a slot whatever its model loses.
    longest_wait_s: float = 60.0
    whole_scale_every_s: float = 0.5  # between evaluations of models without waiting requests
    cancel_after_s: float = 1.0  # a load for which no request waits any more is cancelled after this time
    roles_retry_s: float = 1.0  # after an instance could not be given other roles
    drain_s: float = 30.0  # how long running requests of a drained instance may take
    drain_grace_s: float = 10.0  # after ``drain_s``, how long a slot may take to become free

    # Pools
    pool_mode: PoolMode = PoolMode.OFF
    pool_min_slots: int = 0  # of each pool
    pool_max_slots: int = 0  # 0: no limit
    pool_spare_slots: int = 0  # free slots beside those in use

    # Failures
    load_tries: int = 3  # failed loads of a version before its waiting requests are refused
    load_backoff_s: float = 0.1  # after the first failure; doubled by each further one
    load_backoff_max_s: float = 5.0
    stale_s: float = SILENT_S  # silence, or time without an advance, after which a worker or store counts as lost
    # A load without any bytes for this long has failed: longer than a store waits for its object store, to name the
    # cause.
    load_stall_s: float = 45.0
    load_orphan_s: float = 5.0  # the same if the host's store is lost
    unserved_s: float = 10.0  # requests that need a load are refused after no model could be loaded for this long
    unserved_resumed_s: float = 60.0  # the same for requests that have output tokens already
    fence_s: float = 2.0  # late reports of a process known to be dead are ignored this long
    gateway_grace_s: float = 10.0  # how long a disconnected gateway may take to reconnect
    settle_s: float = 1.0  # after a start, while reports of running instances arrive: no load

    # Copies in RAM
    replicate: bool = True
    recent_s: float = 600.0  # a pack used within this time has recent demand
    recent_copies: int = 2  # copies of such a pack, in different failure domains
    max_replications: int = 32  # concurrent copies that no request waits for; half as many if nothing was lost
    max_replications_per_store: int = 2  # the same into one store
    loss_grace_s: float = 2.0  # a store that stopped reporting may come back with its arena within this time
    retention_s: float = 30.0  # how long a store keeps retained packs without a renewal
    copy_backoff_s: float = 1.0  # after a failed copy; doubled by each further failure, up to copy_backoff_max_s
    copy_backoff_max_s: float = 60.0

    # Latency
    tbt_target_s: float = 0.1  # for models without a target; exceeded only if all other decode instances are worse

    # Predictions where nothing has been measured yet
    default_prefill_tokens_per_s: float = 1000.0
    default_step_s: float = 0.03
    relay_bytes_per_s: float = 5e8
    map_bytes_per_s: float = 4e9
    kv_bytes_per_s: float = 5e8
    slot_setup_s: float = 0.05

    @property
    def refusal_settle_s(self) -> float:
        """Time after a start in which unknown slots may still appear, so that no request is refused as too large."""
        return max(self.settle_s, self.stale_s)

    @property
    def longest_drain_s(self) -> float:
        return self.drain_s + self.drain_grace_s
