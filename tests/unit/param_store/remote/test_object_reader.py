"""Ranges from a slow, broken, silent or cut-off server, and the platform's errors for those of obstore."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

import pytest
from obstore.exceptions import GenericError, InvalidPathError

from tests.support.s3_server import Fault, FaultyProxy, always, first
from torchrelay.common.errors import InvalidRequest, Unavailable
from torchrelay.param_store.remote.object_errors import is_transient, platform_error
from torchrelay.param_store.remote.object_reader import Backoff
from torchrelay.param_store.remote.remote_store import RemoteOptions, open_remote

DATA = os.urandom(1 << 20)
KEY = "packs/p"


@dataclass
class Scene:
    """DATA lies in the bucket, and is asked for by way of the proxy."""

    url: str
    proxy: FaultyProxy

    def read(self, timeout_s: float = 5.0, give_up_s: float = 20.0, stop: threading.Event | None = None) -> bytes:
        store = open_remote(self.url, RemoteOptions(self.proxy.endpoint, timeout_s, give_up_s))
        memory = bytearray(len(DATA))
        store.open_range(KEY).read_into(0, memoryview(memory), stop or threading.Event())
        return bytes(memory)


@pytest.fixture
def scene(bucket_url: str, s3_endpoint: str, proxy: FaultyProxy) -> Scene:
    open_remote(bucket_url, RemoteOptions(s3_endpoint)).put_bytes(KEY, DATA)
    return Scene(bucket_url, proxy)


@pytest.mark.parametrize("status", [500, 502, 503, 429, 408])
def test_overloaded_or_broken_server_retried(scene: Scene, status: int) -> None:
    scene.proxy.decide = first(2, Fault(status=status))
    assert scene.read() == DATA
    assert len(scene.proxy.asked) == 3


@pytest.mark.parametrize("status", [400, 403, 404])
def test_refusal_not_retried(scene: Scene, status: int) -> None:
    scene.proxy.decide = always(Fault(status=status))
    with pytest.raises(Exception, match=f"(status code: {status}|has no {KEY})"):
        scene.read()
    assert len(scene.proxy.asked) == 1


def test_interrupted_reply_resumes_after_last_byte(scene: Scene) -> None:
    scene.proxy.decide = first(2, Fault(cut_after_bytes=400_000))
    assert scene.read() == DATA
    begins = [asked.begin for asked in scene.proxy.asked]
    assert begins[0] == 0
    assert begins == sorted(begins)
    assert 0 < begins[1] <= 400_000 < begins[2] <= 800_000


def test_silent_server_retried(scene: Scene) -> None:
    scene.proxy.decide = first(1, Fault(silent=True))
    assert scene.read(timeout_s=2.0) == DATA
    assert len(scene.proxy.asked) == 2


def test_slow_server_without_silence_not_retried(scene: Scene) -> None:
    scene.proxy.decide = first(1, Fault(bytes_per_s=700_000))
    assert scene.read(timeout_s=1.0, give_up_s=1.0) == DATA  # takes 1.5 s
    assert len(scene.proxy.asked) == 1


@pytest.mark.parametrize("fault", [Fault(status=500), Fault(silent=True), Fault(cut_after_bytes=0)])
def test_server_without_progress_given_up(scene: Scene, fault: Fault) -> None:
    scene.proxy.decide = always(fault)
    with pytest.raises(Unavailable, match=f"the remote store does not serve {KEY}"):
        scene.read(timeout_s=0.5, give_up_s=2.0)
    assert len(scene.proxy.asked) > 1
    scene.proxy.decide = lambda asked: None
    assert scene.read() == DATA


def test_stop_ends_wait_for_broken_server(scene: Scene) -> None:
    stop = threading.Event()
    scene.proxy.decide = lambda asked: stop.set() or Fault(status=500)  # type: ignore[func-returns-value]
    with pytest.raises(Unavailable, match="was stopped"):
        scene.read(give_up_s=60, stop=stop)
    assert len(scene.proxy.asked) == 1


def test_stop_ends_read_from_slow_server(scene: Scene) -> None:
    stop = threading.Event()
    scene.proxy.decide = lambda asked: stop.set() or Fault(bytes_per_s=1_000_000)  # type: ignore[func-returns-value]
    with pytest.raises(Unavailable, match="was stopped"):
        scene.read(stop=stop)


def test_backoff_doubles_pauses_until_progress() -> None:
    backoff = Backoff(give_up_s=10.0, since_s=100.0)
    assert [backoff.pause_s(100.0) for _ in range(7)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.0, 3.0]
    assert backoff.pause_s(107.1) is None
    backoff.progress(108.0)
    assert backoff.pause_s(117.0) == 0.1
    assert backoff.pause_s(118.0) is None


AZURE = (
    "Error performing GET https://a.blob/c/p?sv=2020&sig=SECRET in 5ms - Server returned non-2xx status code: {}: <?xml"
)


def test_error_detail_omits_token_and_server_page() -> None:
    told = platform_error(
        GenericError(AZURE.format("409 Conflict") + "\n<Error/>\nDebug source: SECRET"), "packs/p", "az"
    )
    assert isinstance(told, Unavailable)
    assert told.field == "remote_url"
    assert told.message == (
        "the remote store refuses packs/p: "
        "Error performing GET https://a.blob/c/p in 5ms - Server returned non-2xx status code: 409 Conflict"
    )


def test_error_without_status_is_transient() -> None:
    assert is_transient(GenericError("HTTP error: error sending request"))
    assert [is_transient(GenericError(AZURE.format(status))) for status in (500, 503, 429, 400, 409, 301)] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]


def test_invalid_path_is_invalid_request() -> None:
    told = platform_error(InvalidPathError("Path segment is empty"), "a//b", "s3")
    assert isinstance(told, InvalidRequest)
    assert not is_transient(InvalidPathError("Path segment is empty"))
