"""The servicer of ``control.v1.ParamStore``."""

from __future__ import annotations

import asyncio

from torchrelay.common.identity.callers import Caller, MethodCallers
from torchrelay.control.v1 import param_store_pb2_grpc
from torchrelay.param_store.grpc.copy_rpcs import CopyRpcs
from torchrelay.param_store.grpc.object_rpcs import ObjectRpcs
from torchrelay.param_store.grpc.upload_rpcs import UploadRpcs
from torchrelay.param_store.grpc.version_rpcs import VersionRpcs
from torchrelay.param_store.store import Store

_MAX_WRITTEN_ARCHIVES = 2
_SERVICE = "/torchrelay.control.v1.ParamStore"
_UPLOADS = ("BeginUpload", "DescribeUpload", "PutFile", "Commit", "AbortUpload")
_OBJECTS = ("PutObject", "ReadObject", "DeleteObject")
_VERSIONS = ("Describe", "ListVersions", "DeleteVersion", "DeleteUnnamed")
CALLERS: MethodCallers = {
    **{f"{_SERVICE}/{method}": {Caller.GATEWAY} for method in (*_UPLOADS, *_OBJECTS, *_VERSIONS)},
    f"{_SERVICE}/ReadFile": {Caller.GATEWAY, Caller.WORKER},
    **{f"{_SERVICE}/{method}": {Caller.WORKER} for method in ("Hold", "ReadCompiled", "WriteCompiled")},
    **{f"{_SERVICE}/{method}": {Caller.SCHEDULER} for method in ("Relay", "Drop", "WatchCopies", "Retain")},
}


class ParamStoreServicer(UploadRpcs, ObjectRpcs, VersionRpcs, CopyRpcs, param_store_pb2_grpc.ParamStoreServicer):
    """All RPCs of a store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._writing = asyncio.Semaphore(_MAX_WRITTEN_ARCHIVES)
