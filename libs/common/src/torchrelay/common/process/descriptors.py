"""Open files and sockets of a process: the soft limit that shells set is 1,024, whatever the system allows."""

from __future__ import annotations

import resource

_ENOUGH = 1 << 20  # some systems have no hard limit, and refuse to set none


def raise_descriptor_limit() -> int:
    """Raises the soft limit to the hard one, at most to a million; returns the limit that now holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _ENOUGH if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError):  # a system with a lower limit of its own than it says
        return soft
    return wanted
