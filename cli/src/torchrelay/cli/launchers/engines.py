"""The engines that run jobs. Those that need a package of their own import it when they are chosen."""

from __future__ import annotations

from pathlib import Path

from torchrelay.cli.errors import CliError
from torchrelay.cli.launchers.jobs import JobProgram, Jobs
from torchrelay.cli.launchers.slurm_jobs import SlurmJobs


def jobs_on(engine: str, program: JobProgram, pod: Path | None) -> Jobs:
    """The jobs of ``kubernetes``, ``slurm``, ``ray`` or ``ray://HOST:PORT``.

    ``pod``: the manifest of Kubernetes. Raises ``CliError`` when the engine's package is not installed, or the manifest
    is not valid.
    """
    if engine == "slurm":
        return SlurmJobs(program)
    name = engine.partition(":")[0]
    try:
        if pod is not None:
            from torchrelay.cli.launchers.kubernetes_jobs import KubernetesJobs, read_manifest

            return KubernetesJobs(program, read_manifest(pod))
        from torchrelay.cli.launchers.ray_jobs import RayJobs
    except ModuleNotFoundError as error:
        raise CliError(f"{error.name} is not installed", f"install it: pip install 'torchrelay[{name}]'") from error
    return RayJobs("auto" if engine == "ray" else engine, program)
