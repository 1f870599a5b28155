"""`torchrelay-credentials`: derives the credentials of one process from the cluster key, into a file of its settings.

For processes that share the cluster key's machine and must not read it: on Kubernetes it runs before the service, in a
container of its own, with the cluster key in ``TORCHRELAY_CLUSTER_KEY``. The service reads the file by
``TORCHRELAY_CONFIG``.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from torchrelay.common.identity.callers import SCHEDULER_NODE, Caller, call_token
from torchrelay.common.identity.keys import derive_compiled_key, derive_node_key

_NODE_ID = re.compile("[A-Za-z0-9_-]{1,63}")


def node_id(name: str) -> str:
    """The id of a store or worker with the name of its host or pod: such a name has no underscores, an id no dots.

    Raises ``ValueError`` for a name of more than 63 characters.
    """
    made = name.replace(".", "_")
    if "_" in name or not _NODE_ID.fullmatch(made):
        raise ValueError(f"{name!r} cannot be an id: it needs 1 to 63 letters, digits, dots and hyphens")
    return made


def store_credentials(cluster_key: bytes, name: str) -> dict[str, str]:
    """The settings by which the store of this name is known."""
    store_id = node_id(name)
    return {"store_id": store_id, "node_key": derive_node_key(cluster_key, store_id).hex()}


def worker_credentials(cluster_key: bytes, name: str, store: str) -> dict[str, str]:
    """The settings by which a worker is known, also to the store of its host."""
    worker_id = node_id(name)
    store_token = call_token(derive_node_key(cluster_key, node_id(store)), Caller.WORKER)
    return {
        "worker_id": worker_id,
        "node_key": derive_node_key(cluster_key, worker_id).hex(),
        "store_token": store_token,
        "compiled_key": derive_compiled_key(cluster_key).hex(),
    }


def gateway_credentials(cluster_key: bytes, store: str) -> dict[str, str]:
    """The tokens of a gateway, for the scheduler and for the store that uploads go to."""
    return {
        "scheduler_token": call_token(derive_node_key(cluster_key, SCHEDULER_NODE), Caller.GATEWAY),
        "store_token": call_token(derive_node_key(cluster_key, node_id(store)), Caller.GATEWAY),
    }


def write_settings(path: Path, settings: dict[str, str]) -> None:
    """Writes a TOML file that only its owner can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w") as file:
        file.writelines(f'{name} = "{value}"\n' for name, value in settings.items())


def main() -> None:
    """Entry point: status 2 for a usage error, 1 for a key or name that cannot be used."""
    parser = argparse.ArgumentParser("torchrelay-credentials", description=(__doc__ or "").partition("\n")[0])
    parts = parser.add_subparsers(dest="part", required=True)
    for part in (Caller.STORE, Caller.WORKER, Caller.GATEWAY):
        arguments = parts.add_parser(part)
        arguments.add_argument("file", type=Path, help="where the settings are written, as TOML")
        if part != Caller.GATEWAY:
            arguments.add_argument("--name", required=True, help="name of this process's host or pod")
        if part != Caller.STORE:
            arguments.add_argument("--store", required=True, help="name of the store that it calls")
    given = vars(parser.parse_args())
    part, file = given.pop("part"), given.pop("file")
    derive: dict[str, Callable[..., dict[str, str]]] = {
        Caller.STORE: store_credentials,
        Caller.WORKER: worker_credentials,
        Caller.GATEWAY: gateway_credentials,
    }
    try:
        cluster_key = bytes.fromhex(os.environ.get("TORCHRELAY_CLUSTER_KEY", ""))
    except ValueError:
        sys.exit("TORCHRELAY_CLUSTER_KEY is not in hex")
    try:
        write_settings(file, derive[part](cluster_key, **given))
    except (ValueError, OSError) as error:
        sys.exit(str(error))
