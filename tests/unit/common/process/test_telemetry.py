"""Every line of a log says which service wrote it; a full disk costs lines, never the process; who sees metrics."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from tests.support.brokers import free_port
from tests.support.small_disk import small_disk
from torchrelay.common.process.telemetry import SpanFile

_PROGRAM = """
from threading import Thread
from torchrelay.common.process.settings import ServiceSettings
from torchrelay.common.process.telemetry import _set_up_logs, get_logger

_set_up_logs("decode", ServiceSettings())
log = get_logger("somewhere")
log.info("first", request_id="r")
thread = Thread(target=lambda: log.info("second"))
thread.start()
thread.join()
"""


def test_blocks_of_threads_return_to_system() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    first, second = (json.loads(line) for line in done.stderr.splitlines())
    assert (first["service"], first["event"], first["request_id"]) == ("decode", "first", "r")
    assert (second["service"], second["event"], second["module"]) == ("decode", "second", "somewhere")


def test_full_disk_drops_log_lines() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", f"{_PROGRAM}\nprint('alive')"], stdout=subprocess.PIPE, stderr=full
        )
    assert done.stdout == b"alive\n"


@pytest.mark.lab
def test_spans_are_dropped_on_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        file = disk.folder / "traces.jsonl"
        spans = SpanFile(file, "test")
        tracers = TracerProvider(shutdown_on_exit=False)
        tracers.add_span_processor(SimpleSpanProcessor(spans))

        def record(count: int) -> None:
            for _ in range(count):
                tracers.get_tracer("test").start_span("x" * 200).end()

        record(1)
        disk.fill()
        record(100)  # the last page takes some of them, and a part of one
        num_before = len(file.read_bytes().splitlines())
        disk.free()
        record(1)
        lines = file.read_bytes().splitlines()
        assert len(lines) == num_before + 1
        assert json.loads(lines[0])["service"] == json.loads(lines[-1])["service"] == "test"
        tracers.shutdown()


_METRICS = """
import sys, urllib.error, urllib.request
from torchrelay.common.process.settings import ServiceSettings
from torchrelay.common.process.telemetry import Telemetry

port = int(sys.argv[1])
Telemetry("gateway", ServiceSettings(host="0.0.0.0", metrics_port=port))
for address in ("127.0.0.1", "127.0.0.2"):
    try:
        print(urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=10).status)
    except urllib.error.URLError as error:
        print(type(error.reason).__name__)
"""


def test_metrics_are_served_on_loopback() -> None:
    """127.0.0.2 stands for any other address of the machine."""
    program = [sys.executable, "-c", _METRICS, str(free_port())]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["200", "ConnectionRefusedError"], done.stderr
