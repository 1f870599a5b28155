"""How long a decode worker takes to have the KV of a prompt once its prefill has ended, by pair of hosts.

Layers stream while later ones are computed, so this is the rest that is left then, and small beside the whole. It is
learned from the phases of requests that are over.
"""

from __future__ import annotations

from collections import OrderedDict

from torchrelay.common.online_fit import OnlineFit

_FIXED_S = 0.002  # offer, reservation and the last layer's KV
_REMAINING_SHARE = 0.05  # of the KV is still on its way when prefill ends
_MAX_PAIRS = 4096
_MIN_S = 1e-4  # two hosts' clocks: less, or below zero, says no more than that it was quick
_WINDOW = 32


class KvTransferTimes:
    """Learned fixed time and time per byte, by (prefill host, decode host)."""

    def __init__(self) -> None:
        self._fits: OrderedDict[tuple[str, str], OnlineFit] = OrderedDict()

    def observe(self, prefill_host: str, decode_host: str, kv_bytes: int, measured_s: float) -> None:
        """The KV was there so long after the end of prefill."""
        key = (prefill_host, decode_host)
        fit = self._fits.setdefault(key, OnlineFit((1.0, 1 / (16 << 20)), _WINDOW))
        self._fits.move_to_end(key)
        if len(self._fits) > _MAX_PAIRS:
            self._fits.popitem(last=False)
        fit.observe((1.0, kv_bytes), max(measured_s, _MIN_S))

    def predict_s(self, prefill_host: str, decode_host: str, kv_bytes: int, default_bytes_per_s: float) -> float:
        """From the end of prefill on; by the default rate between hosts that have not handed anything over yet."""
        fit = self._fits.get((prefill_host, decode_host))
        if fit is None:
            return _FIXED_S + _REMAINING_SHARE * kv_bytes / default_bytes_per_s
        return fit.predict((1.0, kv_bytes))
