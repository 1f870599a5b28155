from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchrelay.gateway.auth.key_format import key_id_of, mac_of, new_token


def test_tokens_are_unique_and_carry_their_id() -> None:
    key_id, token = new_token()
    assert token.startswith(f"tr-{key_id}-")
    assert key_id_of(token) == key_id
    assert new_token()[1] != token


@given(st.integers(min_value=0, max_value=58), st.sampled_from("0123456789abcdefghjkmnpqrstvwxyz"))
def test_mistyped_key_fails_its_checksum(place: int, other: str) -> None:
    _, token = new_token()
    place %= len(token)
    changed = token[:place] + other + token[place + 1 :]
    assert (key_id_of(changed) is None) == (changed != token)


@given(st.text(max_size=80))
def test_any_text_is_parsed_safely(text: str) -> None:
    assert key_id_of(text) is None


def test_mac_depends_on_token_and_pepper() -> None:
    macs = {mac_of(pepper, token) for pepper in (b"a", b"b") for token in ("tr-1", "tr-2")}
    assert len(macs) == 4
