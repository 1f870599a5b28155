"""A file in a form (multipart/form-data), which is passed on as it arrives."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from torchrelay.common.errors import InvalidRequest

_MAX_FIELD_BYTES = 4096


class FormFile:
    """The file of a form and its other fields, which may stand before or after the file."""

    def __init__(self, content_type: str, body: AsyncIterator[bytes]) -> None:
        """Raises ``InvalidRequest`` unless the body is such a form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            message = "send the file as multipart/form-data, in the fields purpose and file"
            raise InvalidRequest(message, field="Content-Type")
        self.filename = ""
        self.fields: dict[str, str] = {}
        self._body = body
        self._received: list[bytes] = []  # of the file, from the last piece of the body
        self._headers: dict[bytes, bytes] = {}
        self._header = self._value = b""
        self._name, self._field = "", bytearray()
        self._has_file = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers,
                "on_part_data": self._on_data,
                "on_part_end": self._on_part_end,
            },
        )

    async def begin(self) -> None:
        """Reads up to the file, whose name is then known."""
        while not self._has_file:
            if not await self._read():
                raise InvalidRequest("the form has no file", field="file")

    async def content(self) -> AsyncGenerator[bytes]:
        """The bytes of the file, after ``begin``; then the form is read to its end."""
        is_whole = True
        while is_whole:
            pieces, self._received = self._received, []
            for piece in pieces:
                yield piece
            is_whole = await self._read()
        if self.fields.get("purpose") != "batch":
            raise InvalidRequest("purpose must be batch", field="purpose")
        if unknown := self.fields.keys() - {"purpose"}:
            raise InvalidRequest(f"{min(unknown)} is not supported", field=min(unknown))

    async def _read(self) -> bool:
        """Parses the next piece of the body. False: there is none."""
        piece = await anext(self._body, None)
        try:
            if piece:
                self._parser.write(piece)
            elif piece is None:
                self._parser.finalize()
        except MultipartParseError as error:
            raise InvalidRequest(f"the form is malformed: {error}") from error
        return piece is not None

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _on_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._headers, self._field = {}, bytearray()
        self._name = options.get(b"name", b"").decode("utf-8", "replace")[:100]
        if self._name == "file":
            if self._has_file:
                raise InvalidRequest("the form has several files; send one", field="file")
            self._has_file = True
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")[:255] or "file"

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._received.append(data[start:end])
        elif len(self._field) + end - start > _MAX_FIELD_BYTES or len(self.fields) >= 16:
            raise InvalidRequest(f"the field {self._name} of the form is too large", field=self._name)
        else:
            self._field += data[start:end]

    def _on_part_end(self) -> None:
        if self._name != "file":
            self.fields[self._name] = self._field.decode("utf-8", "replace")
