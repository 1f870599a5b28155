from __future__ import annotations

from torchrelay.gateway.inference.text.processes.tenant_lru import TenantLru


def cache(max_bytes: int = 40, **owners: str) -> TenantLru[str]:
    """Entries of 10 bytes by key and owner."""
    made: TenantLru[str] = TenantLru(max_bytes)
    for key, owner in owners.items():
        made.add(key, owner, 10)
    return made


def test_a_tenants_own_entries_go_first() -> None:
    """A tenant with many models used to empty the cache of everybody."""
    lru = cache(a="beta", b="acme", c="beta", d="acme")
    assert lru.evict_for(10, "acme") == ["b"]
    assert lru.evict_for(25, "acme") == ["d", "a"]
    assert list(lru) == ["c"] and lru.num_bytes == 10
    assert "c" in lru and "a" not in lru and len(lru) == 1


def test_the_least_recently_used_goes_first_and_what_is_kept_stays() -> None:
    lru = cache(a="acme", b="acme", c="acme")
    lru.use("a", "acme")
    assert lru.evict_for(10, "acme") == []
    assert lru.evict_for(20, "acme", kept={"b"}) == ["c"]
    assert lru.evict_for(1000, "acme", kept={"b"}) == ["a"], "what cannot fit is held alone"


def test_what_several_tenants_use_belongs_to_none() -> None:
    lru = cache(stock="acme", own="acme", other="beta")
    lru.use("stock", "beta")
    lru.use("stock", "acme")
    assert lru.evict_for(20, "acme") == ["own"]
    assert lru.evict_for(30, "acme") == ["other"]
