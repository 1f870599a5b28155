"""A further process of a slot with several devices: `python -m torchrelay.vllm.rank_process CALLS ANSWERS RANK`.

CALLS and ANSWERS are the descriptors of two pipes. The process computes one rank of each model that its worker loads,
and ends with the worker.
"""

from __future__ import annotations

import gc
import os
import queue
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection

from vllm.distributed import destroy_distributed_environment, destroy_model_parallel
from vllm.platforms import current_platform
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

from torchrelay.transfer.arena.mapped_slab import MappedSlab
from torchrelay.vllm.arriving_pack import ArrivingPack
from torchrelay.vllm.compile_folder import compile_into
from torchrelay.vllm.failure_reason import failure_reason
from torchrelay.vllm.rank_messages import (
    Call,
    Close,
    Closed,
    Done,
    Fail,
    Failed,
    Imported,
    Open,
    SegmentReady,
    Start,
)
from torchrelay.vllm.weight_loader import LOAD_FORMAT

_MAX_CALLS = 16  # queued; the worker waits for the answer to each


class RankProcess:
    """A thread reads the messages, so that segments arrive while the main thread loads or computes."""

    def __init__(self, calls: Connection, answers: Connection, rank: int) -> None:
        self._messages, self._answers, self._rank = calls, answers, rank
        self._calls: queue.Queue[Open | Start | Call | Close] = queue.Queue(_MAX_CALLS)
        self._slab: MappedSlab | None = None
        self._pack: ArrivingPack | None = None
        self._worker: WorkerWrapperBase | None = None

    def run(self) -> None:
        threading.Thread(target=self._read, name="messages", daemon=True).start()
        self._answers.send(Imported())
        while True:
            message = self._calls.get()
            answer = self._close() if isinstance(message, Close) else self._answer(message)
            self._answers.send(answer)
            if isinstance(answer, Failed):
                end_group()  # so that no other rank waits for this one

    def _read(self) -> None:
        try:
            while True:
                message = self._messages.recv()
                pack = self._pack  # none once a failed load is closed, while its last segments arrive
                if isinstance(message, SegmentReady):
                    if pack is not None:
                        pack.segment_ready(message.segment)
                elif isinstance(message, Fail):
                    if pack is not None:
                        pack.fail(message.reason)
                else:
                    self._calls.put(message)
        except EOFError:
            os._exit(0)  # the worker has ended, and what the main thread does may never end without it
        except Exception:
            traceback.print_exc()
            os._exit(1)  # the worker ends too, and starts again

    def _answer(self, message: Open | Start | Call) -> Done | Failed:
        try:
            if isinstance(message, Open):
                self._slab = MappedSlab(message.arena_path, message.slab_offset, message.slab_bytes)
                self._pack = ArrivingPack(self._slab.manifest, self._slab.data, lambda: None)
                compile_into(message.compiled)
                return Done(None)
            if isinstance(message, Start):
                self._start(message)
                return Done(None)
            result = run_method(self._worker, message.method, message.args, message.kwargs)
            return Done(result if message.wants_result else None)
        except Exception as error:  # vLLM documents none
            traceback.print_exc()
            return Failed(f"device {self._rank} of the slot: {failure_reason(error)}")

    def _start(self, start: Start) -> None:
        config = start.config
        assert config.load_config.load_format == LOAD_FORMAT  # registered by the import
        config.load_config.model_loader_extra_config = {"pack": self._pack}
        self._worker = WorkerWrapperBase(rpc_rank=self._rank)
        kwargs = {
            "vllm_config": config,
            "local_rank": start.local_rank,
            "rank": self._rank,
            "distributed_init_method": start.init_method,
            "is_driver_worker": False,
        }
        self._worker.init_worker([kwargs] * (self._rank + 1))
        self._worker.init_device()
        self._worker.load_model()
        current_platform.update_block_size_for_backend(config)

    def _close(self) -> Closed:
        """Releases what was loaded. A group whose processes cannot part is ended by the worker."""
        worker, self._worker, self._pack = self._worker, None, None
        if worker is not None and hasattr(worker, "worker"):
            worker.shutdown()
        end_group()
        del worker
        gc.collect()
        slab, self._slab = self._slab, None
        if slab is not None:
            slab.close()
        return Closed()


def end_group() -> None:
    """Leaves the group of processes that compute a model; a later model has a group of its own."""
    destroy_model_parallel()
    destroy_distributed_environment()


def main() -> None:
    # The worker ends this process: a Ctrl-C in its terminal must not be faster.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    calls, answers, rank = map(int, sys.argv[1:])
    RankProcess(Connection(calls, writable=False), Connection(answers, readable=False), rank).run()


if __name__ == "__main__":
    main()
