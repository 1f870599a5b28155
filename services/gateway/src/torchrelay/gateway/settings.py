"""The gateway's settings."""

from __future__ import annotations

import re
from typing import ClassVar, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from torchrelay.common.identity.callers import Caller
from torchrelay.common.net.urls import without_password
from torchrelay.common.process.settings import ServiceSettings
from torchrelay.gateway.grants import is_safe_url, parse_grants

ADMIN_PREFIX = "tra-"
MIN_ADMIN_KEY_CHARS = 32  # 128 bits in hex
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s,A-Z]+")  # as browsers send it: in lower case, without a path


class GatewaySettings(ServiceSettings):
    """Each field is a flag (``--http-port``), a variable (``TORCHRELAY_HTTP_PORT``) and a key of the TOML file."""

    caller = Caller.GATEWAY
    ended: ClassVar = {
        "body_silence_s": "set message_timeout_s for gRPC; REST bodies may pause for 30 s",
        **dict.fromkeys(
            (
                "max_connections", "max_keyless_connections", "max_grpc_connections", "max_head_bytes", "max_headers",
                "max_url_bytes", "head_timeout_s", "min_body_bytes_per_s",
            ),
            "the ingress bounds it (docs/security.md)",
        ),
        "max_grpc_streams": "set max_open_streams and max_open_streams_per_tenant",
    }  # fmt: skip
    gateway_id: str = Field("gateway", description="Name of this gateway; each process appends a random suffix.")
    http_port: int = Field(0, ge=0, le=65535, description="REST port; 0: any free port.")
    grpc_port: int = Field(0, ge=0, le=65535, description="gRPC port; 0: any free port.")
    database_url: str = Field(
        "sqlite:///torchrelay.db",
        description="sqlite:///path (one gateway only) or postgresql://user:password@host/name.",
    )
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0", description="Redis or Valkey; empty: each gateway limits its share."
    )
    scheduler_address: str = Field(
        "127.0.0.1:7101",
        description="host:port of the scheduler's gRPC server; of several schedulers with a lease IP:port,IP:port, or "
        "dns:///NAME:port where the name has all their addresses.",
    )
    store_address: str = Field("127.0.0.1:7103", description="host:port of the param-store that uploads go to.")
    scheduler_token: str = Field(
        "", description="What gateways show to the scheduler: call_token(its node key, gateway); not with TLS."
    )
    store_token: str = Field(
        "", description="What gateways show to that param-store: call_token(its node key, gateway); not with TLS."
    )
    admin_key: str = Field(
        "", description="The admin key: tra- and at least 32 random characters; empty: no admin access."
    )
    key_pepper: str = Field(
        "", description="Hex secret for hashing API keys; empty: generated at first start and kept in SQL."
    )
    oidc_issuer: str = Field("", description="URL of the OIDC issuer whose bearer tokens are accepted; empty: none.")
    oidc_audience: str = Field("", description="The audience that these tokens must have.")
    oidc_grants: str = Field(
        "",
        description="Rules CLAIM:VALUE=ROLE with commas, of which the first that applies counts: "
        "groups:sre=operator,email:ann@x.example=admin,groups:acme=tenant/acme.",
    )

    idle_timeout_s: float = Field(
        0.0, ge=0, description="The scheduler's setting for models that set none, shown to tenants; 0: computed."
    )
    max_instances: int = Field(8, ge=1, description="The scheduler's default maximum of instances per role.")
    default_max_tokens: int = Field(
        32_768, ge=1, description="max_tokens of a request that sets none, as far as the context and its budget allow."
    )
    max_choices: int = Field(16, ge=1, description="Largest n a request may ask for.")
    request_timeout_s: float = Field(
        0.0,
        ge=0,
        description="A request still running this long after its arrival ends with an error; 0: no limit.",
    )
    keep_alive_s: float = Field(5.0, gt=0, description="Interval of keep-alive comments on a waiting stream.")
    max_attempts: int = Field(5, ge=1, description="Placements tried before a request fails.")
    max_body_bytes: int = Field(8 << 20, ge=1 << 10, description="Largest body of a prompt accepted.")
    tokenizer_cache_bytes: int = Field(
        96 << 20, description="Memory for recently used tokenizers, in the gateway and in each of its text processes."
    )
    text_processes: int = Field(
        0,
        ge=0,
        description="Processes that render chat templates and tokenize prompts; 0: one per core, from 2 to 8. "
        "One more is for tenants whose prompts had to be stopped.",
    )
    text_process_bytes: int = Field(1 << 30, ge=256 << 20, description="Largest address space of a text process.")
    prompt_cpu_s: float = Field(
        2.0, gt=0, description="Seconds of CPU for rendering a prompt's chat template, and again for tokenizing it."
    )

    cors_origins: str = Field(
        "",
        description="Origins whose pages may call the REST API from a browser, with commas, such as "
        "https://app.example; *: all; empty: none.",
    )
    max_open_requests: int = Field(8192, ge=1, description="Requests with a key in progress at once.")
    max_open_requests_per_tenant: int = Field(512, ge=1, description="The share of one tenant in them.")
    max_buffered_body_bytes: int = Field(64 << 20, ge=1, description="Bytes of request bodies in memory at once.")
    max_buffered_body_bytes_per_tenant: int = Field(16 << 20, ge=1, description="The share of one tenant in them.")
    max_held_answer_bytes: int = Field(
        256 << 20, ge=1, description="Bytes of logprobs, vectors and repeated prompts of answers in memory at once."
    )
    max_held_answer_bytes_per_tenant: int = Field(64 << 20, ge=1, description="The share of one tenant in them.")
    max_uploads: int = Field(32, ge=1, description="Files being sent to uploads, and commits, at once.")
    max_uploads_per_tenant: int = Field(4, ge=1, description="The share of one tenant in them.")
    max_queries_per_tenant: int = Field(
        8, ge=1, description="Lists, usage and bills of one tenant at once: one runs, the others wait in line."
    )
    max_open_streams: int = Field(256, ge=1, description="gRPC calls with several messages at once.")
    max_open_streams_per_tenant: int = Field(64, ge=1, description="The share of one tenant in them.")
    message_timeout_s: float = Field(30.0, gt=0, description="Time for a message of a gRPC call to arrive.")
    idle_connection_s: int = Field(
        75, ge=1, description="A REST or gRPC connection without a request is closed after this time."
    )
    answer_silence_s: float = Field(
        60.0, gt=0, description="A client that takes nothing of its answer for this long is disconnected."
    )

    cached_keys: int = Field(10_000, ge=1, description="API keys cached in memory.")
    cached_models: int = Field(10_000, ge=1, description="Models cached in memory.")
    confirm_s: float = Field(0.5, gt=0, description="How long caches are trusted after SQL confirmed their version.")
    heartbeat_s: float = Field(2.0, gt=0, description="Interval of this gateway's heartbeat in SQL.")
    sweep_after_s: float = Field(
        10.0, gt=0, description="A gateway whose heartbeat stops this long is gone; its requests are settled."
    )
    reservation_lease_s: float = Field(
        20.0, gt=0, description="Lifetime of a request's reservation in its limits once its gateway is gone."
    )
    upload_lease_s: float = Field(86400.0, gt=0, description="Lifetime of an upload never committed.")
    max_open_uploads: int = Field(16, ge=1, description="Uploads that one tenant may have open at once.")
    open_upload_bytes_per_tenant: int = Field(
        1 << 40, ge=1, description="Declared bytes of one tenant's open uploads together; a single one may have more."
    )
    max_files: int = Field(1000, ge=1, description="Files that one tenant may have, beside those of its models.")
    max_open_batches: int = Field(16, ge=1, description="Batches of one tenant that have not ended.")
    batch_window_s: float = Field(86400.0, gt=0, description="A batch ends this long after its creation at the latest.")
    batch_lines_at_once: int = Field(32, ge=1, description="Lines of one batch under way at once.")
    max_batch_lines_at_once: int = Field(
        128, ge=1, description="Lines of all batches under way at once at this gateway; of one tenant half as many."
    )
    retired_version_s: float = Field(
        600.0, ge=0, description="Delay before the bytes of a replaced or deleted version are freed."
    )
    housekeeping_s: float = Field(60.0, gt=0, description="Interval of the search for expired uploads and versions.")

    @property
    def allowed_origins(self) -> frozenset[str]:
        """The origins of ``cors_origins``."""
        return frozenset(filter(None, map(str.strip, self.cors_origins.split(","))))

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, origins: str) -> str:
        for origin in filter(None, map(str.strip, origins.split(","))):
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                wanted = "must be * or origins such as https://app.example or http://localhost:3000, with commas"
                raise ValueError(f"{wanted}, not {origin!r}")
        return origins

    @field_validator("oidc_issuer")
    @classmethod
    def _is_an_issuer(cls, url: str) -> str:
        if url and not is_safe_url(url):
            raise ValueError(f"must begin with https://, not {url!r}")
        return url

    @field_validator("oidc_grants")
    @classmethod
    def _are_grants(cls, text: str) -> str:
        parse_grants(text)
        return text

    @model_validator(mode="after")
    def _has_an_audience(self) -> Self:
        if self.oidc_issuer and not (self.oidc_audience and self.oidc_grants):
            raise ValueError("oidc_issuer needs oidc_audience and oidc_grants")
        return self

    @field_validator("admin_key")
    @classmethod
    def _is_an_admin_key(cls, key: str) -> str:
        if key and (not key.startswith(ADMIN_PREFIX) or len(key) - len(ADMIN_PREFIX) < MIN_ADMIN_KEY_CHARS):
            raise ValueError(
                f"must be {ADMIN_PREFIX} and at least {MIN_ADMIN_KEY_CHARS} random characters, "
                f"such as {ADMIN_PREFIX}$(openssl rand -hex 32)"
            )
        return key

    @field_validator("database_url")
    @classmethod
    def _is_a_known_database(cls, url: str) -> str:
        return check_database_url(url)


def check_database_url(url: str) -> str:
    """Returns ``url``. Raises ``ValueError`` if it is not a supported database."""
    scheme, separator, _ = url.partition(":")
    if not separator or scheme.partition("+")[0] not in ("sqlite", "postgresql"):
        shown = without_password(url)
        raise ValueError(f"must be sqlite:///path or postgresql://user:password@host/name, not {shown!r}")
    try:
        urlsplit(url).port  # noqa: B018  (SQLAlchemy would quote what it takes for the port)
    except ValueError:
        raise ValueError("has no valid port: in the password, write / as %2F, @ as %40, : as %3A") from None
    return url
