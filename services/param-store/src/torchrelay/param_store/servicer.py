"""``control.v1.ParamStore``: its calls by concern, put together."""

from __future__ import annotations

from torchrelay.control.v1 import param_store_pb2_grpc
from torchrelay.param_store.copy_calls import CopyCalls
from torchrelay.param_store.store import Store
from torchrelay.param_store.upload_calls import UploadCalls
from torchrelay.param_store.version_calls import VersionCalls


class ParamStoreServicer(UploadCalls, VersionCalls, CopyCalls, param_store_pb2_grpc.ParamStoreServicer):
    """Serves one store."""

    def __init__(self, store: Store) -> None:
        self.store = store
