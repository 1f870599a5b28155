"""The gateway's core types: callers, published models, prices and usage. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Final, Literal, NamedTuple, TypeAlias

ANY_ENGINE, OWN_ENGINE = "auto", "torchrelay"
ENGINE_FORMS = r"^(auto|torchrelay|vllm(:([2-9]|[1-5]\d|6[0-4]))?)$"  # of a model's setting; vllm:2: on two devices
_INT8: Final = "I8"
ServiceClassName: TypeAlias = Literal["interactive", "standard", "batch"]
PriceService: TypeAlias = Literal["", "batch"]  # what a price is of: requests as they come, or lines of batches
Role: TypeAlias = Literal["viewer", "operator", "admin"]  # each may what those before it may
BudgetPeriod: TypeAlias = Literal["day", "week", "month"]


class ServiceClass(IntEnum):
    """How soon a request is wanted; the numbers are those of the protocol."""

    STANDARD = 0
    INTERACTIVE = 1
    BATCH = 2


URGENCY: Final = (ServiceClass.BATCH, ServiceClass.STANDARD, ServiceClass.INTERACTIVE)  # the most urgent last


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a key, or of all keys of a tenant together; None: any number."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers
    concurrent_requests: int | None = None
    budget_nano: int | None = None
    budget_period: BudgetPeriod | None = None  # in UTC, after which the budget is whole again; None: never


NO_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller that an API key or a token identifies, with what it may do."""

    tenant_id: str  # empty for operators
    tenant: str
    key_id: str
    is_admin: bool = False  # an operator, of whatever role
    role: Role = "admin"  # of an operator
    person: str = ""  # the name of an operator, or of the owner of a token
    limits: Limits = NO_LIMITS  # of the key
    tenant_limits: Limits = NO_LIMITS
    service_class: ServiceClass = ServiceClass.STANDARD  # of its requests that name none
    top_class: ServiceClass = ServiceClass.INTERACTIVE  # the most urgent that its requests may name
    models: frozenset[str] | None = None  # "tenant/model" or an alias of it; None: all of its tenant
    may_manage_keys: bool = True
    expires_unix_us: int | None = None
    has_old_secret: bool = False  # the secret before the last rotation

    @property
    def actor(self) -> str:
        """The caller's name in the audit log."""
        return self.person or f"key:{self.key_id}"

    def may_call(self, *names: str) -> bool:
        """Whether the key may call, and publish, a model with any of these full names."""
        return self.models is None or not self.models.isdisjoint(names)

    def class_of(self, wanted: ServiceClass | None) -> ServiceClass:
        """The class of a request that names ``wanted``, or none."""
        return self.service_class if wanted is None else min(wanted, self.top_class, key=URGENCY.index)


class FirstToken(NamedTuple):
    """The time to first token of a request that has ended."""

    at_s: float  # monotonic
    tenant_id: str
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Price:
    """An immutable row of the price list, in nano-dollars per token."""

    price_id: str
    model: str  # "tenant/model"; empty: the default price
    prompt_nano: int
    cached_nano: int
    output_nano: int
    valid_from_unix_us: int
    service: PriceService = ""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions that determine how much memory a model needs."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype_bytes: int
    max_context_tokens: int
    vocab_size: int

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_dtype_bytes


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """The embeddings that a model declares."""

    pooling: int  # a number of the protocol
    num_dimensions: int
    is_normalized: bool  # to length 1


@dataclass(frozen=True, slots=True)
class Version:
    """A published, immutable version of a model, as described by the param-store at commit."""

    version_id: str
    pack_id: str
    pack_bytes: int
    architecture: str
    dtype: str
    shape: ModelShape
    routing_block_tokens: int
    stored_bytes: int
    eos_token_ids: tuple[int, ...] = ()
    file_digests: Mapping[str, str] = field(default_factory=dict)  # "tokenizer.json" -> BLAKE3
    embedding: EmbeddingSpec | None = None  # None: the model declares none
    has_no_head: bool = False  # it gives embeddings, but no tokens
    base_version_id: str = ""  # of an adapter: the version that it changes, whose instances serve it
    engine: str = ""  # the only one that computes the weights, as the store says; empty: any

    @property
    def served_version_id(self) -> str:
        """The version of the instances that serve this version."""
        return self.base_version_id or self.version_id

    @property
    def needed_engine(self) -> str:
        """The only engine that serves it; empty: any."""
        is_own = self.base_version_id or self.dtype == _INT8  # the latter of a store of an earlier release
        return self.engine or (OWN_ENGINE if is_own else "")

    @property
    def adapter_id(self) -> str:
        """The id of the adapter that the instances add; empty for a model."""
        return self.version_id if self.base_version_id else ""

    @property
    def own_bytes(self) -> int:
        """The bytes of its weights: of an adapter those of its files, without the base's."""
        return self.stored_bytes if self.base_version_id else self.pack_bytes


LEAST_TARGET_S, MOST_TARGET_S = 0.001, 86_400.0


def checked_target_s(seconds: float) -> float:
    """A target as an operator may set it; 0: the scheduler's default. Raises ``ValueError`` with a sentence."""
    if seconds != 0 and not LEAST_TARGET_S <= seconds <= MOST_TARGET_S:
        raise ValueError(
            f"a target is from {LEAST_TARGET_S:g} s to {MOST_TARGET_S:,.0f} s, or 0 for the scheduler's default; "
            f"not {seconds:g} s"
        )
    return seconds


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """Operator's targets for a model's requests, in seconds; 0: the scheduler's setting of the same name."""

    interactive_ttft_s: float = 0.0  # from a request's arrival to its first token, by its service class
    standard_ttft_s: float = 0.0
    batch_ttft_s: float = 0.0
    tbt_target_s: float = 0.0  # between tokens, in the mean


@dataclass(frozen=True, slots=True)
class Resources:
    """Limits of a model's requests and instances, and the hosts of its instances."""

    max_concurrency: int = 0  # requests of this model that an instance runs at once; 0: no limit
    threads: int = 0  # that an instance computes with on a CPU; 0: no limit
    kv_share: float = 1.0  # of an instance's KV pool that requests of this model hold
    hosts: tuple[str, ...] = ()  # labels that the host of an instance has


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model as a caller resolves it: current version, its tenant's and operator's settings, and the current price."""

    name: str  # "tenant/model"
    tenant_id: str
    version: Version
    price: Price
    idle_timeout_s: float  # 0: the scheduler's default
    max_instances: int  # per role; 0: the scheduler's default
    created_unix_us: int
    min_instances: int = 0  # per role, loaded though nobody asks
    schedule: tuple[str, ...] = ()  # at times more of them: see ``catalog.schedules``
    targets: LatencyTargets = LatencyTargets()
    engine: str = ANY_ENGINE  # of its instances; "vllm:2": on two devices
    aliases: tuple[str, ...] = ()  # further names in its tenant, sorted
    parent: str = ""  # of an adapter: the model that it changes
    has_adapters: bool = False  # of its tenant
    resources: Resources = Resources()

    @property
    def needed_engine(self) -> str:
        """The engine that the model's instances must have; empty: any."""
        if self.version.needed_engine:
            return self.version.needed_engine
        if self.engine == ANY_ENGINE:
            return OWN_ENGINE if self.has_adapters else ""
        return self.engine.partition(":")[0]

    @property
    def num_devices(self) -> int:
        """The devices that compute each of the model's instances together."""
        return 1 if self.version.needed_engine == OWN_ENGINE else int(self.engine.partition(":")[2] or 1)


class FinishCause(StrEnum):
    """Why a choice ended; stored in the ledger."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"  # the client disconnected or cancelled
    ERROR = "error"
    GATEWAY_LOST = "gateway_lost"  # settled by the orphan sweep from usage registers


@dataclass(frozen=True, slots=True)
class OpenedRequest:
    """The row committed before the first token is delivered; it lets any gateway settle the request."""

    request_id: str
    tenant_id: str
    key_id: str
    model: str  # "tenant/model"
    version_id: str
    price_id: str
    num_prompt_tokens: int
    max_tokens: int  # per choice
    num_choices: int
    gateway_id: str
    opened_unix_us: int
    batch_id: str = ""  # of a batch's line, which pays only together with its result; empty: none


@dataclass(frozen=True, slots=True)
class ChoiceUsage:
    """The final usage of one choice: the tokens its gateway accepted."""

    request_id: str
    choice: int
    num_prompt_tokens: int  # computed or found cached; all of them once the request has a token
    num_cached_prompt_tokens: int
    num_output_tokens: int
    cause: FinishCause


@dataclass(frozen=True, slots=True)
class LineResult:
    """The answer to a line of a batch."""

    batch_id: str
    line: int  # of the input file, from 0
    request_id: str  # of the attempt that gave it
    status: int  # of HTTP
    body: str  # JSON


@dataclass(frozen=True, slots=True)
class RateLeft:
    """A limit of requests or tokens per minute, and what is left of it, which refills evenly."""

    per_minute: int
    num_left: float

    @property
    def full_in_s(self) -> float:
        """Seconds until the whole limit is left again, without further requests."""
        return (self.per_minute - self.num_left) * 60 / self.per_minute


class RatesLeft(NamedTuple):
    """The rates that bind a caller first, its key's or its tenant's; None: neither has a limit."""

    requests: RateLeft | None = None
    tokens: RateLeft | None = None


NO_RATES: Final = RatesLeft()


@dataclass(frozen=True, slots=True)
class Reservation:
    """A request's part of its limits: ``Limiter.admit`` reserves it, ``Limiter.release`` settles it."""

    reservation_id: str  # empty for callers without limits
    tenant_id: str
    key_id: str
    max_output_tokens: int  # whose cost it covers, over all choices
    num_requests: int = 0  # of the rate; 0: a further prompt of a call
    num_tokens: int = 0
    reserved_nano: int = 0
    rates: RatesLeft = NO_RATES
