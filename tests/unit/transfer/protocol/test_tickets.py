"""A ticket opens one buffer at one holder for one receiver until it expires, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.transfer.loopback_holders import CLUSTER_KEY, ISSUER
from torchrelay.transfer.errors import TicketExpired, TicketRefused, WrongHolder
from torchrelay.transfer.protocol.tickets import (
    Ticket,
    TicketIssuer,
    derive_node_key,
    prove_session,
    unseal_session,
    verify_ticket,
)

HOLDER_KEY = derive_node_key(CLUSTER_KEY, "host-h")
RECEIVER_KEY = derive_node_key(CLUSTER_KEY, "host-r")


def make_ticket() -> Ticket:
    return ISSUER.issue("pack-1", "host-h", "host-r", expires_unix_ms=1_000)


def test_holder_and_receiver_derive_same_session_key() -> None:
    ticket = make_ticket()
    session = verify_ticket(ticket, "host-h", HOLDER_KEY, now_unix_ms=999)
    assert session == unseal_session(ticket, RECEIVER_KEY)
    assert len(session) == 32


def test_ticket_reusable_with_its_own_session() -> None:
    ticket = make_ticket()
    first, again = (verify_ticket(ticket, "host-h", HOLDER_KEY, now_unix_ms=at) for at in (0, 999))
    assert first == again != verify_ticket(make_ticket(), "host-h", HOLDER_KEY, now_unix_ms=0)


def test_other_receiver_cannot_unseal_session() -> None:
    ticket = make_ticket()
    session = verify_ticket(ticket, "host-h", HOLDER_KEY, now_unix_ms=0)
    assert unseal_session(ticket, derive_node_key(CLUSTER_KEY, "host-x")) != session


def test_another_holder_refuses() -> None:
    with pytest.raises(WrongHolder):
        verify_ticket(make_ticket(), "host-x", derive_node_key(CLUSTER_KEY, "host-x"), now_unix_ms=0)
    with pytest.raises(TicketRefused, match="MAC"):
        verify_ticket(make_ticket(), "host-h", derive_node_key(CLUSTER_KEY, "host-x"), now_unix_ms=0)


def test_ticket_expires() -> None:
    with pytest.raises(TicketExpired, match="500 ms ago"):
        verify_ticket(make_ticket(), "host-h", HOLDER_KEY, now_unix_ms=1_500)
    with pytest.raises(TicketExpired):
        verify_ticket(make_ticket(), "host-h", HOLDER_KEY, now_unix_ms=1_000)


def test_tickets_of_another_cluster_are_refused() -> None:
    foreign = TicketIssuer(b"x" * 32).issue("pack-1", "host-h", "host-r", 1_000)
    with pytest.raises(TicketRefused):
        verify_ticket(foreign, "host-h", HOLDER_KEY, now_unix_ms=0)


def test_short_cluster_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 16 bytes"):
        derive_node_key(b"short", "host-h")


@given(st.data())
def test_any_change_is_noticed(data: st.DataObject) -> None:
    ticket = make_ticket()
    name = data.draw(
        st.sampled_from(
            [
                "buffer_id",
                "receiver_id",
                "expires_unix_ms",
                "nonce",
                "sealed_session",
                "mac",
            ]
        )
    )
    value = getattr(ticket, name)
    if isinstance(value, bytes):
        place, bit = data.draw(st.integers(0, len(value) - 1)), data.draw(st.integers(0, 7))
        changed: object = value[:place] + bytes([value[place] ^ 1 << bit]) + value[place + 1 :]
    elif isinstance(value, str):
        changed = data.draw(st.text(max_size=20).filter(lambda text: text != value))
    else:
        changed = data.draw(st.integers(0, 1 << 62).filter(lambda number: number != value))
    setattr(ticket, name, changed)
    with pytest.raises(TicketRefused, match="MAC"):
        verify_ticket(ticket, "host-h", HOLDER_KEY, now_unix_ms=0)


def test_fields_cannot_be_shifted_into_each_other() -> None:
    ticket = make_ticket()
    ticket.buffer_id, ticket.receiver_id = "pack-1host", "-r"
    with pytest.raises(TicketRefused):
        verify_ticket(ticket, "host-h", HOLDER_KEY, now_unix_ms=0)


def test_ticket_without_session_refused_by_receiver() -> None:
    with pytest.raises(TicketRefused):
        unseal_session(Ticket(buffer_id="pack-1"), RECEIVER_KEY)


def test_proof_valid_for_one_side_and_challenge() -> None:
    session = verify_ticket(make_ticket(), "host-h", HOLDER_KEY, now_unix_ms=0)
    proofs = {prove_session(session, side, bytes([n]) * 32) for side in (b"holder", b"receiver") for n in range(3)}
    assert len(proofs) == 6
