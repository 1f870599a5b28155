"""A small gateway for the CLI's tests: a real HTTP server in a thread that speaks the REST shapes the CLI uses."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from torchrelay.control.v1.scheduler_pb2 import ClusterView

TENANT_KEY = "tr-8x2kq0v3m1c9d7fz-secret"
ADMIN_KEY = "tra-admin"
MODEL: dict[str, Any] = {"id": "acme/tiny", "root": "acme/tiny", "architecture": "LlamaForCausalLM"}
MODEL |= {"version": "0123456789abcdef", "tasks": ["generate"], "vocab_size": 100}
MODEL |= {"dtype": "F32", "size_bytes": 1_500_000, "context_length": 512, "created": 1_790_000_000}
MODEL |= {"idle_timeout_s": 0, "effective_idle_timeout_s": None, "max_instances": 2, "effective_max_instances": 2}
MODEL |= {"min_instances": 0, "engine": "auto", "schedule": [], "aliases": []}
MODEL |= {"max_concurrency": 0, "threads": 0, "kv_share": 1.0, "hosts": []}
MODEL |= dict.fromkeys(("interactive_ttft_s", "standard_ttft_s", "batch_ttft_s", "tbt_target_s"), 0.0)
PRICE: dict[str, Any] = {"model": None, "service": "", "prompt_nano": 100, "cached_nano": 25, "output_nano": 400}
PRICE |= {"valid_from": "1970-01-01T00:00:00+00:00", "valid_to": None}


@dataclass
class FakeGateway:
    """The state of the server, and the requests that it received."""

    url: str = ""
    versions: list[dict[str, Any]] = field(default_factory=list)
    prices: list[dict[str, Any]] = field(default_factory=lambda: [PRICE])
    asked: list[tuple[str, str, Any]] = field(default_factory=list)  # method, path, JSON body
    keys: set[str] = field(default_factory=lambda: {TENANT_KEY, ADMIN_KEY})
    next_key: str = TENANT_KEY
    owners: dict[str, str] = field(default_factory=lambda: {TENANT_KEY.split("-")[1]: "acme"})  # of keys, by their ids
    lists_keys: bool = True
    events: list[dict[str, Any]] = field(default_factory=list)
    view: ClusterView = field(default_factory=lambda: ClusterView(epoch=1))
    requests: list[dict[str, Any]] = field(default_factory=list)  # of the ledger
    outage: str = ""  # why the gateway answers nothing about the cluster
    tenants: set[str] = field(default_factory=set)
    published: set[str] = field(default_factory=set)  # models, without their tenant
    declared: dict[str, dict[str, Any]] = field(default_factory=dict)
    received: dict[str, bytearray] = field(default_factory=dict)
    cut_after: int = 0  # once: the connection breaks when so many bytes of a file have come
    refuse_commit: bool = False
    loses_known_files: bool = False  # an upload begins as if all files were known, and they are not any more
    is_full: bool = False  # refuses completions
    sizing: dict[str, Any] | None = None  # of the model tiny
    notes: tuple[str, ...] = ()  # about the weights of a published model
    pieces: tuple[str, ...] = ("Hel", "lo\u2028", "there")
    hang_after_pieces: bool = False
    released: threading.Event = field(default_factory=threading.Event)

    def file_states(self) -> list[dict[str, Any]]:
        return [
            {
                "path": path,
                "size": file["size"],
                "received": len(self.received[path]),
                "complete": hashlib.sha256(self.received[path]).hexdigest() == file["sha256"],
            }
            for path, file in self.declared.items()
        ]


class _Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    gateway: FakeGateway

    def log_message(self, format: str, *args: Any) -> None:
        return

    def _serve(self) -> None:
        path = urlsplit(self.path).path
        body = None
        if self.command != "PUT" or not path.startswith("/v1/uploads"):
            encoded = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.loads(encoded) if encoded else None
        self.gateway.asked.append((self.command, self.path, body))
        key = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if key not in self.gateway.keys:
            return self._error(401, "the key is not known", "invalid_api_key")
        self._route(path, body, key)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _route(self, path: str, body: Any, key: str) -> None:
        match self.command, path.split("/")[2:]:
            case "POST", ["tenants"] if body["name"] in self.gateway.tenants:
                self._error(409, f"there is a tenant {body['name']!r} already", "conflict")
            case "POST", ["tenants"]:
                self.gateway.tenants.add(body["name"])
                self._json({"id": "ten-1", "name": body["name"]}, 201)
            case "POST", ["keys"] if "tenant" in body and body["tenant"] not in self.gateway.tenants:
                self._error(404, f"there is no tenant {body['tenant']!r}", "not_found")
            case "POST", ["keys"]:
                key_id, tenant = self.gateway.next_key.split("-")[1], body.get("tenant", "acme")
                self.gateway.owners[key_id] = tenant
                self._json({"id": key_id, "key": self.gateway.next_key, "tenant": tenant}, 201)
            case "DELETE", ["keys", _]:
                self._send(204, b"")
            case "GET", ["keys"] if not self.gateway.lists_keys:
                self._error(503, "the database cannot be reached", "unavailable")
            case "GET", ["keys"]:
                owners = self.gateway.owners.items()
                self._json({"data": [{"id": key_id, "tenant": tenant} for key_id, tenant in owners]})
            case "GET", ["tenants"]:
                self._json({"data": [{"name": name} for name in self.gateway.tenants]})
            case "PATCH", ["tenants", name]:
                self._json({"name": name, "storage_quota_bytes": None, "budget_nano": 200_000_000_000} | body)
            case "POST", ["models", "tiny", "rollback"]:
                self._json(MODEL | {"version": body.get("version", "fedcba9876543210")})
            case "PUT", ["models", _, "aliases"]:
                self._json(MODEL | body)
            case method, ["models", *name] if name:
                self._model(method, "/".join(name), body)
            case "GET", ["explain"] if "model=tiny" not in self.path:
                self._model("GET", parse_qs(urlsplit(self.path).query)["model"][0], None)
            case "GET", ["explain"]:
                decision = {"at_unix_us": 1, "kind": "scale", "subject": "acme/tiny", "reason": "would load 1 instance"}
                worth = [{"label": "bid", "text": "3 late requests"}]
                self._json({"id": "acme/tiny", "phases": [], "decisions": [decision], "worth": worth})
            case "GET", ["sizing"] if self.gateway.sizing is not None:
                self._json(self.gateway.sizing)
            case "GET", ["requests", _, "explain"]:
                message = "no recent request has the id 'req-nope': the last 2,048 are kept"
                self._json({"error": {"message": message, "param": "request_id", "code": "not_found"}}, 404)
            case "GET", ["cluster" | "events"] if self.gateway.outage:
                self._error(503, self.gateway.outage, "unavailable")
            case "GET", ["cluster"] if self.headers["Accept"] == "application/x-protobuf":
                self._send(200, self.gateway.view.SerializeToString(), self.headers["Accept"])
            case "GET", ["cluster"]:
                self._json({"epoch": "1", "instances": []})
            case "GET", ["requests"]:
                query, listed = parse_qs(urlsplit(self.path).query), self.gateway.requests
                after_id = query.get("after_id", [""])[0]
                begin = next((number for number, each in enumerate(listed, 1) if each["id"] == after_id), 0)
                page = listed[begin : begin + int(query["limit"][0])]
                self._json({"data": page, "has_more": begin + len(page) < len(listed)})
            case "GET", ["events"]:
                after, limit = (int(parse_qs(urlsplit(self.path).query)[name][0]) for name in ("after", "limit"))
                self._json({"data": [each for each in self.gateway.events if each["sequence"] > after][:limit]})
            case "GET", ["versions"]:
                self._json({"data": self.gateway.versions})
            case "GET", ["prices"]:
                self._json({"data": self.gateway.prices})
            case "PUT", ["prices"]:
                self._json(PRICE | body)
            case "GET", ["models"]:
                self._json({"data": [MODEL]})
            case "GET", ["usage"] if "model=" in self.path or "key=" in self.path:
                self._json({"data": [], "total": {}})
            case "GET", ["usage"]:
                quantities: dict[str, Any] = {"prompt_tokens": 1200, "cached_tokens": 0, "completion_tokens": 34}
                quantities |= {"requests": 2, "cost_nano": 15_000, "cost": "0.000015000"}
                self._json({"data": [{"model": "acme/tiny", **quantities}], "total": quantities})
            case "GET", ["invoices", _] if "format=" in self.path:
                self._send(200, b"item,amount\nTotal,2.00\n", "text/csv")
            case ("GET", ["invoices", _]) | ("POST", ["invoices", _, "close"]):
                shown: dict[str, Any] = {"tenant": "acme", "period": "2026-01", "number": 4, "currency": "USD"}
                shown |= {"amount": "-12.50", "lines": [], "adjustments": [{"reason": "outage", "amount": "-12.50"}]}
                self._json(shown if self.command == "GET" else {"data": [shown]})
            case "POST", ["adjustments"]:
                self._json({"amount": "-12.50"}, 201)
            case "GET", ["usage", "export"]:
                self._send(200, b'{"id": 7}\n{"id": 9}\n', "application/x-ndjson")
            case "POST", ["uploads"] if "vllm" in body.get("engine", ""):
                self._error(400, "no worker has the engine vllm; the workers have torchrelay", "invalid_request")
            case "POST", ["uploads"]:
                self.gateway.declared = {file["path"]: file for file in body["files"]}
                self.gateway.received = {path: bytearray() for path in self.gateway.declared}
                states = self.gateway.file_states()
                if self.gateway.loses_known_files:
                    states = [state | {"received": state["size"], "complete": True} for state in states]
                self._json({"id": "upl-1", "model": body["model"], "files": states}, 201)
            case "GET", ["uploads", "upl-1"] if self.gateway.declared:
                self._json({"id": "upl-1", "files": self.gateway.file_states()})
            case "GET", ["uploads"]:
                times = {"created": 1_790_000_000, "expires": 1_790_086_400}
                listed = [{"id": "upl-1", "model": "acme/tiny", "size_bytes": 1_500_000, **times}]
                self._json({"data": listed if self.gateway.declared else []})
            case "DELETE", ["uploads", "upl-1"]:
                self.gateway.declared = {}
                self._send(204, b"")
            case "PUT", ["uploads", "upl-1", "files", *name]:
                self._put("/".join(name))
            case "POST", ["uploads", "upl-1", "commit"]:
                self._commit()
            case "POST", ["completions"] if self.gateway.is_full:
                self._error(503, "the queue is full", "overloaded")
            case "POST", ["completions"]:
                self._complete(body)
            case "POST", ["chat", "completions"]:
                self._chat(body)
            case _:
                self._error(404, f"there is no {path}", "not_found")

    def _model(self, method: str, name: str, body: Any) -> None:
        if name.removeprefix("acme/") not in self.gateway.published:
            error = {"message": f"the model {name!r} does not exist", "param": "model", "code": "model_not_found"}
            self._json({"error": error}, 404)
        elif method == "DELETE":
            self._json({"id": MODEL["id"], "deleted": True})
        else:
            self._json(MODEL | (body or {}))

    def _put(self, name: str) -> None:
        received, length = self.gateway.received[name], int(self.headers["Content-Length"])
        if int(self.headers["Upload-Offset"]) != len(received):
            self.rfile.read(length)
            return self._error(409, f"{name}: the offset must be {len(received)}", "conflict")
        if 0 < self.gateway.cut_after < length:
            received += self.rfile.read(self.gateway.cut_after)
            self.gateway.cut_after = 0
            self.close_connection = True
            return None  # no answer: as a gateway that dies
        received += self.rfile.read(length)
        state = next(state for state in self.gateway.file_states() if state["path"] == name)
        if len(received) == state["size"] and not state["complete"]:
            digest = hashlib.sha256(received).hexdigest()
            received.clear()
            return self._error(422, f"{name}: its SHA-256 is {digest}; send the file again", "upload_refused")
        return self._json(state)

    def _commit(self) -> None:
        last: Any = {"model": MODEL | ({"notes": self.gateway.notes} if self.gateway.notes else {})}
        if not all(state["complete"] for state in self.gateway.file_states()):
            error = {"message": "the file is not complete", "param": "config.json", "code": "conflict"}
            last = {"error": error, "status": 409}
        elif self.gateway.refuse_commit:
            message, self.gateway.declared = "config.json: no such architecture", {}  # the upload has ended
            last = {"error": {"message": message, "param": "config.json", "code": "upload_refused"}, "status": 422}
        lines = [{"stage": "validate", "done": 1, "total": 1}, {"stage": "pack", "done": 5, "total": 10}, last]
        self._send(200, b"".join(json.dumps(line).encode() + b"\n" for line in lines), "application/x-ndjson")

    def _chat(self, body: Any) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b": waiting\n\n")
        for piece in self.gateway.pieces:
            self._chunk([{"index": 0, "delta": {"content": piece}, "finish_reason": None}])
        if self.gateway.hang_after_pieces:
            self.gateway.released.wait(20)
        else:
            self._chunk([{"index": 0, "delta": {}, "finish_reason": "stop"}])
            self._chunk([], {"prompt_tokens": 5, "completion_tokens": 3})
            self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _complete(self, body: Any) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("x-request-id", "req-1")
        self.send_header("Connection", "close")
        self.end_headers()
        for token in range(body["max_tokens"]):
            self._chunk([{"index": 0, "text": "a", "token_ids": [token], "finish_reason": None}])
        self._chunk([], {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _chunk(self, choices: list[Any], usage: dict[str, int] | None = None) -> None:
        chunk = {"id": "req-1", "choices": choices, "usage": usage}
        self.wfile.write(b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n")
        self.wfile.flush()

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode())

    def _error(self, status: int, message: str, code: str) -> None:
        self._json({"error": {"message": message, "type": "x", "param": None, "code": code}}, status)

    def _send(self, status: int, content: bytes, media_type: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def running_gateway(port: int = 0) -> Iterator[FakeGateway]:
    """Serves on ``port``, or a free one, until the block ends."""
    gateway = FakeGateway()
    answering = type("Answering", (_Answering,), {"gateway": gateway})
    with ThreadingHTTPServer(("127.0.0.1", port), answering) as server:
        server.daemon_threads = True
        gateway.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield gateway
        finally:
            gateway.released.set()
            server.shutdown()
            thread.join()
