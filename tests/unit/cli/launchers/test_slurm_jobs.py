"""The batch script of a job; `tests/fleet` runs it on a cluster."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from torchrelay.cli.join_file import JoinFile
from torchrelay.cli.launchers import slurm_jobs
from torchrelay.cli.launchers.jobs import JobError, JobProgram
from torchrelay.cli.launchers.slurm_jobs import SlurmJobs

FILE = JoinFile("10.0.0.5:7101", 'nats://nodes:"p$a`ss@10.0.0.5:4222', "s3://bucket/packs", "node-.1.mac")


def test_script_runs_the_program_with_its_machine_and_the_join_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "torchrelay"
    program.write_text('#!/bin/sh\necho "$@"\ncat\n')
    program.chmod(0o755)
    monkeypatch.setattr(slurm_jobs, "script", lambda: str(program))
    script = SlurmJobs(JobProgram(FILE, "torchrelay-test", "cpu", 2)).script("node-1")
    assert "--gpus" not in script and "#SBATCH --cpus-per-task=2\n" in script
    file = tmp_path / "script"
    file.write_text(script)
    environment = {"SLURMD_NODENAME": "rack_1.n2", "PATH": "/usr/bin:/bin"}
    ran = subprocess.run(["sh", str(file)], env=environment, capture_output=True, text=True, check=True)
    arguments = "join - --worker-id node-1 --device cpu --threads 2 --host-id node-rack-1-n2"
    assert ran.stdout == f"{arguments}\n{FILE.as_toml()}"


def test_job_gets_a_gpu_unless_it_computes_on_cpus() -> None:
    assert "#SBATCH --gpus=1\n" in SlurmJobs(JobProgram(FILE, "torchrelay-test")).script("node-1")


async def test_missing_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(JobError, match="squeue is not installed"):
        await SlurmJobs(JobProgram(FILE, "torchrelay-test")).listed()


async def test_jobs_with_a_changed_comment_are_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(
        "#!/bin/sh\nprintf '7 RUNNING node-1\\n8 PENDING node-2\\n9 RUNNING moved by ops\\n10 RUNNING\\n'\n"
    )
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert await SlurmJobs(JobProgram(FILE, "torchrelay-test")).listed() == {"node-1": True, "node-2": False}
