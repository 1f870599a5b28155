"""Prompts of published models, and the errors of those that cannot be encoded."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import pytest
from blake3 import blake3
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing

from tests.support.echo_services import EchoStore
from tests.support.gateway_ports import PRINCIPAL, published_model
from tests.unit.gateway.inference.text.processes.text_rig import LOOP, MESSAGES, TINY
from torchrelay.common.errors import ContextLengthExceeded, DataCorrupted, InvalidRequest, TorchrelayError
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreStub
from torchrelay.gateway.clients.file_reader import StoreFileReader
from torchrelay.gateway.core import PublishedModel
from torchrelay.gateway.inference.core import GenerateParams
from torchrelay.gateway.inference.text.decoder_cache import DecoderCache
from torchrelay.gateway.inference.text.model_files import ModelFiles
from torchrelay.gateway.inference.text.processes.frames import TextLimits
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
            {"config": "tokenizer_config.json", "template": "chat_template.jinja", "tokenizer": "tokenizer.json"}[
                name
            ]: data
            for name, data in files.items()
        }
        digests = {name: blake3(data).hexdigest() for name, data in named.items()}
        self.store.files |= {digests[name]: data for name, data in named.items()}
        return published_model(file_digests=digests, vocab_size=vocab_size, context=context)

    async def text(self, model: PublishedModel, params: GenerateParams) -> str:
        """The text of the prompt's token ids."""
        token_ids = await self.prompts.token_ids(PRINCIPAL, model, params)
        decoder = await self.prompts.decoder(PRINCIPAL, model)
        return decoder.tokens.decode(token_ids, skip_special_tokens=False)

    async def error(self, model: PublishedModel, params: GenerateParams) -> TorchrelayError:
        with pytest.raises(TorchrelayError) as caught:
            await self.prompts.token_ids(PRINCIPAL, model, params)
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
    assert await rig.prompts.token_ids(PRINCIPAL, model, GenerateParams("echo", token_ids=(1, 2))) == (1, 2)
    both = rig.model(config=config, template=b"{{ bos_token }} of the file")
    assert await rig.text(both, CHAT) == "<s> of the file"


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


async def test_decoder_is_loaded_without_a_prompt(rig: EncoderRig) -> None:
    decoder = await rig.prompts.decoder(PRINCIPAL, rig.model())
    assert await rig.prompts.decoder(PRINCIPAL, rig.model()) is decoder
    assert len(rig.store.reads) == 1


async def test_overlong_prompts_name_their_length(rig: EncoderRig) -> None:
    model = rig.model(context=4, template=b"{{ 'x ' * 64 }}")
    assert "has 129 characters, too many" in (await rig.error(model, replace(TEXT, text="x" * 129))).message
    assert "has 64 tokens" in (await rig.error(model, replace(TEXT, text="x " * 32))).message
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
        await rig.prompts.token_ids(PRINCIPAL, published_model(file_digests={}), TEXT)


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


@pytest.mark.parametrize(
    ("end", "loading", "field", "words"),
    [
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
    ],
)
def test_kill_error_names_the_exceeded_limit(
    end: signal.Signals, loading: str | None, field: str | None, words: str
) -> None:
    error = kill_error(PromptKilled(-end, loading), TextLimits(), "messages")
    assert words in error.message and error.field == field
    assert error.http_status == (503 if end == signal.SIGKILL else 400)
