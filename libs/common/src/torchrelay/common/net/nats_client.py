"""NATS: load reports and hints on core subjects, events and usage registers on JetStream.

Payloads are the protobuf messages of ``torchrelay.control.v1`` (reports, registers) or JSON objects (events, hints).
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import asdict, dataclass

import nats
from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from nats.js import JetStreamContext
from nats.js.api import RetentionPolicy, StorageType, StreamConfig

from torchrelay.common.cancellation import cancellable
from torchrelay.common.errors import Unavailable
from torchrelay.common.net.urls import nats_servers
from torchrelay.common.process.telemetry import get_logger

log = get_logger(__name__)

WARN_EVERY_S = 10.0
START_S = 15.0  # for a process that cannot start without NATS: then it ends, and its supervisor starts it again
CLOSE_TIMEOUT_S = 3.0
FLUSH_S = 10
DEFAULT_INBOX = "_INBOX"
HISTORY_STREAM = "RELAY_HISTORY"
USAGE_STREAM = "RELAY_USAGE"
LEASE_STREAM = "RELAY_LEASE"
MIN_STREAM_BYTES = 1 << 20
_STREAM_EXISTS = 10058  # error codes of JetStream's API
_NO_STORAGE = frozenset({10023, 10028, 10047})  # of the server, of the account, and of its file storage


class Subjects:
    """Subjects and streams of one install; ``prefix`` separates installs on one server."""

    def __init__(self, prefix: str = "") -> None:
        self._dotted = f"{prefix}." if prefix else ""
        self._stream = f"{prefix}_" if prefix else ""

    @property
    def history_stream(self) -> str:
        return f"{self._stream}{HISTORY_STREAM}"

    @property
    def usage_stream(self) -> str:
        return f"{self._stream}{USAGE_STREAM}"

    @property
    def lease_stream(self) -> str:
        return f"{self._stream}{LEASE_STREAM}"

    @property
    def lease(self) -> str:
        """Subject of the lease that the active scheduler holds."""
        return f"{self._dotted}relay.lease.scheduler"

    def worker_load(self, worker_id: str = "*") -> str:
        return f"{self._dotted}relay.load.worker.{worker_id}"

    def store_load(self, store_id: str = "*") -> str:
        return f"{self._dotted}relay.load.store.{store_id}"

    @property
    def key_hint(self) -> str:
        return f"{self._dotted}relay.hint.key"

    def event(self, kind: str) -> str:
        """``kind`` such as ``model.published``, ``instance.ready``, ``scale.up``."""
        return f"{self._dotted}relay.event.{kind}"

    def usage(self, gateway_id: str) -> str:
        return f"{self._dotted}relay.usage.{gateway_id}"


class _Client(Client):
    async def flush(self, timeout: int = FLUSH_S) -> None:
        """Returns once the server has read what was published and subscribed before.

        nats-py sends the PING at once and the rest later, so its answer alone would prove nothing.
        """
        await self._flush_pending(force_flush=True)
        await super().flush(timeout)

    async def close(self) -> None:
        """Closes within ``CLOSE_TIMEOUT_S``; nats-py would wait as long as a stalled broker leaves data unsent."""
        abort = asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self._abort_connection)
        try:
            await super().close()
        finally:
            abort.cancel()

    def _abort_connection(self) -> None:
        """Aborts the connection, which releases pending writers."""
        writer = self._transport._io_writer if isinstance(self._transport, TcpTransport) else None
        if writer is not None:
            log.warning("nats_closed_unsent", num_bytes=writer.transport.get_write_buffer_size())
            writer.transport.abort()


def inbox_prefix(user: str) -> str:
    """The subject of answers to this user's requests; no other user may subscribe to it."""
    return f"{DEFAULT_INBOX}.{user}"


def _is_subject(user: str | None) -> bool:
    """Whether the user's name can stand in a subject; a foreign server may have other users."""
    return user is not None and re.fullmatch(r"[\w-]+", user) is not None


async def connect(url: str, name: str) -> Client:
    """A connection that reconnects forever; nats-py buffers what is published meanwhile, within bounds.

    ``url``: one server or several, separated by commas, with the user and the password if there are any.
    """

    warned_at = -WARN_EVERY_S

    async def on_error(error: Exception) -> None:
        nonlocal warned_at
        if time.monotonic() - warned_at >= WARN_EVERY_S:
            warned_at = time.monotonic()
            log.warning("nats_unreachable", url=shown, error=str(error))

    client = _Client()
    servers = nats_servers(url)
    shown = ",".join(servers.urls)
    is_token = servers.user is not None and servers.password is None
    # Credentials apart from the addresses, because the addresses that servers of a cluster announce have none.
    connecting = client.connect(
        servers.urls,
        name=name,
        user=None if is_token else servers.user,
        password=servers.password,
        token=servers.user if is_token else None,
        inbox_prefix=DEFAULT_INBOX if is_token or not _is_subject(servers.user) else inbox_prefix(str(servers.user)),
        max_reconnect_attempts=-1,
        reconnect_time_wait=0.2,  # type: ignore[arg-type]  # passed to asyncio.sleep: seconds, whatever the annotation
        connect_timeout=5,
        pending_size=4 << 20,
        error_cb=on_error,
    )
    try:
        await cancellable(connecting)
    except asyncio.CancelledError:
        await client.close()  # it may already have a socket
        raise
    return client


async def connect_at_start(url: str, name: str) -> Client:
    """``connect`` for a process that cannot start without NATS. Raises ``Unavailable`` after ``START_S``."""
    try:
        async with asyncio.timeout(START_S):
            return await connect(url, name)
    except TimeoutError:
        shown = ",".join(nats_servers(url).urls)
        raise Unavailable(f"NATS at {shown} does not answer", field="nats_url") from None


@dataclass(frozen=True, slots=True)
class StreamSizes:
    """The largest bytes of each stream. NATS sets them aside; beyond them it drops the oldest messages."""

    history_bytes: int = 256 << 20
    usage_bytes: int = 1 << 30


async def ensure_streams(
    js: JetStreamContext, subjects: Subjects, num_replicas: int = 1, sizes: StreamSizes | None = None
) -> bool:
    """Creates both streams, or gives them ``sizes``; where NATS cannot set that much aside, half, a quarter, and so on.

    Both are bounded: neither is the only record of money. Returns whether they have the sizes. Without ``sizes`` an
    existing stream is left as it is and a missing one begins small: the scheduler gives it its size. Raises nats-py's
    errors.
    """
    asked = sizes or StreamSizes(MIN_STREAM_BYTES, MIN_STREAM_BYTES)
    is_full_size = True
    for name, subject, max_bytes, max_age_s in (
        (subjects.usage_stream, subjects.usage("*"), asked.usage_bytes, 7 * 86400),
        (subjects.history_stream, subjects.event(">"), asked.history_bytes, 30 * 86400),
    ):
        config = StreamConfig(
            name=name,
            subjects=[subject],
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            max_bytes=max_bytes,
            max_age=max_age_s,
            num_replicas=num_replicas,
        )
        is_full_size &= await _ensure_stream(js, config, may_update=sizes is not None)
    return is_full_size


async def _ensure_stream(js: JetStreamContext, config: StreamConfig, *, may_update: bool) -> bool:
    """Returns whether the stream has ``config.max_bytes``."""
    asked_bytes = max_bytes = config.max_bytes or 0
    while True:
        config = config.evolve(max_bytes=max_bytes)
        try:
            try:
                await cancellable(js.add_stream(config))
            except nats.js.errors.BadRequestError as error:
                if error.err_code != _STREAM_EXISTS:
                    raise
                if may_update:  # it exists with another configuration
                    await cancellable(js.update_stream(config))
        except nats.js.errors.APIError as error:
            if error.err_code not in _NO_STORAGE or max_bytes <= MIN_STREAM_BYTES:
                raise
            max_bytes = max(max_bytes // 2, MIN_STREAM_BYTES)
            continue
        return max_bytes == asked_bytes


async def try_streams(js: JetStreamContext, subjects: Subjects, num_replicas: int, sizes: StreamSizes) -> None:
    """``ensure_streams``, but an error is only logged: the platform serves without history and registers, too."""
    try:
        if not await ensure_streams(js, subjects, num_replicas, sizes):
            log.warning("streams_reduced", **asdict(sizes))
    except (nats.errors.Error, OSError) as error:
        log.warning("streams_not_ensured", error=repr(error)[:200])


async def keep_streams(
    js: JetStreamContext, subjects: Subjects, num_replicas: int, sizes: StreamSizes, every_s: float = 30.0
) -> None:
    """Ensures the streams until cancelled: NATS may be away, lose its storage, or have more space later."""
    while True:
        await asyncio.sleep(every_s)
        await try_streams(js, subjects, num_replicas, sizes)
