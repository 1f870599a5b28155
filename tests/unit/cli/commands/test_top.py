"""`top` against a scheduler that goes away."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from tests.unit.cli.conftest import Run
from torchrelay.cli.commands import top
from torchrelay.cli.errors import CliError, Unreachable
from torchrelay.cli.home import Home
from torchrelay.control.v1 import scheduler_pb2


@contextmanager
def cluster_of_one_view() -> Iterator[str]:
    """A scheduler that shows one view to the first who asks, and tells the others that it is away."""
    views = iter([scheduler_pb2.ClusterView(epoch=1)])

    def watch(request: Any, context: grpc.ServicerContext) -> Iterator[scheduler_pb2.ClusterView]:
        view = next(views, None)
        if view is None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        else:
            yield view

    watched = grpc.unary_stream_rpc_method_handler(
        watch,
        request_deserializer=scheduler_pb2.WatchClusterRequest.FromString,
        response_serializer=scheduler_pb2.ClusterView.SerializeToString,
    )
    service = grpc.method_handlers_generic_handler("torchrelay.control.v1.Scheduler", {"WatchCluster": watched})
    server = grpc.server(ThreadPoolExecutor(1), handlers=[service])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_piped_top_prints_single_view(run: Run, home: Home) -> None:
    with cluster_of_one_view() as address:
        shown = run("top", "--scheduler", address)
    assert shown.exit_code == 0
    assert "every model is at zero" in shown.stdout


def test_top_ends_with_platform() -> None:
    with cluster_of_one_view() as address, pytest.raises(Unreachable, match="has stopped"):
        top.follow(address, lambda: False, retry_s=0.05, timeout_s=0.2)
    with cluster_of_one_view() as address, pytest.raises(Unreachable, match="no longer answers"):
        top.follow(address, lambda: True, retry_s=0.05, timeout_s=0.2)


def test_absent_scheduler_is_stated(run: Run, home: Home) -> None:
    said = run("top", "--once").exception
    assert isinstance(said, CliError)
    assert "scheduler at 127.0.0.1:1 does not answer" in said.message
