"""Every line of a log says which service wrote it; metrics are shown to this machine only."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.brokers import free_port

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


def test_also_those_of_threads() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    first, second = (json.loads(line) for line in done.stderr.splitlines())
    assert (first["service"], first["event"], first["request_id"]) == ("decode", "first", "r")
    assert (second["service"], second["event"], second["module"]) == ("decode", "second", "somewhere")


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


def test_metrics_are_served_on_loopback_whatever_the_service_listens_on() -> None:
    """127.0.0.2 stands for any other address of the machine."""
    program = [sys.executable, "-c", _METRICS, str(free_port())]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["200", "ConnectionRefusedError"], done.stderr
