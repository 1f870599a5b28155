"""Time from the end of prefill until the decode worker has the KV, by pair of hosts.

Layers stream while later ones are computed, so little of the KV is left to send by then. Learned from the phases of
finished requests.
"""

from __future__ import annotations

from torchrelay.common.latency.online_fit import OnlineFit
from torchrelay.common.recent import Recent

_FIXED_S = 0.002  # offer, reservation and the last layer's KV
_REMAINING_SHARE = 0.05  # of the KV, still to be sent when prefill ends
_MAX_PAIRS = 32_768  # more than are in use at once: a large model has as many as its prefill times its decode hosts
_MIN_S = 1e-4  # the measured time is a difference of two durations, which is meaningless below this
_WINDOW = 32


class KvTransferTimes:
    """Learned fixed time and time per byte, by (prefill host, decode host)."""

    def __init__(self) -> None:
        self._fits: Recent[tuple[str, str], OnlineFit] = Recent(_MAX_PAIRS)

    def observe(self, prefill_host: str, decode_host: str, kv_bytes: int, measured_s: float) -> None:
        """Learns from a transfer; ``measured_s``: from the end of prefill until the decode worker had the KV."""
        key = (prefill_host, decode_host)
        fit = self._fits.get(key) or OnlineFit((1.0, 1 / (16 << 20)), _WINDOW)
        self._fits[key] = fit
        fit.observe((1.0, kv_bytes), max(measured_s, _MIN_S))

    def predict_s(self, prefill_host: str, decode_host: str, kv_bytes: int, default_bytes_per_s: float) -> float:
        """Time from the end of prefill on; uses the default rate for a pair of hosts without a transfer yet."""
        fit = self._fits.get((prefill_host, decode_host))
        if fit is None:
            return _FIXED_S + _REMAINING_SHARE * kv_bytes / default_bytes_per_s
        return fit.predict((1.0, kv_bytes))
