"""A worker whose next step faults on the device after SIGUSR1, as by a kernel that reads what it must not.

`up` starts the installed worker, whose Python imports `sitecustomize` first.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

_SITECUSTOMIZE = """
import sys
if any(each.endswith("torchrelay-worker") for each in sys.orig_argv):
    sys.path.append({root!r})
    from bench.device import faulting_worker
    faulting_worker.install()
"""


def faulting_workers(folder: Path) -> dict[str, str]:
    """The environment in which `torchrelay up` starts such workers; writes a module into ``folder``."""
    folder.mkdir()
    root = str(Path(__file__).resolve().parents[2])
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(root=root))
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def install() -> None:
    import torch

    from torchrelay.engine.execution.model_runner import ModelRunner

    compute, wanted = ModelRunner.run, threading.Event()

    def run(self: Any, plan: Any) -> Any:
        computed = compute(self, plan)
        if wanted.is_set():
            wanted.clear()
            device = self._device
            row = torch.full((1,), 1 << 30, device=device)
            torch.zeros(1, device=device)[row]  # on a CPU an IndexError; on a GPU an assertion, which stays
            computed = compute(self, plan)
        return computed

    ModelRunner.run = run  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, lambda *_: wanted.set())
