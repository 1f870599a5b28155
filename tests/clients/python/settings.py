"""The settings of a client's script, and the lines of JSON by which it reports."""

from __future__ import annotations

import json
import os

URL = os.environ["TORCHRELAY_URL"] + "/v1"
KEY = os.environ["TORCHRELAY_KEY"]
MODEL = os.environ["TORCHRELAY_MODEL"]
EMBEDDING_MODEL = os.environ["TORCHRELAY_EMBEDDING_MODEL"]


def report(name: str, value: object) -> None:
    print(json.dumps({name: value}))
