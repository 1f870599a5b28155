"""Writes .env for compose.yaml: new secrets, and all that derives from the cluster key.

python make_env.py [FILE]           needs torchrelay-common installed; an existing file is kept
python make_env.py --worker ID      prints what one more worker of host-1 needs, from .env
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

from torchrelay.common.callers import SCHEDULER_NODE, Caller, call_token
from torchrelay.common.keys import broker_password, derive_node_key
from torchrelay.common.net.nats_client import Subjects
from torchrelay.common.net.nats_permissions import (
    GATEWAY_USER,
    SCHEDULER_USER,
    NatsUser,
    authorization,
    gateway_user,
    scheduler_user,
    store_user,
    worker_user,
)

ENV = Path(__file__).parent / ".env"
STORE, WORKERS = "store-1", ("prefill-1", "decode-1")
NODES = {"STORE": STORE, "PREFILL": WORKERS[0], "DECODE": WORKERS[1]}
_SUBJECTS = Subjects()


def secrets_for_compose() -> dict[str, str]:
    """The variables of compose.yaml."""
    cluster_key = secrets.token_bytes(32)
    node_keys = {name: derive_node_key(cluster_key, node_id) for name, node_id in NODES.items()}
    users = {"SCHEDULER": SCHEDULER_USER, "GATEWAY": GATEWAY_USER, **NODES}
    return {
        "CLUSTER_KEY": cluster_key.hex(),
        **{f"{name}_NODE_KEY": key.hex() for name, key in node_keys.items()},
        **{f"NATS_{name}_PASSWORD": broker_password(cluster_key, "nats", user) for name, user in users.items()},
        "REDIS_PASSWORD": broker_password(cluster_key, "redis", GATEWAY_USER),
        "GATEWAY_SCHEDULER_TOKEN": call_token(derive_node_key(cluster_key, SCHEDULER_NODE), Caller.GATEWAY),
        "GATEWAY_STORE_TOKEN": call_token(node_keys["STORE"], Caller.GATEWAY),
        "WORKER_STORE_TOKEN": call_token(node_keys["STORE"], Caller.WORKER),
        "ADMIN_KEY": f"tra-{secrets.token_hex(32)}",
        "POSTGRES_PASSWORD": secrets.token_hex(16),
    }


def nats_users() -> Iterator[tuple[NatsUser, str]]:
    """Whom nats.conf lets in; their passwords are variables of its container."""
    yield scheduler_user(_SUBJECTS), "$NATS_SCHEDULER_PASSWORD"
    yield gateway_user(_SUBJECTS), "$NATS_GATEWAY_PASSWORD"
    for name, node_id in NODES.items():
        make = store_user if node_id == STORE else worker_user
        yield make(node_id, _SUBJECTS), f"$NATS_{name}_PASSWORD"


def print_worker(worker_id: str, env: Path = ENV) -> None:
    """What a worker beside those of compose.yaml needs."""
    known = dict(line.split("=", 1) for line in env.read_text().splitlines())
    cluster_key = bytes.fromhex(known["CLUSTER_KEY"])
    password = broker_password(cluster_key, "nats", worker_id)
    print(f"TORCHRELAY_WORKER_ID={worker_id}")
    print(f"TORCHRELAY_NODE_KEY={derive_node_key(cluster_key, worker_id).hex()}")
    print(f"TORCHRELAY_STORE_TOKEN={known['WORKER_STORE_TOKEN']}")
    print(f"TORCHRELAY_NATS_URL=nats://{worker_id}:{password}@nats:4222")
    print("\nand its user in nats.conf:\n")
    print(authorization([(worker_user(worker_id, _SUBJECTS), password)]))


def main() -> None:
    if sys.argv[1:2] == ["--worker"] and len(sys.argv) == 3:
        print_worker(sys.argv[2])
        return
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ENV
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        sys.exit(f"{path} exists and holds the keys of a cluster: remove it yourself to begin anew")
    with open(descriptor, "w") as file:
        file.writelines(f"{name}={value}\n" for name, value in secrets_for_compose().items())
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
