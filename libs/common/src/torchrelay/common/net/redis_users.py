"""Users of the Redis server: the gateways alone, with the commands that limits need."""

from __future__ import annotations


def redis_users(user: str, password: str) -> str:
    """Lines for a configuration of Redis 7 or Valkey: no access without the password, and no administration with it."""
    commands = "-@all +@read +@write +@scripting +@connection +time -@admin -@dangerous"
    return f"user default off\nuser {user} on >{password} ~* resetchannels {commands}\n"
