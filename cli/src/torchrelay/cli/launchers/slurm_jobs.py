"""Jobs of Slurm. Its own variables choose partition, account and limits: SBATCH_PARTITION, SBATCH_TIMELIMIT, ..."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Mapping

from torchrelay.cli.launchers.jobs import JobError, JobProgram, script
from torchrelay.common.process.environment import service_environment

_TIMEOUT_S = 30.0
_STATES = "PENDING,CONFIGURING,RUNNING,SUSPENDED"
_WAITS = ("PENDING", "CONFIGURING")
_LEAVE_S = 60  # before the job's time limit its program is told to leave


class SlurmJobs:
    """The platform's jobs have its name; a job's comment is its worker's id."""

    output = "/tmp/torchrelay-JOB.log on the job's machine"

    def __init__(self, program: JobProgram) -> None:
        self._program = program
        self._job_ids: dict[str, tuple[str, bool]] = {}  # with whether it runs

    async def listed(self) -> Mapping[str, str | None]:
        lines = await _output(
            "squeue", "--me", "--noheader", "--name", self._program.jobs_name, "--states", _STATES,
            "--format", "%i %T %k %r",
        )  # fmt: skip
        self._job_ids, jobs = {}, dict[str, str | None]()
        for line in lines.splitlines():
            job_id, state, comment, reason = [*line.split(" ", 3), "", ""][:4]
            if comment.startswith(self._program.join_file.scope):  # an administrator may have changed it
                self._job_ids[comment] = job_id, state not in _WAITS
                jobs[comment] = f"Slurm says {reason}" if state in _WAITS else None
        return jobs

    async def start(self, worker_id: str) -> None:
        await _output("sbatch", stdin=self.script(worker_id))

    async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
        job_id, is_running = self._job_ids[worker_id]
        # The batch shell has become the program, which stops its own children.
        await _output("scancel", *(("--signal=TERM", "--batch") if is_running and not at_once else ()), job_id)

    async def close(self) -> None:
        """Nothing is open between commands."""

    def script(self, worker_id: str) -> str:
        """The batch script. Slurm keeps it for its user and its administrators; the join file is in it."""
        program = self._program
        options = {
            "job-name": program.jobs_name,
            "comment": worker_id,
            "ntasks": "1",
            "output": "/tmp/torchrelay-%j.log",
            "signal": f"B:TERM@{_LEAVE_S}",
        }
        if program.threads:
            options["cpus-per-task"] = str(program.threads)
        if program.device != "cpu":
            options["gpus"] = "1"
        lines = [f"#SBATCH --{option}={value}" for option, value in options.items()]
        command = [script(), *program.arguments(worker_id)]
        return "\n".join(
            (
                "#!/bin/sh",
                *lines,
                "#SBATCH --no-requeue",
                f"exec {shlex.join(command)} <<'END OF JOIN FILE'",
                program.join_file.as_toml() + "END OF JOIN FILE",
                "",
            )
        )


async def _output(program: str, *arguments: str, stdin: str = "") -> str:
    """Raises ``JobError`` when the program fails, takes too long or is not installed."""
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=service_environment(os.environ, reads_object_store=True),  # of the job, whose store reads it
        )
    except FileNotFoundError as error:
        raise JobError(f"{program} is not installed: Slurm's commands are needed on this machine") from error
    except OSError as error:
        raise JobError(f"{program} cannot be started: {error.strerror}") from error
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            output, errors = await process.communicate(stdin.encode())
    except TimeoutError as error:
        raise JobError(f"{program} takes longer than {_TIMEOUT_S:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise JobError(f"{program} failed: {errors.decode(errors='replace').strip()}")
    return output.decode(errors="replace")
