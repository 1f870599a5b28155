"""`events` where something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from tests.unit.cli.conftest import Run
from torchrelay.cli.commands import events
from torchrelay.cli.errors import CliError, Unreachable
from torchrelay.cli.home import Home
from torchrelay.control.v1.scheduler_pb2 import Event, WatchEventsRequest

Answer = Callable[[WatchEventsRequest, grpc.ServicerContext], Iterator[Event]]


@contextmanager
def scheduler(answer: Answer | None) -> Iterator[str]:
    """A scheduler that answers so; None: an older one without events."""
    methods: dict[str, Any] = {}
    if answer is not None:
        methods["WatchEvents"] = grpc.unary_stream_rpc_method_handler(
            answer,
            request_deserializer=WatchEventsRequest.FromString,
            response_serializer=Event.SerializeToString,
        )
    service = grpc.method_handlers_generic_handler("torchrelay.control.v1.Scheduler", methods)
    server = grpc.server(ThreadPoolExecutor(1), handlers=[service])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_top_passes_scheduler_address(run: Run, home: Home) -> None:
    asked: list[WatchEventsRequest] = []

    def answer(request: WatchEventsRequest, context: grpc.ServicerContext) -> Iterator[Event]:
        asked.append(request)
        yield Event(sequence=1, at_unix_us=1, kind="relay.started", model="acme/tiny", reason="a -> b")

    with scheduler(answer) as address:
        shown = run("events", "--scheduler", address, "--kind", "relay", "--kind", "scale", "--since", "2h")
    assert shown.exit_code == 0 and "relay.started      acme/tiny     a -> b" in shown.stdout
    (request,) = asked
    assert list(request.kinds) == ["relay", "scale"] and request.since_unix_us > 1.7e15 and not request.follow


def test_no_events_is_stated(run: Run, home: Home) -> None:
    with scheduler(lambda request, context: iter(())) as address:
        shown = run("events", "--scheduler", address, "--kind", "copy", "--since", "2h")
    assert (shown.exit_code, shown.stdout) == (0, "")
    assert "no events of kind copy in the last 2h" in shown.stderr


def test_absent_platform_hints_at_option(run: Run, home: Home) -> None:
    home.endpoints_file.unlink()
    refused = run("events").exception
    assert isinstance(refused, CliError) and refused.hint is not None
    assert "--scheduler" in refused.hint and "--url" not in refused.hint


def test_resumed_events_are_not_repeated() -> None:
    def answer(request: WatchEventsRequest, context: grpc.ServicerContext) -> Iterator[Event]:
        assert request.follow
        if request.after_sequence >= 2:
            context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        yield Event(sequence=request.after_sequence + 1)

    with scheduler(answer) as address:
        tail = events.EventTail(address, None, [], 1).tail(lambda: True, retry_s=0.01, timeout_s=0.5)
        assert [next(tail).sequence for _ in range(2)] == [1, 2]
        with pytest.raises(Unreachable, match="no longer answers"):
            next(tail)


def test_health_problems_are_printed(run: Run, home: Home) -> None:
    said = run("events").exception
    assert isinstance(said, CliError) and "scheduler at 127.0.0.1:1 does not answer" in said.message
    said = run("events", "--follow").exception
    assert isinstance(said, Unreachable)
    with scheduler(None) as address:
        said = run("events", "--scheduler", address).exception
    assert isinstance(said, CliError) and "older" in said.message
    wrong = run("events", "--since", "yesterday")
    assert wrong.exit_code == 2 and "is not a duration" in wrong.stderr
    assert run("events", "--kind", "weather").exit_code == 2


def test_events_without_broker_fail_with_message(run: Run, home: Home) -> None:
    def answer(request: WatchEventsRequest, context: grpc.ServicerContext) -> Iterator[Event]:
        context.set_trailing_metadata((("torchrelay-code", "unavailable"),))
        context.abort(grpc.StatusCode.UNAVAILABLE, "The history cannot be read.")
        yield Event()

    with scheduler(answer) as address:
        said = run("events", "--scheduler", address).exception
    assert isinstance(said, CliError) and said.message == "The history cannot be read." and "nats-server" in said.hint
