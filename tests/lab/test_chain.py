"""A model on three hosts: the relay's chain on shaped links, and corrupt bytes on a host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lab import Lab
from tests.lab.cluster import HOSTS, TARGETS, Cluster
from tests.lab.corruption import corrupt_chunk, corrupt_chunks
from tests.lab.operations import Operator, Published, copies_of, copies_once_served_everywhere
from tests.lab.reaper import pids_in
from tests.support.checkpoints import greedy_reference, make_checkpoint, reference_model
from torchrelay.control.v1.reports_pb2 import PackCopy
from torchrelay.control.v1.scheduler_pb2 import ClusterView

pytestmark = pytest.mark.lab

_RATE_MBIT = 100  # of each link: the pack takes more than two seconds
_SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 10}  # 31 MB in fp32
_PROMPT = list(range(40, 72))
_NUM_TOKENS = 12
_NUM_REQUESTS = 6
_DAMAGED_CHUNK = 5
_SETTINGS = {"IDLE_TIMEOUT_S": "4"}


@dataclass(frozen=True)
class Scene:
    """The cluster, its operator, and the published model with its right continuation of the prompt."""

    lab: Lab
    cluster: Cluster
    operator: Operator
    model: Published
    expected: list[int]

    def wake_all(self) -> dict[str, PackCopy]:
        """Loads the model on all three hosts at once and checks a burst of answers; the hosts' copies, still in use."""
        operator, pack_id = self.operator, self.model.pack_id
        operator.set_minimum(self.model.name, len(TARGETS))
        try:
            operator.until(lambda view: len(view.instances) == len(TARGETS) or None)
            with operator.burst(_NUM_REQUESTS, self.model.name, _PROMPT, _NUM_TOKENS) as answers:
                copies = operator.until(lambda view: copies_once_served_everywhere(view, pack_id))
        finally:
            operator.set_minimum(self.model.name, 0)
        assert [answer.result() for answer in answers] == [self.expected] * _NUM_REQUESTS
        assert not any(copy.error for copy in copies.values())
        return copies


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A cluster that leaves nothing behind."""
    torch.set_num_threads(1)
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "wide", "llama", tied=True, **_SHAPE)
    expected = greedy_reference(reference_model(folder), _PROMPT, _NUM_TOKENS)
    with Lab(HOSTS, rate_mbit=_RATE_MBIT) as lab:
        with Cluster(lab, tmp_path_factory.mktemp("cluster"), **_SETTINGS) as cluster:
            operator = Operator(cluster)
            yield Scene(lab, cluster, operator, operator.publish(folder), expected)
        assert pids_in([host.namespace for host in lab]) == []
    assert not list(Path("/dev/shm").glob(f"*{lab.name}*"))
    assert not any(Path("/run/netns", namespace).exists() for namespace in lab.namespaces)


def test_chain_fills_three_hosts_with_a_single_read_of_the_source(scene: Scene) -> None:
    scene.operator.keep_copies_on(["source"], scene.model.pack_id)
    before = scene.lab["source"].bytes_out()
    copies = scene.wake_all()
    num_packs_sent = (scene.lab["source"].bytes_out() - before) / scene.model.pack_bytes
    scene.operator.await_zero()

    source_of = {host: copy.source.removeprefix("store-") for host, copy in copies.items()}
    follower_of = {source: host for host, source in source_of.items()}
    chain = ["source"]
    while chain[-1] in follower_of:
        chain.append(follower_of[chain[-1]])
    assert sorted(chain[1:]) == sorted(TARGETS), f"no chain: {source_of}"
    assert 0.9 <= num_packs_sent <= 1.15
    assert copies[chain[3]].relay_first_unix_us < copies[chain[1]].relay_end_unix_us


def test_bytes_damaged_at_rest_are_fetched_from_another_host(scene: Scene) -> None:
    operator, pack_id, store = scene.operator, scene.model.pack_id, scene.cluster.stores["h1"]
    operator.keep_copies_on(["source", "h1"], pack_id)
    place = operator.place_of("h1", pack_id)
    store.kill()
    corrupt_chunk(place, _DAMAGED_CHUNK)
    store.start()
    store.await_ready()
    num_chunks, num_verified = operator.until(lambda view: rechecked(view, "h1", pack_id))
    assert num_verified == num_chunks - 1

    copies = scene.wake_all()
    assert copies["h1"].source.startswith("store-")
    assert corrupt_chunks(place) == []
    operator.await_zero()


def rechecked(view: ClusterView, host: str, pack_id: str) -> tuple[int, int] | None:
    """The chunks of a copy and those that are good, once a store that was restarted has looked at all; None before."""
    copy = copies_of(view, host).get(pack_id)
    return (copy.num_chunks, copy.num_chunks_verified) if copy is not None and copy.error else None
