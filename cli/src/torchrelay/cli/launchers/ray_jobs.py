"""Jobs of Ray: one detached actor per worker. Its cluster may scale its nodes with them, as KubeRay's does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from torchrelay.cli.launchers.jobs import JobError, JobProgram
from torchrelay.cli.launchers.ray_slot import RaySlot

RESOURCE = "torchrelay_slot"  # of nodes without GPUs
_T = TypeVar("_T")


class RayJobs:
    """The platform's actors have its namespace; an actor's name is its worker's id. ``address``: of Ray."""

    output = "the actor's log (`ray logs`)"

    def __init__(self, address: str, program: JobProgram) -> None:
        self._address, self._program = address, program
        self._slot: Any = None  # the actor's class, known to the cluster
        self._began: dict[str, Any] = {}  # of each actor, the answer that it gives once it has a node

    async def listed(self) -> Mapping[str, str | None]:
        return await self._asked(self._listed)

    async def start(self, worker_id: str) -> None:
        await self._asked(lambda: self._start(worker_id))

    async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
        await self._asked(lambda: self._stop(worker_id, at_once))

    async def close(self) -> None:
        await asyncio.to_thread(ray.shutdown)

    async def _asked(self, ask: Callable[[], _T]) -> _T:
        """The answer; connects first if need be. Raises ``JobError``."""
        try:
            return await asyncio.to_thread(self._connected, ask)
        except (RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise JobError(f"Ray at {self._address}: {error}") from error

    def _connected(self, ask: Callable[[], _T]) -> _T:
        if not ray.is_initialized():
            ray.init(self._address, namespace=self._program.jobs_name, logging_level=logging.ERROR, log_to_driver=False)
            self._slot = ray.remote(RaySlot)  # once: its nodes would load the class again
            self._began.clear()
        return ask()

    def _listed(self) -> Mapping[str, str | None]:
        names = set(ray.util.list_named_actors())
        self._began = {name: self._began.get(name) or ray.get_actor(name).began.remote() for name in names}
        began, _ = ray.wait(list(self._began.values()), num_returns=len(names), timeout=0) if names else ([], [])
        return {name: None if answer in began else "Ray has no node for it yet" for name, answer in self._began.items()}

    def _start(self, worker_id: str) -> None:
        program = self._program
        needs = {"num_gpus": 1} if program.device != "cpu" else {"resources": {RESOURCE: 1}}
        options = {"name": worker_id, "lifetime": "detached", "num_cpus": program.threads, **needs}
        actor: Any = self._slot.options(**options).remote()
        try:
            actor.run.remote(program.arguments(worker_id), program.join_file.scope, program.join_file.as_toml())
        except (RayError, ConnectionError, RuntimeError):
            ray.kill(actor)  # it would run nothing
            raise

    def _stop(self, worker_id: str, at_once: bool) -> None:
        try:
            actor = ray.get_actor(worker_id)
        except ValueError:
            return  # it has ended
        began = self._began.get(worker_id)
        if began is not None and not at_once and ray.wait([began], timeout=0)[0]:
            actor.leave.remote()
        else:
            ray.kill(actor)
