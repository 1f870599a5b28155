"""An OIDC issuer on loopback: its discovery document, its keys, and tokens that it signs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey

AUDIENCE = "torchrelay"


@dataclass
class Issuer:
    url: str
    keys: list[RSAKey] = field(default_factory=list)
    num_fetched: int = 0
    faulty_keys: dict[str, Any] | None = None

    def rotate(self) -> None:
        """Signs with another key from now on; the old ones are no longer given."""
        number = f"key-{time.monotonic_ns()}"
        self.keys = [RSAKey.generate_key(2048, {"kid": number, "use": "sig", "alg": "RS256"})]

    def token(self, key: RSAKey | None = None, **claims: Any) -> str:
        now = int(time.time())
        held = {"iss": self.url, "aud": AUDIENCE, "sub": "ann", "iat": now, "exp": now + 300, **claims}
        signing = key or self.keys[0]
        return jwt.encode({"alg": "RS256", "kid": signing.kid}, held, signing)


@contextmanager
def running_issuer() -> Iterator[Issuer]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/.well-known/openid-configuration":
                document: Any = {"issuer": issuer.url, "jwks_uri": f"{issuer.url.rstrip('/')}/keys"}
            else:
                issuer.num_fetched += 1
                document = issuer.faulty_keys or KeySet([*issuer.keys]).as_dict(private=False)
            body = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    issuer = Issuer(f"http://127.0.0.1:{server.server_port}")
    issuer.rotate()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield issuer
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
