"""Echoing scheduler, store and workers in a single process, for `bench/gateway.py`.

    python -m bench.streaming.echo_server

Writes a JSON line once it serves: the addresses of scheduler and store, and the digest of the tokenizer. Every line on
standard input sets the seconds of an engine step and is acknowledged. The process ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop
from blake3 import blake3

from bench.streaming.echo_model import EchoVocabulary
from tests.support.echo_services import EchoScheduler, EchoStore
from tests.support.echo_worker import EchoModel, EchoWorker


async def serve() -> None:
    vocabulary = EchoVocabulary.make()
    digest = blake3(vocabulary.tokenizer_json).hexdigest()
    model = EchoModel(answer=vocabulary.answer, tokenizer=vocabulary.tokenizer)
    prefill, decode = EchoWorker("prefill-0", model), EchoWorker("decode-0", model)
    scheduler = EchoScheduler([prefill], decode=[decode])
    store = EchoStore({digest: vocabulary.tokenizer_json})
    for server in (prefill, decode, scheduler, store):
        await server.start()
    addresses = {"scheduler": scheduler.address, "store": store.address, "tokenizer_digest": digest}
    print(json.dumps(addresses), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        model.step_s = float(line)
        print("true", flush=True)
    for server in (scheduler, store, prefill, decode):
        await server.stop()


if __name__ == "__main__":
    uvloop.run(serve())
