"""Limits of a request's size and of the time in which its head and body arrive. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Limits of each request; each is a setting of the gateway (``max_head_bytes``, ``body_silence_s``, ...)."""

    head_bytes: int = 16 << 10  # the request line and all headers
    num_headers: int = 100
    url_bytes: int = 8 << 10
    head_s: float = 10.0  # from the connection, or the first byte on a used one, to the end of the headers
    silence_s: float = 30.0  # without a byte of a body that the gateway is ready to read
    min_bytes_per_s: int = 1024  # average of a body, after a grace of silence_s


@dataclass(frozen=True, slots=True)
class BodyProgress:
    """How a body arrives; counts only time in which the gateway was ready to read."""

    num_bytes: int = 0
    waited_s: float = 0.0
    silent_s: float = 0.0

    def after(self, elapsed_s: float, num_bytes: int) -> BodyProgress:
        """The progress ``elapsed_s`` later, with ``num_bytes`` received in all."""
        silent_s = 0.0 if num_bytes > self.num_bytes else self.silent_s + elapsed_s
        return BodyProgress(num_bytes, self.waited_s + elapsed_s, silent_s)

    def fault(self, limits: ReadLimits) -> str | None:
        """Why the gateway gives the body up; None: it arrives fast enough."""
        if self.silent_s >= limits.silence_s:
            return f"nothing of the body arrived for {limits.silence_s:g} s (setting body_silence_s)"
        if self.waited_s >= limits.silence_s + self.num_bytes / limits.min_bytes_per_s:
            rate = f"{limits.min_bytes_per_s:,} bytes per second"
            return f"the body arrived more slowly than {rate} (setting min_body_bytes_per_s)"
        return None
