"""Every line of a log says which service wrote it."""

from __future__ import annotations

import json
import subprocess
import sys

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
