"""Client of the scheduler's RPCs for people: views, explanations, events."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

import grpc
from pydantic import ValidationError

from torchrelay.cli.api.restarts import RESTART_TIMEOUT_S, restart_attempts
from torchrelay.cli.errors import CliError, Unreachable
from torchrelay.cli.home import Home
from torchrelay.common.errors import CallerRefused, CallerUnknown
from torchrelay.common.identity.callers import SCHEDULER_NODE, Caller
from torchrelay.common.identity.tls import Tls, TlsFiles, TlsUnusable
from torchrelay.common.net.rpc.channels import open_blocking_channel
from torchrelay.common.process.settings import ConfigUnusable, ServiceSettings, setting_errors
from torchrelay.control.v1 import scheduler_pb2, scheduler_pb2_grpc

T = TypeVar("T")


class SchedulerAccess(NamedTuple):
    """The scheduler that a command calls."""

    address: str
    tls: Tls | None
    token: str
    may_return: Callable[[], bool]  # whether it is worth waiting for when it does not answer


def local_tls(endpoints: Mapping[str, str]) -> Tls | None:
    """TLS credentials for the services of a local install; None if they do not use TLS. Raises ``CliError``."""
    if "tls_ca_file" not in endpoints:
        return None
    names = ("tls_ca_file", "tls_cert_file", "tls_key_file")
    try:
        return Tls(TlsFiles(*(Path(endpoints[name]) for name in names)))
    except TlsUnusable as error:
        raise CliError(str(error), "run this command as the user who started the platform") from error


def scheduler_access(home: Path | None, address: str | None) -> SchedulerAccess:
    """The scheduler at ``address``, otherwise that of the platform running at ``home``. Raises ``CliError``."""
    local = Home.at(home)
    if address is not None:
        token = os.environ.get("TORCHRELAY_SCHEDULER_TOKEN", "")
        return SchedulerAccess(address, environment_settings().tls, token, lambda: True)
    endpoints = local.endpoints("a scheduler with --scheduler")
    token = local.call_token(SCHEDULER_NODE, Caller.CLI)
    return SchedulerAccess(endpoints["scheduler"], local_tls(endpoints), token, lambda: local.running_pid() is not None)


def environment_settings() -> ServiceSettings:
    """The settings of every service by the TORCHRELAY_* variables, for a remote platform too. Raises ``CliError``."""
    try:
        return ServiceSettings()
    except ConfigUnusable as error:
        raise CliError(str(error), "fix the file, or unset the variable") from error
    except ValidationError as error:
        raise CliError(setting_errors(error)[0], "fix or unset the TORCHRELAY_* variables in this shell") from error


def watch(address: str, tls: Tls | None = None, token: str = "") -> Iterator[scheduler_pb2.ClusterView]:
    """A full view at once, then one after every change. Raises ``CliError`` or ``Unreachable``."""
    with open_blocking_channel(address, tls, token, Caller.SCHEDULER) as channel:
        try:
            yield from scheduler_pb2_grpc.SchedulerStub(channel).WatchCluster(scheduler_pb2.WatchClusterRequest())
        except grpc.RpcError as error:
            raise _failure(address, error) from error


def resumed(
    subscribe: Callable[[], Iterator[T]],
    may_return: Callable[[], bool],
    on_lost: Callable[[], None],
    retry_s: float = 1.0,
    timeout_s: float = RESTART_TIMEOUT_S,
) -> Iterator[T]:
    """The items of a stream that is subscribed to again whenever it breaks or ends, after ``on_lost()``.

    Raises ``Unreachable`` when the first subscription brings nothing, or when the scheduler stays away.
    """
    stream = subscribe()
    is_seen = False
    while True:
        try:
            for item in stream:
                is_seen = True
                yield item
            is_seen = True  # the scheduler ended the stream: it stops
        except Unreachable:
            if not is_seen:
                raise
        on_lost()
        try:
            for attempt in restart_attempts(Unreachable, may_return, retry_s, timeout_s):
                with attempt:
                    stream = _started(subscribe())
        except Unreachable as error:
            if not may_return():
                raise Unreachable("the platform has stopped", "start it again: torchrelay up") from error
            raise Unreachable("the scheduler no longer answers", "is the platform up? torchrelay up") from error


def _started(stream: Iterator[T]) -> Iterator[T]:
    """``stream`` once its first item is there. Raises ``Unreachable`` when it ends before."""
    for item in stream:
        return chain([item], stream)
    raise Unreachable("the scheduler ended the stream", "is the platform up? torchrelay up")


def explain(
    address: str, request_id: str = "", model: str = "", tls: Tls | None = None, token: str = ""
) -> scheduler_pb2.ExplainReply:
    """The timeline of a request, or a model's recent decisions. Raises ``CliError``."""
    with open_blocking_channel(address, tls, token, Caller.SCHEDULER) as channel:
        request = scheduler_pb2.ExplainRequest(request_id=request_id, model=model)
        try:
            return scheduler_pb2_grpc.SchedulerStub(channel).Explain(request, timeout=5)
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.NOT_FOUND:
                hint = "the id is printed below an answer of `torchrelay chat`; REST: x-request-id"
                raise CliError(error.details() or "not found", hint) from error
            raise _failure(address, error) from error


def events(
    address: str,
    kinds: Sequence[str],
    since_unix_us: int,
    after_sequence: int,
    follow: bool,
    tls: Tls | None = None,
    token: str = "",
) -> Iterator[scheduler_pb2.Event]:
    """The history, oldest first; with ``follow`` also new events. Raises ``CliError`` or ``Unreachable``."""
    request = scheduler_pb2.WatchEventsRequest(
        kinds=kinds, since_unix_us=since_unix_us, after_sequence=after_sequence, follow=follow
    )
    with open_blocking_channel(address, tls, token, Caller.SCHEDULER) as channel:
        try:
            yield from scheduler_pb2_grpc.SchedulerStub(channel).WatchEvents(request)
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.UNIMPLEMENTED:
                raise CliError(f"the scheduler at {address} is older and has no events", "upgrade it") from error
            failure = _failure(address, error)
            if isinstance(error, grpc.Call) and isinstance(failure, Unreachable) and _error_code(error):
                raise CliError(error.details() or "the history cannot be read", "is nats-server running?") from error
            raise failure from error


def _error_code(error: grpc.Call) -> str:
    """The code of an error that the scheduler itself raised; empty: it did not."""
    return str(dict(error.trailing_metadata() or ()).get("torchrelay-code", ""))


def _failure(address: str, error: grpc.RpcError) -> CliError:
    if isinstance(error, grpc.Call) and _error_code(error) in (CallerUnknown.code, CallerRefused.code):
        return CliError(
            f"the scheduler at {address} refuses this command: {error.details()}",
            "set TORCHRELAY_SCHEDULER_TOKEN, or with TLS use the commands' certificate; see docs/operating.md",
        )
    return Unreachable(f"the scheduler at {address} does not answer", "is the platform up? torchrelay up")
