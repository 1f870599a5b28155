from __future__ import annotations

from torchrelay.gateway.inference.text.processes.tenant_lru import TenantLru


def cache(max_bytes: int = 40, **owners: str) -> TenantLru[str]:
    """Entries of 10 bytes by key and owner."""
    made: TenantLru[str] = TenantLru(max_bytes)
    for key, owner in owners.items():
        made.add(key, owner, 10)
    return made


def test_own_entries_are_evicted_first() -> None:
    """A tenant with many models used to empty the cache of everybody."""
    lru = cache(a="beta", b="acme", c="beta", d="acme")
    assert lru.evict_for(10, "acme") == ["b"]
    assert lru.evict_for(25, "acme") == ["d", "a"]
    assert list(lru) == ["c"] and lru.num_bytes == 10
    assert "c" in lru and "a" not in lru and len(lru) == 1


def test_least_recently_used_entries_go_and_kept_ones_stay() -> None:
    lru = cache(a="acme", b="acme", c="acme")
    lru.use("a", "acme")
    assert lru.evict_for(10, "acme") == []
    assert lru.evict_for(20, "acme", kept={"b"}) == ["c"]
    assert lru.evict_for(1000, "acme", kept={"b"}) == ["a"], "what cannot fit is held alone"


def test_entries_used_by_several_tenants_have_no_owner() -> None:
    lru = cache(stock="acme", own="acme", other="beta")
    lru.use("stock", "beta")
    lru.use("stock", "acme")
    assert lru.evict_for(20, "acme") == ["own"]
    assert lru.evict_for(30, "acme") == ["other"]
