"""Environments of child processes: each gets no secrets except its own."""

from __future__ import annotations

from collections.abc import Mapping

SECRET_SETTINGS = (
    "admin_key",
    "api_key",
    "cluster_key",
    "compiled_key",
    "database_url",
    "key_pepper",
    "nats_url",
    "node_key",
    "redis_url",
    "scheduler_token",
    "store_token",
)
_PLAIN = frozenset(
    (
        "HOME",
        "LANG",
        "LANGUAGE",
        "LD_LIBRARY_PATH",
        "LOGNAME",
        "PATH",
        "PYTHONPATH",
        "SHELL",
        "TERM",
        "TMPDIR",
        "TZ",
        "USER",
    )
)
_STORE_CREDENTIALS = ("AWS_", "AZURE_", "GOOGLE_")
_SECRETS = frozenset(f"TORCHRELAY_{name.upper()}" for name in SECRET_SETTINGS)


def plain_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that any program may need, without Torchrelay's and without credentials."""
    return {name: value for name, value in environment.items() if name in _PLAIN or name.startswith("LC_")}


def service_environment(environment: Mapping[str, str], *, reads_object_store: bool = False) -> dict[str, str]:
    """Everything but secrets. ``reads_object_store``: with the object store's credentials."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _SECRETS and (reads_object_store or not name.startswith(_STORE_CREDENTIALS))
    }
