"""`explain` against a scheduler that knows nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from tests.unit.cli.conftest import Run
from tests.unit.cli.fake_gateway import TENANT_KEY, FakeGateway
from torchrelay.cli.api.scheduler_client import explain
from torchrelay.cli.errors import CliError
from torchrelay.control.v1 import scheduler_pb2

UNKNOWN = "no recent request has the id 'req-nope': only requests since the scheduler's start, the last 2,048, are kept"


@contextmanager
def forgetful_scheduler() -> Iterator[str]:
    def answer(request: Any, context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.NOT_FOUND, UNKNOWN)

    method = grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=scheduler_pb2.ExplainRequest.FromString,
        response_serializer=scheduler_pb2.ExplainReply.SerializeToString,
    )
    service = grpc.method_handlers_generic_handler("torchrelay.control.v1.Scheduler", {"Explain": method})
    server = grpc.server(ThreadPoolExecutor(1), handlers=[service])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_kept_home_is_reported_once() -> None:
    with forgetful_scheduler() as address, pytest.raises(CliError) as refused:
        explain(address, request_id="req-nope")
    assert refused.value.message == UNKNOWN
    assert refused.value.hint == "the id is printed below an answer of `torchrelay chat`; REST: x-request-id"


def test_model_of_a_remote_gateway_is_explained(run: Run, gateway: FakeGateway) -> None:
    """It was refused, although the gateway tells it."""
    shown = run("explain", "tiny", "--url", gateway.url, "--key", TENANT_KEY)
    assert gateway.asked[-1][:2] == ("GET", "/v1/explain?model=tiny")
    assert "would load 1 instance" in shown.stdout and "3 late requests" in shown.stdout
