"""torch.distributed's gloo broadcast over the hosts of a lab, as an alternative to a relay.

    python gloo.py NUM_BYTES NUM_SAMPLES NAMESPACE=ADDRESS ...

The first host is the source. Torch is imported once; then a process per host is forked and moved to its namespace. The
source prints the seconds of each broadcast, from a barrier until the last host is complete, on a line each.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.lab.namespace import entered

_PORT = 29500
_TIMEOUT = timedelta(seconds=40)


def _play(rank: int, places: list[tuple[str, str]], num_bytes: int, num_samples: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    with entered(places[rank][0]):
        dist.init_process_group(
            "gloo", init_method=f"tcp://{places[0][1]}:{_PORT}", rank=rank, world_size=len(places), timeout=_TIMEOUT
        )
        tensor = torch.full((num_bytes,), rank, dtype=torch.uint8)
        for _ in range(num_samples):
            dist.barrier()
            begin = time.perf_counter()
            dist.broadcast(tensor, src=0)
            dist.barrier()
            if rank == 0:
                print(f"{time.perf_counter() - begin:.4f}", flush=True)
        if int(tensor.max()):
            raise RuntimeError(f"rank {rank} has not received the source's bytes")
        dist.destroy_process_group()


def main() -> None:
    num_bytes, num_samples = int(sys.argv[1]), int(sys.argv[2])
    places = [(namespace, address) for namespace, _, address in (place.partition("=") for place in sys.argv[3:])]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_play, args=(rank, places, num_bytes, num_samples)) for rank in range(len(places))]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


if __name__ == "__main__":
    main()
