"""Packs and their models in `torchrelay top`: copies, instances, waiting requests, models at zero.

Models with identical files share a pack and its instances, and so a line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from torchrelay.cli.views.console import ResultTable, shorten_ids, shorten_name
from torchrelay.cli.views.relays import progress_bar
from torchrelay.common.quantities import format_bytes
from torchrelay.control.v1 import reports_pb2, types_pb2
from torchrelay.control.v1.scheduler_pb2 import ClusterView, InstanceView

STATE_STYLES = {"free": "dim", "loading": "yellow", "ready": "green", "draining": "magenta"}
_ROLES: dict[int, str] = {types_pb2.ROLE_PREFILL: "prefill", types_pb2.ROLE_DECODE: "decode"}
_MAX_NAMES = 2
_NAME_CELLS, _SMALL_NAME_CELLS = 44, 25


class PackIndex:
    """Maps packs to models, of those called since the scheduler started."""

    def __init__(self, view: ClusterView) -> None:
        self._of_version = {version.version_id: list(version.models) for version in view.versions}
        self._names: dict[str, set[str]] = {}  # by pack
        for version in view.versions:
            self._names.setdefault(version.pack_id, set()).update(version.models)
        for instance in view.instances:
            self._names.setdefault(instance.pack_id, set()).add(instance.model)
        running = {instance.version_id for instance in view.instances}
        waiting = {demand.model for demand in view.demand}
        copies = (copy for store in view.stores for copy in store.copies)
        self.num_copies = Counter(copy.pack_id for copy in copies if _is_complete(copy))  # in host memory
        self.at_zero = [
            version
            for version in view.versions
            if version.version_id not in running and not waiting.intersection(version.models)
        ]

    def served_by(self, instance: InstanceView | reports_pb2.SlotState) -> list[str]:
        """The models that an instance, or its slot, serves; first the one it was loaded for."""
        return list(dict.fromkeys([instance.model, *self._of_version.get(instance.version_id, ())]))

    def named(self, pack_id: str, cells: int) -> str:
        """The models of a pack, in a column of that width."""
        models = self._names.get(pack_id)
        return join_names(sorted(models), cells) if models else "not called"


def name_cells(is_small: bool) -> int:
    """The width at which a column cuts names, so that a long name leaves the other columns theirs."""
    return _SMALL_NAME_CELLS if is_small else _NAME_CELLS


def join_names(models: Sequence[str], cells: int) -> str:
    """``acme/tiny, birch/words +3``: two names, of more than two only one if two do not fit into ``cells``, and the
    number of the others.
    """
    if len(models) == _MAX_NAMES:
        width = cells - len(", ")
        first = shorten_name(models[0], max(width // 2, width - len(models[1])))
        return f"{first}, {shorten_name(models[1], width - len(first))}"
    for num_named in (_MAX_NAMES, 1):
        more = f" +{len(models) - num_named}" if len(models) > num_named else ""
        joined = ", ".join(models[:num_named]) + more
        if len(joined) <= cells:
            return joined
    return shorten_name(models[0], cells - len(more)) + more


def copies_table(view: ClusterView, packs: PackIndex, is_small: bool = False) -> Table:
    """A row per copy: pack, host, how much of it is there, and its source; first incomplete copies, then used ones."""
    numbers = ("size", "chunks", "pins")
    columns, hidden = ("pack", "model", "holder", *numbers, "state", "source"), ("chunks", "pins") if is_small else ()
    table = ResultTable(*columns, right=numbers, whole=("model", "holder", "state"), without=hidden, is_narrow=True)
    copies = [(copy, store.store_id) for store in view.stores for copy in store.copies]
    for copy, holder in sorted(copies, key=lambda each: (_is_complete(each[0]), not each[0].num_pins, each[1])):
        table.add_line(
            copy.pack_id[:12],
            Text(packs.named(copy.pack_id, name_cells(is_small))),
            holder,
            format_bytes(copy.pack_bytes),
            f"{copy.num_chunks_verified}/{copy.num_chunks}",
            str(copy.num_pins),
            _copy_state(copy),
            copy.source,
        )
    return table


def _is_complete(copy: reports_pb2.PackCopy) -> bool:
    return copy.num_chunks_verified == copy.num_chunks > 0 and not copy.error


def _copy_state(copy: reports_pb2.PackCopy) -> Text:
    if copy.error:
        return Text(copy.error, style="red")
    if not _is_complete(copy):
        return Text(progress_bar(copy.num_chunks_verified, copy.num_chunks), style="cyan")
    return Text("in use", style="green") if copy.num_pins else Text("unused", style="dim")


def models_table(view: ClusterView, packs: PackIndex, is_small: bool = False) -> Table:
    """Instances by model, the busiest model first, then models at zero, the last called first."""
    demand = {each.model: each for each in view.demand}
    numbers = ("age", "run", "idle", "wait")
    columns = ("model", "instance", "worker", "roles", "state", *numbers)
    hidden = ("instance", "age") if is_small else ()
    table = ResultTable(*columns, right=numbers, whole=("model", "worker"), without=hidden, is_narrow=True)
    cells = name_cells(is_small)

    def activity(models: Sequence[str]) -> tuple[int, int]:
        """Waiting and running requests."""
        of_models = [demand[model] for model in models if model in demand]
        return sum(each.num_waiting for each in of_models), sum(each.num_running for each in of_models)

    instances: dict[str, list[InstanceView]] = {}
    for instance in sorted(view.instances, key=lambda instance: instance.instance_id):
        instances.setdefault(instance.version_id or instance.model, []).append(instance)
    rows = [(packs.served_by(of_version[0]), of_version) for of_version in instances.values()]
    served = {model for models, _ in rows for model in models}
    rows += [([model], []) for model in demand.keys() - served]

    def busiest(row: tuple[list[str], list[InstanceView]]) -> tuple[int, int, float, str]:
        waiting, running = activity(row[0])
        return -waiting, -running, min((instance.idle_s for instance in row[1]), default=0.0), row[0][0]

    for models, of_version in sorted(rows, key=busiest):
        waiting, _ = activity(models)
        for instance in of_version:
            table.add_line(
                Text(join_names(models, cells)),
                shorten_ids(instance.instance_id),
                instance.worker_id,
                roles_text(instance.roles),
                Text(instance.state, style=STATE_STYLES.get(instance.state, "")),
                f"{instance.in_state_s:.0f} s",
                str(instance.num_running),
                f"{instance.idle_s:.0f} s" if instance.idle_s else "",
                str(waiting),
            )
        if not of_version:
            state = Text("waiting", style="yellow")
            table.add_line(Text(join_names(models, cells)), "", "", "", state, "", "", "", str(waiting))
    for version in reversed(packs.at_zero):
        num_copies = packs.num_copies[version.pack_id]
        state = Text(f"at zero, {num_copies or 'no'} host cop{'y' if num_copies == 1 else 'ies'}", style="dim")
        table.add_line(Text(join_names(version.models, cells)), "", "", "", state, *[""] * 4)
    return table


def roles_text(roles: Iterable[int]) -> str:
    """``both`` for two roles: the model's name needs the width."""
    named = [_ROLES[role] for role in roles if role in _ROLES]
    return "both" if len(named) == len(_ROLES) else ", ".join(named)
