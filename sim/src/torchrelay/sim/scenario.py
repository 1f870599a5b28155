"""Models, fleets and requests of a simulation, in bytes, seconds and tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.scheduler.policy.types import ServiceClass


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model, and its figures on the group of devices that it needs."""

    name: str
    num_devices: int
    pack_bytes: int
    num_layers: int
    kv_bytes_per_token: int
    latency: LatencyModel
    ttft_base_s: float  # see ``ttft_target_s``
    prefill_tokens_per_s: float
    tpot_target_s: float
    ttft_prompt_factor: float = 1.2
    min_instances: int = 0  # that stay loaded without demand
    idle_timeout_s: float = 0.0  # 0, also of the others: the scheduler's default
    max_instances: int = 0

    def ttft_target_s(self, num_prompt_tokens: int) -> float:
        """Objective for the first token: a base, and a multiple of the time to compute the prompt alone."""
        return self.ttft_base_s + self.ttft_prompt_factor * num_prompt_tokens / self.prefill_tokens_per_s


@dataclass(frozen=True, slots=True)
class Fleet:
    """Equal hosts, each with one store, and one slot per group of devices."""

    num_hosts: int
    groups: tuple[int, ...]  # devices of each slot of a host
    nic_bytes_per_s: float  # of a host, per direction
    device_bytes_per_s: float  # from host memory into one device
    disk_bytes_per_s: float  # of a host; every pack lies on every disk
    arena_bytes: int  # of a host
    device_memory_bytes: int = 80 * 10**9

    @property
    def num_devices(self) -> int:
        return self.num_hosts * sum(self.groups)


DEFAULT_MAX_TOKENS = 512  # the gateway's default
BLOCK_TOKENS = 64  # of a prompt, per hash


@dataclass(frozen=True, slots=True)
class Request:
    request_id: str
    arrives_at: float
    model: str
    num_prompt_tokens: int
    num_output_tokens: int
    tenant: str = ""  # that uploaded the same files; empty: the model's own tenant
    service_class: ServiceClass = ServiceClass.STANDARD
    prefix: str = ""  # name of the beginning that its prompt shares with others
    num_prefix_tokens: int = 0

    @property
    def block_hashes(self) -> tuple[bytes, ...]:
        """Hashes of the shared beginning's whole routing blocks."""
        return tuple(f"{self.prefix} {number}".encode() for number in range(self.num_prefix_tokens // BLOCK_TOKENS))

    @property
    def max_tokens(self) -> int:
        """The client's limit: the default, doubled until the answer fits. No client knows the length beforehand."""
        return max(DEFAULT_MAX_TOKENS, 1 << (self.num_output_tokens - 1).bit_length())


@dataclass(slots=True)
class RequestOutcome:
    """The outcome of a request, in the simulation's time; 0: the request did not get that far."""

    request: Request
    arrived_at: float
    first_token_at: float = 0.0
    ended_at: float = 0.0
    num_attempts: int = 1
    is_refused: bool = False

    @property
    def ttft_s(self) -> float:
        return self.first_token_at - self.arrived_at if self.first_token_at else float("inf")

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first."""
        if not self.ended_at:
            return float("inf")
        return (self.ended_at - self.first_token_at) / max(self.request.num_output_tokens - 1, 1)

    def attains(self, model: ServedModel) -> bool:
        """Whether the request met both objectives; a refused or unfinished request did not."""
        return self.ttft_s <= model.ttft_target_s(self.request.num_prompt_tokens) and self.tpot_s <= model.tpot_target_s
