"""A worker's engine without tensors: prompts in chunks within a token budget, and continuous batching of decodes.

While prompts wait, every step is an event: it computes the decoding batch and a chunk of the prompts, in order of
arrival. While no prompt waits, the batch changes only when a sequence ends. Each step until then takes longer than the
last because the context grows, so all of these steps are one event, and a quadratic equation gives the number of steps
done at any moment.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from torchrelay.common.latency.latency_model import LatencyModel, StepWork, attended_positions
from torchrelay.sim.events import Event, EventQueue

_SLACK = 1e-6  # steps


@dataclass(eq=False, slots=True)
class Prompt:
    """A prompt with positions [num_done, num_tokens) to compute; ``on_computed`` is called at its first token."""

    num_tokens: int
    on_computed: Callable[[], None]
    num_done: int = 0
    is_over: bool = False


@dataclass(eq=False, slots=True)
class Decoding:
    """A sequence with ``num_context`` tokens of context that decodes ``num_left`` more tokens."""

    num_context: int
    num_left: int
    on_end: Callable[[], None]
    _joined_at: float = 0.0  # value of the engine's step counter
    is_over: bool = False

    @property
    def end_step(self) -> float:
        return self._joined_at + self.num_left

    def join(self, step: float) -> None:
        self._joined_at = step

    def context_at(self, step: float) -> float:
        return self.num_context + step - self._joined_at


@dataclass(eq=False)
class SimulatedEngine:
    """Engine of a slot. ``latency`` must have both costs.

    Until ``ready_at``, the time of the last layer, prompts are computed but for that layer, and no answer decodes.
    """

    events: EventQueue
    latency: LatencyModel
    ready_at: float = 0.0

    def __post_init__(self) -> None:
        self._prompts: deque[Prompt] = deque()
        self._held: list[Prompt] = []  # computed but for the last layer
        self._batch: list[tuple[float, int, Decoding]] = []  # a heap by last step
        self._num_decoding = 0
        self._sequence = count()
        self._steps = 0.0  # decode steps done, at ``_at``
        self._num_attended = 0.0  # positions, by the next step
        self._at = self.events.now
        self._is_settling = False
        self._step_end_at = 0.0
        self._chunks: list[tuple[Prompt, int]] = []  # of the current step
        self._next: Event | None = None

    @property
    def num_running(self) -> int:
        return self._num_decoding + len(self._prompts) + len(self._held)

    def num_tokens_done(self, decoding: Decoding) -> int:
        """Tokens that this engine has decoded for the sequence so far."""
        self._advance()
        return min(int(self._steps - decoding.end_step + decoding.num_left + _SLACK), decoding.num_left)

    def set_ready_at(self, ready_at: float) -> None:
        """Sets when the last layer arrives. A step that waits for it ends at that time or later."""
        self._advance()
        self.ready_at = ready_at
        self.events.at(max(ready_at, self.events.now), self._give_held)
        if self._chunks:
            self._await_layers()
        else:
            self._plan()

    def prefill(self, prompt: Prompt) -> None:
        self._prompts.append(prompt)
        self._plan()

    def decode(self, decoding: Decoding) -> None:
        """Adds the sequence to the batch; the step that begins now gives its first token here."""
        self._advance()
        if decoding.num_left <= 0:
            decoding.is_over = True
            decoding.on_end()
            return
        decoding.join(math.ceil(self._steps - _SLACK))
        heapq.heappush(self._batch, (decoding.end_step, next(self._sequence), decoding))
        self._num_decoding += 1
        self._num_attended += decoding.num_context
        self._plan()

    def cancel(self, job: Prompt | Decoding) -> None:
        """Removes the job without calling its callback."""
        self._advance()
        if isinstance(job, Prompt):
            if job in self._held:
                job.is_over = True
                self._held.remove(job)
            elif job in self._prompts:
                job.is_over = True
                self._prompts.remove(job)
                self._plan()
        elif not job.is_over:
            job.is_over = True
            self._num_decoding -= 1
            self._num_attended -= job.context_at(self._steps)
            self._plan()

    def _plan(self) -> None:
        """Schedules the next event, unless a step is in progress or its end is being handled."""
        if self._chunks or self._is_settling:
            return
        if self._prompts:
            self._await_step_end()
        else:
            self._await_batch()

    def _settle(self, computed: Sequence[Prompt] = ()) -> None:
        """Calls back for computed prompts and ended sequences, which may add work, then plans once."""
        self._is_settling = True
        for decoding in self._ended_decodings():
            decoding.on_end()
        for prompt in computed:
            prompt.on_computed()
        self._is_settling = False
        self._plan()

    # Steps with prompts

    def _await_step_end(self) -> None:
        """Begins a step with prompts once the current decode step ends."""
        self._advance()
        part_left = math.ceil(self._steps - _SLACK) - self._steps
        if self._num_decoding and part_left > _SLACK:
            self._wait(part_left * self._step_s(), self._begin_step)
        else:
            self._begin_step()

    def _begin_step(self) -> None:
        self._advance()
        self._steps = float(round(self._steps))
        budget = max(self.latency.token_budget - self._num_decoding, 16)
        num_prefilled = num_attended = 0
        chunks = []
        for prompt in self._prompts:
            size = min(budget, prompt.num_tokens - prompt.num_done)
            chunks.append((prompt, size))
            num_prefilled += size
            num_attended += attended_positions(prompt.num_done, prompt.num_done + size)
            budget -= size
            if not budget:
                break
        work = StepWork(num_prefilled, num_attended, self._num_decoding, int(self._num_attended))
        step_s = self.latency.step_s(work)
        assert step_s is not None, "both costs are known"
        self._chunks = chunks
        self._at = self.events.now
        self._step_end_at = self.events.now + step_s
        self._await_layers()

    def _await_layers(self) -> None:
        """Schedules the end of the current step; with answers once the arrival of the last layer is known, and not
        before it.
        """
        self._cancel_wait()
        if not self._num_decoding:
            self._next = self.events.at(max(self._step_end_at, self.events.now), self._end_step)
        elif not math.isinf(self.ready_at):
            self._next = self.events.at(max(self._step_end_at, self.ready_at), self._end_step)

    def _end_step(self) -> None:
        if self._num_decoding and self.events.now < self.ready_at:  # an answer has come meanwhile
            self._await_layers()
            return
        chunks, self._chunks = self._chunks, []
        self._at = self.events.now
        if self._num_decoding:
            self._steps += 1
            self._num_attended += self._num_decoding
        computed = []
        for prompt, size in chunks:
            if prompt.is_over:
                continue
            prompt.num_done += size
            if prompt.num_done >= prompt.num_tokens:
                computed.append(prompt)
        for prompt in computed:
            self._prompts.remove(prompt)
        if self.events.now < self.ready_at:
            self._held += computed
            self._settle()
            return
        for prompt in computed:
            prompt.is_over = True
        self._settle(computed)

    def _give_held(self) -> None:
        """Gives the first tokens of the prompts that lacked only the last layer."""
        held, self._held = self._held, []
        for prompt in held:
            prompt.is_over = True
        for prompt in held:
            prompt.on_computed()

    # Steps without prompts

    def _step_s(self) -> float:
        return self.latency.tbt_s(self._num_decoding, int(self._num_attended))

    def _advance(self) -> None:
        """Counts the decode steps since ``_at``; a step with prompts counts when it ends."""
        passed_s, self._at = self.events.now - max(self._at, self.ready_at), self.events.now
        if passed_s <= 0 or self._chunks or not self._num_decoding:
            return
        growth_s = self.latency.decode.per_attended_s * self._num_decoding / 2
        first_s = self._step_s() - growth_s
        steps = passed_s / first_s
        if growth_s > 0:
            steps = (math.sqrt(first_s**2 + 4 * growth_s * passed_s) - first_s) / (2 * growth_s)
        self._steps += steps
        self._num_attended += steps * self._num_decoding

    def _await_batch(self) -> None:
        """Waits until the next sequence of the batch ends."""
        while self._batch and self._batch[0][2].is_over:
            heapq.heappop(self._batch)
        if not self._batch or math.isinf(self.ready_at):
            self._cancel_wait()
            return
        steps = max(self._batch[0][0] - self._steps, 0.0)
        growth_s = self.latency.decode.per_attended_s * self._num_decoding / 2
        wait_s = steps * (self._step_s() - growth_s) + growth_s * steps**2
        self._wait(wait_s + max(self.ready_at - self.events.now, 0.0), self._batch_changed)

    def _batch_changed(self) -> None:
        self._advance()
        if self._batch:
            self._steps = max(self._steps, self._batch[0][0])
        self._settle()

    def _ended_decodings(self) -> list[Decoding]:
        """Removes and returns all sequences whose last step is done."""
        ended = []
        while self._batch and (self._batch[0][2].is_over or self._batch[0][0] <= self._steps + _SLACK):
            decoding = heapq.heappop(self._batch)[2]
            if not decoding.is_over:
                decoding.is_over = True
                self._num_decoding -= 1
                self._num_attended -= decoding.num_context + decoding.num_left
                ended.append(decoding)
        if not self._num_decoding:
            self._num_attended = 0.0
        return ended

    def _wait(self, wait_s: float, call: Callable[[], None]) -> None:
        self._cancel_wait()
        self._next = self.events.after(wait_s, call)

    def _cancel_wait(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
