"""Applies a ``CongestionWindow`` to a TCP socket on Linux: reads its counters, sets its send buffer."""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Sequence

from torchrelay.transfer.transport.congestion_window import CongestionWindow, ConnectionCounters
from torchrelay.transfer.transport.interface import TransferClass
from torchrelay.transfer.transport.iovec import take_prefix

MAX_SLICE_BYTES = 1 << 20
SAMPLE_INTERVAL_S = 0.001  # or a round trip, if longer
_INFO = struct.Struct("=8x24I4Q4I")  # the struct tcp_info of linux/tcp.h up to tcpi_min_rtt (Linux 4.6)
_RTT_US, _SEGMENTS_IN, _MIN_RTT_US = 15, 29, 31  # indices into it
_SO_BUF_LOCK = 72  # Linux 5.14
_KERNEL_AUTOTUNING = 0


class PacedSender:
    """Sends on a socket and keeps the bytes in flight within the window. For a single thread."""

    def __init__(self, connected: socket.socket, transfer_class: TransferClass) -> None:
        self._socket = connected
        self._sending_s = 0.0
        counters = self._counters(time.monotonic())
        self._sample_at = counters.at_s + SAMPLE_INTERVAL_S
        self._window = CongestionWindow(transfer_class, counters)
        self._set_window()

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        """Sends like ``socket.sendmsg``, but at most a window or slice of the parts."""
        begin = time.monotonic()
        if begin >= self._sample_at:
            self._sample(begin)
        try:
            return self._socket.sendmsg(take_prefix(parts, min(self._window.window_bytes, MAX_SLICE_BYTES)))
        finally:
            self._sending_s += time.monotonic() - begin

    def _sample(self, now: float) -> None:
        counters = self._counters(now)
        self._sample_at = now + max(SAMPLE_INTERVAL_S, counters.rtt_s)
        before = self._window.window_bytes
        if self._window.observe(counters) != before:
            self._set_window()

    def _counters(self, now: float) -> ConnectionCounters:
        info = _INFO.unpack(self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
        return ConnectionCounters(
            now, info[_RTT_US] * 1e-6, info[_MIN_RTT_US] * 1e-6, info[_SEGMENTS_IN], self._sending_s
        )

    def _set_window(self) -> None:
        # The kernel doubles the value that is set, and reports the doubled value.
        half = self._window.window_bytes // 2
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, half)
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < 2 * half:
            # Beyond net.core.wmem_max the kernel's autotuning sets the window, up to tcp_wmem.
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, _KERNEL_AUTOTUNING)


def can_pace(connected: socket.socket) -> bool:
    """Whether pacing applies: only on Linux, and not within a host, where there is no link to share."""
    here, there = connected.getsockname(), connected.getpeername()
    return sys.platform == "linux" and bool(here[0] != there[0])
