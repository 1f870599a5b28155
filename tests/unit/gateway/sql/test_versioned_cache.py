from __future__ import annotations

from torchrelay.gateway.sql.versioned_cache import VersionedCache


def test_entry_is_valid_for_its_version_only() -> None:
    cache: VersionedCache[str, int] = VersionedCache(2)
    cache.put("a", 1, 10)
    assert cache.get("a", 1) == 10
    assert cache.get("a", 2) is None
    cache.put("a", 2, 11)
    assert cache.get("a", 2) == 11


def test_cache_evicts_the_least_recently_used() -> None:
    cache: VersionedCache[str, int] = VersionedCache(2)
    cache.put("a", 1, 1)
    cache.put("b", 1, 2)
    cache.get("a", 1)
    cache.put("c", 1, 3)
    assert (cache.get("a", 1), cache.get("b", 1), cache.get("c", 1)) == (1, None, 3)
