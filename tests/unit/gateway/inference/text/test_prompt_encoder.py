"""Prompts of published models, the errors of those that cannot be encoded, and the files that they need."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from blake3 import blake3
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing

from tests.support.echo_services import EchoStore
from tests.support.gateway_ports import PRINCIPAL, published_model
from tests.unit.gateway.inference.text.processes.text_rig import LOOP, MESSAGES, TINY
from torchrelay.common.errors import ContextLengthExceeded, DataCorrupted, InvalidRequest, Overloaded, TorchrelayError
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreStub
from torchrelay.gateway.clients.file_reader import StoreFileReader
from torchrelay.gateway.core import PublishedModel
from torchrelay.gateway.inference.core import GenerateParams
from torchrelay.gateway.inference.text.decoder_cache import DecoderCache
from torchrelay.gateway.inference.text.model_files import ModelFiles
from torchrelay.gateway.inference.text.processes.frames import TOKENIZER, TOKENIZER_CONFIG, FileId, TextLimits
from torchrelay.gateway.inference.text.processes.text_pool import PoolSettings, PromptKilled
from torchrelay.gateway.inference.text.processes.text_processes import TextProcesses
from torchrelay.gateway.inference.text.prompt_encoder import PromptEncoder
from torchrelay.gateway.inference.text.refusals import kill_error

TEXT = GenerateParams("echo", text="hello")
CHAT = GenerateParams("echo", messages=MESSAGES)


@dataclass
class EncoderRig:
    """An encoder, and the store it reads from."""

    prompts: PromptEncoder
    store: EchoStore

    def model(self, *, vocab_size: int = 1 << 20, context: int = 4096, **files: bytes) -> PublishedModel:
        """A model with these files beside its tokenizer; names with underscores for dots."""
        named = {"tokenizer.json": TINY} | {
            {
                "config": "tokenizer_config.json",
                "template": "chat_template.jinja",
                "tool_template": "additional_chat_templates/tool_use.jinja",
                "tokenizer": "tokenizer.json",
            }[name]: data
            for name, data in files.items()
        }
        digests = {name: blake3(data).hexdigest() for name, data in named.items()}
        self.store.files |= {digests[name]: data for name, data in named.items()}
        return published_model(file_digests=digests, vocab_size=vocab_size, context=context)

    async def text(self, model: PublishedModel, params: GenerateParams) -> str:
        """The text of the prompt's token ids."""
        token_ids = (await self.prompts.encode(PRINCIPAL, model, params)).token_ids
        decoder = await self.prompts.decoder(PRINCIPAL, model)
        return decoder.tokens.decode(token_ids, skip_special_tokens=False)

    async def error(self, model: PublishedModel, params: GenerateParams) -> TorchrelayError:
        with pytest.raises(TorchrelayError) as caught:
            await self.prompts.encode(PRINCIPAL, model, params)
        return caught.value


@pytest.fixture
async def rig() -> AsyncIterator[EncoderRig]:
    async with AsyncExitStack() as stack:
        store = EchoStore({})
        await store.start()
        stack.push_async_callback(store.stop)
        channel = open_channel(store.address)
        stack.push_async_callback(channel.close)
        limits = TextLimits(prompt_cpu_s=0.2)
        files = await stack.enter_async_context(ModelFiles(StoreFileReader(ParamStoreStub(channel), store.address)))
        decoders = DecoderCache(1 << 30)
        stack.callback(decoders.close)
        processes = await stack.enter_async_context(TextProcesses(limits, PoolSettings(2, 1 << 30)))
        yield EncoderRig(PromptEncoder(files, decoders, processes, limits), store)


async def test_texts_and_chats_become_tokens(rig: EncoderRig) -> None:
    config = json.dumps({"bos_token": "<s>", "chat_template": "{{ bos_token }}{{ messages[1].content }}"}).encode()
    model = rig.model(config=config)
    assert await rig.text(model, TEXT) == "hello"
    assert await rig.text(model, CHAT) == "<s>größer?\nJa 🔥"
    assert (await rig.prompts.encode(PRINCIPAL, model, GenerateParams("echo", token_ids=(1, 2)))).token_ids == array(
        "i", (1, 2)
    )
    both = rig.model(config=config, template=b"{{ bos_token }} of the file")
    assert await rig.text(both, CHAT) == "<s> of the file"


async def test_a_file_with_the_template_for_tools_is_used(rig: EncoderRig) -> None:
    tools = b"{{ bos_token }}tools {{ tools[0].function.name }} <tool_call>"
    tool = {"type": "function", "function": {"name": "time"}}
    own = json.dumps({"bos_token": "<s>", "chat_template": "plain"}).encode()
    for model in (
        rig.model(tool_template=tools, template=b"plain", config=json.dumps({"bos_token": "<s>"}).encode()),
        rig.model(tool_template=tools, config=own),
    ):
        assert await rig.text(model, CHAT) == "plain"
        assert await rig.text(model, replace(CHAT, tools=(tool,))) == "<s>tools time <tool_call>"


def with_bos() -> bytes:
    """The ``tokenizer.json`` of TINY with Llama's post-processor, which begins every text with BOS."""
    tokenizer = Tokenizer.from_str(TINY.decode())
    tokenizer.add_special_tokens(["<s>"])
    bos = tokenizer.token_to_id("<s>")
    assert bos is not None
    begin = TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", bos)])
    tokenizer.post_processor = Sequence([ByteLevel(trim_offsets=False), begin])
    return tokenizer.to_str().encode()


async def test_bos_is_added_once_if_asked_for(rig: EncoderRig) -> None:
    model = rig.model(tokenizer=with_bos())
    for prompt, adds, expected in (
        ("hello", None, "<s>hello"),
        ("hello", False, "hello"),
        ("<s>hello", None, "<s>hello"),
        ("<s>hello", True, "<s>hello"),
        ("<s>hello", False, "<s>hello"),
        ("<s><s>hello", None, "<s><s>hello"),
        ("h<s>", None, "<s>h<s>"),
        ("<s>", None, "<s>"),
        ("", None, "<s>"),
    ):
        assert await rig.text(model, replace(TEXT, text=prompt, add_special_tokens=adds)) == expected
    for template, adds, expected in (
        (b"<s>{{ messages[0].content }}", None, "<s>Be <brief>."),
        (b"<s>{{ messages[0].content }}", True, "<s>Be <brief>."),
        (b"{{ messages[0].content }}", None, "Be <brief>."),
        (b"{{ messages[0].content }}", True, "<s>Be <brief>."),
    ):
        model = rig.model(tokenizer=with_bos(), template=template)
        assert await rig.text(model, replace(CHAT, add_special_tokens=adds)) == expected


async def test_pairs_are_encoded_by_the_tokenizers_own_template(rig: EncoderRig) -> None:
    tokenizer = Tokenizer.from_str(with_bos().decode())
    tokenizer.enable_truncation(2)
    model, pair = rig.model(tokenizer=tokenizer.to_str().encode()), replace(TEXT, second_text="again")
    assert await rig.text(model, pair) == "<s>hello<s>again"
    assert (await rig.prompts.encode(PRINCIPAL, model, pair)).second_text == 0, "both texts have one type"
    bos = tokenizer.token_to_id("<s>")
    assert bos is not None
    template = TemplateProcessing(single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", bos)])
    tokenizer.post_processor = template
    typed = await rig.prompts.encode(PRINCIPAL, rig.model(tokenizer=tokenizer.to_str().encode()), pair)
    assert typed.second_text > 1 and typed.token_ids[typed.second_text] == bos


async def test_decoder_is_loaded_without_a_prompt(rig: EncoderRig) -> None:
    decoder = await rig.prompts.decoder(PRINCIPAL, rig.model())
    assert await rig.prompts.decoder(PRINCIPAL, rig.model()) is decoder
    assert len(rig.store.reads) == 1


async def test_overlong_prompts_name_their_length(rig: EncoderRig) -> None:
    model = rig.model(context=4, template=b"{{ 'x ' * 64 }}")
    assert "129 characters > 4 maximum" in (await rig.error(model, replace(TEXT, text="x" * 129))).message
    assert "64 tokens > 4 maximum" in (await rig.error(model, replace(TEXT, text="x " * 32))).message
    assert isinstance(await rig.error(rig.model(context=4, template=b"{{ 'x' * 999 }}"), CHAT), ContextLengthExceeded)


async def test_refused_prompts_name_the_cause(rig: EncoderRig) -> None:
    error = await rig.error(rig.model(), CHAT)
    assert (type(error), error.field) == (InvalidRequest, "messages")
    assert error.message.startswith("acme/echo has no chat template")
    error = await rig.error(rig.model(template=b"{{ raise_exception('no') }}"), CHAT)
    assert (error.field, error.message) == ("messages", "the model's chat template failed: no")
    error = await rig.error(rig.model(vocab_size=100), TEXT)
    assert error.field == "prompt" and "the model's token ids are 0 to 99" in error.message
    error = await rig.error(rig.model(), replace(TEXT, text=""))
    assert (error.field, error.message) == ("prompt", "the prompt must not be empty")
    error = await rig.error(rig.model(vocab_size=10), GenerateParams("echo", token_ids=(10,)))
    assert error.message == "token id 10 is out of range; the model's token ids are 0 to 9"
    with pytest.raises(InvalidRequest, match=r"has no tokenizer\.json"):
        await rig.prompts.encode(PRINCIPAL, published_model(file_digests={}), TEXT)


async def test_files_that_fail_are_named(rig: EncoderRig) -> None:
    panics = Tokenizer(BPE(vocab={"a": 0}, merges=[]))
    panics.pre_tokenizer = Split(Regex("(a+)+!"), "isolated")
    error = await rig.error(rig.model(tokenizer=panics.to_str().encode()), replace(TEXT, text="a" * 30 + "c"))
    assert (error.field, error.message) == ("prompt", "the tokenizer of acme/echo cannot encode this text")
    error = await rig.error(rig.model(config=b"{"), CHAT)
    assert (type(error), error.field) == (DataCorrupted, "tokenizer_config.json")
    error = await rig.error(rig.model(tokenizer=b'{"model": {}}'), TEXT)
    assert (type(error), error.field) == (InvalidRequest, "tokenizer.json")
    error = await rig.error(rig.model(template=LOOP.encode()), CHAT)
    assert (error.field, error.message) == ("messages", "the model's chat template failed: it took longer than 0.2 s")


def test_kill_error_names_the_exceeded_limit() -> None:
    for end, loading, field, words in (
        (signal.SIGPROF, None, "messages", "chat template failed: it took longer than 2 s"),
        (signal.SIGVTALRM, None, "messages", "tokenizer took longer than 2 s for this text"),
        (signal.SIGPROF, "tokenizer.json", "tokenizer.json", "takes more than 10 s of CPU to load"),
        (
            signal.SIGABRT,
            None,
            "messages",
            "chat template, tokenizer or format of the answer exceeded the limit of 1024 MB of memory",
        ),
        (signal.SIGSEGV, "tokenizer.json", "tokenizer.json", "tokenizer.json exceeded the limit of 1024 MB of memory"),
        (signal.SIGKILL, None, None, "the process that tokenized the prompt was killed"),
    ):
        error = kill_error(PromptKilled(-end, loading), TextLimits(), "messages")
        assert words in error.message and error.field == field
        assert error.http_status == (503 if end == signal.SIGKILL else 400)


ENCODED = [bytes([index]) * 1000 for index in range(4)]
DIGESTS = [blake3(data).hexdigest() for data in ENCODED]
IDS: list[FileId] = [(TOKENIZER, digest) for digest in DIGESTS]


@pytest.fixture
async def store() -> AsyncIterator[EchoStore]:
    store = EchoStore(dict(zip(DIGESTS, ENCODED, strict=True)))
    await store.start()
    yield store
    await store.stop()


@pytest.fixture
async def reader(store: EchoStore) -> AsyncIterator[StoreFileReader]:
    async with AsyncExitStack() as stack:
        channel = open_channel(store.address)
        stack.push_async_callback(channel.close)
        yield StoreFileReader(ParamStoreStub(channel), store.address)


async def contents(files: ModelFiles, wanted: list[FileId], tenant: str = "acme") -> list[bytes]:
    async with files.held(tenant, wanted) as held:
        assert [file.id for file in held] == wanted
        assert all(file.num_bytes == 1000 for file in held)
        return [file.path.read_bytes() for file in held]


async def test_concurrent_requests_share_one_read(store: EchoStore, reader: StoreFileReader) -> None:
    async with ModelFiles(reader) as files:
        read = await asyncio.gather(*(contents(files, IDS[:2]) for _ in range(10)))
        assert read == [ENCODED[:2]] * 10
        assert sorted(store.reads) == sorted(DIGESTS[:2])


async def test_tenants_do_not_wait_for_each_others_reads(store: EchoStore, reader: StoreFileReader) -> None:
    async with ModelFiles(reader) as files:
        read = await asyncio.gather(*(contents(files, IDS[:1], tenant) for tenant in ("acme", "beta") * 3))
        assert read == [ENCODED[:1]] * 6
        assert 1 <= len(store.reads) <= 2


async def test_least_recently_used_file_goes_unless_held(store: EchoStore, reader: StoreFileReader) -> None:
    async with ModelFiles(reader, max_bytes=2000) as files:
        async with files.held("acme", IDS[:1]) as held:
            for file_id in IDS[1:]:
                await contents(files, [file_id])
            assert held[0].path.exists()
            assert len(list(held[0].path.parent.iterdir())) == 2
        store.reads.clear()
        await contents(files, [IDS[3], IDS[0]])
        assert store.reads == []
        await contents(files, [IDS[1]])
        assert store.reads == [DIGESTS[1]]


async def test_held_files_that_fill_the_cache_cause_overload(reader: StoreFileReader) -> None:
    async with ModelFiles(reader, max_bytes=2000) as files:
        async with files.held("acme", IDS[:2]) as held:
            with pytest.raises(Overloaded, match="too many models' files are in use"):
                await contents(files, IDS[2:3], "beta")
            assert len(list(held[0].path.parent.iterdir())) == 2
        assert await contents(files, IDS[2:3], "beta") == ENCODED[2:3]


async def test_files_stay_where_a_new_one_has_no_space(store: EchoStore, reader: StoreFileReader) -> None:
    large = b"x" * 1500
    file_id = (TOKENIZER, blake3(large).hexdigest())
    store.files[file_id[1]] = large
    async with ModelFiles(reader, max_bytes=2000) as files:
        await contents(files, IDS[1:2])
        async with files.held("acme", IDS[:1]):
            with pytest.raises(Overloaded):
                await contents(files, [file_id], "beta")
            store.reads.clear()
            assert await contents(files, IDS[1:2]) == ENCODED[1:2] and not store.reads


async def test_equal_bytes_under_two_names_are_two_files(reader: StoreFileReader) -> None:
    async with ModelFiles(reader) as files:
        assert await contents(files, [IDS[0], (TOKENIZER_CONFIG, DIGESTS[0])]) == [ENCODED[0]] * 2


async def test_damaged_file_is_refused_and_not_kept(store: EchoStore, reader: StoreFileReader) -> None:
    async with ModelFiles(reader) as files:
        store.files[DIGESTS[0]] = ENCODED[1]
        with pytest.raises(DataCorrupted, match=r"tokenizer\.json does not match"):
            await contents(files, IDS[:1])
        store.files[DIGESTS[0]] = ENCODED[0]
        assert await contents(files, IDS[:1]) == ENCODED[:1]


def is_folder(path: Path) -> bool:
    return path.is_dir()


async def test_folder_is_removed_with_the_gateway(reader: StoreFileReader) -> None:
    async with ModelFiles(reader) as files, files.held("acme", IDS[:1]) as held:
        folder = held[0].path.parent
        assert is_folder(folder)
    assert not is_folder(folder)


_KILLED = """
import asyncio, os, signal
from torchrelay.gateway.inference.text.model_files import ModelFiles

async def main():
    async with ModelFiles(None) as files:
        (files._folder / "file").write_bytes(bytes(1000))
        print(files._folder, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def folder_of_a_killed_gateway(environment: dict[str, str]) -> Path:
    killed = subprocess.run([sys.executable, "-c", _KILLED], env=environment, stdout=subprocess.PIPE, check=False)
    leftover = Path(killed.stdout.decode().strip())
    assert (leftover / "file").stat().st_size == 1000
    return leftover


async def test_leftover_folders_are_removed_and_used_ones_stay(
    reader: StoreFileReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    leftover = folder_of_a_killed_gateway({**os.environ, "TMPDIR": str(tmp_path)})
    assert os.listdir(tmp_path) == [leftover.name]
    async with ModelFiles(reader) as files:
        assert leftover.name not in os.listdir(tmp_path)
        async with ModelFiles(reader) as others:
            assert await contents(files, IDS[:1]) == await contents(others, IDS[:1]) == ENCODED[:1]
        assert await contents(files, IDS[:2]) == ENCODED[:2]
    assert os.listdir(tmp_path) == []
