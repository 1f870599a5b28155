"""Everything the scheduler knows, in one place with one owner, and the small questions asked of it everywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torchrelay.common.latency_model import LatencyModel
from torchrelay.scheduler.books import Books
from torchrelay.scheduler.copybook import CopyBook
from torchrelay.scheduler.core import Instance, Model
from torchrelay.scheduler.courses import Courses
from torchrelay.scheduler.effects import Effects, Happening
from torchrelay.scheduler.failures import Failures
from torchrelay.scheduler.fleet import Fleet
from torchrelay.scheduler.gateways import Gateways
from torchrelay.scheduler.handovers import Handovers
from torchrelay.scheduler.latency import Latencies
from torchrelay.scheduler.links import Links
from torchrelay.scheduler.namesakes import Namesakes
from torchrelay.scheduler.planning import Relays
from torchrelay.scheduler.prediction import queue_s
from torchrelay.scheduler.queueing import Queues
from torchrelay.scheduler.reasons import Reason
from torchrelay.scheduler.rules import Rules
from torchrelay.scheduler.view import View
from torchrelay.scheduler.warm_prefixes import WarmPrefixes

_MAX_MODELS = 4096
_MAX_FRUITLESS = 4096
_REPORT_LAG_S = 0.02  # a report arriving now was made this long ago at most


@dataclass
class State:
    """Owned by the policy; changed only by its steps, one at a time."""

    rules: Rules
    new_id: Callable[[], str]  # a fresh instance id
    started_at: float
    queues: Queues
    failures: Failures
    gateways: Gateways
    view: View
    fleet: Fleet = field(default_factory=Fleet)
    books: Books = field(default_factory=Books)
    relays: Relays = field(default_factory=Relays)
    links: Links = field(default_factory=Links)
    latencies: Latencies = field(default_factory=Latencies)
    handovers: Handovers = field(default_factory=Handovers)
    prefixes: WarmPrefixes = field(default_factory=WarmPrefixes)
    courses: Courses = field(default_factory=Courses)
    copybook: CopyBook = field(default_factory=CopyBook)
    namesakes: Namesakes = field(default_factory=Namesakes)
    models: dict[str, Model] = field(default_factory=dict)  # by version id
    effects: Effects = field(default_factory=Effects)
    fruitless: dict[str, frozenset[str]] = field(default_factory=dict)  # request id -> instances; see note_fruitless
    largest_slot_bytes: int = 0  # ever seen: a host that is away for now may come back
    largest_kv_pool_bytes: int = 0

    @classmethod
    def fresh(cls, rules: Rules, new_id: Callable[[], str], now: float) -> State:
        queues = Queues(rules.queue_limit, rules.queue_limit_total)
        gateways, view = Gateways(rules.gateway_grace_s), View(rules.fence_s)
        links = Links(rules.link_cap_bytes_per_s)
        return cls(rules, new_id, now, queues, Failures(rules), gateways, view, links=links)

    def take_effects(self) -> Effects:
        effects, self.effects = self.effects, Effects()
        return effects

    def note_model(self, model: Model, now: float) -> None:
        """Remembers the newest settings of a version; bounded, unused ones go first."""
        timeout_s = model.idle_timeout_s or self.rules.idle_timeout_s
        self.namesakes.note(model.version_id, model.pack_id, model.name, timeout_s, now)
        self.models.pop(model.version_id, None)
        self.models[model.version_id] = model
        if len(self.models) > _MAX_MODELS:
            used = {instance.version_id for instance in self.fleet} | set(self.queues.versions)
            unused = next((version_id for version_id in self.models if version_id not in used), None)
            if unused is not None:
                del self.models[unused]

    def idle_timeout_s(self, version_id: str, now: float) -> float:
        """After which an instance of the version goes; whoever uses it has it for at least as long as it asked for."""
        return self.namesakes.idle_timeout_s(version_id, now) or self.rules.idle_timeout_s

    def model_of_pack(self, pack_id: str, pack_bytes: int = 0) -> Model:
        """The model that a pack belongs to; under the beginning of the pack's id while nobody has named it."""
        for model in self.models.values():
            if model.pack_id == pack_id:
                return model
        if pack_id in self.copybook.recency:
            return self.copybook.recency.model(pack_id)
        name = next((instance.model for instance in self.fleet if instance.pack_id == pack_id), pack_id[:12])
        return Model(name, "", pack_id, pack_bytes, 0)

    def note_fruitless(self, request_id: str, instance_ids: frozenset[str]) -> None:
        """An attempt ended without a token. Should the request come again, these instances are doubted."""
        self.fruitless[request_id] = instance_ids
        if len(self.fruitless) > _MAX_FRUITLESS:
            del self.fruitless[next(iter(self.fruitless))]

    def happened(
        self,
        now: float,
        kind: str,
        subject: Instance | Model,
        reason: Reason | str,
        event: str = "",
        fields: Mapping[str, str | int | float] | None = None,
    ) -> None:
        """Notes a decision or transition for Explain, and for the history when ``event`` names its subject."""
        model, name = (
            (subject.name, subject.name) if isinstance(subject, Model) else (subject.model, subject.instance_id)
        )
        why = reason if isinstance(reason, Reason) else Reason("", reason)
        named = self.namesakes.of(subject.version_id)
        figures = {**(fields or {}), **why.fields}
        told = Happening(now, kind, model, name, why.text, event, figures, {}, named, why.of_tenants)
        self.effects.happenings.append(told)

    def queue_s(self, instance: Instance, latency: LatencyModel) -> float:
        """How long the prompts take that wait at the instance: reported, and placed since the report."""
        worker = self.view.workers.get(instance.worker_id)
        if worker is None:
            return 0.0
        placed = self.books.predicted_since(instance.instance_id, worker.seen_at - _REPORT_LAG_S)
        return queue_s(latency, worker.num_queued_prefill_tokens, worker.queued_prefill_s, placed)
