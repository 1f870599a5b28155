"""Packs and their models in `torchrelay top`: copies, instances, waiting requests, models at zero.

Models with identical files share a pack and its instances, and so a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from torchrelay.cli.views.console import ResultTable, shorten_ids
from torchrelay.cli.views.relays import progress_bar
from torchrelay.common.quantities import format_bytes
from torchrelay.control.v1 import reports_pb2, types_pb2
from torchrelay.control.v1.scheduler_pb2 import ClusterView, InstanceView, VersionView

STATE_STYLES = {"free": "dim", "loading": "yellow", "ready": "green", "draining": "magenta"}
_ROLES: dict[int, str] = {types_pb2.ROLE_PREFILL: "prefill", types_pb2.ROLE_DECODE: "decode"}
_MAX_NAMES = 2


class PackIndex:
    """Maps packs to models, of those called since the scheduler started."""

    def __init__(self, view: ClusterView) -> None:
        self._of_version = {version.version_id: list(version.models) for version in view.versions}
        self._versions: dict[str, list[VersionView]] = {}
        for version in view.versions:
            self._versions.setdefault(version.pack_id, []).append(version)
        self._instances = list(view.instances)
        running = {instance.version_id for instance in view.instances}
        waiting = {demand.model for demand in view.demand}
        self._copies = [copy for store in view.stores for copy in store.copies]
        self.at_zero = [
            version
            for version in view.versions
            if version.version_id not in running and not waiting.intersection(version.models)
        ]

    def served_by(self, instance: InstanceView) -> list[str]:
        """The models that an instance serves; first the one it was loaded for."""
        return list(dict.fromkeys([instance.model, *self._of_version.get(instance.version_id, ())]))

    def named(self, pack_id: str) -> str:
        """The models of a pack."""
        models = [name for version in self._versions.get(pack_id, ()) for name in version.models]
        models += [instance.model for instance in self._instances if instance.pack_id == pack_id]
        return join_names(sorted(set(models))) if models else "not called"

    def num_copies(self, pack_id: str) -> int:
        """Complete copies in host memory."""
        return sum(
            copy.pack_id == pack_id and copy.num_chunks_verified == copy.num_chunks > 0 and not copy.error
            for copy in self._copies
        )


def join_names(models: Sequence[str]) -> str:
    """``acme/tiny, birch/words +3``: at most two names are spelled out."""
    more = f" +{len(models) - _MAX_NAMES}" if len(models) > _MAX_NAMES else ""
    return ", ".join(models[:_MAX_NAMES]) + more


def copies_table(view: ClusterView, packs: PackIndex, is_small: bool = False) -> Table:
    """A row per copy: pack, host, how much of it is there, and its source."""
    numbers = ("size", "chunks", "pins")
    columns, hidden = ("pack", "model", "holder", *numbers, "state", "source"), ("chunks", "pins") if is_small else ()
    table = ResultTable(*columns, right=numbers, whole=("model", "holder", "state"), without=hidden, is_narrow=True)
    for store in sorted(view.stores, key=lambda store: store.store_id):
        for copy in store.copies:
            table.add_line(
                copy.pack_id[:12],
                Text(packs.named(copy.pack_id)),
                store.store_id,
                format_bytes(copy.pack_bytes),
                f"{copy.num_chunks_verified}/{copy.num_chunks}",
                str(copy.num_pins),
                _copy_state(copy),
                copy.source,
            )
    return table


def _copy_state(copy: reports_pb2.PackCopy) -> Text:
    if copy.error:
        return Text(copy.error, style="red")
    if not copy.num_chunks or copy.num_chunks_verified < copy.num_chunks:
        return Text(progress_bar(copy.num_chunks_verified, copy.num_chunks), style="cyan")
    return Text("in use", style="green") if copy.num_pins else Text("unused", style="dim")


def models_table(view: ClusterView, packs: PackIndex, is_small: bool = False) -> Table:
    """Instances by model, then models that wait without any, then those at zero."""
    waiting = {demand.model: demand.num_waiting for demand in view.demand}
    numbers = ("age", "run", "idle", "wait")
    columns = ("model", "instance", "worker", "roles", "state", *numbers)
    hidden = ("instance",) if is_small else ()
    table = ResultTable(*columns, right=numbers, whole=("model", "worker"), without=hidden, is_narrow=True)
    served: set[str] = set()
    for instance in sorted(view.instances, key=lambda instance: (instance.model, instance.instance_id)):
        models = packs.served_by(instance)
        served.update(models)
        table.add_line(
            Text(join_names(models)),
            shorten_ids(instance.instance_id),
            instance.worker_id,
            roles_text(instance.roles),
            Text(instance.state, style=STATE_STYLES.get(instance.state, "")),
            f"{instance.in_state_s:.0f} s",
            str(instance.num_running),
            f"{instance.idle_s:.0f} s" if instance.idle_s else "",
            str(sum(waiting.get(model, 0) for model in models)),
        )
    for model in sorted(waiting.keys() - served):
        table.add_line(Text(model), "", "", "", Text("waiting", style="yellow"), "", "", "", str(waiting[model]))
    for version in sorted(packs.at_zero, key=lambda version: list(version.models)):
        num_copies = packs.num_copies(version.pack_id)
        state = Text(f"at zero, {num_copies or 'no'} host cop{'y' if num_copies == 1 else 'ies'}", style="dim")
        table.add_line(Text(join_names(version.models)), "", "", "", state, *[""] * 4)
    return table


def roles_text(roles: Iterable[int]) -> str:
    """``both`` for two roles: the model's name needs the width."""
    named = [_ROLES[role] for role in roles if role in _ROLES]
    return "both" if len(named) == len(_ROLES) else ", ".join(named)
