"""The settings of one worker process."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from torchrelay.common.ids import new_id
from torchrelay.common.process.settings import ServiceSettings
from torchrelay.control.v1 import types_pb2

ROLES = {"prefill": types_pb2.ROLE_PREFILL, "decode": types_pb2.ROLE_DECODE}


class WorkerSettings(ServiceSettings):
    """One slot on one device. Every field is also a flag and an environment variable."""

    worker_id: str = Field(default_factory=lambda: new_id("wrk"), description="Stable name of this worker.")
    host_id: str = Field("local", description="Name of this host; the param-store of the same host carries the same.")
    store_address: str = Field("127.0.0.1:7103", description="gRPC address of this host's param-store.")
    roles: str = Field("prefill,decode", description="Roles this process can play: prefill, decode or both.")
    port: int = Field(0, description="gRPC port; 0: any free one.")
    data_port: int = Field(0, description="Port of the data plane; 0: any free one.")
    device: str = Field("cpu", description="cpu, cuda:N, or auto: the first GPU where there is one.")
    kv_pool_bytes: int = Field(256 << 20, ge=1 << 20, description="Bytes for KV pages, faulted in at the start.")
    threads: int = Field(0, ge=0, description="Compute threads; 0: one per core.")
    cores_file: Path | None = Field(
        None, description="A file by which the workers of a host divide its cores while several of them compute."
    )
    token_budget: int = Field(512, ge=16, description="Most tokens in one engine step.")
    kv_block_tokens: int = Field(
        512,
        ge=16,
        description="Tokens of one KV block, handed over as one chunk; at least token_budget is best.",
    )
    cpu_reorder: bool = Field(
        True,
        description="Where the CPU has arithmetic of the weights' 16 bits, copy those that serve from shared memory, in"
        " the background, into the order that its kernels read fastest: steps are quicker, for private memory of the"
        " weights' size. Not where less than twice that is available.",
    )
    prefix_cache: bool = Field(True, description="Prompts of a tenant that begin alike compute the common part once.")
    max_attempts: int = Field(1024, ge=1, description="Most attempts running or waiting here; more are refused.")
    start_timeout_s: float = Field(
        10.0, gt=0, description="How long the other role's worker waits for a gateway to start its attempt here."
    )
    max_incoming: int = Field(64, ge=1, description="Most KV buffers received at once; more wait their turn.")
    kv_by_shared_memory: bool = Field(
        False,
        description="Hand KV to decode workers of the same host_id by shared memory instead of the network's loopback.",
    )
    kv_timeout_s: float = Field(
        30.0, gt=0, description="Longest silence of a KV buffer before the attempt is given up."
    )

    @field_validator("roles")
    @classmethod
    def _known_roles(cls, value: str) -> str:
        names = [name.strip() for name in value.split(",") if name.strip()]
        if not names or any(name not in ROLES for name in names):
            raise ValueError(f"must be a comma-separated choice of {', '.join(ROLES)}, not {value!r}")
        return ",".join(dict.fromkeys(names))

    @property
    def role_names(self) -> list[str]:
        return self.roles.split(",")

    @property
    def role_numbers(self) -> list[types_pb2.Role.ValueType]:
        return [ROLES[name] for name in self.role_names]
