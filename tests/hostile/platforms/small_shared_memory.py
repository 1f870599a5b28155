"""A platform on a machine with little shared memory, in a mount namespace of its own.

unshare --mount .venv/bin/python -m tests.hostile.platforms.small_shared_memory FOLDER NUM_MIB
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.checkpoints import make_checkpoint
from tests.support.completions import complete
from tests.support.platform import running_platform
from tests.support.small_disk import SmallDisk

WORKERS = ("--prefill-workers", "0", "--decode-workers", "0", "--both-workers", "1", "--kv-pool-mb", "32")


def main() -> None:
    folder, num_mib = Path(sys.argv[1]), int(sys.argv[2])
    subprocess.run(("mount", "--make-rprivate", "/"), check=True)  # what follows is seen by nobody else
    subprocess.run(("mount", "-t", "tmpfs", "-o", f"size={num_mib}m", "tmpfs", "/dev/shm"), check=True)
    with running_platform(folder / "home", WORKERS) as platform:
        key = platform.tenant("acme")
        model = platform.upload(key, make_checkpoint(folder / "model", "llama"), "small")
        expected = complete(platform, key, model, [1, 2, 3], max_tokens=8)["choices"][0]["token_ids"]
        for child in ("worker-0", "param-store"):
            platform.await_restart(child, platform.kill(child))
        SmallDisk(Path("/dev/shm")).fill()
        assert complete(platform, key, model, [1, 2, 3], max_tokens=8)["choices"][0]["token_ids"] == expected
    print("served")


if __name__ == "__main__":
    main()
