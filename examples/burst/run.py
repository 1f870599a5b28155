"""A burst of calls for a sleeping model, without and with live scaling, as two timelines.

    python examples/burst/run.py

A layer takes 120 ms to compute for a full step and 600 ms to load, as if the model was large and copied to a device
(`sitecustomize.py`). Without live scaling, the worker computes once the model is loaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.api.model_source import Folder
from torchrelay.cli.api.upload import ModelUpload
from torchrelay.cli.home import Home

FOLDER = Path(__file__).parent
MODEL_FOLDER = FOLDER.parent / "glossary" / "model"
NUM_CALLS, NUM_TOKENS = 8, 64  # a full step each
CELLS_PER_S = 5
WAITING, LOADING, LOADED, FIRST = ("·", "dim"), ("▒", "yellow"), ("█", "green"), ("●", "bold")
console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class Call:
    """The times of a call in seconds after the burst began. ``begun_s``: when it was at a worker."""

    begun_s: float
    loaded_s: float
    first_token_s: float

    def bar(self, num_cells: int) -> Text:
        bar = Text()
        for cell in range(num_cells):
            at = (cell + 0.5) / CELLS_PER_S
            if at >= self.first_token_s:
                bar.append(*FIRST)
                break
            bar.append(*(WAITING if at < self.begun_s else LOADING if at < self.loaded_s else LOADED))
        return bar


@contextmanager
def platform(home: Home, waits_for_loads: bool) -> Iterator[dict[str, str]]:
    """Runs `torchrelay up` with slow workers; yields its endpoints."""
    env = {**os.environ, "PYTHONPATH": str(FOLDER), "TORCHRELAY_TOKEN_BUDGET": str(NUM_TOKENS)}
    env |= {"BURST_WAITS_FOR_LOADS": "1"} if waits_for_loads else {}
    program = str(Path(sys.executable).parent / "torchrelay")
    log = home.path.with_suffix(".log")
    with log.open("wb") as output:
        command = [program, "up", "--home", str(home.path)]
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
    try:
        while not home.endpoints_file.exists():
            if process.poll() is not None:
                raise SystemExit(f"torchrelay up ended with status {process.returncode}:\n{log.read_text()}")
            time.sleep(0.05)
        yield home.endpoints()
    finally:
        process.terminate()
        process.wait(60)


def burst(waits_for_loads: bool) -> list[Call]:
    """Sends the calls to a model that is not loaded; returns their times, by first token."""
    with tempfile.TemporaryDirectory(prefix="torchrelay-burst-") as name:
        home = Home(Path(name) / "home")
        with platform(home, waits_for_loads) as endpoints, GatewayClient(endpoints["http"], home.admin_key()) as admin:
            admin.call("POST", "/v1/tenants", json={"name": "acme"})
            key = admin.call("POST", "/v1/keys", json={"tenant": "acme", "name": "burst"})["key"]
            with GatewayClient(endpoints["http"], key) as client:
                model = ModelUpload(client, Folder(MODEL_FOLDER), "glossary", lambda *_: None).run({})["id"]
                begin_us = time.time_ns() // 1000

                def ask(number: int) -> str:
                    prompt = [5 + (7 * number + position) % 400 for position in range(NUM_TOKENS)]
                    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
                    request_id: str = client.call("POST", "/v1/completions", json=body)["id"]
                    return request_id

                with ThreadPoolExecutor(NUM_CALLS) as threads:
                    request_ids = list(threads.map(ask, range(NUM_CALLS)))
                explained = [client.call("GET", f"/v1/requests/{each}/explain") for each in request_ids]
    return calls_of([each["phases"] for each in explained], begin_us)


def calls_of(explained: Sequence[Sequence[dict[str, Any]]], begin_us: int) -> list[Call]:
    """The times of all calls, from the phases of their explanations, by first token."""

    def last(phases: Sequence[dict[str, Any]], name: str, edge: str) -> float:
        times = (float(phase[f"{edge}_unix_us"] - begin_us) / 1e6 for phase in phases if phase["name"] == name)
        return max(times, default=0.0)

    loaded_s = max(last(phases, "last_layer", "end") for phases in explained)  # only calls that met the load show it
    calls = (Call(last(each, "prefill", "begin"), loaded_s, last(each, "first_token", "end")) for each in explained)
    return sorted(calls, key=lambda call: call.first_token_s)


def show(title: str, calls: Sequence[Call], num_cells: int) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("call")
    table.add_column("seconds  " + "".join(f"{second:<{CELLS_PER_S}}" for second in range(num_cells // CELLS_PER_S)))
    table.add_column("first token", justify="right")
    for number, call in enumerate(calls, start=1):
        bar = Text("         ") + call.bar(num_cells)
        table.add_row(str(number), bar, f"{call.first_token_s:.2f} s")
    console.print(table)
    firsts = [call.first_token_s for call in calls]
    console.print(f"first token: median {median(firsts):.2f} s, last {firsts[-1]:.2f} s\n")


def main() -> None:
    results = []
    for title, waits_for_loads in (("Without live scaling", True), ("With live scaling", False)):
        with console.status(f"{title}: a platform starts, and {NUM_CALLS} calls wake its model"):
            results.append((title, burst(waits_for_loads)))
    num_cells = int(max(call.first_token_s for _, calls in results for call in calls) * CELLS_PER_S) + 2
    for title, calls in results:
        show(title, calls, num_cells)
    for (cell, style), meaning in (
        (WAITING, "waits"),
        (LOADING, "at the worker, which loads and computes layer by layer"),
        (LOADED, "at the loaded worker"),
        (FIRST, "first token"),
    ):
        console.print(Text(cell, style).append(f" {meaning}", "default"))


if __name__ == "__main__":
    main()
