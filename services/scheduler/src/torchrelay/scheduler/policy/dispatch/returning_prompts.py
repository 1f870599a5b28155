"""Prompts that were recalled from loading instances and are about to be placed where they will be computed on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torchrelay.scheduler.policy.types import Admission


@dataclass(slots=True)
class ReturningPrompt:
    """A recalled prompt, expected at an instance until ``until``; it will take ``left_s`` there."""

    instance_id: str
    left_s: float
    until: float
    admission: Admission | None = None  # once its gateway has asked again


class ReturningPrompts:
    """Returning prompts by version and request."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, ReturningPrompt]] = {}

    def add(self, version_id: str, request_id: str, prompt: ReturningPrompt) -> None:
        self._of.setdefault(version_id, {})[request_id] = prompt

    def admitted(self, admission: Admission) -> None:
        """Records that the gateway has asked again."""
        if prompt := self._of.get(admission.version_id, {}).get(admission.key.request_id):
            prompt.admission = admission

    def remove(self, admission: Admission) -> None:
        """Forgets a prompt that is placed again, or ended."""
        prompts = self._of.get(admission.version_id)
        if prompts is not None:
            prompts.pop(admission.key.request_id, None)
            if not prompts:
                del self._of[admission.version_id]

    def target_of(self, admission: Admission) -> str:
        """The instance at which the prompt is expected; empty if it is not expected."""
        prompt = self._of.get(admission.version_id, {}).get(admission.key.request_id)
        return "" if prompt is None else prompt.instance_id

    def waiting(self, version_id: str) -> Iterator[Admission]:
        """The admissions of prompts whose gateways have asked again, in the order of their recalls."""
        for prompt in tuple(self._of.get(version_id, {}).values()):
            if prompt.admission is not None:
                yield prompt.admission

    def seconds(self, version_id: str, now: float, before: str = "") -> Mapping[str, float]:
        """The time of the prompts that are expected at each instance; of those that were recalled ``before`` a request,
        if there is one.
        """
        prompts = self._of.get(version_id)
        if prompts is None:
            return {}
        for request_id in [request_id for request_id, prompt in prompts.items() if prompt.until <= now]:
            del prompts[request_id]
        if not prompts:
            del self._of[version_id]
        seconds: dict[str, float] = {}
        for request_id, prompt in prompts.items():
            if request_id == before:
                break
            seconds[prompt.instance_id] = seconds.get(prompt.instance_id, 0.0) + prompt.left_s
        return seconds
