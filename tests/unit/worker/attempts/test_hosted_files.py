"""The adapters and the tokenizer that a worker keeps beside the hosted model."""

from __future__ import annotations

import asyncio
import json
from weakref import ref

import pytest

from tests.support.sample_tokenizers import PANIC, panicking_tokenizer, tiny_tokenizer
from torchrelay.common.errors import InvalidRequest, Overloaded, TorchrelayError, Unavailable
from torchrelay.common.tokens.stop_strings import StopChecker
from torchrelay.common.tokens.tokenizer import load_decoder, load_tokenizer
from torchrelay.control.v1 import types_pb2
from torchrelay.engine.kernels.low_rank import Adapter
from torchrelay.worker.attempts.hosted_adapters import HostedAdapters, Reserve
from torchrelay.worker.attempts.hosted_tokenizer import TOKENS_PER_TURN, HostedTokenizer


class Made:
    """Adapters of 10 bytes, and the ids of those that were made."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.failures = 0
        self.last: ref[Adapter] | None = None

    async def read(self, digest: str) -> bytes:
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise Unavailable("the store is away")
        return digest.encode()

    async def make(self, adapter_id: str, document: bytes, weights: bytes, reserve: Reserve) -> Adapter:
        assert (document, weights) == (b"config", b"weights")
        reserve(10)
        self.ids.append(adapter_id)
        adapter = Adapter(adapter_id, (), 10)
        self.last = ref(adapter)
        return adapter


def named(adapter_id: str) -> types_pb2.Adapter:
    return types_pb2.Adapter(adapter_id=adapter_id, config_digest="config", weights_digest="weights")


async def test_each_adapter_is_made_once_and_the_longest_unused_leaves_first() -> None:
    made = Made()
    hosted = HostedAdapters(made.read, max_bytes=20)
    first, again = await asyncio.gather(*(hosted.get("i1", named("a"), made.make) for _ in range(2)))
    assert first is again and made.ids == ["a"]
    del first, again
    for adapter_id in ("b", "a", "c", "a", "b"):
        assert (await hosted.get("i1", named(adapter_id), made.make)).adapter_id == adapter_id
    assert made.ids == ["a", "b", "c", "b"]


async def test_adapters_leave_with_their_instance() -> None:
    made = Made()
    hosted = HostedAdapters(made.read)
    for instance_id in ("i1", "i1", "i2", "i2"):
        await hosted.get(instance_id, named("a"), made.make)
    assert made.ids == ["a", "a"]


async def test_a_failed_read_is_not_kept() -> None:
    made = Made()
    made.failures = 1
    hosted = HostedAdapters(made.read, max_bytes=10)
    with pytest.raises(Unavailable):
        await hosted.get("i1", named("a"), made.make)
    assert (await hosted.get("i1", named("a"), made.make)).adapter_id == "a"
    assert made.ids == ["a"]


async def test_adapters_of_running_groups_count_and_are_not_read_twice() -> None:
    """They were in memory beyond the limit once others had taken their places."""
    made = Made()
    hosted = HostedAdapters(made.read, max_bytes=20)
    running = [await hosted.get("i1", named(adapter_id), made.make) for adapter_id in ("a", "b")]
    with pytest.raises(
        Overloaded, match="the adapter has 10 B and those of running requests 20 B; a worker holds 20 B"
    ):
        await hosted.get("i1", named("c"), made.make)
    assert await hosted.get("i1", named("a"), made.make) is running[0]
    assert made.ids == ["a", "b"]
    del running[1]
    assert (await hosted.get("i1", named("c"), made.make)).adapter_id == "c"


async def test_unloaded_model_leaves_no_adapter() -> None:
    made = Made()
    hosted = HostedAdapters(made.read)
    await hosted.get("i1", named("a"), made.make)
    assert made.last is not None and made.last() is not None
    hosted.clear()
    assert made.last() is None


async def test_a_refused_adapter_evicts_nothing_and_others_evict_only_what_they_need() -> None:
    """A refusal evicted all adapters, and one that fitted began with those of running groups, which frees nothing."""
    made = Made()
    hosted = HostedAdapters(made.read, max_bytes=40)
    running = [await hosted.get("i1", named(adapter_id), made.make) for adapter_id in ("a", "b")]
    for adapter_id in ("c", "d"):
        await hosted.get("i1", named(adapter_id), made.make)

    async def large(adapter_id: str, document: bytes, weights: bytes, reserve: Reserve) -> Adapter:
        reserve(30)
        return Adapter(adapter_id, (), 30)

    with pytest.raises(Overloaded, match="has 30 B and those of running requests 20 B; a worker holds 40 B"):
        await hosted.get("i1", named("large"), large)
    await hosted.get("i1", named("e"), made.make)
    for adapter_id in ("d", "e"):
        await hosted.get("i1", named(adapter_id), made.make)
    assert made.ids == ["a", "b", "c", "d", "e"], "c alone was evicted, for e"
    running.clear()
    for adapter_id in ("a", "b"):
        await hosted.get("i1", named(adapter_id), made.make)
    assert made.ids == ["a", "b", "c", "d", "e"]


TINY = tiny_tokenizer()
SLOW = json.dumps(
    json.loads(TINY) | {"decoder": {"type": "Replace", "pattern": {"Regex": "a*a*[bd]e"}, "content": ""}}
).encode()


class Files:
    """Files by digest, and the digests in the order of reads."""

    def __init__(self, **files: bytes) -> None:
        self.files = files
        self.reads: list[str] = []

    async def read(self, digest: str) -> bytes:
        self.reads.append(digest)
        return self.files[digest]


async def test_tokenizer_is_read_once_and_only_for_stop_strings() -> None:
    files = Files(one=TINY, two=panicking_tokenizer())
    hosted = HostedTokenizer(files.read)
    assert await hosted.checkers("one", [], [], {0: []}) == {}
    assert files.reads == []
    for digest in ("one", "one", "two", "two"):
        assert set(await hosted.checkers(digest, ["STOP"], [], {0: [], 2: []})) == {0, 2}
    assert files.reads == ["one", "two"]


async def test_checker_is_advanced_past_forced_output() -> None:
    decoder, tokenizer = load_decoder(TINY), load_tokenizer(TINY)
    ids = [tokenizer.token_to_id(letter) for letter in "STOP"]
    forced = [token_id for token_id in ids[:3] if token_id is not None] * TOKENS_PER_TURN
    checkers = await HostedTokenizer(Files(one=TINY).read).checkers("one", ["OSTOP"], [], {0: forced, 1: []})
    last = ids[3]
    assert last is not None
    expected = StopChecker(decoder, ["OSTOP"])
    for token_id in forced:
        expected.step(token_id)
    assert expected.step(last) and checkers[0].step(last)
    assert not checkers[1].step(last)


async def test_long_forced_output_yields_to_event_loop() -> None:
    hosted, turns = HostedTokenizer(Files(one=TINY).read), 0
    await hosted.checkers("one", ["STOP"], [], {0: []})  # loads it
    checking = asyncio.ensure_future(hosted.checkers("one", ["STOP"], [], {0: [5] * TOKENS_PER_TURN * 20}))
    while not checking.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 20


async def test_refused_tokenizer_is_not_read_again() -> None:
    files = Files(slow=SLOW)
    hosted = HostedTokenizer(files.read)
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="a decoder may only replace fixed strings"):
            await hosted.checkers("slow", ["STOP"], [], {0: []})
    assert await hosted.checkers("slow", [], [], {0: []}) == {}
    assert files.reads == ["slow"]


async def test_tokenizer_load_times_out() -> None:
    never = asyncio.Event()

    async def read(digest: str) -> bytes:
        if digest == "late":
            await never.wait()
        return TINY

    hosted = HostedTokenizer(read, load_timeout_s=0.05)
    with pytest.raises(Unavailable, match="could not be loaded within"):
        await hosted.checkers("late", ["STOP"], [], {0: []})


async def test_undecodable_forced_output_fails_request() -> None:
    encoded = panicking_tokenizer()
    panic = load_tokenizer(encoded).token_to_id(PANIC)
    assert panic is not None
    with pytest.raises(TorchrelayError, match="failed to decode its tokens"):
        await HostedTokenizer(Files(one=encoded).read).checkers("one", ["STOP"], [], {0: [5, panic]})


async def test_grammars_are_compiled_once_for_the_tokens_of_the_model() -> None:
    other = json.loads(TINY)
    other["model"]["vocab"] |= {"a": other["model"]["vocab"]["b"], "b": other["model"]["vocab"]["a"]}
    hosted = HostedTokenizer(Files(one=TINY, two=json.dumps(other).encode()).read)
    source = 'start: "a"'
    first, again = await asyncio.gather(hosted.grammar("one", source), hosted.grammar("one", source))
    assert first is again
    changed = await hosted.grammar("two", source)
    spellings = [load_decoder(file).spelling for file in (TINY, json.dumps(other).encode())]
    for grammar, spelling in zip((first, changed), spellings, strict=True):
        mask = int.from_bytes(grammar.start().allowed(), "little")
        assert [spelling(i) for i in range(grammar.end_id) if mask >> i & 1] == ["a"]
    assert spellings[0](TINY_A) != spellings[1](TINY_A)


TINY_A = json.loads(TINY)["model"]["vocab"]["a"]


async def test_unusable_grammar_is_refused_and_the_next_is_compiled() -> None:
    hosted = HostedTokenizer(Files(one=TINY).read)
    with pytest.raises(InvalidRequest, match="missing"):
        await hosted.grammar("one", "start: missing")
    assert (await hosted.grammar("one", 'start: "ab"')).start().allowed()
