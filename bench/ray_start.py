"""From a request for a model at zero to the start of its worker: on a warm cluster of Ray, and as a child of `up`.

    python bench/ray_start.py [--quick]

Both platforms have `--workers 0..1`. A sample begins with no worker, and sends a request; it ends when the scheduler's
view has the new worker. Ray runs on this host with a head and two nodes, and its first worker does not count: its nodes
have then started a Python process for actors.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.report import Check, finish, parser_of, progress
from tests.fleet.ray_cluster import ray_cluster
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import complete
from tests.support.platform import running_platform
from torchrelay.cli.launchers.pool_driver import KEEP_S

IDLE_S = 1.0
SIZES = ("--arena-mb", "256", "--kv-pool-mb", "32", "--threads", "1", "--idle-timeout-s", str(IDLE_S))


def start_s(folder: Path, options: Sequence[str], num_samples: int) -> list[float]:
    """Seconds from each request until its new worker is in the scheduler's view."""
    took_s = []
    with running_platform(folder / "home", ("--workers", "0..1", *SIZES, *options)) as platform:
        key = platform.tenant("acme")
        model = platform.upload(key, make_checkpoint(folder / "model", "llama"), "model")
        for _ in range(num_samples):
            with ThreadPoolExecutor(1) as pool:
                begin_s = time.monotonic()
                answer = pool.submit(complete, platform, key, model, [1, 2, 3], max_tokens=2, ignore_eos=True)
                next(view for view in platform.views() if view.workers)
                took_s.append(time.monotonic() - begin_s)
                answer.result()
            progress(f"{folder.name}: {took_s[-1]:.2f} s")
            next(view for view in platform.views() if not view.workers)
    return took_s


def main() -> None:
    arguments = parser_of(__doc__, "one start of each kind").parse_args()
    num_samples = 1 if arguments.quick else 5
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as cluster,
        ray_cluster(Path(cluster)) as ray,
        tempfile.TemporaryDirectory() as folder,
    ):
        local, remote = Path(folder) / "local", Path(folder) / "ray"
        local.mkdir()
        remote.mkdir()
        local_s = statistics.median(start_s(local, (), num_samples))
        options = ("--on", ray.engine, "--cluster-host", "127.0.0.1")
        ray_s = statistics.median(start_s(remote, options, num_samples + 1)[1:])
    against = f"a child of up: {local_s:.2f} s"
    checks = [
        Check("ray_start_s", ray_s, "s", None, against),
        Check("ray_start_over_local_s", ray_s - local_s, "s", 3.0, against),
    ]
    conditions = {"samples": num_samples, "idle_timeout_s": IDLE_S, "free_before_stop_s": KEEP_S, "threads": 1}
    finish("ray_start", conditions, checks)


if __name__ == "__main__":
    main()
