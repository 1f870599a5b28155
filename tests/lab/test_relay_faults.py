"""Faults during a relay on real links: the bytes arrive correctly, and once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tests.lab import Lab
from tests.lab.corruption import corrupt_chunk, corrupt_chunks
from tests.lab.raw_pack import RawPack, publish
from tests.lab.stores import Stores
from torchrelay.transfer.arena.mapped_slab import MappedSlab

pytestmark = pytest.mark.lab

_RATE_MBIT = 200
_PACK_BYTES = 12 << 20  # half a second on such a link
_ARENA_BYTES = 48 << 20
_SOURCE, _TARGETS = "source", ("h1", "h2", "h3")
_NAMES = (_SOURCE, *_TARGETS)
_DAMAGED = (3, 17)  # chunks
_MOST_TRIES = 20
# Counted on links: headers are a few per cent of the payload, and a repair may ask again for what was on its way.
_HEADERS, _ON_ITS_WAY_BYTES = 1.06, 3 << 20


@dataclass(frozen=True)
class Scene:
    """Stores on four hosts. The source has the pack, the others are empty at the beginning of each test."""

    lab: Lab
    stores: Stores
    pack: RawPack

    def begin(self, target: str, sources: Sequence[str], num_striped: int = 1) -> None:
        self.stores.relay(target, self.pack, sources, num_striped).result()

    def begin_chain(self) -> None:
        """Each from the one before it; the others, those after it too, for repair."""
        calls = []
        for place, target in enumerate(_TARGETS):
            sources = [*reversed((_SOURCE, *_TARGETS[:place])), *_TARGETS[place + 1 :]]
            calls.append(self.stores.relay(target, self.pack, sources))
        for call in calls:
            call.result()

    def slab(self, name: str) -> MappedSlab:
        """The pack in a host's arena, as a worker maps it."""
        with self.stores.held(name, self.pack) as hold:
            place = next(hold)
        return MappedSlab(place.arena_path, place.slab_offset, place.slab_bytes)

    def catch_half(
        self, name: str, targets: Sequence[str], begin: Callable[[], None], interrupt: Callable[[], None] = lambda: None
    ) -> None:
        """Begins relays to ``targets``, until more than half of the pack is at ``name`` and less than all of it, also
        after ``interrupt``.

        On a busy machine all of it may be there before the look; then they begin again.
        """
        for _ in range(_MOST_TRIES):
            begin()
            with closing(self.slab(name)) as slab:
                while slab.num_verified < slab.num_chunks // 2:
                    time.sleep(0.002)  # shared memory gives no notice
                interrupt()
                if slab.num_verified < slab.num_chunks:
                    return
            self.stores.await_whole(targets, self.pack)
            self.stores.drop(targets, self.pack)
        raise AssertionError("too late in each try: the whole pack is there")

    def assert_right_bytes(self, names: Sequence[str], num_bytes: int = _PACK_BYTES) -> None:
        """The whole pack is there, and of it these bytes came by the last relay: no chunk counts twice."""
        copies = self.stores.await_whole(names, self.pack)
        right = self.pack.path.read_bytes()
        for name in names:
            with closing(self.slab(name)) as slab:
                assert slab.complete and slab.data == right
            assert not copies[name].error
            assert sum(share.num_bytes for share in copies[name].shares) == num_bytes


@pytest.fixture(scope="module")
def stores_in_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, Stores]]:
    with Lab(["control", *_NAMES], rate_mbit=_RATE_MBIT) as lab:
        places = {name: lab[name] for name in _NAMES}
        with Stores(lab, tmp_path_factory.mktemp("stores"), places, _ARENA_BYTES, RECOVERY_GRACE_S="0.2") as stores:
            yield lab, stores
    assert not list(Path("/dev/shm").glob(f"*{lab.name}*"))


@pytest.fixture
def scene(stores_in_lab: tuple[Lab, Stores]) -> Iterator[Scene]:
    lab, stores = stores_in_lab
    pack = publish(stores.remote, _PACK_BYTES, num_layers=6, seed=time.monotonic_ns())
    stores.fill(_SOURCE, pack)
    yield Scene(lab, stores, pack)
    stores.drop(_NAMES, pack)
    pack.path.unlink()


def test_killed_middle_store_costs_others_no_bytes(scene: Scene) -> None:
    received: dict[str, int] = {}

    def begin() -> None:
        received.update({name: scene.lab[name].bytes_in() for name in ("h1", "h3")})
        scene.begin_chain()

    scene.catch_half("h2", _TARGETS, begin)
    scene.stores.children["h2"].kill()
    scene.assert_right_bytes(["h1", "h3"])
    for name, before in received.items():
        assert scene.lab[name].bytes_in() - before < _HEADERS * scene.pack.num_bytes + _ON_ITS_WAY_BYTES
    scene.stores.restart("h2", keep_arena=False)
    scene.begin("h2", ["h3", _SOURCE])
    scene.assert_right_bytes(["h2"])


def test_silent_link_is_bypassed_and_its_host_resumes(scene: Scene) -> None:
    before = 0

    def begin() -> None:
        nonlocal before
        before = scene.lab["h3"].bytes_in()
        scene.begin_chain()

    scene.catch_half("h2", _TARGETS, begin)
    scene.lab["h2"].cut()
    try:
        scene.assert_right_bytes(["h1", "h3"])
        assert scene.lab["h3"].bytes_in() - before < _HEADERS * scene.pack.num_bytes + _ON_ITS_WAY_BYTES
    finally:
        scene.lab["h2"].restore()
    scene.stores.reconnect("h2")
    scene.assert_right_bytes(["h2"])


def test_second_source_completes_a_pack_when_the_first_is_killed(scene: Scene) -> None:
    scene.begin("h1", [_SOURCE])
    scene.stores.await_whole(["h1"], scene.pack)
    before = 0

    def begin() -> None:
        nonlocal before
        before = scene.lab["h2"].bytes_in()
        scene.begin("h2", [_SOURCE, "h1"], num_striped=2)

    scene.catch_half("h2", ["h2"], begin)
    scene.stores.children["h1"].kill()
    scene.assert_right_bytes(["h2"])
    assert scene.lab["h2"].bytes_in() - before < _HEADERS * scene.pack.num_bytes + _ON_ITS_WAY_BYTES
    copy = scene.stores.copy("h2", scene.pack)
    assert copy is not None and {share.holder_id for share in copy.shares if share.num_bytes} == {_SOURCE, "h1"}
    scene.stores.restart("h1", keep_arena=False)


def test_flipped_bytes_of_a_holder_come_from_another(scene: Scene) -> None:
    scene.begin("h1", [_SOURCE])
    scene.stores.await_whole(["h1"], scene.pack)
    with scene.stores.held("h1", scene.pack) as hold:
        place = next(hold)
    for chunk in _DAMAGED:
        corrupt_chunk(place, chunk)
    scene.begin("h2", ["h1", _SOURCE])
    scene.assert_right_bytes(["h2"])
    refused = [line["reason"] for line in scene.stores.children["h2"].said("source_failed")]
    assert f"chunk {_DAMAGED[0]} does not match its digest" in refused
    assert corrupt_chunks(place) == list(_DAMAGED)


def test_refused_tickets_open_nothing_and_the_next_source_is_used(scene: Scene) -> None:
    stores = scene.stores
    expired, stolen = (stores.source(scene.pack, _SOURCE, "h1") for _ in range(2))
    expired.ticket.CopyFrom(stores.ticket(scene.pack, _SOURCE, "h1", valid_s=-1))
    stolen.ticket.CopyFrom(stores.ticket(scene.pack, _SOURCE, "h2"))
    for refused, reason in ((expired, "expired"), (stolen, "receiver")):
        with pytest.raises(grpc.RpcError, match=reason):
            stores.relay_from("h1", scene.pack, [refused]).result()
    scene.begin("h2", [_SOURCE])
    stores.await_whole(["h2"], scene.pack)
    stores.relay_from("h1", scene.pack, [expired, stores.source(scene.pack, "h2", "h1")]).result()
    scene.assert_right_bytes(["h1"])


def test_store_restarted_during_a_fill_resumes_under_its_reader(scene: Scene) -> None:
    with ExitStack() as stack:
        readers: list[MappedSlab] = []  # a worker's views, which outlive the store

        def restart() -> None:
            readers.append(stack.enter_context(closing(scene.slab("h1"))))
            scene.stores.restart("h1", keep_arena=True)

        scene.catch_half("h1", ["h1"], lambda: scene.begin("h1", [_SOURCE]), restart)
        reader = readers[-1]
        num_missing = reader.num_chunks - reader.num_verified
        assert 0 < num_missing < reader.num_chunks
        missing_bytes = num_missing * scene.pack.manifest.chunk_bytes
        before = scene.lab["h1"].bytes_in()
        scene.begin("h1", [_SOURCE])
        scene.assert_right_bytes(["h1"], missing_bytes)
        assert scene.lab["h1"].bytes_in() - before < _HEADERS * missing_bytes + (1 << 20)
        assert reader.complete and reader.data == scene.pack.path.read_bytes()


def test_killed_follower_leaves_its_source_healthy(scene: Scene) -> None:
    source = scene.stores.children[_SOURCE]
    pid, told = source.pid, len(source.log.read_text())

    def begin() -> None:
        scene.begin("h1", [_SOURCE])
        scene.begin("h2", ["h1", _SOURCE])

    scene.catch_half("h1", ["h2", "h1"], begin)
    scene.stores.children["h1"].kill()
    scene.assert_right_bytes(["h2"])
    scene.stores.restart("h1", keep_arena=False)
    scene.begin("h3", [_SOURCE])
    scene.assert_right_bytes(["h3"])
    assert source.pid == pid and "Traceback" not in source.log.read_text()[told:]
    scene.stores.drop([_SOURCE], scene.pack)  # no dead follower's stream still reads it
    scene.stores.fill(_SOURCE, scene.pack)
