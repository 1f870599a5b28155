from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchrelay.gateway.auth.key_format import key_id_of, mac_of, new_token


def test_a_new_token_carries_its_id_and_no_two_are_alike() -> None:
    key_id, token = new_token()
    assert token.startswith(f"tr-{key_id}-")
    assert key_id_of(token) == key_id
    assert new_token()[1] != token


@given(st.integers(min_value=0, max_value=58), st.sampled_from("0123456789abcdefghjkmnpqrstvwxyz"))
def test_one_wrong_character_is_refused_without_a_look_up(place: int, other: str) -> None:
    _, token = new_token()
    place %= len(token)
    changed = token[:place] + other + token[place + 1 :]
    assert (key_id_of(changed) is None) == (changed != token)


@given(st.text(max_size=80))
def test_no_text_breaks_it(text: str) -> None:
    assert key_id_of(text) is None


def test_the_mac_depends_on_token_and_pepper() -> None:
    macs = {mac_of(pepper, token) for pepper in (b"a", b"b") for token in ("tr-1", "tr-2")}
    assert len(macs) == 4
