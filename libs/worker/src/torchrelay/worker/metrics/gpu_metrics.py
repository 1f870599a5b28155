"""The state of a slot's GPUs, and the engine's work on them, as exported metrics. Never run on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from opentelemetry import metrics

from torchrelay.common.process.telemetry import get_logger, observe_counts, observe_values
from torchrelay.engine import device_counts

log = get_logger(__name__)
_Values = dict[tuple[str, ...], float]


def export_gpus(uuids: Sequence[str], meter: metrics.Meter | None = None) -> None:
    """Registers metrics of the engine's work on these GPUs, and of the GPUs themselves if the package nvidia-ml-py is
    installed and its library answers.
    """
    if not uuids:
        return
    meter, name = meter or metrics.get_meter("torchrelay.worker"), "torchrelay_worker_gpu"
    for suffix, description, attribute, counts in (
        ("copied_bytes", "Bytes copied to or from a GPU.", "kind", device_counts.COPIED_BYTES),
        ("copy_seconds", "Time of a GPU in these copies.", "kind", device_counts.COPY_S),
        ("decode_steps", "Batches with running choices, replayed or not.", "kind", device_counts.DECODE_STEPS),
        ("compilations", "Kernels compiled, or read from the disk.", "kernel", device_counts.COMPILED_KERNELS),
        ("compilation_seconds", "Time of these compilations.", "kernel", device_counts.COMPILATION_S),
    ):
        observe_counts(meter, f"{name}_{suffix}", description, attribute, counts)
    try:
        nvml: Any = import_module("pynvml")
    except ImportError:
        log.info("gpus_not_measured", why="the package nvidia-ml-py is not installed")
        return
    try:
        gpus = GpuFigures(nvml, uuids)
    except nvml.NVMLError as error:
        log.warning("gpus_not_measured", why=str(error))
        return
    observe_values(meter, f"{name}_memory_bytes", "Memory of a GPU, used and in total.", ("gpu", "state"), gpus.memory)
    observe_values(meter, f"{name}_power_watts", "Power that a GPU draws.", ("gpu",), gpus.power_watts)
    observe_values(meter, f"{name}_utilization", "Share of time with a kernel running.", ("gpu",), gpus.utilization)
    activity = "Share of time of a GPU's memory (dram) and tensor cores at work; share of warps in use (sm_occupancy)."
    observe_values(meter, f"{name}_activity", activity, ("gpu", "unit"), gpus.activity)
    energy = "Energy that a GPU has used since its driver started."
    observe_values(meter, f"{name}_energy_joules", energy, ("gpu",), gpus.energy_joules, rises=True)
    observe_values(meter, f"{name}_xids", "Faults (XID) of a GPU since the start.", ("gpu", "xid"), gpus.xids)


class GpuFigures:
    """The figures of some GPUs. A GPU lacks those that it does not tell, as a slice (MIG) its power."""

    def __init__(self, nvml: Any, uuids: Sequence[str]) -> None:
        """``nvml``: the module ``pynvml``. Raises its ``NVMLError``."""
        nvml.nvmlInit()
        self._nvml = nvml
        self._handles = {uuid: self._handle(uuid) for uuid in uuids}
        self._xids: _Values = {}
        self._samples: dict[str, Any] = {}  # of activity, the last by GPU
        self._events = {uuid: self._watched(handle) for uuid, handle in self._handles.items()}

    def _handle(self, uuid: str) -> Any:
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except self._nvml.NVMLError:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")

    def _watched(self, handle: Any) -> Any:
        """A set of the GPU's events that tells its faults; None if it tells none."""
        try:
            events = self._nvml.nvmlEventSetCreate()
            self._nvml.nvmlDeviceRegisterEvents(handle, self._nvml.nvmlEventTypeXidCriticalError, events)
        except self._nvml.NVMLError:
            return None
        return events

    def _of_each(self, ask: Callable[[Any], _Values]) -> _Values:
        values: _Values = {}
        for uuid, handle in self._handles.items():
            try:
                values |= {(uuid, *key): value for key, value in ask(handle).items()}
            except self._nvml.NVMLError:
                continue  # it does not tell this
        return values

    def memory(self) -> _Values:
        def ask(handle: Any) -> _Values:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            return {("used",): memory.used, ("total",): memory.total}

        return self._of_each(ask)

    def power_watts(self) -> _Values:
        return self._of_each(lambda handle: {(): self._nvml.nvmlDeviceGetPowerUsage(handle) / 1000})

    def utilization(self) -> _Values:
        return self._of_each(lambda handle: {(): self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100})

    def energy_joules(self) -> _Values:
        return self._of_each(lambda handle: {(): self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000})

    def activity(self) -> _Values:
        """The activity since the last call, of GPUs that NVML samples (GPM: from Hopper on, but no slices)."""
        nvml, units = self._nvml, {"sm_occupancy": self._nvml.NVML_GPM_METRIC_SM_OCCUPANCY}
        units |= {"dram": nvml.NVML_GPM_METRIC_DRAM_BW_UTIL, "tensor": nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL}
        values: _Values = {}
        for uuid, handle in self._handles.items():
            try:
                sample = nvml.nvmlGpmSampleGet(handle, nvml.nvmlGpmSampleAlloc())
                before, self._samples[uuid] = self._samples.get(uuid), sample
                if before is None:
                    continue
                asked = nvml.c_nvmlGpmMetricsGet_t()
                asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(units)
                asked.sample1, asked.sample2 = before, sample
                for place, number in enumerate(units.values()):
                    asked.metrics[place].metricId = number
                nvml.nvmlGpmMetricsGet(asked)
                nvml.nvmlGpmSampleFree(before)
            except nvml.NVMLError:
                continue  # it does not tell this
            values |= {(uuid, unit): asked.metrics[place].value / 100 for place, unit in enumerate(units)}
        return values

    def xids(self) -> _Values:
        for uuid, events in self._events.items():
            while events is not None:
                try:
                    event = self._nvml.nvmlEventSetWait_v2(events, 0)
                except self._nvml.NVMLError:
                    break  # there is no further event
                key = uuid, str(event.eventData)
                self._xids[key] = self._xids.get(key, 0) + 1
        return dict(self._xids)
