"""A client that all threads of a test share: ``httpx.get`` reads the CA certificates at each call, for 35 ms of CPU."""

from __future__ import annotations

import httpx

from tests.support.wait import HANG_S

http = httpx.Client(timeout=HANG_S, limits=httpx.Limits(max_keepalive_connections=0))
