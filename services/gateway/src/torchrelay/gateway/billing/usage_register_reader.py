"""Reads usage registers from JetStream: everything workers reported for one gateway, merged."""

from __future__ import annotations

from collections.abc import Collection

from google.protobuf.message import DecodeError
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeout
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from torchrelay.common.cancellation import cancellable
from torchrelay.common.errors import Unavailable
from torchrelay.common.net.nats_client import Subjects, ensure_streams
from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1 import generation_pb2
from torchrelay.gateway.billing.usage_register import EMPTY_REGISTER, UsageRegister, merge_registers

log = get_logger(__name__)
_FETCH_MESSAGES = 500
_FETCH_TIMEOUT_S = 2.0
RegistersByRequest = dict[str, dict[int, UsageRegister]]  # request id -> choice -> register


class UsageRegisterReader:
    """Reads the usage stream on demand; nothing is consumed while all gateways are alive."""

    def __init__(self, client: Client, subjects: Subjects, num_replicas: int = 1) -> None:
        self._js: JetStreamContext = client.jetstream()
        self._subjects, self._num_replicas = subjects, num_replicas

    async def read(self, gateway_id: str, request_ids: Collection[str]) -> RegistersByRequest:
        """The merged registers of these requests. Raises ``Unavailable`` if JetStream cannot be read."""
        try:
            return await cancellable(self._read(gateway_id, request_ids))
        except (NatsError, NatsTimeout, OSError) as error:
            raise Unavailable(f"cannot read the usage registers of {gateway_id}: {error!r}") from error

    async def _read(self, gateway_id: str, request_ids: Collection[str]) -> RegistersByRequest:
        merged: RegistersByRequest = {}
        # A server that lost its storage has no stream.
        await ensure_streams(self._js, self._subjects, self._num_replicas)
        consumer = await self._js.pull_subscribe(
            self._subjects.usage(gateway_id),
            stream=self._subjects.usage_stream,
            config=ConsumerConfig(ack_policy=AckPolicy.NONE, deliver_policy=DeliverPolicy.ALL, inactive_threshold=30),
        )
        try:
            num_left = (await consumer.consumer_info()).num_pending or 0
            while num_left > 0:
                messages = await consumer.fetch(min(num_left, _FETCH_MESSAGES), timeout=_FETCH_TIMEOUT_S)
                num_left -= len(messages)
                for message in messages:
                    _merge_message(merged, message.data, request_ids)
        finally:
            await consumer.unsubscribe()
        return merged


def _merge_message(merged: RegistersByRequest, data: bytes, request_ids: Collection[str]) -> None:
    try:
        report = generation_pb2.UsageRegister.FromString(data)
    except DecodeError:
        log.warning("register_malformed", num_bytes=len(data))
        return
    if report.request_id not in request_ids:
        return
    choices = merged.setdefault(report.request_id, {})
    register = UsageRegister(report.num_prompt_tokens, report.num_cached_prompt_tokens, report.output_position)
    choices[report.choice] = merge_registers(choices.get(report.choice, EMPTY_REGISTER), register)
