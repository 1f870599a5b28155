from __future__ import annotations

from torchrelay.gateway.limits.circuit import Circuit


def test_open_circuit_admits_a_probe_at_a_time() -> None:
    circuit = Circuit(open_s=1.0)
    assert circuit.is_closed and all(circuit.may_ask(0.0) for _ in range(3))
    circuit.silent(10.0)
    assert not circuit.is_closed and not circuit.may_ask(10.99)
    assert [circuit.may_ask(11.0) for _ in range(3)] == [True, False, False]
    circuit.silent(11.5)
    assert not circuit.may_ask(12.4)
    assert circuit.may_ask(12.5)
    circuit.answered()
    assert circuit.is_closed and all(circuit.may_ask(12.6) for _ in range(3))


def test_lost_probe_is_followed_by_another() -> None:
    circuit = Circuit(open_s=1.0)
    circuit.silent(0.0)
    assert circuit.may_ask(1.0)
    assert not circuit.may_ask(1.9)
    assert circuit.may_ask(2.0)
