"""One model, three hosts: the relay's chain on shaped links, and what damaged bytes on a host come to."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from blake3 import blake3

from tests.lab import Lab
from tests.lab.cluster import HOSTS, TARGETS, Cluster
from tests.lab.keeper import pids_in
from tests.lab.operator import Operator, Published, copies_of, copies_once_served_everywhere
from tests.support.checkpoints import greedy_reference, make_checkpoint, reference_model
from torchrelay.transfer.slabs import MappedSlab

pytestmark = pytest.mark.lab

_RATE_MBIT = 200  # of each link: the pack takes more than a second
_SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 10}  # 31 MB in fp32
_PROMPT = list(range(40, 72))
_NUM_TOKENS = 12
_NUM_REQUESTS = 6
_DAMAGED_CHUNK = 5
_SETTINGS = {"REQUESTS_PER_INSTANCE": "1", "IDLE_TIMEOUT_S": "4"}


@dataclass(frozen=True)
class Scene:
    """The cluster, its operator, and the published model with its right continuation of the prompt."""

    lab: Lab
    cluster: Cluster
    operator: Operator
    model: Published
    expected: list[int]

    def wake_all(self) -> dict[str, str]:
        """Wakes the model on all three hosts by a burst, checks every answer; where each host's copy came from."""
        operator, pack_id = self.operator, self.model.pack_id
        with operator.burst(_NUM_REQUESTS, self.model.name, _PROMPT, _NUM_TOKENS) as answers:
            copies = operator.until(lambda view: copies_once_served_everywhere(view, pack_id))
        assert [answer.result() for answer in answers] == [self.expected] * _NUM_REQUESTS
        assert not any(copy.error for copy in copies.values())
        return {host: copy.source for host, copy in copies.items()}


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
    assert not list(Path("/dev/shm").glob(f"{lab.name}*"))
    assert not any(Path("/run/netns", namespace).exists() for namespace in lab.namespaces)


def test_three_hosts_are_filled_by_a_chain_out_of_one_pack_from_the_source(scene: Scene) -> None:
    operator, pack = scene.operator, scene.model
    operator.fill_from_remote("source", pack.pack_id)
    before = scene.lab["source"].bytes_out()
    sources = scene.wake_all()
    num_packs_sent = (scene.lab["source"].bytes_out() - before) / pack.pack_bytes

    follower_of = {source: host for host, source in sources.items()}
    chain = ["store-source"]
    while chain[-1] in follower_of:
        chain.append(f"store-{follower_of[chain[-1]]}")
    assert sorted(chain[1:]) == sorted(f"store-{host}" for host in TARGETS), f"no chain: {sources}"
    assert 0.9 <= num_packs_sent <= 1.15
    copies = operator.until(lambda view: copies_once_served_everywhere(view, pack.pack_id))
    first, last = (copies[store.removeprefix("store-")] for store in (chain[1], chain[3]))
    assert last.relay_first_unix_us < first.relay_end_unix_us
    operator.await_zero()
