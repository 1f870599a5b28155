"""The further processes of a slot with several devices. The worker's own process computes the first rank.

    started --Open--> arriving --Start--> loaded, calls --Close--> started

They start with the slot, because to import vLLM takes half a minute, and end with the worker's process, by whatever
cause. When one of them ends before, the worker ends too: its supervisor starts the slot again.
"""

from __future__ import annotations

import copy
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Pipe
from typing import TYPE_CHECKING, Any

from torchrelay.common.process.telemetry import get_logger
from torchrelay.common.process.watchdog import end_process
from torchrelay.engine.core import LoadFailed
from torchrelay.transfer.arena.mapped_slab import MappedSlab
from torchrelay.vllm.computed_time import main_thread_tenths
from torchrelay.vllm.rank_messages import Call, Close, Closed, Done, Fail, Failed, Imported, Open, SegmentReady, Start

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = get_logger(__name__)
# Between the failure of a rank, or the end of a model, and its end in all ranks. A rank that waits for another in a
# kernel of vLLM waits for ever, and only the end of its process ends that.
_PARTING_S = 30.0
# Torch's groups authenticate no peer, so they must not listen where other hosts connect.
_ONLY_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class _Rank:
    """A process, and a thread that reads its answers."""

    def __init__(
        self, rank: int, num_threads: int, on_failed: Callable[[str], None], on_lost: Callable[[], None]
    ) -> None:
        self.rank = rank
        self._on_failed, self._on_lost = on_failed, on_lost
        calls, self._calls = Pipe(duplex=False)
        self._returned, answers = Pipe(duplex=False)
        with calls, answers:
            descriptors = [calls.fileno(), answers.fileno()]
            command = [sys.executable, "-m", "torchrelay.vllm.rank_process", *map(str, descriptors), str(rank)]
            environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
            self.process = subprocess.Popen(command, pass_fds=descriptors, env=environment)
        self._sending = threading.Lock()  # segments come from another thread than calls
        self._answers: queue.Queue[Any] = queue.Queue(2)
        self._is_stopped = False
        self._reader = threading.Thread(target=self._read, name=f"rank-{rank}", daemon=True)
        self._reader.start()

    def send(self, message: object) -> None:
        # The process may have ended: its reader ends the worker.
        with self._sending, suppress(BrokenPipeError):
            self._calls.send(message)

    def answer(self) -> Any:
        return self._answers.get()

    def wait_until_closed(self) -> None:
        while not isinstance(self.answer(), Closed):
            pass  # answers to calls that have failed here

    def stop(self) -> None:
        """Ends the process."""
        self._is_stopped = True
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self._calls.close()
        self._returned.close()

    def _read(self) -> None:
        try:
            while True:
                answer = self._returned.recv()
                if isinstance(answer, Failed):
                    self._on_failed(answer.reason)
                self._answers.put(answer)
        except EOFError:
            if not self._is_stopped:
                log.error("rank_ended", rank=self.rank, status=self.process.wait())
                self._on_lost()


class DeviceGroup:
    """The ranks after the first of one slot. Calls run on the engine's thread."""

    def __init__(self, num_devices: int, first_gpu: int = 0, on_lost: Callable[[], None] = end_process) -> None:
        self.num_devices, self.first_gpu = num_devices, first_gpu
        self.failure = ""  # of a rank, since ``watch``
        self._on_lost = on_lost
        self._ranks: list[_Rank] = []
        self._on_failed: Callable[[str], None] = lambda reason: None
        self._limits: list[threading.Timer] = []  # started by failures and by a close, until all ranks have answered
        self._is_closing = False

    def __deepcopy__(self, memo: object) -> DeviceGroup:
        return self  # vLLM copies its configuration, and the group is part of it

    def start(self, num_threads: int) -> None:
        """Starts the processes, and waits until they have imported vLLM. ``num_threads``: of each, on a CPU."""
        if self.num_devices > 1:
            os.environ.update(_ONLY_LOOPBACK)  # of this process and of the others
        self._ranks = [_Rank(rank, num_threads, self._failed, self._on_lost) for rank in range(1, self.num_devices)]
        imported = [rank.answer() for rank in self._ranks]
        assert all(isinstance(answer, Imported) for answer in imported)

    def stop(self) -> None:
        """Ends the processes."""
        for rank in self._ranks:
            rank.stop()
        self._ranks = []
        self._cancel_limits()

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def watch(self, on_failed: Callable[[str], None]) -> None:
        """Begins with a model. ``on_failed`` is called on another thread with the reason of a rank's failure."""
        self.failure, self._on_failed = "", on_failed

    def open(self, slab: MappedSlab, compiled: str = "") -> None:
        """Gives the processes a pack, and the folder to compile into; empty: their own.

        Raises ``LoadFailed`` with the reason of a process that cannot map the pack.
        """
        self._send(Open(slab.arena_path, slab.offset, slab.num_bytes, compiled))
        try:
            self.results()
        except LoadFailed:
            self.close()
            raise

    def segment_ready(self, segment: int) -> None:
        """(any thread) Announces a segment."""
        self._send(SegmentReady(segment))

    def fail(self, reason: str) -> None:
        """(any thread) Ends the wait for bytes that will not arrive."""
        self._send(Fail(reason))

    def begin_start(self, config: VllmConfig, init_method: str) -> None:
        """Makes the processes load their parts of the weights; ``results`` waits for the end."""
        config = copy.copy(config)
        config.load_config = copy.copy(config.load_config)
        config.load_config.model_loader_extra_config = {}  # each process has its own
        for rank in self._ranks:
            rank.send(Start(config, init_method, self.first_gpu + rank.rank))

    def begin_call(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any], wants_results: bool) -> None:
        """Calls a method of vLLM's worker in each process; ``results`` waits for the end."""
        self._send(Call(method, args, kwargs, wants_results))

    def results(self) -> list[Any]:
        """The results of what was begun last. Raises ``LoadFailed`` with the reason of a rank."""
        answers = [rank.answer() for rank in self._ranks]
        self._cancel_limits()
        for answer in answers:
            if isinstance(answer, Failed):
                raise LoadFailed(answer.reason)
        return [answer.result for answer in answers if isinstance(answer, Done)]

    def begin_close(self) -> None:
        """Makes the processes release the model, as the caller does then: a GPU leaves a group when all do."""
        if self._ranks and not self._is_closing:
            self._is_closing = True
            self._start_limit("a process does not part from its group")
            self._send(Close())

    def close(self) -> None:
        """Returns when the processes have released the model; ends the worker if they do not."""
        self.begin_close()
        for rank in self._ranks:
            rank.wait_until_closed()
        self._is_closing = False
        self._cancel_limits()

    @property
    def computed_tenths(self) -> int:
        """(any thread) Tenths of a second that the main threads of the processes have computed."""
        return sum(main_thread_tenths(pid) for pid in self.pids)

    def _send(self, message: object) -> None:
        for rank in self._ranks:
            rank.send(message)

    def _failed(self, reason: str) -> None:
        self._start_limit(reason)
        self.failure = self.failure or reason
        self._on_failed(reason)

    def _start_limit(self, reason: str) -> None:
        def end() -> None:
            log.error("group_hangs", reason=reason)
            self._on_lost()

        limit = threading.Timer(_PARTING_S, end)
        limit.daemon = True
        limit.start()
        self._limits.append(limit)

    def _cancel_limits(self) -> None:
        while self._limits:
            self._limits.pop().cancel()
