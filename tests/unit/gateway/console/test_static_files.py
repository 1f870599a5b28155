"""The console's files: small, of the gateway alone, under a strict policy."""

from __future__ import annotations

import re

from torchrelay.gateway.console.static_files import static_files


def test_files_are_small_and_their_policy_allows_files_of_the_gateway_only() -> None:
    assert sum(len(content) for content, _ in static_files().values()) <= 250_000
    for path, (_, headers) in static_files().items():
        policy = dict(headers)[b"content-security-policy"]
        assert b"default-src 'none'" in policy, path
        assert b"unsafe" not in policy, path
        assert b"http" not in policy, path


def test_page_has_no_inline_code_and_modules_import_existing_files() -> None:
    page = static_files()["/console"][0].decode()
    assert re.search(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", page) is None
    imported = re.findall(r'(?:src|href)="(/[^"]+)"', page)
    for path, (content, _) in static_files().items():
        if path.endswith(".js"):
            imported += re.findall(r'from "([^"]+)"', content.decode())
    assert set(imported) <= static_files().keys()
