"""Settings of the scheduler."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import ClassVar

from pydantic import Field, FilePath, ValidationInfo, field_validator

from torchrelay.common.identity.callers import Caller
from torchrelay.common.net.nats_client import MIN_STREAM_BYTES, StreamSizes
from torchrelay.common.process.settings import ServiceSettings
from torchrelay.scheduler.policy.config import PolicyConfig, PoolMode, ScalingMode


class SchedulerSettings(ServiceSettings):
    """Every field is a flag (``--port``), a variable (``TORCHRELAY_PORT``) and a line of the TOML file."""

    caller = Caller.SCHEDULER
    ended: ClassVar = {
        "gateway_grace_s": "a disconnected gateway always has 10 s to return",
        "late_cost": "set late_cost_s, in device seconds, to the former idle_timeout_s times late_cost",
    }
    port: int = Field(0, description="gRPC port; 0: any free one.")
    lease_s: float = Field(
        0.0,
        ge=0,
        le=60,
        description="For several schedulers, of which one is active and the others stand by: how long the active one "
        "may be silent until another takes over, such as 2; the same for all. 0: this is the only one.",
    )
    record: Path | None = Field(None, description="Write every input of the policy to this file, for --replay.")
    replay: FilePath | None = Field(
        None, description="Apply the inputs in this file, print their effects as lines of JSON, and exit."
    )
    history_bytes: int = Field(
        256 << 20, ge=MIN_STREAM_BYTES, description="What NATS sets aside for the history; where it cannot, less."
    )
    usage_bytes: int = Field(
        1 << 30, ge=MIN_STREAM_BYTES, description="What NATS sets aside for usage registers; where it cannot, less."
    )
    cluster_key: str = Field(
        "",
        validate_default=True,
        description="Hex key of at least 16 bytes that all tickets and node keys derive from. Required to serve.",
    )

    scaling: ScalingMode = Field(
        ScalingMode.ACT,
        description="advise: only the minimums of models are loaded; torchrelay explain and events show all other "
        "decisions, which change nothing. Requests for a model without an instance are refused.",
    )
    late_cost_s: float = Field(
        60.0,
        gt=0,
        description="Device seconds that a late request costs: with a higher value, models get more instances and keep "
        "unused ones for longer.",
    )
    idle_timeout_s: float = Field(
        0.0,
        ge=0,
        description="How long an unused model keeps its instance; models may override it. 0: as long as its next load "
        "would cost, with the requests that it makes late.",
    )
    max_instances: int = Field(8, ge=1, description="Maximum instances of a model per role; models may override it.")
    pool_mode: PoolMode = Field(
        PoolMode.OFF,
        description="advise: torchrelay top and events show how many slots each pool should have; nothing changes. "
        "follow: the same, for a launcher that starts and stops the workers.",
    )
    pool_min_slots: int = Field(0, ge=0, description="Minimum slots in the target of each pool.")
    pool_max_slots: int = Field(0, ge=0, description="Maximum slots in the target of each pool; 0: no limit.")
    pool_spare_slots: int = Field(0, ge=0, description="Free slots in the target, beside those in use.")
    keda_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port of the gRPC service by which KEDA scales workers; 0: none. It needs no token, and pool_mode "
        "follow; of several schedulers only the active one listens there.",
    )
    queue_limit: int = Field(
        1024, ge=1, description="Maximum waiting requests per model; further ones are refused with Retry-After."
    )
    interactive_ttft_s: float = Field(
        0.5,
        gt=0,
        description="Objective for the time to the first token of requests with service_tier priority; models may "
        "override it, as those that follow.",
    )
    standard_ttft_s: float = Field(2.0, gt=0, description="The same for requests that name no service_tier.")
    batch_ttft_s: float = Field(
        600.0, gt=0, description="The same with service_tier flex: until 30 s before, they yield to all others."
    )
    max_open_per_instance: int = Field(64, ge=1, description="Maximum concurrent requests on one decode instance.")
    tbt_target_s: float = Field(
        0.1,
        gt=0,
        description="Objective for the time between tokens: requests go where it is met, if anywhere; models may "
        "override it.",
    )
    drain_s: float = Field(30.0, ge=0, description="Time for the running requests of a drained instance to finish.")

    replicate: bool = Field(
        True, description="Keep and rebuild copies of packs in RAM beside those that instances use."
    )

    @field_validator("cluster_key")
    @classmethod
    def _is_key(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("replay") is None and len(bytes.fromhex(value)) < 16:
            raise ValueError("must have at least 16 bytes in hex")
        return value

    @field_validator("pool_max_slots")
    @classmethod
    def _is_at_least_minimum(cls, value: int, info: ValidationInfo) -> int:
        if 0 < value < info.data.get("pool_min_slots", 0):
            raise ValueError("must be at least pool_min_slots, or 0 for no limit")
        return value

    @field_validator("keda_port")
    @classmethod
    def _has_targets(cls, value: int, info: ValidationInfo) -> int:
        if value and info.data.get("pool_mode") is not PoolMode.FOLLOW:
            raise ValueError("KEDA follows the scheduler's targets: set pool_mode to follow, or keda_port to 0")
        return value

    @property
    def stream_sizes(self) -> StreamSizes:
        return StreamSizes(self.history_bytes, self.usage_bytes)

    @property
    def config(self) -> PolicyConfig:
        """The policy's configuration, from all settings that have the name of one of its fields."""
        names = {field.name for field in fields(PolicyConfig)} & type(self).model_fields.keys()
        return PolicyConfig(**{name: getattr(self, name) for name in names})
