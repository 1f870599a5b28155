"""The parts of a platform as processes that are started, killed and replaced one by one, without a supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.platform import Platform
from tests.support.wait import HANG_S
from torchrelay.cli.home import Home
from torchrelay.cli.up.children.child import Child, ChildSpec
from torchrelay.cli.up.plan import StackPlan, UpOptions
from torchrelay.cli.up.ports import Ports
from torchrelay.cli.up.tls import tls_of_install

BROKERS = ("redis", "nats")
STOP_LIMIT_S = 30.0  # as compose and Kubernetes have it


@dataclass(slots=True)
class Parts:
    """Processes by name, with the settings of `torchrelay up`; ``gateway-1`` and ``scheduler-1`` are further ones."""

    home: Home
    ports: Ports
    specs: dict[str, ChildSpec]
    children: dict[str, Child] = field(default_factory=dict)

    def copy(self, name: str, copied: str, *ports: str, **settings: str) -> None:
        """Adds a part like another; ``ports`` names its settings of ports, which get free ones."""
        first = self.specs[copied]
        ready_file = self.home.run / f"{name}.json"
        own = {"READY_FILE": str(ready_file), **{port: str(self.ports.free()) for port in ports}, **settings}
        env = {**first.env, **{f"TORCHRELAY_{setting}": value for setting, value in own.items()}}
        log = self.home.logs / f"{name}.log"
        self.specs[name] = replace(first, name=name, env=env, ready_file=ready_file, log=log)

    def set(self, name: str, **settings: str) -> None:
        spec = self.specs[name]
        env = {**spec.env, **{f"TORCHRELAY_{setting}": value for setting, value in settings.items()}}
        self.specs[name] = replace(spec, env=env)

    def setting(self, name: str, setting: str) -> str:
        return self.specs[name].env[f"TORCHRELAY_{setting}"]

    def platform(self, gateway: str) -> Platform:
        """A client's view of the platform by this gateway; there is no `up`."""
        endpoints = {"http": f"http://127.0.0.1:{self.setting(gateway, 'HTTP_PORT')}"}
        return Platform(self.home, endpoints, None)  # type: ignore[arg-type]

    async def start(self, *names: str, programs: Path | None = None, is_awaited: bool = True) -> None:
        """Starts parts at once, and waits until they serve; ``programs``: the folder of their programs."""
        async with asyncio.TaskGroup() as tasks:
            for name in names:
                tasks.create_task(self._start(name, programs, is_awaited))

    async def _start(self, name: str, programs: Path | None, is_awaited: bool) -> None:
        spec = self.specs[name]
        if programs is not None:
            spec = replace(spec, command=(str(programs / Path(spec.command[0]).name), *spec.command[1:]))
        child = self.children[name] = await Child.start(spec)
        async with asyncio.timeout(HANG_S):
            while is_awaited and not await _serves(spec):
                assert child.returncode is None, f"{name} ended: {spec.log.read_text()[-2000:]}"
                await asyncio.sleep(0.05)

    async def leave(self, name: str) -> None:
        """Ends a part as a supervisor does that waits for its grace. Raises ``TimeoutError``."""
        child = self.children.pop(name)
        os.kill(child.pid, signal.SIGTERM)
        async with asyncio.timeout(STOP_LIMIT_S):
            await child.exited()

    async def kill(self, name: str) -> None:
        child = self.children.pop(name)
        child.kill()
        await child.exited()


async def _serves(spec: ChildSpec) -> bool:
    if spec.ready_file is not None:
        return spec.ready_file.exists()
    url = urlsplit(spec.broker_url)
    try:
        _, writer = await asyncio.open_connection(url.hostname, url.port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


@asynccontextmanager
async def parts_of(folder: Path, options: UpOptions, settings: Mapping[str, str] | None = None) -> AsyncIterator[Parts]:
    """The parts of an install in ``folder``, of which the brokers run; ``settings`` are those of every service."""
    home = Home(folder)
    home.make()
    with closing(Ports()) as ports, home.owned():
        plan = StackPlan(home, options, ports, tls_of_install(home, options))
        specs = {spec.name: spec for group in plan.stack().groups for spec in group}
        parts = Parts(home, ports, specs)
        for name in specs.keys() - set(BROKERS):
            parts.set(name, **(settings or {}))
        try:
            await parts.start(*(name for name in BROKERS if name in specs))
            yield parts
        finally:
            for child in reversed(parts.children.values()):
                await child.stop()
            plan.arena.unlink(missing_ok=True)
