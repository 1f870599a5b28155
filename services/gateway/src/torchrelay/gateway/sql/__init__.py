"""The gateway's SQL: tables, engine, migrations, and caches validated by table versions."""
