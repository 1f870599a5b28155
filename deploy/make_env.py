"""Writes .env for compose.yaml: new secrets, and all that derives from the cluster key.

../.venv/bin/python make_env.py [FILE]        an existing file gets what it lacks
../.venv/bin/python make_env.py --worker ID   prints what one more worker of host-1 needs, from .env
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

try:
    from torchrelay.common.identity.callers import SCHEDULER_NODE, Caller, call_token
    from torchrelay.common.identity.keys import broker_password, derive_compiled_key, derive_node_key
    from torchrelay.common.net.nats_client import Subjects
    from torchrelay.common.net.nats_permissions import (
        GATEWAY_USER,
        SCHEDULER_USER,
        NatsUser,
        gateway_user,
        scheduler_user,
        store_user,
        user_entry,
        worker_user,
    )
except ModuleNotFoundError as error:
    sys.exit(
        f"{error}: run ../.venv/bin/python make_env.py after `make setup`, or install torchrelay-common from dist/"
    )

ENV = Path(__file__).parent / ".env"
STORE, WORKERS = "store-1", ("prefill-1", "decode-1")
NODES = {"STORE": STORE, "PREFILL": WORKERS[0], "DECODE": WORKERS[1]}
_SUBJECTS = Subjects()


def secrets_for_compose(cluster_key: bytes | None = None) -> dict[str, str]:
    """The variables of compose.yaml; without a cluster key, those of a new cluster."""
    cluster_key = cluster_key or secrets.token_bytes(32)
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
        "COMPILED_KEY": derive_compiled_key(cluster_key).hex(),
        **random_secrets(),
    }


def random_secrets() -> dict[str, str]:
    """Secrets that do not derive from the cluster key."""
    return {"ADMIN_KEY": f"tra-{secrets.token_hex(32)}", "POSTGRES_PASSWORD": secrets.token_hex(16)}


def parse_env(text: str) -> dict[str, str]:
    """The variables that have a value; of two lines the last counts, as for compose."""
    lines = [line.strip() for line in text.splitlines()]
    pairs = [line.removeprefix("export ").partition("=") for line in lines if "=" in line and line[0] != "#"]
    known = {name.strip(): value.strip().strip("'\"") for name, _, value in pairs}
    return {name: value for name, value in known.items() if value}


def cluster_key_in(known: Mapping[str, str], env: Path) -> bytes:
    """Ends the program when there is none, or one that is damaged."""
    try:
        return bytes.fromhex(known["CLUSTER_KEY"])
    except KeyError:
        sys.exit(f"{env} has no CLUSTER_KEY: put it back, or move the file away to begin a new cluster")
    except ValueError:
        sys.exit(f"CLUSTER_KEY in {env} is not in hex: put the old one back")


def complete(env: Path) -> None:
    """Appends the variables that an existing file lacks, and keeps the others."""
    with env.open("r+") as file:
        os.fchmod(file.fileno(), 0o600)
        text = file.read()
        known = parse_env(text)
        wanted = secrets_for_compose(cluster_key_in(known, env))
        added = {name: value for name, value in wanted.items() if name not in known}
        if text and not text.endswith("\n"):
            file.write("\n")
        file.writelines(f"{name}={value}\n" for name, value in added.items())
    print(f"{env} exists, its values are kept; added: {', '.join(added) or 'nothing, it is complete'}")
    if at_random := sorted(random_secrets().keys() & added.keys()):
        print(f"{', '.join(at_random)}: new, at random; what was in use before is no longer known")


def nats_users() -> Iterator[tuple[NatsUser, str]]:
    """Users in nats.conf; their passwords are variables of its container."""
    yield scheduler_user(_SUBJECTS), "$NATS_SCHEDULER_PASSWORD"
    yield gateway_user(_SUBJECTS), "$NATS_GATEWAY_PASSWORD"
    for name, node_id in NODES.items():
        make = store_user if node_id == STORE else worker_user
        yield make(node_id, _SUBJECTS), f"$NATS_{name}_PASSWORD"


def worker_id(text: str) -> str:
    """An id that also fits as a service name, as the beginning of a variable and as a word of a NATS subject."""
    if re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", text) is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not 1 to 63 lower-case letters, digits and '-', with a letter first and no '-' last"
        )
    return text


def print_worker(worker_id: str, env: Path = ENV) -> None:
    """Prints the settings of a worker that compose.yaml does not list, by file: secrets are in .env alone."""
    if not env.exists():
        sys.exit(f"{env} does not exist: run make_env.py without --worker first")
    known = parse_env(env.read_text())
    cluster_key = cluster_key_in(known, env)
    variable = re.sub(r"[^A-Z0-9]", "_", worker_id.upper())
    password, node_key = f"NATS_{variable}_PASSWORD", f"{variable}_NODE_KEY"
    added = {
        password: broker_password(cluster_key, "nats", worker_id),
        node_key: derive_node_key(cluster_key, worker_id).hex(),
    }
    is_taken = worker_id in {user.name for user, _ in nats_users()}
    if is_taken or any(known.get(name, value) != value for name, value in added.items()):
        sys.exit(f"{worker_id}, or the variable {password}, is another's already: choose another id")

    print("# .env:")
    for name, value in added.items():
        print(f"{name}={value}")
    print("\n# compose.yaml, environment of nats:")
    print(f"      {password}: {_required(password, worker_id)}")
    print("\n# compose.yaml, environment of the new worker, in place of the copied worker's variables:")
    print(f"      TORCHRELAY_WORKER_ID: {worker_id}")
    print(f"      TORCHRELAY_ADVERTISE_HOST: {worker_id}  # the name of the new service")
    print(f"      TORCHRELAY_NATS_URL: nats://{worker_id}:{_required(password, worker_id)}@nats:4222")
    print(f"      TORCHRELAY_NODE_KEY: {_required(node_key, worker_id)}")
    print("\n# nats.conf, one more entry of users:")
    print(user_entry(worker_user(worker_id, _SUBJECTS), f"${password}"))


def _required(variable: str, worker_id: str) -> str:
    return f"${{{variable}:?run make_env.py --worker {worker_id}}}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Writes secrets for compose.yaml; an existing file gets what it lacks."
    )
    parser.add_argument("--worker", type=worker_id, metavar="ID", help="print what one more worker needs, from FILE")
    parser.add_argument("file", type=Path, nargs="?", default=ENV, metavar="FILE", help="default: .env in this folder")
    arguments = parser.parse_args()
    if arguments.worker is not None:
        print_worker(arguments.worker, arguments.file)
        return
    path = arguments.file
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        complete(path)
        return
    with open(descriptor, "w") as file:
        file.writelines(f"{name}={value}\n" for name, value in secrets_for_compose().items())
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
