"""The scheduler's nouns, as frozen classes. Classes of requests, of which there are thousands a second, are cheap to
make and not tracked by the garbage collector.

Times are seconds since the Unix epoch by the scheduler's clock, passed in as ``now``, which never goes back.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

import msgspec

from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.common.liveness import NO_ENGINE, EngineProgress
from torchrelay.scheduler.policy.prediction import UNPREDICTED, Prediction
from torchrelay.scheduler.policy.reasons import NO_REASON, Reason
from torchrelay.scheduler.policy.timed_phase import TimedPhase

KV_PAGE_TOKENS = 16  # contexts are reserved in whole pages of this many tokens
REMOTE = "remote"  # holder id of the remote store: the last source of every relay
MAX_VERSIONS = 16_384  # versions that are remembered: more than slots, so that no version in use is forgotten


class Role(enum.IntEnum):
    """Role of an instance in serving a request; the numbers are those of the protocol."""

    PREFILL = 1
    DECODE = 2


ROLES: Final = tuple(Role)  # much faster to iterate over than the class itself
Roles = frozenset[Role]
BOTH: Roles = frozenset(Role)
DECODES: Roles = frozenset((Role.DECODE,))


class ServiceClass(enum.IntEnum):
    """How soon a request is wanted; the numbers are those of the protocol."""

    STANDARD = 0
    INTERACTIVE = 1
    BATCH = 2


class InstancePhase(enum.Enum):
    """State of a slot, and of the instance in it.

    FREE --Load--> LOADING --all layers--> READY --Unload--> DRAINING --empty--> FREE. The worker makes the transitions;
    the scheduler stamps DRAINING as soon as it decides a drain, so that nothing more is placed there. A failed load
    goes back to FREE.
    """

    FREE = "free"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class CopyCause(enum.Enum):
    """Why the replicator makes a copy, the most pressing cause first."""

    REBUILD = "rebuild"  # a copy was lost with a host, and the pack is in demand
    REPLICATE = "replicate"  # in demand, and not yet in as many places as it should be


class AttemptKey(NamedTuple):
    """Attempt at a request; the number rises with every admission of the request."""

    request_id: str
    attempt: int

    @property
    def buffer_id(self) -> str:
        """Name of the KV buffer transferred in this attempt."""
        return f"{self.request_id}/{self.attempt}"


class Peer(NamedTuple):
    """A worker or a store."""

    node_id: str
    is_store: bool = False


@dataclass(frozen=True)
class ScheduledMinimum:
    """A greater minimum of instances from ``begin`` until before ``end``; loaded by its begin."""

    begin: float
    end: float
    num_instances: int  # per role
    entry: str  # of the model's schedule, as its operator wrote it


@dataclass(frozen=True)
class LatencyTargets:
    """Latency targets of a model's requests; 0: the scheduler's setting of the same name."""

    interactive_ttft_s: float = 0.0  # from a request's arrival to its first token, by its class
    standard_ttft_s: float = 0.0
    batch_ttft_s: float = 0.0
    tbt_target_s: float = 0.0  # between tokens, in the mean


OWN_ENGINE = "torchrelay"


class SlotClass(NamedTuple):
    """The slots with one engine and one number of devices, or the slots in which a model runs."""

    num_devices: int = 1
    engine: str = ""  # of a model: empty if it runs with any
    weights_bytes: int = 0  # of a slot: that its GPUs hold; 0: it computes in the host's arena
    labels: frozenset[str] = frozenset()  # of a slot: of its host; of a model: those that the host must have

    def fits(self, slot: SlotClass | WorkerStatus) -> bool:
        """Whether instances of a model of this class run in the slot."""
        is_alike = self.num_devices == slot.num_devices and self.engine in ("", slot.engine)
        return is_alike and (not self.labels or self.labels <= slot.labels)


class Caps(NamedTuple):
    """Limits of the requests of one model on an instance."""

    max_concurrency: int = 0  # requests at once; 0: no limit
    kv_share: float = 1.0  # of its KV pool

    def least_pool_bytes(self, kv_bytes: int) -> int:
        """The size of the smallest pool whose share holds this."""
        return math.ceil(kv_bytes / self.kv_share)

    def holds(self, kv_bytes: int, pool_bytes: int) -> bool:
        return self.least_pool_bytes(kv_bytes) <= pool_bytes

    def most_open(self, most: int) -> int:
        """The requests that an instance runs at once, where it runs ``most`` of a model without a limit."""
        return min(self.max_concurrency or most, most)


NO_CAPS: Final = Caps()


@dataclass(frozen=True)
class Model:
    """Published version of a model and its settings."""

    name: str
    version_id: str
    pack_id: str
    pack_bytes: int
    kv_bytes_per_token: int
    idle_timeout_s: float = 0.0  # 0: the scheduler's default
    max_instances: int = 0  # per role; 0: the scheduler's default
    routing_block_tokens: int = 0  # of a prompt, per hash; 0: no hashes
    num_devices: int = 1  # of the group that it runs on: one slot
    min_instances: int = 0  # per role: instances that stay loaded without demand
    scheduled: tuple[ScheduledMinimum, ...] = ()  # in force or coming next
    targets: LatencyTargets = LatencyTargets()
    engine: str = ""  # of its instances; empty: any
    hosts: frozenset[str] = frozenset()  # labels that the hosts of its instances have
    threads: int = 0  # of an instance on a CPU; 0: no limit
    max_concurrency: int = 0  # of ``Caps``, as what follows
    kv_share: float = 1.0

    @cached_property
    def slot_class(self) -> SlotClass:
        return SlotClass(self.num_devices, self.engine, labels=self.hosts)

    @cached_property
    def caps(self) -> Caps:
        return Caps(self.max_concurrency, self.kv_share)

    def fits(self, slot: SlotClass | WorkerStatus) -> bool:
        """Whether instances run in the slot, and its GPUs hold the weights."""
        return self.slot_class.fits(slot) and not 0 < slot.weights_bytes < self.pack_bytes


@dataclass(frozen=True)
class SlotStatus:
    """A slot as its worker reports it."""

    phase: InstancePhase = InstancePhase.FREE
    instance_id: str = ""
    model: str = ""
    version_id: str = ""
    pack_id: str = ""
    roles: Roles = frozenset()
    num_layers_ready: int = 0
    num_layers: int = 0
    loaded_share: float = 0.0  # of the pack's bytes
    load_phases: tuple[TimedPhase, ...] = ()
    error: str = ""
    store_was_lost: bool = False  # the load failed because the store could not be reached


@dataclass(frozen=True)
class WorkerStatus:
    """A worker as last reported, at ``seen_at``."""

    worker_id: str
    incarnation: str
    host_id: str
    grpc_address: str
    playable_roles: Roles
    seen_at: float
    preferred_role: Role | None = None  # played if there is a choice
    slot: SlotStatus = field(default_factory=SlotStatus)
    kv_pool_bytes: int = 0
    weights_bytes: int = 0  # that the GPUs of its slot hold; 0: it computes in the host's arena
    num_running: int = 0
    prefill_tokens_per_s: float = 0.0  # 0: not measured yet
    step_s: float = 0.0  # median decode step; 0: not measured yet
    kv_bytes_sent: int = 0  # since start
    kv_bytes_received: int = 0
    device: str = ""
    latency: LatencyModel | None = None  # for the pack in its slot; None: not learned yet
    has_prefix_cache: bool = False  # a common prefix of prompts is computed once
    progress: EngineProgress = NO_ENGINE
    num_devices: int = 1  # of its slot
    is_leaving: bool = False  # told to end: its slot drains, and takes no further load
    engine: str = OWN_ENGINE
    hands_over: bool = True  # its engine's KV to other workers, and takes theirs; without this it plays both roles
    computes_by_layer: bool = True  # while it loads, and continues prompts that others began
    labels: frozenset[str] = frozenset()  # of its host

    @property
    def slot_class(self) -> SlotClass:
        return SlotClass(self.num_devices, self.engine, self.weights_bytes, self.labels)

    def roles_for(self, kv_bytes: int) -> Roles:
        """Roles that the slot can play for requests that need ``kv_bytes`` of KV each."""
        roles = self.playable_roles if self.kv_pool_bytes >= kv_bytes else self.playable_roles - DECODES
        return roles if self.hands_over or roles >= BOTH else frozenset()


class Pool(NamedTuple):
    """All slots with this number of devices."""

    num_devices: int
    role: Role | None = None  # of workers that can play no other, as a launcher needs it; None: of all workers


@dataclass(frozen=True, slots=True)
class PoolTarget:
    """The slots that a pool has, and those that it should have. ``num_idle``: the part of ``num_used`` whose instance
    would be evicted for a waiting model.
    """

    num_slots: int = 0
    num_used: int = 0  # hold an instance
    num_idle: int = 0
    num_wanted: int = 0
    reason: Reason = NO_REASON


@dataclass(frozen=True)
class SourceShare:
    """Part of a copy that a source sends."""

    holder_id: str  # or REMOTE
    num_bytes: int
    bytes_per_s: float  # recent rate; 0: it sends nothing now
    following: bool = False  # chunks are being requested from it
    error: str = ""  # why it was dropped


@dataclass(frozen=True)
class PackCopy:
    """A pack, or the part of it received so far, in a host's arena."""

    pack_id: str
    pack_bytes: int
    num_chunks: int
    num_chunks_verified: int
    num_pins: int = 0
    error: str = ""
    relay_begin_us: int = 0
    relay_first_us: int = 0
    relay_end_us: int = 0
    source: str = ""
    shares: tuple[SourceShare, ...] = ()  # by source
    retained: bool = False  # by an unexpired lease of a scheduler
    num_repairs: int = 0

    @property
    def complete(self) -> bool:
        return self.num_chunks > 0 and self.num_chunks_verified == self.num_chunks

    @property
    def receiving(self) -> bool:
        return not self.complete and not self.error

    @property
    def bytes_per_s(self) -> float:
        """The rate from all its sources, as reported."""
        return sum(share.bytes_per_s for share in self.shares)

    @property
    def missing_bytes(self) -> float:
        return self.pack_bytes * (1 - self.num_chunks_verified / self.num_chunks) if self.num_chunks else 0.0


@dataclass(frozen=True)
class NicCounters:
    """All network interfaces of a host; the counters are monotonic and include all traffic."""

    bytes_sent: int
    bytes_received: int
    bytes_per_s: float = 0.0  # link speed per direction; 0: unknown


@dataclass(frozen=True)
class StoreStatus:
    """A param-store, hence a host's arena, as last reported."""

    store_id: str
    incarnation: str
    host_id: str
    grpc_address: str
    data_address: str
    seen_at: float
    arena_target_bytes: int = 0
    copies: Mapping[str, PackCopy] = field(default_factory=dict)
    failure_domain: str = ""
    bytes_sent: int = 0  # by the data plane since the store started
    bytes_received: int = 0  # by the data plane and from the remote store
    nic: NicCounters | None = None  # None: the host has no counters
    disk_pack_ids: frozenset[str] | None = None  # on the host's disk; None: as reported before, if it was

    @property
    def domain(self) -> str:
        """The failure domain; at least the host itself."""
        return self.failure_domain or self.host_id

    def has_space_for(self, pack_id: str, pack_bytes: int, unpinned: Container[str] = ()) -> bool:
        """Whether the arena has the pack, or has space for it without its unpinned packs and those in ``unpinned``."""
        if pack_id in self.copies:
            return True
        pinned = self._pinned_bytes
        if unpinned:
            copies = self.copies.values()
            pinned = sum(copy.pack_bytes for copy in copies if copy.num_pins and copy.pack_id not in unpinned)
        return pinned + pack_bytes <= self.arena_target_bytes

    @cached_property
    def whole_pack_ids(self) -> frozenset[str]:
        return frozenset(copy.pack_id for copy in self.copies.values() if copy.complete)

    @cached_property
    def fixed_bytes(self) -> Mapping[str, int]:
        """Bytes of the copies that are not evicted, by pack: pinned copies, and copies that arrive."""
        return {copy.pack_id: copy.pack_bytes for copy in self.copies.values() if copy.num_pins or copy.receiving}

    @cached_property
    def num_receiving(self) -> int:
        return sum(copy.receiving for copy in self.copies.values())

    @cached_property
    def _pinned_bytes(self) -> int:
        return sum(copy.pack_bytes for copy in self.copies.values() if copy.num_pins)


class PromptSource(msgspec.Struct, frozen=True, gc=False):
    """A recalled attempt, of which a prefill worker keeps what it has computed of the prompt."""

    key: AttemptKey
    worker: WorkerRef
    host_id: str = ""
    loaded_at: float = 0.0  # predicted; the worker computes a layer as soon as it is loaded
    load_s: float = 0.0  # predicted duration of the whole load; 0: its first layer has not arrived
    kept_until: float = math.inf  # the worker drops what no other has fetched by then
    placed_at: float = 0.0
    prompt_s: float = 0.0  # predicted time of the whole prompt there, without a load
    wait_s: float = 0.0  # time from the placement until the next worker needs the prompt
    saved_s: float = 0.0  # predicted computation that the next worker need not do

    def left_share(self, at: float) -> float:
        """Predicted share of the layers that the worker has not computed by then."""
        not_loaded = (self.loaded_at - at) / self.load_s if self.load_s else float(self.loaded_at > at)
        not_computed = 1.0 - (at - self.placed_at) / self.prompt_s if self.prompt_s else 0.0
        return min(max(not_loaded, not_computed, 0.0), 1.0)


class Admission(msgspec.Struct, frozen=True, gc=False):
    """A gateway's request to run one attempt."""

    key: AttemptKey
    gateway_id: str
    version_id: str
    num_prompt_tokens: int
    num_forced_tokens: int
    max_tokens: int
    num_choices: int
    admitted_at: float  # by the scheduler's clock; waits count from here
    age_s: float = 0.0  # of the request then, since its gateway got it, in this or an earlier attempt
    lost_workers: tuple[str, ...] = ()
    traceparent: str = ""
    block_hashes: tuple[bytes, ...] = ()  # chained, one per whole routing block of the prompt
    model: str = ""  # the tenant's name for the version; others may have uploaded the same files
    service_class: ServiceClass = ServiceClass.STANDARD
    ttft_target_s: float = 0.0  # from the request's arrival; 0, until it is admitted: that of the model for its class
    tbt_target_s: float = 0.0  # between its tokens, in the mean; 0, until it is admitted: that of the model
    was_recalled: bool = False  # it had been placed, and keeps its arrival time
    prompt_source: PromptSource | None = None  # it was recalled from a loading instance
    returns_to: str = ""  # the instance for which it was recalled
    caps: Caps = NO_CAPS  # of its model when it was admitted

    @property
    def tenant(self) -> str:
        """``acme`` of ``acme/glossary``."""
        return self.model.partition("/")[0]

    @property
    def deadline(self) -> float:
        """Time by which the first token is due."""
        return self.admitted_at - self.age_s + self.ttft_target_s

    @property
    def num_contexts(self) -> int:
        """Upper bound on the number of contexts: each choice with forced output may have its own."""
        return max(self.num_choices, 1) if self.num_forced_tokens else 1

    @property
    def num_context_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_forced_tokens

    @property
    def num_prefill_tokens(self) -> int:
        """Upper bound on the number of positions that prefill computes."""
        return self.num_context_tokens * self.num_contexts

    def num_attended(self, num_answer_tokens: int) -> int:
        """Positions that a decode step attends to, on average over an answer of ``num_answer_tokens`` per choice."""
        num_left = max(num_answer_tokens - self.num_forced_tokens, 0)
        return max(self.num_choices, 1) * (self.num_context_tokens + num_left // 2)

    def kv_bytes(self, model: Model) -> int:
        """Upper bound on the KV for decode: every choice to its last token, in whole pages, without sharing."""
        pages = -(-(self.num_prompt_tokens + self.max_tokens) // KV_PAGE_TOKENS)
        return max(self.num_choices, 1) * pages * KV_PAGE_TOKENS * model.kv_bytes_per_token


class WorkerRef(msgspec.Struct, frozen=True, gc=False):
    """Worker at one end of a placement."""

    worker_id: str
    grpc_address: str
    instance_id: str


class Placement(msgspec.Struct, frozen=True, gc=False):
    """Where an attempt runs."""

    key: AttemptKey
    prefill: WorkerRef
    decode: WorkerRef
    cold: bool
    predicted: Prediction = UNPREDICTED
    prompt_source: PromptSource | None = None  # at another worker

    @property
    def needs_kv_transfer(self) -> bool:
        """Whether prefill and decode run on different workers."""
        return self.prefill.worker_id != self.decode.worker_id
