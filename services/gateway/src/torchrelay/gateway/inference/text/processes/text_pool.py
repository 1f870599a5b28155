"""Text processes, and the prompts that wait for one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torchrelay.common.errors import QueueFull, TorchrelayError, Unavailable
from torchrelay.common.process.telemetry import get_logger
from torchrelay.gateway.inference.text.processes.frames import (
    TOKENIZER,
    Answer,
    FileId,
    Forget,
    Refusal,
    TextLimits,
    frame_of,
)
from torchrelay.gateway.inference.text.processes.metrics import TextMetrics
from torchrelay.gateway.inference.text.processes.process_choice import MAX_BUSY_S, ProcessState, choose
from torchrelay.gateway.inference.text.processes.process_connection import LocalFile, ProcessEnded, TextProcess
from torchrelay.gateway.inference.text.processes.tenant_lru import TenantLru
from torchrelay.gateway.limits.bounded_queue import BoundedQueue

log = get_logger(__name__)

MAX_WAITING = 256  # prompts of one tenant
MAX_WAITING_BYTES = 64 << 20
MEMORY_PER_FILE_BYTE = 7.5  # of a BPE's compact JSON
CLOSED = "the gateway is shutting down"


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """The sizes of a pool."""

    max_processes: int
    max_cached_bytes: int  # of tokenizers and templates, in each process
    max_running: int = 1  # prompts of one tenant
    niceness: int = 0
    num_kept: int = 0  # processes that stay when idle
    max_wait_s: float = 10.0
    idle_s: float = 60.0
    # The kernel kills a process that exceeds its CPU time. The gateway kills a process that uses no CPU for this long.
    hung_s: float = 10.0


class PromptKilled(Exception):
    """The process of a prompt ended with ``status`` while it computed, or while it read the file ``loading``."""

    def __init__(self, status: int, loading: str | None) -> None:
        super().__init__(f"a text process ended with {status}")
        self.status = status
        self.loading = loading


class FileRefused(Exception):
    """A file of the model cannot be read: ``name`` and why."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name
        self.detail = detail


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    tenant: str
    model: str
    frame: bytes
    files: tuple[LocalFile, ...]
    answer: asyncio.Future[Answer]
    asked_s: float

    @property
    def tokenizer(self) -> FileId:
        return next(file.id for file in self.files if file.id[0] == TOKENIZER)


@dataclass(slots=True, eq=False)
class _Run:
    """A job in a process."""

    job: _Job
    state: ProcessState
    process: TextProcess
    timer: asyncio.TimerHandle | None = None
    loading: str | None = None
    error: TorchrelayError | None = None  # why the gateway itself ends the process


class TextPool:
    """Runs prompts in its processes, fairly between tenants. Processes start when they are needed.

    ``killed`` is called with the tenant and model of each prompt whose process was killed.
    """

    def __init__(
        self, settings: PoolSettings, limits: TextLimits, metrics: TextMetrics, killed: Callable[[str, str], None]
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._metrics = metrics
        self._killed = killed
        self._queue: BoundedQueue[_Job] = BoundedQueue(settings.max_running, MAX_WAITING, MAX_WAITING_BYTES)
        self._ready: dict[ProcessState, TextProcess] = {}  # the processes that take commands
        self._num_starting = 0
        self._runs: set[_Run] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that take commands."""
        return tuple(process.pid for process in self._ready.values())

    @property
    def _num_processes(self) -> int:
        return len(self._ready) + self._num_starting

    async def run(self, tenant: str, model: str, frame: bytes, files: Sequence[LocalFile]) -> Answer:
        """The answer to a ``Prompt``. Raises ``PromptKilled``, ``FileRefused``, ``QueueFull`` or ``Unavailable``."""
        loop = asyncio.get_running_loop()
        job = _Job(tenant, model, frame, tuple(files), loop.create_future(), loop.time())
        if not self._queue.add(tenant, job, len(frame)):
            self._metrics.ended("queue_full")
            message = f"too many of your prompts wait to be tokenized: at most {MAX_WAITING}, of {MAX_WAITING_BYTES:,}"
            raise QueueFull(f"{message} bytes in all", retry_after_s=1.0)
        self._dispatch()
        timer = loop.call_later(self._settings.max_wait_s, self._expire, job)
        try:
            return await job.answer
        finally:
            timer.cancel()
            self._queue.remove(tenant, job)

    async def close(self) -> None:
        """Ends every process and every prompt."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for run in list(self._runs):
            self._charge(run)
            self._fail(run.job, Unavailable(CLOSED))
        self._refuse_waiting(CLOSED)
        await asyncio.gather(*(process.end() for process in self._ready.values()))

    # From the queue into a process:

    def _dispatch(self) -> None:
        states = self._ready.keys()
        while any(not state.is_busy for state in states):
            taken = self._queue.next(lambda job: choose(states, job.tokenizer))
            if taken is None:
                break
            self._begin(*taken)
        if self._queue.num_waiting:
            self._grow_if_slow()

    def _begin(self, job: _Job, state: ProcessState) -> None:
        loop = asyncio.get_running_loop()
        run = _Run(job, state, self._ready[state])
        self._runs.add(run)
        state.is_busy, state.since_s = True, loop.time()
        self._metrics.waited(state.since_s - job.asked_s)
        run.timer = loop.call_later(MAX_BUSY_S, self._note_slow, run)
        if all(file.id in state.held for file in job.files):
            for file in job.files:
                state.held.use(file.id, job.tenant)
            run.process.ask(job.frame).add_done_callback(partial(self._answered, run))
        else:
            self._own(self._load_and_ask(run))

    def _answered(self, run: _Run, answer: asyncio.Future[Answer]) -> None:
        is_lost = answer.exception() is not None
        if self._is_closed:
            return
        if is_lost:
            self._own(self._bury(run))
        else:
            self._finish(run, answer.result())

    async def _load_and_ask(self, run: _Run) -> None:
        try:
            await self._load_missing(run)
            self._finish(run, await run.process.wait_answer(run.process.ask(run.job.frame)))
        except FileRefused as refused:
            self._fail(run.job, refused, "refused")
            self._free(run)
        except ProcessEnded as ended:
            self._died(run, ended.status)
        except OSError as error:
            log.warning("model_file_unreadable", error=str(error))
            run.error = Unavailable(f"the gateway cannot read a file of the model: {error.strerror}")
            await self._bury(run)  # it waits for the rest of the file
        except Exception:  # the prompt must end and its process be free
            log.exception("prompt_crashed")
            run.error = TorchrelayError("internal error in the gateway's text processes")
            await self._bury(run)

    async def _load_missing(self, run: _Run) -> None:
        """Raises ``FileRefused``, ``ProcessEnded`` or ``OSError``."""
        held, job = run.state.held, run.job
        missing = [file for file in job.files if file.id not in held]
        num_needed = sum(map(_memory_bytes, missing))
        if forgotten := held.evict_for(num_needed, job.tenant, {file.id for file in job.files}):
            run.process.tell(frame_of(Forget(tuple(forgotten))))
        for file in missing:
            run.loading = file.id[0]
            outcome = await run.process.load(file)
            if isinstance(outcome, Refusal):
                raise FileRefused(file.id[0], outcome.detail)
            held.add(file.id, job.tenant, _memory_bytes(file))
        run.loading = None

    # The end of a prompt:

    def _finish(self, run: _Run, answer: Answer) -> None:
        self._metrics.ended("refused" if isinstance(answer, Refusal) else "ok")
        if not run.job.answer.done():
            run.job.answer.set_result(answer)
        self._free(run)

    def _fail(self, job: _Job, error: Exception, outcome: str = "failed") -> None:
        self._metrics.ended(outcome)
        if not job.answer.done():
            job.answer.set_exception(error)

    def _free(self, run: _Run) -> None:
        """Makes the process of an ended prompt idle."""
        self._charge(run)
        self._dispatch()

    def _charge(self, run: _Run) -> None:
        now_s, state = asyncio.get_running_loop().time(), run.state
        self._runs.remove(run)
        if run.timer is not None:
            run.timer.cancel()
        self._queue.ended(run.job.tenant, now_s - state.since_s)
        state.is_busy, state.is_slow, state.since_s = False, False, now_s

    def _expire(self, job: _Job) -> None:
        if not self._queue.remove(job.tenant, job):
            return  # it runs
        waited = f"the prompt waited {self._settings.max_wait_s:g} s to be tokenized"
        if self._queue.num_running(job.tenant):
            error = QueueFull(f"{waited}, behind other prompts of yours", retry_after_s=self._settings.max_wait_s)
            self._fail(job, error, "expired")
        else:
            self._fail(job, Unavailable(f"{waited}: the gateway's text processes are busy"), "expired")

    # The end of a process:

    async def _bury(self, run: _Run) -> None:
        self._died(run, await run.process.end())

    def _died(self, run: _Run, status: int) -> None:
        del self._ready[run.state]
        self._charge(run)
        log.warning("text_process_killed", status=status, tenant=run.job.tenant, model=run.job.model)
        self._metrics.killed(status)
        if run.error is not None:
            self._fail(run.job, run.error)
        else:
            self._killed(run.job.tenant, run.job.model)
            self._fail(run.job, PromptKilled(status, run.loading), "killed")
        self._dispatch()
        self._keep_one()

    def _note_slow(self, run: _Run) -> None:
        run.state.is_slow = True
        self._watch(run)
        self._dispatch()
        self._grow_if_slow()

    def _watch(self, run: _Run, last_ns: int = -1) -> None:
        """Ends the process once it does nothing for ``hung_s``."""
        ran_ns = run.process.ran_ns()
        if ran_ns == last_ns:
            run.error = Unavailable("a text process of the gateway did not answer")
            run.process.kill()
        else:
            run.timer = asyncio.get_running_loop().call_later(self._settings.hung_s, self._watch, run, ran_ns)

    # The start of processes:

    def _grow_if_slow(self) -> None:
        """Starts a process unless another will be free in a moment."""
        if not self._num_starting and all(state.is_slow for state in self._ready):
            self._grow()

    def _keep_one(self) -> None:
        if self._num_processes < self._settings.num_kept:
            self._grow()

    def _grow(self) -> None:
        if self._num_processes < self._settings.max_processes and not self._is_closed:
            self._num_starting += 1
            self._own(self._start())

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            process = await TextProcess.start(self._limits, self._settings.niceness)
        except (ProcessEnded, OSError, TimeoutError) as error:
            log.error("text_process_not_started", error=str(error) or type(error).__name__)
            if not self._ready:
                self._refuse_waiting("the gateway cannot start a process to tokenize prompts")
            return
        finally:
            self._num_starting -= 1
        state = ProcessState(TenantLru(self._settings.max_cached_bytes), loop.time())
        self._ready[state] = process
        process.lost.add_done_callback(lambda _: self._note_lost(state))
        loop.call_later(self._settings.idle_s, self._end_if_idle, state)
        self._dispatch()

    def _note_lost(self, state: ProcessState) -> None:
        """Removes a process that ended while idle; a busy one is removed with its prompt."""
        if not self._is_closed and not state.is_busy and (process := self._ready.pop(state, None)) is not None:
            self._own(process.end())

    def _end_if_idle(self, state: ProcessState) -> None:
        process = self._ready.get(state)
        if process is None:
            return
        loop = asyncio.get_running_loop()
        is_idle = not state.is_busy and loop.time() - state.since_s >= self._settings.idle_s
        if is_idle and self._num_processes > self._settings.num_kept:
            del self._ready[state]
            self._own(process.end())
        else:
            loop.call_later(self._settings.idle_s, self._end_if_idle, state)

    def _refuse_waiting(self, message: str) -> None:
        while (taken := self._queue.next(lambda _: True)) is not None:
            job, _ = taken
            self._queue.ended(job.tenant, 0.0)
            self._fail(job, Unavailable(message))

    def _own(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _memory_bytes(file: LocalFile) -> int:
    return int(file.num_bytes * MEMORY_PER_FILE_BYTE)
