"""The settings of a model: their types and ranges, and who may change them."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from torchrelay.common.host.labels import MAX_LABELS, checked_labels
from torchrelay.gateway.catalog.schedules import MAX_ENTRIES, MAX_INSTANCES, parse_entry
from torchrelay.gateway.core import ENGINE_FORMS, MOST_TARGET_S, checked_target_s
from torchrelay.gateway.whole_number import WholeNumber

_TARGET_BOUNDS = Field(json_schema_extra={"minimum": 0, "maximum": MOST_TARGET_S})
TargetS = Annotated[float, _TARGET_BOUNDS, AfterValidator(checked_target_s)]
Engine = Annotated[str, Field(pattern=ENGINE_FORMS)]
Labels = Annotated[list[str], Field(max_length=MAX_LABELS), AfterValidator(checked_labels)]
MOST_THREADS: Final = 4096


class TenantSettings(BaseModel):
    """``None``: unchanged; for a new model 0, the scheduler's default."""

    model_config = ConfigDict(extra="forbid", strict=True)
    idle_timeout_s: float | None = Field(default=None, ge=0, le=30 * 86400)
    max_instances: WholeNumber | None = Field(default=None, ge=0, le=10_000)
    engine: Engine | None = None

    def columns(self) -> dict[str, Any]:
        """The columns to change."""
        given = self.model_dump(exclude_none=True, include=set(ModelSettings.model_fields))
        if "schedule" in given:
            entries = [str(parse_entry(entry)) for entry in given["schedule"]]
            given["schedule"] = msgspec.json.encode(entries).decode()
        if "hosts" in given:
            given["hosts"] = msgspec.json.encode(given["hosts"]).decode()
        return given


class ModelSettings(TenantSettings):
    """All settings. Only the operator may change those that ``TenantSettings`` lacks: a minimum holds slots that no
    request pays for, models compete for slots by their targets, and what one takes of a host its neighbours lack,
    and few requests at once on an instance need many instances.
    """

    min_instances: WholeNumber | None = Field(default=None, ge=0, le=MAX_INSTANCES)
    schedule: list[Annotated[str, Field(max_length=128)]] | None = Field(default=None, max_length=MAX_ENTRIES)
    interactive_ttft_s: TargetS | None = None  # this and what follows: see ``core.LatencyTargets``
    standard_ttft_s: TargetS | None = None
    batch_ttft_s: TargetS | None = None
    tbt_target_s: TargetS | None = None
    max_concurrency: WholeNumber | None = Field(default=None, ge=0, le=10_000)  # from here on: see ``core.Resources``
    threads: WholeNumber | None = Field(default=None, ge=0, le=MOST_THREADS)
    kv_share: float | None = Field(default=None, gt=0, le=1)
    hosts: Labels | None = None


OPERATORS_FIELDS: Final = tuple(name for name in ModelSettings.model_fields if name not in TenantSettings.model_fields)
