"""A direction of a link, held to a rate by a token bucket."""

from __future__ import annotations

import math

from tests.lab.iproute import tc

# A veth hands over packets of up to 64 KiB whole, and a bucket smaller than one would cut them into frames, which costs
# CPU. One of a few milliseconds keeps the link busy while the kernel's timers are late; a larger one would let more
# bytes pass unshaped after each pause.
_MIN_BURST_BYTES = 128 * 1024
_BURST_S = 0.004
# How long a packet may wait for tokens before the queue is full and drops: a switch's buffer of ordinary depth.
_QUEUE_MS = 20


def burst_bytes(rate_mbit: float) -> int:
    """The bucket's size for a rate in Mbit/s."""
    return max(_MIN_BURST_BYTES, round(rate_mbit * 1e6 / 8 * _BURST_S))


def shape(namespace: str, device: str, rate_mbit: float) -> None:
    """Hold what leaves ``device`` to ``rate_mbit`` (10**6 bits/s, Ethernet headers included); math.inf lifts the limit.

    At an MTU of 1500, headers leave a TCP stream 0.957 of the rate.
    """
    if not rate_mbit > 0:
        raise ValueError(f"a link's rate must be above 0 Mbit/s, not {rate_mbit}; cut() stops a link")
    root = ("qdisc", "replace", "dev", device, "root")
    if math.isinf(rate_mbit):
        tc(namespace, *root, "noqueue")
        return
    rate = f"{round(rate_mbit * 1e6)}bit"
    tc(namespace, *root, "tbf", "rate", rate, "burst", f"{burst_bytes(rate_mbit)}b", "latency", f"{_QUEUE_MS}ms")
