"""The source of a version: a digest of the declared files, of this release, and how the weights are published.

The packer is deterministic, so within a release the same source is packed to the same version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from importlib.metadata import version

from torchrelay.control.v1 import param_store_pb2


def source_of(files: Iterable[param_store_pb2.DeclaredFile], quantize: str) -> str:
    """The source of an upload of these files."""
    declared = sorted((file.path, file.num_bytes, file.sha256) for file in files)
    content = json.dumps([version("torchrelay-gateway"), declared])
    return quantized(hashlib.sha256(content.encode()).hexdigest(), quantize)


def quantized(source: str, quantize: str) -> str:
    """The source of the same files whose weights become ``quantize``: "int8", or empty. An upload that an earlier
    release began has none.
    """
    return source and f"{source.partition('+')[0]}+{quantize}"
