"""KEDA's gRPC service, by which a ScaledObject scales a Deployment of workers to the slots that its pool should have.

The metric is the number of slots wanted, with a target of 1, so the replicas that KEDA asks for are these slots.
Answers name no tenant and no model.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from typing import Final

from torchrelay.common.errors import InvalidRequest, Overloaded, Unavailable
from torchrelay.common.identity.callers import ANYONE, MethodCallers
from torchrelay.control.v1 import external_scaler_pb2, external_scaler_pb2_grpc
from torchrelay.scheduler.policy.types import Pool, PoolTarget, Role
from torchrelay.scheduler.service.controller import CallContext, Controller

METRIC: Final = "slots-wanted"
_TARGET: Final = 1
MAX_STREAMS: Final = 256  # KEDA opens one for each ScaledObject
_DEVICES: Final = "numDevices"
_ROLE: Final = "role"
_ROLES: Final = {"both": None, **{role.name.lower(): role for role in Role}}
_COUNT: Final = re.compile("[1-9][0-9]{0,3}")
# KEDA reads these itself and passes them on.
_OF_KEDA: Final = frozenset(("scalerAddress", "enableTLS", "unsafeSsl", "tlsCertFile"))
_MAX_SHOWN: Final = 64  # characters of a value in an error

_SERVICE: Final = "/externalscaler.ExternalScaler"
# KEDA can send no token of ours; with TLS it shows a certificate of the cluster's CA.
CALLERS: MethodCallers = {
    f"{_SERVICE}/{method}": ANYONE for method in ("IsActive", "StreamIsActive", "GetMetricSpec", "GetMetrics")
}


def selected_pool(metadata: Mapping[str, str]) -> Pool:
    """The pool that the metadata of a KEDA trigger selects. Raises ``InvalidRequest`` naming the key."""
    for key in sorted(metadata.keys() - _OF_KEDA - {_DEVICES, _ROLE}):
        raise _invalid(key, f"{key[:_MAX_SHOWN]!r} is not a key of this scaler, whose keys are {_DEVICES} and {_ROLE}")
    devices, role = metadata.get(_DEVICES, ""), metadata.get(_ROLE, "both")
    if not _COUNT.fullmatch(devices):
        given = f"is {devices[:_MAX_SHOWN]!r}" if _DEVICES in metadata else "is missing"
        raise _invalid(_DEVICES, f'{_DEVICES} {given}; give the number of devices of each worker, such as "1"')
    if role not in _ROLES:
        known = ", ".join(_ROLES)
        raise _invalid(_ROLE, f"{_ROLE} is {role[:_MAX_SHOWN]!r}; give the part that the workers play: {known}")
    return Pool(int(devices), _ROLES[role])


def _invalid(key: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, field=f"scalerMetadata.{key}")


class ExternalScalerServicer(external_scaler_pb2_grpc.ExternalScalerServicer):
    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._streams: set[asyncio.Event] = set()
        self._is_closed = False

    def close(self) -> None:
        """Ends all streams without an error: after an error KEDA waits up to a minute before it opens another."""
        self._is_closed = True
        for evaluated in self._streams:
            evaluated.set()

    async def IsActive(
        self, request: external_scaler_pb2.ScaledObjectRef, context: CallContext
    ) -> external_scaler_pb2.IsActiveResponse:
        return external_scaler_pb2.IsActiveResponse(result=self._known_number(request) > 0)

    async def StreamIsActive(
        self, request: external_scaler_pb2.ScaledObjectRef, context: CallContext
    ) -> AsyncIterator[external_scaler_pb2.IsActiveResponse]:
        """Sends changes only, and none before the last has left: a slow client misses those in between."""
        pool = selected_pool(request.scaler_metadata)
        if len(self._streams) >= MAX_STREAMS:
            raise Overloaded(f"{MAX_STREAMS} streams of StreamIsActive are open; close one, or scale fewer Deployments")
        evaluated = self._controller.watch(context, only_pools=True)
        self._streams.add(evaluated)
        context.add_done_callback(lambda _: self._streams.discard(evaluated))
        sent: bool | None = None
        while not self._is_closed:
            evaluated.clear()
            number = self._num_wanted(pool)
            if number is not None and (number > 0) != sent:
                sent = number > 0
                yield external_scaler_pb2.IsActiveResponse(result=sent)
            await evaluated.wait()

    async def GetMetricSpec(
        self, request: external_scaler_pb2.ScaledObjectRef, context: CallContext
    ) -> external_scaler_pb2.GetMetricSpecResponse:
        selected_pool(request.scaler_metadata)
        spec = external_scaler_pb2.MetricSpec(metric_name=METRIC, target_size=_TARGET, target_size_float=_TARGET)
        return external_scaler_pb2.GetMetricSpecResponse(metric_specs=[spec])

    async def GetMetrics(
        self, request: external_scaler_pb2.GetMetricsRequest, context: CallContext
    ) -> external_scaler_pb2.GetMetricsResponse:
        if request.metric_name != METRIC:
            message = f"there is no metric {request.metric_name[:_MAX_SHOWN]!r}; ask for {METRIC}"
            raise InvalidRequest(message, field="metricName")
        number = self._known_number(request.scaled_object_ref)
        value = external_scaler_pb2.MetricValue(metric_name=METRIC, metric_value=number, metric_value_float=number)
        return external_scaler_pb2.GetMetricsResponse(metric_values=[value])

    def _num_wanted(self, pool: Pool) -> int | None:
        """Slots that the pool should have; None until the pools were evaluated."""
        state = self._controller.policy.state
        return None if state.pools_evaluated_at is None else state.pool_targets.get(pool, PoolTarget()).num_wanted

    def _known_number(self, scaled_object: external_scaler_pb2.ScaledObjectRef) -> int:
        number = self._num_wanted(selected_pool(scaled_object.scaler_metadata))
        if number is None:
            raise Unavailable("the scheduler has just become active, and knows in a second how many slots it wants")
        return number
