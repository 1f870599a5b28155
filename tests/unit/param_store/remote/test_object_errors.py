"""Errors of obstore become the platform's, without a server's text and a URL's secrets."""

from __future__ import annotations

from obstore.exceptions import GenericError, InvalidPathError

from torchrelay.common.errors import InvalidRequest, Unavailable
from torchrelay.param_store.remote.object_errors import is_transient, platform_error

AZURE = (
    "Error performing GET https://a.blob/c/p?sv=2020&sig=SECRET in 5ms - Server returned non-2xx status code: {}: <?xml"
)


def test_error_detail_omits_token_and_server_page() -> None:
    told = platform_error(
        GenericError(AZURE.format("409 Conflict") + "\n<Error/>\nDebug source: SECRET"), "packs/p", "az"
    )
    assert isinstance(told, Unavailable)
    assert told.field == "remote_url"
    assert told.message == (
        "the remote store refuses packs/p: "
        "Error performing GET https://a.blob/c/p in 5ms - Server returned non-2xx status code: 409 Conflict"
    )


def test_error_without_status_is_transient() -> None:
    assert is_transient(GenericError("HTTP error: error sending request"))
    assert [is_transient(GenericError(AZURE.format(status))) for status in (500, 503, 429, 400, 409, 301)] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]


def test_invalid_path_is_invalid_request() -> None:
    told = platform_error(InvalidPathError("Path segment is empty"), "a//b", "s3")
    assert isinstance(told, InvalidRequest)
    assert not is_transient(InvalidPathError("Path segment is empty"))
