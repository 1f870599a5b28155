"""The pace of ``pace.py`` put upon a TCP socket of Linux: its counters read, its send buffer set."""

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
SAMPLE_INTERVAL_S = 0.001  # between two looks, or a round trip when that is longer
_INFO = struct.Struct("=8x24I4Q4I")  # the struct tcp_info of linux/tcp.h up to tcpi_min_rtt (Linux 4.6)
_RTT_US, _SEGMENTS_IN, _MIN_RTT_US = 15, 29, 31  # the places in it
_SO_BUF_LOCK = 72  # Linux 5.14
_KERNEL_AUTOTUNING = 0


class PacedSender:
    """Sends on a socket and keeps what is on the way within a window; used by one thread."""

    def __init__(self, connected: socket.socket, transfer_class: TransferClass) -> None:
        self._socket = connected
        self._sending_s = 0.0
        counters = self._counters(time.monotonic())
        self._sample_at = counters.at_s + SAMPLE_INTERVAL_S
        self._window = CongestionWindow(transfer_class, counters)
        self._set_window()

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        """Like ``socket.sendmsg``, for the beginning of the parts: what it takes until it is time to look around."""
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
        # The kernel doubles what it is given, and tells the double.
        half = self._window.window_bytes // 2
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, half)
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < 2 * half:
            # More than net.core.wmem_max: a window so large is left to the kernel, which goes as far as tcp_wmem says.
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, _KERNEL_AUTOTUNING)


def can_pace(connected: socket.socket) -> bool:
    """Whether there is a way to share and the system tells what is needed: not within a host, not outside Linux."""
    here, there = connected.getsockname(), connected.getpeername()
    return sys.platform == "linux" and bool(here[0] != there[0])
