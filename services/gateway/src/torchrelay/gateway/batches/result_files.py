"""The end of a batch: its results, in the order of its lines, become files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, NotFound
from torchrelay.gateway.batches.core import Batch, BatchStatus, Purpose, StoredFile
from torchrelay.gateway.batches.files import Files
from torchrelay.gateway.batches.lines import missing_line, result_line
from torchrelay.gateway.batches.table import Batches

_RESULTS_AT_ONCE: Final = 8  # in memory, of up to 8 MiB each
_EXPIRED: Final = ("batch_expired", "the request was not run before the batch's window ended")
_CANCELLED: Final = ("batch_cancelled", "the request was not run before the batch was cancelled")
Lines = Callable[[], AsyncIterator[tuple[int, bytes]]]


class _Id(msgspec.Struct):
    custom_id: str


_IDS = msgspec.json.Decoder(_Id)


async def end_batch(batches: Batches, files: Files, batch: Batch, gateway_id: str, lines: Lines) -> None:
    """Stores the files of a batch that takes no more results, and ends it. Another gateway may repeat it."""
    num_completed, num_failed = (await batches.counts([batch]))[batch.batch_id]
    num_results = num_completed + num_failed
    was_cancelled, has_begun = batch.cancelling_unix_us is not None, batch.in_progress_unix_us is not None
    is_complete = num_results == batch.num_lines
    status = BatchStatus.COMPLETED if is_complete else BatchStatus.EXPIRED
    error = _CANCELLED if was_cancelled else _EXPIRED

    async def stored(kind: str, is_wanted: bool) -> StoredFile | None:
        if not (is_wanted and has_begun):  # a batch that never began may have lines without an id
            return None
        name = f"{batch.batch_id}_{'output' if kind == 'out' else 'error'}.jsonl"
        file = StoredFile(batch.file_id(kind), batch.tenant_id, name, Purpose.OUTPUT, 0, now_unix_us())
        try:
            return await files.put(file, _content(batches, batch, lines, error, num_results, of_errors=kind == "err"))
        except NotFound:  # the input was deleted with its tenant
            return None

    output = await stored("out", num_completed > 0)
    errors = await stored("err", num_completed < batch.num_lines)
    ending = BatchStatus.CANCELLED if was_cancelled else status
    await batches.end(batch, gateway_id, ending, output, errors, (num_completed, num_failed))


async def _content(
    batches: Batches, batch: Batch, lines: Lines, missing: tuple[str, str], num_results: int, *, of_errors: bool
) -> AsyncIterator[bytes]:
    statuses, results = await batches.statuses(batch.batch_id), dict[int, Any]()
    if len(statuses) != num_results:  # another gateway has ended the batch, and deleted them
        raise Conflict(f"batch {batch.batch_id} was ended elsewhere")
    async for number, encoded in lines():
        status, custom_id = statuses.get(number), _IDS.decode(encoded).custom_id
        if status is None:
            if of_errors:
                yield missing_line(batch.batch_id, number, custom_id, missing)
        elif of_errors != (status == 200):
            if number not in results:
                results = await batches.results(batch.batch_id, number, number + _RESULTS_AT_ONCE)
            row = results.pop(number)
            yield result_line(batch.batch_id, number, custom_id, row.request_id, status, row.body)
