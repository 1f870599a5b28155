"""Counters, shares and latency models of steps, and the load, as metrics and for the report."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import astuple, replace
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint

from torchrelay.common.latency.latency_model import NO_WORK, StepWork
from torchrelay.engine.core import StepProfile, StepResult
from torchrelay.engine.device_counts import CopyTimes
from torchrelay.modelspec.sizing.footprint import footprint_of_bytes
from torchrelay.worker.metrics.gpu_metrics import export_gpus
from torchrelay.worker.metrics.load_metrics import export_load
from torchrelay.worker.metrics.step_floor import StepFloor
from torchrelay.worker.metrics.step_metrics import InstanceLabels, StepMetrics
from torchrelay.worker.metrics.time_shares import NO_SHARES, TimeShares, bottleneck

LABELS = InstanceLabels("i1", "acme/tiny", "pack", "prefill+decode")
OTHER = InstanceLabels("i2", "acme/other", "another", "decode")
WARM = StepProfile(compute_s=0.015, memory_s=0.003, scheduling_s=0.002)


def a_step(num_prefilled: int = 0, num_decoding: int = 1, profile: StepProfile = WARM) -> StepResult:
    work = StepWork(num_prefilled, num_prefilled * 10, num_decoding, num_decoding * 100)
    return StepResult((), (), num_prefilled, num_decoding, profile.total_s, work, profile)


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    actual = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[actual], shutdown_on_exit=False)
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    yield actual
    provider.shutdown()


def points(reader: InMemoryMetricReader, name: str) -> dict[tuple[object, ...], float]:
    """Values of a metric by its attributes, in order of their names."""
    data = reader.get_metrics_data()
    if data is None:  # nothing was observed
        return {}
    return {
        tuple(value for _, value in sorted((point.attributes or {}).items())): point.value
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == name
        for point in metric.data.data_points
        if isinstance(point, NumberDataPoint)
    }


def test_exported_activity_times_sum_to_step_times(reader: InMemoryMetricReader) -> None:
    step_metrics = StepMetrics()
    steps = [a_step(), a_step(64, 0), a_step(64, 2), a_step()]
    for step in steps:
        step_metrics.record_step(step, LABELS)
    actual = points(reader, "torchrelay_worker_engine_time")
    assert sum(actual.values()) == pytest.approx(sum(step.step_s for step in steps))
    assert actual["compute", "acme/tiny", "decode", "prefill+decode"] == pytest.approx(0.03)
    assert actual["memory", "acme/tiny", "mixed", "prefill+decode"] == pytest.approx(0.003)
    assert actual["scheduling", "acme/tiny", "prefill", "prefill+decode"] == pytest.approx(0.002)


def test_positions_are_counted_by_phase(reader: InMemoryMetricReader) -> None:
    step_metrics = StepMetrics()
    for step in (a_step(64, 0), a_step(), a_step(32, 2)):
        step_metrics.record_step(step, LABELS)
    assert points(reader, "torchrelay_worker_positions") == {("prefill",): 96, ("decode",): 3}


def test_positions_that_preempted_groups_compute_again_are_counted(reader: InMemoryMetricReader) -> None:
    step_metrics = StepMetrics()
    for step in (a_step(64, 0), replace(a_step(40, 0), num_positions_recomputed=40)):
        step_metrics.record_step(step, LABELS)
    assert points(reader, "torchrelay_worker_recomputed_positions") == {("acme/tiny",): 40}


def test_prediction_error_is_exported(reader: InMemoryMetricReader) -> None:
    step_metrics = StepMetrics()
    assert points(reader, "torchrelay_worker_latency_prediction_error") == {}
    for _ in range(10):
        step_metrics.record_step(a_step(), LABELS)
        step_metrics.record_step(a_step(64, 0), LABELS)
    actual = points(reader, "torchrelay_worker_latency_prediction_error")
    assert actual.keys() == {("acme/tiny", "prefill"), ("acme/tiny", "decode")}
    assert max(actual.values()) < 0.1, "all steps were alike"


def test_shares_belong_to_instance_in_slot() -> None:
    step_metrics = StepMetrics()
    step_metrics.record_step(a_step(), LABELS)
    assert astuple(step_metrics.time_shares_of(LABELS)) == pytest.approx((0.75, 0.15, 0, 0, 0.1))
    assert step_metrics.time_shares_of(OTHER) == step_metrics.time_shares_of(None) == NO_SHARES
    step_metrics.record_step(a_step(profile=StepProfile(io_wait_s=1.0)), OTHER)
    assert step_metrics.time_shares_of(OTHER).io_wait == 1.0
    assert step_metrics.time_shares_of(LABELS) == NO_SHARES


def test_decode_steps_near_their_floor_count_as_memory() -> None:
    """The steps take 20 ms."""
    step_metrics = StepMetrics()

    def floor_of(weights_bytes: int) -> StepFloor:
        return StepFloor(footprint_of_bytes(weights_bytes, 2, 0.0, 512), 1e9)

    step_metrics.record_step(a_step(), LABELS, floor_of(15 << 20))
    assert astuple(step_metrics.time_shares_of(LABELS)) == pytest.approx((0, 0.9, 0, 0, 0.1))
    step_metrics.record_step(a_step(), OTHER, floor_of(10 << 20))
    assert step_metrics.time_shares_of(OTHER).compute == pytest.approx(0.75)


def test_latency_model_outlives_instance_and_skips_parts_of_prompts() -> None:
    step_metrics = StepMetrics(token_budget=128)
    step_metrics.record_step(replace(a_step(), work=NO_WORK, num_positions_prefilled=70), LABELS)
    assert step_metrics.prefill_tokens_per_s == 0
    assert step_metrics.latency(LABELS) is None and step_metrics.latency(None) is None
    for _ in range(20):
        step_metrics.record_step(a_step(), LABELS)
    step_metrics.record_step(a_step(), OTHER)
    known = step_metrics.latency(InstanceLabels("i3", LABELS.model, LABELS.pack_id, "decode"))
    assert known is not None and known.token_budget == 128
    assert known.tbt_s(1, 100) == pytest.approx(WARM.total_s, rel=0.05)
    assert not known.prefill.known


def test_short_steps_are_sampled() -> None:
    step_metrics = StepMetrics()
    for _ in range(100):
        step_metrics.record_step(a_step(profile=StepProfile(compute_s=0.001)), LABELS)
    known = step_metrics.latency(LABELS)
    assert known is not None and 9 <= known.decode.num_steps <= 12


def test_long_steps_are_not_sampled_more_often() -> None:
    """Sampling the step that fills the interval would favour long steps: a worker that shares its cores predicted twice
    the usual step time.
    """
    rng, step_metrics = random.Random(1), StepMetrics()
    for _ in range(4000):
        step_s = 0.02 if rng.random() < 0.15 else 0.002
        step_metrics.record_step(a_step(profile=StepProfile(compute_s=step_s)), LABELS)
    known = step_metrics.latency(LABELS)
    assert known is not None and known.tbt_s(1, 100) == pytest.approx(0.002, rel=0.25)


def test_rates_are_medians_of_recent_steps() -> None:
    step_metrics = StepMetrics()
    assert step_metrics.step_s == step_metrics.prefill_tokens_per_s == 0.0
    for step in (a_step(), a_step(64, 0), a_step(64, 1)):
        step_metrics.record_step(step)
    assert step_metrics.step_s == pytest.approx(0.02) and step_metrics.prefill_tokens_per_s == pytest.approx(3200)
    assert (step_metrics.num_positions_prefilled, step_metrics.num_positions_decoded) == (128, 2)


def test_load_is_that_of_the_model_in_the_slot() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    slot: list[InstanceLabels] = []
    held_back: list[str] = []
    meter = provider.get_meter("test")
    export_load(lambda: 3, lambda: 0.25, lambda: "".join(held_back), lambda: slot[0] if slot else None, meter)
    assert values(reader) == {}
    slot.append(LABELS)
    expected: dict[tuple[object, ...], float] = {
        ("torchrelay_worker_requests_running", "acme/tiny"): 3,
        ("torchrelay_worker_kv_cache_usage", "acme/tiny"): 0.25,
    }
    assert values(reader) == expected
    held_back.append("memory")
    assert values(reader) == {**expected, ("torchrelay_worker_bottleneck", "acme/tiny", "memory"): 1}
    provider.shutdown()


def values(reader: InMemoryMetricReader) -> dict[tuple[object, ...], float]:
    data = reader.get_metrics_data()
    metrics = data.resource_metrics[0].scope_metrics[0].metrics if data is not None else []
    return {
        (metric.name, *(point.attributes or {}).values()): getattr(point, "value", 0.0)
        for metric in metrics
        for point in metric.data.data_points
    }


class FakeNvml:
    """A GPU that tells all, and a slice that tells only its memory."""

    NVMLError = LookupError
    NVML_GPM_METRIC_SM_OCCUPANCY, NVML_GPM_METRIC_ANY_TENSOR_UTIL, NVML_GPM_METRIC_DRAM_BW_UTIL = 3, 5, 10
    NVML_GPM_METRICS_GET_VERSION = 1
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, *xids: int) -> None:
        self.xids = list(xids)
        self.num_samples, self.samples, self.fails = 0, set[int](), False

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return {"GPU-1": "whole", "MIG-2": "slice"}[uuid]

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: str) -> None:
        self._check_whole(handle)

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> SimpleNamespace:
        if not self.xids:
            raise LookupError("timeout")
        return SimpleNamespace(eventData=self.xids.pop())

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=3, total=80 if handle == "whole" else 10)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return self._check_whole(handle) or 350_500

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(gpu=self._check_whole(handle) or 75)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return self._check_whole(handle) or 5_000

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(isSupportedDevice=int(handle == "whole"))

    def nvmlGpmSampleAlloc(self) -> int:
        self.num_samples += 1
        self.samples.add(self.num_samples)
        return self.num_samples

    def nvmlGpmSampleGet(self, handle: str, sample: int) -> None:
        if self.fails:
            raise LookupError("a driver that restarts")

    def nvmlGpmSampleFree(self, sample: int) -> None:
        self.samples.remove(sample)

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        return SimpleNamespace(metrics=[SimpleNamespace(value=0.0, nvmlReturn=0) for _ in range(5)])

    def nvmlGpmMetricsGet(self, asked: SimpleNamespace) -> None:
        assert (asked.version, asked.numMetrics) == (1, 3) and asked.sample1 < asked.sample2
        for metric in asked.metrics[: asked.numMetrics]:
            metric.value = {3: 40.0, 5: 20.0, 10: 90.0}[metric.metricId]
            metric.nvmlReturn = int(metric.metricId == 5)

    def _check_whole(self, handle: str) -> int:
        if handle != "whole":
            raise LookupError("not supported")
        return 0


class FakeEvent:
    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def query(self) -> bool:
        return self.at_ms < 1000

    def elapsed_time(self, end: FakeEvent, /) -> float:
        return end.at_ms - self.at_ms


def test_gpus_export_what_they_tell(reader: InMemoryMetricReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    export_gpus(["1"])  # without the package
    assert points(reader, "torchrelay_worker_gpu_memory_bytes") == {}
    nvml = FakeNvml(79, 31, 31)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    export_gpus([])
    export_gpus(["elsewhere"])  # the library does not know it
    assert points(reader, "torchrelay_worker_gpu_memory_bytes") == {}
    export_gpus(["1", "2"])
    copies = CopyTimes("kv_in")
    for end_ms in (250, 500, 2000):
        copies.add(FakeEvent(0), FakeEvent(end_ms), 10**9)
    assert points(reader, "torchrelay_worker_gpu_copied_bytes")["kv_in",] == 2e9, "the third may still run"
    assert points(reader, "torchrelay_worker_gpu_copy_seconds")["kv_in",] == 0.75
    assert points(reader, "torchrelay_worker_gpu_xids") == {("1", "79"): 1, ("1", "31"): 2}
    nvml.xids.append(31)
    assert points(reader, "torchrelay_worker_gpu_xids")["1", "31"] == 3
    assert points(reader, "torchrelay_worker_gpu_power_watts") == {("1",): 350.5}
    assert points(reader, "torchrelay_worker_gpu_utilization") == {("1",): 0.75}
    assert points(reader, "torchrelay_worker_gpu_energy_joules") == {("1",): 5.0}
    expected = {("1", "dram"): 0.9, ("1", "sm_occupancy"): 0.4}  # it does not tell the tensor cores'
    assert points(reader, "torchrelay_worker_gpu_activity") == expected
    nvml.fails = True
    assert points(reader, "torchrelay_worker_gpu_activity") == {}
    nvml.fails = False
    assert points(reader, "torchrelay_worker_gpu_activity") == expected
    assert len(nvml.samples) == 1, "all but the last are freed"
    memory = {("1", "used"): 3, ("1", "total"): 80, ("2", "used"): 3, ("2", "total"): 10}
    assert points(reader, "torchrelay_worker_gpu_memory_bytes") == memory


seconds = st.floats(0, 10)
profiles = st.builds(StepProfile, seconds, seconds, seconds, seconds, seconds)


@given(st.lists(profiles, max_size=20))
@example([StepProfile(0.0, 0.0, 0.0, 0.0, 2.2e-311)])  # the reciprocal of such a number overflows
def test_shares_add_up_to_one(steps: list[StepProfile]) -> None:
    shares = NO_SHARES
    for step in steps:
        shares = shares.after(step)
    assert all(0 <= share <= 1 + 1e-9 for share in astuple(shares))
    expected = 1.0 if any(step.total_s for step in steps) else 0.0
    assert sum(astuple(shares)) == pytest.approx(expected)


def test_past_shares_decay_by_time_not_steps() -> None:
    cold = NO_SHARES.after(StepProfile(io_wait_s=10.0))
    assert cold == TimeShares(io_wait=1.0)
    warm = StepProfile(compute_s=0.01)
    shares = cold
    for _ in range(200):
        shares = shares.after(warm)
    assert shares.io_wait == pytest.approx(0.5) and shares.compute == pytest.approx(0.5)
    assert cold.after(StepProfile(compute_s=2.0)).io_wait == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("shares", "name"),
    [
        (NO_SHARES, ""),
        (TimeShares(compute=1.0), "compute"),
        (TimeShares(compute=0.71, memory=0.29), "compute"),
        (TimeShares(compute=0.1, memory=0.7, scheduling=0.2), "memory"),
        (TimeShares(memory=0.7, io_wait=0.3), "io_wait"),
        (TimeShares(compute=0.6, memory=0.1, scheduling=0.3), "scheduling"),
        (TimeShares(compute=0.2, memory=0.35, kv_transfer=0.4, scheduling=0.05), "kv_transfer"),
        (TimeShares(compute=0.1, io_wait=0.9), "io_wait"),
        (TimeShares(compute=0.6, memory=0.2, scheduling=0.2), "compute"),
    ],
)
def test_bottleneck_of_shares(shares: TimeShares, name: str) -> None:
    assert bottleneck(shares) == name
