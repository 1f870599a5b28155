"""The worker's reports, which go to NATS at intervals and to watchers of the slot at every change."""

from __future__ import annotations

from dataclasses import asdict

from nats.aio.client import Client

from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.common.net.load_reports import publish_reports
from torchrelay.common.net.nats_client import Subjects
from torchrelay.control.v1 import reports_pb2
from torchrelay.worker.metrics.load_metrics import export_load
from torchrelay.worker.metrics.time_shares import TimeShares, bottleneck
from torchrelay.worker.slot.slot import LOADING
from torchrelay.worker.worker import Worker


class Reporter:
    """Builds and publishes the reports of one worker."""

    def __init__(self, worker: Worker, grpc_address: str) -> None:
        self._worker, self._grpc_address = worker, grpc_address
        export_load(
            self._num_running,
            lambda: 1.0 - self._free_kv_share(),
            self._bottleneck,
            lambda: worker.slot.instance_labels,
        )

    def report(self) -> reports_pb2.WorkerReport:
        worker = self._worker
        settings, step_metrics = worker.settings, worker.step_metrics
        latency = step_metrics.latency(worker.slot.instance_labels)
        return reports_pb2.WorkerReport(
            worker_id=settings.worker_id,
            incarnation=worker.incarnation,
            host_id=settings.host_id,
            grpc_address=self._grpc_address,
            data_address=worker.data_address,
            roles=settings.role_numbers,
            epoch=worker.slot.epoch.highest,
            slot=worker.slot.report(),
            kv_pool_bytes=settings.kv_pool_bytes,
            kv_free_bytes=int(settings.kv_pool_bytes * self._free_kv_share()),
            weights_bytes=worker.weights_bytes,
            num_running=self._num_running(),
            prefill_tokens_per_s=step_metrics.prefill_tokens_per_s,
            step_s=step_metrics.step_s,
            num_positions_prefilled=step_metrics.num_positions_prefilled,
            num_positions_decoded=step_metrics.num_positions_decoded,
            kv_bytes_received=step_metrics.kv_bytes_received,
            kv_bytes_sent=worker.holder.bytes_sent,
            slot_start_s=step_metrics.slot_start_s,
            has_prefix_cache=settings.prefix_cache,
            device=settings.device.partition(":")[0],
            profile=self._profile(),
            latency=_latency_to_proto(latency) if latency else None,
            engine=worker.progress(),
            is_leaving=worker.slot.is_leaving,
            num_devices=settings.devices,
            labels=filter(None, settings.labels.split(",")),
            device_name=worker.device_name,
            capabilities=reports_pb2.EngineCapabilities(**asdict(worker.served_by.capabilities)),
        )

    def beat(self) -> reports_pb2.WorkerReport:
        """A beat: a report without the fields that change only with the slot or its load."""
        worker = self._worker
        return reports_pb2.WorkerReport(
            worker_id=worker.settings.worker_id,
            incarnation=worker.incarnation,
            epoch=worker.slot.epoch.highest,
            is_beat=True,
            engine=worker.progress(),
        )

    def activity(self) -> tuple[int, ...]:
        """A value that changes with everything that the scheduler places requests by."""
        # Steps of prompts teach the latency model. Fields that only decoding changes can wait for the next regular
        # report, and changes of the slot are streamed.
        worker = self._worker
        return (
            worker.step_metrics.num_positions_prefilled,
            worker.step_metrics.kv_bytes_received,
            worker.holder.bytes_sent,
            *(len(role.attempts) for role in worker.roles),
        )

    def _profile(self) -> reports_pb2.EngineProfile | None:
        """The profile of the instance; None before its first step, unless it loads."""
        if not (name := self._bottleneck()):
            return None
        return reports_pb2.EngineProfile(**asdict(self._time_shares), bottleneck=name)

    def _bottleneck(self) -> str:
        slot, name = self._worker.slot, bottleneck(self._time_shares)
        is_waiting = slot.state == LOADING and not (name and slot.hosted is not None and slot.hosted.num_layers_ready)
        return "loading" if is_waiting else name

    @property
    def _time_shares(self) -> TimeShares:
        return self._worker.step_metrics.time_shares_of(self._worker.slot.instance_labels)

    def _num_running(self) -> int:
        return max((len(role.attempts) for role in self._worker.roles), default=0)

    def _free_kv_share(self) -> float:
        instance = self._worker.engine.instance
        return instance.num_free_pages / instance.num_pages if instance and instance.num_pages else 1.0

    async def run(self, nats_client: Client) -> None:
        """Publishes until cancelled."""
        settings = self._worker.settings
        subject = Subjects(settings.nats_prefix).worker_load(settings.worker_id)
        await publish_reports(nats_client, subject, bytes.fromhex(settings.node_key), self.activity, self.report)


def _latency_to_proto(model: LatencyModel) -> reports_pb2.LatencyModel:
    return reports_pb2.LatencyModel(
        prefill=reports_pb2.StepCost(**asdict(model.prefill)),
        decode=reports_pb2.StepCost(**asdict(model.decode)),
        token_budget=model.token_budget,
    )
