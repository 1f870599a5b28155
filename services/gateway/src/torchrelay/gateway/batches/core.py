"""The nouns of batches. Imports nothing heavy.

    validating --> in_progress --> finalizing --> completed, or expired if its window ended first
         |   \\         `--cancel--> cancelling --> cancelled
         |    `--cancel-------------^
         `--> failed     a line of the input is malformed

A gateway runs a batch as long as it is in the batch's ``gateway_id`` and in the table of gateways. Lines get results
while the batch is in progress, each in the transaction that bills it (billing/line_results.py), whichever gateways run
it. The other states gather them in files.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MAX_LINES: Final = 50_000
MAX_FILE_BYTES: Final = 200_000_000
WINDOW_S: Final = 86_400


class Purpose(StrEnum):
    """The purposes of files, as OpenAI names them."""

    BATCH = "batch"
    OUTPUT = "batch_output"  # and errors


class BatchStatus(StrEnum):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


OPEN: Final = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING)


@dataclass(frozen=True, slots=True)
class StoredFile:
    file_id: str
    tenant_id: str
    filename: str
    purpose: Purpose
    num_bytes: int
    created_unix_us: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A row of the table."""

    batch_id: str
    tenant_id: str
    key_id: str
    endpoint: str
    input_file_id: str
    metadata: str  # JSON, as are the errors
    status: BatchStatus
    errors: str
    num_lines: int
    num_completed: int
    num_failed: int
    output_file_id: str | None
    error_file_id: str | None
    created_unix_us: int
    expires_unix_us: int
    in_progress_unix_us: int | None
    finalizing_unix_us: int | None
    completed_unix_us: int | None
    failed_unix_us: int | None
    expired_unix_us: int | None
    cancelling_unix_us: int | None
    cancelled_unix_us: int | None
    gateway_id: str

    def file_id(self, kind: str) -> str:
        """The id of the batch's file of results, ``out`` or ``err``, which every gateway gives it alike."""
        return f"file-{self.batch_id.removeprefix('batch-')}-{kind}"
