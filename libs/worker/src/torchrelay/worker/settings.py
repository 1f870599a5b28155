"""The settings of one worker process."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, ValidationInfo, field_validator

from torchrelay.common.host.labels import checked_labels
from torchrelay.common.identity.callers import Caller
from torchrelay.common.process.settings import NODE_ID, ServiceSettings
from torchrelay.control.v1 import types_pb2

_MIN_SIZES = {"kv_pool_bytes": 1 << 20, "token_budget": 16, "kv_block_tokens": 16}
ROLES = {"prefill": types_pb2.ROLE_PREFILL, "decode": types_pb2.ROLE_DECODE}


ADAPTER_RANKS = (0, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM sets memory aside for


class WorkerSettings(ServiceSettings):
    """The settings of one slot on one device. Every field is also a flag and an environment variable."""

    caller = Caller.WORKER
    ended: ClassVar = {"kv_by_shared_memory": "workers of a host hand over KV by loopback, which was not slower"}
    worker_id: str = Field(pattern=NODE_ID, description="Stable name of this worker; node_key is derived from it.")
    node_key: str = Field(
        pattern="^[0-9a-fA-F]{64}$", description="Hex key of 32 bytes: derive_node_key(cluster key, worker_id)."
    )
    host_id: str = Field("local", description="Name of this host, the same as its param-store's.")
    store_address: str = Field("127.0.0.1:7103", description="gRPC address of this host's param-store.")
    store_token: str = Field(
        "",
        description="Token that workers show to that param-store: call_token(its node key, worker); not with TLS.",
    )
    compiled_key: str = Field(
        "",
        pattern="^([0-9a-fA-F]{64})?$",
        description="Hex key of 32 bytes, of all workers of one join scope: derive_compiled_key(cluster key,"
        " scope). With it, they share what their compilers have written, through the remote store; empty: each compiles"
        " for itself.",
    )
    labels: str = Field(
        "", description="Labels of this host, as zone=a,gpu=l4; models may require them (models set --hosts)."
    )
    roles: str = Field("prefill,decode", description="Roles that this process can play: prefill, decode or both.")
    port: int = Field(0, description="gRPC port; 0: any free port.")
    data_port: int = Field(0, description="Data-plane port; 0: any free port.")
    engine: str = Field("torchrelay", description="Engine of this slot: torchrelay, or vllm if it is installed.")
    device: str = Field("cpu", description="cpu, cuda:N, or auto: the first GPU where there is one.")
    devices: int = Field(
        1, ge=1, le=64, description="Devices that compute each model of this slot together: needs the engine vllm."
    )
    kv_pool_bytes: int = Field(
        0,
        description="Bytes of the KV page pool, taken at the start, of all devices of the slot together; 0: 256 MiB on"
        " a CPU, a quarter of the free memory of a GPU.",
    )
    unsent_kv_bytes: int = Field(
        0,
        ge=0,
        description="Host memory for KV that waits for decode workers; 0: as much as the KV pool, on a GPU at most"
        " 2 GiB.",
    )
    threads: int = Field(0, ge=0, description="Compute threads; 0: one per core, within the container's CPU limit.")
    cores_file: Path | None = Field(
        None, description="File through which the workers of a host share its cores while several of them compute."
    )
    token_budget: int = Field(
        0,
        description="Maximum tokens in one engine step; 0: 512 on a CPU, 2,048 on a GPU, 8,192 on one from Hopper on"
        " with 70 GiB or more.",
    )
    vllm_graphs: bool = Field(
        False,
        description="Let vLLM compile each model when it is loaded, and record its steps on a GPU: faster steps,"
        " after a first load that takes a minute longer.",
    )
    kv_block_tokens: int = Field(
        0,
        description="Tokens of one KV block, which is transferred as one chunk; best at least token_budget; 0: 512, on"
        " a GPU token_budget if that is more.",
    )
    cpu_reorder: bool = Field(
        True,
        description="Where the CPU has 16-bit arithmetic, copy the weights in the background into the order that its"
        " kernels read fastest: faster steps, for private memory of the weights' size. Skipped where less than twice"
        " that is available.",
    )
    max_adapter_rank: int = Field(
        0,
        description="Maximum rank of LoRA adapters in a slot of vLLM, which sets memory aside for them and then serves"
        " adapters of the architectures that may have any: 8, 16, 32, 64, 128, 256, 320 or 512; 0: none. Torchrelay's"
        " engine takes every rank.",
    )
    max_adapters: int = Field(4, ge=1, le=64, description="Adapters in one step of vLLM; requests of others wait.")
    prefix_cache: bool = Field(True, description="Compute a common prefix of one tenant's prompts only once.")
    max_attempts: int = Field(1024, ge=1, description="Maximum attempts running or waiting; more are refused.")
    start_timeout_s: float = Field(
        10.0, gt=0, description="How long a KV offer waits for the gateway to start its attempt here."
    )
    engine_stall_s: float = Field(
        10.0,
        gt=0,
        description="Health checks fail when the engine has work and does not advance for this long beyond the"
        " predicted duration of its step; five seconds later the worker ends, to be restarted, unless watchdog_s is 0.",
    )
    max_incoming: int = Field(64, ge=1, description="Maximum KV buffers received at once; more wait.")
    kv_timeout_s: float = Field(
        30.0, gt=0, description="Fail an attempt when its KV transfer makes no progress for this long."
    )

    @field_validator("max_adapter_rank")
    @classmethod
    def _rank_of_vllm(cls, value: int) -> int:
        if value not in ADAPTER_RANKS:
            raise ValueError(f"must be one of {', '.join(map(str, ADAPTER_RANKS))}, not {value}")
        return value

    @field_validator("labels")
    @classmethod
    def _valid_labels(cls, value: str) -> str:
        return ",".join(checked_labels(label.strip() for label in value.split(",") if label.strip()))

    @field_validator("roles")
    @classmethod
    def _known_roles(cls, value: str) -> str:
        names = [name.strip() for name in value.split(",") if name.strip()]
        if not names or any(name not in ROLES for name in names):
            raise ValueError(f"must be a comma-separated list of {', '.join(ROLES)}, not {value!r}")
        return ",".join(dict.fromkeys(names))

    @field_validator(*_MIN_SIZES)
    @classmethod
    def _automatic_or_enough(cls, value: int, info: ValidationInfo) -> int:
        least = _MIN_SIZES[info.field_name or ""]
        if value and value < least:
            raise ValueError(f"must be 0, or at least {least}")
        return value

    @property
    def role_names(self) -> list[str]:
        return self.roles.split(",")

    @property
    def role_numbers(self) -> list[types_pb2.Role.ValueType]:
        return [ROLES[name] for name in self.role_names]
