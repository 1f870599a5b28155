"""A peer that hangs is told from one that is slow or at rest."""

from __future__ import annotations

from torchrelay.common.liveness import SILENT_S, EngineProgress, Liveness


def test_silence_counts_from_last_message() -> None:
    peer = Liveness(10.0)
    assert not peer.is_silent(10.0 + SILENT_S) and peer.is_silent(10.1 + SILENT_S)
    peer.record_message(12.0)
    assert not peer.fault(12.0 + SILENT_S)
    assert peer.fault(12.1 + SILENT_S) == "was silent for 3 s"


def test_silence_before_listening_is_not_counted() -> None:
    peer = Liveness(0.0)
    peer.observe(EngineProgress(5, True), 1.0)
    peer.listening_since(60.0)
    assert not peer.fault(60.0 + SILENT_S) and peer.fault(60.1 + SILENT_S)
    peer.listening_since(0.0)  # what is past counts no more
    assert peer.fault(60.1 + SILENT_S)


def test_engine_without_advance_is_stalled_despite_messages() -> None:
    peer = Liveness(0.0)
    for tenth in range(1, 32):
        peer.observe(EngineProgress(7, True), tenth / 10)
    assert not peer.is_stalled(3.1)
    assert not peer.is_silent(3.2) and peer.fault(3.2) == "had work and made no step for 3.1 s"
    peer.observe(EngineProgress(8, True), 3.3)
    assert not peer.fault(3.3)


def test_predicted_long_step_is_not_stalled() -> None:
    peer = Liveness(0.0)
    for second in range(1, 10):
        peer.observe(EngineProgress(7, True, expected_s=5.0), second)
    assert not peer.fault(9.0) and peer.fault(9.1)


def test_idle_engine_is_never_stalled() -> None:
    peer = Liveness(0.0)
    for second in range(1, 60):
        peer.observe(EngineProgress(7, False), second)
    peer.observe(EngineProgress(7, True), 60.0)
    assert not peer.fault(60.0 + SILENT_S)
    assert peer.is_stalled(60.1 + SILENT_S)


def test_work_after_long_idleness_is_no_stall() -> None:
    """The peer was at rest and silent, or nobody looked: its first step has only begun."""
    peer = Liveness(0.0)
    peer.observe(EngineProgress(7, False), 1.0)
    peer.observe(EngineProgress(7, True), 100.0)
    assert not peer.fault(100.0)
    peer.observe(EngineProgress(7, True), 100.0 + SILENT_S)
    assert not peer.fault(100.0 + SILENT_S)
    peer.observe(EngineProgress(7, True), 100.1 + SILENT_S)
    assert peer.is_stalled(100.1 + SILENT_S)
