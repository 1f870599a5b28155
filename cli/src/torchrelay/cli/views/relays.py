"""Relays in `torchrelay top`: by model, first as chains, then a row per source and target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from torchrelay.cli.views.console import ResultTable, printable
from torchrelay.common.quantities import format_bytes, format_duration
from torchrelay.control.v1.scheduler_pb2 import RelaySource, RelayView

_BAR_CELLS, _SMALL_BAR_CELLS = 16, 6
_MIN_SHARE = 0.01
_STYLES = {
    RelayView.STATE_PLANNED: "dim",
    RelayView.STATE_SLOW: "yellow",
    RelayView.STATE_FINISHED: "green",
    RelayView.STATE_FAILED: "red",
}
_ACTIVE = (RelayView.STATE_RUNNING, RelayView.STATE_SLOW)
Edge = tuple[str, str]


def relay_blocks(relays: Iterable[RelayView], is_small: bool = False) -> Group:
    """A block for each pack in transfer."""
    packs: dict[str, list[RelayView]] = {}
    for relay in relays:
        packs.setdefault(relay.pack_id, []).append(relay)
    return Group(*(part for of_pack in packs.values() for part in _block(of_pack, is_small)))


def _block(relays: Sequence[RelayView], is_small: bool) -> list[RenderableType]:
    urgencies = dict.fromkeys("urgent" if relay.urgent else "idle" for relay in relays)
    size = format_bytes(max(relay.pack_bytes for relay in relays))
    head = Text.assemble("relay  ", (printable(relays[0].model), "bold"), f"  {size}, {' and '.join(urgencies)}")
    edges = [(source.holder_id, relay.target) for relay in relays for source in active_sources(relay)]
    chains = [Text(f"  {' -> '.join(path)}", style="cyan") for path in find_chains(edges)]
    return [
        head,
        *chains,
        sources_table(relays, is_small),
        *(Text(f"  {line}", style="red") for line in _errors(relays)),
    ]


def _errors(relays: Sequence[RelayView]) -> Iterator[str]:
    """Error lines; too long for a column."""
    for relay in relays:
        if relay.state == RelayView.STATE_FAILED:
            yield f"{relay.target} failed: {printable(relay.error)}"
        elif relay.state in _ACTIVE:
            for source in relay.sources:
                if source.error and not source.following:
                    yield f"{source.holder_id} -> {relay.target} was dropped: {printable(source.error)}"


def sources_table(relays: Sequence[RelayView], is_small: bool = False) -> ResultTable:
    """A row per edge. The target's progress is on the first of its rows."""
    is_striped = any(len(listed_sources(relay)) > 1 for relay in relays)
    repairs = "rep." if is_small else "repairs"
    numbers = ("per s", "share", "chunks", repairs)
    columns = ("source -> target", "per s", "share", "", "chunks", repairs, "state")
    hidden = () if is_striped else ("share",)
    table = ResultTable(*columns, right=numbers, whole=("source -> target", ""), without=hidden, is_narrow=True)
    for relay in relays:
        for number, source in enumerate(listed_sources(relay)):
            cells = _target_cells(relay, is_small) if not number else (Text(""),) * 3
            state = state_text(relay, is_small) if not number else Text(_source_status(relay, source), style="dim")
            edge = f"{source.holder_id} -> {relay.target}"
            table.add_line(edge, _rate(relay, source), _share(relay, source), *cells, state)
    return table


def listed_sources(relay: RelayView) -> list[RelaySource]:
    """Sources worth a row: those that send, sent or failed; the largest contribution first."""
    sources = [source for source in relay.sources if source.num_bytes]
    if relay.state in _ACTIVE:
        sources = [source for source in relay.sources if source.following or source.num_bytes or source.error]
    sources = sources or list(relay.sources) or [RelaySource(holder_id="?")]  # not reported yet
    return sorted(sources, key=lambda source: (not source.following, -source.num_bytes))


def active_sources(relay: RelayView) -> list[RelaySource]:
    """Sources that make up the chain: they send, will send, or sent more than a few bytes to the end."""
    if relay.state == RelayView.STATE_FAILED:
        return []
    if relay.state == RelayView.STATE_FINISHED:
        total = sum(source.num_bytes for source in relay.sources)
        return [source for source in listed_sources(relay) if source.num_bytes >= _MIN_SHARE * total]
    followed = [source for source in relay.sources if source.following]
    measured = [source for source in followed if source.bytes_per_s]
    return measured or followed or [source for source in relay.sources if not source.error]


def find_chains(edges: Sequence[Edge]) -> list[list[str]]:
    """Chains that contain each edge once: a first child continues its chain, its siblings start new ones."""
    left: dict[str, list[str]] = {}
    for source, target in dict.fromkeys(edges):
        left.setdefault(source, []).append(target)
    targets = {target for _, target in edges}
    chains: list[list[str]] = []
    for start in [*(source for source in left if source not in targets), *left]:
        starts = [start]
        while starts:
            path = [starts.pop(0)]
            while children := left.get(path[-1]):
                if len(children) > 1:
                    starts.append(path[-1])
                path.append(children.pop(0))
            if len(path) > 1:
                chains.append(path)
    return chains


def state_text(relay: RelayView, is_small: bool = False) -> Text:
    """The state in words, so that no information is in the color alone."""
    left = f"{format_duration(relay.left_s)} left" if relay.left_s else "running"
    if relay.num_replans and not is_small:
        left += ", re-planned"
    words = {
        RelayView.STATE_PLANNED: "planned",
        RelayView.STATE_SLOW: f"slow, {left}",
        RelayView.STATE_FINISHED: f"done in {format_duration(relay.running_s)}",
        RelayView.STATE_FAILED: f"failed in {format_duration(relay.running_s)}",
    }
    return Text(words.get(relay.state, left), style=_STYLES.get(relay.state, ""))


def _target_cells(relay: RelayView, is_small: bool) -> tuple[Text, Text, Text]:
    done, total = relay.num_chunks_verified, relay.num_chunks
    cells = _SMALL_BAR_CELLS if is_small else _BAR_CELLS
    return Text(progress_bar(done, total, cells), style="cyan"), Text(f"{done}/{total}"), Text(str(relay.num_repairs))


def progress_bar(done: int, total: int, cells: int = 8) -> str:
    """A bar; full only at 100 %."""
    filled = cells * done // total if total else 0
    return "█" * filled + "░" * (cells - filled)


def _rate(relay: RelayView, source: RelaySource) -> str:
    if relay.state == RelayView.STATE_PLANNED:
        return "-"
    if relay.state in (RelayView.STATE_FINISHED, RelayView.STATE_FAILED):  # the mean of the whole run
        return format_bytes(source.num_bytes / relay.running_s) if relay.running_s else "-"
    return format_bytes(source.bytes_per_s)


def _share(relay: RelayView, source: RelaySource) -> str:
    total = sum(other.num_bytes for other in relay.sources)
    if not total:
        return ""
    return "<1%" if 0 < source.num_bytes < _MIN_SHARE * total else f"{source.num_bytes / total:.0%}"


def _source_status(relay: RelayView, source: RelaySource) -> str:
    """Status of a source after the first."""
    if source.following or relay.state not in _ACTIVE:
        return ""
    return "dropped" if source.error else "idle"
