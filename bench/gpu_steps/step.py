"""A step of the GPU bench, and its run in a process of its own.

Each step runs in a fork of a process that has imported torch and never called CUDA: it begins with a fresh context,
ends with all of its memory, and is killed at its limit, even if a call of CUDA hangs.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.report import Check, progress
from tests.support.wait import wait_until

if TYPE_CHECKING:
    import torch

    from bench.gpu_steps.sizes import Sizes

GRACE_S = 10.0  # for the processes that a step has started to end, after SIGTERM


@dataclass(frozen=True)
class Setup:
    """The device and the sizes of a run. ``dry``: on a CPU, where figures mean nothing."""

    device: torch.device
    sizes: Sizes
    dry: bool = False
    profile: bool = False
    out: Path | None = None

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def attention(self) -> str:
        """The backend of steps that compare no kernels: interpreted ones would take most of a dry run."""
        return "triton" if self.is_gpu else "cpu"


def figure(name: str, value: float, unit: str = "", against: str = "") -> Check:
    """A measured value that is only printed; ``against``: what it is compared with, or details."""
    return Check(name, value, unit, None, against)


def at_most(bound: float, check: Check) -> Check:
    return replace(check, bound=bound)


def at_least(bound: float, check: Check) -> Check:
    return replace(check, bound=bound, at_least=True)


def absent(name: str, why: str) -> Check:
    """A figure that this machine cannot tell."""
    return figure(name, math.nan, "", f"absent: {why}")


def on_gpu(setup: Setup, check: Check) -> Check:
    """The figure, which means something on a GPU only."""
    return check if setup.is_gpu else absent(check.name, "no GPU")


@dataclass(frozen=True)
class Step:
    """A step of the bench: ``measure``, as ``module:function``, yields checks as it measures them.

    ``needs``: packages without which the step has no checks.
    """

    name: str
    limit_s: float
    measure: str
    needs: Sequence[str] = ()

    def checks(self, setup: Setup) -> Iterator[Check]:
        module, _, name = self.measure.partition(":")
        measure: Callable[[Setup], Iterator[Check]] = getattr(import_module(module), name)
        return measure(setup)


def run_step(step: Step, setup: Setup, limit_s: float, environment: Mapping[str, str] | None = None) -> list[Check]:
    """Runs a step within ``limit_s``. The last check is its seconds, NaN with the reason if it failed or took longer;
    other checks have no bound if the run is dry.
    """
    missing = [name for name in step.needs if find_spec(name) is None]
    if missing:
        progress(f"{step.name}: {', '.join(missing)} is not installed")
        return []
    progress(f"{step.name}, at most {limit_s:.0f} s")
    began_s = time.monotonic()
    checks, reason = list[Check](), "it ended without a result"
    for message in _messages(step, setup, began_s + limit_s, environment or {}):
        if "reason" in message:
            reason = message["reason"]
        else:
            checks.append(replace(Check(**message), bound=None if setup.dry else message["bound"]))
    seconds = math.nan if reason else time.monotonic() - began_s
    return [*checks, Check(f"{step.name}_step_s", seconds, "s", limit_s, reason)]


def _messages(step: Step, setup: Setup, deadline_s: float, environment: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The checks of a step as its process sends them, then a ``reason``, which is empty if it ended well."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="torchrelay-gpu-", ignore_cleanup_errors=True) as folder:
        child = os.fork()
        if child == 0:
            os.close(reader)
            os.setsid()
            os.environ.update(environment)
            tempfile.tempdir = folder  # a step that is killed leaves nothing behind
            _measure(step, setup, writer)  # does not return
        os.close(writer)
        rest = b""
        try:
            while select.select([reader], [], [], max(deadline_s - time.monotonic(), 0.0))[0]:
                received = os.read(reader, 1 << 16)
                if not received:
                    return
                *lines, rest = (rest + received).split(b"\n")
                yield from map(json.loads, lines)
            yield {"reason": "it took longer than its limit and was killed"}
        finally:
            os.close(reader)
            _end(child)


def _measure(step: Step, setup: Setup, writer: int) -> None:
    """Sends the checks and ends the process, without the handlers and buffers that it shares with its parent."""
    reason = ""
    try:
        with os.fdopen(writer, "w", buffering=1) as messages:
            try:
                for check in step.checks(setup):
                    progress(f"{step.name}: {check.name} {check.value:.4g} {check.unit} {check.against}")
                    messages.write(json.dumps(asdict(check)) + "\n")
            except Exception as error:
                traceback.print_exc()
                reason = f"failed: {type(error).__name__}: {error}"[:200]
            sys.stdout.flush()
            sys.stderr.flush()
            messages.write(json.dumps({"reason": reason}) + "\n")
    finally:
        os._exit(bool(reason))


def _end(group: int) -> None:
    """Ends what is left of a step's processes. Nothing waits for one that hangs in the driver."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(group, number)
            wait_until(lambda: _is_gone(group), "the end of the step", GRACE_S)
        except ProcessLookupError:
            return
        except AssertionError:
            continue
        return


def _is_gone(group: int) -> bool:
    with suppress(ChildProcessError):
        os.waitpid(group, os.WNOHANG)
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False
