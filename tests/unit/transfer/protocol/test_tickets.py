"""A ticket opens one buffer at one holder for one receiver until it expires, and nothing else."""

from __future__ import annotations

import pytest

from tests.unit.transfer.loopback_holders import CLUSTER_KEY, ISSUER
from torchrelay.transfer.errors import TicketExpired, TicketRefused, WrongHolder
from torchrelay.transfer.protocol.tickets import Ticket, derive_node_key, prove_session, unseal_session, verify_ticket

HOLDER_KEY = derive_node_key(CLUSTER_KEY, "host-h")
RECEIVER_KEY, OTHER_KEY = derive_node_key(CLUSTER_KEY, "host-r"), derive_node_key(CLUSTER_KEY, "host-x")


def make_ticket() -> Ticket:
    return ISSUER.issue("pack-1", "host-h", "host-r", expires_unix_ms=1_000)


def test_session_is_the_receivers_and_reusable() -> None:
    ticket = make_ticket()
    first, again = (verify_ticket(ticket, "host-h", HOLDER_KEY, now_unix_ms=at) for at in (0, 999))
    assert first == again == unseal_session(ticket, RECEIVER_KEY) and len(first) == 32
    assert first != verify_ticket(make_ticket(), "host-h", HOLDER_KEY, now_unix_ms=0)
    assert first != unseal_session(ticket, OTHER_KEY)
    with pytest.raises(TicketRefused):
        unseal_session(Ticket(buffer_id="pack-1"), RECEIVER_KEY)


@pytest.mark.parametrize(
    ("holder", "key", "now_unix_ms", "error", "said"),
    [
        ("host-x", OTHER_KEY, 0, WrongHolder, "ticket"),
        ("host-h", OTHER_KEY, 0, TicketRefused, "MAC"),
        ("host-h", HOLDER_KEY, 1_500, TicketExpired, "500 ms ago"),
        ("host-h", HOLDER_KEY, 1_000, TicketExpired, "ms ago"),
        ("host-h", derive_node_key(b"x" * 32, "host-h"), 0, TicketRefused, "MAC"),
    ],
)
def test_other_holders_clusters_and_times_refuse(
    holder: str, key: bytes, now_unix_ms: int, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        verify_ticket(make_ticket(), holder, key, now_unix_ms=now_unix_ms)


def test_short_cluster_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 16 bytes"):
        derive_node_key(b"short", "host-h")


def test_any_change_is_noticed() -> None:
    """Another bit of any byte, another text or number."""
    good = make_ticket()
    changes: list[tuple[str, object]] = [("buffer_id", ""), ("buffer_id", "pack-2"), ("receiver_id", "host-R")]
    changes += [("expires_unix_ms", 0), ("expires_unix_ms", 1_001), ("expires_unix_ms", 1 << 62)]
    for name in ("nonce", "sealed_session", "mac"):
        value: bytes = getattr(good, name)
        for place in range(len(value)):
            changed = value[:place] + bytes([value[place] ^ 1 << place % 8]) + value[place + 1 :]
            changes.append((name, changed))
        changes += [(name, value[:-1]), (name, value + bytes(1))]
    for name, other in changes:
        ticket = Ticket.FromString(good.SerializeToString())
        setattr(ticket, name, other)
        with pytest.raises(TicketRefused, match="MAC"):
            verify_ticket(ticket, "host-h", HOLDER_KEY, now_unix_ms=0)


def test_fields_cannot_be_shifted_into_each_other() -> None:
    ticket = make_ticket()
    ticket.buffer_id, ticket.receiver_id = "pack-1host", "-r"
    with pytest.raises(TicketRefused):
        verify_ticket(ticket, "host-h", HOLDER_KEY, now_unix_ms=0)


def test_proof_valid_for_one_side_and_challenge() -> None:
    session = verify_ticket(make_ticket(), "host-h", HOLDER_KEY, now_unix_ms=0)
    proofs = {prove_session(session, side, bytes([n]) * 32) for side in (b"holder", b"receiver") for n in range(3)}
    assert len(proofs) == 6
