"""`events`, `explain` and `top`, which ask the scheduler; it answers, knows nothing, or goes away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from tests.unit.cli.conftest import Run, refusal, scripted_scheduler
from tests.unit.cli.fake_gateway import TENANT_KEY, FakeGateway
from torchrelay.cli.api.scheduler_client import explain
from torchrelay.cli.commands import events, top
from torchrelay.cli.errors import ApiError, CliError, Unreachable
from torchrelay.cli.home import Home
from torchrelay.control.v1.scheduler_pb2 import ClusterView, Event, WatchEventsRequest

UNKNOWN = "no recent request has the id 'req-nope': only requests since the scheduler's start, the last 2,048, are kept"


def test_events_pass_on_their_options(run: Run, home: Home) -> None:
    asked: list[WatchEventsRequest] = []

    def answer(request: WatchEventsRequest, context: grpc.ServicerContext) -> Iterator[Event]:
        asked.append(request)
        if "copy" not in request.kinds:
            yield Event(sequence=1, at_unix_us=1, kind="relay.started", model="acme/tiny", reason="a -> b")

    with scripted_scheduler(WatchEvents=answer) as address:
        shown = run("events", "--scheduler", address, "--kind", "relay", "--kind", "scale", "--since", "2h")
        none = run("events", "--scheduler", address, "--kind", "copy", "--since", "2h")
    assert shown.exit_code == 0 and "relay.started      acme/tiny     a -> b" in shown.stdout
    assert list(asked[0].kinds) == ["relay", "scale"] and asked[0].since_unix_us > 1.7e15 and not asked[0].follow
    assert (none.exit_code, none.stdout) == (0, "")
    assert "no events of kind copy in the last 2h" in none.stderr
    wrong = run("events", "--since", "yesterday")
    assert wrong.exit_code == 2 and "is not a duration" in wrong.stderr


def test_resumed_events_are_not_repeated() -> None:
    def answer(request: WatchEventsRequest, context: grpc.ServicerContext) -> Iterator[Event]:
        assert request.follow
        if request.after_sequence >= 2:
            context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        yield Event(sequence=request.after_sequence + 1)

    with scripted_scheduler(WatchEvents=answer) as address:
        tail = events.EventTail(address, None, [], 1).tail(lambda: True, retry_s=0.01, timeout_s=0.5)
        assert [next(tail).sequence for _ in range(2)] == [1, 2]
        with pytest.raises(Unreachable, match="no longer answers"):
            next(tail)


def test_events_that_cannot_be_read_are_stated(run: Run, home: Home) -> None:
    def answer(request: WatchEventsRequest, context: grpc.ServicerContext) -> Iterator[Event]:
        context.set_trailing_metadata((("torchrelay-code", "unavailable"),))
        context.abort(grpc.StatusCode.UNAVAILABLE, "The history cannot be read.")
        yield Event()

    with scripted_scheduler(WatchEvents=answer) as address:
        refused = refusal(run("events", "--scheduler", address))
        assert refused.message == "The history cannot be read."
    assert "nats-server" in refused.hint
    with scripted_scheduler() as address:
        refused = refusal(run("events", "--scheduler", address))
        assert "older" in refused.message


@pytest.mark.parametrize("command", [("events",), ("events", "--follow"), ("top", "--once")])
def test_absent_scheduler_is_stated(run: Run, home: Home, command: tuple[str, ...]) -> None:
    refused = run(*command).exception
    assert isinstance(refused, Unreachable if "--follow" in command else CliError)
    assert "scheduler at 127.0.0.1:1 does not answer" in refused.message
    home.endpoints_file.unlink()
    refused = refusal(run(*command))
    assert refused.hint is not None
    assert "--scheduler" in refused.hint and "--url" not in refused.hint


def answer_once() -> Callable[[Any, grpc.ServicerContext], Iterator[ClusterView]]:
    """Shows a view to the first caller, and tells the others that the scheduler is away."""
    views = iter([ClusterView(epoch=1)])

    def watch(request: Any, context: grpc.ServicerContext) -> Iterator[ClusterView]:
        view = next(views, None)
        if view is None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        else:
            yield view

    return watch


def test_piped_top_prints_single_view(run: Run, home: Home) -> None:
    with scripted_scheduler(WatchCluster=answer_once()) as address:
        shown = run("top", "--scheduler", address)
    assert shown.exit_code == 0 and "every model is at zero" in shown.stdout


@pytest.mark.parametrize(("is_supervised", "why"), [(False, "has stopped"), (True, "no longer answers")])
def test_top_ends_with_platform(is_supervised: bool, why: str) -> None:
    with scripted_scheduler(WatchCluster=answer_once()) as address, pytest.raises(Unreachable, match=why):
        top.follow(address, lambda: is_supervised, retry_s=0.05, timeout_s=0.2)


def test_request_that_the_scheduler_forgot_is_stated() -> None:
    def answer(request: Any, context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.NOT_FOUND, UNKNOWN)

    with scripted_scheduler(Explain=answer) as address, pytest.raises(CliError) as refused:
        explain(address, request_id="req-nope")
    assert refused.value.message == UNKNOWN
    assert refused.value.hint == "the id is printed below an answer of `torchrelay chat`; REST: x-request-id"


def test_model_is_explained_by_its_gateway(run: Run, gateway: FakeGateway) -> None:
    """By a remote gateway, whose platform has its home elsewhere."""
    shown = run("explain", "tiny", "--url", gateway.url, "--key", TENANT_KEY)
    assert gateway.asked[-1][:2] == ("GET", "/v1/explain?model=tiny")
    assert "would load 1 instance" in shown.stdout and "3 late requests" in shown.stdout


def test_unknown_model_has_no_decisions(run: Run, home: Home) -> None:
    for name in ("nothing", "acme/nothing"):
        unknown = run("explain", name).exception
        assert isinstance(unknown, ApiError) and unknown.hint == "see: torchrelay models"
