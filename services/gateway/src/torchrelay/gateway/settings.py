"""Settings of the gateway."""

from __future__ import annotations

from pydantic import Field, field_validator

from torchrelay.common.process.settings import ServiceSettings


class GatewaySettings(ServiceSettings):
    """Every field is a flag (``--http-port``), a variable (``TORCHRELAY_HTTP_PORT``) and a line of the TOML file."""

    gateway_id: str = Field(
        "gateway", description="Name of this gateway; each process adds random letters, so that a restart is another."
    )
    http_port: int = Field(0, ge=0, le=65535, description="REST port; 0: any free one.")
    grpc_port: int = Field(0, ge=0, le=65535, description="gRPC port; 0: any free one.")
    database_url: str = Field(
        "sqlite:///torchrelay.db",
        description="sqlite:///path (one gateway only) or postgresql://user:password@host/name.",
    )
    redis_url: str = Field("redis://127.0.0.1:6379/0", description="Redis or Valkey; empty: no rate limits or budgets.")
    scheduler_address: str = Field("127.0.0.1:7101", description="host:port of the scheduler's gRPC server.")
    store_address: str = Field("127.0.0.1:7103", description="host:port of the param-store that uploads go to.")
    admin_key: str = Field("", description="The admin key (tra-...); empty: nobody is admin.")
    key_pepper: str = Field(
        "", description="Hex secret that API keys are hashed with; empty: one is made at first start and kept in SQL."
    )

    idle_timeout_s: float = Field(
        60.0, gt=0, description="The scheduler's own setting, for models that set none; shown to tenants."
    )
    max_instances: int = Field(8, ge=1, description="The same for the most instances per role.")
    default_max_tokens: int = Field(512, ge=1, description="max_tokens of a request that names none.")
    max_choices: int = Field(16, ge=1, description="Largest n of a request.")
    request_timeout_s: float = Field(
        0.0,
        ge=0,
        description="A request not done so long after its arrival ends with an error; 0: it may take forever.",
    )
    keep_alive_s: float = Field(5.0, gt=0, description="A waiting stream gets a comment line this often.")
    max_attempts: int = Field(5, ge=1, description="How often a request is placed before it fails.")
    max_body_bytes: int = Field(8 << 20, description="Largest JSON body of a request.")
    tokenizer_cache_bytes: int = Field(96 << 20, description="Memory for tokenizers of recently used versions.")
    template_timeout_s: float = Field(2.0, gt=0, description="A chat template that renders longer is killed.")

    cached_keys: int = Field(10_000, ge=1, description="API keys kept in memory.")
    cached_models: int = Field(10_000, ge=1, description="Models kept in memory.")
    confirm_s: float = Field(0.5, gt=0, description="Caches are trusted this long after SQL confirmed their version.")
    heartbeat_s: float = Field(2.0, gt=0, description="How often this gateway says in SQL that it lives.")
    sweep_after_s: float = Field(
        10.0, gt=0, description="A gateway whose heartbeat stood still this long is gone; its requests are settled."
    )
    reservation_lease_s: float = Field(900.0, gt=0, description="A budget reservation nobody released ends after this.")
    upload_lease_s: float = Field(86400.0, gt=0, description="An upload not committed within this is dropped.")
    retired_version_s: float = Field(
        600.0, ge=0, description="A replaced or deleted version's bytes are freed after this."
    )
    housekeeping_s: float = Field(60.0, gt=0, description="How often forgotten uploads and versions are looked for.")
    drain_s: float = Field(5.0, ge=0, description="Running streams may take this long to end at shutdown.")

    @field_validator("database_url")
    @classmethod
    def _is_a_known_database(cls, url: str) -> str:
        return check_database_url(url)


def check_database_url(url: str) -> str:
    """``url`` itself. Raises ``ValueError`` when it is of no database that the ledger can be kept in."""
    scheme, separator, _ = url.partition(":")
    if not separator or scheme.partition("+")[0] not in ("sqlite", "postgresql"):
        raise ValueError(f"{url!r} is no sqlite:///path and no postgresql://user:password@host/name")
    return url
