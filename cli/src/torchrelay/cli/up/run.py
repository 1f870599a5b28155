"""The run of `torchrelay up`, from locking the home to stopping the last child."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager

from torchrelay.cli.home import Home
from torchrelay.cli.launchers.engines import jobs_on
from torchrelay.cli.launchers.job_launcher import JobLauncher
from torchrelay.cli.launchers.jobs import JobProgram
from torchrelay.cli.launchers.launcher import Launcher
from torchrelay.cli.up.children.supervisor import Supervisor
from torchrelay.cli.up.disk import check_disk
from torchrelay.cli.up.external_servers import check_external_servers
from torchrelay.cli.up.machine_check import check_machine
from torchrelay.cli.up.plan import NODE_SCOPE, StackPlan, UpOptions
from torchrelay.cli.up.ports import Ports
from torchrelay.cli.up.progress import StartupProgress
from torchrelay.cli.up.shared_memory import arena_owned, left_arenas
from torchrelay.cli.up.stop_signals import stop_on_signals
from torchrelay.cli.up.tls import tls_of_install
from torchrelay.cli.views.console import out
from torchrelay.common.host.machine import SHARED_MEMORY, Machine
from torchrelay.common.process.service import published_addresses


async def run_up(home: Home, options: UpOptions, is_quiet: bool = False) -> None:
    """Runs the platform until a signal stops it, see ``stop_on_signals``. ``is_quiet``: see ``StartupProgress``."""
    home.make()
    with home.owned(), closing(Ports()) as ports:
        check_disk(home.path)
        await check_external_servers(os.environ)
        plan = StackPlan(home, options, ports, tls_of_install(home, options))
        with arena_owned(plan.arena, home.path):
            await _run_stack(home, options, plan, is_quiet)


async def _run_stack(home: Home, options: UpOptions, plan: StackPlan, is_quiet: bool) -> None:
    check_machine(options, plan.arena, Machine.here())
    stack = plan.stack()
    home.keep()
    progress = StartupProgress(home, out(), is_quiet=is_quiet)
    if plan.arena.parent == SHARED_MEMORY:
        for left in left_arenas(plan.arena):
            progress.memory_left(left)
    if stack.taken_http_port:
        progress.port_taken(stack.taken_http_port, stack.endpoints["http"])

    remote = None
    if options.on:
        program = JobProgram(
            plan.join_file(),
            plan.jobs_name,
            options.device,
            options.threads,
            options.arena_bytes,
            options.kv_pool_bytes,
            options.labels,
        )
        remote = JobLauncher(jobs_on(options.on, program, options.pod), NODE_SCOPE, progress.failed)

    async def drive(local: Launcher) -> None:
        async with asyncio.TaskGroup() as tasks:
            if remote is not None:
                tasks.create_task(remote.run())
            tasks.create_task(plan.driver(remote or local).run())

    stop, supervisor = asyncio.Event(), Supervisor(stack, progress, drive if stack.elastic or remote else None)

    @contextmanager
    def up() -> Iterator[None]:
        home.save_http_port(stack.http_port)
        if options.cluster_host:
            progress.joinable(home.write_private("join.toml", plan.join_file().as_toml()))
        progress.up(stack.endpoints)
        with published_addresses(home.endpoints_file, stack.endpoints):
            yield

    def kill() -> None:
        supervisor.kill_all()
        if remote is not None:
            remote.kill()

    stop_on_signals(stop, kill)
    try:
        await supervisor.run(up, stop)
    finally:
        if remote is not None and remote.has_begun:
            await remote.close()
        if stack.arena is not None:
            stack.arena.unlink(missing_ok=True)  # the store removes it unless it was killed
    progress.stopped()
