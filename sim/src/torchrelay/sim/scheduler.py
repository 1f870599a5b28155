"""The scheduler in virtual time: it applies inputs, and ticks when the policy's ``next_due`` asks for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

from torchrelay.scheduler.policy import effects, inputs
from torchrelay.sim.events import Event, EventQueue

RPC_S = 0.001  # one-way delay of a call, an answer or a report


class SimulatedPolicy(Protocol):
    def apply(self, input_: inputs.Input, now: float) -> effects.Effects: ...
    def next_due(self) -> float: ...


class SimulatedScheduler:
    """The policy and its clock; ``carry_out`` receives all effects. ``rest_s``: how long it waits with the next tick
    when all that was due is done.
    """

    def __init__(
        self,
        policy: SimulatedPolicy,
        events: EventQueue,
        carry_out: Callable[[effects.Effects], None],
        rest_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._policy, self._events, self._carry_out, self._rest_s = policy, events, carry_out, rest_s
        self._due_at, self._rests_from = math.inf, -math.inf
        self._due_event: Event | None = None

    def apply(self, input_: inputs.Input) -> None:
        self._carry_out(self._policy.apply(input_, self._events.now))
        self._plan_tick()

    def soon(self, input_: inputs.Input) -> None:
        """Applies the input after the delay of one call."""
        self._events.after(RPC_S, partial(self.apply, input_))

    def _tick(self) -> None:
        self._due_at = math.inf
        self._carry_out(self._policy.apply(inputs.Tick(), self._events.now))
        if self._policy.next_due() > self._events.now:  # all that was due is done
            self._rests_from = self._events.now
        self._plan_tick()

    def _plan_tick(self) -> None:
        due = max(self._policy.next_due(), self._rests_from + self._rest_s())
        if due < self._due_at:
            if self._due_event is not None:
                self._due_event.cancel()
            self._due_at = due
            self._due_event = self._events.at(due, self._tick)
