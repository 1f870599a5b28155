"""The actor that runs a worker on a node of Ray. Imported on the nodes, so Torchrelay is installed on them."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

import ray

from torchrelay.cli.launchers.jobs import script
from torchrelay.common.host.machine import SHARED_MEMORY, shared_digest
from torchrelay.common.process.environment import service_environment
from torchrelay.common.process.parent_death import tied_to_this_process


class RaySlot:
    """A detached actor: its program gets SIGTERM when the actor ends, also by `ray.kill` and with its node."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, arguments: Sequence[str], scope: str, join_file: str) -> None:
        """Runs the program; ends the actor with it. ``scope``: the beginning of the id of the node's machine."""
        try:
            shared = shared_digest(SHARED_MEMORY, Path(tempfile.gettempdir()))
            host_id = f"{scope}{ray.get_runtime_context().get_node_id()[:16]}-{shared}"
            environment = service_environment(os.environ, reads_object_store=True)
            environment.pop("OMP_NUM_THREADS", None)  # Ray's; the worker counts its cores
            self._process = await asyncio.create_subprocess_exec(
                *tied_to_this_process((script(), *arguments, "--host-id", host_id)),
                stdin=asyncio.subprocess.PIPE,
                env=environment,
            )
            await self._process.communicate(join_file.encode())
        finally:
            ray.actor.exit_actor()  # type: ignore[no-untyped-call]

    async def began(self) -> bool:
        """Answers once the actor has a node."""
        return True

    async def leave(self) -> None:
        if self._process is None:
            ray.actor.exit_actor()  # type: ignore[no-untyped-call]
        elif self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
