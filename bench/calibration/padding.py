"""Workers of `torchrelay up` whose layers take fixed times."""

from __future__ import annotations

from pathlib import Path

import msgspec

from torchrelay.common.latency.latency_model import LatencyModel

PADDED_WORKER = Path(__file__).with_name("padded_worker.py")
_SITECUSTOMIZE = f"""
import sys
if any(each.endswith("torchrelay-worker") for each in sys.orig_argv):
    sys.path.append({str(PADDED_WORKER.parent)!r})
    import padded_worker
    padded_worker.pad_by_environment()
"""


def padded_workers(folder: Path, latency: LatencyModel, layer_load_s: float = 0.0) -> dict[str, str]:
    """The environment in which `torchrelay up` starts padded workers; writes a module into ``folder``. Without
    ``layer_load_s`` loads are not padded.

    `up` starts the installed worker, whose Python imports `sitecustomize` first.
    """
    (folder / "python").mkdir()
    (folder / "python" / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    environment = {"PYTHONPATH": str(folder / "python"), "BENCH_LATENCY": padding(latency)}
    return environment | ({"BENCH_LAYER_LOAD_S": str(layer_load_s)} if layer_load_s else {})


def padding(latency: LatencyModel) -> str:
    """The value of BENCH_LATENCY."""
    return msgspec.json.encode(latency).decode()
