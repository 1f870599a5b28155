"""Writes .env for compose.yaml: new secrets, and node keys derived from the cluster key.

python make_env.py [FILE]       needs torchrelay-transfer installed; an existing file is kept
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from torchrelay.transfer.protocol.tickets import derive_node_key

NODES = {"STORE_NODE_KEY": "store-1", "PREFILL_NODE_KEY": "prefill-1", "DECODE_NODE_KEY": "decode-1"}


def secrets_for_compose() -> dict[str, str]:
    """The variables of compose.yaml."""
    cluster_key = secrets.token_bytes(32)
    nodes = {name: derive_node_key(cluster_key, node_id).hex() for name, node_id in NODES.items()}
    admin_key = f"tra-{secrets.token_hex(32)}"
    password = secrets.token_hex(16)
    return {"CLUSTER_KEY": cluster_key.hex(), **nodes, "ADMIN_KEY": admin_key, "POSTGRES_PASSWORD": password}


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / ".env"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        sys.exit(f"{path} exists and holds the keys of a cluster: remove it yourself to begin anew")
    with open(descriptor, "w") as file:
        file.writelines(f"{name}={value}\n" for name, value in secrets_for_compose().items())
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
